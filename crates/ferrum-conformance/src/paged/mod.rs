//! Paged keys and values: what is written to blocks, and attention over a ragged batch of them.
//!
//! A pool can only be read through attention, so that is how its contents are seen. Before the case
//! begins, every slot holds values of a former owner, the blocks of a sequence lie in random order,
//! and entries of block tables that no key needs hold no block: also those behind a sliding window.

mod blocks;
mod refusals;
mod step;
mod wide;

use self::refusals::{copies_out_of_range, mismatches, pools_of_nothing};
use self::step::{BASE, FEW, Layout, Paged, Spec, WHOLE, make, step};
use self::wide::MANY_WIDE;
use crate::case::{Cases, both, implementations, label};
use crate::compare::Tolerance;
use crate::core::{KINDS, Transform, TransformBuffers, transformed};
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive::{self, Scores};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{
    AttnConfig, Backend, BackendInt8KvOps, BackendKvDtype, DeviceBatch, KvDtypeKind, KvInt8,
    KvLayer, PagedQkv,
};
use ferrum_quant::{fp8_codec, kv_int8};
use ferrum_types::{BlockId, Dtype, Element};
use half::{bf16, f16};

/// What makes a case of a [`Spec`].
type Change = fn(&mut Spec);

/// Cases of many sequences in all their kinds.
const RAGGED: &[(&str, Change)] = &[
    ("prefill, chunks and decode, some empty", |_| {}),
    ("one token, one key", |s| s.seqs = &[(0, 1)]),
    ("no sequence", |s| s.seqs = &[]),
    ("only empty sequences", |s| s.seqs = &[(0, 0), (7, 0)]),
    ("decode of many", |s| {
        s.seqs = &[(9, 1), (1, 1), (30, 1), (16, 1), (47, 1), (2, 1)];
    }),
    ("prefill of 150 beside a chunk of 70", |s| {
        s.seqs = &[(0, 150), (90, 70), (200, 1)]
    }),
    ("decode, 1500 keys", |s| s.seqs = &[(1499, 1), (700, 1)]),
    ("blocks of 1", |s| s.block_size = 1),
    ("blocks of 7", |s| s.block_size = 7),
    ("blocks of 32", |s| s.block_size = 32),
    ("contiguous", |s| s.block_size = WHOLE),
    ("more announced than there", |s| s.slack = 100),
    ("not causal", |s| s.causal = false),
    ("not causal, window 6", |s| {
        (s.causal, s.window) = (false, Some(6));
    }),
    ("not causal, window 20, blocks of 7", |s| {
        (s.causal, s.window, s.block_size) = (false, Some(20), 7);
    }),
    ("not causal, window 50 of 150 and 70", |s| {
        (s.causal, s.window) = (false, Some(50));
        s.seqs = &[(0, 150), (90, 70), (200, 1)];
    }),
    ("chunks of 9, blocks of 4", |s| {
        (s.window, s.chunked, s.block_size) = (Some(9), true, 4);
    }),
    ("chunks of 40 of 150 and 70", |s| {
        (s.window, s.chunked) = (Some(40), true);
        s.seqs = &[(149, 1), (90, 70), (0, 150)];
    }),
    ("window 1", |s| s.window = Some(1)),
    ("window 6", |s| s.window = Some(6)),
    ("window 20, blocks of 7", |s| {
        (s.window, s.block_size) = (Some(20), 7)
    }),
    ("window longer than the context", |s| s.window = Some(1000)),
    ("window 20 of 150 keys, blocks of 4", |s| {
        (s.window, s.block_size) = (Some(20), 4);
        s.seqs = &[(149, 1), (90, 70), (0, 150)];
    }),
    ("the third of three groups, window 6", |s| {
        (s.group, s.window) = (2, Some(6));
    }),
    ("sinks", |s| s.sinks = true),
    ("sinks, window and softcap", |s| {
        (s.sinks, s.window, s.softcap) = (true, Some(6), Some(5.0));
    }),
];

/// Cases of a chunk and a prefill.
const TWO: &[(&str, Change)] = &[
    ("heads 1:1", |s| s.heads = (3, 3)),
    ("heads 3:1", |s| s.heads = (6, 2)),
    ("heads 8:1", |s| s.heads = (8, 1)),
    ("head_dim 10", |s| s.head_dim = 10),
    ("head_dim 24", |s| s.head_dim = 24),
    ("head_dim 64", |s| s.head_dim = 64),
    ("head_dim 80", |s| s.head_dim = 80),
    ("head_dim 128", |s| s.head_dim = 128),
    ("head_dim 256", |s| s.head_dim = 256),
    ("keys of 20, values of 33", |s| s.value_dim = 33),
    ("keys of 10, values of 64, blocks of 7", |s| {
        (s.head_dim, s.value_dim, s.block_size) = (10, 64, 7)
    }),
    ("keys of 33, values of 9, sinks", |s| {
        (s.head_dim, s.value_dim, s.sinks) = (33, 9, true)
    }),
    ("keys of 192, values of 128, blocks of 32", |s| {
        (s.head_dim, s.value_dim, s.block_size) = (192, 128, 32);
        s.seqs = &[(40, 30), (70, 1)];
    }),
    ("keys of 32, values of 96, 150 keys", |s| {
        (s.head_dim, s.value_dim) = (32, 96);
        s.seqs = &[(149, 1), (90, 70)];
    }),
    ("latent rows of 20, values of 13", |s| {
        (s.heads, s.value_dim, s.latent) = ((5, 1), 13, true)
    }),
    ("latent rows of 36, values of 32, 150 keys", |s| {
        (s.heads, s.head_dim, s.value_dim, s.latent) = ((4, 1), 36, 32, true);
        s.seqs = &[(149, 1), (90, 70)];
    }),
    ("latent rows of 33, all of them values, blocks of 7", |s| {
        (s.heads, s.head_dim, s.latent, s.block_size) = ((3, 1), 33, true, 7)
    }),
    ("latent rows of 576, values of 512", |s| {
        (s.heads, s.head_dim, s.value_dim, s.latent) = ((16, 1), 576, 512, true)
    }),
    ("latent rows of two kv heads, window 6", |s| {
        (s.value_dim, s.latent, s.window) = (13, true, Some(6))
    }),
    ("softcap 30", |s| s.softcap = Some(30.0)),
    ("large values", |s| (s.scale, s.window) = (300.0, Some(1))),
    ("tiny values", |s| s.scale = 1e-2),
    ("zeros", |s| s.scale = 0.0),
];

fn specs() -> impl Iterator<Item = (&'static str, Spec)> {
    let wide = Spec {
        head_dim: 64,
        ..BASE
    };
    let lists = [(RAGGED, BASE), (MANY_WIDE, wide), (TWO, FEW)];
    lists.into_iter().flat_map(|(list, base)| {
        list.iter().map(move |&(name, change)| {
            let mut spec = base;
            change(&mut spec);
            (name, spec)
        })
    })
}

/// Append, then attention, with the buffers of one step.
fn attention<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let layout = Layout::new(data);
    let mut kv = layout.pool::<B, K>(io.device, data)?;
    append_and_attend(io, data, &layout, &mut kv)
}

fn append_and_attend<B: BackendKvDtype<K>, K: KvDtypeKind>(
    io: &mut Io<'_, B>,
    data: &Paged,
    layout: &Layout,
    kv: &mut KvLayer<B, K>,
) -> Check {
    let batch = layout.batch::<B, K>(io, &step(data), data.spec.slack)?;
    let [_, k, v] = &data.step_qkv;
    let (k, v) = (io.input("k", k)?, io.input("v", v)?);
    B::kv_append(&mut io.ctx, kv, &k, &v, &batch)?;
    attend(io, data, &batch, kv)
}

/// Attention alone, over keys and values that are there.
fn attend<B: BackendKvDtype<K>, K: KvDtypeKind>(
    io: &mut Io<'_, B>,
    data: &Paged,
    batch: &DeviceBatch<B>,
    kv: &KvLayer<B, K>,
) -> Check {
    let q = io.input("q", &data.step_qkv[0])?;
    let sinks = io.optional_floats("sinks", data.sinks.as_deref())?;
    let mut out = io.output("out", data.out_size())?;
    let (sinks, config) = (sinks.as_ref(), &data.config);
    B::paged_attention::<K>(&mut io.ctx, &q, kv, sinks, batch, &mut out, config)?;
    io.take("out", &out, data.out_size())
}

/// A head as a cache of `dtype` gives it back.
fn stored(dtype: Dtype, head: &[f32]) -> Vec<f32> {
    let each = |f: fn(f32) -> f32| head.iter().map(|&x| f(x)).collect();
    match dtype {
        Dtype::F16 => each(|x| f16::from_f32(x).to_f32()),
        Dtype::BF16 => each(|x| bf16::from_f32(x).to_f32()),
        Dtype::F8E4M3 => each(|x| fp8_codec::e4m3_to_f32(fp8_codec::e4m3_from_f32(x))),
        Dtype::I8 => {
            let mut codes = vec![0; head.len()];
            let scale = kv_int8::quantize_row(head, &mut codes);
            let mut out = vec![0.0; head.len()];
            kv_int8::dequantize_row(&codes, scale, &mut out);
            out
        }
        _ => head.to_vec(),
    }
}

fn attention_formula<K: KvDtypeKind>(data: &Paged) -> Vec<Vec<f64>> {
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        value_dim,
        ..
    } = data.config;
    let mut out = Vec::new();
    for seq in 0..data.spec.seqs.len() {
        let seq = data.alone(seq);
        let (old, new) = seq.spec.seqs[0];
        let [q, k, v] = &seq.step_qkv;
        let rows = |parts: [&[f32]; 2], kv_head: usize, dim: usize| -> Vec<Vec<f32>> {
            let all = parts.concat();
            let head = |j| &all[(j * kv_heads + kv_head) * dim..][..dim];
            (0..old + new).map(|j| stored(K::DTYPE, head(j))).collect()
        };
        let of_head = |head| {
            let keys = rows([&seq.cached_kv[0], k], head, head_dim);
            let values = match data.spec.latent {
                true => keys.iter().map(|key| key[..value_dim].to_vec()).collect(),
                false => rows([&seq.cached_kv[1], v], head, value_dim),
            };
            (keys, values)
        };
        let kv: Vec<_> = (0..kv_heads).map(of_head).collect();
        for (i, query) in q.chunks(head_dim).enumerate() {
            let (token, head) = (i / heads, i % heads);
            let (keys, values) = &kv[head / (heads / kv_heads)];
            let scores = Scores {
                scale: data.config.scale,
                softcap: data.config.softcap,
                sink: data.sinks.as_ref().map(|sinks| sinks[head]),
                causal: data.config.causal,
                window: data.config.sliding_window,
                chunked: data.config.chunked,
            };
            out.extend(naive::attend(
                query,
                old + token,
                keys,
                values,
                value_dim,
                scores,
            ));
        }
    }
    vec![out]
}

/// The fused append, then attention with the q that it gave.
fn fused<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let layout = Layout::new(data);
    let mut kv = layout.pool::<B, K>(io.device, data)?;
    let batch = layout.batch::<B, K>(io, &step(data), data.spec.slack)?;
    let buffers = TransformBuffers::new(io, &data.transform)?;
    let qkv = io.input("qkv", &data.qkv)?;
    let mut q = io.output("q", data.q_size())?;
    let input = PagedQkv {
        qkv: &qkv,
        transform: buffers.transform(),
        shape: data.qkv_shape(),
    };
    let ctx = &mut io.ctx;
    B::split_qkv_norm_rope_into_paged_cache::<K>(ctx, input, &mut q, &mut kv, &batch)?;
    io.take("q", &q, data.q_size())?;
    let mut out = io.output("out", data.out_size())?;
    B::paged_attention::<K>(&mut io.ctx, &q, &kv, None, &batch, &mut out, &data.config)?;
    io.take("out", &out, data.out_size())
}

fn fused_formula<K: KvDtypeKind>(data: &Paged) -> Vec<Vec<f64>> {
    let parts = transformed(&data.qkv, &data.transform, data.qkv_shape());
    let q = parts[0].clone();
    let new = parts.map(|part| naive::narrow(&part));
    let mut outputs = vec![q];
    outputs.extend(attention_formula::<K>(&Paged {
        step_qkv: new,
        ..data.clone()
    }));
    outputs
}

/// Copies the blocks of each sequence elsewhere, twice, spoils the first copies and attends over
/// the second.
fn copied<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let mut layout = Layout::new(data);
    let first = layout.pool.blocks;
    layout.pool.blocks *= 3;
    let mut kv = layout.pool::<B, K>(io.device, data)?;
    let id = |block: i32, copy: usize| BlockId(block as u32 + (copy * first) as u32);
    let used: Vec<i32> = layout.tables.concat();
    // The order of pairs matters: the second copy is made of the first.
    let mut pairs: Vec<_> = used
        .iter()
        .map(|&block| (id(block, 0), id(block, 1)))
        .collect();
    pairs.extend(used.iter().map(|&block| (id(block, 1), id(block, 2))));
    pairs.extend(used.iter().map(|&block| (id(used[0], 0), id(block, 1))));
    B::kv_copy_blocks(&mut io.ctx, &mut kv, &pairs)?;
    for block in layout.tables.iter_mut().flatten() {
        *block += 2 * first as i32;
    }
    append_and_attend(io, data, &layout, &mut kv)
}

fn in_blocks_of_16<B: BackendKvDtype<K>, K: KvDtypeKind>(
    io: &mut Io<'_, B>,
    data: &Paged,
) -> Check {
    (0..4).try_for_each(|_| attention(io, &data.with_block_size(16)))
}

fn in_other_blocks<B: BackendKvDtype<K>, K: KvDtypeKind>(
    io: &mut Io<'_, B>,
    data: &Paged,
) -> Check {
    [1, 7, 32, WHOLE]
        .into_iter()
        .try_for_each(|size| attention(io, &data.with_block_size(size)))
}

fn one_by_one<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    (0..data.spec.seqs.len()).try_for_each(|seq| attention(io, &data.alone(seq)))
}

/// The one sequence of the batch in several steps over the same pool.
fn in_chunks<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let layout = Layout::new(data);
    let mut kv = layout.pool::<B, K>(io.device, data)?;
    let shape = data.qkv_shape();
    let rows = [shape.q_dim(), shape.k_dim(), shape.v_dim()];
    let mut start = 0;
    for seqs in CHUNK_STEPS {
        let len = seqs[0].1;
        let part = |i: usize| data.step_qkv[i][start * rows[i]..][..len * rows[i]].to_vec();
        let chunk = Paged {
            spec: Spec { seqs, ..data.spec },
            step_qkv: [part(0), part(1), part(2)],
            ..data.clone()
        };
        append_and_attend(io, &chunk, &layout, &mut kv)?;
        start += len;
    }
    Ok(())
}

/// Old and new keys of the steps that make up [`CHUNKED`].
const CHUNK_STEPS: [&[(usize, usize)]; 6] = [
    &[(21, 1)],
    &[(22, 1)],
    &[(23, 5)],
    &[(28, 17)],
    &[(45, 30)],
    &[(75, 6)],
];

const CHUNKED: &[(usize, usize)] = &[(21, 60)];

/// Sequences that are computed whole and in chunks.
const IN_CHUNKS: &[(&str, Spec)] = &[
    (
        "whole and in chunks",
        Spec {
            seqs: CHUNKED,
            ..BASE
        },
    ),
    (
        "whole and in chunks, heads 8:1 of 64",
        Spec {
            seqs: CHUNKED,
            heads: (8, 1),
            head_dim: 64,
            ..BASE
        },
    ),
    (
        "whole and in chunks, keys of 24, values of 64",
        Spec {
            seqs: CHUNKED,
            head_dim: 24,
            value_dim: 64,
            ..BASE
        },
    ),
    (
        "whole and in chunks, latent rows of 40, values of 32",
        Spec {
            seqs: CHUNKED,
            heads: (6, 1),
            head_dim: 40,
            value_dim: 32,
            latent: true,
            ..BASE
        },
    ),
    (
        "whole and in chunks, window 9",
        Spec {
            seqs: CHUNKED,
            window: Some(9),
            ..BASE
        },
    ),
];

fn tolerance<B: Backend, K: KvDtypeKind>() -> Tolerance {
    match K::DTYPE {
        // A value that is rounded into a cache of few bits may end in the code next to the expected one.
        Dtype::F8E4M3 if B::Act::DTYPE != Dtype::F32 => Tolerance::TWICE_ROUNDED,
        Dtype::F32 => Tolerance::F32_ATTENTION,
        Dtype::I8 => Tolerance::QUANTIZED,
        _ => Tolerance::HALF_STORAGE,
    }
}

/// Every case of a cache of `K`.
pub(crate) fn cases<B, K>() -> Cases<B>
where
    B: BackendKvDtype<K>,
    K: KvDtypeKind,
    ReferenceBackend: BackendKvDtype<K>,
{
    let mut cases = Cases::new();
    let op = "paged_attention";
    for (name, spec) in specs() {
        let case = label(op, K::NAME, tolerance::<B, K>(), name);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(
            case,
            make,
            implementations!(attention, K, attention_formula::<K>),
        );
    }
    let text = "pools, batches and settings that do not fit";
    cases.refuses((op, K::NAME, text), both!(mismatches, K));
    let sinks = Spec {
        sinks: true,
        ..BASE
    };
    let many = move |rng: &mut Rng| make(rng, sinks);
    let text = "blocks of any size";
    cases.same(
        (op, K::NAME, text),
        many,
        in_blocks_of_16::<B, K>,
        in_other_blocks::<B, K>,
    );
    let long = Spec {
        heads: (8, 2),
        head_dim: 64,
        seqs: &[(0, 70), (1100, 1), (30, 9), (600, 3)],
        ..BASE
    };
    let long = move |rng: &mut Rng| make(rng, long);
    let text = "a sequence alone and in a batch";
    cases.same(
        (op, K::NAME, text),
        many,
        attention::<B, K>,
        one_by_one::<B, K>,
    );
    let text = "a sequence alone and in a batch, heads of 64, 1100 keys";
    cases.same(
        (op, K::NAME, text),
        long,
        attention::<B, K>,
        one_by_one::<B, K>,
    );
    for &(text, spec) in IN_CHUNKS {
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.same(
            (op, K::NAME, text),
            make,
            attention::<B, K>,
            in_chunks::<B, K>,
        );
    }
    cases.rejects_short_buffers(
        (op, K::NAME),
        |rng| make(rng, Spec { sinks: true, ..FEW }),
        both!(attention, K),
    );
    append_cases::<B, K>(&mut cases);
    latent_cases::<B, K>(&mut cases);
    cases
}

/// Append and attention of latent rows by their own names.
fn latent<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let layout = Layout::new(data);
    let mut kv = layout.pool::<B, K>(io.device, data)?;
    let batch = layout.batch::<B, K>(io, &step(data), data.spec.slack)?;
    let [q, rows, _] = &data.step_qkv;
    let (q, rows) = (io.input("q", q)?, io.input("latent", rows)?);
    B::append_latent_paged::<K>(&mut io.ctx, &mut kv, &rows, &batch)?;
    let mut out = io.output("out", data.out_size())?;
    let heads = (data.config.heads, data.config.scale);
    B::paged_mla_attention::<K>(&mut io.ctx, &q, &kv, &batch, &mut out, heads)?;
    io.take("out", &out, data.out_size())
}

fn latent_cases<B, K>(cases: &mut Cases<B>)
where
    B: BackendKvDtype<K>,
    K: KvDtypeKind,
    ReferenceBackend: BackendKvDtype<K>,
{
    let op = "paged_mla_attention";
    let base = Spec {
        heads: (5, 1),
        latent: true,
        ..BASE
    };
    for (text, head_dim, value_dim, block_size) in [
        ("rows of 20, values of 13", 20, 13, 16),
        ("rows of 40, values of 32, blocks of 32", 40, 32, 32),
        ("rows of 33, values of 1, blocks of 7", 33, 1, 7),
    ] {
        let spec = Spec {
            head_dim,
            value_dim,
            block_size,
            ..base
        };
        let case = label(op, K::NAME, tolerance::<B, K>(), text);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(
            case,
            make,
            implementations!(latent, K, attention_formula::<K>),
        );
    }
}

fn append_cases<B, K>(cases: &mut Cases<B>)
where
    B: BackendKvDtype<K>,
    K: KvDtypeKind,
    ReferenceBackend: BackendKvDtype<K>,
{
    let op = "split_qkv_norm_rope_into_paged_cache";
    for kind in KINDS {
        for (text, spec) in [
            ("ragged batch", BASE),
            (
                "heads 8:1 of 64",
                Spec {
                    heads: (8, 1),
                    head_dim: 64,
                    ..FEW
                },
            ),
            (
                "keys of 24, values of 33",
                Spec {
                    head_dim: 24,
                    value_dim: 33,
                    ..FEW
                },
            ),
            (
                "no tokens",
                Spec {
                    seqs: &[(4, 0)],
                    ..BASE
                },
            ),
        ] {
            let case = label(
                op,
                K::NAME,
                tolerance::<B, K>(),
                format!("{text}, {}", kind.name),
            );
            let make = move |rng: &mut Rng| {
                let mut data = make(rng, spec);
                let tokens = data.tokens();
                data.transform = Transform::new(rng, kind, spec.head_dim, tokens);
                data
            };
            cases.add(case, make, implementations!(fused, K, fused_formula::<K>));
        }
    }
    let make_fused = |rng: &mut Rng| {
        let mut data = make(rng, FEW);
        let tokens = data.tokens();
        data.transform = Transform::new(rng, KINDS[4], FEW.head_dim, tokens);
        data
    };
    cases.rejects_short_buffers((op, K::NAME), make_fused, both!(fused, K));

    let op = "kv_copy_blocks";
    for (text, spec) in [
        ("blocks of 16", FEW),
        (
            "blocks of 7",
            Spec {
                block_size: 7,
                ..FEW
            },
        ),
        (
            "contiguous",
            Spec {
                block_size: WHOLE,
                ..FEW
            },
        ),
        (
            "keys of 24, values of 9",
            Spec {
                head_dim: 24,
                value_dim: 9,
                ..FEW
            },
        ),
        (
            "latent rows",
            Spec {
                heads: (4, 1),
                value_dim: 16,
                latent: true,
                ..FEW
            },
        ),
    ] {
        let case = label(op, K::NAME, tolerance::<B, K>(), text);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(
            case,
            make,
            implementations!(copied, K, attention_formula::<K>),
        );
    }
    cases.refuses(
        (op, K::NAME, "blocks that are not there"),
        both!(copies_out_of_range, K),
    );
    cases.refuses(
        ("alloc_kv_layer", K::NAME, "pools of nothing"),
        both!(pools_of_nothing, K),
    );
    blocks::cases::<B, K>(cases);
}

/// [`attention`] by the names of the INT8 cache.
fn int8_attention<B: BackendInt8KvOps>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let layout = Layout::new(data);
    let mut kv = layout.pool::<B, KvInt8>(io.device, data)?;
    let batch = layout.batch::<B, KvInt8>(io, &step(data), data.spec.slack)?;
    let [q, k, v] = &data.step_qkv;
    let (q, k, v) = (io.input("q", q)?, io.input("k", k)?, io.input("v", v)?);
    let mut out = io.output("out", data.out_size())?;
    B::int8_kv_append_paged(&mut io.ctx, &mut kv, &k, &v, &batch)?;
    B::int8_paged_attention(&mut io.ctx, &q, &kv, &batch, &mut out, &data.config)?;
    io.take("out", &out, data.out_size())
}

/// The cases of [`BackendInt8KvOps`].
pub(crate) fn int8_cases<B: BackendInt8KvOps>() -> Cases<B> {
    let mut cases = Cases::new();
    for (name, spec) in [
        ("ragged batch", BASE),
        (
            "heads 8:1",
            Spec {
                heads: (8, 1),
                ..FEW
            },
        ),
    ] {
        let case = label("int8_paged_attention", "int8", Tolerance::QUANTIZED, name);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(
            case,
            make,
            implementations!(int8_attention, attention_formula::<KvInt8>),
        );
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare;
    use ferrum_kernels::{KvF32, KvFp8};

    fn formula_differs(data: &Paged, changed: &Paged) -> bool {
        let found = attention_formula::<KvF32>(changed);
        let expected = attention_formula::<KvF32>(data);
        compare("out", &found[0], &expected[0], Tolerance::QUANTIZED).is_err()
    }

    /// Changes a case as a kernel would that reads the contract in another way.
    type Misread = fn(&mut Paged);

    /// A kernel that reads the contract in another way fails at least one case, even at the loosest
    /// tolerance.
    #[test]
    fn misreadings_are_noticed() {
        let misreadings: [(&str, Misread); 8] = [
            ("a window one longer", |data| {
                data.config.sliding_window = data.config.sliding_window.map(|window| window + 1);
            }),
            ("no softcap", |data| data.config.softcap = None),
            ("no sinks", |data| data.sinks = None),
            ("not causal", |data| data.config.causal = false),
            ("keys of another sequence", |data| {
                let row = data.config.kv_heads * data.config.head_dim;
                if !data.cached_kv[0].is_empty() {
                    data.cached_kv[0].rotate_left(row);
                }
            }),
            ("values of another head", |data| {
                let dim = data.config.head_dim;
                if !data.step_qkv[2].is_empty() {
                    data.step_qkv[2].rotate_left(dim);
                }
            }),
            ("keys not written", |data| data.step_qkv[1].fill(0.0)),
            ("values not written", |data| data.step_qkv[2].fill(100.0)),
        ];
        for (what, misread) in misreadings {
            let noticed = |(name, spec): (&str, Spec)| {
                let data = make(&mut Rng::new(name, |x| x), spec);
                let mut changed = data.clone();
                misread(&mut changed);
                formula_differs(&data, &changed)
            };
            assert!(specs().any(noticed), "nothing notices {what}");
        }
    }

    #[test]
    fn a_cache_of_eight_bits_is_not_one_of_thirty_two() {
        let data = make(&mut Rng::new("fp8", |x| x), BASE);
        let (found, expected) = (
            attention_formula::<KvF32>(&data),
            attention_formula::<KvFp8>(&data),
        );
        assert!(compare("out", &found[0], &expected[0], Tolerance::HALF_STORAGE).is_err());
    }

    #[test]
    fn a_sequence_alone_has_its_own_rows() {
        let data = make(&mut Rng::new("alone", |x| x), BASE);
        let whole = attention_formula::<KvF32>(&data);
        let parts =
            (0..BASE.seqs.len()).flat_map(|seq| attention_formula::<KvF32>(&data.alone(seq)));
        assert_eq!(whole, [parts.flatten().collect::<Vec<_>>()]);
    }

    #[test]
    fn chunks_add_up_to_the_whole() {
        let (old, new) = CHUNKED[0];
        let steps = CHUNK_STEPS.iter().map(|step| step[0]);
        let end = steps.fold(old, |at, (old, new)| {
            assert_eq!(at, old);
            old + new
        });
        assert_eq!(end, old + new);
    }
}
