//! Ops on single elements: activations, sums, products.

use super::buffer::RefBuffer;
use super::precision::{narrow, wide};
use crate::backend::{Activation, GeluKind, RowShape, check};
use ferrum_types::{FloatElement, Result};
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

/// `out = f(x)`, or `out = f(x) · y`.
pub(super) fn activate<T: FloatElement>(
    activation: Activation,
    x: &RefBuffer<T>,
    y: Option<&RefBuffer<T>>,
    out: &mut RefBuffer<T>,
    len: usize,
) -> Result<()> {
    check::activate("activate", x, y, out, len)?;
    for i in 0..len {
        let x = wide(x.0[i]);
        let value = match activation {
            Activation::Identity => x,
            Activation::Gelu(kind) => gelu(kind, x),
            Activation::Silu => silu(x),
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        };
        out.0[i] = match y {
            Some(y) => narrow(value * wide(y.0[i])),
            None => narrow(value),
        };
    }
    Ok(())
}

/// `x += scale · y`.
pub(super) fn scaled_add<T: FloatElement, U: FloatElement>(
    x: &mut RefBuffer<T>,
    y: &RefBuffer<U>,
    scale: f32,
    len: usize,
) -> Result<()> {
    check::zip_inplace("scaled_add_inplace", x, y, len)?;
    for (x, &y) in x.0[..len].iter_mut().zip(&y.0) {
        *x = narrow(wide(*x) + f64::from(scale) * wide(y));
    }
    Ok(())
}

/// `x = cap · tanh(x / cap)`.
pub(super) fn softcap<T: FloatElement>(x: &mut RefBuffer<T>, cap: f32, len: usize) -> Result<()> {
    check::softcap(x, cap, len)?;
    let cap = f64::from(cap);
    for x in &mut x.0[..len] {
        *x = narrow(cap * (wide(*x) / cap).tanh());
    }
    Ok(())
}

/// `x[r, :] += bias`.
pub(super) fn add_bias<T: FloatElement>(
    x: &mut RefBuffer<T>,
    bias: &RefBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    let size = check::add_bias(x, bias, shape)?;
    for (i, x) in x.0[..size].iter_mut().enumerate() {
        *x = narrow(wide(*x) + wide(bias.0[i % shape.dim]));
    }
    Ok(())
}
