//! Normalisation of rows.

use crate::backend::{NormShape, check};
use ferrum_simd::exec::Exec;
use ferrum_simd::memory::CpuBuffer;
use ferrum_simd::norm;
use ferrum_types::Result;

type Buf = CpuBuffer<f32>;

/// `out = x / √(mean(x²) + eps) · weight`.
pub(crate) fn rms_norm(
    exec: &Exec,
    x: &Buf,
    weight: &Buf,
    out: &mut Buf,
    shape: NormShape,
) -> Result<()> {
    check::rms_norm(x, weight, out, shape)?;
    let (x, weight) = (x.as_slice(), weight.as_slice());
    norm::rms_norm(exec, x, weight, out.as_mut_slice(), shape);
    Ok(())
}

/// `residual += x; out = rms_norm(residual)`.
pub(crate) fn fused_add_rms_norm(
    exec: &Exec,
    residual: &mut Buf,
    x: &Buf,
    weight: &Buf,
    out: &mut Buf,
    shape: NormShape,
) -> Result<()> {
    check::fused_add_rms_norm(residual, x, weight, out, shape)?;
    let (residual, out) = (residual.as_mut_slice(), out.as_mut_slice());
    norm::fused_add_rms_norm(exec, residual, x.as_slice(), weight.as_slice(), out, shape);
    Ok(())
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(crate) fn layer_norm(
    exec: &Exec,
    x: &Buf,
    weight: &Buf,
    bias: Option<&Buf>,
    out: &mut Buf,
    shape: NormShape,
) -> Result<()> {
    check::layer_norm(x, weight, bias, out, shape)?;
    let (x, weight) = (x.as_slice(), weight.as_slice());
    let bias = bias.map(CpuBuffer::as_slice);
    norm::layer_norm(exec, x, weight, bias, out.as_mut_slice(), shape);
    Ok(())
}
