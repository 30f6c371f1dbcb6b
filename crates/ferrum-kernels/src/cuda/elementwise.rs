//! Ops on single elements.

use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::{CudaAct, of_role, of_roles};
use crate::backend::check::{self, elements};
use crate::backend::{Activation, GeluKind, RowShape};
use ferrum_types::{FloatElement, Result};

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
pub(super) fn activate<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    activation: Activation,
    (x, y): (&CudaBuffer<T>, Option<&CudaBuffer<T>>),
    out: &mut CudaBuffer<T>,
    len: usize,
) -> Result<()> {
    const OP: &str = "activate";
    check::activate(OP, x, y, out, len)?;
    let (kind, total) = (Arg::Int(number(activation)), Arg::Long(len));
    match y {
        None => {
            let args = [out.into(), x.into(), kind, total];
            let kernel = of_role::<A, T>(OP, ["unary_act", "unary_f32"])?;
            ctx.launch_elementwise(OP, (KernelFile::Elementwise, kernel), len, args)
        }
        Some(y) => {
            let args = [out.into(), x.into(), y.into(), kind, total];
            let kernel = of_role::<A, T>(OP, ["unary_mul_act", "unary_mul_f32"])?;
            ctx.launch_elementwise(OP, (KernelFile::Elementwise, kernel), len, args)
        }
    }
}

/// `out[rows, dim] = activation(gate) · up` for rows `[gate | up]`.
pub(super) fn gated<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    activation: Activation,
    gate_up: &CudaBuffer<A>,
    out: &mut CudaBuffer<A>,
    shape: RowShape,
) -> Result<()> {
    const THREADS: usize = 128;
    if check::gated(op, gate_up, out, shape)? == 0 {
        return Ok(());
    }
    let blocks = shape.dim.div_ceil(8 * THREADS);
    let args = [
        out.into(),
        gate_up.into(),
        Arg::Int(number(activation)),
        Arg::Int(blocks),
        Arg::Int(shape.dim),
    ];
    let grid = (elements(op, &[shape.rows, blocks])?, THREADS as u32, 0);
    ctx.launch(op, (KernelFile::Elementwise, "gated"), grid, args)
}

/// `x[r, :] += bias`.
pub(super) fn add_bias<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    x: &mut CudaBuffer<T>,
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
    let kernel = of_role::<A, T>(OP, ["add_bias_act", "add_bias_f32"])?;
    ctx.launch_elementwise(OP, (KernelFile::Elementwise, kernel), total, args)
}

/// `x += scale · y`.
pub(super) fn scaled_add<A: CudaAct, T: FloatElement, U: FloatElement>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &mut CudaBuffer<T>,
    y: &CudaBuffer<U>,
    scale: f32,
    len: usize,
) -> Result<()> {
    check::zip_inplace(op, x, y, len)?;
    let args = [x.into(), y.into(), Arg::Float(scale), Arg::Long(len)];
    let kernel = of_roles::<A, T, U>(
        op,
        [
            ["scaled_add_act_act", "scaled_add_act_f32"],
            ["scaled_add_f32_act", "scaled_add_f32_f32"],
        ],
    )?;
    ctx.launch_elementwise(op, (KernelFile::Elementwise, kernel), len, args)
}

/// `x = x · scale`.
pub(super) fn scale_inplace<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    x: &mut CudaBuffer<T>,
    scale: f32,
    len: usize,
) -> Result<()> {
    const OP: &str = "scale_inplace";
    check::inplace(OP, x, len)?;
    let args = [x.into(), Arg::Float(scale), Arg::Long(len)];
    let kernel = of_role::<A, T>(OP, ["scale_act", "scale_f32"])?;
    ctx.launch_elementwise(OP, (KernelFile::Elementwise, kernel), len, args)
}

/// `x = cap · tanh(x / cap)`.
pub(super) fn softcap<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    x: &mut CudaBuffer<T>,
    cap: f32,
    len: usize,
) -> Result<()> {
    const OP: &str = "softcap";
    check::softcap(x, cap, len)?;
    let args = [x.into(), Arg::Float(cap), Arg::Long(len)];
    let kernel = of_role::<A, T>(OP, ["softcap_act", "softcap_f32"])?;
    ctx.launch_elementwise(OP, (KernelFile::Elementwise, kernel), len, args)
}
