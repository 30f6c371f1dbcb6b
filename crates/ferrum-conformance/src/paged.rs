//! Paged keys and values: what is written to blocks, and attention over a ragged batch of them.
//!
//! A pool can only be read through attention, so that is how its contents are seen. Before the case
//! begins, every slot holds values of a former owner, the blocks of a sequence lie in random order,
//! and entries of block tables that no key needs hold no block.

use crate::case::{Cases, label, probe};
use crate::compare::Tolerance;
use crate::core::{KINDS, Transform, TransformBuffers, transformed};
use crate::data::Rng;
use crate::io::{Check, Io, wrong};
use crate::naive::{self, Scores};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{
    AttnConfig, BackendInt8KvOps, BackendKvDtype, BatchShape, DeviceBatch, KvDtypeKind, KvInt8,
    KvLayer, PagedKvShape, PagedQkv, QkvShape,
};
use ferrum_quant::{float8, int8};
use ferrum_types::{BlockId, Dtype, Error};
use half::{bf16, f16};

/// What a case is about; the rest is as in [`BASE`].
#[derive(Clone, Copy)]
struct Spec {
    heads: (usize, usize),
    head_dim: usize,
    /// Tokens in a block; `WHOLE` makes the pool contiguous.
    block_size: usize,
    /// For each sequence: keys from former steps, and tokens of this one.
    seqs: &'static [(usize, usize)],
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
    causal: bool,
    /// What the batch announces beyond its longest sequence.
    slack: usize,
    /// Size of q, k and v.
    scale: f32,
}

/// One block of the whole context for each sequence.
const WHOLE: usize = 0;

const BASE: Spec = Spec {
    heads: (4, 2),
    head_dim: 20,
    block_size: 16,
    seqs: &[
        (0, 5),
        (37, 1),
        (16, 9),
        (0, 0),
        (3, 1),
        (15, 1),
        (40, 0),
        (0, 33),
    ],
    window: None,
    softcap: None,
    sinks: false,
    causal: true,
    slack: 0,
    scale: 1.0,
};

const FEW: Spec = Spec {
    seqs: &[(21, 3), (0, 7)],
    ..BASE
};

const SPECS: &[(&str, Spec)] = &[
    ("prefill, chunks and decode, some empty", BASE),
    (
        "one token, one key",
        Spec {
            seqs: &[(0, 1)],
            ..BASE
        },
    ),
    ("no sequence", Spec { seqs: &[], ..BASE }),
    (
        "only empty sequences",
        Spec {
            seqs: &[(0, 0), (7, 0)],
            ..BASE
        },
    ),
    (
        "decode of many",
        Spec {
            seqs: &[(9, 1), (1, 1), (30, 1), (16, 1), (47, 1), (2, 1)],
            ..BASE
        },
    ),
    (
        "decode, 1500 keys",
        Spec {
            seqs: &[(1499, 1), (700, 1)],
            heads: (3, 1),
            ..BASE
        },
    ),
    (
        "blocks of 1",
        Spec {
            block_size: 1,
            ..BASE
        },
    ),
    (
        "blocks of 7",
        Spec {
            block_size: 7,
            ..BASE
        },
    ),
    (
        "blocks of 32",
        Spec {
            block_size: 32,
            ..BASE
        },
    ),
    (
        "contiguous",
        Spec {
            block_size: WHOLE,
            ..BASE
        },
    ),
    ("more announced than there", Spec { slack: 100, ..BASE }),
    (
        "heads 1:1",
        Spec {
            heads: (3, 3),
            ..FEW
        },
    ),
    (
        "heads 3:1",
        Spec {
            heads: (6, 2),
            ..FEW
        },
    ),
    (
        "heads 8:1",
        Spec {
            heads: (8, 1),
            ..FEW
        },
    ),
    (
        "head_dim 10",
        Spec {
            head_dim: 10,
            ..FEW
        },
    ),
    (
        "head_dim 24",
        Spec {
            head_dim: 24,
            ..FEW
        },
    ),
    (
        "head_dim 64",
        Spec {
            head_dim: 64,
            ..FEW
        },
    ),
    (
        "head_dim 80",
        Spec {
            head_dim: 80,
            ..FEW
        },
    ),
    (
        "head_dim 128",
        Spec {
            head_dim: 128,
            ..FEW
        },
    ),
    (
        "head_dim 256",
        Spec {
            head_dim: 256,
            ..FEW
        },
    ),
    (
        "not causal",
        Spec {
            causal: false,
            ..BASE
        },
    ),
    (
        "window 1",
        Spec {
            window: Some(1),
            ..BASE
        },
    ),
    (
        "window 6",
        Spec {
            window: Some(6),
            ..BASE
        },
    ),
    (
        "window 20, blocks of 7",
        Spec {
            window: Some(20),
            block_size: 7,
            ..BASE
        },
    ),
    (
        "window longer than the context",
        Spec {
            window: Some(1000),
            ..BASE
        },
    ),
    (
        "softcap 30",
        Spec {
            softcap: Some(30.0),
            ..FEW
        },
    ),
    (
        "sinks",
        Spec {
            sinks: true,
            ..BASE
        },
    ),
    (
        "sinks, window and softcap",
        Spec {
            sinks: true,
            window: Some(6),
            softcap: Some(5.0),
            ..BASE
        },
    ),
    (
        "large values",
        Spec {
            scale: 300.0,
            window: Some(1),
            ..FEW
        },
    ),
    ("tiny values", Spec { scale: 1e-2, ..FEW }),
    ("zeros", Spec { scale: 0.0, ..FEW }),
];

/// A step on the host.
#[derive(Clone)]
struct Paged {
    spec: Spec,
    config: AttnConfig,
    sinks: Option<Vec<f32>>,
    /// `[tokens, kv_heads, head_dim]` of former steps.
    old: [Vec<f32>; 2],
    /// `[tokens, q_dim + 2·kv_dim]` of this step.
    qkv: Vec<f32>,
    /// `[tokens, …]`: q, k and v of this step.
    new: [Vec<f32>; 3],
    transform: Transform,
}

fn make(rng: &mut Rng, spec: Spec) -> Paged {
    let Spec {
        heads: (heads, kv_heads),
        head_dim,
        seqs,
        scale,
        ..
    } = spec;
    let tokens = seqs.iter().map(|seq| seq.1).sum::<usize>();
    let kv_size = seqs.iter().map(|seq| seq.0).sum::<usize>() * kv_heads * head_dim;
    let shape = QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
    };
    let qkv = rng.acts(tokens * shape.row_dim(), scale);
    let transform = Transform::new(rng, KINDS[0], head_dim, tokens);
    let new = transformed(&qkv, &transform, shape).map(|part| naive::narrow(&part));
    Paged {
        spec,
        config: AttnConfig {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal: spec.causal,
            sliding_window: spec.window,
            softcap: spec.softcap,
        },
        sinks: spec.sinks.then(|| rng.floats(heads, 2.0)),
        old: [rng.acts(kv_size, scale), rng.acts(kv_size, scale)],
        qkv,
        new,
        transform,
    }
}

impl Paged {
    fn tokens(&self) -> usize {
        self.spec.seqs.iter().map(|seq| seq.1).sum()
    }

    fn q_size(&self) -> usize {
        self.tokens() * self.config.heads * self.config.head_dim
    }

    fn qkv_shape(&self) -> QkvShape {
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        QkvShape {
            tokens: self.tokens(),
            heads,
            kv_heads,
            head_dim,
        }
    }

    fn with_block_size(&self, block_size: usize) -> Self {
        let spec = Spec {
            block_size,
            ..self.spec
        };
        Paged {
            spec,
            ..self.clone()
        }
    }

    /// The same step with one sequence of the batch.
    fn alone(&self, seq: usize) -> Self {
        let before = &self.spec.seqs[..seq];
        let starts = before
            .iter()
            .fold((0, 0), |sum, seq| (sum.0 + seq.0, sum.1 + seq.1));
        let (old, new) = self.spec.seqs[seq];
        let rows = |values: &[f32], start: usize, len: usize, row: usize| {
            values[start * row..][..len * row].to_vec()
        };
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        let kv_row = kv_heads * head_dim;
        let [q, k, v] = &self.new;
        Paged {
            spec: Spec {
                seqs: &self.spec.seqs[seq..=seq],
                ..self.spec
            },
            old: [0, 1].map(|i| rows(&self.old[i], starts.0, old, kv_row)),
            qkv: rows(&self.qkv, starts.1, new, self.qkv_shape().row_dim()),
            new: [
                rows(q, starts.1, new, heads * head_dim),
                rows(k, starts.1, new, kv_row),
                rows(v, starts.1, new, kv_row),
            ],
            transform: self.transform.slice(starts.1..starts.1 + new),
            ..self.clone()
        }
    }
}

/// Which blocks the sequences have.
struct Layout {
    pool: PagedKvShape,
    /// For each sequence.
    tables: Vec<Vec<i32>>,
}

impl Layout {
    /// Blocks in random order, some of the pool unused.
    fn new(data: &Paged) -> Self {
        let Spec {
            seqs, block_size, ..
        } = data.spec;
        let longest = seqs.iter().map(|seq| seq.0 + seq.1).max().unwrap_or(0);
        let block_size = if block_size == WHOLE {
            longest.max(1)
        } else {
            block_size
        };
        let needed = seqs.iter().map(|seq| (seq.0 + seq.1).div_ceil(block_size));
        let blocks = needed.clone().sum::<usize>() + 3;
        let mut order = Rng::new("blocks", |x| x).permutation(blocks).into_iter();
        let mut take = |count| order.by_ref().take(count).map(|id| id as i32).collect();
        let AttnConfig {
            kv_heads, head_dim, ..
        } = data.config;
        Layout {
            tables: needed.map(&mut take).collect(),
            pool: PagedKvShape {
                blocks,
                block_size,
                kv_heads,
                head_dim,
            },
        }
    }

    /// A batch of `(kv_len, query_len)` over these blocks.
    fn batch<B: BackendKvDtype<K>, K: KvDtypeKind>(
        &self,
        io: &mut Io<'_, B>,
        seqs: &[(usize, usize)],
        slack: usize,
    ) -> Check<DeviceBatch<B>> {
        let stride = self.tables.iter().map(Vec::len).max().unwrap_or(0) + 2;
        let mut starts = vec![0];
        let mut token_seqs = Vec::new();
        for (s, &(_, len)) in (0..).zip(seqs) {
            token_seqs.extend(vec![s; len]);
            starts.push(token_seqs.len() as i32);
        }
        let kv_lens: Vec<i32> = seqs.iter().map(|seq| seq.0 as i32).collect();
        let mut tables = vec![-1; seqs.len() * stride];
        for (row, table) in tables.chunks_mut(stride).zip(&self.tables) {
            row[..table.len()].copy_from_slice(table);
        }
        let tokens = token_seqs.len();
        let shape = BatchShape {
            tokens,
            seqs: seqs.len(),
            table_stride: stride,
            max_query_len: seqs.iter().map(|seq| seq.1).max().unwrap_or(0),
            max_kv_len: seqs.iter().map(|seq| seq.0).max().unwrap_or(0) + slack,
        };
        Ok(DeviceBatch {
            shape,
            // No op of the cache reads ids or rotary rows of a batch.
            tokens: io.exact(&vec![1; tokens])?,
            rope_rows: io.exact(&vec![0; tokens])?,
            token_seqs: io.exact(&token_seqs)?,
            query_starts: io.indices("query_starts", &starts)?,
            kv_lens: io.indices("kv_lens", &kv_lens)?,
            block_tables: io.indices("block_tables", &tables)?,
        })
    }

    /// A pool full of values of nobody, but for the keys and values of former steps.
    fn pool<B: BackendKvDtype<K>, K: KvDtypeKind>(
        &self,
        device: &B,
        data: &Paged,
    ) -> Check<KvLayer<B, K>> {
        let mut kv: KvLayer<B, K> = device.alloc_kv_layer(self.pool)?;
        let slots = self.pool.blocks * self.pool.block_size;
        let all = Layout {
            tables: vec![(0..self.pool.blocks as i32).collect()],
            pool: self.pool,
        };
        let row = self.pool.kv_heads * self.pool.head_dim;
        let mut rng = Rng::new("former owner", |x| x);
        let stale = [
            rng.floats(slots * row, 100.0),
            rng.floats(slots * row, 100.0),
        ];
        all.append(device, &mut kv, &[(slots, slots)], &stale)?;
        let old: Vec<_> = data.spec.seqs.iter().map(|seq| (seq.0, seq.0)).collect();
        self.append(device, &mut kv, &old, &data.old)?;
        Ok(kv)
    }

    /// Writes keys and values outside of what the case is about.
    fn append<B: BackendKvDtype<K>, K: KvDtypeKind>(
        &self,
        device: &B,
        kv: &mut KvLayer<B, K>,
        seqs: &[(usize, usize)],
        [k, v]: &[Vec<f32>; 2],
    ) -> Check {
        // Buffers of another run, so that a run with a short buffer does not count them.
        let mut io = Io::new(device, crate::io::Fault::None)?;
        let batch = self.batch::<B, K>(&mut io, seqs, 0)?;
        let (k, v) = (io.input("k", k)?, io.input("v", v)?);
        B::kv_append(&mut io.ctx, kv, &k, &v, &batch)?;
        Ok(B::sync(&mut io.ctx)?)
    }
}

/// This step's `(kv_len, query_len)`.
fn step(data: &Paged) -> Vec<(usize, usize)> {
    data.spec
        .seqs
        .iter()
        .map(|&(old, new)| (old + new, new))
        .collect()
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
    let [q, k, v] = &data.new;
    let (q, k, v) = (io.input("q", q)?, io.input("k", k)?, io.input("v", v)?);
    let sinks = io.optional_floats("sinks", data.sinks.as_deref())?;
    let mut out = io.output("out", data.q_size())?;
    B::kv_append(&mut io.ctx, kv, &k, &v, &batch)?;
    let (sinks, config) = (sinks.as_ref(), &data.config);
    B::paged_attention::<K>(&mut io.ctx, &q, kv, sinks, &batch, &mut out, config)?;
    io.take("out", &out, data.q_size())
}

/// A head as a cache of `dtype` gives it back.
fn stored(dtype: Dtype, head: &[f32]) -> Vec<f32> {
    let each = |f: fn(f32) -> f32| head.iter().map(|&x| f(x)).collect();
    match dtype {
        Dtype::F16 => each(|x| f16::from_f32(x).to_f32()),
        Dtype::BF16 => each(|x| bf16::from_f32(x).to_f32()),
        Dtype::F8E4M3 => each(|x| float8::e4m3_to_f32(float8::e4m3_from_f32(x))),
        Dtype::I8 => {
            let mut codes = vec![0; head.len()];
            let scale = int8::quantize_row(head, &mut codes);
            let mut out = vec![0.0; head.len()];
            int8::dequantize_row(&codes, scale, &mut out);
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
        ..
    } = data.config;
    let mut out = Vec::new();
    for seq in 0..data.spec.seqs.len() {
        let seq = data.alone(seq);
        let (old, new) = seq.spec.seqs[0];
        let [q, k, v] = &seq.new;
        let rows = |parts: [&[f32]; 2], kv_head: usize| -> Vec<Vec<f32>> {
            let all = parts.concat();
            let head = |j| &all[(j * kv_heads + kv_head) * head_dim..][..head_dim];
            (0..old + new).map(|j| stored(K::DTYPE, head(j))).collect()
        };
        let kv: Vec<_> = (0..kv_heads)
            .map(|head| (rows([&seq.old[0], k], head), rows([&seq.old[1], v], head)))
            .collect();
        for (i, query) in q.chunks(head_dim).enumerate() {
            let (token, head) = (i / heads, i % heads);
            let (keys, values) = &kv[head / (heads / kv_heads)];
            let scores = Scores {
                scale: data.config.scale,
                softcap: data.config.softcap,
                sink: data.sinks.as_ref().map(|sinks| sinks[head]),
                causal: data.config.causal,
                window: data.config.sliding_window,
            };
            out.extend(naive::attend(
                query,
                old + token,
                keys,
                values,
                head_dim,
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
    let mut out = io.output("out", data.q_size())?;
    B::paged_attention::<K>(&mut io.ctx, &q, &kv, None, &batch, &mut out, &data.config)?;
    io.take("out", &out, data.q_size())
}

fn fused_formula<K: KvDtypeKind>(data: &Paged) -> Vec<Vec<f64>> {
    let parts = transformed(&data.qkv, &data.transform, data.qkv_shape());
    let q = parts[0].clone();
    let new = parts.map(|part| naive::narrow(&part));
    let mut outputs = vec![q];
    outputs.extend(attention_formula::<K>(&Paged {
        new,
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

/// Blocks that are not in the pool.
fn copies_out_of_range<B: BackendKvDtype<K>, K: KvDtypeKind>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let shape = PagedKvShape {
        blocks: 3,
        block_size: 4,
        kv_heads: 1,
        head_dim: 8,
    };
    let mut kv: KvLayer<B, K> = device.alloc_kv_layer(shape)?;
    for pair in [(0, 3), (3, 0), (u32::MAX, 0)] {
        let pair = (BlockId(pair.0), BlockId(pair.1));
        if B::kv_copy_blocks(&mut ctx, &mut kv, &[pair]).is_ok() {
            return wrong(format!(
                "copying {pair:?} in a pool of 3 blocks gave no error"
            ));
        }
    }
    Ok(B::kv_copy_blocks(&mut ctx, &mut kv, &[])?)
}

fn pools_of_nothing<B: BackendKvDtype<K>, K: KvDtypeKind>(device: &B) -> Check {
    let shape = PagedKvShape {
        blocks: 3,
        block_size: 4,
        kv_heads: 1,
        head_dim: 8,
    };
    let none = [
        PagedKvShape { blocks: 0, ..shape },
        PagedKvShape {
            block_size: 0,
            ..shape
        },
        PagedKvShape {
            kv_heads: 0,
            ..shape
        },
        PagedKvShape {
            head_dim: 0,
            ..shape
        },
    ];
    for shape in none {
        if !matches!(
            device.alloc_kv_layer(shape),
            Err(Error::InvalidArgument { .. })
        ) {
            return wrong(format!("a pool of {shape:?} was not refused"));
        }
    }
    let endless = PagedKvShape {
        blocks: usize::MAX / 2,
        ..shape
    };
    match device.alloc_kv_layer(endless) {
        Err(_) => Ok(()),
        Ok(_) => wrong("a pool larger than the address space was allocated"),
    }
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
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = data.config;
    let rows = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
    let mut start = 0;
    for seqs in CHUNK_STEPS {
        let len = seqs[0].1;
        let part = |i: usize| data.new[i][start * rows[i]..][..len * rows[i]].to_vec();
        let chunk = Paged {
            spec: Spec { seqs, ..data.spec },
            new: [part(0), part(1), part(2)],
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

fn tolerance<K: KvDtypeKind>() -> Tolerance {
    match K::DTYPE {
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
    for &(name, spec) in SPECS {
        let case = label(op, K::NAME, tolerance::<K>(), name);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(case, make, probe!(attention, K, attention_formula::<K>));
    }
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
    let text = "a sequence alone and in a batch";
    cases.same(
        (op, K::NAME, text),
        many,
        attention::<B, K>,
        one_by_one::<B, K>,
    );
    for (text, spec) in [
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
            "whole and in chunks, window 9",
            Spec {
                seqs: CHUNKED,
                window: Some(9),
                ..BASE
            },
        ),
    ] {
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.same(
            (op, K::NAME, text),
            make,
            attention::<B, K>,
            in_chunks::<B, K>,
        );
    }
    cases.short(
        (op, K::NAME),
        |rng| make(rng, Spec { sinks: true, ..FEW }),
        attention::<B, K>,
    );
    append_cases::<B, K>(&mut cases);
    cases
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
                tolerance::<K>(),
                format!("{text}, {}", kind.name),
            );
            let make = move |rng: &mut Rng| {
                let mut data = make(rng, spec);
                let tokens = data.tokens();
                data.transform = Transform::new(rng, kind, spec.head_dim, tokens);
                data
            };
            cases.add(case, make, probe!(fused, K, fused_formula::<K>));
        }
    }
    let make_fused = |rng: &mut Rng| {
        let mut data = make(rng, FEW);
        let tokens = data.tokens();
        data.transform = Transform::new(rng, KINDS[4], FEW.head_dim, tokens);
        data
    };
    cases.short((op, K::NAME), make_fused, fused::<B, K>);

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
    ] {
        let case = label(op, K::NAME, tolerance::<K>(), text);
        let make = move |rng: &mut Rng| make(rng, spec);
        cases.add(case, make, probe!(copied, K, attention_formula::<K>));
    }
    cases.check(
        (op, K::NAME, "blocks that are not there"),
        copies_out_of_range::<B, K>,
    );
    cases.check(
        ("alloc_kv_layer", K::NAME, "pools of nothing"),
        pools_of_nothing::<B, K>,
    );
}

/// [`attention`] by the names of the INT8 cache.
fn int8_attention<B: BackendInt8KvOps>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let layout = Layout::new(data);
    let mut kv = layout.pool::<B, KvInt8>(io.device, data)?;
    let batch = layout.batch::<B, KvInt8>(io, &step(data), data.spec.slack)?;
    let [q, k, v] = &data.new;
    let (q, k, v) = (io.input("q", q)?, io.input("k", k)?, io.input("v", v)?);
    let mut out = io.output("out", data.q_size())?;
    B::int8_kv_append_paged(&mut io.ctx, &mut kv, &k, &v, &batch)?;
    B::int8_paged_attention(&mut io.ctx, &q, &kv, &batch, &mut out, &data.config)?;
    io.take("out", &out, data.q_size())
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
            probe!(int8_attention, attention_formula::<KvInt8>),
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
                if !data.old[0].is_empty() {
                    data.old[0].rotate_left(row);
                }
            }),
            ("values of another head", |data| {
                let dim = data.config.head_dim;
                if !data.new[2].is_empty() {
                    data.new[2].rotate_left(dim);
                }
            }),
            ("keys not written", |data| data.new[1].fill(0.0)),
            ("values not written", |data| data.new[2].fill(100.0)),
        ];
        for (what, misread) in misreadings {
            let noticed = |&(name, spec): &(&str, Spec)| {
                let data = make(&mut Rng::new(name, |x| x), spec);
                let mut changed = data.clone();
                misread(&mut changed);
                formula_differs(&data, &changed)
            };
            assert!(SPECS.iter().any(noticed), "nothing notices {what}");
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
