//! Ops on single elements.

use super::buffer::CudaBuffer;
use super::compiler::In;
use super::context::{Arg, CudaContext};
use crate::backend::{Activation, GeluKind, RowShape, check};
use ferrum_types::Result;

/// The number of an activation in `common.cuh`.
pub(super) fn number(activation: Activation) -> usize {
    match activation {
        Activation::Gelu(GeluKind::Exact) => 0,
        Activation::Gelu(GeluKind::Tanh) => 1,
        Activation::Silu => 2,
        Activation::Tanh => 3,
        Activation::Identity => 4,
        Activation::Sigmoid => 5,
    }
}

/// `out = activation(x)`, or `out = activation(x) · y`.
pub(super) fn activate(
    ctx: &mut CudaContext,
    activation: Activation,
    (x, y): (&CudaBuffer<f32>, Option<&CudaBuffer<f32>>),
    out: &mut CudaBuffer<f32>,
    len: usize,
) -> Result<()> {
    const OP: &str = "activate";
    check::activate(OP, x, y, out, len)?;
    let (kind, total) = (Arg::Int(number(activation)), Arg::Long(len));
    match y {
        None => {
            let args = [out.into(), x.into(), kind, total];
            ctx.each(OP, (In::Elementwise, "unary"), len, args)
        }
        Some(y) => {
            let args = [out.into(), x.into(), y.into(), kind, total];
            ctx.each(OP, (In::Elementwise, "unary_mul"), len, args)
        }
    }
}

/// `out[rows, dim] = activation(gate) · up` for rows `[gate | up]`.
pub(super) fn gated(
    ctx: &mut CudaContext,
    op: &'static str,
    activation: Activation,
    gate_up: &CudaBuffer<f32>,
    out: &mut CudaBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    let total = check::gated(op, gate_up, out, shape)?;
    let args = [
        out.into(),
        gate_up.into(),
        Arg::Int(number(activation)),
        Arg::Long(total),
        Arg::Long(shape.dim),
    ];
    ctx.each(op, (In::Elementwise, "gated"), total, args)
}

/// `x[r, :] += bias`.
pub(super) fn add_bias(
    ctx: &mut CudaContext,
    x: &mut CudaBuffer<f32>,
    bias: &CudaBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "add_bias";
    let total = check::add_bias(x, bias, shape)?;
    let args = [
        x.into(),
        bias.into(),
        Arg::Long(total),
        Arg::Long(shape.dim),
    ];
    ctx.each(OP, (In::Elementwise, "add_bias"), total, args)
}

/// `x += scale · y`.
pub(super) fn scaled_add(
    ctx: &mut CudaContext,
    op: &'static str,
    x: &mut CudaBuffer<f32>,
    y: &CudaBuffer<f32>,
    scale: f32,
    len: usize,
) -> Result<()> {
    check::zip_inplace(op, x, y, len)?;
    let args = [x.into(), y.into(), Arg::Float(scale), Arg::Long(len)];
    ctx.each(op, (In::Elementwise, "scaled_add"), len, args)
}

/// `x = x · scale`.
pub(super) fn scale_inplace(
    ctx: &mut CudaContext,
    x: &mut CudaBuffer<f32>,
    scale: f32,
    len: usize,
) -> Result<()> {
    const OP: &str = "scale_inplace";
    check::inplace(OP, x, len)?;
    let args = [x.into(), Arg::Float(scale), Arg::Long(len)];
    ctx.each(OP, (In::Elementwise, "scale"), len, args)
}

/// `x = cap · tanh(x / cap)`.
pub(super) fn softcap(
    ctx: &mut CudaContext,
    x: &mut CudaBuffer<f32>,
    cap: f32,
    len: usize,
) -> Result<()> {
    const OP: &str = "softcap";
    check::softcap(x, cap, len)?;
    let args = [x.into(), Arg::Float(cap), Arg::Long(len)];
    ctx.each(OP, (In::Elementwise, "softcap"), len, args)
}
