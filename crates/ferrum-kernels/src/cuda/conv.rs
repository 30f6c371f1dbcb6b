//! Convolutions: a thread makes one output and sums channels, then taps, in order.

use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::CudaAct;
use crate::backend::{
    BackendState, CausalConvShape, Conv1dShape, DeviceBatch, HeadOrder, LinearAttention,
    LinearAttentionRule, LinearAttentionShape, PatchShape, StateShape, check,
};
use ferrum_types::Result;

/// `[c_in, len]` → `[c_out, out_len]`.
pub(super) fn conv1d<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    x: &CudaBuffer<A>,
    weight: &CudaBuffer<f32>,
    bias: Option<&CudaBuffer<f32>>,
    out: &mut CudaBuffer<A>,
    s: Conv1dShape,
) -> Result<()> {
    const OP: &str = "conv1d";
    let total = check::conv1d(x, weight, bias, out, s)?.out;
    let args = [
        out.into(),
        x.into(),
        weight.into(),
        bias.into(),
        Arg::Long(total),
        Arg::Long(s.out_len()),
        Arg::Long(s.len),
        Arg::Long(s.c_in / s.groups),
        Arg::Long(s.c_out / s.groups),
        Arg::Long(s.kernel),
        Arg::Long(s.stride),
        Arg::Long(s.padding),
    ];
    ctx.launch_elementwise(OP, (KernelFile::Conv, "conv1d"), total, args)
}

/// `[channels, height, width]` → `[patches, out]`.
pub(super) fn conv2d_patch<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    image: &CudaBuffer<A>,
    weight: &CudaBuffer<f32>,
    bias: Option<&CudaBuffer<f32>>,
    rows: &mut CudaBuffer<A>,
    s: PatchShape,
) -> Result<()> {
    const OP: &str = "conv2d_patch";
    let total = check::conv2d_patch(image, weight, bias, rows, s)?.out;
    let args = [
        rows.into(),
        image.into(),
        weight.into(),
        bias.into(),
        Arg::Long(total),
        Arg::Long(s.out),
        Arg::Long(s.channels),
        Arg::Long(s.height),
        Arg::Long(s.width),
        Arg::Long(s.patch),
    ];
    ctx.launch_elementwise(OP, (KernelFile::Conv, "conv2d_patch"), total, args)
}

impl<A: CudaAct> BackendState for CudaBackend<A> {
    fn records_states(&self) -> bool {
        true
    }

    fn copy_states(
        ctx: &mut CudaContext<A>,
        states: &mut CudaBuffer<f32>,
        pairs: &[(usize, usize)],
        shape: StateShape,
    ) -> Result<()> {
        const OP: &str = "copy_states";
        check::copy_states(states, pairs, shape)?;
        let row = shape.elements;
        for &(from, to) in pairs.iter().filter(|(from, to)| from != to) {
            let (from, to) = (states.at(from * row), states.at(to * row));
            ctx.stream().copy(OP, to, from, row * 4)?;
        }
        Ok(())
    }

    fn causal_conv1d(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        (weight, bias): (&CudaBuffer<f32>, Option<&CudaBuffer<f32>>),
        states: &mut CudaBuffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut CudaBuffer<A>,
        shape: CausalConvShape,
    ) -> Result<()> {
        const OP: &str = "causal_conv1d";
        let weights = (weight, bias);
        let lens = check::causal_conv1d::<Self>(x, weights, states, batch, out, shape)?;
        let CausalConvShape {
            channels,
            kernel,
            states: StateShape { slots, elements },
            offset,
        } = shape;
        let seqs = batch.shape.seqs;
        let [starts, of_seq] = [&batch.query_starts, &batch.state_slots].map(Arg::from);
        let state = [Arg::Int(slots), Arg::Long(elements), Arg::Long(offset)];
        let args = [
            out.into(),
            x.into(),
            weight.into(),
            bias.into(),
            (&*states).into(),
            starts,
            of_seq,
            Arg::Long(lens.x),
            Arg::Long(channels),
            Arg::Int(kernel),
            Arg::Int(seqs),
            state[0],
            state[1],
            state[2],
        ];
        ctx.launch_elementwise(OP, (KernelFile::Conv, "causal_conv1d"), lens.x, args)?;
        if shape.state_len() == 0 {
            return Ok(());
        }
        let total = check::elements(OP, &[seqs, channels])?;
        let args = [
            states.into(),
            x.into(),
            starts,
            of_seq,
            Arg::Long(total),
            Arg::Long(channels),
            Arg::Int(kernel - 1),
            Arg::Int(batch.shape.tokens),
            state[0],
            state[1],
            state[2],
        ];
        ctx.launch_elementwise(OP, (KernelFile::Conv, "causal_conv1d_state"), total, args)
    }

    fn linear_attention(
        ctx: &mut CudaContext<A>,
        inputs: LinearAttention<'_, Self>,
        states: &mut CudaBuffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut CudaBuffer<A>,
        shape: LinearAttentionShape,
    ) -> Result<()> {
        const OP: &str = "linear_attention";
        // Of more columns, threads have several.
        const MAX_THREADS: usize = 256;
        check::linear_attention::<Self>(&inputs, states, batch, out, shape)?;
        let heads = check::elements(OP, &[batch.shape.seqs, shape.value_heads])?;
        // Kernels that keep the state in registers, and columns of their blocks.
        let in_registers = match shape.key_dim {
            0..=32 => Some(("linear_attention_32", 32)),
            33..=64 => Some(("linear_attention_64", 32)),
            65..=128 => Some(("linear_attention_128", 32)),
            129..=256 => Some(("linear_attention_256", 16)),
            _ => None,
        };
        let (kernel, grid) = match in_registers {
            Some((kernel, columns)) => {
                let blocks = check::elements(OP, &[heads, shape.value_dim.div_ceil(columns)])?;
                (kernel, (blocks, 128, 0))
            }
            None => {
                let threads = shape.value_dim.next_multiple_of(32).min(MAX_THREADS);
                let shared = check::elements(OP, &[2 * size_of::<f32>(), shape.key_dim])?;
                ("linear_attention_any", (heads, threads as u32, shared))
            }
        };
        let args = [
            out.into(),
            inputs.x.into(),
            inputs.gates.into(),
            inputs.params.into(),
            states.into(),
            (&batch.query_starts).into(),
            (&batch.state_slots).into(),
            Arg::Int(shape.key_heads),
            Arg::Int(shape.value_heads),
            Arg::Int(shape.key_dim),
            Arg::Int(shape.value_dim),
            Arg::Int(batch.shape.tokens),
            Arg::Int(shape.states.slots),
            Arg::Long(shape.states.elements),
            Arg::Long(shape.offset),
            Arg::Int(usize::from(shape.rule == LinearAttentionRule::GatedDelta)),
            Arg::Int(usize::from(shape.order == HeadOrder::Interleaved)),
        ];
        ctx.launch(OP, (KernelFile::Linear, kernel), grid, args)
    }
}
