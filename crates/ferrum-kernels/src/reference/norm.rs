//! Normalisation of rows.

use super::buffer::RefBuffer;
use super::gemm::dot;
use crate::backend::{NormShape, check};
use ferrum_types::Result;

/// `1 / √(mean(x²) + eps)`.
pub(super) fn rms_factor(x: &[f32], eps: f32) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// `out = x / √(mean(x²) + eps) · weight`.
pub(super) fn rms_norm(
    x: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    check::rms_norm(x, weight, out, shape)?;
    rms_rows(&x.0, &weight.0, &mut out.0, shape);
    Ok(())
}

/// RMS norm of checked rows.
pub(super) fn rms_rows(
    x: &[f32],
    weight: &[f32],
    out: &mut [f32],
    NormShape { rows, dim, eps }: NormShape,
) {
    for r in 0..rows {
        let x = &x[r * dim..][..dim];
        let factor = rms_factor(x, eps);
        for ((out, &x), &w) in out[r * dim..].iter_mut().zip(x).zip(weight) {
            *out = (f64::from(x) * factor * f64::from(w)) as f32;
        }
    }
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(super) fn layer_norm(
    x: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<f32>,
    shape: NormShape,
) -> Result<()> {
    check::layer_norm(x, weight, bias, out, shape)?;
    let NormShape { rows, dim, eps } = shape;
    for r in 0..rows {
        let x = &x.0[r * dim..][..dim];
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / dim as f64;
        let squares = x.iter().map(|&x| (f64::from(x) - mean).powi(2));
        let factor = 1.0 / (squares.sum::<f64>() / dim as f64 + f64::from(eps)).sqrt();
        for (i, &x) in x.iter().enumerate() {
            let bias = bias.map_or(0.0, |bias| f64::from(bias.0[i]));
            let normed = (f64::from(x) - mean) * factor;
            out.0[r * dim + i] = (normed * f64::from(weight.0[i]) + bias) as f32;
        }
    }
    Ok(())
}
