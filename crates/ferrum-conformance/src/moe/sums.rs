//! Weighted sums of what the experts of a token gave.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{BackendMoeFused, MoeRouting, NormShape, RouteShape};

struct Sums {
    shape: RouteShape,
    dim: usize,
    x: Vec<f32>,
    weights: Vec<f32>,
    residual: Vec<f32>,
    norm: Vec<f32>,
}

impl Sums {
    fn size(&self) -> usize {
        self.shape.tokens * self.dim
    }

    fn routing<B: BackendMoeFused>(&self, io: &mut Io<'_, B>) -> Check<MoeRouting<B>> {
        Ok(MoeRouting {
            expert_ids: io.exact(&[])?,
            weights: io.floats("weights", &self.weights)?,
            sorted_pairs: io.exact(&[])?,
            tokens_per_expert: io.exact(&[])?,
            offsets: io.exact(&[])?,
        })
    }

    fn sums(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.size()];
        for (pair, row) in self.x.chunks(self.dim).enumerate() {
            let token = pair / self.shape.top_k;
            for (i, &x) in row.iter().enumerate() {
                sums[token * self.dim + i] += f64::from(self.weights[pair]) * f64::from(x);
            }
        }
        sums
    }

    fn residuals(&self) -> Vec<f64> {
        let pairs = self.sums().into_iter().zip(&self.residual);
        pairs
            .map(|(sum, &residual)| sum + f64::from(residual))
            .collect()
    }
}

const EPS: f32 = 1e-6;

fn weighted_sum<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Sums) -> Check {
    let routing = data.routing(io)?;
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", data.size())?;
    let (shape, dim) = (data.shape, data.dim);
    B::moe_weighted_sum(&mut io.ctx, &x, &routing, (&mut out, false), shape, dim)?;
    io.take("out", &out, data.size())
}

/// The sum added to what was there.
fn added_sum<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Sums) -> Check {
    let routing = data.routing(io)?;
    let x = io.input("x", &data.x)?;
    let mut out = io.inout_of::<B::Act>("out", &data.residual)?;
    let (shape, dim) = (data.shape, data.dim);
    B::moe_weighted_sum(&mut io.ctx, &x, &routing, (&mut out, true), shape, dim)?;
    io.take("out", &out, data.size())
}

fn weighted_sum_residual<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Sums) -> Check {
    let routing = data.routing(io)?;
    let x = io.input("x", &data.x)?;
    let mut residual = io.inout_of::<B::Residual>("residual", &data.residual)?;
    let (shape, dim) = (data.shape, data.dim);
    B::moe_weighted_sum_residual(&mut io.ctx, &x, &routing, &mut residual, shape, dim)?;
    io.take("residual", &residual, data.size())
}

fn weighted_sum_residual_norm<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Sums) -> Check {
    let routing = data.routing(io)?;
    let x = io.input("x", &data.x)?;
    let weight = io.floats("weight", &data.norm)?;
    let mut residual = io.inout_of::<B::Residual>("residual", &data.residual)?;
    let mut out = io.output("out", data.size())?;
    let shape = NormShape {
        rows: data.shape.tokens,
        dim: data.dim,
        eps: EPS,
    };
    let (ctx, norm) = (&mut io.ctx, (&weight, shape));
    B::moe_weighted_sum_residual_norm(
        ctx,
        &x,
        &routing,
        &mut residual,
        norm,
        &mut out,
        data.shape,
    )?;
    io.take("out", &out, data.size())?;
    io.take("residual", &residual, data.size())
}

fn norm_formula(data: &Sums) -> Vec<Vec<f64>> {
    let residuals = data.residuals();
    let rows = residuals.chunks(data.dim);
    let normed = rows
        .flat_map(|row| naive::rms_norm(row, &data.norm, EPS))
        .collect();
    vec![normed, residuals]
}

fn make_sums(rng: &mut Rng, tokens: usize, top_k: usize, dim: usize, scale: f32) -> Sums {
    let pairs = tokens * top_k;
    Sums {
        shape: RouteShape::softmax(tokens, 8, top_k),
        dim,
        x: rng.acts(pairs * dim, scale),
        weights: (0..pairs).map(|_| rng.unit()).collect(),
        residual: rng.acts(tokens * dim, scale),
        norm: rng.norm_weights(dim),
    }
}

/// Weights of pairs, and what their experts' are multiplied with.
struct Weights {
    shape: RouteShape,
    expert_ids: Vec<i32>,
    weights: Vec<f32>,
    factors: Vec<f32>,
}

fn scale_weights<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Weights) -> Check {
    let mut routing = MoeRouting {
        expert_ids: io.indices("expert_ids", &data.expert_ids)?,
        weights: io.inout_of::<f32>("weights", &data.weights)?,
        sorted_pairs: io.exact(&[])?,
        tokens_per_expert: io.exact(&[])?,
        offsets: io.exact(&[])?,
    };
    let factors = io.floats("factors", &data.factors)?;
    B::moe_scale_weights(&mut io.ctx, &mut routing, &factors, data.shape)?;
    io.take("weights", &routing.weights, data.weights.len())
}

fn scaled(data: &Weights) -> Vec<Vec<f64>> {
    let pairs = data.weights.iter().zip(&data.expert_ids);
    let scaled =
        pairs.map(|(&weight, &id)| f64::from(weight) * f64::from(data.factors[id as usize]));
    vec![scaled.collect()]
}

fn make_weights(rng: &mut Rng, tokens: usize, top_k: usize) -> Weights {
    let (experts, pairs) = (7, tokens * top_k);
    Weights {
        shape: RouteShape::softmax(tokens, experts, top_k),
        expert_ids: (0..pairs).map(|pair| (pair * 5 % experts) as i32).collect(),
        weights: (0..pairs).map(|_| rng.unit()).collect(),
        factors: rng.floats(experts, 2.0),
    }
}

/// The cases of weighted sums.
pub(super) fn cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let mut add = |text: String, tokens: usize, top_k: usize, dim: usize, scale: f32| {
        let make = move |rng: &mut Rng| make_sums(rng, tokens, top_k, dim, scale);
        let case = |op, tolerance| label(op, act, tolerance, text.clone());
        let sums = implementations!(weighted_sum, |data| vec![data.sums()]);
        cases.add(case("moe_weighted_sum", Tolerance::F32_SUMS), make, sums);
        let added = implementations!(added_sum, |data| vec![data.residuals()]);
        let case_of = |op, tolerance| label(op, act, tolerance, format!("{text}, added"));
        cases.add(
            case_of("moe_weighted_sum", Tolerance::F32_SUMS),
            make,
            added,
        );
        let residuals = implementations!(weighted_sum_residual, |data| vec![data.residuals()]);
        cases.add(
            case("moe_weighted_sum_residual", Tolerance::F32_SUMS),
            make,
            residuals,
        );
        let norm = implementations!(weighted_sum_residual_norm, norm_formula);
        cases.add(
            case("moe_weighted_sum_residual_norm", Tolerance::NORM),
            make,
            norm,
        );
    };
    for (tokens, top_k, dim) in [
        (0, 2, 7),
        (1, 1, 1),
        (1, 2, 33),
        (5, 4, 65),
        (3, 8, 100),
        (33, 2, 257),
    ] {
        add(
            format!("{tokens} tokens, {top_k} pairs of {dim}"),
            tokens,
            top_k,
            dim,
            1.0,
        );
    }
    for (text, scale) in [("large values", 1e4), ("tiny values", 1e-5), ("zeros", 0.0)] {
        add(text.into(), 3, 2, 65, scale);
    }
    let op = "moe_scale_weights";
    for (tokens, top_k) in [(0, 2), (1, 1), (3, 2), (33, 7)] {
        let text = format!("{tokens} tokens, {top_k} pairs");
        let make = move |rng: &mut Rng| make_weights(rng, tokens, top_k);
        let case = label(op, "f32", Tolerance::F32_SUMS, text);
        cases.add(
            case,
            make,
            implementations!(scale_weights, |data| scaled(data)),
        );
    }
    let few = |rng: &mut Rng| make_weights(rng, 3, 2);
    cases.rejects_short_buffers((op, "f32"), few, both!(scale_weights));
    let few = |rng: &mut Rng| make_sums(rng, 3, 2, 7, 1.0);
    cases.rejects_short_buffers(("moe_weighted_sum", act), few, both!(weighted_sum));
    cases.rejects_short_buffers(
        ("moe_weighted_sum_residual", act),
        few,
        both!(weighted_sum_residual),
    );
    cases.rejects_short_buffers(
        ("moe_weighted_sum_residual_norm", act),
        few,
        both!(weighted_sum_residual_norm),
    );
}
