//! Weighted sums of what the experts of a token gave.

use super::Routing;
use crate::backend::{NormShape, RouteShape, check};
use crate::cpu::buffer::{CpuBuffer, SharedMut};
use crate::cpu::exec::Exec;
use crate::cpu::isa::Kernel;
use crate::cpu::math::{for_vectors, load_at, store_at};
use crate::cpu::norm;
use crate::cpu::simd::Simd;
use ferrum_types::Result;
use std::ops::Range;

/// Pairs and their weights.
#[derive(Clone, Copy)]
struct Pairs<'a> {
    /// `[pairs, dim]`.
    x: &'a [f32],
    weights: &'a [f32],
    top_k: usize,
    dim: usize,
}

impl<'a> Pairs<'a> {
    fn of(x: &'a CpuBuffer<f32>, routing: &'a Routing, shape: RouteShape, dim: usize) -> Self {
        Self {
            x: x.as_slice(),
            weights: routing.weights.as_slice(),
            top_k: shape.top_k,
            dim,
        }
    }

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

fn sums(exec: &Exec, pairs: Pairs<'_>, out: &mut [f32], add: bool) {
    let dim = pairs.dim;
    let tokens = out.len().checked_div(dim).unwrap_or(0);
    let out = SharedMut::new(out);
    exec.spread(tokens, pairs.cost(), |tokens, _| {
        exec.level.run(Sums {
            pairs,
            // SAFETY: each token belongs to one task.
            out: unsafe { out.part(tokens.start * dim, tokens.len() * dim) },
            tokens,
            add,
        });
    });
}

/// `out = Σ weight · x` for each token.
pub(super) fn weighted_sum(
    exec: &Exec,
    x: &CpuBuffer<f32>,
    routing: &Routing,
    out: &mut CpuBuffer<f32>,
    shape: RouteShape,
    dim: usize,
) -> Result<()> {
    let op = "moe_weighted_sum";
    let lens = check::weighted_sum(op, x, routing, ("out", out), shape, dim)?;
    let out = &mut out.as_mut_slice()[..lens.out];
    sums(exec, Pairs::of(x, routing, shape, dim), out, false);
    Ok(())
}

/// `residual += Σ weight · x` for each token.
pub(super) fn weighted_sum_residual(
    exec: &Exec,
    x: &CpuBuffer<f32>,
    routing: &Routing,
    residual: &mut CpuBuffer<f32>,
    shape: RouteShape,
    dim: usize,
) -> Result<()> {
    let op = "moe_weighted_sum_residual";
    let lens = check::weighted_sum(op, x, routing, ("residual", residual), shape, dim)?;
    let residual = &mut residual.as_mut_slice()[..lens.out];
    sums(exec, Pairs::of(x, routing, shape, dim), residual, true);
    Ok(())
}

/// [`weighted_sum_residual`], then `out = rms_norm(residual)`.
pub(super) fn weighted_sum_residual_norm(
    exec: &Exec,
    x: &CpuBuffer<f32>,
    routing: &Routing,
    residual: &mut CpuBuffer<f32>,
    (weight, norm): (&CpuBuffer<f32>, NormShape),
    out: &mut CpuBuffer<f32>,
    shape: RouteShape,
) -> Result<()> {
    let lens = check::weighted_sum_norm(x, routing, residual, (weight, norm), out, shape)?;
    let (NormShape { rows, dim, eps }, size) = (norm, lens.out);
    let pairs = Pairs::of(x, routing, shape, dim);
    let weight = &weight.as_slice()[..dim];
    let residual = SharedMut::new(&mut residual.as_mut_slice()[..size]);
    let out = SharedMut::new(&mut out.as_mut_slice()[..size]);
    if size == 0 {
        return Ok(());
    }
    exec.spread(rows, pairs.cost() + dim, |tokens, _| {
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
    Ok(())
}
