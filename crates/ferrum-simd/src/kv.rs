//! The paged cache: writes through block tables and attention over a ragged batch.
//!
//! In a block, each kv head has its keys transposed in chunks of 16 tokens (`[head_dim][16]`, the last
//! chunk narrower when the block size asks for it), so that a vector holds one element of 16 keys and
//! scores need no sum across lanes. Values lie token by token, `[block_size][value_dim]`. Where values are the first
//! elements of keys, they are transposed back tile by tile.

mod element;

pub use element::CpuKvElement;

use super::attention::{Attention, KEYS, KeyTile, KeyValues, Queries, Values};
use super::exec::{Exec, Scratch};
use super::gemm::lane::F32Lane;
use super::gemm::tile::{Columns, PANEL, SplitColumns};
use super::heads::{HeadCopy, HeadSink, HeadSource, HeadTransform, Projection, Strided, move_qkv};
use super::math::{self, for_vectors};
use super::memory::SharedMut;
use super::simd::{LANES, LINE, Simd};
use element::load;
use ferrum_types::check::{self, Batch};
use ferrum_types::{AttnConfig, Dtype, PagedKvShape, QkvShape, Result};
use std::ops::Range;

/// Scales of one layer, each `[blocks, kv_heads, block_size]`; empty where the element has none.
#[derive(Clone, Debug, Default)]
pub struct CpuKvScales {
    /// Of keys.
    pub k: Vec<f32>,
    /// Of values.
    pub v: Vec<f32>,
}

/// The pools of a layer, to read.
pub struct Pools<'a, K: CpuKvElement> {
    /// Keys, as the module says.
    pub k: &'a [K::Stored],
    /// Values.
    pub v: &'a [K::Stored],
    /// Scales of both.
    pub scales: &'a CpuKvScales,
    /// Sizes.
    pub shape: PagedKvShape,
}

/// The pools of a layer, to write.
pub struct PoolsMut<'a, K: CpuKvElement> {
    /// Keys, as the module says.
    pub k: &'a mut [K::Stored],
    /// Values.
    pub v: &'a mut [K::Stored],
    /// Scales of both.
    pub scales: &'a mut CpuKvScales,
    /// Sizes.
    pub shape: PagedKvShape,
}

/// First of a kv head's vectors in a block, and of their scales.
#[inline(always)]
fn head_start(shape: &PagedKvShape, block: usize, kv_head: usize) -> usize {
    (block * shape.kv_heads + kv_head) * shape.block_size
}

/// First element of the chunk of keys that `slot` is in, its width, and the slot's column.
#[inline(always)]
pub fn chunk(shape: &PagedKvShape, slot: usize) -> (usize, usize, usize) {
    let first = slot / LANES * LANES;
    let width = LANES.min(shape.block_size - first);
    (first * shape.head_dim, width, slot - first)
}

/// Reads a batch into `scratch.queries`, one entry for each sequence, and checks that it is
/// consistent.
fn read_batch(op: &'static str, scratch: &mut Scratch, batch: &Batch<'_>) -> Result<()> {
    scratch.queries.clear();
    for s in 0..batch.seqs() {
        let sequence = batch.sequence(op, s)?;
        scratch.queries.push(Queries {
            first_token: sequence.tokens.start,
            len: sequence.tokens.len(),
            first_index: sequence.first_index,
            kv_len: sequence.kv_len,
        });
    }
    Ok(())
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
    shape: &PagedKvShape,
    batch: &Batch<'_>,
) -> Result<()> {
    read_batch(op, scratch, batch)?;
    scratch.items.clear();
    for (s, queries) in scratch.queries.iter().enumerate() {
        for i in 0..queries.len {
            let at = queries.first_index + i;
            let (block, slot) = check::block_and_slot(op, batch.table(s), shape, at)?;
            scratch.items.push([block, slot, 0]);
        }
    }
    Ok(())
}

/// The pools of a layer as sinks for keys and values.
fn sinks<'a, K: CpuKvElement>(pools: PoolsMut<'a, K>, slots: &'a [[usize; 3]]) -> [Pool<'a, K>; 2] {
    let PoolsMut {
        k,
        v,
        scales,
        shape,
    } = pools;
    let pools = [
        (k, &mut scales.k, shape.head_dim, true),
        (v, &mut scales.v, shape.value_dim, false),
    ];
    pools.map(|(pool, scales, dim, keys)| Pool {
        data: SharedMut::new(pool),
        scales: SharedMut::new(scales),
        slots,
        shape,
        dim,
        keys,
    })
}

/// [`CpuKvElement::append`].
fn append<K: CpuKvElement>(
    (exec, scratch): (&Exec, &mut Scratch),
    pools: PoolsMut<'_, K>,
    (k, v): (&[f32], &[f32]),
    batch: &Batch<'_>,
) -> Result<()> {
    let shape = QkvShape {
        tokens: batch.tokens(),
        heads: 0,
        kv_heads: pools.shape.kv_heads,
        head_dim: pools.shape.head_dim,
        value_dim: pools.shape.stored_value_dim(),
    };
    find_slots("kv_append", scratch, &pools.shape, batch)?;
    let slots = std::mem::take(&mut scratch.items);
    let [k_sink, v_sink] = sinks(pools, &slots);
    let from = |data, token, sink| HeadCopy {
        source: HeadSource {
            data,
            start: 0,
            token_stride: token,
        },
        transform: HeadTransform::default(),
        sink,
    };
    let none: Option<HeadCopy<'_, Strided<'_>>> = None;
    let kv = [
        from(k, shape.k_dim(), k_sink),
        from(v, shape.v_dim(), v_sink),
    ];
    let done = move_qkv(exec, scratch, none, kv, shape);
    scratch.items = slots;
    done
}

/// [`CpuKvElement::append_projection`].
fn append_projection<K: CpuKvElement>(
    (exec, scratch): (&Exec, &mut Scratch),
    pools: PoolsMut<'_, K>,
    projection: Projection<'_>,
    q: &mut [f32],
    batch: &Batch<'_>,
) -> Result<()> {
    let (found, pool) = (projection.shape(), &pools.shape);
    let dims = (pool.kv_heads, pool.head_dim, pool.stored_value_dim());
    let found_dims = (found.kv_heads, found.head_dim, found.value_dim);
    assert_eq!(found_dims, dims, "the projection and the pool");
    let q = Strided::token_major(q, found.q());
    find_slots("kv_append_qkv", scratch, &pools.shape, batch)?;
    let slots = std::mem::take(&mut scratch.items);
    let done = projection.store(exec, scratch, q, sinks(pools, &slots));
    scratch.items = slots;
    done
}

/// [`CpuKvElement::attention`].
fn attention<K: CpuKvElement>(
    (exec, scratch): (&Exec, &mut Scratch),
    pools: Pools<'_, K>,
    (q, sinks): (&[f32], Option<&[f32]>),
    batch: Batch<'_>,
    out: &mut [f32],
    config: &AttnConfig,
) -> Result<()> {
    let op = "kv_attention";
    let AttnConfig {
        heads,
        head_dim,
        value_dim,
        ..
    } = *config;
    let pool = &pools.shape;
    let dims = (pool.kv_heads, pool.head_dim, pool.value_dim);
    assert_eq!((config.kv_heads, head_dim, value_dim), dims, "the pool");
    read_batch(op, scratch, &batch)?;
    for (s, queries) in scratch.queries.iter().enumerate() {
        check_blocks(op, &pools.shape, batch.table(s), queries, config)?;
    }
    let source = PagedSource::<K> { pools, batch };
    let call = Attention {
        source: &source,
        config: *config,
        q,
        q_strides: (heads * head_dim, head_dim),
        out: SharedMut::new(out),
        out_strides: (heads * value_dim, value_dim),
        sinks,
        key_dim: head_dim,
        value_dim,
    };
    let queries = std::mem::take(&mut scratch.queries);
    let done = call.run(exec, scratch, &queries);
    scratch.queries = queries;
    done
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
        check::block_and_slot(op, table, shape, at)?;
        at = (at / shape.block_size + 1) * shape.block_size;
    }
    Ok(())
}

/// A pool that attention reads.
struct PagedSource<'a, K: CpuKvElement> {
    pools: Pools<'a, K>,
    batch: Batch<'a>,
}

impl<K: CpuKvElement> PagedSource<'_, K> {
    /// Block and slot of a key whose block has been checked.
    #[inline(always)]
    fn slot(&self, sequence: usize, at: usize) -> (usize, usize) {
        let size = self.pools.shape.block_size;
        (self.batch.table(sequence)[at / size] as usize, at % size)
    }

    /// The chunk of key `j` of a sequence and kv head.
    #[inline(always)]
    fn key_chunk(&self, at: (usize, usize), j: usize) -> KeyChunk<'_, K> {
        let (block, slot) = self.slot(at.0, j);
        let (first, width, column) = chunk(&self.pools.shape, slot);
        let (vector, dim) = (
            head_start(&self.pools.shape, block, at.1),
            self.pools.shape.head_dim,
        );
        KeyChunk {
            rows: &self.pools.k[vector * dim + first..][..dim * width],
            scales: match K::SCALED {
                true => &self.pools.scales.k[vector + slot - column..][..width],
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
        let dim = self.pools.shape.value_dim;
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
    fn keys(&self) -> impl SplitColumns<Lane = F32Lane> {
        KeyColumns {
            chunks: self.keys,
            first: 0,
        }
    }

    #[inline(always)]
    fn values(&self, first: usize, at: usize) -> impl SplitColumns<Lane = F32Lane> {
        ValueColumns {
            chunks: self.values,
            first,
            at,
            value_dim: self.value_dim,
        }
    }
}

impl<K: CpuKvElement> Columns for KeyColumns<K> {
    type Lane = F32Lane;

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

impl<K: CpuKvElement> SplitColumns for KeyColumns<K> {
    #[inline(always)]
    fn right(self) -> Self {
        let first = self.first + 1;
        Self { first, ..self }
    }
}

impl<K: CpuKvElement> Columns for ValueColumns<K> {
    type Lane = F32Lane;

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

impl<K: CpuKvElement> SplitColumns for ValueColumns<K> {
    #[inline(always)]
    fn right(self) -> Self {
        let at = self.at + LANES;
        Self { at, ..self }
    }
}

impl<K: CpuKvElement> KeyValues for PagedSource<'_, K> {
    const F32: bool = matches!(K::DTYPE, Dtype::F32);
    type Direct = PoolTile<K>;

    /// With whole chunks and panels, where elements are the values themselves.
    fn direct(&self, at: (usize, usize), first: usize) -> Option<PoolTile<K>> {
        let PagedKvShape {
            block_size,
            head_dim,
            value_dim,
            values_in_keys,
            ..
        } = self.pools.shape;
        let direct = !K::SCALED && !values_in_keys;
        if !direct || !block_size.is_multiple_of(LANES) || !value_dim.is_multiple_of(PANEL) {
            return None;
        }
        let ids = self.batch.table(at.0);
        // The first vector of the chunk of `key`. A table may end, or go on with unchecked entries.
        let start = |key: usize| {
            let block = usize::try_from(*ids.get(key / block_size)?).ok()?;
            let head = || head_start(&self.pools.shape, block, at.1);
            (block < self.pools.shape.blocks).then(|| head() + key % block_size)
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
        let keys = starts.map(|(now, _)| at(self.pools.k, now, head_dim));
        let next_keys = starts.map(|(_, next)| at(self.pools.k, next, head_dim));
        let values = starts.map(|(now, _)| at(self.pools.v, now, value_dim));
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
        let dim = self.pools.shape.head_dim;
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
        if self.pools.shape.values_in_keys {
            self.values_of_keys(s, at, keys, buffer, stride);
            return Values {
                data: buffer,
                stride,
            };
        }
        let dim = self.pools.shape.value_dim;
        for j in keys {
            let (block, slot) = self.slot(at.0, j);
            let vector = head_start(&self.pools.shape, block, at.1) + slot;
            let value = &self.pools.v[vector * dim..][..dim];
            let scale = if K::SCALED {
                self.pools.scales.v[vector]
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
