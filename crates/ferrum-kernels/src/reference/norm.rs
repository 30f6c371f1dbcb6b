//! Normalisation of rows.

use super::buffer::RefBuffer;
use super::gemm::dot;
use super::precision::{narrow, wide};
use crate::backend::{NormShape, check};
use ferrum_types::{FloatElement, Result};

/// `1 / √(mean(x²) + eps)`.
pub(super) fn rms_factor<T: FloatElement>(x: &[T], eps: f32) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// `out = x / √(mean(x²) + eps) · weight`.
pub(super) fn rms_norm<T: FloatElement, A: FloatElement>(
    x: &RefBuffer<T>,
    weight: &RefBuffer<f32>,
    out: &mut RefBuffer<A>,
    shape: NormShape,
) -> Result<()> {
    check::rms_norm(x, weight, out, shape)?;
    rms_rows(&x.0, &weight.0, &mut out.0, shape);
    Ok(())
}

/// RMS norm of checked rows.
pub(super) fn rms_rows<T: FloatElement, A: FloatElement>(
    x: &[T],
    weight: &[f32],
    out: &mut [A],
    NormShape { rows, dim, eps }: NormShape,
) {
    for r in 0..rows {
        let x = &x[r * dim..][..dim];
        let factor = rms_factor(x, eps);
        for ((out, &x), &w) in out[r * dim..].iter_mut().zip(x).zip(weight) {
            *out = narrow(wide(x) * factor * wide(w));
        }
    }
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(super) fn layer_norm<T: FloatElement, A: FloatElement>(
    x: &RefBuffer<T>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<A>,
    shape: NormShape,
) -> Result<()> {
    check::layer_norm(x, weight, bias, out, shape)?;
    let NormShape { rows, dim, eps } = shape;
    for r in 0..rows {
        let x = &x.0[r * dim..][..dim];
        let mean = x.iter().map(|&x| wide(x)).sum::<f64>() / dim as f64;
        let squares = x.iter().map(|&x| (wide(x) - mean).powi(2));
        let factor = 1.0 / (squares.sum::<f64>() / dim as f64 + f64::from(eps)).sqrt();
        for (i, &x) in x.iter().enumerate() {
            let bias = bias.map_or(0.0, |bias| f64::from(bias.0[i]));
            let normed = (wide(x) - mean) * factor;
            out.0[r * dim + i] = narrow(normed * f64::from(weight.0[i]) + bias);
        }
    }
    Ok(())
}
