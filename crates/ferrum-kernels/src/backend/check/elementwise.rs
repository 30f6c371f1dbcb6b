//! Ops on single elements.

use super::{elements, len, require};
use crate::backend::{DeviceBuffer, RowShape};
use ferrum_types::Result;

/// [`Backend::activate`](crate::Backend::activate) and the ops that are one call of it.
pub fn activate<A: DeviceBuffer>(
    op: &'static str,
    x: &A,
    y: Option<&A>,
    out: &A,
    count: usize,
) -> Result<()> {
    len(op, "x", x, count)?;
    if let Some(y) = y {
        len(op, "y", y, count)?;
    }
    len(op, "out", out, count)
}

/// `x = f(x)`.
pub fn inplace(op: &'static str, x: &impl DeviceBuffer, count: usize) -> Result<()> {
    len(op, "x", x, count)
}

/// `x = f(x, y)`.
pub fn zip_inplace(
    op: &'static str,
    x: &impl DeviceBuffer,
    y: &impl DeviceBuffer,
    count: usize,
) -> Result<()> {
    len(op, "x", x, count)?;
    len(op, "y", y, count)
}

/// [`Backend::softcap`](crate::Backend::softcap).
pub fn softcap(x: &impl DeviceBuffer, cap: f32, count: usize) -> Result<()> {
    let op = "softcap";
    self::cap(op, cap)?;
    len(op, "x", x, count)
}

/// A soft-cap is a positive number.
pub(super) fn cap(op: &'static str, cap: f32) -> Result<()> {
    require(op, cap > 0.0 && cap.is_finite(), || {
        format!("softcap is {cap}, expected a positive number")
    })
}

/// `fused_silu_mul_split` and `fused_gelu_mul_split`: elements of `out`; `gate_up` has twice as many.
pub fn gated(
    op: &'static str,
    gate_up: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    RowShape { rows, dim }: RowShape,
) -> Result<usize> {
    let both = elements(op, &[rows, dim, 2])?;
    len(op, "gate_up", gate_up, both)?;
    len(op, "out", out, both / 2)?;
    Ok(both / 2)
}

/// [`Backend::add_bias`](crate::Backend::add_bias): elements of `x`.
pub fn add_bias(
    x: &impl DeviceBuffer,
    bias: &impl DeviceBuffer,
    RowShape { rows, dim }: RowShape,
) -> Result<usize> {
    let op = "add_bias";
    let total = elements(op, &[rows, dim])?;
    len(op, "x", x, total)?;
    len(op, "bias", bias, dim)?;
    Ok(total)
}
