//! Per-expert products over every kind of stack.

use super::routing::Pairs;
use crate::case::{Cases, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::{Dense, FileBytes, Rng};
use crate::io::{Check, Io, wrong};
use crate::layers::{FLOAT8, GROUPS, Part, Scheme};
use crate::marlin::{Kind, Layer};
use crate::{gguf, naive};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{
    BackendMarlinExperts, BackendMoeFused, BackendQuantExperts, ExpertActivation, ExpertInput,
    ExpertProjection, ExpertShape, GeluKind, GptqZeroPoints, MoeRouting, MoeShape, RouteShape,
};
use ferrum_types::{Error, GgufQuantType, SrcDtype, SumSplit};

/// A stack of expert matrices as it lies in a file.
enum Stack {
    Dense(Dense),
    Gguf(GgufQuantType, FileBytes),
    Layers(Vec<Layer>),
    Parts(Vec<Part>),
}

/// What kind of stack to make.
#[derive(Clone, Copy)]
enum StackKind {
    Dense(SrcDtype),
    Gguf(GgufQuantType),
    Layers(Kind),
    /// Of a checkpoint of another kind, with its name.
    Parts(&'static str, Scheme),
}

impl StackKind {
    fn dtype(self) -> &'static str {
        match self {
            StackKind::Dense(dtype) => dtype.dtype().name(),
            StackKind::Gguf(ty) => ty.name(),
            StackKind::Layers(kind) => kind.dtype(),
            StackKind::Parts(name, _) => name,
        }
    }

    fn tolerance(self) -> Tolerance {
        match self {
            StackKind::Dense(SrcDtype::F32) => Tolerance::F32_SUMS,
            StackKind::Dense(_) => Tolerance::HALF_STORAGE,
            StackKind::Gguf(ty) => gguf::tolerance(ty),
            StackKind::Parts(_, Scheme::Fp8 { .. }) => Tolerance::F32_SUMS,
            StackKind::Layers(_) | StackKind::Parts(..) => Tolerance::QUANTIZED,
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
            StackKind::Parts(_, scheme) => {
                let part = |_| Part::new(rng, scheme, n, k);
                Stack::Parts((0..experts).map(part).collect())
            }
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
            Stack::Parts(parts) => parts.iter().flat_map(|part| part.values.clone()).collect(),
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

impl<B: BackendQuantExperts> Loader<B> for LoadGguf {
    fn load(device: &B, stack: &Stack, shape: ExpertShape) -> Check<B::Experts> {
        match stack {
            Stack::Gguf(ty, bytes) => Ok(device.load_quant_experts(bytes.get(), *ty, shape)?),
            _ => wrong(WRONG_LOADER),
        }
    }
}

impl<B: BackendMarlinExperts> Loader<B> for LoadLayers {
    fn load(device: &B, stack: &Stack, shape: ExpertShape) -> Check<B::Experts> {
        let layers = match stack {
            Stack::Layers(layers) => layers,
            Stack::Parts(parts) => {
                let experts: Vec<_> = parts.iter().map(Part::weights).collect();
                return Ok(device.load_layer_experts(&experts, shape.k)?);
            }
            _ => return wrong(WRONG_LOADER),
        };
        let gptq: Vec<_> = layers.iter().filter_map(Layer::gptq).collect();
        if gptq.is_empty() {
            let awq: Vec<_> = layers.iter().map(Layer::awq).collect();
            return Ok(device.load_awq_experts(&awq)?);
        }
        Ok(device.load_gptq_experts(&gptq)?)
    }
}

struct Moe {
    pairs: Pairs,
    experts: ExpertShape,
    input: ExpertInput,
    x: Vec<f32>,
    stack: Stack,
    /// For gate and up.
    other: Stack,
    /// `[experts, n]` of both maps.
    biases: Option<[Vec<f32>; 2]>,
    activation: ExpertActivation,
    /// `[pairs]`: what outputs weigh in sums.
    weights: Vec<f32>,
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

    /// The biases of one of the maps on the device, where experts have some.
    fn bias<B: BackendMoeFused>(
        &self,
        io: &mut Io<'_, B>,
        name: &'static str,
        map: usize,
    ) -> Check<Option<B::Buffer<f32>>> {
        let bias = self.biases.as_ref();
        bias.map(|biases| io.floats(name, &biases[map])).transpose()
    }

    /// Each pair's product with its expert's matrix of a map, with its bias.
    fn products(&self, stack: &Stack, map: usize) -> Vec<f64> {
        let ExpertShape { n, k, .. } = self.experts;
        let values = stack.values();
        let pairs = self.pairs.expert_ids.iter().enumerate();
        let product = |(pair, &expert): (usize, &i32)| {
            let expert = expert as usize;
            let matrix = &values[expert * n * k..][..n * k];
            let mut row = naive::gemm(self.row(pair), matrix, 1, n, k);
            if let Some(biases) = &self.biases {
                let bias = &biases[map][expert * n..][..n];
                row.iter_mut()
                    .zip(bias)
                    .for_each(|(x, b)| *x += f64::from(*b));
            }
            row
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
        sorted_pairs: io.indices("ids", &ids)?,
        tokens_per_expert: io.indices("tpe", &tpe)?,
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
    let bias = data.bias(io, "bias", 0)?;
    let maps = ExpertProjection {
        matrices: experts,
        bias: bias.as_ref(),
    };
    B::moe_gemm(
        &mut io.ctx,
        &x,
        data.input,
        maps,
        &routing,
        &mut out,
        data.shape(),
    )?;
    io.take("out", &out, data.out_len())
}

fn gemm_formula(data: &Moe) -> Vec<Vec<f64>> {
    vec![data.products(&data.stack, 0)]
}

/// Each token in a call of its own.
fn by_tokens<B: BackendMoeFused, L: Loader<B>>(
    io: &mut Io<'_, B>,
    data: &Moe,
    of_one: fn(&mut Io<'_, B>, &Moe, &B::Experts) -> Check,
) -> Check {
    let mut experts = L::load(io.device, &data.stack, data.experts)?;
    B::split_expert_sums(&mut experts, split(data.experts.k));
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
            biases: data.biases.clone(),
            activation: data.activation,
            weights: data.weights[token * top_k..][..top_k].to_vec(),
        };
        of_one(io, &one, &experts)?;
    }
    Ok(())
}

/// Where sums over `k` inputs are cut: at what are whole units for backends that take inputs by 32, where there are enough.
fn split(k: usize) -> SumSplit {
    let units = k / 32;
    let cuts = match units {
        0 | 1 => vec![],
        2 | 3 => vec![32],
        _ => [1, units / 2, units - 1].map(|unit| 32 * unit).to_vec(),
    };
    SumSplit::at(&cuts).unwrap_or_default()
}

fn moe_down<B: BackendMoeFused, L: Loader<B>>(io: &mut Io<'_, B>, data: &Moe) -> Check {
    let mut experts = L::load(io.device, &data.stack, data.experts)?;
    B::split_expert_sums(&mut experts, split(data.experts.k));
    down_of(io, data, &experts, &[false, true])
}

/// The sums alone.
fn moe_down_once<B: BackendMoeFused, L: Loader<B>>(io: &mut Io<'_, B>, data: &Moe) -> Check {
    let mut experts = L::load(io.device, &data.stack, data.experts)?;
    B::split_expert_sums(&mut experts, split(data.experts.k));
    down_once(io, data, &experts)
}

fn down_once<B: BackendMoeFused>(io: &mut Io<'_, B>, data: &Moe, experts: &B::Experts) -> Check {
    down_of(io, data, experts, &[false])
}

/// The sums, once for each of `adds`: added to what is there, or not.
fn down_of<B: BackendMoeFused>(
    io: &mut Io<'_, B>,
    data: &Moe,
    experts: &B::Experts,
    adds: &[bool],
) -> Check {
    let [ids, tpe, offsets] = data.pairs.sorted();
    let routing = MoeRouting {
        expert_ids: io.indices("expert_ids", &data.pairs.expert_ids)?,
        weights: io.exact(&vec![f32::NAN; data.weights.len()])?,
        sorted_pairs: io.indices("ids", &ids)?,
        tokens_per_expert: io.indices("tpe", &tpe)?,
        offsets: io.indices("offsets", &offsets)?,
    };
    let weights = MoeRouting {
        expert_ids: io.exact(&[])?,
        weights: io.floats("weights", &data.weights)?,
        sorted_pairs: io.exact(&[])?,
        tokens_per_expert: io.exact(&[])?,
        offsets: io.exact(&[])?,
    };
    let x = io.input("x", &data.x)?;
    let bias = data.bias(io, "bias", 0)?;
    let maps = ExpertProjection {
        matrices: experts,
        bias: bias.as_ref(),
    };
    let shape = data.shape();
    let len = shape.tokens * data.experts.n;
    let mut pairs = io.device.alloc(data.out_len())?;
    let mut out = io.output("out", len)?;
    for &add in adds {
        let (routing, out) = ((&routing, &weights), &mut out);
        B::moe_down(
            &mut io.ctx,
            &x,
            maps,
            routing,
            &mut pairs,
            (&mut *out, add),
            shape,
        )?;
        io.take("out", out, len)?;
    }
    Ok(())
}

fn down_formula(data: &Moe) -> Vec<Vec<f64>> {
    let (n, top_k) = (data.experts.n, data.pairs.shape.top_k);
    let mut sums = vec![0.0; data.shape().tokens * n];
    for (pair, row) in data.products(&data.stack, 0).chunks_exact(n).enumerate() {
        let sums = &mut sums[pair / top_k * n..][..n];
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += f64::from(data.weights[pair]) * x;
        }
    }
    let twice = sums.iter().map(|sum| 2.0 * sum).collect();
    vec![sums, twice]
}

fn gate_up<B: BackendMoeFused, L: Loader<B>>(io: &mut Io<'_, B>, data: &Moe) -> Check {
    let gate = L::load(io.device, &data.stack, data.experts)?;
    let up = L::load(io.device, &data.other, data.experts)?;
    let routing = routing(io, &data.pairs)?;
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", data.out_len())?;
    let biases = [data.bias(io, "gate bias", 0)?, data.bias(io, "up bias", 1)?];
    let maps = |i: usize, matrices| ExpertProjection {
        matrices,
        bias: biases[i].as_ref(),
    };
    B::moe_gate_up(
        &mut io.ctx,
        &x,
        [maps(0, &gate), maps(1, &up)],
        data.activation,
        &routing,
        &mut out,
        data.shape(),
    )?;
    io.take("out", &out, data.out_len())
}

fn gate_up_formula(data: &Moe) -> Vec<Vec<f64>> {
    let gates = data.products(&data.stack, 0).into_iter();
    let pairs = gates.zip(data.products(&data.other, 1));
    let activate = |(gate, up): (f64, f64)| match data.activation {
        ExpertActivation::Silu => naive::silu(gate) * up,
        ExpertActivation::GeluTanh => naive::gelu(GeluKind::Tanh, gate) * up,
        ExpertActivation::ClampedSwiglu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let gate = gate.min(limit);
            gate / (1.0 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
    };
    vec![pairs.map(activate).collect()]
}

/// Sizes of a product.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    top_k: usize,
    shape: ExpertShape,
    favourite: bool,
    /// Whether gate and up, of the same inputs, have the same order of them.
    one_order: bool,
}

fn make(rng: &mut Rng, sizes: Sizes, kind: StackKind, input: ExpertInput) -> Moe {
    let Sizes {
        tokens,
        top_k,
        shape,
        favourite,
        one_order,
    } = sizes;
    let rows = match input {
        ExpertInput::PerToken => tokens,
        ExpertInput::PerPair => tokens * top_k,
    };
    let pairs = tokens * top_k;
    let weights = (0..pairs).map(|_| rng.unit()).collect();
    let of_experts = Pairs::new(rng, tokens, shape.experts, top_k, favourite);
    let x = rng.acts(rows * shape.k, 1.0);
    let stack = kind.stack(rng, shape);
    let other = match &stack {
        Stack::Parts(parts) if one_order => {
            let parts = parts.iter().filter_map(|part| part.beside(rng));
            Stack::Parts(parts.collect())
        }
        _ => kind.stack(rng, shape),
    };
    Moe {
        weights,
        pairs: of_experts,
        experts: shape,
        input,
        x,
        stack,
        other,
        biases: None,
        activation: ExpertActivation::Silu,
    }
}

/// With biases, and the bounded activation, within whose bounds not all products are.
fn make_biased(rng: &mut Rng, sizes: Sizes, kind: StackKind, input: ExpertInput) -> Moe {
    let mut moe = make(rng, sizes, kind, input);
    let len = sizes.shape.experts * sizes.shape.n;
    moe.biases = Some([rng.floats(len, 1.0), rng.floats(len, 1.0)]);
    moe.activation = ExpertActivation::ClampedSwiglu {
        alpha: 1.702,
        limit: 0.75,
    };
    moe
}

/// The products of one kind of stack: `base`, changed.
fn stack_cases<B, L>(cases: &mut Cases<B>, kind: StackKind, base: Sizes, all: &[(&str, Change)])
where
    B: BackendMoeFused,
    L: Loader<B> + Loader<ReferenceBackend>,
{
    let inputs = [
        (ExpertInput::PerToken, "a row per token"),
        (ExpertInput::PerPair, "a row per pair"),
    ];
    for &(text, change) in all {
        let mut sizes = base;
        change(&mut sizes);
        for (input, suffix) in inputs {
            let name = format!("{text}, {suffix}");
            let case = label("moe_gemm", kind.dtype(), kind.tolerance(), name);
            let make = move |rng: &mut Rng| make(rng, sizes, kind, input);
            cases.add(case, make, implementations!(moe_gemm, L, gemm_formula));
        }
        let of_pairs = move |rng: &mut Rng| make(rng, sizes, kind, ExpertInput::PerPair);
        let case = label("moe_down", kind.dtype(), kind.tolerance(), text);
        cases.add(case, of_pairs, implementations!(moe_down, L, down_formula));
        let make = move |rng: &mut Rng| make(rng, sizes, kind, ExpertInput::PerToken);
        let case = label(
            "moe_gate_up",
            kind.dtype(),
            kind.tolerance().of_product(),
            text,
        );
        cases.add(case, make, implementations!(gate_up, L, gate_up_formula));
        let of_gelu = move |rng: &mut Rng| Moe {
            activation: ExpertActivation::GeluTanh,
            ..make(rng)
        };
        let name = format!("{text}, gelu");
        let tolerance = kind.tolerance().of_product();
        let case = label("moe_gate_up", kind.dtype(), tolerance, name);
        cases.add(case, of_gelu, implementations!(gate_up, L, gate_up_formula));
        let biased = |text: &str| format!("{text}, biases");
        let of_pairs = move |rng: &mut Rng| make_biased(rng, sizes, kind, ExpertInput::PerPair);
        let case = label("moe_down", kind.dtype(), kind.tolerance(), biased(text));
        cases.add(case, of_pairs, implementations!(moe_down, L, down_formula));
        let make = move |rng: &mut Rng| make_biased(rng, sizes, kind, ExpertInput::PerPair);
        let case = label("moe_gemm", kind.dtype(), kind.tolerance(), biased(text));
        cases.add(case, make, implementations!(moe_gemm, L, gemm_formula));
        let make = move |rng: &mut Rng| make_biased(rng, sizes, kind, ExpertInput::PerToken);
        let text = format!("{}, bounded", biased(text));
        let case = label(
            "moe_gate_up",
            kind.dtype(),
            kind.tolerance().of_product(),
            text,
        );
        cases.add(case, make, implementations!(gate_up, L, gate_up_formula));
    }
    let many = Sizes { tokens: 16, ..base };
    for (input, suffix) in inputs {
        let make = move |rng: &mut Rng| make(rng, many, kind, input);
        let name = format!("tokens alone and together, {suffix}");
        let id = ("moe_gemm", kind.dtype(), &*name);
        cases.same(id, make, moe_gemm::<B, L>, |io, data| {
            by_tokens::<B, L>(io, data, gemm_of)
        });
    }
    let of_pairs = move |rng: &mut Rng| make(rng, many, kind, ExpertInput::PerPair);
    let id = ("moe_down", kind.dtype(), "tokens alone and together");
    cases.same(id, of_pairs, moe_down_once::<B, L>, |io, data| {
        by_tokens::<B, L>(io, data, down_once)
    });
    let few = move |rng: &mut Rng| make_biased(rng, base, kind, ExpertInput::PerPair);
    cases.rejects_short_buffers(("moe_gemm", kind.dtype()), few, both!(moe_gemm, L));
    let few = move |rng: &mut Rng| make_biased(rng, base, kind, ExpertInput::PerToken);
    cases.rejects_short_buffers(("moe_gate_up", kind.dtype()), few, both!(gate_up, L));
    let few = move |rng: &mut Rng| make_biased(rng, base, kind, ExpertInput::PerPair);
    cases.rejects_short_buffers(("moe_down", kind.dtype()), few, both!(moe_down, L));
}

/// Sums of experts with whole rows of tiles, of so few tokens that devices may make each as one product over all its pairs: several
/// rows of tiles for a block, more tiles than warps, and fewer.
fn few_token_cases<B, L>(cases: &mut Cases<B>, kind: StackKind)
where
    B: BackendMoeFused,
    L: Loader<B> + Loader<ReferenceBackend>,
{
    for (tokens, top_k, (experts, n, k)) in [(2, 3, (13, 144, 768)), (1, 1, (5, 48, 256))] {
        let sizes = Sizes {
            tokens,
            top_k,
            shape: shape(experts, n, k),
            ..SMALL
        };
        let text = format!("{tokens} tokens, {top_k} of {experts}, whole rows of tiles");
        let case = label("moe_down", kind.dtype(), kind.tolerance(), text);
        let make = move |rng: &mut Rng| make_biased(rng, sizes, kind, ExpertInput::PerPair);
        cases.add(case, make, implementations!(moe_down, L, down_formula));
    }
}

const SMALL: Sizes = Sizes {
    tokens: 5,
    top_k: 2,
    shape: shape(8, 33, 66),
    favourite: false,
    one_order: false,
};

const fn shape(experts: usize, n: usize, k: usize) -> ExpertShape {
    ExpertShape { experts, n, k }
}

/// What makes a case of [`Sizes`].
type Change = fn(&mut Sizes);

/// The first is also the one for invariance and short buffers.
const DENSE: &[(&str, Change)] = &[
    ("5 tokens, 2 of 8", |_| {}),
    ("no tokens", |s| s.tokens = 0),
    ("one token", |s| s.tokens = 1),
    ("one expert", |s| (s.top_k, s.shape) = (1, shape(1, 7, 31))),
    ("70 tokens, 4 of 6, one for all", |s| {
        (s.tokens, s.top_k, s.shape, s.favourite) = (70, 4, shape(6, 31, 33), true);
    }),
    ("150 tokens, 2 of 2", |s| {
        (s.tokens, s.shape) = (150, shape(2, 70, 40))
    }),
    ("200 tokens, 8 of 64", |s| {
        (s.tokens, s.top_k, s.shape) = (200, 8, shape(64, 48, 64));
    }),
    ("most experts idle", |s| {
        (s.tokens, s.shape) = (2, shape(60, 16, 32))
    }),
];

const QUANTIZED: &[(&str, Change)] = &[
    ("5 tokens, 2 of 5", |_| {}),
    ("one token", |s| s.tokens = 1),
    ("11 tokens, one expert for all", |s| {
        (s.tokens, s.favourite) = (11, true)
    }),
    ("30 tokens, one expert for all", |s| {
        (s.tokens, s.favourite) = (30, true)
    }),
];

/// Stacks of which each expert has an order of its inputs.
const ORDERED: &[(&str, Change)] = &[
    ("5 tokens, 2 of 5", |_| {}),
    ("one token", |s| s.tokens = 1),
    ("11 tokens, one expert for all", |s| {
        (s.tokens, s.favourite) = (11, true)
    }),
    ("30 tokens, one expert for all", |s| {
        (s.tokens, s.favourite) = (30, true)
    }),
    ("5 tokens, gate and up in one order", |s| s.one_order = true),
    ("30 tokens, gate and up in one order", |s| {
        (s.tokens, s.one_order) = (30, true)
    }),
    ("11 groups, experts that end inside a tile", |s| {
        s.shape = shape(3, 40, 352)
    }),
    ("one token, experts that end inside a tile", |s| {
        (s.tokens, s.shape) = (1, shape(5, 40, 352))
    }),
    ("more experts than a block has threads", |s| {
        (s.tokens, s.shape) = (70, shape(260, 16, 32))
    }),
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

/// The cases of dense stacks.
pub(super) fn dense_cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    for dtype in [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16] {
        stack_cases::<B, LoadDense>(cases, StackKind::Dense(dtype), SMALL, DENSE);
    }
    let case = ("load_experts", "-", "bytes of the wrong length");
    cases.check(case, wrong_stack::<B>);
}

/// The cases of stacks of GGUF blocks.
pub(super) fn gguf_cases<B: BackendQuantExperts>(cases: &mut Cases<B>) {
    for ty in gguf::types() {
        let k = if ty.is_quantized() {
            ty.block_len() * 2
        } else {
            65
        };
        let base = Sizes {
            shape: shape(5, 33, k),
            ..SMALL
        };
        stack_cases::<B, LoadGguf>(cases, StackKind::Gguf(ty), base, QUANTIZED);
        if ty.is_quantized() {
            few_token_cases::<B, LoadGguf>(cases, StackKind::Gguf(ty));
        }
    }
}

/// The cases of stacks of GPTQ, AWQ, `pack-quantized` and FP8 layers.
pub(super) fn marlin_cases<B: BackendMarlinExperts>(cases: &mut Cases<B>) {
    let base = Sizes {
        shape: shape(5, 32, 96),
        ..SMALL
    };
    for kind in [2, 3, 4, 8].map(Kind::gptq).into_iter().chain([Kind::Awq]) {
        stack_cases::<B, LoadLayers>(cases, StackKind::Layers(kind), base, QUANTIZED);
    }
    let block = Scheme::Fp8 {
        block: [128, 128],
        scales: SrcDtype::F32,
        has_nan: false,
    };
    // Each expert has an order of its own.
    let ordered = Scheme::Gptq(Kind::Gptq {
        bits: 4,
        zero_points: GptqZeroPoints::MinusOne,
        act_order: true,
    });
    for (name, scheme, all) in [
        ("packed4", GROUPS, QUANTIZED),
        ("gptq4-order", ordered, ORDERED),
    ] {
        stack_cases::<B, LoadLayers>(cases, StackKind::Parts(name, scheme), base, all);
        few_token_cases::<B, LoadLayers>(cases, StackKind::Parts(name, scheme));
    }
    for (name, scheme) in [("fp8", FLOAT8), ("fp8-block", block)] {
        let base = Sizes {
            shape: shape(5, 135, 270),
            ..base
        };
        stack_cases::<B, LoadLayers>(cases, StackKind::Parts(name, scheme), base, QUANTIZED);
    }
}
