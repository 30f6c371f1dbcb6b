//! Weighted sums of what the experts of a token gave.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::math::{for_vectors, load_at, store_at};
use crate::memory::SharedMut;
use crate::norm;
use crate::simd::Simd;
use ferrum_types::NormShape;
use std::ops::Range;

/// What the experts of some tokens gave.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    /// `[pairs, dim]`.
    pub x: &'a [f32],
    /// `[pairs]`.
    pub weights: &'a [f32],
    /// Pairs of a token.
    pub top_k: usize,
    /// Elements of a row.
    pub dim: usize,
}

impl Pairs<'_> {
    fn cost(&self) -> usize {
        (self.top_k + 1) * self.dim
    }
}

/// The sums of some tokens, to where they are added or, without `add`, stored.
struct Sums<'a> {
    pairs: Pairs<'a>,
    tokens: Range<usize>,
    out: &'a mut [f32],
    add: bool,
}

impl Kernel for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Pairs {
            x,
            weights,
            top_k,
            dim,
        } = self.pairs;
        for (token, out) in self.tokens.zip(self.out.chunks_exact_mut(dim)) {
            let x = &x[token * top_k * dim..][..top_k * dim];
            let weights = &weights[token * top_k..][..top_k];
            for_vectors(
                dim,
                #[inline(always)]
                |at, _| {
                    let mut sum = s.zero();
                    for (i, weight) in weights.iter().enumerate() {
                        let x = &x[i * dim..][..dim];
                        sum = s.fma(s.splat(*weight), load_at(s, x, at), sum);
                    }
                    if self.add {
                        sum = s.add(load_at(s, out, at), sum);
                    }
                    store_at(s, out, at, sum);
                },
            );
        }
    }
}

/// `out = Σ weight · x` for each token, or with `add` `out += Σ weight · x`. `out` has as many rows as there are tokens.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn weighted_sum(exec: &Exec, pairs: Pairs<'_>, out: &mut [f32], add: bool) {
    let dim = pairs.dim;
    let tokens = out.len().checked_div(dim).unwrap_or(0);
    let out = SharedMut::new(out);
    exec.parallel_for(tokens, pairs.cost(), |tokens, _| {
        exec.level.run(Sums {
            pairs,
            // SAFETY: each token belongs to one task.
            out: unsafe { out.part(tokens.start * dim, tokens.len() * dim) },
            tokens,
            add,
        });
    });
}

/// `residual += Σ weight · x` for each token, then `out = rms_norm(residual)`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn weighted_sum_norm(
    exec: &Exec,
    pairs: Pairs<'_>,
    residual: &mut [f32],
    (weight, norm): (&[f32], NormShape),
    out: &mut [f32],
) {
    let NormShape { rows, dim, eps } = norm;
    assert_eq!(dim, pairs.dim, "elements of a row");
    let (size, weight) = (rows * dim, &weight[..dim]);
    let residual = SharedMut::new(&mut residual[..size]);
    let out = SharedMut::new(&mut out[..size]);
    if size == 0 {
        return;
    }
    exec.parallel_for(rows, pairs.cost() + dim, |tokens, _| {
        let (start, len) = (tokens.start * dim, tokens.len() * dim);
        // SAFETY: each token belongs to one task.
        let (residual, out) = unsafe { (residual.part(start, len), out.part(start, len)) };
        exec.level.run(Sums {
            pairs,
            tokens,
            out: &mut *residual,
            add: true,
        });
        exec.level.run(norm::Rms {
            x: residual,
            weight,
            out,
            eps,
        });
    });
}
