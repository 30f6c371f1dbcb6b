//! Mixture of experts: routing, per-expert products over every kind of stack, weighted sums.

use crate::case::{Cases, act_name, label, probe};
use crate::compare::Tolerance;
use crate::data::{Dense, FileBytes, Rng};
use crate::io::{Check, Io, wrong};
use crate::marlin::{Kind, Layer};
use crate::{gguf, naive};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{
    BackendMoeFused, BackendQuantGguf, BackendQuantMarlin, ExpertInput, ExpertShape, MoeRouting,
    MoeShape, RouteShape,
};
use ferrum_types::{Error, GgufQuantType, SrcDtype};

// ---- routing ---------------------------------------------------------------------------------

struct Route {
    shape: RouteShape,
    logits: Vec<f32>,
}

fn route_topk_softmax<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Route) -> Check {
    let pairs = data.shape.pairs();
    let logits = io.input("logits", &data.logits)?;
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
struct Pairs {
    shape: RouteShape,
    expert_ids: Vec<i32>,
}

impl Pairs {
    /// Each token has `top_k` different experts; `favourite` draws most of them.
    fn new(rng: &mut Rng, tokens: usize, experts: usize, top_k: usize, favourite: bool) -> Self {
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
    fn sorted(&self) -> [Vec<i32>; 3] {
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
    fn token(&self, token: usize) -> Self {
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

// ---- stacks ----------------------------------------------------------------------------------

/// A stack of expert matrices as it lies in a file.
enum Stack {
    Dense(Dense),
    Gguf(GgufQuantType, FileBytes),
    Layers(Vec<Layer>),
}

/// What kind of stack to make.
#[derive(Clone, Copy)]
enum StackKind {
    Dense(SrcDtype),
    Gguf(GgufQuantType),
    Layers(Kind),
}

impl StackKind {
    fn dtype(self) -> &'static str {
        match self {
            StackKind::Dense(dtype) => dtype.dtype().name(),
            StackKind::Gguf(ty) => ty.name(),
            StackKind::Layers(kind) => kind.dtype(),
        }
    }

    fn tolerance(self) -> Tolerance {
        match self {
            StackKind::Dense(SrcDtype::F32) => Tolerance::F32_SUMS,
            StackKind::Dense(_) => Tolerance::HALF_STORAGE,
            StackKind::Gguf(ty) => gguf::tolerance(ty),
            StackKind::Layers(_) => Tolerance::QUANTIZED,
        }
    }

    fn stack(self, rng: &mut Rng, shape: ExpertShape) -> Stack {
        let ExpertShape { experts, n, k } = shape;
        match self {
            StackKind::Dense(dtype) => {
                Stack::Dense(Dense::new(dtype, &rng.floats(experts * n * k, 0.1)))
            }
            StackKind::Gguf(ty) => {
                let rows = gguf::random_rows(rng, ty, experts * n, k / ty.block_len());
                Stack::Gguf(ty, rows)
            }
            StackKind::Layers(kind) => Stack::Layers(
                (0..experts)
                    .map(|_| Layer::new(rng, kind, n, k, 32))
                    .collect(),
            ),
        }
    }
}

impl Stack {
    /// `[experts, n, k]`.
    fn values(&self) -> Vec<f32> {
        match self {
            Stack::Dense(dense) => dense.values.clone(),
            Stack::Gguf(ty, bytes) => gguf::decode(*ty, bytes.get()),
            Stack::Layers(layers) => layers
                .iter()
                .flat_map(|layer| layer.values.clone())
                .collect(),
        }
    }
}

/// How a backend loads a stack: which of its capabilities that needs.
trait Loader<B: BackendMoeFused> {
    fn load(device: &B, stack: &Stack, shape: ExpertShape) -> Check<B::Experts>;
}

struct LoadDense;
struct LoadGguf;
struct LoadLayers;

const WRONG_LOADER: &str = "the case asks for another kind of stack than it made";

impl<B: BackendMoeFused> Loader<B> for LoadDense {
    fn load(device: &B, stack: &Stack, shape: ExpertShape) -> Check<B::Experts> {
        match stack {
            Stack::Dense(dense) => Ok(device.load_experts(dense.bytes(), dense.dtype, shape)?),
            _ => wrong(WRONG_LOADER),
        }
    }
}

impl<B: BackendMoeFused + BackendQuantGguf> Loader<B> for LoadGguf {
    fn load(device: &B, stack: &Stack, shape: ExpertShape) -> Check<B::Experts> {
        match stack {
            Stack::Gguf(ty, bytes) => Ok(device.load_quant_experts(bytes.get(), *ty, shape)?),
            _ => wrong(WRONG_LOADER),
        }
    }
}

impl<B: BackendMoeFused + BackendQuantMarlin> Loader<B> for LoadLayers {
    fn load(device: &B, stack: &Stack, _: ExpertShape) -> Check<B::Experts> {
        let Stack::Layers(layers) = stack else {
            return wrong(WRONG_LOADER);
        };
        let gptq: Vec<_> = layers.iter().filter_map(Layer::gptq).collect();
        if gptq.is_empty() {
            let awq: Vec<_> = layers.iter().map(Layer::awq).collect();
            return Ok(device.load_awq_experts(&awq)?);
        }
        Ok(device.load_gptq_experts(&gptq)?)
    }
}

// ---- products --------------------------------------------------------------------------------

struct Moe {
    pairs: Pairs,
    experts: ExpertShape,
    input: ExpertInput,
    x: Vec<f32>,
    stack: Stack,
    /// For gate and up.
    other: Stack,
}

impl Moe {
    fn shape(&self) -> MoeShape {
        let RouteShape { tokens, top_k, .. } = self.pairs.shape;
        MoeShape {
            tokens,
            top_k,
            experts: self.experts,
        }
    }

    fn out_len(&self) -> usize {
        self.shape().pairs() * self.experts.n
    }

    /// The row of x that a pair reads.
    fn row(&self, pair: usize) -> &[f32] {
        let k = self.experts.k;
        let row = match self.input {
            ExpertInput::PerToken => pair / self.pairs.shape.top_k,
            ExpertInput::PerPair => pair,
        };
        &self.x[row * k..][..k]
    }

    /// Each pair's product with its expert's matrix.
    fn products(&self, stack: &Stack) -> Vec<f64> {
        let ExpertShape { n, k, .. } = self.experts;
        let values = stack.values();
        let pairs = self.pairs.expert_ids.iter().enumerate();
        let product = |(pair, &expert): (usize, &i32)| {
            naive::gemm(
                self.row(pair),
                &values[expert as usize * n * k..][..n * k],
                1,
                n,
                k,
            )
        };
        pairs.flat_map(product).collect()
    }
}

/// The routing of a case, sorted on the host.
fn routing<B: BackendMoeFused>(io: &mut Io<'_, B>, pairs: &Pairs) -> Check<MoeRouting<B>> {
    let [ids, tpe, offsets] = pairs.sorted();
    Ok(MoeRouting {
        expert_ids: io.indices("expert_ids", &pairs.expert_ids)?,
        weights: io.exact(&vec![f32::NAN; pairs.expert_ids.len()])?,
        ids: io.indices("ids", &ids)?,
        tpe: io.indices("tpe", &tpe)?,
        offsets: io.indices("offsets", &offsets)?,
    })
}

fn moe_gemm<B: BackendMoeFused, L: Loader<B>>(io: &mut Io<'_, B>, data: &Moe) -> Check {
    let experts = L::load(io.device, &data.stack, data.experts)?;
    gemm_of(io, data, &experts)
}

fn gemm_of<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Moe, experts: &B::Experts) -> Check {
    let routing = routing(io, &data.pairs)?;
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", data.out_len())?;
    B::moe_gemm(
        &mut io.ctx,
        &x,
        data.input,
        experts,
        &routing,
        &mut out,
        data.shape(),
    )?;
    io.take("out", &out, data.out_len())
}

fn gemm_formula(data: &Moe) -> Vec<Vec<f64>> {
    vec![data.products(&data.stack)]
}

/// Each token in a call of its own.
fn by_tokens<B: BackendMoeFused, L: Loader<B>>(io: &mut Io<'_, B>, data: &Moe) -> Check {
    let experts = L::load(io.device, &data.stack, data.experts)?;
    let top_k = data.pairs.shape.top_k;
    for token in 0..data.pairs.shape.tokens {
        let x = match data.input {
            ExpertInput::PerToken => data.row(token * top_k).to_vec(),
            ExpertInput::PerPair => (0..top_k)
                .flat_map(|i| data.row(token * top_k + i).to_vec())
                .collect(),
        };
        let (input, shape) = (data.input, data.experts);
        let none = || Stack::Layers(Vec::new());
        let pairs = data.pairs.token(token);
        let one = Moe {
            pairs,
            experts: shape,
            input,
            x,
            stack: none(),
            other: none(),
        };
        gemm_of(io, &one, &experts)?;
    }
    Ok(())
}

fn gate_up<B: BackendMoeFused, L: Loader<B>>(io: &mut Io<'_, B>, data: &Moe) -> Check {
    let gate = L::load(io.device, &data.stack, data.experts)?;
    let up = L::load(io.device, &data.other, data.experts)?;
    let routing = routing(io, &data.pairs)?;
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", data.out_len())?;
    B::moe_gate_up_silu(
        &mut io.ctx,
        &x,
        (&gate, &up),
        &routing,
        &mut out,
        data.shape(),
    )?;
    io.take("out", &out, data.out_len())
}

fn gate_up_formula(data: &Moe) -> Vec<Vec<f64>> {
    let pairs = data
        .products(&data.stack)
        .into_iter()
        .zip(data.products(&data.other));
    vec![pairs.map(|(gate, up)| naive::silu(gate) * up).collect()]
}

/// Sizes of a product.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    top_k: usize,
    shape: ExpertShape,
    favourite: bool,
}

fn make(rng: &mut Rng, sizes: Sizes, kind: StackKind, input: ExpertInput) -> Moe {
    let Sizes {
        tokens,
        top_k,
        shape,
        favourite,
    } = sizes;
    let rows = match input {
        ExpertInput::PerToken => tokens,
        ExpertInput::PerPair => tokens * top_k,
    };
    Moe {
        pairs: Pairs::new(rng, tokens, shape.experts, top_k, favourite),
        experts: shape,
        input,
        x: rng.acts(rows * shape.k, 1.0),
        stack: kind.stack(rng, shape),
        other: kind.stack(rng, shape),
    }
}

/// The products of one kind of stack.
fn stack_cases<B, L>(cases: &mut Cases<B>, kind: StackKind, all: &[(&str, Sizes)])
where
    B: BackendMoeFused,
    L: Loader<B> + Loader<ReferenceBackend>,
{
    for &(text, sizes) in all {
        for (input, suffix) in [
            (ExpertInput::PerToken, "a row per token"),
            (ExpertInput::PerPair, "a row per pair"),
        ] {
            let name = format!("{text}, {suffix}");
            let case = label("moe_gemm", kind.dtype(), kind.tolerance(), name);
            let make = move |rng: &mut Rng| make(rng, sizes, kind, input);
            cases.add(case, make, probe!(moe_gemm, L, gemm_formula));
        }
        let make = move |rng: &mut Rng| make(rng, sizes, kind, ExpertInput::PerToken);
        let case = label("moe_gate_up_silu", kind.dtype(), kind.tolerance(), text);
        cases.add(case, make, probe!(gate_up, L, gate_up_formula));
    }
    let Some(&(_, sizes)) = all.first() else {
        return;
    };
    let many = Sizes {
        tokens: 21,
        ..sizes
    };
    let make_many = move |rng: &mut Rng| make(rng, many, kind, ExpertInput::PerToken);
    let id = ("moe_gemm", kind.dtype(), "tokens alone and together");
    cases.same(id, make_many, moe_gemm::<B, L>, by_tokens::<B, L>);
    let few = move |rng: &mut Rng| make(rng, sizes, kind, ExpertInput::PerPair);
    cases.short(("moe_gemm", kind.dtype()), few, moe_gemm::<B, L>);
    let few = move |rng: &mut Rng| make(rng, sizes, kind, ExpertInput::PerToken);
    cases.short(("moe_gate_up_silu", kind.dtype()), few, gate_up::<B, L>);
}

// ---- weighted sums ---------------------------------------------------------------------------

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
            ids: io.exact(&[])?,
            tpe: io.exact(&[])?,
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
    B::moe_weighted_sum(&mut io.ctx, &x, &routing, &mut out, data.shape, data.dim)?;
    io.take("out", &out, data.size())
}

fn weighted_sum_residual<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Sums) -> Check {
    let routing = data.routing(io)?;
    let x = io.input("x", &data.x)?;
    let mut residual = io.inout("residual", &data.residual)?;
    let (shape, dim) = (data.shape, data.dim);
    B::moe_weighted_sum_residual(&mut io.ctx, &x, &routing, &mut residual, shape, dim)?;
    io.take("residual", &residual, data.size())
}

fn weighted_sum_residual_norm<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Sums) -> Check {
    let routing = data.routing(io)?;
    let x = io.input("x", &data.x)?;
    // The length of a row is that of its weight.
    let weight = io.exact(&data.norm)?;
    let mut residual = io.inout("residual", &data.residual)?;
    let mut out = io.output("out", data.size())?;
    let (ctx, norm) = (&mut io.ctx, (&weight, EPS));
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
        shape: RouteShape {
            tokens,
            experts: 8,
            top_k,
            renormalize: true,
            scale: 1.0,
        },
        dim,
        x: rng.acts(pairs * dim, scale),
        weights: (0..pairs).map(|_| rng.unit()).collect(),
        residual: rng.acts(tokens * dim, scale),
        norm: rng.gains(dim),
    }
}

// ---- lists -----------------------------------------------------------------------------------

fn route_cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
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
    cases.short((op, act), few, route_topk_softmax::<B>);

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
    cases.short((op, "i32"), few, compute_ids_tpe::<B>);
}

fn sum_cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let mut add = |text: String, tokens: usize, top_k: usize, dim: usize, scale: f32| {
        let make = move |rng: &mut Rng| make_sums(rng, tokens, top_k, dim, scale);
        let case = |op, tolerance| label(op, act, tolerance, text.clone());
        let sums = probe!(weighted_sum, |data| vec![data.sums()]);
        cases.add(case("moe_weighted_sum", Tolerance::F32_SUMS), make, sums);
        let residuals = probe!(weighted_sum_residual, |data| vec![data.residuals()]);
        cases.add(
            case("moe_weighted_sum_residual", Tolerance::F32_SUMS),
            make,
            residuals,
        );
        let norm = probe!(weighted_sum_residual_norm, norm_formula);
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
    let few = |rng: &mut Rng| make_sums(rng, 3, 2, 7, 1.0);
    cases.short(("moe_weighted_sum", act), few, weighted_sum::<B>);
    cases.short(
        ("moe_weighted_sum_residual", act),
        few,
        weighted_sum_residual::<B>,
    );
    cases.short(
        ("moe_weighted_sum_residual_norm", act),
        few,
        weighted_sum_residual_norm::<B>,
    );
}

const SMALL: Sizes = Sizes {
    tokens: 5,
    top_k: 2,
    shape: ExpertShape {
        experts: 8,
        n: 33,
        k: 65,
    },
    favourite: false,
};

const DENSE: &[(&str, Sizes)] = &[
    ("5 tokens, 2 of 8", SMALL),
    ("no tokens", Sizes { tokens: 0, ..SMALL }),
    ("one token", Sizes { tokens: 1, ..SMALL }),
    (
        "one expert",
        Sizes {
            top_k: 1,
            shape: ExpertShape {
                experts: 1,
                n: 7,
                k: 31,
            },
            ..SMALL
        },
    ),
    (
        "70 tokens, 4 of 6, one for all",
        Sizes {
            tokens: 70,
            top_k: 4,
            shape: ExpertShape {
                experts: 6,
                n: 31,
                k: 33,
            },
            favourite: true,
        },
    ),
    (
        "most experts idle",
        Sizes {
            tokens: 2,
            shape: ExpertShape {
                experts: 60,
                n: 16,
                k: 32,
            },
            ..SMALL
        },
    ),
];

/// Stacks whose size a dtype does not fit.
fn wrong_stack<B: BackendMoeFused>(device: &B) -> Check {
    let shape = ExpertShape {
        experts: 2,
        n: 3,
        k: 5,
    };
    for len in [0, 119, 121, 60] {
        let bytes = vec![0; len];
        if !matches!(
            device.load_experts(&bytes, SrcDtype::F32, shape),
            Err(Error::Shape { .. })
        ) {
            return wrong(format!(
                "{len} bytes as [2, 3, 5] of f32 gave no shape error"
            ));
        }
    }
    Ok(())
}

/// Every case of [`BackendMoeFused`] alone.
pub(crate) fn cases<B: BackendMoeFused>() -> Cases<B> {
    let mut cases = Cases::new();
    route_cases(&mut cases);
    for dtype in [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16] {
        stack_cases::<B, LoadDense>(&mut cases, StackKind::Dense(dtype), DENSE);
    }
    cases.check(
        ("load_experts", "-", "bytes of the wrong length"),
        wrong_stack::<B>,
    );
    sum_cases(&mut cases);
    cases
}

/// Stacks of GGUF blocks.
pub(crate) fn gguf_cases<B: BackendMoeFused + BackendQuantGguf>() -> Cases<B> {
    let mut cases = Cases::new();
    for ty in gguf::types() {
        let k = if ty.is_quantized() {
            ty.block_len() * 2
        } else {
            65
        };
        let shape = ExpertShape {
            experts: 5,
            n: 33,
            k,
        };
        let small = Sizes { shape, ..SMALL };
        let sizes = [
            ("5 tokens, 2 of 5", small),
            (
                "30 tokens, one expert for all",
                Sizes {
                    tokens: 30,
                    favourite: true,
                    ..small
                },
            ),
        ];
        stack_cases::<B, LoadGguf>(&mut cases, StackKind::Gguf(ty), &sizes);
    }
    cases
}

/// Stacks of GPTQ and AWQ layers.
pub(crate) fn marlin_cases<B: BackendMoeFused + BackendQuantMarlin>() -> Cases<B> {
    let mut cases = Cases::new();
    for kind in [
        Kind::gptq(2),
        Kind::gptq(3),
        Kind::gptq(4),
        Kind::gptq(8),
        Kind::Awq,
    ] {
        let shape = ExpertShape {
            experts: 5,
            n: 32,
            k: 96,
        };
        let small = Sizes { shape, ..SMALL };
        let sizes = [
            ("5 tokens, 2 of 5", small),
            (
                "30 tokens, one expert for all",
                Sizes {
                    tokens: 30,
                    favourite: true,
                    ..small
                },
            ),
        ];
        stack_cases::<B, LoadLayers>(&mut cases, StackKind::Layers(kind), &sizes);
    }
    cases
}
