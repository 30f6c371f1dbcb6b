//! Which experts a token goes to, and the pairs sorted by expert.

use super::Routing;
use crate::backend::{MoeShape, RouteShape, check};
use crate::cpu::buffer::{CpuBuffer, SharedMut};
use crate::cpu::exec::Exec;
use crate::cpu::isa::Kernel;
use crate::cpu::math::exp;
use crate::cpu::simd::{LANES, Simd};
use ferrum_types::Result;

/// Softmax over each row of logits, then the `top_k` largest.
pub(super) fn route(
    exec: &Exec,
    logits: &CpuBuffer<f32>,
    routing: &mut Routing,
    shape: RouteShape,
) -> Result<()> {
    let pairs = check::route_topk_softmax(logits, routing, shape)?;
    let RouteShape {
        tokens,
        experts,
        top_k,
        ..
    } = shape;
    let logits = logits.as_slice();
    let ids = SharedMut::new(&mut routing.expert_ids.as_mut_slice()[..pairs]);
    let weights = SharedMut::new(&mut routing.weights.as_mut_slice()[..pairs]);
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
    let pairs = check::compute_ids_tpe(routing, shape)?;
    let experts = shape.experts;
    let expert_ids = &routing.expert_ids.as_slice()[..pairs];
    let ids = &mut routing.ids.as_mut_slice()[..pairs];
    let tpe = &mut routing.tpe.as_mut_slice()[..experts];
    let offsets = &mut routing.offsets.as_mut_slice()[..=experts];
    tpe.fill(0);
    for &expert in expert_ids {
        tpe[check::index("compute_ids_tpe", "an expert id", expert, experts)?] += 1;
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
/// `groups`; gives the sorted pairs, of which each stands there once.
pub(super) fn group_pairs<'a>(
    op: &'static str,
    routing: &'a Routing,
    pairs: usize,
    shape: MoeShape,
    groups: &mut Vec<[usize; 3]>,
) -> Result<&'a [i32]> {
    let experts = shape.experts.experts;
    let sorted = check::SortedPairs {
        expert_ids: &routing.expert_ids.as_slice()[..pairs],
        ids: &routing.ids.as_slice()[..pairs],
        tpe: &routing.tpe.as_slice()[..experts],
        offsets: &routing.offsets.as_slice()[..=experts],
    };
    // Groups, and tiles of two kinds, are at most as many as pairs: so a later step with other groups
    // allocates nothing.
    groups.reserve(3 * pairs);
    sorted.groups(op, |expert, start, count| {
        groups.push([expert, start, count])
    })?;
    Ok(sorted.ids)
}
