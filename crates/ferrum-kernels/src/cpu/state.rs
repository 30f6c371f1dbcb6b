//! Recurrent states: copies of them, the short convolution and linear attention.

use super::{CpuBackend, CpuContext};
use crate::backend::{
    BackendState, CausalConvShape, DeviceBatch, LinearAttention, LinearAttentionShape, StateShape,
    check,
};
use ferrum_simd::exec::Scratch;
use ferrum_simd::linear_attention::{self, LinearAttentionInputs};
use ferrum_simd::memory::CpuBuffer;
use ferrum_simd::state;
use ferrum_types::Result;

impl BackendState for CpuBackend {
    fn copy_states(
        _: &mut CpuContext,
        states: &mut CpuBuffer<f32>,
        pairs: &[(usize, usize)],
        shape: StateShape,
    ) -> Result<()> {
        check::copy_states(states, pairs, shape)?;
        let len = shape.elements;
        for (from, to) in pairs {
            let from = from * len..(from + 1) * len;
            states.as_mut_slice().copy_within(from, to * len);
        }
        Ok(())
    }

    fn causal_conv1d(
        ctx: &mut CpuContext,
        x: &CpuBuffer<f32>,
        weight: (&CpuBuffer<f32>, Option<&CpuBuffer<f32>>),
        states: &mut CpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut CpuBuffer<f32>,
        shape: CausalConvShape,
    ) -> Result<()> {
        let op = "causal_conv1d";
        let lens = check::causal_conv1d::<Self>(x, weight, states, batch, out, shape)?;
        let (exec, scratch) = ctx.parts();
        list_sequences(op, scratch, batch, shape.states.slots)?;
        let weight = (
            &weight.0.as_slice()[..lens.weight],
            weight.1.map(CpuBuffer::as_slice),
        );
        let states = &mut states.as_mut_slice()[..lens.states];
        let to = (states, &mut out.as_mut_slice()[..lens.x]);
        let (x, tokens) = (&x.as_slice()[..lens.x], batch.shape.tokens);
        state::causal_conv1d(exec, scratch, x, weight, to, tokens, shape)
    }

    fn linear_attention(
        ctx: &mut CpuContext,
        inputs: LinearAttention<'_, Self>,
        states: &mut CpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut CpuBuffer<f32>,
        shape: LinearAttentionShape,
    ) -> Result<()> {
        let op = "linear_attention";
        let lens = check::linear_attention::<Self>(&inputs, states, batch, out, shape)?;
        let (exec, scratch) = ctx.parts();
        list_sequences(op, scratch, batch, shape.states.slots)?;
        let inputs = LinearAttentionInputs {
            x: &inputs.x.as_slice()[..lens.x],
            gates: &inputs.gates.as_slice()[..lens.gates],
            params: &inputs.params.as_slice()[..lens.params],
        };
        let states = &mut states.as_mut_slice()[..lens.states];
        let to = (states, &mut out.as_mut_slice()[..lens.out]);
        linear_attention::linear_attention(exec, scratch, &inputs, to, shape)
    }
}

/// Makes the items of `scratch` the sequences of a batch that have tokens: first token, tokens, and the slot.
fn list_sequences(
    op: &'static str,
    scratch: &mut Scratch,
    batch: &DeviceBatch<CpuBackend>,
    slots: usize,
) -> Result<()> {
    scratch.items.clear();
    let lists = (batch.query_starts.as_slice(), batch.state_slots.as_slice());
    for s in 0..batch.shape.seqs {
        let (tokens, slot) = check::state_sequence(op, batch.shape, lists, slots, s)?;
        if !tokens.is_empty() {
            scratch.items.push([tokens.start, tokens.len(), slot]);
        }
    }
    Ok(())
}
