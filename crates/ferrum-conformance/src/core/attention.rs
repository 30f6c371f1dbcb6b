//! Attention over contiguous keys and values, and over a shared latent cache.

use crate::case::{Cases, act_name, both, implementations, label};
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
    /// Elements of a value; 0: as many as of a key.
    value_dim: usize,
    q_len: usize,
    kv_len: usize,
    /// Tokens between the last key of a head and the first of the next.
    gap: usize,
    pos_offset: usize,
    causal: bool,
    window: Option<usize>,
    chunked: bool,
    softcap: Option<f32>,
    sinks: bool,
    /// Size of q and k, and of v.
    scales: (f32, f32),
}

const BASE: Spec = Spec {
    heads: (4, 2),
    head_dim: 20,
    value_dim: 0,
    q_len: 9,
    kv_len: 9,
    gap: 3,
    pos_offset: 0,
    causal: true,
    window: None,
    chunked: false,
    softcap: None,
    sinks: false,
    scales: (1.0, 1.0),
};

/// What makes a case of a [`Spec`].
type Change = fn(&mut Spec);

/// Cases that begin with the context.
const FIRST: &[(&str, Change)] = &[
    ("prefill", |_| {}),
    ("one token, one key", |s| (s.q_len, s.kv_len) = (1, 1)),
    ("no tokens", |s| (s.q_len, s.kv_len) = (0, 7)),
    ("no keys", |s| (s.q_len, s.kv_len) = (3, 0)),
    ("no gap between heads", |s| s.gap = 0),
    ("heads 1:1", |s| s.heads = (3, 3)),
    ("heads 3:1", |s| s.heads = (6, 2)),
    ("heads 8:1", |s| s.heads = (8, 1)),
    ("head_dim 10", |s| s.head_dim = 10),
    ("head_dim 24", |s| s.head_dim = 24),
    ("head_dim 64", |s| s.head_dim = 64),
    ("head_dim 80", |s| s.head_dim = 80),
    ("head_dim 128", |s| s.head_dim = 128),
    ("head_dim 256", |s| s.head_dim = 256),
    ("prefill of 70", |s| (s.q_len, s.kv_len) = (70, 70)),
    ("prefill of 300, heads 4:1 of 64", |s| {
        (s.q_len, s.kv_len, s.heads, s.head_dim) = (300, 300, (8, 2), 64);
    }),
    ("prefill of 200, heads 4:1 of 128", |s| {
        (s.q_len, s.kv_len, s.heads, s.head_dim) = (200, 200, (4, 1), 128);
    }),
    ("prefill of 131 after 150 tokens, heads 2:1 of 128", |s| {
        (s.q_len, s.kv_len, s.pos_offset) = (131, 281, 150);
        (s.heads, s.head_dim, s.sinks) = ((4, 2), 128, true);
    }),
    ("window 70 and softcap, prefill of 150 of 128", |s| {
        (s.q_len, s.kv_len, s.heads, s.head_dim) = (150, 150, (2, 1), 128);
        (s.window, s.softcap) = (Some(70), Some(3.0));
    }),
    ("window 30, queries of 128 after the last key", |s| {
        (s.q_len, s.kv_len, s.pos_offset) = (80, 60, 20);
        (s.heads, s.head_dim, s.window) = ((3, 1), 128, Some(30));
    }),
    ("window 30, queries of 128 past all keys", |s| {
        (s.q_len, s.kv_len, s.pos_offset) = (80, 60, 150);
        (s.heads, s.head_dim, s.window) = ((1, 1), 128, Some(30));
    }),
    ("large scores of 128", |s| {
        (s.q_len, s.kv_len, s.heads, s.head_dim) = (90, 90, (1, 1), 128);
        s.scales = (8.0, 1.0);
    }),
    ("zeros of 128", |s| {
        (s.q_len, s.kv_len, s.heads, s.head_dim) = (70, 70, (1, 1), 128);
        s.scales = (0.0, 0.0);
    }),
    ("not causal", |s| (s.causal, s.kv_len) = (false, 33)),
    ("not causal, window 4", |s| {
        (s.causal, s.window) = (false, Some(4))
    }),
    ("not causal, window 1", |s| {
        (s.causal, s.window, s.kv_len) = (false, Some(1), 33)
    }),
    ("not causal, window 5, keys on both sides", |s| {
        (s.causal, s.window, s.q_len, s.kv_len, s.pos_offset) = (false, Some(5), 40, 90, 20);
    }),
    (
        "not causal, window 65, 300 tokens of heads 4:1 of 64",
        |s| {
            (s.q_len, s.kv_len, s.heads, s.head_dim) = (300, 300, (8, 2), 64);
            (s.causal, s.window) = (false, Some(65));
        },
    ),
    ("not causal, window longer than the context", |s| {
        (s.causal, s.window) = (false, Some(usize::MAX))
    }),
    ("not causal, window and sinks", |s| {
        (s.causal, s.window, s.sinks) = (false, Some(3), true)
    }),
    ("window 32, prefill of 70", |s| {
        (s.q_len, s.kv_len, s.window) = (70, 70, Some(32));
    }),
    ("sinks, no keys", |s| (s.sinks, s.kv_len) = (true, 0)),
];

/// Cases of five tokens after 40 others.
const LATER: &[(&str, Change)] = &[
    ("pos_offset", |_| {}),
    ("decode", |s| (s.q_len, s.kv_len) = (1, 41)),
    ("keys after the last query", |s| s.kv_len = 60),
    ("queries after the last key", |s| s.kv_len = 30),
    ("chunks of 7", |s| {
        (s.window, s.chunked, s.q_len, s.kv_len) = (Some(7), true, 20, 20);
    }),
    ("chunks of 32, queries from 40 on", |s| {
        (s.window, s.chunked) = (Some(32), true);
        (s.q_len, s.kv_len, s.pos_offset) = (60, 100, 40);
    }),
    ("chunks of 5, not causal", |s| {
        (s.window, s.chunked, s.causal) = (Some(5), true, false);
        (s.q_len, s.kv_len) = (13, 13);
    }),
    ("window 1", |s| s.window = Some(1)),
    ("window 7", |s| s.window = Some(7)),
    ("window longer than the context", |s| s.window = Some(1000)),
    ("window before all keys, not causal", |s| {
        (s.causal, s.window, s.kv_len) = (false, Some(10), 20)
    }),
    ("window past all keys", |s| {
        (s.window, s.kv_len) = (Some(10), 20)
    }),
    ("softcap 50", |s| s.softcap = Some(50.0)),
    ("softcap 0.5", |s| s.softcap = Some(0.5)),
    ("sinks", |s| s.sinks = true),
    ("sinks, window and softcap", |s| {
        (s.sinks, s.window, s.softcap) = (true, Some(6), Some(20.0));
    }),
    ("keys of 20, values of 33", |s| s.value_dim = 33),
    ("keys of 192, values of 128", |s| {
        (s.head_dim, s.value_dim) = (192, 128)
    }),
    ("keys of 24, values of 9, sinks", |s| {
        (s.head_dim, s.value_dim, s.sinks) = (24, 9, true)
    }),
    ("large scores", |s| s.scales = (8.0, 1.0)),
    ("large values", |s| s.scales = (1.0, 1e4)),
    ("tiny values", |s| s.scales = (1e-6, 1e-6)),
    ("zeros", |s| s.scales = (0.0, 0.0)),
];

/// Cases of one token after 1499 others.
const LONG: &[(&str, Change)] = &[
    ("decode, 1500 keys", |_| {}),
    ("decode, 1500 keys, heads 8:1 of 64", |s| {
        (s.heads, s.head_dim) = ((8, 1), 64)
    }),
    ("chunk of 3, 1500 keys", |s| {
        (s.q_len, s.pos_offset) = (3, 1497)
    }),
    ("window 32, 1500 keys", |s| s.window = Some(32)),
    ("sinks, 1500 keys", |s| s.sinks = true),
];

/// Every case: [`BASE`] at three places in a context, changed.
fn specs() -> impl Iterator<Item = (&'static str, Spec)> {
    let places = [(FIRST, 9, 0), (LATER, 5, 40), (LONG, 1, 1499)];
    places.into_iter().flat_map(|(list, q_len, pos_offset)| {
        list.iter().map(move |&(name, change)| {
            let mut spec = BASE;
            (spec.q_len, spec.kv_len, spec.pos_offset) = (q_len, pos_offset + q_len, pos_offset);
            change(&mut spec);
            (name, spec)
        })
    })
}

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
    fn out_size(&self) -> usize {
        self.config.heads * self.shape.q_len * self.config.value_dim
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
    let value_dim = match spec.value_dim {
        0 => head_dim,
        dim => dim,
    };
    let mut cache = |dim: usize, scale| {
        let mut cache = rng.acts(kv_heads * stride * dim, scale);
        // Memory after the valid keys is not read.
        for head in cache.chunks_mut((stride * dim).max(1)) {
            head[kv_len * dim..].fill(f32::NAN);
        }
        cache
    };
    let (k, v) = (cache(head_dim, qk), cache(value_dim, values));
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
            value_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal: spec.causal,
            sliding_window: spec.window,
            chunked: spec.chunked,
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
    let mut out = io.output("out", data.out_size())?;
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
    io.take("out", &out, data.out_size())
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
        value_dim,
        ..
    } = data.config;
    let mut out = Vec::new();
    for head in 0..heads {
        let first = head / (heads / kv_heads) * kv_seq_stride;
        let rows = |cache: &[f32], dim: usize| -> Vec<Vec<f32>> {
            let row = |j| cache[(first + j) * dim..][..dim].to_vec();
            (0..kv_len).map(row).collect()
        };
        let (keys, values) = (rows(&data.k, head_dim), rows(&data.v, value_dim));
        for i in 0..q_len {
            let scores = Scores {
                scale: data.config.scale,
                softcap: data.config.softcap,
                sink: data.sinks.as_ref().map(|sinks| sinks[head]),
                causal: data.config.causal,
                window: data.config.sliding_window,
                chunked: data.config.chunked,
            };
            let query = &data.q[(head * q_len + i) * head_dim..][..head_dim];
            out.extend(naive::attend(
                query,
                pos_offset + i,
                &keys,
                &values,
                value_dim,
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
    let (q_len, dim) = (data.shape.q_len, data.config.value_dim);
    let tokens = (0..q_len).flat_map(|i| (0..data.config.heads).map(move |head| (i, head)));
    let at = |(i, head)| (head * q_len + i) * dim;
    let values = &output.values;
    output.values = tokens
        .flat_map(|token| values[at(token)..][..dim].to_vec())
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
    for (name, spec) in specs() {
        let case = label(op, act, Tolerance::F32_ATTENTION, name);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(case, make, implementations!(flash_attention, flash_formula));
    }
    let changes: [(&str, Change); 4] = [
        ("whole and in chunks", |_| {}),
        ("whole and in chunks, keys of 40, values of 64", |s| {
            (s.head_dim, s.value_dim) = (40, 64)
        }),
        ("whole and in chunks, heads 8:1 of 64", |s| {
            (s.heads, s.head_dim) = ((8, 1), 64)
        }),
        ("whole and in chunks, window 9, sinks", |s| {
            (s.window, s.sinks) = (Some(9), true)
        }),
    ];
    for (name, change) in changes {
        let mut spec = BASE;
        (spec.q_len, spec.kv_len, spec.pos_offset) = (60, 100, 40);
        change(&mut spec);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.same((op, act, name), make, whole::<B>, in_chunks::<B>);
    }
    let mut few = BASE;
    few.sinks = true;
    cases.rejects_short_buffers((op, act), move |rng| make(rng, few), both!(flash_attention));
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
        chunked: false,
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

/// What makes a case of an [`MlaShape`].
type MlaChange = fn(&mut MlaShape);

const MLA_SHAPES: &[(&str, MlaChange)] = &[
    ("prefill", |_| {}),
    ("one token, one key", |s| (s.q_len, s.kv_len) = (1, 1)),
    ("no tokens", |s| s.q_len = 0),
    ("no keys", |s| s.kv_len = 0),
    ("not causal", |s| (s.causal, s.kv_len) = (false, 21)),
    ("decode", |s| {
        (s.q_len, s.kv_len, s.pos_offset) = (1, 41, 40)
    }),
    ("decode, 16 heads, 1500 keys", |s| {
        (s.heads, s.q_len, s.kv_len, s.pos_offset) = (16, 1, 1500, 1499);
    }),
    ("chunk", |s| (s.q_len, s.kv_len, s.pos_offset) = (7, 47, 40)),
    ("rank 512 and 64", |s| {
        (s.rank, s.rope_dim, s.scale) = (512, 64, 0.07)
    }),
    ("rank 33 and 2", |s| (s.rank, s.rope_dim) = (33, 2)),
    ("without a rotated part", |s| s.rope_dim = 0),
];

fn mla_cases<B: Backend>(cases: &mut Cases<B>) {
    let (op, act) = ("mla_attention", act_name::<B>());
    for &(name, change) in MLA_SHAPES {
        let mut shape = MLA;
        change(&mut shape);
        let case = label(op, act, Tolerance::F32_ATTENTION, name);
        let make = move |rng: &mut Rng| make_mla(rng, shape, 1.0);
        cases.add(case, make, implementations!(mla_attention, mla_formula));
    }
    for (name, scale) in [("large scores", 8.0), ("tiny values", 1e-6), ("zeros", 0.0)] {
        let case = label(op, act, Tolerance::F32_ATTENTION, name);
        let make = move |rng: &mut Rng| make_mla(rng, MLA, scale);
        cases.add(case, make, implementations!(mla_attention, mla_formula));
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
    cases.rejects_short_buffers(
        (op, act),
        |rng| make_mla(rng, MLA, 1.0),
        both!(mla_attention),
    );
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
        let misreadings: [(&str, Misread); 12] = [
            ("a chunk that slides", |data| data.config.chunked = false),
            ("a window one longer", |data| {
                data.config.sliding_window = data.config.sliding_window.map(|window| window + 1);
            }),
            ("no window", |data| data.config.sliding_window = None),
            ("a window that ends with the query", |data| {
                if let (false, Some(_)) = (data.config.causal, data.config.sliding_window) {
                    data.config.causal = true;
                }
            }),
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
            let noticed = |(name, spec): (&str, Spec)| {
                let data = make(&mut Rng::new(name, |x| x), spec);
                let mut misread_data = data.clone();
                misread(&mut misread_data);
                let (found, expected) = (flash_formula(&misread_data), flash_formula(&data));
                compare("out", &found[0], &expected[0], Tolerance::F32_ATTENTION).is_err()
            };
            assert!(specs().any(noticed), "nothing notices {what}");
        }
    }
}
