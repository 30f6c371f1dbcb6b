//! Normalisation of rows.

use super::buffer::{RefBuffer, elements};
use super::gemm::dot;
use crate::backend::NormShape;
use ferrum_types::Result;

/// `1 / √(mean(x²) + eps)`.
pub(super) fn rms_factor(x: &[f32], eps: f32) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// `out = x / √(mean(x²) + eps) · weight`.
pub(super) fn rms_norm(
    op: &'static str,
    x: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    NormShape { rows, dim, eps }: NormShape,
) -> Result<()> {
    let size = elements(op, &[rows, dim])?;
    let x = x.first(op, "x", size)?;
    let weight = weight.first(op, "weight", dim)?;
    let out = out.first_mut(op, "out", size)?;
    for r in 0..rows {
        let x = &x[r * dim..][..dim];
        let factor = rms_factor(x, eps);
        for ((out, &x), &w) in out[r * dim..].iter_mut().zip(x).zip(weight) {
            *out = (f64::from(x) * factor * f64::from(w)) as f32;
        }
    }
    Ok(())
}

/// `residual += x; out = rms_norm(residual)`. The sum is rounded to f32 before it is normed.
pub(super) fn fused_add_rms_norm(
    residual: &mut RefBuffer<f32>,
    x: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    let op = "fused_add_rms_norm";
    let size = elements(op, &[shape.rows, shape.dim])?;
    // All checks come first, so that an error leaves the residual as it was.
    weight.first(op, "weight", shape.dim)?;
    out.first(op, "out", size)?;
    let sums = residual.first_mut(op, "residual", size)?;
    for (sum, &x) in sums.iter_mut().zip(x.first(op, "x", size)?) {
        *sum += x;
    }
    rms_norm(op, residual, weight, out, shape)
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(super) fn layer_norm(
    x: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<f32>,
    NormShape { rows, dim, eps }: NormShape,
) -> Result<()> {
    let op = "layer_norm";
    let size = elements(op, &[rows, dim])?;
    let x = x.first(op, "x", size)?;
    let weight = weight.first(op, "weight", dim)?;
    let bias = bias.map(|bias| bias.first(op, "bias", dim)).transpose()?;
    let out = out.first_mut(op, "out", size)?;
    for r in 0..rows {
        let x = &x[r * dim..][..dim];
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / dim as f64;
        let squares = x.iter().map(|&x| (f64::from(x) - mean).powi(2));
        let factor = 1.0 / (squares.sum::<f64>() / dim as f64 + f64::from(eps)).sqrt();
        for i in 0..dim {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
            let normed = (f64::from(x[i]) - mean) * factor;
            out[r * dim + i] = (normed * f64::from(weight[i]) + bias) as f32;
        }
    }
    Ok(())
}
