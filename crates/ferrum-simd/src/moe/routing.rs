//! Which experts a token goes to.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::math::exp;
use crate::memory::SharedMut;
use crate::simd::{LANES, Simd};
use ferrum_types::RouteShape;

/// Softmax over each row of logits, then the `top_k` largest: experts and their weights, best first.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn route(
    exec: &Exec,
    logits: &[f32],
    (ids, weights): (&mut [i32], &mut [f32]),
    shape: RouteShape,
) {
    let RouteShape {
        tokens,
        experts,
        top_k,
        ..
    } = shape;
    let ids = SharedMut::new(&mut ids[..shape.pairs()]);
    let weights = SharedMut::new(&mut weights[..shape.pairs()]);
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
