//! Mixture of experts: routing, one matrix for each pair, weighted sums.

use super::buffer::RefBuffer;
use super::core::RefContext;
use super::elementwise::{gelu, silu};
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

/// A number to rank by: NaN ranks last.
fn rank(x: f64) -> f64 {
    // Adding 0 makes -0 equal to 0 for `total_cmp` too.
    if x.is_nan() {
        f64::NEG_INFINITY
    } else {
        x + 0.0
    }
}

/// The `count` places of the largest numbers, best first, the lowest of equals.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // A stable sort keeps equals in the order of their indices.
    order.sort_by(|&a, &b| rank(values[b]).total_cmp(&rank(values[a])));
    order.truncate(count);
    order
}

/// Puts experts outside of the best groups behind all others.
fn keep_best_groups(values: &mut [f64], groups: ExpertGroups) {
    let size = values.len() / groups.groups;
    let summed = match groups.score {
        GroupScore::Best => 1,
        GroupScore::BestTwo => 2,
    };
    let rank_of = |group: &[f64]| {
        let best = largest(group, summed);
        best.iter().map(|&e| rank(group[e])).sum()
    };
    let ranks: Vec<f64> = values.chunks_exact(size).map(rank_of).collect();
    let kept = largest(&ranks, groups.top);
    for (group, values) in values.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&group) {
            values.fill(f64::NAN);
        }
    }
}

/// Scores of each row of logits, then the `top_k` largest.
///
/// Where nothing is added to scores, experts are ranked by their logits: scores of different logits may round to equal
/// ones, and then the better logit still wins.
fn route<P: Precision>(
    logits: &RefBuffer<P::Logit>,
    bias: Option<&RefBuffer<f32>>,
    routing: &mut Routing<P>,
    shape: RouteShape,
) -> Result<()> {
    let pairs = check::route_topk::<Reference<P>>(logits, bias, routing, shape)?;
    let RouteShape {
        tokens,
        experts,
        top_k,
        ..
    } = shape;
    let logits: Vec<f32> = logits.0[..tokens * experts]
        .iter()
        .map(|x| x.to_f32())
        .collect();
    let ids = &mut routing.expert_ids.0[..pairs];
    let weights = &mut routing.weights.0[..pairs];

    for (token, logits) in logits.chunks_exact(experts).enumerate() {
        let logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        let best = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
        let total: f64 = logits.iter().map(|x| (x - best).exp()).sum();
        let score = |e: usize| match shape.score {
            ExpertScore::Softmax => (logits[e] - best).exp() / total,
            ExpertScore::Sigmoid => 1.0 / (1.0 + (-logits[e]).exp()),
        };
        let mut values = match shape.ranks_logits(bias.is_some()) {
            true => logits.clone(),
            false => {
                let bias = |e: usize| bias.map_or(0.0, |bias| f64::from(bias.0[e]));
                (0..experts).map(|e| score(e) + bias(e)).collect()
            }
        };
        if let Some(groups) = shape.groups {
            keep_best_groups(&mut values, groups);
        }
        let chosen = largest(&values, top_k);
        // Of probabilities, the sum is that over the chosen from the start: their shares of all may round to 0.
        let best = chosen
            .iter()
            .fold(f64::NEG_INFINITY, |m, &e| m.max(logits[e]));
        let share = |e: usize| match (shape.score, shape.renormalize) {
            (ExpertScore::Softmax, true) => (logits[e] - best).exp(),
            _ => score(e),
        };
        let sum: f64 = chosen.iter().map(|&e| share(e)).sum();
        let divisor = match (shape.renormalize, shape.score) {
            (false, _) => 1.0,
            (true, ExpertScore::Softmax) => sum,
            (true, ExpertScore::Sigmoid) => sum + 1e-20,
        };
        for (i, &e) in chosen.iter().enumerate() {
            ids[token * top_k + i] = e as i32;
            weights[token * top_k + i] = (share(e) / divisor * f64::from(shape.scale)) as f32;
        }
    }
    Ok(())
}

/// Stable bucket sort of pairs by expert.
fn sort_pairs<P: Precision>(routing: &mut Routing<P>, shape: RouteShape) -> Result<()> {
    let pairs = check::compute_ids_tpe(routing, shape)?;
    let experts = shape.experts;
    let expert_ids = &routing.expert_ids.0[..pairs];
    let (ids, tpe) = (
        &mut routing.sorted_pairs.0,
        &mut routing.tokens_per_expert.0,
    );
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
        sorted_pairs: &routing.sorted_pairs.0[..pairs],
        tokens_per_expert: &routing.tokens_per_expert.0[..experts],
        offsets: &routing.offsets.0[..=experts],
    };
    let mut sorted = Vec::with_capacity(pairs);
    pairs_of.groups(op, |expert, start, count| {
        let ids = &pairs_of.sorted_pairs[start..][..count];
        sorted.extend(ids.iter().map(|&pair| (pair as usize, expert)));
    })?;
    Ok(sorted)
}

/// What a pair's products with gate and up become.
fn activate(activation: ExpertActivation, gate: f64, up: f64) -> f64 {
    match activation {
        ExpertActivation::Silu => silu(gate) * up,
        ExpertActivation::GeluTanh => gelu(GeluKind::Tanh, gate) * up,
        ExpertActivation::ClampedSwiglu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
        }
    }
}

/// `out[pair, i] = f(row i of the pair's expert in each stack · the pair's input + its bias)`.
fn per_pair<P: Precision, const STACKS: usize>(
    op: &'static str,
    (x, input): (&RefBuffer<P::Act>, ExpertInput),
    maps: [ExpertProjection<'_, Reference<P>>; STACKS],
    routing: &Routing<P>,
    out: &mut RefBuffer<P::Act>,
    shape: MoeShape,
    f: impl Fn([f64; STACKS]) -> f64,
) -> Result<()> {
    let sized = maps.map(|maps| (maps, maps.matrices.shape()));
    let lens = check::moe_product(op, (x, input), &sized, routing, out, shape)?;
    let ExpertShape { experts, n, k } = shape.experts;
    for (pair, expert) in sorted_pairs(op, routing, lens.pairs, experts)? {
        let row = match input {
            ExpertInput::PerToken => pair / shape.top_k,
            ExpertInput::PerPair => pair,
        };
        let x = &x.0[row * k..][..k];
        for i in 0..n {
            let products = maps.map(|ExpertProjection { matrices, bias }| {
                let bias = bias.map_or(0.0, |bias| f64::from(bias.0[expert * n + i]));
                dot(x, matrices.matrices[expert].row(i)) + bias
            });
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

    fn route_topk(
        _: &mut RefContext<P>,
        logits: &RefBuffer<P::Logit>,
        bias: Option<&RefBuffer<f32>>,
        routing: &mut Routing<P>,
        shape: RouteShape,
    ) -> Result<()> {
        route::<P>(logits, bias, routing, shape)
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
        experts: ExpertProjection<'_, Self>,
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

    fn moe_gate_up(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        gate_up: [ExpertProjection<'_, Self>; 2],
        activation: ExpertActivation,
        routing: &Routing<P>,
        out: &mut RefBuffer<P::Act>,
        shape: MoeShape,
    ) -> Result<()> {
        let (op, x) = ("moe_gate_up", (x, ExpertInput::PerToken));
        per_pair::<P, _>(op, x, gate_up, routing, out, shape, |[gate, up]| {
            activate(activation, gate, up)
        })
    }

    fn moe_scale_weights(
        _: &mut RefContext<P>,
        routing: &mut Routing<P>,
        factors: &RefBuffer<f32>,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::moe_scale_weights(routing, factors, shape)?;
        let MoeRouting {
            expert_ids,
            weights,
            ..
        } = routing;
        for (weight, &id) in weights.0[..pairs].iter_mut().zip(&expert_ids.0) {
            *weight *=
                factors.0[check::index("moe_scale_weights", "an expert id", id, shape.experts)?];
        }
        Ok(())
    }

    fn moe_weighted_sum(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        routing: &Routing<P>,
        (out, add): (&mut RefBuffer<P::Act>, bool),
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        let lens = check::weighted_sum::<Self>(
            "moe_weighted_sum",
            x,
            routing,
            ("out", &*out),
            shape,
            dim,
        )?;
        if !add {
            out.0[..lens.out].fill(narrow(0.0));
        }
        add_sums(out, weighted_sums::<P>(x, routing, shape, dim));
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
