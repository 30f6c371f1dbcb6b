//! Norms: one workgroup for each row; 64 lanes stride over it and their sums are added in lane order.

use super::buffer::GpuBuffer;
use super::context::{GpuContext, P};
use super::pipeline::Kernel;
use crate::backend::{NormShape, check};
use ferrum_types::Result;

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

/// A workgroup for each row, and none where rows have nothing.
fn groups(total: usize, shape: NormShape) -> usize {
    if total == 0 { 0 } else { shape.rows }
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
    let groups = groups(check::rms_norm(x, weight, out, shape)?, shape);
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
    let total = check::fused_add_rms_norm(residual, x, weight, out, shape)?;
    let groups = groups(total, shape);
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
    let groups = groups(check::layer_norm(x, weight, bias, out, shape)?, shape);
    let [rows, dim, eps] = params(shape);
    ctx.run(
        OP,
        (&LAYER_NORM, &[]),
        [x.into(), weight.into(), bias.into(), out.into()],
        &[rows, dim, eps, P::U(usize::from(bias.is_some()))],
        groups,
    )
}
