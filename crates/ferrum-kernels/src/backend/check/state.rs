//! Recurrent states.

use super::{elements, kv, len, require};
use crate::backend::{
    Act, Backend, CausalConvShape, DeviceBatch, DeviceBuffer, LinearAttention,
    LinearAttentionShape, StateShape,
};
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

/// Elements of the buffers of linear attention.
#[derive(Clone, Copy, Debug)]
pub struct LinearAttentionLen {
    /// `x`.
    pub x: usize,
    /// The gates.
    pub gates: usize,
    /// The parameters.
    pub params: usize,
    /// The states.
    pub states: usize,
    /// `out`.
    pub out: usize,
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

/// [`linear_attention`](crate::BackendState::linear_attention).
pub fn linear_attention<B: Backend>(
    inputs: &LinearAttention<'_, B>,
    states: &B::Buffer<f32>,
    batch: &DeviceBatch<B>,
    out: &Act<B>,
    shape: LinearAttentionShape,
) -> Result<LinearAttentionLen> {
    let op = "linear_attention";
    let LinearAttentionShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        states: StateShape {
            slots,
            elements: row,
        },
        offset,
        ..
    } = shape;
    require(
        op,
        key_heads > 0 && value_heads > 0 && value_heads.is_multiple_of(key_heads),
        || format!("{value_heads} value heads over {key_heads} key heads"),
    )?;
    require(op, key_dim > 0 && value_dim > 0, || {
        format!("keys of {key_dim} and values of {value_dim} elements, expected at least 1")
    })?;
    let part = elements(op, &[value_heads, key_dim, value_dim])?;
    require(op, offset <= row && part <= row - offset, || {
        format!("{part} elements from {offset} on do not fit a state of {row}")
    })?;
    let (keys, values) = (
        elements(op, &[2, key_heads, key_dim])?,
        elements(op, &[value_heads, value_dim])?,
    );
    let row_dim = keys.saturating_add(values);
    let tokens = batch.shape.tokens;
    let lens = LinearAttentionLen {
        x: elements(op, &[tokens, row_dim])?,
        gates: elements(op, &[tokens, shape.gate_dim()])?,
        params: elements(op, &[3, value_heads])?,
        states: elements(op, &[slots, row])?,
        out: elements(op, &[tokens, values])?,
    };
    len(op, "x", inputs.x, lens.x)?;
    len(op, "gates", inputs.gates, lens.gates)?;
    len(op, "params", inputs.params, lens.params)?;
    len(op, "states", states, lens.states)?;
    len(op, "out", out, lens.out)?;
    kv::sequences(op, batch)?;
    len(op, "state_slots", &batch.state_slots, batch.shape.seqs)?;
    Ok(lens)
}
