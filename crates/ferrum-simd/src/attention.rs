//! Softmax attention without a score matrix: one routine; the ops differ in where keys lie.
//!
//! Keys are taken in tiles of 32 by their absolute index, with a running maximum and sum for each
//! query (Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al.,
//! "FlashAttention"). Where numbers of f32 are [split](super::isa::Isa::splits_f32), four tiles make a step. A tile's scores and its weighted values are products by the register tile of
//! [`super::gemm`], so each is one chain in key order. A query's result therefore depends on its own
//! keys alone: not on the other queries of a chunk, the size of a KV block, or the split of the work.
//!
//! Queries of the heads that share a kv head are rows of one product: they share each read of K and V.

#[cfg(target_arch = "x86_64")]
mod amx;
mod contiguous;
pub(crate) mod queries;
mod softmax;

pub(crate) use queries::Queries;

pub use contiguous::{flash_attention, mla_attention};

use super::exec::{Exec, Scratch};
use super::gemm::lane::F32Lane;
use super::gemm::pack::pack_tile;
use super::gemm::tile::{F32Columns, MAX_ROWS, PANEL, SplitColumns};
use super::memory::SharedMut;
use super::simd::{LANES, Simd};
use ferrum_types::{AttnConfig, Result};
use softmax::{Fetch, Finish, RowTile, TileRows};
use std::ops::Range;

/// Keys of a tile.
pub(crate) const KEYS: usize = PANEL;

/// Where keys and values lie. `sequence` is the caller's number of a sequence.
pub(crate) trait KeyValues: Sync {
    /// Whether keys and values are of f32. Some levels split these, and queries and weights, in two of bf16.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const F32: bool;
    /// Keys and values of a tile where they lie.
    type Direct: KeyTile;

    /// The whole tile that begins with key `first`, if it can be multiplied with as it lies. What few
    /// rows use is not worth a copy in f32.
    fn direct(&self, at: (usize, usize), first: usize) -> Option<Self::Direct>;

    /// Writes element `d` of key `j`, for `j` in `keys`, to `out[d · KEYS + j % KEYS]`. All keys are of
    /// one tile; `out` holds `KEYS` columns for each element, of which the others may get anything.
    fn keys<S: Simd>(&self, s: S, at: (usize, usize), keys: Range<usize>, out: &mut [f32]);

    /// Values of `keys`: row `j % KEYS` of the result is value `j`, with whole panels of elements.
    /// Either memory of the source or `buffer`, whose rows have `stride` elements.
    fn values<'a, S: Simd>(
        &'a self,
        s: S,
        at: (usize, usize),
        keys: Range<usize>,
        buffer: &'a mut [f32],
        stride: usize,
    ) -> Values<'a>;
}

/// Values of a tile: row `j` begins at `data[j · stride]`.
pub(crate) struct Values<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
}

/// A tile as products take it. The memory that it was made of is borrowed for as long as it is used.
pub(crate) trait KeyTile: Copy {
    /// Columns of keys, `[key_dim][KEYS]`.
    fn keys(&self) -> impl SplitColumns<Lane = F32Lane>;
    /// Columns of values from element `at`, `[keys][PANEL]`, from key `first` of the tile on.
    fn values(&self, first: usize, at: usize) -> impl SplitColumns<Lane = F32Lane>;
}

/// A tile in f32; also for sources whose tiles are never taken as they lie.
#[derive(Clone, Copy)]
pub(crate) struct Copied<'a> {
    /// `[key_dim][KEYS]`.
    keys: &'a [f32],
    values: &'a Values<'a>,
}

impl KeyTile for Copied<'_> {
    #[inline(always)]
    fn keys(&self) -> impl SplitColumns<Lane = F32Lane> {
        F32Columns::new(self.keys.as_ptr(), KEYS)
    }

    #[inline(always)]
    fn values(&self, first: usize, at: usize) -> impl SplitColumns<Lane = F32Lane> {
        F32Columns::new(
            self.values.data[first * self.values.stride..][at..].as_ptr(),
            self.values.stride,
        )
    }
}

/// A call: sizes, and where queries and results lie. Head `h` of token `t` begins at
/// `t·token + h·head` in `q` and, in the same layout, in `out`.
pub(crate) struct Attention<'a, K> {
    pub(crate) source: &'a K,
    pub(crate) config: AttnConfig,
    pub(crate) q: &'a [f32],
    pub(crate) q_strides: (usize, usize),
    pub(crate) out: SharedMut<'a, f32>,
    pub(crate) out_strides: (usize, usize),
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
}

/// Rows of a task at most: enough that decoding a tile of keys is little beside using it.
const MAX_TASK_ROWS: usize = 192;

/// A task's floats.
struct Layout {
    q: usize,
    acc: usize,
    state: usize,
    keys: usize,
    values: usize,
    /// What is split, where it is, and scores.
    split: usize,
}

impl Layout {
    fn new(split: usize, rows: usize, key_dim: usize, stride: usize) -> Self {
        Self {
            split,
            q: rows * key_dim,
            acc: rows * stride,
            state: rows * (1 + LANES),
            keys: key_dim * KEYS,
            values: KEYS * stride,
        }
    }

    fn total(&self) -> usize {
        let rest = self.q + self.acc + self.state + self.keys + self.values;
        (self.split + rest).next_multiple_of(LANES)
    }
}

/// A running softmax's memory, cut from a thread's scratch.
struct Work<'a> {
    /// Queries in tiles, each `[key_dim][rows of the tile]`.
    q: &'a mut [f32],
    /// `[rows, stride]`: weighted values so far.
    acc: &'a mut [f32],
    /// `[rows]`: largest score so far.
    largest: &'a mut [f32],
    /// `[rows, LANES]`: sums of weights so far; lane = key index modulo 16.
    sums: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// Split queries, keys, values and weights, and scores.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    split: &'a mut [f32],
}

impl Layout {
    fn cut<'a>(&self, floats: &'a mut [f32]) -> Work<'a> {
        // First, so that tiles begin with a line of the cache.
        let (split, rest) = floats.split_at_mut(self.split);
        let (q, rest) = rest.split_at_mut(self.q);
        let (acc, rest) = rest.split_at_mut(self.acc);
        let (state, rest) = rest.split_at_mut(self.state);
        let (keys, rest) = rest.split_at_mut(self.keys);
        let (largest, sums) = state.split_at_mut(self.state / (1 + LANES));
        Work {
            q,
            acc,
            largest,
            sums,
            keys,
            values: &mut rest[..self.values],
            split,
        }
    }
}

impl<K: KeyValues> Attention<'_, K> {
    /// Runs all queries of `sequences`.
    pub(crate) fn run(
        &self,
        exec: &Exec,
        scratch: &mut Scratch,
        sequences: &[Queries],
    ) -> Result<()> {
        let group = self.config.heads / self.config.kv_heads;
        let rows_of = |queries: &Queries| queries.len * group;
        let longest = sequences.iter().map(rows_of).max().unwrap_or(0);
        if longest == 0 || self.value_dim == 0 {
            return Ok(());
        }
        let threads = exec.pool.threads();
        let all_rows = sequences.iter().map(rows_of).sum::<usize>() * self.config.kv_heads;
        let (unit, max) = self.task_rows(exec);
        let rows = (all_rows / (4 * threads))
            .clamp(unit, max)
            .min(longest)
            .next_multiple_of(unit);
        scratch.items.clear();
        for (s, queries) in sequences.iter().enumerate() {
            for first in (0..rows_of(queries)).step_by(rows) {
                let tasks = (0..self.config.kv_heads).map(|kv_head| [s, kv_head, first]);
                scratch.items.extend(tasks);
            }
        }
        // Later queries see more keys: they go first, so that no thread is left with a long task.
        scratch.items.reverse();

        let stride = self.value_dim.next_multiple_of(PANEL);
        let split = self.split_len(exec, rows, stride);
        let layout = Layout::new(split, rows, self.key_dim, stride);
        let size = layout.total();
        let (floats, items) = scratch.floats_and_items(threads * size)?;
        let floats = SharedMut::new(floats);
        let task = |item: &[usize; 3], thread: usize| {
            let [s, kv_head, first] = *item;
            let queries = sequences[s];
            // SAFETY: no two running tasks share a thread number.
            let floats = unsafe { floats.part(thread * size, size) };
            let task = Task {
                call: self,
                queries,
                at: (s, kv_head),
                rows: first..(first + rows).min(rows_of(&queries)),
                stride,
                work: layout.cut(floats),
            };
            task.run(exec);
        };
        let keys = |queries: &Queries| queries.len.saturating_mul(queries.kv_len);
        let dim = self.key_dim + self.value_dim;
        let work = sequences
            .iter()
            .map(keys)
            .sum::<usize>()
            .saturating_mul(self.config.heads * dim);
        if work < SMALL {
            items.iter().for_each(|item| task(item, 0));
        } else {
            exec.pool
                .run(items.len(), &|i, thread| task(&items[i], thread));
        }
        Ok(())
    }
}

impl<K: KeyValues> Attention<'_, K> {
    /// Of how many rows a task has a multiple, and how many at most.
    fn task_rows(&self, exec: &Exec) -> (usize, usize) {
        #[cfg(target_arch = "x86_64")]
        if K::F32 && exec.level.splits_f32() {
            return (amx::ROWS, amx::MAX_TASK_ROWS);
        }
        let _ = exec;
        (MAX_ROWS, MAX_TASK_ROWS)
    }

    /// Floats of a task of `rows` rows for what is split.
    fn split_len(&self, exec: &Exec, rows: usize, stride: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if K::F32 {
            return amx::split_len(exec.level, rows, self.key_dim, stride);
        }
        let _ = (exec, rows, stride);
        0
    }
}

/// Products below which a call stays on its thread; about 10 µs.
const SMALL: usize = 1 << 18;

/// Some rows (queries of the heads of one kv head) of one sequence.
struct Task<'a, K> {
    call: &'a Attention<'a, K>,
    queries: Queries,
    /// Sequence and kv head.
    at: (usize, usize),
    /// Row `r` is head `r % group` of query token `r / group`.
    rows: Range<usize>,
    /// Elements of a row of `work.acc`.
    stride: usize,
    work: Work<'a>,
}

impl<'a, K: KeyValues> Task<'a, K> {
    fn run(mut self, exec: &Exec) {
        let (first, last) = (self.rows.start, self.rows.end - 1);
        // Windows move to the right with the queries.
        let (start, end) = (self.visible(first).start, self.visible(last).end);
        #[cfg(target_arch = "x86_64")]
        if K::F32 && exec.level.splits_f32() {
            self.begin();
            self.run_in_tiles(exec, start..end);
            return self.finish(exec);
        }
        let tile_rows = exec.level.run(TileRows);
        self.pack_queries(exec, tile_rows);
        self.begin();
        let mut at = start;
        while at < end {
            let stop = ((at / KEYS + 1) * KEYS).min(end);
            self.key_tile(exec, tile_rows, at..stop);
            at = stop;
        }
        self.finish(exec);
    }

    fn token_and_head(&self, row: usize) -> (usize, usize) {
        let group = self.call.config.heads / self.call.config.kv_heads;
        (row / group, self.at.1 * group + row % group)
    }

    /// Keys that a row sees.
    fn visible(&self, row: usize) -> Range<usize> {
        let at = self
            .queries
            .first_index
            .saturating_add(self.token_and_head(row).0);
        self.call.config.visible(at, self.queries.kv_len)
    }

    /// Whether all of these rows of the task see all of `keys`.
    fn all_see(&self, rows: Range<usize>, keys: Range<usize>) -> bool {
        let (first, last) = (self.rows.start + rows.start, self.rows.start + rows.end - 1);
        // Windows move to the right with the queries.
        self.visible(last).start <= keys.start && keys.end <= self.visible(first).end
    }

    /// Packs the queries.
    fn pack_queries(&mut self, exec: &Exec, tile_rows: usize) {
        let dim = self.call.key_dim;
        let count = self.rows.len();
        let packed = std::mem::take(&mut self.work.q);
        // Queries of no elements make no tiles.
        for (t, tile) in packed[..count * dim]
            .chunks_mut((tile_rows * dim).max(1))
            .enumerate()
        {
            let first = self.rows.start + t * tile_rows;
            pack_tile::<F32Lane>(exec, tile.len() / dim, |row| self.query(first + row), tile);
        }
        self.work.q = packed;
    }

    /// Clears the state.
    fn begin(&mut self) {
        let count = self.rows.len();
        for r in 0..count {
            let (_, head) = self.token_and_head(self.rows.start + r);
            // A sink is a key that was seen first, with weight 1 and no value.
            let sink = self.call.sinks.map(|sinks| sinks[head]);
            self.work.largest[r] = sink.unwrap_or(f32::NEG_INFINITY);
            let sums = &mut self.work.sums[r * LANES..][..LANES];
            sums.fill(0.0);
            sums[0] = if sink.is_some() { 1.0 } else { 0.0 };
        }
        self.work.acc[..count * self.stride].fill(0.0);
    }

    /// The query of a row.
    fn query(&self, row: usize) -> &[f32] {
        &self.call.q[self.query_start(row)..][..self.call.key_dim]
    }

    /// Where it begins.
    fn query_start(&self, row: usize) -> usize {
        let (token, head) = self.token_and_head(row);
        let (of_token, of_head) = self.call.q_strides;
        (self.queries.first_token + token) * of_token + head * of_head
    }

    /// Takes the keys of one tile (or a part of it) into all rows.
    fn key_tile(&mut self, exec: &Exec, tile_rows: usize, keys: Range<usize>) {
        let tile = keys.start / KEYS * KEYS;
        // More rows than one register tile would take the tile apart again and again, and a row that
        // sees a part of it would read past what is there.
        let whole = keys.len() == KEYS && self.rows.len() <= tile_rows;
        let direct = whole && self.all_see(0..self.rows.len(), tile..tile + KEYS);
        let direct = direct.then(|| self.call.source.direct(self.at, tile));
        if let Some(direct) = direct.flatten() {
            return self.row_tile(exec, 0..self.rows.len(), tile, direct);
        }
        // The buffers are put back below; what is borrowed meanwhile is the rest.
        let key_buffer = std::mem::take(&mut self.work.keys);
        let value_buffer = std::mem::take(&mut self.work.values);
        let values = self.fetch(exec, keys.clone(), key_buffer, value_buffer);
        let copied = Copied {
            keys: key_buffer,
            values: &values,
        };
        let count = self.rows.len();
        for first in (0..count).step_by(tile_rows) {
            let rows = first..(first + tile_rows).min(count);
            self.row_tile(exec, rows, tile, copied);
        }
        (self.work.keys, self.work.values) = (key_buffer, value_buffer);
    }

    /// Brings keys and values of a tile into f32.
    fn fetch<'v>(
        &self,
        exec: &Exec,
        keys: Range<usize>,
        key_buffer: &mut [f32],
        value_buffer: &'v mut [f32],
    ) -> Values<'v>
    where
        'a: 'v,
    {
        assert!(key_buffer.len() >= self.call.key_dim * KEYS);
        let source: &'v K = self.call.source;
        let values = exec.level.run(Fetch {
            source,
            at: self.at,
            keys: keys.clone(),
            key_buffer,
            value_buffer,
            stride: self.stride,
        });
        let last_row = (keys.end - 1) % KEYS * values.stride;
        assert!(values.data.len() >= last_row + self.stride);
        values
    }

    /// What a row sees of `keys`, counted from the first of these.
    fn seen(&self, row: usize, keys: Range<usize>) -> (usize, usize) {
        let visible = self.visible(self.rows.start + row);
        (
            visible.start.clamp(keys.start, keys.end) - keys.start,
            visible.end.clamp(keys.start, keys.end) - keys.start,
        )
    }

    /// Takes the keys of a tile that begins with key `tile` into the rows of one register tile.
    fn row_tile<D: KeyTile>(&mut self, exec: &Exec, of: Range<usize>, tile: usize, keys: D) {
        // What each row sees of this tile.
        let mut seen = [(0, KEYS); MAX_ROWS];
        if !self.all_see(of.clone(), tile..tile + KEYS) {
            for (row, seen) in of.clone().zip(&mut seen) {
                *seen = self.seen(row, tile..tile + KEYS);
            }
        }
        let (dim, stride, first, rows) = (self.call.key_dim, self.stride, of.start, of.len());
        exec.level.run(RowTile {
            config: self.call.config,
            dim,
            q: &self.work.q[first * dim..][..rows * dim],
            keys,
            seen: &seen[..rows],
            acc: &mut self.work.acc[first * stride..][..rows * stride],
            largest: &mut self.work.largest[first..][..rows],
            sums: &mut self.work.sums[first * LANES..][..rows * LANES],
            stride,
        });
    }

    /// Divides by the sums and writes the results.
    fn finish(&mut self, exec: &Exec) {
        let dim = self.call.value_dim;
        for r in 0..self.rows.len() {
            let (token, head) = self.token_and_head(self.rows.start + r);
            let token = self.queries.first_token + token;
            let at = token * self.call.out_strides.0 + head * self.call.out_strides.1;
            exec.level.run(Finish {
                sums: &self.work.sums[r * LANES..][..LANES],
                acc: &self.work.acc[r * self.stride..][..dim],
                // SAFETY: a row belongs to one task, and rows have different tokens or heads.
                out: unsafe { self.call.out.part(at, dim) },
            });
        }
    }
}
