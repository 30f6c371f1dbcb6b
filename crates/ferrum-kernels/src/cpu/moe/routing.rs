//! Which experts a token goes to, and the pairs sorted by expert.

use super::Routing;
use crate::backend::{MoeShape, RouteShape};
use crate::cpu::buffer::{CpuBuffer, SharedMut};
use crate::cpu::check::{elements, index, require};
use crate::cpu::exec::Exec;
use crate::cpu::isa::Kernel;
use crate::cpu::math::exp;
use crate::cpu::simd::{LANES, Simd};
use ferrum_types::{Error, Result};

/// Softmax over each row of logits, then the `top_k` largest.
pub(super) fn route(
    exec: &Exec,
    logits: &CpuBuffer<f32>,
    routing: &mut Routing,
    shape: RouteShape,
) -> Result<()> {
    let op = "route_topk_softmax";
    let RouteShape {
        tokens,
        experts,
        top_k,
        ..
    } = shape;
    require(op, (1..=experts).contains(&top_k), || {
        format!("top_k is {top_k}, expected 1 to {experts}, the number of experts")
    })?;
    require(op, i32::try_from(experts).is_ok(), || {
        format!("{experts} experts, expected at most {}", i32::MAX)
    })?;
    let pairs = elements(op, &[tokens, top_k])?;
    let logits = logits.first(op, "logits", elements(op, &[tokens, experts])?)?;
    let ids = routing.expert_ids.first_mut(op, "expert_ids", pairs)?;
    let weights = routing.weights.first_mut(op, "weights", pairs)?;
    let (ids, weights) = (SharedMut::new(ids), SharedMut::new(weights));
    exec.spread(tokens, 8 * experts, |range, _| {
        for token in range {
            // SAFETY: each token belongs to one task.
            let (ids, weights) = unsafe {
                (
                    ids.part(token * top_k, top_k),
                    weights.part(token * top_k, top_k),
                )
            };
            exec.level.run(RouteToken {
                logits: &logits[token * experts..][..experts],
                ids,
                weights,
                shape,
            });
        }
    });
    Ok(())
}

struct RouteToken<'a> {
    logits: &'a [f32],
    ids: &'a mut [i32],
    weights: &'a mut [f32],
    shape: RouteShape,
}

/// By what a logit is ranked: NaN comes last.
#[inline(always)]
fn rank(logit: f32) -> f32 {
    if logit.is_nan() {
        f32::NEG_INFINITY
    } else {
        logit
    }
}

impl Kernel for RouteToken<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            logits,
            ids,
            weights,
            shape,
        } = self;
        choose(logits, ids, weights);
        // Experts are ranked by logits, not by probabilities, which may round to equal ones.
        let largest = s.splat(weights[0]);
        let total = if shape.renormalize {
            sum_exp(s, ids.len(), largest, |i| logits[ids[i] as usize])
        } else {
            sum_exp(s, logits.len(), largest, |i| logits[i])
        };
        for (id, weight) in ids.iter().zip(weights) {
            let e = exp(s, s.sub(s.splat(logits[*id as usize]), largest));
            *weight = s.to_array(e)[0] / total * shape.scale;
        }
    }
}

/// `Σ e^(x(i) - largest)` for `i` below `len`, in 16 sums by index.
#[inline(always)]
fn sum_exp<S: Simd>(s: S, len: usize, largest: S::V, x: impl Fn(usize) -> f32) -> f32 {
    let mut sum = s.zero();
    let mut first = 0;
    while first < len {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for (i, lane) in lanes.iter_mut().take(len - first).enumerate() {
            *lane = x(first + i);
        }
        let e = exp(s, s.sub(s.lanes(lanes), largest));
        if len - first < LANES {
            // A lane that stands for nothing adds nothing, also where `largest` is infinite.
            let mut e = s.to_array(e);
            e[len - first..].fill(0.0);
            sum = s.add(sum, s.lanes(e));
        } else {
            sum = s.add(sum, e);
        }
        first += LANES;
    }
    s.sum(sum)
}

/// The best `ids.len()` logits, best first, the lowest index of equals; `ranks` receives their ranks.
#[inline(always)]
fn choose(logits: &[f32], ids: &mut [i32], ranks: &mut [f32]) {
    let wanted = ids.len();
    let mut held = 0;
    for (e, &logit) in logits.iter().enumerate() {
        let rank = rank(logit);
        if held == wanted && rank <= ranks[held - 1] {
            continue;
        }
        if held < wanted {
            held += 1;
        }
        let mut at = held - 1;
        while at > 0 && ranks[at - 1] < rank {
            (ids[at], ranks[at]) = (ids[at - 1], ranks[at - 1]);
            at -= 1;
        }
        (ids[at], ranks[at]) = (e as i32, rank);
    }
}

/// Stable bucket sort of pairs by expert.
pub(super) fn sort_pairs(routing: &mut Routing, shape: RouteShape) -> Result<()> {
    let op = "compute_ids_tpe";
    let experts = shape.experts;
    let pairs = elements(op, &[shape.tokens, shape.top_k])?;
    require(op, i32::try_from(pairs).is_ok(), || {
        format!("{pairs} pairs, expected at most {}", i32::MAX)
    })?;
    let ids = routing.ids.first_mut(op, "ids", pairs)?;
    let tpe = routing.tpe.first_mut(op, "tpe", experts)?;
    let offsets = routing
        .offsets
        .first_mut(op, "offsets", experts.saturating_add(1))?;
    let expert_ids = routing.expert_ids.first(op, "expert_ids", pairs)?;
    tpe.fill(0);
    for &expert in expert_ids {
        tpe[index(op, "an expert id", expert, experts)?] += 1;
    }
    let mut next = 0;
    for (offset, count) in offsets.iter_mut().zip(&mut *tpe) {
        *offset = next;
        // From here on it counts the pairs that have found their place.
        next += std::mem::take(count);
    }
    offsets[experts] = next;
    for (pair, &expert) in (0i32..).zip(expert_ids) {
        let expert = expert as usize;
        ids[(offsets[expert] + tpe[expert]) as usize] = pair;
        tpe[expert] += 1;
    }
    Ok(())
}

/// The pairs of each expert that has any, as `[expert, first index in ids, count]` at the end of
/// `groups`; gives the sorted pairs.
///
/// Checks what products rely on: each pair stands in `ids` once.
pub(super) fn group_pairs<'a>(
    op: &'static str,
    routing: &'a Routing,
    shape: MoeShape,
    groups: &mut Vec<[usize; 3]>,
) -> Result<&'a [i32]> {
    let experts = shape.experts.experts;
    let pairs = elements(op, &[shape.tokens, shape.top_k])?;
    let expert_ids = routing.expert_ids.first(op, "expert_ids", pairs)?;
    let ids = routing.ids.first(op, "ids", pairs)?;
    let tpe = routing.tpe.first(op, "tpe", experts)?;
    let offsets = routing
        .offsets
        .first(op, "offsets", experts.saturating_add(1))?;
    // Groups, and tiles of two kinds, are at most as many as pairs: so a later step with other groups
    // allocates nothing.
    groups.reserve(3 * pairs);
    let unsorted = |what: String| {
        let reason = format!("{what}\nhint: run compute_ids_tpe first");
        Error::invalid(op, reason)
    };
    let mut start = 0;
    for (expert, &count) in tpe.iter().enumerate() {
        let next = offsets[expert + 1];
        let end = usize::try_from(next).unwrap_or(usize::MAX);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let bounds = offsets[expert] as usize == start && end <= pairs;
        if !bounds || end.checked_sub(start) != Some(count) {
            let bounds = format!("{} to {next}", offsets[expert]);
            let what = format!("expert {expert} has {count} pairs from {bounds}, of {pairs}");
            return Err(unsorted(what));
        }
        let mut last = -1;
        for &pair in &ids[start..end] {
            // Ascending within an expert, and of that expert: so no pair stands here twice.
            if pair <= last || expert_ids.get(pair as usize) != Some(&(expert as i32)) {
                return Err(unsorted(format!(
                    "the pairs of expert {expert} are not sorted"
                )));
            }
            last = pair;
        }
        if count > 0 {
            groups.push([expert, start, count]);
        }
        start = end;
    }
    if start != pairs {
        return Err(unsorted(format!("{start} of {pairs} pairs are sorted")));
    }
    Ok(ids)
}
