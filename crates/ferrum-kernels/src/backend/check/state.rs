//! Recurrent states.

use super::{elements, kv, len, require};
use crate::backend::{Act, Backend, CausalConvShape, DeviceBatch, DeviceBuffer, StateShape};
use ferrum_types::Result;

/// Elements of a causal convolution's buffers.
#[derive(Clone, Copy, Debug)]
pub struct CausalConvLen {
    /// `x`, and `out`.
    pub x: usize,
    /// The weight.
    pub weight: usize,
    /// The states.
    pub states: usize,
}

/// [`copy_states`](crate::BackendState::copy_states): elements of the states.
pub fn copy_states(
    states: &impl DeviceBuffer,
    pairs: &[(usize, usize)],
    shape: StateShape,
) -> Result<usize> {
    let op = "copy_states";
    let total = elements(op, &[shape.slots, shape.elements])?;
    len(op, "states", states, total)?;
    let outside = pairs.iter().find(|(from, to)| *from.max(to) >= shape.slots);
    require(op, outside.is_none(), || {
        format!("slots {:?} of {}", outside, shape.slots)
    })?;
    Ok(total)
}

/// [`causal_conv1d`](crate::BackendState::causal_conv1d).
pub fn causal_conv1d<B: Backend>(
    x: &Act<B>,
    (weight, bias): (&B::Buffer<f32>, Option<&B::Buffer<f32>>),
    states: &B::Buffer<f32>,
    batch: &DeviceBatch<B>,
    out: &Act<B>,
    shape: CausalConvShape,
) -> Result<CausalConvLen> {
    let op = "causal_conv1d";
    let CausalConvShape {
        channels,
        kernel,
        states: StateShape {
            slots,
            elements: row,
        },
        offset,
    } = shape;
    require(op, kernel > 0, || "kernel is 0, expected at least 1".into())?;
    let part = elements(op, &[kernel - 1, channels])?;
    require(op, offset <= row && part <= row - offset, || {
        format!("{part} elements from {offset} on do not fit a state of {row}")
    })?;
    let lens = CausalConvLen {
        x: elements(op, &[batch.shape.tokens, channels])?,
        weight: elements(op, &[channels, kernel])?,
        states: elements(op, &[slots, row])?,
    };
    len(op, "x", x, lens.x)?;
    len(op, "weight", weight, lens.weight)?;
    if let Some(bias) = bias {
        len(op, "bias", bias, channels)?;
    }
    len(op, "states", states, lens.states)?;
    len(op, "out", out, lens.x)?;
    kv::sequences(op, batch)?;
    len(op, "state_slots", &batch.state_slots, batch.shape.seqs)?;
    Ok(lens)
}
