//! Which experts a token goes to, and the pairs sorted by expert.

use crate::case::{Cases, act_name, both, label, probe};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{BackendMoeFused, MoeRouting, RouteShape};

struct Route {
    shape: RouteShape,
    logits: Vec<f32>,
}

fn route_topk_softmax<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Route) -> Check {
    let pairs = data.shape.pairs();
    let logits = io.input_of::<B::Logit>("logits", &data.logits)?;
    let mut routing = MoeRouting {
        expert_ids: io.index_output("expert_ids", pairs)?,
        weights: io.float_output("weights", pairs)?,
        ids: io.exact(&[])?,
        tpe: io.exact(&[])?,
        offsets: io.exact(&[])?,
    };
    B::route_topk_softmax(&mut io.ctx, &logits, &mut routing, data.shape)?;
    io.take_indices("expert_ids", &routing.expert_ids, pairs)?;
    io.take_floats("weights", &routing.weights, pairs)
}

/// Probabilities of all experts; `top_k` times the first of the largest that is left.
fn route_formula(data: &Route) -> Vec<Vec<f64>> {
    let RouteShape {
        experts,
        top_k,
        renormalize,
        scale,
        ..
    } = data.shape;
    let (mut ids, mut weights) = (vec![], vec![]);
    for row in data.logits.chunks(experts) {
        let logits = naive::wide(row);
        let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|x| (x - highest).exp()).sum();
        let mut left = logits.clone();
        let mut chosen = vec![];
        for _ in 0..top_k {
            let best = left.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let expert = left.iter().position(|&x| x == best).unwrap_or(0);
            left[expert] = f64::NEG_INFINITY;
            ids.push(expert as f64);
            chosen.push((logits[expert] - highest).exp() / total);
        }
        let sum: f64 = if renormalize {
            chosen.iter().sum()
        } else {
            1.0
        };
        weights.extend(chosen.iter().map(|weight| weight / sum * f64::from(scale)));
    }
    vec![ids, weights]
}

/// Expert of each pair.
pub(super) struct Pairs {
    pub(super) shape: RouteShape,
    pub(super) expert_ids: Vec<i32>,
}

impl Pairs {
    /// Each token has `top_k` different experts; `favourite` draws most of them.
    pub(super) fn new(
        rng: &mut Rng,
        tokens: usize,
        experts: usize,
        top_k: usize,
        favourite: bool,
    ) -> Self {
        let mut expert_ids = Vec::new();
        for _ in 0..tokens {
            let mut order = rng.permutation(experts);
            if favourite {
                order.retain(|&expert| expert != experts / 2);
                order.insert(0, experts / 2);
            }
            expert_ids.extend(order[..top_k].iter().map(|&expert| expert as i32));
        }
        let shape = RouteShape {
            tokens,
            experts,
            top_k,
            renormalize: true,
            scale: 1.0,
        };
        Pairs { shape, expert_ids }
    }

    /// `ids`, `tpe` and `offsets`.
    pub(super) fn sorted(&self) -> [Vec<i32>; 3] {
        let mut ids: Vec<i32> = (0..self.expert_ids.len() as i32).collect();
        ids.sort_by_key(|&pair| (self.expert_ids[pair as usize], pair));
        let count = |expert: usize| {
            let same = |id: &&i32| **id == expert as i32;
            self.expert_ids.iter().filter(same).count() as i32
        };
        let tpe: Vec<i32> = (0..self.shape.experts).map(count).collect();
        let mut offsets = vec![0];
        for (expert, count) in tpe.iter().enumerate() {
            offsets.push(offsets[expert] + count);
        }
        [ids, tpe, offsets]
    }

    /// The pairs of one token alone.
    pub(super) fn token(&self, token: usize) -> Self {
        let top_k = self.shape.top_k;
        Pairs {
            shape: RouteShape {
                tokens: 1,
                ..self.shape
            },
            expert_ids: self.expert_ids[token * top_k..][..top_k].to_vec(),
        }
    }
}

fn compute_ids_tpe<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Pairs) -> Check {
    let (pairs, experts) = (data.expert_ids.len(), data.shape.experts);
    let mut routing = MoeRouting {
        expert_ids: io.indices("expert_ids", &data.expert_ids)?,
        weights: io.exact(&vec![0.5; pairs])?,
        ids: io.index_output("ids", pairs)?,
        tpe: io.index_output("tpe", experts)?,
        offsets: io.index_output("offsets", experts + 1)?,
    };
    B::compute_ids_tpe(&mut io.ctx, &mut routing, data.shape)?;
    io.take_indices("ids", &routing.ids, pairs)?;
    io.take_indices("tpe", &routing.tpe, experts)?;
    io.take_indices("offsets", &routing.offsets, experts + 1)
}

fn sort_formula(data: &Pairs) -> Vec<Vec<f64>> {
    data.sorted()
        .iter()
        .map(|values| naive::wide_ints(values))
        .collect()
}

/// The cases of routing.
pub(super) fn cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    let (op, act) = ("route_topk_softmax", act_name::<B>());
    for (tokens, experts, top_k) in [
        (0, 8, 2),
        (1, 1, 1),
        (1, 8, 2),
        (7, 33, 4),
        (5, 60, 6),
        (3, 128, 8),
        (2, 257, 1),
        (4, 8, 8),
    ] {
        for (renormalize, scale) in [(true, 1.0), (false, 1.0), (true, 2.5), (false, 16.0)] {
            let shape = RouteShape {
                tokens,
                experts,
                top_k,
                renormalize,
                scale,
            };
            let norm = if renormalize { ", renormalised" } else { "" };
            let name = format!("{tokens} tokens, {top_k} of {experts}{norm}, times {scale}");
            let case = label(op, act, Tolerance::ELEMENTWISE, name);
            let make = move |rng: &mut Rng| {
                let logits = rng.acts(tokens * experts, 2.0);
                Route { shape, logits }
            };
            cases.add(case, make, probe!(route_topk_softmax, route_formula));
        }
    }
    let shape = RouteShape {
        tokens: 9,
        experts: 40,
        top_k: 6,
        renormalize: true,
        scale: 1.0,
    };
    let ties = move |rng: &mut Rng| {
        let logits = (0..9 * 40).map(|_| rng.below(3) as f32).collect();
        Route { shape, logits }
    };
    let case = label(op, act, Tolerance::ELEMENTWISE, "the lowest of equals");
    cases.add(case, ties, probe!(route_topk_softmax, route_formula));
    for (text, scale) in [("large logits", 1e4), ("zeros", 0.0)] {
        let make = move |rng: &mut Rng| Route {
            shape,
            logits: rng.acts(9 * 40, scale),
        };
        let case = label(op, act, Tolerance::ELEMENTWISE, text);
        cases.add(case, make, probe!(route_topk_softmax, route_formula));
    }
    let few = move |rng: &mut Rng| Route {
        shape,
        logits: rng.acts(9 * 40, 1.0),
    };
    cases.short((op, act), few, both!(route_topk_softmax));

    let op = "compute_ids_tpe";
    for (tokens, experts, top_k) in [
        (0, 8, 2),
        (1, 1, 1),
        (1, 8, 2),
        (7, 33, 4),
        (100, 60, 6),
        (300, 8, 2),
        (3, 257, 8),
    ] {
        for (favourite, suffix) in [(false, ""), (true, ", one for all tokens")] {
            let name = format!("{tokens} tokens, {top_k} of {experts}{suffix}");
            let make = move |rng: &mut Rng| Pairs::new(rng, tokens, experts, top_k, favourite);
            let case = label(op, "i32", Tolerance::EXACT, name);
            cases.add(case, make, probe!(compute_ids_tpe, sort_formula));
        }
    }
    let few = |rng: &mut Rng| Pairs::new(rng, 5, 8, 2, false);
    cases.short((op, "i32"), few, both!(compute_ids_tpe));
}
