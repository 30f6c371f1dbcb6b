//! Norms: one workgroup for each row; 64 lanes stride over it and their sums are added in lane order.

use super::buffer::GpuBuffer;
use super::context::{GpuContext, P};
use super::pipeline::Kernel;
use super::shape::product;
use crate::backend::{DeviceBuffer, NormShape};
use ferrum_types::{Error, Result};

pub(super) static RMS_NORM: Kernel = Kernel {
    name: "rms_norm",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/lane_sum.wgsl"),
        include_str!("shaders/rms_norm.wgsl"),
    ],
    access: "rrw",
    constants: &[],
};
pub(super) static ADD_RMS_NORM: Kernel = Kernel {
    name: "add_rms_norm",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/lane_sum.wgsl"),
        include_str!("shaders/add_rms_norm.wgsl"),
    ],
    access: "wrrw",
    constants: &[],
};
pub(super) static LAYER_NORM: Kernel = Kernel {
    name: "layer_norm",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/lane_sum.wgsl"),
        include_str!("shaders/layer_norm.wgsl"),
    ],
    access: "rrrw",
    constants: &[],
};

/// Checks the row buffers and the weight; returns the number of workgroups.
fn check(
    op: &'static str,
    rows: &[(&'static str, usize)],
    weight: &GpuBuffer<f32>,
    shape: NormShape,
) -> Result<usize> {
    let total = product(op, &[shape.rows, shape.dim])?;
    for (what, found) in rows {
        Error::check_len(op, what, *found, total)?;
    }
    Error::check_len(op, "weight", weight.len(), shape.dim)?;
    Ok(if total == 0 { 0 } else { shape.rows })
}

fn params(shape: NormShape) -> [P; 3] {
    [P::U(shape.rows), P::U(shape.dim), P::F(shape.eps)]
}

/// `out = x / √(mean(x²) + eps) · weight`.
pub(super) fn rms_norm(
    ctx: &mut GpuContext,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    out: &mut GpuBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "rms_norm";
    let groups = check(OP, &[("x", x.len()), ("out", out.len())], weight, shape)?;
    ctx.run(
        OP,
        (&RMS_NORM, &[]),
        [x.into(), weight.into(), out.into()],
        &params(shape),
        groups,
    )
}

/// `residual += x; out = rms_norm(residual)`.
pub(super) fn fused_add_rms_norm(
    ctx: &mut GpuContext,
    residual: &mut GpuBuffer<f32>,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    out: &mut GpuBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "fused_add_rms_norm";
    let rows = [
        ("residual", residual.len()),
        ("x", x.len()),
        ("out", out.len()),
    ];
    let groups = check(OP, &rows, weight, shape)?;
    ctx.run(
        OP,
        (&ADD_RMS_NORM, &[]),
        [residual.into(), x.into(), weight.into(), out.into()],
        &params(shape),
        groups,
    )
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(super) fn layer_norm(
    ctx: &mut GpuContext,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    bias: Option<&GpuBuffer<f32>>,
    out: &mut GpuBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "layer_norm";
    let groups = check(OP, &[("x", x.len()), ("out", out.len())], weight, shape)?;
    if let Some(bias) = bias {
        Error::check_len(OP, "bias", bias.len(), shape.dim)?;
    }
    let [rows, dim, eps] = params(shape);
    ctx.run(
        OP,
        (&LAYER_NORM, &[]),
        [x.into(), weight.into(), bias.into(), out.into()],
        &[rows, dim, eps, P::U(usize::from(bias.is_some()))],
        groups,
    )
}
