//! The paged cache: writes through block tables, and attention over a ragged batch.
//!
//! A pool is `[blocks, kv_heads, block_size, dim]`, and scales `[blocks, kv_heads, block_size]`: a block's stored bytes
//! lie together, as [`KvBlockBytes`] has them.
//!
//! Indices from the batch (block ids, lengths) are the engine's and live on the device, so they are not checked one by
//! one; a write to a block that is not there is left out.

use super::CudaBackend;
use super::attention_call::Call;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::heads::{Heads, Layout, in_row, norm_args, rope_args, split_qk};
use super::memory::Memory;
use super::role::CudaAct;
use super::{flash, flash_tiles};
use crate::backend::check::elements;
use crate::backend::*;
use ferrum_types::{BlockId, Result};
use std::ops::Range;

/// A cache element that the kernels can store.
pub trait CudaKvKind: KvDtypeKind {
    /// The kernels that write it, that read it, and that write it from a fused projection.
    const KERNELS: [&'static str; 3];
}

macro_rules! kv_kinds {
    ($($kind:ty => $name:literal;)*) => {$(
        impl CudaKvKind for $kind {
            const KERNELS: [&'static str; 3] = [
                concat!("append_", $name),
                concat!("attention_", $name),
                concat!("append_qkv_", $name),
            ];
        }
    )*};
}
kv_kinds! {
    KvF32 => "f32";
    KvFp16 => "f16";
    KvBf16 => "bf16";
    KvFp8 => "fp8";
    KvInt8 => "int8";
}

/// Widest heads of the kernels that take rows of a fused projection as they are.
const WIDEST: usize = 256;

/// Keys or values of one layer.
pub struct CudaKvBuffer {
    memory: Memory,
}

/// Scales of one layer, of keys and of values; nothing where the element has none.
#[derive(Default)]
pub struct CudaKvScales {
    of: Option<[Memory; 2]>,
}

impl CudaKvScales {
    fn args(&self) -> [Arg; 2] {
        let at = |i: usize| self.of.as_ref().map_or(0, |both| both[i].at);
        [Arg::At(at(0)), Arg::At(at(1))]
    }
}

/// Where a batch says that keys and values are.
fn batch_args<A: CudaAct>(batch: &DeviceBatch<CudaBackend<A>>, group: usize) -> [Arg; 5] {
    [
        (&batch.query_starts).into(),
        (&batch.kv_lens).into(),
        (&batch.block_tables[group]).into(),
        Arg::Int(batch.shape.seqs),
        Arg::Int(batch.shape.table_stride),
    ]
}

/// Writes the batch's tokens from heads in any layout; the caller has checked bounds.
fn append<A: CudaAct, K: CudaKvKind>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    kv: &mut KvLayer<CudaBackend<A>, K>,
    [(k, k_from), (v, v_from)]: [Heads; 2],
    batch: &DeviceBatch<CudaBackend<A>>,
) -> Result<()> {
    let shape = kv.shape;
    let vectors = elements(op, &[batch.shape.tokens, shape.kv_heads])?;
    let [k_scales, v_scales] = kv.scales.args();
    let ([k0, k1, k2], [v0, v1, v2]) = (k_from.args(), v_from.args());
    let [starts, lens, tables, seqs, stride] = batch_args(batch, kv.group);
    let args = [
        Arg::At(kv.k.memory.at),
        Arg::At(kv.v.memory.at),
        k_scales,
        v_scales,
        Arg::Int(batch.shape.tokens),
        k,
        v,
        Arg::Int(shape.head_dim),
        Arg::Int(shape.stored_value_dim()),
        k0,
        k1,
        k2,
        v0,
        v1,
        v2,
        starts,
        lens,
        tables,
        seqs,
        stride,
        Arg::Int(shape.block_size),
        Arg::Int(shape.kv_heads),
        Arg::Int(shape.blocks),
    ];
    // A warp for each vector.
    let grid = (vectors.div_ceil(4), 128, 0);
    ctx.launch(op, (KernelFile::Kv, K::KERNELS[0]), grid, args)
}

/// Queries of a fused projection, normed and rotated, to `q`, keys and values to the pool, all at once: for heads of up to
/// [`WIDEST`] with values of their own. The caller has checked bounds.
fn append_rows<A: CudaAct, K: CudaKvKind>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    input: &PagedQkv<'_, CudaBackend<A>>,
    q: &mut CudaBuffer<A>,
    kv: &mut KvLayer<CudaBackend<A>, K>,
    batch: &DeviceBatch<CudaBackend<A>>,
) -> Result<()> {
    let QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim,
    } = input.shape;
    let QkvTransform {
        q_norm,
        k_norm,
        rope,
    } = input.transform;
    let pool = kv.shape;
    let [k_scales, v_scales] = kv.scales.args();
    let [starts, lens, tables, seqs, stride] = batch_args(batch, kv.group);
    let [(q_weight, q_eps), (k_weight, k_eps)] = [q_norm, k_norm].map(norm_args);
    let [cos, sin, rows, rot_dim, interleaved, last_row] = rope_args(rope);
    let args = [
        q.into(),
        Arg::At(kv.k.memory.at),
        Arg::At(kv.v.memory.at),
        k_scales,
        v_scales,
        input.qkv.into(),
        Arg::Int(tokens),
        Arg::Int(heads),
        Arg::Int(head_dim),
        Arg::Int(value_dim),
        q_weight,
        k_weight,
        q_eps,
        k_eps,
        cos,
        sin,
        rows,
        rot_dim,
        interleaved,
        last_row,
        starts,
        lens,
        tables,
        seqs,
        stride,
        Arg::Int(pool.block_size),
        Arg::Int(pool.kv_heads),
        Arg::Int(pool.blocks),
    ];
    // A warp for each head.
    let vectors = elements(op, &[tokens, heads + 2 * kv_heads])?;
    let grid = (vectors.div_ceil(4), 128, 0);
    ctx.launch(op, (KernelFile::Kv, K::KERNELS[2]), grid, args)
}

impl<A: CudaAct> BackendPagedKv for CudaBackend<A> {}

/// The names of the INT8 cache come with the contract.
impl<A: CudaAct> BackendInt8KvOps for CudaBackend<A> {}

impl<A: CudaAct, K: CudaKvKind> BackendKvDtype<K> for CudaBackend<A> {
    type KvBuffer = CudaKvBuffer;
    type KvScales = CudaKvScales;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        const OP: &str = "alloc_kv_layer";
        let lens = check::kv_shape(OP, &shape)?;
        flash_tiles::prepare(self, K::DTYPE, &shape);
        let zeros = |dims: &[usize]| {
            let memory = Memory::new(&self.shared.driver, elements(OP, dims)?)?;
            self.shared.zero(memory.at, memory.bytes)?;
            Ok::<_, ferrum_types::Error>(memory)
        };
        let of = match K::SCALED {
            true => Some([zeros(&[lens.key_heads, 4])?, zeros(&[lens.value_heads, 4])?]),
            false => None,
        };
        Ok(KvLayer {
            k: CudaKvBuffer {
                memory: zeros(&[lens.keys, K::DTYPE.size()])?,
            },
            v: CudaKvBuffer {
                memory: zeros(&[lens.values, K::DTYPE.size()])?,
            },
            scales: CudaKvScales { of },
            shape,
            group: 0,
        })
    }

    fn kv_append(
        ctx: &mut CudaContext<A>,
        kv: &mut KvLayer<Self, K>,
        k: &CudaBuffer<A>,
        v: &CudaBuffer<A>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        check::kv_append((kv.group, &kv.shape), k, v, batch)?;
        let from = |head_dim| {
            let heads = HeadsShape {
                tokens: batch.shape.tokens,
                heads: kv.shape.kv_heads,
                head_dim,
            };
            Layout::of(HeadLayout::TokenMajor, heads)
        };
        let k = (k.into(), from(kv.shape.head_dim));
        let v = (v.into(), from(kv.shape.stored_value_dim()));
        append(ctx, "kv_append", kv, [k, v], batch)
    }

    fn kv_append_qkv(
        ctx: &mut CudaContext<A>,
        input: PagedQkv<'_, Self>,
        q: &mut CudaBuffer<A>,
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
        if shape.head_dim <= WIDEST && shape.value_dim > 0 {
            return append_rows(ctx, OP, &input, q, kv, batch);
        }
        let token_major = |heads| Layout::of(HeadLayout::TokenMajor, heads);
        let q = (q.into(), token_major(shape.q()));
        let k = (
            Arg::At(ctx.scratch(lens.k.saturating_mul(size_of::<A>()))?),
            token_major(shape.k()),
        );
        split_qk(ctx, OP, qkv, [q, k], transform, shape)?;
        // Values go straight from the projection.
        let [_, _, v_from] = in_row(shape);
        append(ctx, OP, kv, [k, (qkv.into(), v_from)], batch)
    }

    fn kv_attention(
        ctx: &mut CudaContext<A>,
        q: &CudaBuffer<A>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&CudaBuffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut CudaBuffer<A>,
        config: &AttnConfig,
    ) -> Result<()> {
        const OP: &str = "kv_attention";
        check::kv_attention((kv.group, &kv.shape), q, sinks, batch, out, config)?;
        let call = Call::of(HeadLayout::TokenMajor, batch.shape.tokens, config);
        let [k_scales, v_scales] = kv.scales.args();
        let (values, scales, width) = match kv.shape.values_in_keys {
            true => (kv.k.memory.at, k_scales, config.head_dim),
            false => (kv.v.memory.at, v_scales, config.value_dim),
        };
        let tiles = flash::Cache {
            dtype: K::DTYPE,
            latent: kv.shape.values_in_keys,
            k: Arg::At(kv.k.memory.at),
            v: Arg::At(values),
            scales: [k_scales, scales],
            place: flash::Place::Paged {
                batch: batch_args(batch, kv.group),
                seqs: batch.shape.seqs,
                max_queries: batch.shape.max_query_len,
                block_size: kv.shape.block_size,
            },
            max_keys: batch.shape.max_kv_len,
        };
        let buffers = [out.into(), q.into(), sinks.into()];
        if flash::attention(ctx, OP, &call, buffers, &tiles)? {
            return Ok(());
        }
        let mut args = [Arg::At(0); 28];
        args[..16].copy_from_slice(&call.args(buffers));
        args[16..20].copy_from_slice(&[Arg::At(kv.k.memory.at), Arg::At(values), k_scales, scales]);
        args[20..25].copy_from_slice(&batch_args(batch, kv.group));
        args[25..].copy_from_slice(&[kv.shape.block_size, kv.shape.kv_heads, width].map(Arg::Int));
        ctx.launch(
            OP,
            (KernelFile::Attention, K::KERNELS[1]),
            call.grid(OP)?,
            args,
        )
    }

    fn kv_copy_blocks(
        ctx: &mut CudaContext<A>,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        const OP: &str = "kv_copy_blocks";
        check::kv_copy_blocks(kv.shape.blocks, pairs)?;
        for (from, to) in pairs.iter().filter(|(from, to)| from != to) {
            for (at, bytes) in pools(kv) {
                let offset = |block: BlockId| at + u64::from(block.0) * bytes as u64;
                ctx.stream().copy(OP, offset(*to), offset(*from), bytes)?;
            }
        }
        Ok(())
    }

    fn kv_read_blocks(
        ctx: &mut CudaContext<A>,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        const OP: &str = "kv_read_blocks";
        let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
        let parts = kv.shape.check_block_bytes::<K>(OP, lengths)?;
        for (block, bytes) in blocks {
            for ((at, size), part) in pools(kv).into_iter().zip(ranges(&parts)) {
                let from = at + u64::from(block.0) * size as u64;
                ctx.download(OP, from, &mut bytes[part])?;
            }
        }
        Ok(())
    }

    fn kv_write_blocks(
        ctx: &mut CudaContext<A>,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        const OP: &str = "kv_write_blocks";
        let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
        let parts = kv.shape.check_block_bytes::<K>(OP, lengths)?;
        for (block, bytes) in blocks {
            for ((at, size), part) in pools(kv).into_iter().zip(ranges(&parts)) {
                let to = at + u64::from(block.0) * size as u64;
                ctx.upload(OP, to, &bytes[part])?;
            }
        }
        Ok(())
    }
}

/// Keys, values and their scales: where they begin, and the bytes of a block.
fn pools<A: CudaAct, K: CudaKvKind>(kv: &KvLayer<CudaBackend<A>, K>) -> [(u64, usize); 4] {
    let of = |memory: Option<&Memory>| {
        memory.map_or((0, 0), |memory| (memory.at, memory.bytes / kv.shape.blocks))
    };
    let scales = |i: usize| of(kv.scales.of.as_ref().map(|both| &both[i]));
    [
        of(Some(&kv.k.memory)),
        of(Some(&kv.v.memory)),
        scales(0),
        scales(1),
    ]
}

/// What [`pools`] are of the bytes of a block.
fn ranges(parts: &KvBlockBytes) -> [Range<usize>; 4] {
    [
        parts.keys.clone(),
        parts.values.clone(),
        parts.key_scales.clone(),
        parts.value_scales.clone(),
    ]
}
