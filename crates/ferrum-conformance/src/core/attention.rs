//! Attention over contiguous keys and values, and over a shared latent cache.

use crate::case::{Cases, act_name, label, probe};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive::{self, Scores};
use ferrum_kernels::{AttnConfig, Backend, FlashShape, MlaShape};

/// What a case of [`Backend::flash_attention`] is about; the rest is as in [`BASE`].
#[derive(Clone, Copy)]
struct Spec {
    heads: (usize, usize),
    head_dim: usize,
    q_len: usize,
    kv_len: usize,
    /// Tokens between the last key of a head and the first of the next.
    gap: usize,
    pos_offset: usize,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
    /// Size of q and k, and of v.
    scales: (f32, f32),
}

const BASE: Spec = Spec {
    heads: (4, 2),
    head_dim: 20,
    q_len: 9,
    kv_len: 9,
    gap: 3,
    pos_offset: 0,
    causal: true,
    window: None,
    softcap: None,
    sinks: false,
    scales: (1.0, 1.0),
};

/// A step after 40 tokens.
const LATER: Spec = Spec {
    q_len: 5,
    kv_len: 45,
    pos_offset: 40,
    ..BASE
};

const SPECS: &[(&str, Spec)] = &[
    ("prefill", BASE),
    (
        "one token, one key",
        Spec {
            q_len: 1,
            kv_len: 1,
            ..BASE
        },
    ),
    (
        "no tokens",
        Spec {
            q_len: 0,
            kv_len: 7,
            ..BASE
        },
    ),
    (
        "no keys",
        Spec {
            q_len: 3,
            kv_len: 0,
            ..BASE
        },
    ),
    ("no gap between heads", Spec { gap: 0, ..BASE }),
    (
        "heads 1:1",
        Spec {
            heads: (3, 3),
            ..BASE
        },
    ),
    (
        "heads 3:1",
        Spec {
            heads: (6, 2),
            ..BASE
        },
    ),
    (
        "heads 8:1",
        Spec {
            heads: (8, 1),
            ..BASE
        },
    ),
    (
        "head_dim 10",
        Spec {
            head_dim: 10,
            ..BASE
        },
    ),
    (
        "head_dim 24",
        Spec {
            head_dim: 24,
            ..BASE
        },
    ),
    (
        "head_dim 64",
        Spec {
            head_dim: 64,
            ..BASE
        },
    ),
    (
        "head_dim 80",
        Spec {
            head_dim: 80,
            ..BASE
        },
    ),
    (
        "head_dim 128",
        Spec {
            head_dim: 128,
            ..BASE
        },
    ),
    (
        "head_dim 256",
        Spec {
            head_dim: 256,
            heads: (2, 1),
            ..BASE
        },
    ),
    ("pos_offset", LATER),
    (
        "decode",
        Spec {
            q_len: 1,
            kv_len: 41,
            ..LATER
        },
    ),
    (
        "decode, 1500 keys",
        Spec {
            q_len: 1,
            kv_len: 1500,
            pos_offset: 1499,
            ..BASE
        },
    ),
    (
        "chunk of 3, 1500 keys",
        Spec {
            q_len: 3,
            kv_len: 1500,
            pos_offset: 1497,
            ..BASE
        },
    ),
    (
        "prefill of 70",
        Spec {
            q_len: 70,
            kv_len: 70,
            heads: (2, 1),
            ..BASE
        },
    ),
    (
        "keys after the last query",
        Spec {
            q_len: 4,
            kv_len: 30,
            pos_offset: 10,
            ..BASE
        },
    ),
    (
        "queries after the last key",
        Spec {
            q_len: 4,
            kv_len: 30,
            pos_offset: 40,
            ..BASE
        },
    ),
    (
        "not causal",
        Spec {
            causal: false,
            q_len: 5,
            kv_len: 33,
            ..BASE
        },
    ),
    (
        "not causal, window 4",
        Spec {
            causal: false,
            window: Some(4),
            kv_len: 12,
            ..BASE
        },
    ),
    (
        "window 1",
        Spec {
            window: Some(1),
            ..LATER
        },
    ),
    (
        "window 7",
        Spec {
            window: Some(7),
            ..LATER
        },
    ),
    (
        "window 32, prefill of 70",
        Spec {
            q_len: 70,
            kv_len: 70,
            window: Some(32),
            ..BASE
        },
    ),
    (
        "window 32, 1500 keys",
        Spec {
            q_len: 1,
            kv_len: 1500,
            pos_offset: 1499,
            window: Some(32),
            ..BASE
        },
    ),
    (
        "window longer than the context",
        Spec {
            window: Some(1000),
            ..LATER
        },
    ),
    (
        "window past all keys",
        Spec {
            kv_len: 20,
            window: Some(10),
            ..LATER
        },
    ),
    (
        "softcap 50",
        Spec {
            softcap: Some(50.0),
            ..LATER
        },
    ),
    (
        "softcap 0.5",
        Spec {
            softcap: Some(0.5),
            ..LATER
        },
    ),
    (
        "sinks",
        Spec {
            sinks: true,
            ..LATER
        },
    ),
    (
        "sinks, no keys",
        Spec {
            sinks: true,
            kv_len: 0,
            q_len: 2,
            ..BASE
        },
    ),
    (
        "sinks, window and softcap",
        Spec {
            sinks: true,
            window: Some(6),
            softcap: Some(20.0),
            ..LATER
        },
    ),
    (
        "large scores",
        Spec {
            scales: (8.0, 1.0),
            ..LATER
        },
    ),
    (
        "large values",
        Spec {
            scales: (1.0, 1e4),
            ..LATER
        },
    ),
    (
        "tiny values",
        Spec {
            scales: (1e-6, 1e-6),
            ..LATER
        },
    ),
    (
        "zeros",
        Spec {
            scales: (0.0, 0.0),
            ..LATER
        },
    ),
];

#[derive(Clone)]
struct Flash {
    shape: FlashShape,
    config: AttnConfig,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Option<Vec<f32>>,
}

impl Flash {
    fn q_size(&self) -> usize {
        self.config.heads * self.shape.q_len * self.config.head_dim
    }

    /// The call that computes query tokens `start..end` alone, when no later key is there yet.
    fn chunk(&self, start: usize, end: usize) -> Self {
        let (FlashShape { q_len, .. }, head_dim) = (self.shape, self.config.head_dim);
        let heads = self.q.chunks(q_len * head_dim);
        let part = |head: &[f32]| head[start * head_dim..end * head_dim].to_vec();
        Flash {
            shape: FlashShape {
                q_len: end - start,
                kv_len: self.shape.pos_offset + end,
                pos_offset: self.shape.pos_offset + start,
                ..self.shape
            },
            q: heads.flat_map(part).collect(),
            ..self.clone()
        }
    }
}

fn make(rng: &mut Rng, spec: Spec) -> Flash {
    let Spec {
        heads: (heads, kv_heads),
        head_dim,
        q_len,
        kv_len,
        gap,
        ..
    } = spec;
    let (qk, values) = spec.scales;
    let stride = kv_len + gap;
    let mut cache = |scale| {
        let mut cache = rng.acts(kv_heads * stride * head_dim, scale);
        // What lies behind the valid keys is nobody's.
        for head in cache.chunks_mut((stride * head_dim).max(1)) {
            head[kv_len * head_dim..].fill(f32::NAN);
        }
        cache
    };
    let (k, v) = (cache(qk), cache(values));
    Flash {
        shape: FlashShape {
            q_len,
            kv_len,
            kv_seq_stride: stride,
            pos_offset: spec.pos_offset,
        },
        config: AttnConfig {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal: spec.causal,
            sliding_window: spec.window,
            softcap: spec.softcap,
        },
        q: rng.acts(heads * q_len * head_dim, qk),
        k,
        v,
        sinks: spec.sinks.then(|| rng.floats(heads, 2.0)),
    }
}

fn flash_attention<B: Backend>(io: &mut Io<'_, B>, data: &Flash) -> Check {
    let q = io.input("q", &data.q)?;
    let k = io.input("k", &data.k)?;
    let v = io.input("v", &data.v)?;
    let sinks = io.optional_floats("sinks", data.sinks.as_deref())?;
    let mut out = io.output("out", data.q_size())?;
    let (sinks, shape) = (sinks.as_ref(), data.shape);
    B::flash_attention(
        &mut io.ctx,
        &q,
        (&k, &v),
        sinks,
        &mut out,
        shape,
        &data.config,
    )?;
    io.take("out", &out, data.q_size())
}

fn flash_formula(data: &Flash) -> Vec<Vec<f64>> {
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        pos_offset,
    } = data.shape;
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = data.config;
    let mut out = Vec::new();
    for head in 0..heads {
        let first = head / (heads / kv_heads) * kv_seq_stride * head_dim;
        let rows = |cache: &[f32]| -> Vec<Vec<f32>> {
            let row = |j| cache[first + j * head_dim..][..head_dim].to_vec();
            (0..kv_len).map(row).collect()
        };
        let (keys, values) = (rows(&data.k), rows(&data.v));
        for i in 0..q_len {
            let scores = Scores {
                scale: data.config.scale,
                softcap: data.config.softcap,
                sink: data.sinks.as_ref().map(|sinks| sinks[head]),
                causal: data.config.causal,
                window: data.config.sliding_window,
            };
            let query = &data.q[(head * q_len + i) * head_dim..][..head_dim];
            out.extend(naive::attend(
                query,
                pos_offset + i,
                &keys,
                &values,
                head_dim,
                scores,
            ));
        }
    }
    vec![out]
}

/// The whole call, its result token-major.
fn whole<B: Backend>(io: &mut Io<'_, B>, data: &Flash) -> Check {
    flash_attention(io, data)?;
    let Some(output) = io.outputs.last_mut() else {
        return Ok(());
    };
    let (q_len, head_dim) = (data.shape.q_len, data.config.head_dim);
    let tokens = (0..q_len).flat_map(|i| (0..data.config.heads).map(move |head| (i, head)));
    let at = |(i, head)| (head * q_len + i) * head_dim;
    let values = &output.values;
    output.values = tokens
        .flat_map(|token| values[at(token)..][..head_dim].to_vec())
        .collect();
    Ok(())
}

/// The same tokens in several calls.
fn in_chunks<B: Backend>(io: &mut Io<'_, B>, data: &Flash) -> Check {
    let mut start = 0;
    for end in [1, 2, 5, 17, 18, 51, data.shape.q_len] {
        whole(io, &data.chunk(start, end))?;
        start = end;
    }
    Ok(())
}

fn flash_cases<B: Backend>(cases: &mut Cases<B>) {
    let (op, act) = ("flash_attention", act_name::<B>());
    for &(name, spec) in SPECS {
        let case = label(op, act, Tolerance::F32_ATTENTION, name);
        cases.add(
            case,
            move |rng| make(rng, spec),
            probe!(flash_attention, flash_formula),
        );
    }
    let long = Spec {
        q_len: 60,
        kv_len: 100,
        pos_offset: 40,
        ..BASE
    };
    for (name, spec) in [
        ("whole and in chunks", long),
        (
            "whole and in chunks, heads 8:1 of 64",
            Spec {
                heads: (8, 1),
                head_dim: 64,
                ..long
            },
        ),
        (
            "whole and in chunks, window 9, sinks",
            Spec {
                window: Some(9),
                sinks: true,
                ..long
            },
        ),
    ] {
        cases.same(
            (op, act, name),
            move |rng| make(rng, spec),
            whole::<B>,
            in_chunks::<B>,
        );
    }
    let spec = Spec {
        sinks: true,
        ..LATER
    };
    cases.short((op, act), move |rng| make(rng, spec), flash_attention::<B>);
}

#[derive(Clone)]
struct Mla {
    shape: MlaShape,
    q: Vec<f32>,
    latent: Vec<f32>,
}

fn mla_attention<B: Backend>(io: &mut Io<'_, B>, data: &Mla) -> Check {
    let MlaShape {
        q_len, heads, rank, ..
    } = data.shape;
    let q = io.input("q", &data.q)?;
    let latent = io.input("latent", &data.latent)?;
    let mut out = io.output("out", q_len * heads * rank)?;
    B::mla_attention(&mut io.ctx, &q, &latent, &mut out, data.shape)?;
    io.take("out", &out, q_len * heads * rank)
}

fn mla_formula(data: &Mla) -> Vec<Vec<f64>> {
    let MlaShape {
        heads,
        rank,
        rope_dim,
        pos_offset,
        scale,
        causal,
        ..
    } = data.shape;
    let scores = Scores {
        scale,
        softcap: None,
        sink: None,
        causal,
        window: None,
    };
    let rows: Vec<Vec<f32>> = data
        .latent
        .chunks(rank + rope_dim)
        .map(<[f32]>::to_vec)
        .collect();
    let queries = data.q.chunks(rank + rope_dim).enumerate();
    let attend =
        |(i, query)| naive::attend(query, pos_offset + i / heads, &rows, &rows, rank, scores);
    vec![queries.flat_map(attend).collect()]
}

fn mla_in_chunks<B: Backend>(io: &mut Io<'_, B>, data: &Mla) -> Check {
    let MlaShape {
        heads,
        rank,
        rope_dim,
        pos_offset,
        q_len,
        ..
    } = data.shape;
    let mut start = 0;
    for end in [1, 3, 10, q_len] {
        let (row, kv_len) = (heads * (rank + rope_dim), pos_offset + end);
        let chunk = Mla {
            shape: MlaShape {
                q_len: end - start,
                kv_len,
                pos_offset: pos_offset + start,
                ..data.shape
            },
            q: data.q[start * row..end * row].to_vec(),
            latent: data.latent[..kv_len * (rank + rope_dim)].to_vec(),
        };
        mla_attention(io, &chunk)?;
        start = end;
    }
    Ok(())
}

fn make_mla(rng: &mut Rng, shape: MlaShape, scale: f32) -> Mla {
    let dim = shape.rank + shape.rope_dim;
    Mla {
        shape,
        q: rng.acts(shape.q_len * shape.heads * dim, scale),
        latent: rng.acts(shape.kv_len * dim, scale),
    }
}

const MLA: MlaShape = MlaShape {
    q_len: 5,
    kv_len: 5,
    heads: 3,
    rank: 20,
    rope_dim: 6,
    pos_offset: 0,
    scale: 0.2,
    causal: true,
};

const MLA_SHAPES: &[(&str, MlaShape)] = &[
    ("prefill", MLA),
    (
        "one token, one key",
        MlaShape {
            q_len: 1,
            kv_len: 1,
            ..MLA
        },
    ),
    ("no tokens", MlaShape { q_len: 0, ..MLA }),
    ("no keys", MlaShape { kv_len: 0, ..MLA }),
    (
        "not causal",
        MlaShape {
            kv_len: 21,
            causal: false,
            ..MLA
        },
    ),
    (
        "decode",
        MlaShape {
            q_len: 1,
            kv_len: 41,
            pos_offset: 40,
            heads: 16,
            ..MLA
        },
    ),
    (
        "decode, 1500 keys",
        MlaShape {
            q_len: 1,
            kv_len: 1500,
            pos_offset: 1499,
            ..MLA
        },
    ),
    (
        "chunk",
        MlaShape {
            q_len: 7,
            kv_len: 47,
            pos_offset: 40,
            ..MLA
        },
    ),
    (
        "rank 512 and 64",
        MlaShape {
            rank: 512,
            rope_dim: 64,
            scale: 0.07,
            ..MLA
        },
    ),
    (
        "rank 33 and 2",
        MlaShape {
            rank: 33,
            rope_dim: 2,
            ..MLA
        },
    ),
    ("without a rotated part", MlaShape { rope_dim: 0, ..MLA }),
];

fn mla_cases<B: Backend>(cases: &mut Cases<B>) {
    let (op, act) = ("mla_attention", act_name::<B>());
    for &(name, shape) in MLA_SHAPES {
        let case = label(op, act, Tolerance::F32_ATTENTION, name);
        let make = move |rng: &mut Rng| make_mla(rng, shape, 1.0);
        cases.add(case, make, probe!(mla_attention, mla_formula));
    }
    for (name, scale) in [("large scores", 8.0), ("tiny values", 1e-6), ("zeros", 0.0)] {
        let case = label(op, act, Tolerance::F32_ATTENTION, name);
        let make = move |rng: &mut Rng| make_mla(rng, MLA, scale);
        cases.add(case, make, probe!(mla_attention, mla_formula));
    }
    let shape = MlaShape {
        q_len: 23,
        kv_len: 63,
        pos_offset: 40,
        ..MLA
    };
    let make = move |rng: &mut Rng| make_mla(rng, shape, 1.0);
    let text = "whole and in chunks";
    cases.same(
        (op, act, text),
        make,
        mla_attention::<B>,
        mla_in_chunks::<B>,
    );
    cases.short((op, act), |rng| make_mla(rng, MLA, 1.0), mla_attention::<B>);
}

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    flash_cases(cases);
    mla_cases(cases);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare;

    /// Changes a case as a kernel would that reads the contract in another way.
    type Misread = fn(&mut Flash);

    /// A kernel that reads the contract in another way fails at least one case.
    #[test]
    fn misreadings_are_noticed() {
        let misreadings: [(&str, Misread); 10] = [
            ("a window one longer", |data| {
                data.config.sliding_window = data.config.sliding_window.map(|window| window + 1);
            }),
            ("no window", |data| data.config.sliding_window = None),
            ("no softcap", |data| data.config.softcap = None),
            ("no sinks", |data| data.sinks = None),
            ("a sink for another head", |data| {
                if let Some(sinks) = &mut data.sinks {
                    sinks.rotate_left(1);
                }
            }),
            ("not causal", |data| data.config.causal = false),
            ("no pos_offset", |data| data.shape.pos_offset = 0),
            ("pos_offset one more", |data| data.shape.pos_offset += 1),
            ("no gap between heads", |data| {
                data.shape.kv_seq_stride = data.shape.kv_len
            }),
            ("another scale", |data| data.config.scale *= 1.01),
        ];
        for (what, misread) in misreadings {
            let noticed = |&(name, spec): &(&str, Spec)| {
                let data = make(&mut Rng::new(name, |x| x), spec);
                let mut misread_data = data.clone();
                misread(&mut misread_data);
                let (found, expected) = (flash_formula(&misread_data), flash_formula(&data));
                compare("out", &found[0], &expected[0], Tolerance::F32_ATTENTION).is_err()
            };
            assert!(SPECS.iter().any(noticed), "nothing notices {what}");
        }
    }
}
