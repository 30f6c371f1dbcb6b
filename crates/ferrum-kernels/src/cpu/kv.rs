//! The paged cache: writes through block tables and attention over a ragged batch.
//!
//! In a block, each kv head has its keys transposed in chunks of 16 tokens (`[head_dim][16]`, the last
//! chunk narrower when the block size asks for it), so that a vector holds one element of 16 keys and
//! scores need no sum across lanes. Values lie token by token, `[block_size][value_dim]`. Where values are the first
//! elements of keys, they are transposed back tile by tile.

mod blocks;
mod element;

pub use element::CpuKvElement;

use super::attention::{Attention, KEYS, KeyTile, KeyValues, Queries, Values};
use super::buffer::{CpuBuffer, SharedMut};
use super::exec::Scratch;
use super::gemm::lane::Single;
use super::gemm::tile::{Columns, Halves, PANEL};
use super::heads::{HeadSink, HeadSource, HeadTransform, Move, Projection, Strided, move_qkv};
use super::math::for_vectors;
use super::simd::{LANES, LINE, Simd};
use super::{CpuBackend, CpuContext, math};
use crate::backend::*;
use element::load;
use ferrum_types::{BlockId, Result};
use std::ops::Range;

/// Scales of one layer, each `[blocks, kv_heads, block_size]`; empty where the element has none.
#[derive(Clone, Debug, Default)]
pub struct CpuKvScales {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// First of a kv head's vectors in a block, and of their scales.
#[inline(always)]
fn head_start(shape: &PagedKvShape, block: usize, kv_head: usize) -> usize {
    (block * shape.kv_heads + kv_head) * shape.block_size
}

/// First element of the chunk of keys that `slot` is in, its width, and the slot's column.
#[inline(always)]
fn chunk(shape: &PagedKvShape, slot: usize) -> (usize, usize, usize) {
    let first = slot / LANES * LANES;
    let width = LANES.min(shape.block_size - first);
    (first * shape.head_dim, width, slot - first)
}

/// Reads a batch into `scratch.queries`, one entry for each sequence, and checks that it is
/// consistent; with the block tables of a cache group. The op's own check has seen the lengths.
fn read_batch<'a>(
    op: &'static str,
    scratch: &mut Scratch,
    batch: &'a DeviceBatch<CpuBackend>,
    group: usize,
) -> Result<check::Batch<'a>> {
    let buffers = [
        &batch.query_starts,
        &batch.kv_lens,
        &batch.block_tables[group],
    ];
    let on_host = check::Batch::new(op, batch.shape, buffers.map(CpuBuffer::as_slice))?;
    scratch.queries.clear();
    for s in 0..batch.shape.seqs {
        let sequence = on_host.sequence(op, s)?;
        scratch.queries.push(Queries {
            first_token: sequence.tokens.start,
            len: sequence.tokens.len(),
            first_index: sequence.first_index,
            kv_len: sequence.kv_len,
        });
    }
    Ok(on_host)
}

/// Checks that a pool is what its shape says.
fn check_pool<K: CpuKvElement>(op: &'static str, kv: &KvLayer<CpuBackend, K>) -> Result<()> {
    let scales = [kv.scales.k.len(), kv.scales.v.len()];
    check::kv_pool::<K>(op, &kv.shape, [kv.k.len(), kv.v.len()], scales)
}

/// A pool that heads are written to.
struct Pool<'a, K: CpuKvElement> {
    data: SharedMut<'a, K::Stored>,
    scales: SharedMut<'a, f32>,
    /// `[block, slot]` of each token.
    slots: &'a [[usize; 3]],
    shape: PagedKvShape,
    /// Elements of a head.
    dim: usize,
    /// Keys are transposed.
    keys: bool,
}

impl<K: CpuKvElement> HeadSink for Pool<'_, K> {
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, token: usize, head: usize, values: &[f32]) {
        let [block, slot, _] = self.slots[token];
        let shape = &self.shape;
        let start = head_start(shape, block, head);
        let scale = K::scale(values);
        if K::SCALED {
            let at = start + slot;
            // SAFETY: as the elements, a kv head's scales are written by one thread only (contract).
            unsafe { self.scales.part(at, 1) }.fill(scale);
        }
        // Keys lie side by side with those of other tokens, values by themselves.
        let (at, column, width) = if self.keys {
            let (first, width, column) = chunk(shape, slot);
            (start * self.dim + first, column, width)
        } else {
            ((start + slot) * self.dim, 0, 1)
        };
        // SAFETY: elements of one kv head are written by one thread only (contract).
        let out = unsafe { self.data.part(at, width * values.len()) };
        for_vectors(
            values.len(),
            #[inline(always)]
            |first, count| {
                let stored = element::encode::<S, K>(s, &values[first..][..count], scale);
                for (i, stored) in stored[..count].iter().enumerate() {
                    out[(first + i) * width + column] = *stored;
                }
            },
        );
    }
}

/// Finds the slots of all tokens of a batch, so that an error leaves the pool as it was.
fn find_slots(
    op: &'static str,
    scratch: &mut Scratch,
    (group, shape): (usize, &PagedKvShape),
    batch: &DeviceBatch<CpuBackend>,
) -> Result<()> {
    let on_host = read_batch(op, scratch, batch, group)?;
    scratch.items.clear();
    for (s, queries) in scratch.queries.iter().enumerate() {
        for i in 0..queries.len {
            let at = queries.first_index + i;
            let (block, slot) = check::slot(op, on_host.table(s), shape, at)?;
            scratch.items.push([block, slot, 0]);
        }
    }
    Ok(())
}

/// The pools of a layer as sinks for keys and values.
fn sinks<'a, K: CpuKvElement>(
    kv: &'a mut KvLayer<CpuBackend, K>,
    slots: &'a [[usize; 3]],
) -> [Pool<'a, K>; 2] {
    let shape = kv.shape;
    let scales = &mut kv.scales;
    let pools = [
        (&mut kv.k, &mut scales.k, shape.head_dim, true),
        (&mut kv.v, &mut scales.v, shape.value_dim, false),
    ];
    pools.map(|(pool, scales, dim, keys)| Pool {
        data: SharedMut::new(pool.as_mut_slice()),
        scales: SharedMut::new(scales),
        slots,
        shape,
        dim,
        keys,
    })
}

/// A pool that attention reads.
struct PagedSource<'a, K: CpuKvElement> {
    k: &'a [K::Stored],
    v: &'a [K::Stored],
    scales: &'a CpuKvScales,
    shape: PagedKvShape,
    batch: check::Batch<'a>,
}

impl<K: CpuKvElement> PagedSource<'_, K> {
    /// Block and slot of a key whose block has been checked.
    #[inline(always)]
    fn slot(&self, sequence: usize, at: usize) -> (usize, usize) {
        let size = self.shape.block_size;
        (self.batch.table(sequence)[at / size] as usize, at % size)
    }

    /// The chunk of key `j` of a sequence and kv head.
    #[inline(always)]
    fn key_chunk(&self, at: (usize, usize), j: usize) -> KeyChunk<'_, K> {
        let (block, slot) = self.slot(at.0, j);
        let (first, width, column) = chunk(&self.shape, slot);
        let (vector, dim) = (head_start(&self.shape, block, at.1), self.shape.head_dim);
        KeyChunk {
            rows: &self.k[vector * dim + first..][..dim * width],
            scales: match K::SCALED {
                true => &self.scales.k[vector + slot - column..][..width],
                false => &[],
            },
            width,
            column,
        }
    }

    /// The first elements of keys as values: row `j % KEYS` of `out` is value `j`.
    #[inline(always)]
    fn values_of_keys<S: Simd>(
        &self,
        s: S,
        at: (usize, usize),
        keys: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        let dim = self.shape.value_dim;
        let mut j = keys.start;
        while j < keys.end {
            let chunk = self.key_chunk(at, j);
            let count = (chunk.width - chunk.column).min(keys.end - j);
            let out = &mut out[j % KEYS * stride..];
            for (d, row) in chunk.rows.chunks_exact(chunk.width).take(dim).enumerate() {
                let mut keys = [0.0; LANES];
                if chunk.width == LANES {
                    // SAFETY: a row of a whole chunk has 16 elements.
                    let mut lanes = unsafe { load::<S, K>(s, row.as_ptr()) };
                    if K::SCALED {
                        lanes = s.mul(lanes, math::load_at(s, chunk.scales, 0));
                    }
                    keys = s.to_array(lanes);
                } else {
                    for (i, (key, stored)) in keys.iter_mut().zip(row).enumerate() {
                        let scale = if K::SCALED { chunk.scales[i] } else { 1.0 };
                        *key = K::decode(*stored) * scale;
                    }
                }
                for (i, key) in keys[chunk.column..][..count].iter().enumerate() {
                    out[i * stride + d] = *key;
                }
            }
            j += count;
        }
    }
}

/// Keys that lie side by side, 16 of them or fewer at the end of a block.
struct KeyChunk<'a, K: CpuKvElement> {
    /// `[head_dim][width]`.
    rows: &'a [K::Stored],
    /// `[width]`; none where the element has none.
    scales: &'a [f32],
    width: usize,
    /// Where the key that was asked for lies.
    column: usize,
}

/// A tile of a pool, in chunks of 16 tokens.
#[derive(Clone, Copy)]
struct PoolTile<K: CpuKvElement> {
    keys: Chunks<K>,
    values: Chunks<K>,
    value_dim: usize,
}

const TILE_CHUNKS: usize = KEYS / LANES;

/// Where the chunks of a tile's keys or values begin, and those that are read after them: what is read of
/// a chunk is asked for in its successor, since blocks lie anywhere and the hardware guesses no further
/// than a page. Values follow keys, and the next tile's keys follow values: no more than two such sets
/// of chunks want to stay in the first-level cache.
#[derive(Clone, Copy)]
struct Chunks<K: CpuKvElement> {
    now: [*const K::Stored; TILE_CHUNKS],
    /// Only ever asked for: these may be anywhere.
    next: [*const K::Stored; TILE_CHUNKS],
}

impl<K: CpuKvElement> Chunks<K> {
    /// The vector at `at` of a chunk, which is `v` vectors after one that was taken, or is the first.
    ///
    /// # Safety
    /// The chunk has it.
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, chunk: usize, at: usize, v: usize) -> S::V {
        if (v * LANES * size_of::<K::Stored>()).is_multiple_of(LINE) {
            s.prefetch(self.next[chunk].wrapping_add(at).cast());
        }
        // SAFETY: the caller's contract. Chunks of values are counted from before they begin.
        unsafe { load::<S, K>(s, self.now[chunk].wrapping_add(at)) }
    }
}

/// Keys as they are stored: row `k` is vector `k` of each chunk, from chunk `first` on.
#[derive(Clone, Copy)]
struct KeyColumns<K: CpuKvElement> {
    chunks: Chunks<K>,
    first: usize,
}

/// Values: row `k` is value `first + k` of the tile, from element `at` on. Chunks begin where value 0 of the
/// tile would lie if all its values did as those of the chunk do.
#[derive(Clone, Copy)]
struct ValueColumns<K: CpuKvElement> {
    chunks: Chunks<K>,
    first: usize,
    at: usize,
    value_dim: usize,
}

impl<K: CpuKvElement> KeyTile for PoolTile<K> {
    #[inline(always)]
    fn keys(&self) -> impl Halves<Lane = Single> {
        KeyColumns {
            chunks: self.keys,
            first: 0,
        }
    }

    #[inline(always)]
    fn values(&self, first: usize, at: usize) -> impl Halves<Lane = Single> {
        ValueColumns {
            chunks: self.values,
            first,
            at,
            value_dim: self.value_dim,
        }
    }
}

impl<K: CpuKvElement> Columns for KeyColumns<K> {
    type Lane = Single;

    #[inline(always)]
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV] {
        let mut out = [s.zero(); NV];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: a chunk has 16 keys of each element, and the caller says that there is element `k`.
            *out = unsafe { self.chunks.load(s, self.first + v, k * LANES, 0) };
        }
        out
    }
}

impl<K: CpuKvElement> Halves for KeyColumns<K> {
    #[inline(always)]
    fn right(self) -> Self {
        let first = self.first + 1;
        Self { first, ..self }
    }
}

impl<K: CpuKvElement> Columns for ValueColumns<K> {
    type Lane = Single;

    #[inline(always)]
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV] {
        let key = self.first + k;
        let at = key * self.value_dim + self.at;
        let mut out = [s.zero(); NV];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller says that the tile has value `k` and, from here, so many vectors of it.
            *out = unsafe { self.chunks.load(s, key / LANES, at + v * LANES, v) };
        }
        out
    }
}

impl<K: CpuKvElement> Halves for ValueColumns<K> {
    #[inline(always)]
    fn right(self) -> Self {
        let at = self.at + LANES;
        Self { at, ..self }
    }
}

impl<K: CpuKvElement> KeyValues for PagedSource<'_, K> {
    type Direct = PoolTile<K>;

    /// With whole chunks and panels, where elements are the values themselves.
    fn direct(&self, at: (usize, usize), first: usize) -> Option<PoolTile<K>> {
        let PagedKvShape {
            block_size,
            head_dim,
            value_dim,
            values_in_keys,
            ..
        } = self.shape;
        let direct = !K::SCALED && !values_in_keys;
        if !direct || !block_size.is_multiple_of(LANES) || !value_dim.is_multiple_of(PANEL) {
            return None;
        }
        let ids = self.batch.table(at.0);
        // The first vector of the chunk of `key`. A table may end, or go on with what nobody has checked.
        let start = |key: usize| {
            let block = usize::try_from(*ids.get(key / block_size)?).ok()?;
            let head = || head_start(&self.shape, block, at.1);
            (block < self.shape.blocks).then(|| head() + key % block_size)
        };
        let mut starts = [(0, 0); TILE_CHUNKS];
        for (i, chunk) in starts.iter_mut().enumerate() {
            let key = first + i * LANES;
            let now = start(key)?;
            *chunk = (now, start(key + KEYS).unwrap_or(now));
        }
        let at = |pool: &[K::Stored], start: usize, dim: usize| {
            pool[start * dim..][..LANES * dim].as_ptr()
        };
        let keys = starts.map(|(now, _)| at(self.k, now, head_dim));
        let next_keys = starts.map(|(_, next)| at(self.k, next, head_dim));
        let values = starts.map(|(now, _)| at(self.v, now, value_dim));
        let counted = |chunks: [*const K::Stored; TILE_CHUNKS]| {
            std::array::from_fn(|i| chunks[i].wrapping_sub(i * LANES * value_dim))
        };
        Some(PoolTile {
            keys: Chunks {
                now: keys,
                next: values,
            },
            values: Chunks {
                now: counted(values),
                next: counted(next_keys),
            },
            value_dim,
        })
    }

    #[inline(always)]
    fn keys<S: Simd>(&self, s: S, at: (usize, usize), keys: Range<usize>, out: &mut [f32]) {
        let dim = self.shape.head_dim;
        let out = &mut out[..dim * KEYS];
        let mut j = keys.start;
        while j < keys.end {
            let KeyChunk {
                rows,
                scales,
                width,
                column,
            } = self.key_chunk(at, j);
            let count = (width - column).min(keys.end - j);
            let to = j % KEYS;
            // Whole chunks go by vectors. Columns of a chunk that come before its first wanted key
            // are only there at the start, and those after its last one only at the end, so they
            // overwrite nothing that is wanted.
            if width == LANES && to >= column && to - column + LANES <= KEYS {
                let scales = math::load_at(s, scales, 0);
                for (d, out) in out.as_chunks_mut::<KEYS>().0.iter_mut().enumerate() {
                    let out = &mut out[to - column..][..LANES];
                    // SAFETY: both have 16 elements: there are `dim` rows, of 16 keys here.
                    unsafe {
                        let mut keys = load::<S, K>(s, rows.as_ptr().add(d * LANES));
                        if K::SCALED {
                            keys = s.mul(keys, scales);
                        }
                        s.store(out.as_mut_ptr(), keys);
                    }
                }
            } else {
                let columns = out.as_chunks_mut::<KEYS>().0.iter_mut();
                for (row, out) in rows.chunks_exact(width).zip(columns) {
                    for i in 0..count {
                        let scale = if K::SCALED { scales[column + i] } else { 1.0 };
                        out[to + i] = K::decode(row[column + i]) * scale;
                    }
                }
            }
            // A tile ends where the range does, so a chunk never reaches into the next tile.
            j += count;
        }
    }

    #[inline(always)]
    fn values<'a, S: Simd>(
        &'a self,
        s: S,
        at: (usize, usize),
        keys: Range<usize>,
        buffer: &'a mut [f32],
        stride: usize,
    ) -> Values<'a> {
        if self.shape.values_in_keys {
            self.values_of_keys(s, at, keys, buffer, stride);
            return Values {
                data: buffer,
                stride,
            };
        }
        let dim = self.shape.value_dim;
        for j in keys {
            let (block, slot) = self.slot(at.0, j);
            let vector = head_start(&self.shape, block, at.1) + slot;
            let value = &self.v[vector * dim..][..dim];
            let scale = if K::SCALED {
                self.scales.v[vector]
            } else {
                1.0
            };
            let out = &mut buffer[j % KEYS * stride..][..dim];
            let whole = dim / LANES * LANES;
            for at in (0..whole).step_by(LANES) {
                // SAFETY: both have 16 elements from here.
                unsafe {
                    let mut value = load::<S, K>(s, value.as_ptr().add(at));
                    if K::SCALED {
                        value = s.mul(value, s.splat(scale));
                    }
                    s.store(out.as_mut_ptr().add(at), value);
                }
            }
            for at in whole..dim {
                out[at] = K::decode(value[at]) * scale;
            }
        }
        Values {
            data: buffer,
            stride,
        }
    }
}

/// The names of paged attention come with the contract.
impl BackendPagedKv for CpuBackend {}
impl BackendInt8KvOps for CpuBackend {}

impl<K: CpuKvElement> BackendKvDtype<K> for CpuBackend {
    type KvBuffer = CpuBuffer<K::Stored>;
    type KvScales = CpuKvScales;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        let lens = check::kv_shape("alloc_kv_layer", &shape)?;
        let scales = |heads: usize| vec![0.0; if K::SCALED { heads } else { 0 }];
        Ok(KvLayer {
            k: CpuBuffer::zeroed(lens.keys)?,
            v: CpuBuffer::zeroed(lens.values)?,
            scales: CpuKvScales {
                k: scales(lens.key_heads),
                v: scales(lens.value_heads),
            },
            shape,
            group: 0,
        })
    }

    fn kv_append(
        ctx: &mut CpuContext,
        kv: &mut KvLayer<Self, K>,
        k: &CpuBuffer<f32>,
        v: &CpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append";
        check_pool(op, kv)?;
        let shape = QkvShape {
            tokens: batch.shape.tokens,
            heads: 0,
            kv_heads: kv.shape.kv_heads,
            head_dim: kv.shape.head_dim,
            value_dim: kv.shape.stored_value_dim(),
        };
        let [keys, values] = check::kv_append((kv.group, &kv.shape), k, v, batch)?;
        let (exec, scratch) = ctx.parts();
        let (k, v) = (&k.as_slice()[..keys], &v.as_slice()[..values]);
        find_slots(op, scratch, (kv.group, &kv.shape), batch)?;
        let slots = std::mem::take(&mut scratch.items);
        let [k_sink, v_sink] = sinks(kv, &slots);
        let from = |data, token, sink| Move {
            source: HeadSource {
                data,
                start: 0,
                token,
            },
            transform: HeadTransform::default(),
            sink,
        };
        let none: Option<Move<'_, Strided<'_>>> = None;
        let done = move_qkv(
            exec,
            scratch,
            none,
            [
                from(k, shape.k_dim(), k_sink),
                from(v, shape.v_dim(), v_sink),
            ],
            shape,
        );
        scratch.items = slots;
        done
    }

    fn kv_append_qkv(
        ctx: &mut CpuContext,
        input: PagedQkv<'_, Self>,
        q: &mut CpuBuffer<f32>,
        kv: &mut KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append_qkv";
        check_pool(op, kv)?;
        let shape = input.shape;
        let lens = check::kv_append_qkv((kv.group, &kv.shape), &input, q, batch)?;
        let (exec, scratch) = ctx.parts();
        let projection = Projection::new(op, input.qkv, input.transform, shape)?;
        let q = Strided::token_major(&mut q.as_mut_slice()[..lens.q], shape.q());
        find_slots(op, scratch, (kv.group, &kv.shape), batch)?;
        let slots = std::mem::take(&mut scratch.items);
        let done = projection.store(exec, scratch, q, sinks(kv, &slots), shape);
        scratch.items = slots;
        done
    }

    fn kv_attention(
        ctx: &mut CpuContext,
        q: &CpuBuffer<f32>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&CpuBuffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut CpuBuffer<f32>,
        config: &AttnConfig,
    ) -> Result<()> {
        let op = "kv_attention";
        check_pool(op, kv)?;
        let [q_len, out_len] =
            check::kv_attention((kv.group, &kv.shape), q, sinks, batch, out, config)?;
        let AttnConfig {
            heads,
            head_dim,
            value_dim,
            ..
        } = *config;
        let (exec, scratch) = ctx.parts();
        let on_host = read_batch(op, scratch, batch, kv.group)?;
        for (s, queries) in scratch.queries.iter().enumerate() {
            check_blocks(op, &kv.shape, on_host.table(s), queries, config)?;
        }
        let source = PagedSource::<K> {
            k: kv.k.as_slice(),
            v: kv.v.as_slice(),
            scales: &kv.scales,
            shape: kv.shape,
            batch: on_host,
        };
        let call = Attention {
            source: &source,
            config: *config,
            q: &q.as_slice()[..q_len],
            q_strides: (heads * head_dim, head_dim),
            out: SharedMut::new(&mut out.as_mut_slice()[..out_len]),
            out_strides: (heads * value_dim, value_dim),
            sinks: sinks.map(CpuBuffer::as_slice),
            key_dim: head_dim,
            value_dim,
        };
        let queries = std::mem::take(&mut scratch.queries);
        let done = call.run(exec, scratch, &queries);
        scratch.queries = queries;
        done
    }

    fn kv_copy_blocks(
        _: &mut CpuContext,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        let op = "kv_copy_blocks";
        check_pool(op, kv)?;
        let blocks = kv.shape.blocks;
        check::kv_copy_blocks(blocks, pairs)?;
        for pair in pairs {
            copy_block(kv.k.as_mut_slice(), blocks, pair);
            copy_block(kv.v.as_mut_slice(), blocks, pair);
            copy_block(&mut kv.scales.k, blocks, pair);
            copy_block(&mut kv.scales.v, blocks, pair);
        }
        Ok(())
    }

    fn kv_read_blocks(
        _: &mut CpuContext,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        check_pool("kv_read_blocks", kv)?;
        blocks::read(kv, blocks)
    }

    fn kv_write_blocks(
        _: &mut CpuContext,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        check_pool("kv_write_blocks", kv)?;
        blocks::write(kv, blocks)
    }
}

/// Copies a block of a pool of `blocks`, which lie one after the other.
fn copy_block<T: Copy>(pool: &mut [T], blocks: usize, (from, to): &(BlockId, BlockId)) {
    let len = pool.len() / blocks;
    let first = from.0 as usize * len;
    pool.copy_within(first..first + len, to.0 as usize * len);
}

/// Checks the blocks of all keys that some query sees; those behind a sliding window may be gone.
fn check_blocks(
    op: &'static str,
    shape: &PagedKvShape,
    table: &[i32],
    queries: &Queries,
    config: &AttnConfig,
) -> Result<()> {
    if queries.len == 0 {
        return Ok(());
    }
    let visible = |at| config.visible(at, queries.kv_len);
    let start = visible(queries.first_index).start;
    let end = visible(queries.first_index + queries.len - 1).end;
    let mut at = start;
    while at < end {
        check::slot(op, table, shape, at)?;
        at = (at / shape.block_size + 1) * shape.block_size;
    }
    Ok(())
}
