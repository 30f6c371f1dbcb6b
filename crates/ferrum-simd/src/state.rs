//! Recurrent states: the short convolution.
//!
//! Work is divided by channels, so each thread has its part of every state for itself. A token's sum is one chain in the
//! order of the taps, whether its inputs come from the state or from this step: chunks change no bit.

use super::exec::{Exec, Scratch};
use super::isa::Kernel;
use super::math::{for_vectors, load_at, store_at};
use super::memory::SharedMut;
use super::simd::Simd;
use ferrum_types::{CausalConvShape, Result};
use std::ops::Range;

/// A convolution of each channel by itself over `tokens` tokens. `scratch.items` has a sequence each: its first token,
/// how many it has (at least one), and the slot of its state.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn causal_conv1d(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    (weight, bias): (&[f32], Option<&[f32]>),
    (states, out): (&mut [f32], &mut [f32]),
    tokens: usize,
    shape: CausalConvShape,
) -> Result<()> {
    let (row, part) = (shape.states.elements, shape.state_len());
    let fits = shape.offset <= row && part <= row - shape.offset;
    assert!(fits, "the part of a state");
    let (taps, sequences) = scratch.floats_and_items(shape.channels * shape.kernel)?;
    let taps = SharedMut::new(taps);
    let call = CausalConv {
        x,
        weight,
        bias,
        states: SharedMut::new(states),
        out: SharedMut::new(out),
        sequences,
        shape,
    };
    exec.parallel_for(
        shape.channels,
        2 * shape.kernel * (1 + tokens),
        |channels, _| {
            let len = channels.len() * shape.kernel;
            // SAFETY: ranges of channels do not overlap, and their taps lie in the order of the ranges.
            let taps = unsafe { taps.part(channels.start * shape.kernel, len) };
            exec.level.run(Channels {
                call: &call,
                channels,
                taps,
            });
        },
    );
    Ok(())
}

struct CausalConv<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    states: SharedMut<'a, f32>,
    out: SharedMut<'a, f32>,
    /// First token, tokens, and the slot of the state; all with tokens.
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
        let CausalConvShape { states, offset, .. } = self.call.shape;
        for &[start, tokens, slot] in self.call.sequences {
            let state = slot * states.elements + offset;
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
