//! Norms: a block for each row.

use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::{CudaAct, of_role};
use crate::backend::{NormShape, check};
use ferrum_types::{FloatElement, Result};

/// A block for each row, and none where rows have nothing.
fn grid(total: usize, shape: NormShape, threads: u32) -> (usize, u32, usize) {
    (if total == 0 { 0 } else { shape.rows }, threads, 0)
}

/// A thread for each eight elements, as far as a block may have them. The length of the row alone decides, and so the order of
/// its sum does not depend on its batch.
fn threads(dim: usize) -> u32 {
    let warps = dim.div_ceil(8).div_ceil(32).clamp(1, 16);
    32 * warps as u32
}

/// `out = x / √(mean(x²) + eps) · weight`.
pub(super) fn rms_norm<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    x: &CudaBuffer<T>,
    weight: &CudaBuffer<f32>,
    out: &mut CudaBuffer<A>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "rms_norm";
    let kernel = of_role::<A, T>(OP, ["rms_norm_act", "rms_norm_f32"])?;
    let total = check::rms_norm(x, weight, out, shape)?;
    let grid = grid(total, shape, threads(shape.dim));
    let args = [
        out.into(),
        x.into(),
        weight.into(),
        Arg::Int(shape.dim),
        Arg::Float(shape.eps),
    ];
    ctx.launch(OP, (KernelFile::Norm, kernel), grid, args)
}

/// `residual += x; out = rms_norm(residual)`.
pub(super) fn fused_add_rms_norm<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    residual: &mut CudaBuffer<f32>,
    x: &CudaBuffer<A>,
    weight: &CudaBuffer<f32>,
    out: &mut CudaBuffer<A>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "fused_add_rms_norm";
    let total = check::fused_add_rms_norm(residual, x, weight, out, shape)?;
    let grid = grid(total, shape, threads(shape.dim));
    let args = [
        out.into(),
        residual.into(),
        x.into(),
        weight.into(),
        Arg::Int(shape.dim),
        Arg::Float(shape.eps),
    ];
    ctx.launch(OP, (KernelFile::Norm, "add_rms_norm"), grid, args)
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(super) fn layer_norm<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    x: &CudaBuffer<T>,
    weight: &CudaBuffer<f32>,
    bias: Option<&CudaBuffer<f32>>,
    out: &mut CudaBuffer<A>,
    shape: NormShape,
) -> Result<()> {
    const OP: &str = "layer_norm";
    let kernel = of_role::<A, T>(OP, ["layer_norm_act", "layer_norm_f32"])?;
    let total = check::layer_norm(x, weight, bias, out, shape)?;
    let grid = grid(total, shape, 256);
    let args = [
        out.into(),
        x.into(),
        weight.into(),
        bias.into(),
        Arg::Long(shape.dim),
        Arg::Float(shape.eps),
    ];
    ctx.launch(OP, (KernelFile::Norm, kernel), grid, args)
}
