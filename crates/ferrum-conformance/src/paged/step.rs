//! A step over a paged cache on the host, and how its blocks and buffers come to a device.

use crate::core::{KINDS, Transform, transformed};
use crate::data::Rng;
use crate::io::{Check, Fault, Io};
use crate::naive;
use ferrum_kernels::{
    AttnConfig, BackendKvDtype, BatchShape, DeviceBatch, KvDtypeKind, KvLayer, PagedKvShape,
    QkvShape,
};

/// What a case is about; the rest is as in [`BASE`].
#[derive(Clone, Copy)]
pub(super) struct Spec {
    pub(super) heads: (usize, usize),
    pub(super) head_dim: usize,
    /// Elements of a value; 0: as many as of a key.
    pub(super) value_dim: usize,
    /// Values are the first elements of keys.
    pub(super) latent: bool,
    /// Tokens in a block; `WHOLE` makes the pool contiguous.
    pub(super) block_size: usize,
    /// For each sequence: keys from former steps, and tokens of this one.
    pub(super) seqs: &'static [(usize, usize)],
    pub(super) window: Option<usize>,
    pub(super) chunked: bool,
    pub(super) softcap: Option<f32>,
    pub(super) sinks: bool,
    pub(super) causal: bool,
    /// What the batch announces beyond its longest sequence.
    pub(super) slack: usize,
    /// Cache group of the pool.
    pub(super) group: usize,
    /// Size of q, k and v.
    pub(super) scale: f32,
}

/// One block of the whole context for each sequence.
pub(super) const WHOLE: usize = 0;

pub(super) const BASE: Spec = Spec {
    heads: (4, 2),
    head_dim: 20,
    value_dim: 0,
    latent: false,
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
    chunked: false,
    softcap: None,
    sinks: false,
    causal: true,
    slack: 0,
    group: 0,
    scale: 1.0,
};

pub(super) const FEW: Spec = Spec {
    seqs: &[(21, 3), (0, 7)],
    ..BASE
};

/// A step on the host.
#[derive(Clone)]
pub(super) struct Paged {
    pub(super) spec: Spec,
    pub(super) config: AttnConfig,
    pub(super) sinks: Option<Vec<f32>>,
    /// `[tokens, kv_heads, head_dim]` and `[tokens, kv_heads, value_dim]` of former steps.
    pub(super) cached_kv: [Vec<f32>; 2],
    /// `[tokens, q_dim + k_dim + v_dim]` of this step.
    pub(super) qkv: Vec<f32>,
    /// `[tokens, …]`: q, k and v of this step.
    pub(super) step_qkv: [Vec<f32>; 3],
    pub(super) transform: Transform,
}

pub(super) fn make(rng: &mut Rng, spec: Spec) -> Paged {
    let Spec {
        heads: (heads, kv_heads),
        head_dim,
        seqs,
        scale,
        ..
    } = spec;
    let tokens = seqs.iter().map(|seq| seq.1).sum::<usize>();
    let value_dim = match spec.value_dim {
        0 => head_dim,
        dim => dim,
    };
    let old_heads = seqs.iter().map(|seq| seq.0).sum::<usize>() * kv_heads;
    let shape = QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim,
    };
    let qkv = rng.acts(tokens * shape.row_dim(), scale);
    let transform = Transform::new(rng, KINDS[0], head_dim, tokens);
    let new = transformed(&qkv, &transform, shape).map(|part| naive::narrow(&part));
    let old = [head_dim, value_dim].map(|dim| rng.acts(old_heads * dim, scale));
    Paged {
        spec,
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
        sinks: spec.sinks.then(|| rng.floats(heads, 2.0)),
        cached_kv: old,
        qkv,
        step_qkv: new,
        transform,
    }
}

impl Paged {
    pub(super) fn tokens(&self) -> usize {
        self.spec.seqs.iter().map(|seq| seq.1).sum()
    }

    pub(super) fn q_size(&self) -> usize {
        self.tokens() * self.config.heads * self.config.head_dim
    }

    pub(super) fn out_size(&self) -> usize {
        self.tokens() * self.config.heads * self.config.value_dim
    }

    pub(super) fn qkv_shape(&self) -> QkvShape {
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            value_dim,
            ..
        } = self.config;
        QkvShape {
            tokens: self.tokens(),
            heads,
            kv_heads,
            head_dim,
            value_dim,
        }
    }

    pub(super) fn with_block_size(&self, block_size: usize) -> Self {
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
    pub(super) fn alone(&self, seq: usize) -> Self {
        let before = &self.spec.seqs[..seq];
        let starts = before
            .iter()
            .fold((0, 0), |sum, seq| (sum.0 + seq.0, sum.1 + seq.1));
        let (old, new) = self.spec.seqs[seq];
        let rows = |values: &[f32], start: usize, len: usize, row: usize| {
            values[start * row..][..len * row].to_vec()
        };
        let shape = self.qkv_shape();
        let kv_rows = [shape.k_dim(), shape.v_dim()];
        let [q, k, v] = &self.step_qkv;
        Paged {
            spec: Spec {
                seqs: &self.spec.seqs[seq..=seq],
                ..self.spec
            },
            cached_kv: [0, 1].map(|i| rows(&self.cached_kv[i], starts.0, old, kv_rows[i])),
            qkv: rows(&self.qkv, starts.1, new, shape.row_dim()),
            step_qkv: [
                rows(q, starts.1, new, shape.q_dim()),
                rows(k, starts.1, new, kv_rows[0]),
                rows(v, starts.1, new, kv_rows[1]),
            ],
            transform: self.transform.slice(starts.1..starts.1 + new),
            ..self.clone()
        }
    }
}

/// Which blocks the sequences have.
pub(super) struct Layout {
    pub(super) pool: PagedKvShape,
    /// For each sequence.
    pub(super) tables: Vec<Vec<i32>>,
    /// The cache group of the pool; those before it have tables without blocks.
    pub(super) group: usize,
    /// Blocks that no query sees because of it are not in the tables of a batch.
    pub(super) window: Option<usize>,
}

impl Layout {
    /// Blocks in random order, some of the pool unused.
    pub(super) fn new(data: &Paged) -> Self {
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
            kv_heads,
            head_dim,
            value_dim,
            ..
        } = data.config;
        Layout {
            tables: needed.map(&mut take).collect(),
            group: data.spec.group,
            window: data.config.sliding_window,
            pool: PagedKvShape {
                blocks,
                block_size,
                kv_heads,
                head_dim,
                value_dim,
                values_in_keys: data.spec.latent,
            },
        }
    }

    /// A batch of `(kv_len, query_len)` over these blocks.
    pub(super) fn batch<B: BackendKvDtype<K>, K: KvDtypeKind>(
        &self,
        io: &mut Io<'_, B>,
        seqs: &[(usize, usize)],
        slack: usize,
    ) -> Check<DeviceBatch<B>> {
        let stride = self.tables.iter().map(Vec::len).max().unwrap_or(0) + 2;
        let mut starts = vec![0];
        let mut tokens = 0;
        for &(_, len) in seqs {
            tokens += len;
            starts.push(tokens as i32);
        }
        let kv_lens: Vec<i32> = seqs.iter().map(|seq| seq.0 as i32).collect();
        let mut tables = vec![-1; seqs.len() * stride];
        let none = tables.clone();
        let rows = tables.chunks_mut(stride).zip(&self.tables);
        for ((row, table), &(kv_len, len)) in rows.zip(seqs) {
            let first_seen = self
                .window
                .map_or(0, |window| (kv_len - len + 1).saturating_sub(window));
            let released = (first_seen / self.pool.block_size).min(table.len());
            row[released..table.len()].copy_from_slice(&table[released..]);
        }
        let shape = BatchShape {
            tokens,
            seqs: seqs.len(),
            table_stride: stride,
            max_query_len: seqs.iter().map(|seq| seq.1).max().unwrap_or(0),
            max_kv_len: seqs.iter().map(|seq| seq.0).max().unwrap_or(0) + slack,
        };
        let mut block_tables = Vec::new();
        for _ in 0..self.group {
            block_tables.push(io.exact(&none)?);
        }
        block_tables.push(io.indices("block_tables", &tables)?);
        Ok(DeviceBatch {
            shape,
            // No op of the cache reads ids or rotary rows of a batch.
            tokens: io.exact(&vec![1; tokens])?,
            rope_rows: io.exact(&vec![0; tokens])?,
            query_starts: io.indices("query_starts", &starts)?,
            kv_lens: io.indices("kv_lens", &kv_lens)?,
            // Nor its state slots.
            state_slots: io.exact(&vec![0; seqs.len()])?,
            block_tables,
        })
    }

    /// A pool of arbitrary values, but for the keys and values of former steps.
    pub(super) fn pool<B: BackendKvDtype<K>, K: KvDtypeKind>(
        &self,
        device: &B,
        data: &Paged,
    ) -> Check<KvLayer<B, K>> {
        let mut kv: KvLayer<B, K> = device.alloc_kv_layer(self.pool)?;
        kv.group = self.group;
        let slots = self.pool.blocks * self.pool.block_size;
        let all = Layout {
            tables: vec![(0..self.pool.blocks as i32).collect()],
            pool: self.pool,
            group: self.group,
            window: None,
        };
        let mut rng = Rng::new("former owner", |x| x);
        let dims = [self.pool.head_dim, self.pool.value_dim];
        let stale = dims.map(|dim| rng.floats(slots * self.pool.kv_heads * dim, 100.0));
        all.append(device, &mut kv, &[(slots, slots)], &stale)?;
        let old: Vec<_> = data.spec.seqs.iter().map(|seq| (seq.0, seq.0)).collect();
        self.append(device, &mut kv, &old, &data.cached_kv)?;
        Ok(kv)
    }

    /// Writes keys and values outside of what the case is about.
    pub(super) fn append<B: BackendKvDtype<K>, K: KvDtypeKind>(
        &self,
        device: &B,
        kv: &mut KvLayer<B, K>,
        seqs: &[(usize, usize)],
        [k, v]: &[Vec<f32>; 2],
    ) -> Check {
        // Buffers of another run, so that a run with a short buffer does not count them.
        let mut io = Io::new(device, Fault::None)?;
        let batch = self.batch::<B, K>(&mut io, seqs, 0)?;
        let (k, v) = (io.input("k", k)?, io.input("v", v)?);
        B::kv_append(&mut io.ctx, kv, &k, &v, &batch)?;
        Ok(B::sync(&mut io.ctx)?)
    }
}

/// This step's `(kv_len, query_len)`.
pub(super) fn step(data: &Paged) -> Vec<(usize, usize)> {
    data.spec
        .seqs
        .iter()
        .map(|&(old, new)| (old + new, new))
        .collect()
}
