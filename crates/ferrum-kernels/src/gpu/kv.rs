//! The paged cache: writes through block tables, and attention over a ragged batch.
//!
//! A pool is `[blocks, kv_heads, block_size, head_dim]` with heads padded to an even number of
//! elements, so that a pair of elements is one load: two f32, or one word of two 16-bit floats. The
//! 16-bit kinds need no such types of the device: shaders round to nearest even with integers, and
//! give the same bits as the host would.
//!
//! Indices from the batch (block ids, lengths) are the engine's and live on the device, so they are
//! not checked one by one; whatever they are, accesses stay inside the pool's buffers.

use super::GpuBackend;
use super::attention::{CALL_PARAMS, Call};
use super::buffer::{GpuBuffer, RawBuffer};
use super::context::{Bind, GpuContext, LANES, P};
use super::heads::{Layout, check_dim, split_qk, v_in_row};
use super::pipeline::Kernel;
use crate::backend::check::elements;
use crate::backend::*;
use ferrum_types::{BlockId, Error, Result};
use std::borrow::Cow;
use std::ops::Range;

/// A cache element that the shaders can store: which of the kernels is for it.
pub trait GpuKvKind: KvDtypeKind {
    /// Index in this file's tables of kernels.
    const INDEX: usize;
    /// Bytes of a pair of elements.
    const PAIR_BYTES: usize;
}

impl GpuKvKind for KvF32 {
    const INDEX: usize = 0;
    const PAIR_BYTES: usize = 8;
}

impl GpuKvKind for KvFp16 {
    const INDEX: usize = 1;
    const PAIR_BYTES: usize = 4;
}

impl GpuKvKind for KvBf16 {
    const INDEX: usize = 2;
    const PAIR_BYTES: usize = 4;
}

/// The three forms of a kernel, in the order of [`GpuKvKind::INDEX`].
macro_rules! for_each_kind {
    ($name:literal, $access:literal, [$($before:literal),*], [$($after:literal),*]) => {
        [
            for_each_kind!(@ $name, "_f32", "shaders/kv_f32.wgsl", $access, [$($before),*], [$($after),*]),
            for_each_kind!(@ $name, "_f16", "shaders/kv_f16.wgsl", $access, [$($before),*], [$($after),*]),
            for_each_kind!(@ $name, "_bf16", "shaders/kv_bf16.wgsl", $access, [$($before),*], [$($after),*]),
        ]
    };
    (@ $name:literal, $suffix:literal, $kind:literal, $access:literal, [$($before:literal),*], [$($after:literal),*]) => {
        Kernel {
            name: concat!($name, $suffix),
            wgsl: &[
                include_str!("shaders/grid.wgsl"),
                $(include_str!($before),)*
                include_str!($kind),
                $(include_str!($after),)*
            ],
            access: $access,
            constants: &["BATCH"],
        }
    };
}

pub(super) static APPEND: [Kernel; 3] = for_each_kind!(
    "kv_append",
    "rrwwrrr",
    ["shaders/ragged.wgsl", "shaders/paged.wgsl"],
    ["shaders/kv_append.wgsl"]
);
pub(super) static ATTENTION: [Kernel; 3] = for_each_kind!(
    "attention_paged",
    "rrrrwrrr",
    [
        "shaders/ragged.wgsl",
        "shaders/paged.wgsl",
        "shaders/activation.wgsl",
        "shaders/attention.wgsl"
    ],
    ["shaders/attention_paged.wgsl"]
);
pub(super) static COPY_BLOCK: Kernel = Kernel {
    name: "kv_copy_block",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/kv_copy_block.wgsl"),
    ],
    access: "w",
    constants: &[],
};

/// The first binding of the batch's buffers in [`APPEND`].
pub(super) const APPEND_BATCH: u32 = 4;
/// The first binding of the batch's buffers in [`ATTENTION`].
pub(super) const ATTENTION_BATCH: u32 = 5;

/// Keys or values of one layer.
pub struct GpuKvBuffer {
    raw: RawBuffer,
}

fn pairs(head_dim: usize) -> usize {
    head_dim.div_ceil(2)
}

/// The parameters that tell a shader where a token's keys and values are; a value takes `value_pairs` of its pool.
fn paged_params(batch: BatchShape, pool: PagedKvShape, value_pairs: usize) -> [P; PAGED_PARAMS] {
    [
        P::U(batch.seqs),
        P::U(batch.table_stride),
        P::U(pool.block_size),
        P::U(pool.kv_heads),
        P::U(pairs(pool.head_dim)),
        P::U(value_pairs),
        P::U(pool.blocks),
    ]
}

const PAGED_PARAMS: usize = 7;

/// Heads that are appended to a pool: buffer and layout.
type Source<'a> = (&'a GpuBuffer<f32>, Layout);

/// Writes the batch's tokens from token-major heads in any layout; the caller has checked bounds.
fn append<K: GpuKvKind>(
    ctx: &mut GpuContext,
    op: &'static str,
    kv: &mut KvLayer<GpuBackend, K>,
    (k, k_from): Source<'_>,
    (v, v_from): Source<'_>,
    batch: &DeviceBatch<GpuBackend>,
) -> Result<()> {
    let PagedKvShape {
        kv_heads, head_dim, ..
    } = kv.shape;
    let value_dim = kv.shape.stored_value_dim();
    let widest = pairs(head_dim.max(value_dim));
    let total = elements(op, &[batch.shape.tokens, kv_heads, widest])?;
    let [k_offset, k_token, k_head] = k_from.params();
    let [v_offset, v_token, v_head] = v_from.params();
    let (pool_k, pool_v) = (&kv.k.raw, &kv.v.raw);
    // A struct in a struct begins at a multiple of 16 bytes.
    let mut params = [P::U(0); 12 + PAGED_PARAMS];
    params[..10].copy_from_slice(&[
        P::U(total),
        P::U(widest),
        P::U(head_dim),
        P::U(value_dim),
        k_offset,
        k_token,
        k_head,
        v_offset,
        v_token,
        v_head,
    ]);
    params[12..].copy_from_slice(&paged_params(batch.shape, kv.shape, pairs(value_dim)));
    let binds = [
        k.into(),
        v.into(),
        pool_k.into(),
        pool_v.into(),
        Bind::from(&batch.query_starts),
        Bind::from(&batch.kv_lens),
        Bind::from(&batch.block_tables[kv.group]),
    ];
    ctx.run(
        op,
        (&APPEND[K::INDEX], &[APPEND_BATCH]),
        binds,
        &params,
        total.div_ceil(LANES),
    )
}

impl BackendPagedKv for GpuBackend {}

impl<K: GpuKvKind> BackendKvDtype<K> for GpuBackend {
    type KvBuffer = GpuKvBuffer;
    type KvScales = ();

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        const OP: &str = "alloc_kv_layer";
        let lens = check::kv_shape(OP, &shape)?;
        let buffer = |vectors, dim| {
            let bytes = elements(OP, &[vectors, pairs(dim), K::PAIR_BYTES])? as u64;
            let raw = RawBuffer::new(&self.shared, bytes)?;
            Ok::<_, Error>(GpuKvBuffer { raw })
        };
        Ok(KvLayer {
            k: buffer(lens.key_heads, shape.head_dim)?,
            v: buffer(lens.value_heads, shape.value_dim)?,
            scales: (),
            shape,
            group: 0,
        })
    }

    fn kv_append(
        ctx: &mut GpuContext,
        kv: &mut KvLayer<Self, K>,
        k: &GpuBuffer<f32>,
        v: &GpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        const OP: &str = "kv_append";
        check::kv_append((kv.group, &kv.shape), k, v, batch)?;
        let from = |head_dim| {
            let heads = HeadsShape {
                tokens: batch.shape.tokens,
                heads: kv.shape.kv_heads,
                head_dim,
            };
            Layout::of(HeadLayout::TokenMajor, heads)
        };
        let (k_from, v_from) = (from(kv.shape.head_dim), from(kv.shape.stored_value_dim()));
        append(ctx, OP, kv, (k, k_from), (v, v_from), batch)
    }

    fn kv_append_qkv(
        ctx: &mut GpuContext,
        input: PagedQkv<'_, Self>,
        q: &mut GpuBuffer<f32>,
        kv: &mut KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        const OP: &str = "kv_append_qkv";
        let lens = check::kv_append_qkv((kv.group, &kv.shape), &input, q, batch)?;
        let PagedQkv {
            qkv,
            transform,
            shape,
        } = input;
        let q_to = Layout::of(HeadLayout::TokenMajor, shape.q());
        let k_to = Layout::of(HeadLayout::TokenMajor, shape.k());
        // Keys rest in scratch memory between rotation and the pool: both at once would bind more
        // buffers than WebGPU promises. Values go straight from the projection.
        let mut k = ctx.take_scratch(lens.k)?;
        let done = split_qk(ctx, OP, qkv, (q, q_to), (&mut k, k_to), transform, shape)
            .and_then(|()| append(ctx, OP, kv, (&k, k_to), (qkv, v_in_row(shape)), batch));
        ctx.put_scratch(k);
        done
    }

    fn kv_attention(
        ctx: &mut GpuContext,
        q: &GpuBuffer<f32>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&GpuBuffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut GpuBuffer<f32>,
        config: &AttnConfig,
    ) -> Result<()> {
        const OP: &str = "kv_attention";
        check::kv_attention((kv.group, &kv.shape), q, sinks, batch, out, config)?;
        let AttnConfig {
            heads,
            head_dim,
            value_dim,
            ..
        } = *config;
        check_dim(OP, head_dim.max(value_dim))?;
        let tokens = batch.shape.tokens;
        let layout = |head_dim| {
            let queries = HeadsShape {
                tokens,
                heads,
                head_dim,
            };
            Layout::of(HeadLayout::TokenMajor, queries)
        };
        let call = Call {
            tokens,
            key_dim: head_dim,
            value_dim,
            q: layout(head_dim),
            out: layout(value_dim),
            config: *config,
            has_sinks: sinks.is_some(),
        };
        let (values, value_width) = match kv.shape.values_in_keys {
            true => (&kv.k.raw, head_dim),
            false => (&kv.v.raw, value_dim),
        };
        let paged = paged_params(batch.shape, kv.shape, pairs(value_width));
        let mut params = [P::U(0); CALL_PARAMS + PAGED_PARAMS];
        params[..CALL_PARAMS].copy_from_slice(&call.params());
        params[CALL_PARAMS..].copy_from_slice(&paged);
        let binds = [
            q.into(),
            Bind::from(&kv.k.raw),
            Bind::from(values),
            sinks.into(),
            out.into(),
            Bind::from(&batch.query_starts),
            Bind::from(&batch.kv_lens),
            Bind::from(&batch.block_tables[kv.group]),
        ];
        let groups = elements(OP, &[tokens, heads])?;
        ctx.run(
            OP,
            (&ATTENTION[K::INDEX], &[ATTENTION_BATCH]),
            binds,
            &params,
            groups,
        )
    }

    fn kv_copy_blocks(
        ctx: &mut GpuContext,
        kv: &mut KvLayer<Self, K>,
        pairs_of_blocks: &[(BlockId, BlockId)],
    ) -> Result<()> {
        const OP: &str = "kv_copy_blocks";
        check::kv_copy_blocks(kv.shape.blocks, pairs_of_blocks)?;
        let heads = |dim| Padded::of::<K>(&kv.shape, dim);
        let pools = [
            (&kv.k.raw, heads(kv.shape.head_dim)),
            (&kv.v.raw, heads(kv.shape.stored_value_dim())),
        ];
        // One dispatch for each pair, because a later pair may read what an earlier one wrote.
        for (from, to) in pairs_of_blocks.iter().filter(|(from, to)| from != to) {
            for (raw, heads) in pools {
                let words = heads.block_stored() / 4;
                ctx.run(
                    OP,
                    (&COPY_BLOCK, &[]),
                    [raw.into()],
                    &[
                        P::U(words),
                        P::U(from.0 as usize * words),
                        P::U(to.0 as usize * words),
                    ],
                    words.div_ceil(LANES),
                )?;
            }
        }
        Ok(())
    }

    fn kv_read_blocks(
        ctx: &mut GpuContext,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        const OP: &str = "kv_read_blocks";
        let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
        let parts = kv.shape.check_block_bytes::<K>(OP, lengths)?;
        for (raw, part, heads) in halves(kv, &parts) {
            let regions = blocks.iter();
            let regions = regions.map(|(block, _)| (raw, heads.block_offset(*block)));
            let regions: Vec<_> = regions.collect();
            let size = heads.block_stored() as u64;
            ctx.download_regions(&regions, size, |region, at, piece| {
                heads.strip(at, piece, &mut blocks[region].1[part.clone()]);
            })?;
        }
        Ok(())
    }

    fn kv_write_blocks(
        ctx: &mut GpuContext,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        const OP: &str = "kv_write_blocks";
        let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
        let parts = kv.shape.check_block_bytes::<K>(OP, lengths)?;
        for (block, bytes) in blocks {
            for (raw, part, heads) in halves(kv, &parts) {
                let offset = heads.block_offset(*block);
                ctx.upload(&heads.pad(&bytes[part]), (raw, offset))?;
            }
        }
        Ok(())
    }
}

/// The pools of keys and of values, what they are of the bytes of a block, and how they lie in it.
fn halves<'a, K: GpuKvKind>(
    kv: &'a KvLayer<GpuBackend, K>,
    parts: &KvBlockBytes,
) -> [(&'a RawBuffer, Range<usize>, Padded); 2] {
    let heads = |dim| Padded::of::<K>(&kv.shape, dim);
    [
        (&kv.k.raw, parts.keys.clone(), heads(kv.shape.head_dim)),
        (
            &kv.v.raw,
            parts.values.clone(),
            heads(kv.shape.stored_value_dim()),
        ),
    ]
}

/// The vectors of a block in this pool, which are padded to pairs, and without their padding.
#[derive(Clone, Copy)]
struct Padded {
    /// Vectors of a block.
    vectors: usize,
    /// Bytes of a vector in the pool.
    stored: usize,
    /// Bytes of it that are elements.
    plain: usize,
}

impl Padded {
    /// Of vectors of `dim` elements.
    fn of<K: GpuKvKind>(shape: &PagedKvShape, dim: usize) -> Self {
        Self {
            vectors: shape.block_size * shape.kv_heads,
            stored: pairs(dim) * K::PAIR_BYTES,
            plain: dim * K::PAIR_BYTES / 2,
        }
    }

    fn block_stored(self) -> usize {
        self.vectors * self.stored
    }

    fn block_offset(self, block: BlockId) -> u64 {
        block.0 as u64 * self.block_stored() as u64
    }

    /// Puts `piece`, the stored bytes from `at` on, where its elements belong.
    fn strip(self, at: usize, piece: &[u8], to: &mut [u8]) {
        if self.stored == self.plain {
            return to[at..][..piece.len()].copy_from_slice(piece);
        }
        for (i, &byte) in (at..).zip(piece) {
            let (vector, inside) = (i / self.stored, i % self.stored);
            if inside < self.plain {
                to[vector * self.plain + inside] = byte;
            }
        }
    }

    /// Elements with the padding that the pool has.
    fn pad(self, plain: &[u8]) -> Cow<'_, [u8]> {
        if self.stored == self.plain {
            return Cow::Borrowed(plain);
        }
        let mut out = vec![0; self.block_stored()];
        let vectors = plain.chunks_exact(self.plain);
        for (to, from) in out.chunks_exact_mut(self.stored).zip(vectors) {
            to[..from.len()].copy_from_slice(from);
        }
        Cow::Owned(out)
    }
}
