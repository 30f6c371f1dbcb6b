//! Which experts a token goes to.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::math::exp;
use crate::memory::SharedMut;
use crate::simd::{LANES, Simd};
use ferrum_types::{ExpertGroups, ExpertScore, GroupScore, RouteShape};
use std::ops::Range;

/// The `top_k` experts of each row of logits with the largest scores, and their weights, best first. `bias` is added to
/// scores where experts are ranked by them.
///
/// # Panics
/// When a slice is shorter than the shape says, or there are more than [`ExpertGroups::MAX`] groups.
pub fn route(
    exec: &Exec,
    (logits, bias): (&[f32], Option<&[f32]>),
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
    let bias = bias.map(|bias| &bias[..experts]);
    exec.parallel_for(tokens, 8 * experts, |range, _| {
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
                bias,
                ids,
                weights,
                shape,
            });
        }
    });
}

struct RouteToken<'a> {
    logits: &'a [f32],
    bias: Option<&'a [f32]>,
    ids: &'a mut [i32],
    weights: &'a mut [f32],
    shape: RouteShape,
}

/// By what a number is ranked: NaN comes last.
#[inline(always)]
fn rank(x: f32) -> f32 {
    if x.is_nan() { f32::NEG_INFINITY } else { x }
}

impl Kernel for RouteToken<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            logits,
            bias,
            ids,
            weights,
            shape,
        } = self;
        let by_logit = shape.ranks_logits(bias.is_some());
        let values = match by_logit {
            true => Values::Logits(logits),
            false => Values::Scores(logits, bias, Score::of(s, logits, shape.score)),
        };
        let mut best = Best {
            ids: &mut *ids,
            ranks: &mut *weights,
            held: 0,
        };
        match shape.groups {
            None => best.offer(s, &values, 0..logits.len()),
            Some(groups) => {
                let size = logits.len() / groups.groups;
                let mut kept = best_groups(s, &values, size, groups);
                while kept != 0 {
                    let first = kept.trailing_zeros() as usize * size;
                    kept &= kept - 1;
                    best.offer(s, &values, first..first + size);
                }
            }
        }
        // By logits, the first rank is the largest of the chosen.
        let largest = by_logit.then_some(weights[0]);
        set_weights(s, logits, (ids, weights), largest, shape);
    }
}

/// Weights of the chosen experts; `largest` of their logits, if it is known.
#[inline(always)]
fn set_weights<S: Simd>(
    s: S,
    logits: &[f32],
    (ids, weights): (&[i32], &mut [f32]),
    largest: Option<f32>,
    shape: RouteShape,
) {
    let chosen = |i: usize| logits[ids[i] as usize];
    let (mut total, largest) = match (shape.score, shape.renormalize) {
        (ExpertScore::Sigmoid, _) => (1.0, 0.0),
        (ExpertScore::Softmax, true) => {
            let all = (0..ids.len()).fold(f32::NEG_INFINITY, |m, i| m.max(chosen(i)));
            let largest = largest.unwrap_or(all);
            (sum_exp(s, ids.len(), s.splat(largest), chosen), largest)
        }
        // In a group that was not taken, a logit may be larger.
        (ExpertScore::Softmax, false) => match largest.filter(|_| shape.groups.is_none()) {
            Some(largest) => {
                let all = |i: usize| logits[i];
                (sum_exp(s, logits.len(), s.splat(largest), all), largest)
            }
            None => match Score::of(s, logits, shape.score) {
                Score::Softmax { largest, total } => (total, largest),
                Score::Sigmoid => (1.0, 0.0),
            },
        },
    };
    let score = |i: usize| {
        let x = s.splat(chosen(i));
        let y = match shape.score {
            ExpertScore::Softmax => exp(s, s.sub(x, s.splat(largest))),
            ExpertScore::Sigmoid => sigmoid(s, x),
        };
        s.to_array(y)[0]
    };
    if shape.renormalize && shape.score == ExpertScore::Sigmoid {
        total = 1e-20;
        (0..ids.len()).for_each(|i| total += score(i));
    }
    for (i, weight) in weights.iter_mut().enumerate() {
        *weight = score(i) / total * shape.scale;
    }
}

#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.zero(), x));
    s.div(s.splat(1.0), s.add(s.splat(1.0), e))
}

/// How a row's logits become scores.
#[derive(Clone, Copy)]
enum Score {
    Softmax { largest: f32, total: f32 },
    Sigmoid,
}

impl Score {
    #[inline(always)]
    fn of<S: Simd>(s: S, logits: &[f32], score: ExpertScore) -> Self {
        match score {
            ExpertScore::Sigmoid => Self::Sigmoid,
            ExpertScore::Softmax => {
                let largest = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
                let total = sum_exp(s, logits.len(), s.splat(largest), |i| logits[i]);
                Self::Softmax { largest, total }
            }
        }
    }
}

/// By what experts are ranked.
enum Values<'a> {
    Logits(&'a [f32]),
    /// Logits, what is added to their scores, and how they become these.
    Scores(&'a [f32], Option<&'a [f32]>, Score),
}

impl Values<'_> {
    /// Calls `f` with each expert and its rank.
    #[inline(always)]
    fn each<S: Simd>(&self, s: S, experts: Range<usize>, mut f: impl FnMut(usize, f32)) {
        let (logits, bias, score) = match *self {
            Values::Logits(logits) => {
                for e in experts {
                    f(e, rank(logits[e]));
                }
                return;
            }
            Values::Scores(logits, bias, score) => (logits, bias, score),
        };
        let mut first = experts.start;
        while first < experts.end {
            let len = LANES.min(experts.end - first);
            let mut lanes = [0.0; LANES];
            lanes[..len].copy_from_slice(&logits[first..][..len]);
            let x = s.lanes(lanes);
            let scores = s.to_array(match score {
                Score::Sigmoid => sigmoid(s, x),
                Score::Softmax { largest, total } => {
                    s.div(exp(s, s.sub(x, s.splat(largest))), s.splat(total))
                }
            });
            for (i, score) in scores[..len].iter().enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[first + i]);
                f(first + i, rank(score + bias));
            }
            first += LANES;
        }
    }
}

/// The groups that a token takes, as bits.
#[inline(always)]
fn best_groups<S: Simd>(s: S, values: &Values<'_>, size: usize, groups: ExpertGroups) -> u64 {
    let mut ranks = [f32::NEG_INFINITY; ExpertGroups::MAX];
    let ranks = &mut ranks[..groups.groups];
    for (group, out) in ranks.iter_mut().enumerate() {
        let mut best = [f32::NEG_INFINITY; 2];
        values.each(
            s,
            group * size..(group + 1) * size,
            #[inline(always)]
            |_, rank| {
                if rank > best[0] {
                    best = [rank, best[0]];
                } else if rank > best[1] {
                    best[1] = rank;
                }
            },
        );
        *out = match groups.score {
            GroupScore::BestTwo if size > 1 => rank(best[0] + best[1]),
            GroupScore::Best | GroupScore::BestTwo => best[0],
        };
    }
    let mut kept = 0u64;
    for _ in 0..groups.top {
        let mut best = None;
        for (group, &rank) in ranks.iter().enumerate() {
            let is_left = kept >> group & 1 == 0;
            if is_left && best.is_none_or(|(_, most)| rank > most) {
                best = Some((group, rank));
            }
        }
        kept |= best.map_or(0, |(group, _)| 1 << group);
    }
    kept
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

/// The best experts so far, best first, the lowest index of equals, with their ranks.
struct Best<'a> {
    ids: &'a mut [i32],
    ranks: &'a mut [f32],
    held: usize,
}

impl Best<'_> {
    /// Experts that come after those which were offered before.
    #[inline(always)]
    fn offer<S: Simd>(&mut self, s: S, values: &Values<'_>, experts: Range<usize>) {
        let (ids, ranks, held) = (&mut *self.ids, &mut *self.ranks, &mut self.held);
        let wanted = ids.len();
        values.each(
            s,
            experts,
            #[inline(always)]
            |e, rank| {
                if *held == wanted && rank <= ranks[*held - 1] {
                    return;
                }
                if *held < wanted {
                    *held += 1;
                }
                let mut at = *held - 1;
                while at > 0 && ranks[at - 1] < rank {
                    (ids[at], ranks[at]) = (ids[at - 1], ranks[at - 1]);
                    at -= 1;
                }
                (ids[at], ranks[at]) = (e as i32, rank);
            },
        );
    }
}
