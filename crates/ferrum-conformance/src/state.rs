//! Recurrent states: copies of them, and the short convolution that begins with one.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Fault, Io, Refusals};
use ferrum_kernels::{Backend, BackendState, BatchShape, CausalConvShape, DeviceBatch, StateShape};

/// What a case is about.
#[derive(Clone, Copy)]
struct Spec {
    channels: usize,
    kernel: usize,
    /// Tokens of each sequence.
    seqs: &'static [usize],
    bias: bool,
    scale: f32,
}

const BASE: Spec = Spec {
    channels: 20,
    kernel: 4,
    seqs: &[5, 1, 0, 2, 33, 1, 3],
    bias: true,
    scale: 1.0,
};

type Change = fn(&mut Spec);

const SPECS: &[(&str, Change)] = &[
    ("prefill, chunks and decode, some empty", |_| {}),
    ("without bias", |s| s.bias = false),
    ("kernel 1, without a state", |s| s.kernel = 1),
    ("kernel 2", |s| s.kernel = 2),
    ("kernel 3", |s| s.kernel = 3),
    ("kernel 9, longer than its chunks", |s| s.kernel = 9),
    ("one channel", |s| s.channels = 1),
    ("33 channels", |s| s.channels = 33),
    ("1027 channels, decode of many", |s| {
        (s.channels, s.seqs) = (1027, &[1; 9])
    }),
    ("256 channels, a prompt of 150", |s| {
        (s.channels, s.seqs) = (256, &[150])
    }),
    ("no sequence", |s| s.seqs = &[]),
    ("only empty sequences", |s| s.seqs = &[0, 0]),
    ("large values", |s| s.scale = 1e3),
    ("zeros", |s| s.scale = 0.0),
];

/// A step on the host.
#[derive(Clone)]
struct Conv {
    shape: CausalConvShape,
    seqs: Vec<usize>,
    /// Slot of each sequence.
    slots: Vec<i32>,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    states: Vec<f32>,
}

fn make(rng: &mut Rng, spec: Spec) -> Conv {
    let Spec {
        channels, kernel, ..
    } = spec;
    let part = (kernel - 1) * channels;
    // Room before and behind the convolution's part, and unused slots.
    let (offset, elements, slots) = (3, part + 8, spec.seqs.len() + 2);
    let order = rng.permutation(slots).into_iter();
    let tokens: usize = spec.seqs.iter().sum();
    Conv {
        shape: CausalConvShape {
            channels,
            kernel,
            states: StateShape { slots, elements },
            offset,
        },
        seqs: spec.seqs.to_vec(),
        slots: order.take(spec.seqs.len()).map(|s| s as i32).collect(),
        x: rng.acts(tokens * channels, spec.scale),
        weight: rng.floats(channels * kernel, 1.0),
        bias: spec.bias.then(|| rng.floats(channels, spec.scale)),
        // An element of activations, as every input was that is in a state.
        states: rng.acts(slots * elements, spec.scale),
    }
}

/// A batch of which only starts and slots count.
pub(crate) fn batch<B: Backend>(
    io: &mut Io<'_, B>,
    seqs: &[usize],
    slots: &[i32],
) -> Check<DeviceBatch<B>> {
    let (mut starts, mut tokens) = (vec![0], 0);
    for len in seqs {
        tokens += len;
        starts.push(tokens as i32);
    }
    let longest = seqs.iter().copied().max().unwrap_or(0);
    Ok(DeviceBatch {
        shape: BatchShape {
            tokens,
            seqs: seqs.len(),
            table_stride: 0,
            max_query_len: longest,
            max_kv_len: longest,
        },
        // Only starts and slots are looked at.
        tokens: io.exact(&vec![1; tokens])?,
        rope_rows: io.exact(&vec![0; tokens])?,
        query_starts: io.indices("query_starts", &starts)?,
        kv_lens: io.exact(&vec![longest as i32; seqs.len()])?,
        state_slots: io.indices("state_slots", slots)?,
        block_tables: Vec::new(),
    })
}

fn conv<B: BackendState>(io: &mut Io<'_, B>, data: &Conv) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    step(io, data, &mut states)?;
    io.take_floats("states", &states, data.states.len())
}

fn step<B: BackendState>(io: &mut Io<'_, B>, data: &Conv, states: &mut B::Buffer<f32>) -> Check {
    let batch = batch(io, &data.seqs, &data.slots)?;
    let x = io.input("x", &data.x)?;
    let weight = io.floats("weight", &data.weight)?;
    let bias = io.optional_floats("bias", data.bias.as_deref())?;
    let mut out = io.output("out", data.x.len())?;
    let weight = (&weight, bias.as_ref());
    B::causal_conv1d(
        &mut io.ctx,
        &x,
        weight,
        states,
        &batch,
        &mut out,
        data.shape,
    )?;
    io.take("out", &out, data.x.len())
}

fn conv_formula(data: &Conv) -> Vec<Vec<f64>> {
    let CausalConvShape {
        channels,
        kernel,
        states: StateShape { elements, .. },
        offset,
    } = data.shape;
    let mut out = Vec::new();
    let mut states: Vec<f64> = data.states.iter().map(|&x| f64::from(x)).collect();
    let mut rows = data.x.chunks_exact(channels);
    for (len, slot) in data.seqs.iter().zip(&data.slots) {
        let first = *slot as usize * elements + offset;
        let part = first..first + (kernel - 1) * channels;
        let mut inputs: Vec<Vec<f64>> = states[part.clone()]
            .chunks_exact(channels)
            .map(<[f64]>::to_vec)
            .collect();
        let new = rows.by_ref().take(*len);
        inputs.extend(new.map(|row| row.iter().map(|&x| f64::from(x)).collect()));
        for window in inputs.windows(kernel) {
            for c in 0..channels {
                let bias = data.bias.as_ref().map_or(0.0, |bias| f64::from(bias[c]));
                let weight = &data.weight[c * kernel..][..kernel];
                let taps = weight.iter().zip(window);
                out.push(bias + taps.map(|(w, row)| f64::from(*w) * row[c]).sum::<f64>());
            }
        }
        let last = inputs[inputs.len() - (kernel - 1)..].concat();
        states[part].copy_from_slice(&last);
    }
    vec![out, states]
}

/// The one sequence in several steps over the same states.
fn in_chunks<B: BackendState>(io: &mut Io<'_, B>, data: &Conv) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    let mut start = 0;
    for len in [1, 1, 5, 2, 17, 1, 3] {
        let rows = start * data.shape.channels..(start + len) * data.shape.channels;
        let chunk = Conv {
            seqs: vec![len],
            x: data.x[rows].to_vec(),
            ..data.clone()
        };
        step(io, &chunk, &mut states)?;
        start += len;
    }
    io.take_floats("states", &states, data.states.len())
}

/// Each sequence in a step of its own.
fn one_by_one<B: BackendState>(io: &mut Io<'_, B>, data: &Conv) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    let mut start = 0;
    for (len, slot) in data.seqs.iter().zip(&data.slots) {
        let rows = start * data.shape.channels..(start + len) * data.shape.channels;
        let alone = Conv {
            seqs: vec![*len],
            slots: vec![*slot],
            x: data.x[rows].to_vec(),
            ..data.clone()
        };
        step(io, &alone, &mut states)?;
        start += len;
    }
    io.take_floats("states", &states, data.states.len())
}

/// Settings that cannot be, and slots and starts that are not there where the host sees them.
fn refusals<B: BackendState>(device: &B, refused: &mut Refusals) -> Check {
    let mut io = Io::new(device, Fault::None)?;
    let data = make(&mut Rng::new("states", |x| x), BASE);
    let batch = batch(&mut io, &data.seqs, &data.slots)?;
    let (x, weight) = (io.input("x", &data.x)?, io.floats("w", &data.weight)?);
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    let mut out = io.output("out", data.x.len())?;
    let shape = data.shape;
    for shape in [
        CausalConvShape { kernel: 0, ..shape },
        CausalConvShape { offset: 9, ..shape },
        CausalConvShape {
            offset: usize::MAX,
            ..shape
        },
        CausalConvShape {
            channels: usize::MAX / 2,
            ..shape
        },
        CausalConvShape {
            states: StateShape {
                slots: usize::MAX / 2,
                ..shape.states
            },
            ..shape
        },
    ] {
        let ctx = &mut io.ctx;
        let done = B::causal_conv1d(
            ctx,
            &x,
            (&weight, None),
            &mut states,
            &batch,
            &mut out,
            shape,
        );
        refused.expect(&format!("{shape:?}"), done)?;
    }
    let slots = shape.states.slots;
    for pair in [(0, slots), (slots, 0), (usize::MAX, 1)] {
        let done = B::copy_states(&mut io.ctx, &mut states, &[(0, 1), pair], shape.states);
        refused.expect(&format!("copying {pair:?} of {slots} slots"), done)?;
    }
    io.take_floats("states", &states, data.states.len())?;
    let kept: Vec<f64> = data.states.iter().map(|&x| f64::from(x)).collect();
    match io.outputs.last().map(|output| &output.values) {
        Some(found) if *found == kept => Ok(()),
        _ => crate::io::wrong("what was refused wrote something"),
    }
}

/// States that are copied one after the other.
#[derive(Clone)]
struct Copies {
    shape: StateShape,
    pairs: Vec<(usize, usize)>,
    states: Vec<f32>,
}

fn copies<B: BackendState>(io: &mut Io<'_, B>, data: &Copies) -> Check {
    let mut states = io.inout_of::<f32>("states", &data.states)?;
    B::copy_states(&mut io.ctx, &mut states, &data.pairs, data.shape)?;
    io.take_floats("states", &states, data.states.len())
}

fn copies_formula(data: &Copies) -> Vec<Vec<f64>> {
    let len = data.shape.elements;
    let mut states: Vec<f64> = data.states.iter().map(|&x| f64::from(x)).collect();
    for (from, to) in &data.pairs {
        let row = states[from * len..][..len].to_vec();
        states[to * len..][..len].copy_from_slice(&row);
    }
    vec![states]
}

/// Every case of [`BackendState`].
pub(crate) fn cases<B: BackendState>() -> Cases<B> {
    let mut cases = Cases::new();
    let (op, act) = ("causal_conv1d", act_name::<B>());
    for (name, change) in SPECS {
        let mut spec = BASE;
        change(&mut spec);
        let make = move |rng: &mut Rng| make(rng, spec);
        let case = label(op, act, Tolerance::NORM, *name);
        cases.add(case, make, implementations!(conv, conv_formula));
    }
    let long = Spec {
        seqs: &[30],
        ..BASE
    };
    let text = "whole and in chunks";
    let make_long = move |rng: &mut Rng| make(rng, long);
    cases.same((op, act, text), make_long, conv::<B>, in_chunks::<B>);
    let text = "a sequence alone and in a batch";
    let make_base = |rng: &mut Rng| make(rng, BASE);
    cases.same((op, act, text), make_base, conv::<B>, one_by_one::<B>);
    cases.rejects_short_buffers((op, act), make_base, both!(conv));
    cases.refuses((op, act, "settings that do not fit"), both!(refusals));

    let op = "copy_states";
    for (name, slots, elements, pairs) in [
        (
            "one after the other",
            5,
            33,
            &[(0, 3), (3, 1), (4, 4), (1, 0)][..],
        ),
        ("none", 3, 7, &[]),
        ("of no elements", 3, 0, &[(0, 2)]),
        ("large", 3, 5000, &[(2, 0), (0, 1)]),
    ] {
        let make = move |rng: &mut Rng| Copies {
            shape: StateShape { slots, elements },
            pairs: pairs.to_vec(),
            states: rng.floats(slots * elements, 1.0),
        };
        let case = label(op, "f32", Tolerance::EXACT, name);
        cases.add(case, make, implementations!(copies, copies_formula));
    }
    let make = |rng: &mut Rng| Copies {
        shape: StateShape {
            slots: 4,
            elements: 9,
        },
        pairs: vec![(1, 2)],
        states: rng.floats(36, 1.0),
    };
    cases.rejects_short_buffers((op, "f32"), make, both!(copies));
    cases
}
