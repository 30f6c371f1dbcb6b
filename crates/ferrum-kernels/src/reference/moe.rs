//! Mixture of experts: routing, one matrix for each pair, weighted sums.

use super::ReferenceBackend;
use super::buffer::{RefBuffer, elements, index, require};
use super::core::RefContext;
use super::elementwise::silu;
use super::gemm::{RefWeight, decode, dot};
use super::norm::rms_norm;
use crate::backend::*;
use ferrum_types::{Error, Result};

type Routing = MoeRouting<ReferenceBackend>;

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

    /// Cuts `[experts, n, k]` into matrices.
    pub(super) fn from_values(
        op: &'static str,
        values: Vec<f32>,
        shape: ExpertShape,
    ) -> Result<Self> {
        let ExpertShape { experts, n, k } = shape;
        let size = elements(op, &[n, k])?;
        Error::check_len(op, "weight", values.len(), elements(op, &[experts, size])?)?;
        let matrix = |e: usize| RefWeight {
            values: values[e * size..][..size].to_vec(),
            shape: MatShape { rows: n, cols: k },
        };
        Ok(RefExperts {
            matrices: (0..experts).map(matrix).collect(),
            shape,
        })
    }

    /// Stacks matrices, which must be of one shape.
    pub(super) fn from_matrices(
        op: &'static str,
        matrices: Result<Vec<RefWeight>>,
    ) -> Result<Self> {
        let matrices = matrices?;
        let Some(first) = matrices.first() else {
            return Err(Error::invalid(op, "found no expert, expected at least 1"));
        };
        let MatShape { rows, cols } = first.shape;
        require(op, matrices.iter().all(|m| m.shape == first.shape), || {
            format!("experts differ in shape, the first is [{rows}, {cols}]")
        })?;
        let shape = ExpertShape {
            experts: matrices.len(),
            n: rows,
            k: cols,
        };
        Ok(RefExperts { matrices, shape })
    }
}

/// Softmax over each row of logits, then the `top_k` largest.
///
/// Experts are ranked by their logits: probabilities of different logits may round to equal ones, and
/// then the better logit still wins. NaN ranks last.
fn route(logits: &RefBuffer<f32>, routing: &mut Routing, shape: RouteShape) -> Result<()> {
    let op = "route_topk_softmax";
    let RouteShape {
        tokens,
        experts,
        top_k,
        renormalize,
        scale,
    } = shape;
    require(op, (1..=experts).contains(&top_k), || {
        format!("top_k is {top_k}, expected 1 to {experts}, the number of experts")
    })?;
    let pairs = elements(op, &[tokens, top_k])?;
    let logits = logits.first(op, "logits", elements(op, &[tokens, experts])?)?;
    let ids = routing.expert_ids.first_mut(op, "expert_ids", pairs)?;
    let weights = routing.weights.first_mut(op, "weights", pairs)?;

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
fn sort_pairs(routing: &mut Routing, shape: RouteShape) -> Result<()> {
    let op = "compute_ids_tpe";
    let experts = shape.experts;
    let pairs = elements(op, &[shape.tokens, shape.top_k])?;
    let ids = routing.ids.first_mut(op, "ids", pairs)?;
    let tpe = routing.tpe.first_mut(op, "tpe", experts)?;
    let offsets = routing
        .offsets
        .first_mut(op, "offsets", experts.saturating_add(1))?;
    let mut buckets = vec![Vec::new(); experts];
    let expert_ids = routing.expert_ids.first(op, "expert_ids", pairs)?;
    for (pair, &expert) in (0i32..).zip(expert_ids) {
        buckets[index(op, "an expert id", expert, experts)?].push(pair);
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
///
/// Wrong when the buckets are not those of `expert_ids`: then `compute_ids_tpe` was forgotten.
fn sorted_pairs(
    op: &'static str,
    routing: &Routing,
    shape: MoeShape,
) -> Result<Vec<(usize, usize)>> {
    let experts = shape.experts.experts;
    let pairs = elements(op, &[shape.tokens, shape.top_k])?;
    let expert_ids = routing.expert_ids.first(op, "expert_ids", pairs)?;
    let ids = routing.ids.first(op, "ids", pairs)?;
    let tpe = routing.tpe.first(op, "tpe", experts)?;
    let offsets = routing
        .offsets
        .first(op, "offsets", experts.saturating_add(1))?;
    let mut sorted = Vec::with_capacity(pairs);
    for e in 0..experts {
        let unsorted = || {
            let reason =
                format!("the pairs of expert {e} are not sorted\nhint: run compute_ids_tpe first");
            Error::invalid(op, reason)
        };
        let (start, end) = (sorted.len(), offsets[e + 1]);
        let end = index(op, "offsets", end, pairs + 1)?;
        if offsets[e] as usize != start || start > end || tpe[e] as usize != end - start {
            return Err(unsorted());
        }
        for &pair in &ids[start..end] {
            let pair = index(op, "a pair", pair, pairs)?;
            if expert_ids[pair] as usize != e {
                return Err(unsorted());
            }
            sorted.push((pair, e));
        }
    }
    require(op, sorted.len() == pairs, || {
        format!(
            "{} of {pairs} pairs are sorted\nhint: run compute_ids_tpe first",
            sorted.len()
        )
    })?;
    Ok(sorted)
}

/// `out[pair, i] = f(row i of the pair's expert in each stack · the pair's input)`.
fn per_pair<const STACKS: usize>(
    op: &'static str,
    (x, input): (&RefBuffer<f32>, ExpertInput),
    stacks: [&RefExperts; STACKS],
    routing: &Routing,
    out: &mut RefBuffer<f32>,
    shape: MoeShape,
    f: impl Fn([f64; STACKS]) -> f64,
) -> Result<()> {
    let ExpertShape { n, k, .. } = shape.experts;
    for stack in stacks {
        require(op, stack.shape == shape.experts, || {
            format!(
                "the stack is {:?}, expected {:?}",
                stack.shape, shape.experts
            )
        })?;
    }
    let sorted = sorted_pairs(op, routing, shape)?;
    let pairs = sorted.len();
    let x_rows = match input {
        ExpertInput::PerToken => shape.tokens,
        ExpertInput::PerPair => pairs,
    };
    let x = x.first(op, "x", elements(op, &[x_rows, k])?)?;
    let out = out.first_mut(op, "out", elements(op, &[pairs, n])?)?;
    for (pair, expert) in sorted {
        let row = match input {
            ExpertInput::PerToken => pair / shape.top_k,
            ExpertInput::PerPair => pair,
        };
        let x = &x[row * k..][..k];
        for i in 0..n {
            let products = stacks.map(|stack| dot(x, stack.matrices[expert].row(i)));
            out[pair * n + i] = f(products) as f32;
        }
    }
    Ok(())
}

/// `Σ weights[pair] · x[pair, :]` for each token, in pair order, in f64.
fn weighted_sums(
    op: &'static str,
    x: &RefBuffer<f32>,
    routing: &Routing,
    shape: RouteShape,
    dim: usize,
) -> Result<Vec<f64>> {
    let RouteShape { tokens, top_k, .. } = shape;
    let pairs = elements(op, &[tokens, top_k])?;
    let x = x.first(op, "x", elements(op, &[pairs, dim])?)?;
    let weights = routing.weights.first(op, "weights", pairs)?;
    let mut sums = vec![0.0; elements(op, &[tokens, dim])?];
    for pair in 0..pairs {
        let weight = f64::from(weights[pair]);
        for i in 0..dim {
            sums[pair / top_k * dim + i] += weight * f64::from(x[pair * dim + i]);
        }
    }
    Ok(sums)
}

fn weighted_sum_residual(
    op: &'static str,
    x: &RefBuffer<f32>,
    routing: &Routing,
    residual: &mut RefBuffer<f32>,
    shape: RouteShape,
    dim: usize,
) -> Result<()> {
    let sums = weighted_sums(op, x, routing, shape, dim)?;
    let residual = residual.first_mut(op, "residual", sums.len())?;
    for (residual, sum) in residual.iter_mut().zip(sums) {
        *residual = (f64::from(*residual) + sum) as f32;
    }
    Ok(())
}

impl BackendMoeFused for ReferenceBackend {
    type Experts = RefExperts;

    fn load_expert_parts(&self, parts: &[WeightPart<'_>], k: usize) -> Result<RefExperts> {
        let op = "load_experts";
        let matrix = |part: &WeightPart<'_>| {
            let mut values = Vec::new();
            let (rows, cols) = (part.rows, k);
            require(op, rows > 0 && cols > 0, || {
                format!("a matrix is [{rows}, {cols}], expected at least 1 of each")
            })?;
            let count = elements(op, &[rows, cols])?;
            decode(op, part.bytes, part.dtype, count, &mut values)?;
            let shape = MatShape { rows, cols };
            Ok(RefWeight { values, shape })
        };
        RefExperts::from_matrices(op, parts.iter().map(matrix).collect())
    }

    fn route_topk_softmax(
        _: &mut RefContext,
        logits: &RefBuffer<f32>,
        routing: &mut Routing,
        shape: RouteShape,
    ) -> Result<()> {
        route(logits, routing, shape)
    }

    fn compute_ids_tpe(_: &mut RefContext, routing: &mut Routing, shape: RouteShape) -> Result<()> {
        sort_pairs(routing, shape)
    }

    fn moe_gemm(
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        input: ExpertInput,
        experts: &RefExperts,
        routing: &Routing,
        out: &mut RefBuffer<f32>,
        shape: MoeShape,
    ) -> Result<()> {
        per_pair(
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
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        (gate, up): (&RefExperts, &RefExperts),
        routing: &Routing,
        out: &mut RefBuffer<f32>,
        shape: MoeShape,
    ) -> Result<()> {
        let (op, x) = ("moe_gate_up_silu", (x, ExpertInput::PerToken));
        per_pair(op, x, [gate, up], routing, out, shape, |[gate, up]| {
            silu(gate) * up
        })
    }

    fn moe_weighted_sum(
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        routing: &Routing,
        out: &mut RefBuffer<f32>,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        let op = "moe_weighted_sum";
        let sums = weighted_sums(op, x, routing, shape, dim)?;
        for (out, sum) in out.first_mut(op, "out", sums.len())?.iter_mut().zip(sums) {
            *out = sum as f32;
        }
        Ok(())
    }

    fn moe_weighted_sum_residual(
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        routing: &Routing,
        residual: &mut RefBuffer<f32>,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        weighted_sum_residual(
            "moe_weighted_sum_residual",
            x,
            routing,
            residual,
            shape,
            dim,
        )
    }

    fn moe_weighted_sum_residual_norm(
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        routing: &Routing,
        residual: &mut RefBuffer<f32>,
        (weight, norm): (&RefBuffer<f32>, NormShape),
        out: &mut RefBuffer<f32>,
        shape: RouteShape,
    ) -> Result<()> {
        let op = "moe_weighted_sum_residual_norm";
        if norm.rows != shape.tokens {
            let (rows, tokens) = (norm.rows, shape.tokens);
            return Err(Error::invalid(
                op,
                format!("{rows} rows to norm, expected {tokens}, one for each token"),
            ));
        }
        // Checked before the residual changes.
        out.first(op, "out", elements(op, &[norm.rows, norm.dim])?)?;
        weight.first(op, "weight", norm.dim)?;
        weighted_sum_residual(op, x, routing, residual, shape, norm.dim)?;
        rms_norm(op, residual, weight, out, norm)
    }
}
