//! Norms of rows. Each function gives the elements of a row buffer.

use super::{elements, len};
use crate::backend::{DeviceBuffer, NormShape};
use ferrum_types::Result;

/// [`Backend::rms_norm`](crate::Backend::rms_norm).
pub fn rms_norm(
    x: &impl DeviceBuffer,
    weight: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    shape: NormShape,
) -> Result<usize> {
    norm("rms_norm", x, weight, out, shape)
}

/// [`Backend::fused_add_rms_norm`](crate::Backend::fused_add_rms_norm).
pub fn fused_add_rms_norm(
    residual: &impl DeviceBuffer,
    x: &impl DeviceBuffer,
    weight: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    shape: NormShape,
) -> Result<usize> {
    let op = "fused_add_rms_norm";
    let total = norm(op, x, weight, out, shape)?;
    len(op, "residual", residual, total)?;
    Ok(total)
}

/// [`Backend::layer_norm`](crate::Backend::layer_norm).
pub fn layer_norm<W: DeviceBuffer>(
    x: &impl DeviceBuffer,
    weight: &W,
    bias: Option<&W>,
    out: &impl DeviceBuffer,
    shape: NormShape,
) -> Result<usize> {
    let op = "layer_norm";
    let total = norm(op, x, weight, out, shape)?;
    if let Some(bias) = bias {
        len(op, "bias", bias, shape.dim)?;
    }
    Ok(total)
}

fn norm(
    op: &'static str,
    x: &impl DeviceBuffer,
    weight: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    NormShape { rows, dim, .. }: NormShape,
) -> Result<usize> {
    let total = elements(op, &[rows, dim])?;
    len(op, "x", x, total)?;
    len(op, "weight", weight, dim)?;
    len(op, "out", out, total)?;
    Ok(total)
}
