//! The formulas of the ops, written as they are printed: what the reference backend is compared with.
//!
//! Everything is f64 and nothing is clever. Nothing here is shared with a backend.

use ferrum_kernels::{Activation, GeluKind, RopeStyle};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// f32 as f64.
pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Integers as f64.
pub(crate) fn wide_ints(values: &[i32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// f64 rounded to f32.
pub(crate) fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

/// `x[rows, k] · w[n, k]ᵀ`.
pub(crate) fn gemm(x: &[f32], w: &[f32], rows: usize, n: usize, k: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows * n];
    for r in 0..rows {
        for c in 0..n {
            for i in 0..k {
                out[r * n + c] += f64::from(x[r * k + i]) * f64::from(w[c * k + i]);
            }
        }
    }
    out
}

/// The error function, by the series `2/√π · e^(-x²) · Σ 2ⁿ x^(2n+1) / (1·3·5···(2n+1))`.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let mut term = x;
    let mut sum = x;
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

pub(crate) fn gelu(kind: GeluKind, x: f64) -> f64 {
    match kind {
        GeluKind::Exact => x / 2.0 * (1.0 + erf(x * FRAC_1_SQRT_2)),
        GeluKind::Tanh => x / 2.0 * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
    }
}

pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `activation(gate) · up` of rows `[gate | up]` of `n` numbers.
pub(crate) fn gated(activation: Activation, gate_up: &[f64], n: usize) -> Vec<f64> {
    let function = |x| match activation {
        Activation::Gelu(kind) => gelu(kind, x),
        _ => silu(x),
    };
    let rows = gate_up.chunks_exact(n.max(1));
    let rows = rows.map(|row| row.split_at(n / 2));
    rows.flat_map(|(gate, up)| gate.iter().zip(up).map(|(g, u)| function(*g) * u))
        .collect()
}

pub(crate) fn softcap(x: f64, cap: f64) -> f64 {
    cap * (x / cap).tanh()
}

pub(crate) fn rms_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let root = (mean + f64::from(eps)).sqrt();
    x.iter()
        .zip(weight)
        .map(|(x, &w)| x / root * f64::from(w))
        .collect()
}

pub(crate) fn layer_norm(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let len = x.len() as f64;
    let x = wide(x);
    let mean = x.iter().sum::<f64>() / len;
    let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / len;
    let root = (var + f64::from(eps)).sqrt();
    let normed = x.iter().enumerate().map(|(i, x)| {
        (x - mean) / root * f64::from(weight[i]) + bias.map_or(0.0, |bias| f64::from(bias[i]))
    });
    normed.collect()
}

/// The first `rot_dim` elements of a head as complex numbers, each times `cos + i·sin`.
pub(crate) fn rotate(head: &mut [f64], cos: &[f32], sin: &[f32], rot_dim: usize, style: RopeStyle) {
    let before = head.to_vec();
    for pair in 0..rot_dim / 2 {
        let (re, im) = match style {
            RopeStyle::HalfSplit => (pair, pair + rot_dim / 2),
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
        };
        let (c, s) = (f64::from(cos[pair]), f64::from(sin[pair]));
        head[re] = before[re] * c - before[im] * s;
        head[im] = before[re] * s + before[im] * c;
    }
}

/// What makes a score of a key visible to a query, and what is done to it.
#[derive(Clone, Copy)]
pub(crate) struct Scores {
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) sink: Option<f32>,
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    pub(crate) chunked: bool,
}

impl Scores {
    /// Whether the query at key index `i` sees key `j`.
    fn sees(self, i: usize, j: usize) -> bool {
        let (i, j) = (i as i64, j as i64);
        let past = !self.causal || j <= i;
        past && self.window.is_none_or(|window| match self.chunked {
            true => i / window as i64 == j / window as i64,
            false => (i - j).unsigned_abs() < window as u64,
        })
    }
}

/// Softmax attention of the query at key index `at` over `keys`, all scores written out.
///
/// The output has the length of a value; a key may be longer than a value.
pub(crate) fn attend(
    query: &[f32],
    at: usize,
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    dim: usize,
    scores: Scores,
) -> Vec<f64> {
    let mut exponents = Vec::new();
    for (j, key) in keys.iter().enumerate() {
        if scores.sees(at, j) {
            let mut score = 0.0;
            for (q, k) in query.iter().zip(key) {
                score += f64::from(*q) * f64::from(*k);
            }
            score *= f64::from(scores.scale);
            if let Some(cap) = scores.softcap {
                score = softcap(score, f64::from(cap));
            }
            exponents.push((j, score));
        }
    }
    let mut out = vec![0.0; dim];
    let highest = exponents
        .iter()
        .map(|(_, score)| *score)
        .fold(f64::NEG_INFINITY, f64::max);
    let mut total = match scores.sink {
        Some(sink) if !exponents.is_empty() => (f64::from(sink) - highest).exp(),
        _ => 0.0,
    };
    for (_, score) in &exponents {
        total += (score - highest).exp();
    }
    for (j, score) in exponents {
        let probability = (score - highest).exp() / total;
        for (d, out) in out.iter_mut().enumerate() {
            *out += probability * f64::from(values[j][d]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_its_known_values() {
        // Abramowitz and Stegun, table 7.1.
        for (x, y) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_8),
            (1.0, 0.842_700_792_9),
            (2.0, 0.995_322_265_0),
            (-1.0, -0.842_700_792_9),
            (5.5, 1.0),
            (7.0, 1.0),
        ] {
            assert!((erf(x) - y).abs() < 1e-10, "erf({x}) = {}", erf(x));
        }
    }

    #[test]
    fn one_visible_key_gives_its_value() {
        let scores = Scores {
            scale: 1.0,
            softcap: None,
            sink: None,
            causal: true,
            window: Some(1),
            chunked: false,
        };
        let rows = vec![vec![1.0, 2.0], vec![3.0, -4.0], vec![5.0, 6.0]];
        assert_eq!(attend(&[0.1, 0.2], 1, &rows, &rows, 2, scores), [3.0, -4.0]);
        assert_eq!(attend(&[0.1, 0.2], 9, &rows, &rows, 2, scores), [0.0, 0.0]);
    }
}
