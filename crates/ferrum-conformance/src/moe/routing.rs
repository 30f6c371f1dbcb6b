//! Which experts a token goes to, and the pairs sorted by expert.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{
    BackendMoeFused, ExpertGroups, ExpertScore, GroupScore, MoeRouting, RouteShape,
};

struct Route {
    shape: RouteShape,
    logits: Vec<f32>,
    bias: Option<Vec<f32>>,
}

fn route_topk<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Route) -> Check {
    let pairs = data.shape.pairs();
    let logits = io.input_of::<B::Logit>("logits", &data.logits)?;
    let mut routing = MoeRouting {
        expert_ids: io.index_output("expert_ids", pairs)?,
        weights: io.float_output("weights", pairs)?,
        sorted_pairs: io.exact(&[])?,
        tokens_per_expert: io.exact(&[])?,
        offsets: io.exact(&[])?,
    };
    let bias = data.bias.as_ref();
    let bias = bias.map(|bias| io.floats("bias", bias)).transpose()?;
    B::route_topk(
        &mut io.ctx,
        &logits,
        bias.as_ref(),
        &mut routing,
        data.shape,
    )?;
    io.take_indices("expert_ids", &routing.expert_ids, pairs)?;
    io.take_floats("weights", &routing.weights, pairs)
}

/// The first of the largest that is left, `count` times.
fn taken(mut left: Vec<f64>, count: usize) -> Vec<usize> {
    let take = |_| {
        let best = left.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let place = left.iter().position(|&x| x == best).unwrap_or(0);
        left[place] = f64::NEG_INFINITY;
        place
    };
    (0..count).map(take).collect()
}

/// What experts are ranked by: `-∞` outside of the best groups.
fn ranks(data: &Route, logits: &[f64], scores: &[f64]) -> Vec<f64> {
    let shape = data.shape;
    let mut ranks = match &data.bias {
        None if shape.groups.is_none_or(|g| g.score == GroupScore::Best) => logits.to_vec(),
        None => scores.to_vec(),
        Some(bias) => {
            let sums = scores.iter().zip(bias);
            sums.map(|(score, bias)| score + f64::from(*bias)).collect()
        }
    };
    if let Some(groups) = shape.groups {
        let size = shape.experts / groups.groups;
        let of_group = |group: &[f64]| {
            let best = taken(group.to_vec(), size);
            let second = best.get(1).filter(|_| groups.score == GroupScore::BestTwo);
            group[best[0]] + second.map_or(0.0, |&e| group[e])
        };
        let best = taken(ranks.chunks(size).map(of_group).collect(), groups.top);
        for (e, rank) in ranks.iter_mut().enumerate() {
            if !best.contains(&(e / size)) {
                *rank = f64::NEG_INFINITY;
            }
        }
    }
    ranks
}

/// Scores of all experts, and of the first of the largest the weights.
fn route_formula(data: &Route) -> Vec<Vec<f64>> {
    let shape = data.shape;
    let (mut ids, mut weights) = (vec![], vec![]);
    for row in data.logits.chunks(shape.experts) {
        let logits = naive::wide(row);
        let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|x| (x - highest).exp()).sum();
        let score = |x: &f64| match shape.score {
            ExpertScore::Softmax => (x - highest).exp() / total,
            ExpertScore::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        };
        let scores: Vec<f64> = logits.iter().map(score).collect();
        let chosen = taken(ranks(data, &logits, &scores), shape.top_k);
        let sum: f64 = if shape.renormalize {
            chosen.iter().map(|&e| scores[e]).sum()
        } else {
            1.0
        };
        ids.extend(chosen.iter().map(|&e| e as f64));
        let weight = |&e: &usize| scores[e] / sum * f64::from(shape.scale);
        weights.extend(chosen.iter().map(weight));
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
        let shape = RouteShape::softmax(tokens, experts, top_k);
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
        sorted_pairs: io.index_output("ids", pairs)?,
        tokens_per_expert: io.index_output("tpe", experts)?,
        offsets: io.index_output("offsets", experts + 1)?,
    };
    B::compute_ids_tpe(&mut io.ctx, &mut routing, data.shape)?;
    io.take_indices("ids", &routing.sorted_pairs, pairs)?;
    io.take_indices("tpe", &routing.tokens_per_expert, experts)?;
    io.take_indices("offsets", &routing.offsets, experts + 1)
}

fn route_pairs<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Route) -> Check {
    let (pairs, experts) = (data.shape.pairs(), data.shape.experts);
    let logits = io.input_of::<B::Logit>("logits", &data.logits)?;
    let mut routing = MoeRouting {
        expert_ids: io.index_output("expert_ids", pairs)?,
        weights: io.float_output("weights", pairs)?,
        sorted_pairs: io.index_output("ids", pairs)?,
        tokens_per_expert: io.index_output("tpe", experts)?,
        offsets: io.index_output("offsets", experts + 1)?,
    };
    let bias = data.bias.as_ref();
    let bias = bias.map(|bias| io.floats("bias", bias)).transpose()?;
    let (ctx, bias) = (&mut io.ctx, bias.as_ref());
    B::route_pairs(ctx, &logits, bias, &mut routing, data.shape)?;
    io.take_indices("expert_ids", &routing.expert_ids, pairs)?;
    io.take_floats("weights", &routing.weights, pairs)?;
    io.take_indices("ids", &routing.sorted_pairs, pairs)?;
    io.take_indices("tpe", &routing.tokens_per_expert, experts)?;
    io.take_indices("offsets", &routing.offsets, experts + 1)
}

fn route_pairs_formula(data: &Route) -> Vec<Vec<f64>> {
    let mut found = route_formula(data);
    let pairs = Pairs {
        shape: data.shape,
        expert_ids: found[0].iter().map(|&id| id as i32).collect(),
    };
    found.extend(sort_formula(&pairs));
    found
}

fn sort_formula(data: &Pairs) -> Vec<Vec<f64>> {
    data.sorted()
        .iter()
        .map(|values| naive::wide_ints(values))
        .collect()
}

/// Scores of both kinds, with and without biases and groups.
fn scored_cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    let (op, act) = ("route_topk", act_name::<B>());
    let of = |groups, top, score| Some(ExpertGroups { groups, top, score });
    for (score, called) in [
        (ExpertScore::Softmax, "softmax"),
        (ExpertScore::Sigmoid, "sigmoid"),
    ] {
        for (tokens, experts, top_k, groups) in [
            (1, 1, 1, None),
            (5, 37, 4, None),
            (7, 40, 5, of(4, 2, GroupScore::Best)),
            (7, 42, 4, of(6, 3, GroupScore::BestTwo)),
            (3, 256, 8, of(8, 4, GroupScore::BestTwo)),
            (2, 64, 6, of(64, 9, GroupScore::BestTwo)),
            (4, 18, 18, of(1, 1, GroupScore::BestTwo)),
            (2, 300, 40, None),
        ] {
            for (biased, renormalize, scale) in [(false, false, 1.5), (true, true, 2.5)] {
                let shape = RouteShape {
                    score,
                    groups,
                    renormalize,
                    scale,
                    ..RouteShape::softmax(tokens, experts, top_k)
                };
                let bias = if biased { ", a bias" } else { "" };
                let name =
                    format!("{called}, {tokens} tokens, {top_k} of {experts}, {groups:?}{bias}");
                let make = move |rng: &mut Rng| Route {
                    shape,
                    logits: rng.acts(tokens * experts, 2.0),
                    bias: biased.then(|| rng.floats(experts, 0.3)),
                };
                let case = label(op, act, Tolerance::ELEMENTWISE, name);
                cases.add(case, make, implementations!(route_topk, route_formula));
            }
        }
    }
}

/// The cases of routing.
pub(super) fn cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    let (op, act) = ("route_topk", act_name::<B>());
    for (tokens, experts, top_k) in [
        (0, 8, 2),
        (1, 1, 1),
        (1, 8, 2),
        (7, 33, 4),
        (5, 60, 6),
        (3, 128, 8),
        (2, 257, 1),
        (2, 300, 40),
        (4, 8, 8),
    ] {
        for (renormalize, scale) in [(true, 1.0), (false, 1.0), (true, 2.5), (false, 16.0)] {
            let shape = RouteShape {
                renormalize,
                scale,
                ..RouteShape::softmax(tokens, experts, top_k)
            };
            let norm = if renormalize { ", renormalised" } else { "" };
            let name = format!("{tokens} tokens, {top_k} of {experts}{norm}, times {scale}");
            let case = label(op, act, Tolerance::ELEMENTWISE, name);
            let make = move |rng: &mut Rng| {
                let logits = rng.acts(tokens * experts, 2.0);
                let bias = None;
                Route {
                    shape,
                    logits,
                    bias,
                }
            };
            cases.add(case, make, implementations!(route_topk, route_formula));
        }
    }
    scored_cases(cases);
    let shape = RouteShape {
        renormalize: true,
        ..RouteShape::softmax(9, 40, 6)
    };
    let ties = move |rng: &mut Rng| {
        let logits = (0..9 * 40).map(|_| rng.below(3) as f32).collect();
        let bias = None;
        Route {
            shape,
            logits,
            bias,
        }
    };
    let case = label(op, act, Tolerance::ELEMENTWISE, "the lowest of equals");
    cases.add(case, ties, implementations!(route_topk, route_formula));
    // More equals than a lane of a warp keeps.
    let many = RouteShape {
        renormalize: true,
        ..RouteShape::softmax(2, 300, 45)
    };
    let make = move |rng: &mut Rng| Route {
        shape: many,
        logits: (0..2 * 300).map(|_| rng.below(8) as f32).collect(),
        bias: None,
    };
    let case = label(op, act, Tolerance::ELEMENTWISE, "equals of 300");
    cases.add(case, make, implementations!(route_topk, route_formula));
    for (text, scale) in [("large logits", 1e4), ("zeros", 0.0)] {
        let make = move |rng: &mut Rng| Route {
            shape,
            logits: rng.acts(9 * 40, scale),
            bias: None,
        };
        let case = label(op, act, Tolerance::ELEMENTWISE, text);
        cases.add(case, make, implementations!(route_topk, route_formula));
    }
    let few = move |rng: &mut Rng| Route {
        shape,
        logits: rng.acts(9 * 40, 1.0),
        bias: Some(rng.floats(40, 1.0)),
    };
    cases.rejects_short_buffers((op, act), few, both!(route_topk));

    let op = "route_pairs";
    let groups = Some(ExpertGroups {
        groups: 8,
        top: 4,
        score: GroupScore::BestTwo,
    });
    for (tokens, experts, top_k, groups) in [
        (0, 8, 2, None),
        (1, 1, 1, None),
        (1, 128, 8, None),
        (8, 33, 4, None),
        (9, 33, 4, None),
        (6, 300, 40, None),
        (7, 300, 40, None),
        (3, 256, 8, groups),
    ] {
        let shape = RouteShape {
            renormalize: true,
            groups,
            ..RouteShape::softmax(tokens, experts, top_k)
        };
        let make = move |rng: &mut Rng| Route {
            shape,
            logits: rng.acts(tokens * experts, 2.0),
            bias: groups.map(|_| rng.floats(experts, 0.3)),
        };
        let name = format!("{tokens} tokens, {top_k} of {experts}, {groups:?}");
        let case = label(op, act, Tolerance::ELEMENTWISE, name);
        cases.add(
            case,
            make,
            implementations!(route_pairs, route_pairs_formula),
        );
    }
    cases.rejects_short_buffers((op, act), few, both!(route_pairs));

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
            cases.add(case, make, implementations!(compute_ids_tpe, sort_formula));
        }
    }
    let few = |rng: &mut Rng| Pairs::new(rng, 5, 8, 2, false);
    cases.rejects_short_buffers((op, "i32"), few, both!(compute_ids_tpe));
}
