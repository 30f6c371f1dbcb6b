//! Recurrent states: copies of them, and the short convolution.
//!
//! Work is divided by channels, so each thread has its part of every state for itself. A token's sum is one chain in the
//! order of the taps, whether its inputs come from the state or from this step: chunks change no bit.

use super::buffer::{CpuBuffer, SharedMut};
use super::isa::Kernel;
use super::math::{for_vectors, load_at, store_at};
use super::simd::Simd;
use super::{CpuBackend, CpuContext};
use crate::backend::{BackendState, CausalConvShape, DeviceBatch, StateShape, check};
use ferrum_types::Result;
use std::ops::Range;

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
        scratch.items.clear();
        let lists = (batch.query_starts.as_slice(), batch.state_slots.as_slice());
        for s in 0..batch.shape.seqs {
            let slots = shape.states.slots;
            let (tokens, slot) = check::state_sequence(op, batch.shape, lists, slots, s)?;
            if !tokens.is_empty() {
                let state = slot * shape.states.elements + shape.offset;
                scratch.items.push([tokens.start, tokens.len(), state]);
            }
        }
        let (taps, sequences) = scratch.both(shape.channels * shape.kernel)?;
        let taps = SharedMut::new(taps);
        let call = CausalConv {
            x: &x.as_slice()[..lens.x],
            weight: &weight.0.as_slice()[..lens.weight],
            bias: weight.1.map(CpuBuffer::as_slice),
            states: SharedMut::new(&mut states.as_mut_slice()[..lens.states]),
            out: SharedMut::new(&mut out.as_mut_slice()[..lens.x]),
            sequences,
            shape,
        };
        let cost = 2 * shape.kernel * (1 + batch.shape.tokens);
        exec.spread(shape.channels, cost, |channels, _| {
            let len = channels.len() * shape.kernel;
            // SAFETY: ranges of channels do not overlap, and their taps lie in the order of the ranges.
            let taps = unsafe { taps.part(channels.start * shape.kernel, len) };
            exec.level.run(Channels {
                call: &call,
                channels,
                taps,
            });
        });
        Ok(())
    }
}

struct CausalConv<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    states: SharedMut<'a, f32>,
    out: SharedMut<'a, f32>,
    /// First token, tokens, and where the state begins; all with tokens.
    sequences: &'a [[usize; 3]],
    shape: CausalConvShape,
}

/// Some channels of all sequences.
struct Channels<'a> {
    call: &'a CausalConv<'a>,
    channels: Range<usize>,
    /// Room for their weights, `[kernel][channels]`.
    taps: &'a mut [f32],
}

impl Kernel for Channels<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let CausalConvShape {
            channels: row,
            kernel,
            ..
        } = self.call.shape;
        let (first, count) = (self.channels.start, self.channels.len());
        let weight = &self.call.weight[first * kernel..][..count * kernel];
        for (c, weight) in weight.chunks_exact(kernel).enumerate() {
            for (tap, weight) in weight.iter().enumerate() {
                self.taps[tap * count + c] = *weight;
            }
        }
        let kept = kernel - 1;
        for &[start, tokens, state] in self.call.sequences {
            // SAFETY: no other task has these channels, and each row is looked at by itself.
            let kept_row =
                |r: usize| unsafe { self.call.states.part(state + r * row + first, count) };
            let new_row = |t: usize| &self.call.x[(start + t) * row + first..][..count];
            for t in 0..tokens {
                // SAFETY: no other task has these channels of any token.
                let out = unsafe { self.call.out.part((start + t) * row + first, count) };
                match self.call.bias {
                    Some(bias) => out.copy_from_slice(&bias[first..][..count]),
                    None => out.fill(0.0),
                }
                for (tap, weight) in self.taps.chunks_exact(count).enumerate() {
                    let inputs = match (t + tap).checked_sub(kept) {
                        Some(t) => new_row(t),
                        None => &*kept_row(t + tap),
                    };
                    for_vectors(
                        count,
                        #[inline(always)]
                        |at, _| {
                            let sum = load_at(s, out, at);
                            let sum = s.fma(load_at(s, weight, at), load_at(s, inputs, at), sum);
                            store_at(s, out, at, sum);
                        },
                    );
                }
            }
            // Each row comes from one behind it, or from this step.
            for r in 0..kept {
                let inputs = match (tokens + r).checked_sub(kept) {
                    Some(t) => new_row(t),
                    None => &*kept_row(tokens + r),
                };
                kept_row(r).copy_from_slice(inputs);
            }
        }
    }
}
