//! Ops on single elements: activations, sums, products.

use super::buffer::RefBuffer;
use crate::backend::{GeluKind, RowShape, check};
use ferrum_types::Result;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

/// `x · sigmoid(x)`.
pub(super) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// GELU of either kind.
pub(super) fn gelu(kind: GeluKind, x: f64) -> f64 {
    match kind {
        GeluKind::Exact => 0.5 * x * erfc(-x * FRAC_1_SQRT_2),
        GeluKind::Tanh => {
            let inner = (2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// Complementary error function, to about 1e-15 of its value: series near zero, continued fraction
/// in the tail (Abramowitz and Stegun, 7.1.6 and 7.1.14).
fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        2.0 - erfc(-x)
    } else if x < 2.0 {
        let mut term = x;
        let mut sum = x;
        for n in 1..60 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        1.0 - FRAC_2_SQRT_PI * (-x * x).exp() * sum
    } else {
        let tail = (1..=120)
            .rev()
            .fold(0.0, |tail, n| 0.5 * f64::from(n) / (x + tail));
        (-x * x).exp() * FRAC_2_SQRT_PI * 0.5 / (x + tail)
    }
}

/// `out = f(x)`, `len` elements.
pub(super) fn map(
    op: &'static str,
    x: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    len: usize,
    f: impl Fn(f64) -> f64,
) -> Result<()> {
    check::activate(op, x, None, out, len)?;
    for (out, &x) in out.0[..len].iter_mut().zip(&x.0) {
        *out = f(f64::from(x)) as f32;
    }
    Ok(())
}

/// `x = f(x)`, `len` elements.
pub(super) fn map_inplace(
    op: &'static str,
    x: &mut RefBuffer<f32>,
    len: usize,
    f: impl Fn(f64) -> f64,
) -> Result<()> {
    check::inplace(op, x, len)?;
    for x in &mut x.0[..len] {
        *x = f(f64::from(*x)) as f32;
    }
    Ok(())
}

/// `x = f(x, y)`, `len` elements.
pub(super) fn zip_inplace(
    op: &'static str,
    x: &mut RefBuffer<f32>,
    y: &RefBuffer<f32>,
    len: usize,
    f: impl Fn(f64, f64) -> f64,
) -> Result<()> {
    check::zip_inplace(op, x, y, len)?;
    for (x, &y) in x.0[..len].iter_mut().zip(&y.0) {
        *x = f(f64::from(*x), f64::from(y)) as f32;
    }
    Ok(())
}

/// `out = x · y`, `len` elements.
pub(super) fn mul(
    x: &RefBuffer<f32>,
    y: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    len: usize,
) -> Result<()> {
    check::activate("mul", x, Some(y), out, len)?;
    for ((out, &x), &y) in out.0[..len].iter_mut().zip(&x.0).zip(&y.0) {
        *out = x * y;
    }
    Ok(())
}

/// `x = cap · tanh(x / cap)`.
pub(super) fn softcap(x: &mut RefBuffer<f32>, cap: f32, len: usize) -> Result<()> {
    check::softcap(x, cap, len)?;
    let cap = f64::from(cap);
    map_inplace("softcap", x, len, |x| cap * (x / cap).tanh())
}

/// Rows `[gate | up]` → `out[rows, dim] = activation(gate) · up`.
pub(super) fn gated(
    op: &'static str,
    gate_up: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    shape: RowShape,
    activation: impl Fn(f64) -> f64,
) -> Result<()> {
    check::gated(op, gate_up, out, shape)?;
    let RowShape { rows, dim } = shape;
    for r in 0..rows {
        let (gate, up) = gate_up.0[r * 2 * dim..][..2 * dim].split_at(dim);
        for ((out, &gate), &up) in out.0[r * dim..].iter_mut().zip(gate).zip(up) {
            *out = (activation(f64::from(gate)) * f64::from(up)) as f32;
        }
    }
    Ok(())
}

/// `x[r, :] += bias`.
pub(super) fn add_bias(
    x: &mut RefBuffer<f32>,
    bias: &RefBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    let size = check::add_bias(x, bias, shape)?;
    for (i, x) in x.0[..size].iter_mut().enumerate() {
        *x += bias.0[i % shape.dim];
    }
    Ok(())
}
