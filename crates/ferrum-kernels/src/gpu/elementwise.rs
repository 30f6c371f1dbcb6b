//! Ops on each element by itself: one lane, one element.

use super::buffer::GpuBuffer;
use super::context::{GpuContext, LANES, P};
use super::pipeline::Kernel;
use crate::backend::{Activation, GeluKind, RowShape, check};
use ferrum_types::Result;

pub(super) static UNARY: Kernel = Kernel {
    name: "unary",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/activation.wgsl"),
        include_str!("shaders/unary.wgsl"),
    ],
    access: "rw",
    constants: &["KIND"],
};
pub(super) static GATED: Kernel = Kernel {
    name: "gated",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/activation.wgsl"),
        include_str!("shaders/gated.wgsl"),
    ],
    access: "rw",
    constants: &["KIND"],
};
pub(super) static SOFTCAP: Kernel = Kernel {
    name: "softcap",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/activation.wgsl"),
        include_str!("shaders/softcap.wgsl"),
    ],
    access: "w",
    constants: &[],
};
pub(super) static SCALE: Kernel = Kernel {
    name: "scale",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/scale.wgsl"),
    ],
    access: "w",
    constants: &[],
};
pub(super) static SCALED_ADD: Kernel = Kernel {
    name: "scaled_add",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/scaled_add.wgsl"),
    ],
    access: "wr",
    constants: &[],
};
pub(super) static UNARY_MUL: Kernel = Kernel {
    name: "unary_mul",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/activation.wgsl"),
        include_str!("shaders/unary_mul.wgsl"),
    ],
    access: "rrw",
    constants: &["KIND"],
};
pub(super) static ADD_BIAS: Kernel = Kernel {
    name: "add_bias",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/add_bias.wgsl"),
    ],
    access: "wr",
    constants: &[],
};

/// The number of an activation in `activation.wgsl`.
pub(super) fn number(activation: Activation) -> u32 {
    match activation {
        Activation::Gelu(GeluKind::Exact) => 0,
        Activation::Gelu(GeluKind::Tanh) => 1,
        Activation::Silu => 2,
        Activation::Tanh => 3,
        Activation::Sigmoid => 5,
        Activation::Identity => 4,
    }
}

/// `out = activation(x)`, or `out = activation(x) · y`.
pub(super) fn activate(
    ctx: &mut GpuContext,
    activation: Activation,
    (x, y): (&GpuBuffer<f32>, Option<&GpuBuffer<f32>>),
    out: &mut GpuBuffer<f32>,
    len: usize,
) -> Result<()> {
    const OP: &str = "activate";
    check::activate(OP, x, y, out, len)?;
    let (constants, params) = ([number(activation)], [P::U(len)]);
    let groups = len.div_ceil(LANES);
    match y {
        None => ctx.run(
            OP,
            (&UNARY, &constants),
            [x.into(), out.into()],
            &params,
            groups,
        ),
        Some(y) => ctx.run(
            OP,
            (&UNARY_MUL, &constants),
            [x.into(), y.into(), out.into()],
            &params,
            groups,
        ),
    }
}

/// `out[rows, dim] = activation(gate) · up` for rows `[gate | up]`.
pub(super) fn gated(
    ctx: &mut GpuContext,
    op: &'static str,
    activation: Activation,
    gate_up: &GpuBuffer<f32>,
    out: &mut GpuBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    let total = check::gated(op, gate_up, out, shape)?;
    ctx.run(
        op,
        (&GATED, &[number(activation)]),
        [gate_up.into(), out.into()],
        &[P::U(total), P::U(shape.dim)],
        total.div_ceil(LANES),
    )
}

/// `x[r, :] += bias`.
pub(super) fn add_bias(
    ctx: &mut GpuContext,
    x: &mut GpuBuffer<f32>,
    bias: &GpuBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "add_bias";
    let total = check::add_bias(x, bias, shape)?;
    ctx.run(
        OP,
        (&ADD_BIAS, &[]),
        [x.into(), bias.into()],
        &[P::U(total), P::U(shape.dim)],
        total.div_ceil(LANES),
    )
}

/// `x += scale · y`.
pub(super) fn scaled_add(
    ctx: &mut GpuContext,
    op: &'static str,
    x: &mut GpuBuffer<f32>,
    y: &GpuBuffer<f32>,
    scale: f32,
    len: usize,
) -> Result<()> {
    check::zip_inplace(op, x, y, len)?;
    ctx.run(
        op,
        (&SCALED_ADD, &[]),
        [x.into(), y.into()],
        &[P::U(len), P::F(scale)],
        len.div_ceil(LANES),
    )
}

/// `x = x · scale`.
pub(super) fn scale_inplace(
    ctx: &mut GpuContext,
    x: &mut GpuBuffer<f32>,
    scale: f32,
    len: usize,
) -> Result<()> {
    const OP: &str = "scale_inplace";
    check::inplace(OP, x, len)?;
    ctx.run(
        OP,
        (&SCALE, &[]),
        [x.into()],
        &[P::U(len), P::F(scale)],
        len.div_ceil(LANES),
    )
}

/// `x = cap · tanh(x / cap)`.
pub(super) fn softcap(
    ctx: &mut GpuContext,
    x: &mut GpuBuffer<f32>,
    cap: f32,
    len: usize,
) -> Result<()> {
    const OP: &str = "softcap";
    check::softcap(x, cap, len)?;
    ctx.run(
        OP,
        (&SOFTCAP, &[]),
        [x.into()],
        &[P::U(len), P::F(cap)],
        len.div_ceil(LANES),
    )
}

/// `out[..len] = 0`, for ops over nothing (`k = 0`, a table without rows).
pub(super) fn zero(ctx: &mut GpuContext, out: &mut GpuBuffer<f32>, len: usize) {
    ctx.clear(&out.raw, len as u64 * 4);
}
