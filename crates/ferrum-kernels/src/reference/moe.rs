//! Mixture of experts: routing, one matrix for each pair, weighted sums.

use super::buffer::RefBuffer;
use super::core::RefContext;
use super::elementwise::silu;
use super::gemm::{RefWeight, decode, dot};
use super::norm::rms_rows;
use super::precision::{narrow, wide};
use super::{Precision, Reference};
use crate::backend::*;
use ferrum_types::{FloatElement, Result};

type Routing<P> = MoeRouting<Reference<P>>;

/// A stack of matrices of one shape, decoded to f32.
#[derive(Clone, Debug, PartialEq)]
pub struct RefExperts {
    matrices: Vec<RefWeight>,
    shape: ExpertShape,
}

impl RefExperts {
    /// Number and size of the matrices.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// Cuts the values of a checked stack into matrices.
    pub(super) fn from_values(values: &[f32], shape: ExpertShape) -> Self {
        let matrix = |values: &[f32]| RefWeight {
            values: values.to_vec(),
            shape: MatShape {
                rows: shape.n,
                cols: shape.k,
            },
        };
        let matrices = values.chunks_exact(shape.n * shape.k).map(matrix).collect();
        RefExperts { matrices, shape }
    }
}

/// Softmax over each row of logits, then the `top_k` largest.
///
/// Experts are ranked by their logits: probabilities of different logits may round to equal ones, and
/// then the better logit still wins. NaN ranks last.
fn route<P: Precision>(
    logits: &RefBuffer<P::Logit>,
    routing: &mut Routing<P>,
    shape: RouteShape,
) -> Result<()> {
    let pairs = check::route_topk_softmax::<Reference<P>>(logits, routing, shape)?;
    let RouteShape {
        tokens,
        experts,
        top_k,
        renormalize,
        scale,
    } = shape;
    let logits: Vec<f32> = logits.0[..tokens * experts]
        .iter()
        .map(|x| x.to_f32())
        .collect();
    let ids = &mut routing.expert_ids.0[..pairs];
    let weights = &mut routing.weights.0[..pairs];

    for (token, logits) in logits.chunks_exact(experts).enumerate() {
        let rank = |e: usize| {
            if logits[e].is_nan() {
                f32::NEG_INFINITY
            } else {
                // Adding 0 makes -0 equal to 0 for `total_cmp` too.
                logits[e] + 0.0
            }
        };
        let mut order: Vec<usize> = (0..experts).collect();
        // A stable sort keeps equals in the order of their indices.
        order.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)));
        let chosen = &order[..top_k];

        let largest = f64::from(rank(order[0]));
        let exp = |e: usize| (f64::from(logits[e]) - largest).exp();
        let all: f64 = (0..experts).map(exp).sum();
        let total = if renormalize {
            chosen.iter().map(|&e| exp(e)).sum()
        } else {
            all
        };
        for (i, &e) in chosen.iter().enumerate() {
            ids[token * top_k + i] = e as i32;
            weights[token * top_k + i] = (exp(e) / total * f64::from(scale)) as f32;
        }
    }
    Ok(())
}

/// Stable bucket sort of pairs by expert.
fn sort_pairs<P: Precision>(routing: &mut Routing<P>, shape: RouteShape) -> Result<()> {
    let pairs = check::compute_ids_tpe(routing, shape)?;
    let experts = shape.experts;
    let expert_ids = &routing.expert_ids.0[..pairs];
    let (ids, tpe) = (&mut routing.ids.0, &mut routing.tpe.0);
    let offsets = &mut routing.offsets.0;
    let mut buckets = vec![Vec::new(); experts];
    for (pair, &expert) in (0i32..).zip(expert_ids) {
        let expert = check::index("compute_ids_tpe", "an expert id", expert, experts)?;
        buckets[expert].push(pair);
    }

    let mut next = 0;
    for (e, bucket) in buckets.iter().enumerate() {
        tpe[e] = bucket.len() as i32;
        offsets[e] = next as i32;
        ids[next..][..bucket.len()].copy_from_slice(bucket);
        next += bucket.len();
    }
    offsets[experts] = next as i32;
    Ok(())
}

/// `(pair, expert)` of all pairs, read from the sorted form as a grid over experts reads it.
fn sorted_pairs<P: Precision>(
    op: &'static str,
    routing: &Routing<P>,
    pairs: usize,
    experts: usize,
) -> Result<Vec<(usize, usize)>> {
    let pairs_of = check::SortedPairs {
        expert_ids: &routing.expert_ids.0[..pairs],
        ids: &routing.ids.0[..pairs],
        tpe: &routing.tpe.0[..experts],
        offsets: &routing.offsets.0[..=experts],
    };
    let mut sorted = Vec::with_capacity(pairs);
    pairs_of.groups(op, |expert, start, count| {
        let ids = &pairs_of.ids[start..][..count];
        sorted.extend(ids.iter().map(|&pair| (pair as usize, expert)));
    })?;
    Ok(sorted)
}

/// `out[pair, i] = f(row i of the pair's expert in each stack · the pair's input)`.
fn per_pair<P: Precision, const STACKS: usize>(
    op: &'static str,
    (x, input): (&RefBuffer<P::Act>, ExpertInput),
    stacks: [&RefExperts; STACKS],
    routing: &Routing<P>,
    out: &mut RefBuffer<P::Act>,
    shape: MoeShape,
    f: impl Fn([f64; STACKS]) -> f64,
) -> Result<()> {
    let shapes = stacks.map(RefExperts::shape);
    let lens = check::moe_product::<Reference<P>>(op, (x, input), &shapes, routing, out, shape)?;
    let ExpertShape { experts, n, k } = shape.experts;
    for (pair, expert) in sorted_pairs(op, routing, lens.pairs, experts)? {
        let row = match input {
            ExpertInput::PerToken => pair / shape.top_k,
            ExpertInput::PerPair => pair,
        };
        let x = &x.0[row * k..][..k];
        for i in 0..n {
            let products = stacks.map(|stack| dot(x, stack.matrices[expert].row(i)));
            out.0[pair * n + i] = narrow(f(products));
        }
    }
    Ok(())
}

/// `Σ weights[pair] · x[pair, :]` for each token, in pair order, in f64.
fn weighted_sums<P: Precision>(
    x: &RefBuffer<P::Act>,
    routing: &Routing<P>,
    RouteShape { tokens, top_k, .. }: RouteShape,
    dim: usize,
) -> Vec<f64> {
    let mut sums = vec![0.0; tokens * dim];
    for pair in 0..tokens * top_k {
        let weight = f64::from(routing.weights.0[pair]);
        for i in 0..dim {
            sums[pair / top_k * dim + i] += weight * wide(x.0[pair * dim + i]);
        }
    }
    sums
}

fn add_sums<T: FloatElement>(residual: &mut RefBuffer<T>, sums: Vec<f64>) {
    for (residual, sum) in residual.0.iter_mut().zip(sums) {
        *residual = narrow(wide(*residual) + sum);
    }
}

impl<P: Precision> BackendMoeFused for Reference<P> {
    type Experts = RefExperts;

    fn load_expert_parts(&self, parts: &[WeightPart<'_>], k: usize) -> Result<RefExperts> {
        let shape = check::expert_parts("load_experts", parts, k)?;
        let mut values = Vec::new();
        for part in parts {
            decode(part, k, &mut values);
        }
        Ok(RefExperts::from_values(&values, shape))
    }

    fn route_topk_softmax(
        _: &mut RefContext<P>,
        logits: &RefBuffer<P::Logit>,
        routing: &mut Routing<P>,
        shape: RouteShape,
    ) -> Result<()> {
        route::<P>(logits, routing, shape)
    }

    fn compute_ids_tpe(
        _: &mut RefContext<P>,
        routing: &mut Routing<P>,
        shape: RouteShape,
    ) -> Result<()> {
        sort_pairs(routing, shape)
    }

    fn moe_gemm(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        input: ExpertInput,
        experts: &RefExperts,
        routing: &Routing<P>,
        out: &mut RefBuffer<P::Act>,
        shape: MoeShape,
    ) -> Result<()> {
        per_pair::<P, _>(
            "moe_gemm",
            (x, input),
            [experts],
            routing,
            out,
            shape,
            |[product]| product,
        )
    }

    fn moe_gate_up_silu(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        (gate, up): (&RefExperts, &RefExperts),
        routing: &Routing<P>,
        out: &mut RefBuffer<P::Act>,
        shape: MoeShape,
    ) -> Result<()> {
        let (op, x) = ("moe_gate_up_silu", (x, ExpertInput::PerToken));
        per_pair::<P, _>(op, x, [gate, up], routing, out, shape, |[gate, up]| {
            silu(gate) * up
        })
    }

    fn moe_weighted_sum(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        routing: &Routing<P>,
        out: &mut RefBuffer<P::Act>,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        check::weighted_sum::<Self>("moe_weighted_sum", x, routing, ("out", &*out), shape, dim)?;
        let sums = weighted_sums::<P>(x, routing, shape, dim);
        for (out, sum) in out.0.iter_mut().zip(sums) {
            *out = narrow(sum);
        }
        Ok(())
    }

    fn moe_weighted_sum_residual(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        routing: &Routing<P>,
        residual: &mut RefBuffer<P::Residual>,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        let op = "moe_weighted_sum_residual";
        check::weighted_sum::<Self>(op, x, routing, ("residual", &*residual), shape, dim)?;
        add_sums(residual, weighted_sums::<P>(x, routing, shape, dim));
        Ok(())
    }

    fn moe_weighted_sum_residual_norm(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        routing: &Routing<P>,
        residual: &mut RefBuffer<P::Residual>,
        (weight, norm): (&RefBuffer<f32>, NormShape),
        out: &mut RefBuffer<P::Act>,
        shape: RouteShape,
    ) -> Result<()> {
        check::weighted_sum_norm::<Self>(x, routing, residual, (weight, norm), out, shape)?;
        add_sums(residual, weighted_sums::<P>(x, routing, shape, norm.dim));
        rms_rows(&residual.0, &weight.0, &mut out.0, norm);
        Ok(())
    }
}
