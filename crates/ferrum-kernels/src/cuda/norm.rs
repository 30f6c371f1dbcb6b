//! Norms: a block for each row.

use super::buffer::CudaBuffer;
use super::compiler::In;
use super::context::{Arg, CudaContext};
use crate::backend::{NormShape, check};
use ferrum_types::Result;

/// A block for each row, and none where rows have nothing.
fn grid(total: usize, shape: NormShape) -> (usize, u32, usize) {
    (if total == 0 { 0 } else { shape.rows }, 256, 0)
}

/// `out = x / √(mean(x²) + eps) · weight`.
pub(super) fn rms_norm(
    ctx: &mut CudaContext,
    x: &CudaBuffer<f32>,
    weight: &CudaBuffer<f32>,
    out: &mut CudaBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "rms_norm";
    let grid = grid(check::rms_norm(x, weight, out, shape)?, shape);
    let args = [
        out.into(),
        x.into(),
        weight.into(),
        Arg::Long(shape.dim),
        Arg::Float(shape.eps),
    ];
    ctx.launch(OP, (In::Norm, "rms_norm"), grid, args)
}

/// `residual += x; out = rms_norm(residual)`.
pub(super) fn fused_add_rms_norm(
    ctx: &mut CudaContext,
    residual: &mut CudaBuffer<f32>,
    x: &CudaBuffer<f32>,
    weight: &CudaBuffer<f32>,
    out: &mut CudaBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "fused_add_rms_norm";
    let grid = grid(
        check::fused_add_rms_norm(residual, x, weight, out, shape)?,
        shape,
    );
    let args = [
        out.into(),
        residual.into(),
        x.into(),
        weight.into(),
        Arg::Long(shape.dim),
        Arg::Float(shape.eps),
    ];
    ctx.launch(OP, (In::Norm, "add_rms_norm"), grid, args)
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(super) fn layer_norm(
    ctx: &mut CudaContext,
    x: &CudaBuffer<f32>,
    weight: &CudaBuffer<f32>,
    bias: Option<&CudaBuffer<f32>>,
    out: &mut CudaBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "layer_norm";
    let grid = grid(check::layer_norm(x, weight, bias, out, shape)?, shape);
    let args = [
        out.into(),
        x.into(),
        weight.into(),
        bias.into(),
        Arg::Long(shape.dim),
        Arg::Float(shape.eps),
    ];
    ctx.launch(OP, (In::Norm, "layer_norm"), grid, args)
}
