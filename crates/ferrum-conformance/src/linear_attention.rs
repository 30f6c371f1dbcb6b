//! Linear attention over states that decay: both rules, over prompts, chunks and decode, and what is refused.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Fault, Io, Refusals};
use crate::state::batch;
use ferrum_kernels::{
    BackendState, HeadOrder, LinearAttention, LinearAttentionRule, LinearAttentionShape, StateShape,
};
use std::ops::Range;

/// What a case is about.
#[derive(Clone, Copy)]
struct Spec {
    rule: LinearAttentionRule,
    /// Of keys and of values.
    heads: [usize; 2],
    /// Elements of a key's and of a value's head.
    dims: [usize; 2],
    order: HeadOrder,
    /// Tokens of each sequence.
    seqs: &'static [usize],
    /// Of inputs and of gates.
    scales: [f32; 2],
}

const BASE: Spec = Spec {
    rule: LinearAttentionRule::GatedDelta,
    heads: [2, 6],
    dims: [12, 20],
    order: HeadOrder::Grouped,
    seqs: &[5, 1, 0, 2, 33, 1, 3],
    scales: [1.0, 1.0],
};

type Change = fn(&mut Spec);

const SPECS: &[(&str, Change)] = &[
    ("prefill, chunks and decode, some empty", |_| {}),
    ("as many heads of keys as of values", |s| s.heads = [3, 3]),
    ("heads that take turns", |s| {
        s.order = HeadOrder::Interleaved
    }),
    ("one head", |s| s.heads = [1, 1]),
    ("one element", |s| s.dims = [1, 1]),
    ("wide heads", |s| (s.dims, s.seqs) = ([128, 128], &[7, 1])),
    ("values wider than keys", |s| {
        (s.dims, s.seqs) = ([16, 257], &[4, 3])
    }),
    ("keys wider than values", |s| {
        (s.dims, s.seqs) = ([256, 33], &[4, 3])
    }),
    ("keys of 50", |s| (s.dims, s.seqs) = ([50, 40], &[6, 1, 3])),
    ("longest keys", |s| (s.dims, s.seqs) = ([290, 21], &[3, 1])),
    ("decode of many", |s| s.seqs = &[1; 40]),
    ("a prompt of 150", |s| s.seqs = &[150]),
    ("no sequence", |s| s.seqs = &[]),
    ("only empty sequences", |s| s.seqs = &[0, 0]),
    ("large gates", |s| s.scales[1] = 60.0),
    ("large inputs", |s| s.scales[0] = 1e3),
    ("zeros", |s| s.scales = [0.0, 0.0]),
];

const RULES: [(&str, LinearAttentionRule); 2] = [
    ("delta", LinearAttentionRule::GatedDelta),
    ("state space", LinearAttentionRule::StateSpace),
];

/// A step on the host.
#[derive(Clone)]
struct Step {
    shape: LinearAttentionShape,
    seqs: Vec<usize>,
    /// Slot of each sequence.
    slots: Vec<i32>,
    x: Vec<f32>,
    gates: Vec<f32>,
    params: Vec<f32>,
    states: Vec<f32>,
}

impl Step {
    /// Some of its tokens as a step of sequences of their own.
    fn part(&self, tokens: Range<usize>, (seqs, slots): (Vec<usize>, Vec<i32>)) -> Self {
        let of = |values: &[f32], dim: usize| values[tokens.start * dim..tokens.end * dim].to_vec();
        Self {
            seqs,
            slots,
            x: of(&self.x, self.shape.row_dim()),
            gates: of(&self.gates, self.shape.gate_dim()),
            ..self.clone()
        }
    }
}

fn make(rng: &mut Rng, spec: Spec) -> Step {
    let ([key_heads, value_heads], [key_dim, value_dim]) = (spec.heads, spec.dims);
    // Room before and behind its part of a state, and unused slots.
    let slots = spec.seqs.len() + 2;
    let mut shape = LinearAttentionShape {
        rule: spec.rule,
        key_heads,
        value_heads,
        order: spec.order,
        key_dim,
        value_dim,
        states: StateShape { slots, elements: 0 },
        offset: 3,
    };
    shape.states.elements = shape.state_len() + 8;
    let tokens: usize = spec.seqs.iter().sum();
    let order = rng.permutation(slots).into_iter();
    let [inputs, gates] = spec.scales;
    let mut params: Vec<f32> = rng
        .floats(value_heads, 1.0)
        .iter()
        .map(|x| -x.abs())
        .collect();
    params.extend(rng.floats(value_heads, 1.0));
    params.extend(rng.floats(value_heads, 1.0));
    Step {
        shape,
        seqs: spec.seqs.to_vec(),
        slots: order.take(spec.seqs.len()).map(|s| s as i32).collect(),
        x: rng.acts(tokens * shape.row_dim(), inputs),
        gates: rng.acts(tokens * shape.gate_dim(), gates),
        params,
        states: rng.floats(slots * shape.states.elements, inputs),
    }
}

fn attention<B: BackendState>(io: &mut Io<'_, B>, data: &Step) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    step(io, data, &mut states)?;
    io.take_floats("states", &states, data.states.len())
}

fn step<B: BackendState>(io: &mut Io<'_, B>, data: &Step, states: &mut B::Buffer<f32>) -> Check {
    let batch = batch(io, &data.seqs, &data.slots)?;
    let (x, gates) = (io.input("x", &data.x)?, io.input("gates", &data.gates)?);
    let params = io.floats("params", &data.params)?;
    let len = batch.shape.tokens * data.shape.value_width();
    let mut out = io.output("out", len)?;
    let inputs = LinearAttention {
        x: &x,
        gates: &gates,
        params: &params,
    };
    B::linear_attention(&mut io.ctx, inputs, states, &batch, &mut out, data.shape)?;
    io.take("out", &out, len)
}

/// The state of a head as a matrix, and formulas as they are written in the papers.
fn formula(data: &Step) -> Vec<Vec<f64>> {
    let shape = data.shape;
    let (keys, values, heads) = (shape.key_dim, shape.value_dim, shape.value_heads);
    let mut states: Vec<f64> = data.states.iter().map(|&x| f64::from(x)).collect();
    let mut out = Vec::new();
    let rows: Vec<Vec<f64>> = data
        .x
        .chunks_exact(shape.row_dim())
        .map(|row| row.iter().map(|&x| f64::from(x)).collect())
        .collect();
    let softplus = |x: f64| if x > 30.0 { x } else { x.exp().ln_1p() };
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let unit = |x: &[f64]| -> Vec<f64> {
        let length = x.iter().map(|x| x * x).sum::<f64>() + 1e-6;
        x.iter().map(|x| x / length.sqrt()).collect()
    };
    let mut token = 0;
    for (len, slot) in data.seqs.iter().zip(&data.slots) {
        for _ in 0..*len {
            for head in 0..heads {
                let shared = match shape.order {
                    HeadOrder::Grouped => head * shape.key_heads / heads,
                    HeadOrder::Interleaved => head % shape.key_heads,
                };
                let first = *slot as usize * shape.states.elements + shape.offset;
                let state = &mut states[first + head * keys * values..][..keys * values];
                let gate = |i: usize| f64::from(data.gates[token * shape.gate_dim() + i]);
                let param = |i: usize| f64::from(data.params[i * heads + head]);
                let part = |from: usize, dim: usize| rows[token][from..from + dim].to_vec();
                let all = shape.key_heads * keys;
                let (query, key, value, step, share);
                match shape.rule {
                    LinearAttentionRule::GatedDelta => {
                        let scale = (keys as f64).sqrt();
                        query = unit(&part(shared * keys, keys))
                            .iter()
                            .map(|x| x / scale)
                            .collect();
                        key = unit(&part(all + shared * keys, keys));
                        value = part(2 * all + head * values, values);
                        step = softplus(gate(heads + head) + param(1));
                        share = sigmoid(gate(head));
                    }
                    LinearAttentionRule::StateSpace => {
                        let behind = heads * values;
                        value = part(head * values, values);
                        key = part(behind + shared * keys, keys);
                        query = part(behind + all + shared * keys, keys);
                        step = softplus(gate(head) + param(1));
                        share = step;
                    }
                }
                let query: Vec<f64> = query;
                state.iter_mut().for_each(|x| *x *= (param(0) * step).exp());
                let says = |state: &[f64], of: &[f64], c: usize| -> f64 {
                    (0..keys).map(|i| of[i] * state[i * values + c]).sum()
                };
                for (c, &v) in value.iter().enumerate() {
                    let known = match shape.rule {
                        LinearAttentionRule::GatedDelta => says(state, &key, c),
                        LinearAttentionRule::StateSpace => 0.0,
                    };
                    for i in 0..keys {
                        state[i * values + c] += key[i] * share * (v - known);
                    }
                    out.push(says(state, &query, c) + param(2) * v);
                }
            }
            token += 1;
        }
    }
    vec![out, states]
}

/// The one sequence in several steps over the same states.
fn in_chunks<B: BackendState>(io: &mut Io<'_, B>, data: &Step) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    let mut start = 0;
    for len in [1, 1, 5, 2, 17, 1, 3] {
        let own = (vec![len], data.slots.clone());
        step(io, &data.part(start..start + len, own), &mut states)?;
        start += len;
    }
    io.take_floats("states", &states, data.states.len())
}

/// Each sequence in a step of its own.
fn one_by_one<B: BackendState>(io: &mut Io<'_, B>, data: &Step) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    let mut start = 0;
    for (len, slot) in data.seqs.iter().zip(&data.slots) {
        let own = (vec![*len], vec![*slot]);
        step(io, &data.part(start..start + len, own), &mut states)?;
        start += len;
    }
    io.take_floats("states", &states, data.states.len())
}

/// Settings that cannot be.
fn refusals<B: BackendState>(device: &B, refused: &mut Refusals) -> Check {
    let mut io = Io::new(device, Fault::None)?;
    let data = make(&mut Rng::new("linear attention", |x| x), BASE);
    let batch = batch(&mut io, &data.seqs, &data.slots)?;
    let (x, gates) = (io.input("x", &data.x)?, io.input("gates", &data.gates)?);
    let params = io.floats("params", &data.params)?;
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    let mut out = io.output("out", data.x.len())?;
    let (shape, huge) = (data.shape, usize::MAX / 2);
    let slots = StateShape {
        slots: huge,
        ..shape.states
    };
    for shape in [
        LinearAttentionShape {
            key_heads: 0,
            ..shape
        },
        LinearAttentionShape {
            key_heads: 4,
            ..shape
        },
        LinearAttentionShape {
            value_heads: 0,
            ..shape
        },
        LinearAttentionShape {
            value_heads: huge,
            ..shape
        },
        LinearAttentionShape {
            key_dim: 0,
            ..shape
        },
        LinearAttentionShape {
            key_dim: huge,
            ..shape
        },
        LinearAttentionShape {
            value_dim: 0,
            ..shape
        },
        LinearAttentionShape {
            value_dim: huge,
            ..shape
        },
        LinearAttentionShape { offset: 9, ..shape },
        LinearAttentionShape {
            offset: usize::MAX,
            ..shape
        },
        LinearAttentionShape {
            states: slots,
            ..shape
        },
    ] {
        let inputs = LinearAttention {
            x: &x,
            gates: &gates,
            params: &params,
        };
        let ctx = &mut io.ctx;
        let done = B::linear_attention(ctx, inputs, &mut states, &batch, &mut out, shape);
        refused.expect(&format!("{shape:?}"), done)?;
    }
    io.take_floats("states", &states, data.states.len())?;
    let kept: Vec<f64> = data.states.iter().map(|&x| f64::from(x)).collect();
    match io.outputs.last().map(|output| &output.values) {
        Some(found) if *found == kept => Ok(()),
        _ => crate::io::wrong("what was refused wrote something"),
    }
}

/// Every case of [`BackendState::linear_attention`].
pub(crate) fn cases<B: BackendState>() -> Cases<B> {
    let mut cases = Cases::new();
    let (op, act) = ("linear_attention", act_name::<B>());
    for (rule_name, rule) in RULES {
        for (name, change) in SPECS {
            let mut spec = Spec { rule, ..BASE };
            change(&mut spec);
            let make = move |rng: &mut Rng| make(rng, spec);
            let case = label(
                op,
                act,
                Tolerance::F32_ATTENTION,
                format!("{rule_name}: {name}"),
            );
            cases.add(case, make, implementations!(attention, formula));
        }
        let base = Spec { rule, ..BASE };
        let long = Spec {
            seqs: &[30],
            ..base
        };
        let text = format!("{rule_name}: whole and in chunks");
        let make_long = move |rng: &mut Rng| make(rng, long);
        cases.same((op, act, &text), make_long, attention::<B>, in_chunks::<B>);
        let text = format!("{rule_name}: a sequence alone and in a batch");
        let make_base = move |rng: &mut Rng| make(rng, base);
        cases.same((op, act, &text), make_base, attention::<B>, one_by_one::<B>);
    }
    let make_base = |rng: &mut Rng| make(rng, BASE);
    cases.rejects_short_buffers((op, act), make_base, both!(attention));
    cases.refuses((op, act, "settings that do not fit"), both!(refusals));
    cases
}
