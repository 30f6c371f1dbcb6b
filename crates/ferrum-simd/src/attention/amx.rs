//! Tiles of keys in tiles of AMX, where keys and values are f32: queries, keys, weights and values are split in two of bf16
//! each, as in [products](crate::gemm::amx).
//!
//! A tile of 32 keys is the panel of one product and the block of inputs of the other, always whole: values of keys that a row
//! does not see have the weight 0, values that are not there are 0. What that adds to a row's sums is zeros, which
//! changes nothing but subnormal sums and the sign of zero, and results are freed of these ([`flush`]).
//!
//! Four tiles of keys are a step: products of all of them, one softmax, products of all with their values. In between, the
//! processor waits until tiles are stored, so few and long phases are faster.
//!
//! Rows whose query cannot be split, and in a step those that see such keys or values, take the path of the other levels one
//! by one: one such key, and rows that see it take all keys of its step so.

use super::softmax::{RowTile, online_softmax_update};
use super::{Copied, KEYS, KeyValues, Task, Values};
use crate::exec::Exec;
use crate::gemm::amx::{Block, INPUTS, Operands, SPLIT_BLOCK, pack, row_block};
use crate::gemm::tile::PANEL;
use crate::isa::Level;
use crate::simd::LANES;
use crate::simd::amx::{TILE_ROWS, Tiles};
use crate::simd::avx512::Avx512;
use core::arch::x86_64::_mm512_setzero_ps;
use ferrum_types::AttnConfig;
use std::ops::Range;

/// Floats of a block of split rows.
const ROW_FLOATS: usize = row_block(true) / 4;
/// Floats of a block of a split panel.
const PANEL_FLOATS: usize = SPLIT_BLOCK / 4;
/// Rows that are multiplied at once.
pub(super) const ROWS: usize = 2 * TILE_ROWS;
/// Rows of a task at most: enough that splitting a tile of keys is little beside using it.
pub(super) const MAX_TASK_ROWS: usize = 12 * ROWS;
/// Tiles of keys of a step.
const STEP_TILES: usize = 4;
/// Keys of a step.
const STEP: usize = STEP_TILES * KEYS;

/// Floats of a task for what is split, and for scores; none at a level that splits none.
pub(super) fn split_len(level: Level, rows: usize, key_dim: usize, stride: usize) -> usize {
    match level.splits_f32() {
        true => split_lens(rows, key_dim, stride).iter().sum(),
        false => 0,
    }
}

/// The floats of queries, keys, values, scores and weights.
fn split_lens(rows: usize, key_dim: usize, stride: usize) -> [usize; 5] {
    let blocks = key_dim.div_ceil(INPUTS);
    [
        rows.div_ceil(ROWS) * 2 * blocks * ROW_FLOATS,
        STEP_TILES * blocks * PANEL_FLOATS,
        stride / PANEL * STEP_TILES * PANEL_FLOATS,
        ROWS * STEP,
        2 * STEP_TILES * ROW_FLOATS,
    ]
}

/// The bits of keys of a step, the first of which is `seen.0`, and the last before `seen.1`.
fn bits((start, end): (usize, usize)) -> u128 {
    let first = |count: usize| match count {
        STEP => u128::MAX,
        _ => (1 << count) - 1,
    };
    first(end) & !first(start)
}

/// What a task works on.
struct Split<'a> {
    /// `[tiles of rows][blocks of key_dim]`.
    queries: &'a mut [f32],
    /// `[tiles of keys][blocks of key_dim]`.
    keys: &'a mut [f32],
    /// `[panels][tiles of keys]`: a tile of keys is a block.
    values: &'a mut [f32],
    /// `[ROWS][STEP]`.
    scores: &'a mut [f32],
    /// `[tiles of rows][tiles of keys]`.
    weights: &'a mut [f32],
}

impl<'a> Split<'a> {
    fn new(mut floats: &'a mut [f32], lens: [usize; 5]) -> Self {
        let [queries, keys, values, scores, weights] = lens.map(|len| {
            let (some, rest) = std::mem::take(&mut floats).split_at_mut(len);
            floats = rest;
            some
        });
        Self {
            queries,
            keys,
            values,
            scores,
            weights,
        }
    }
}

/// Rows of which something cannot be split, by pairs of tiles of rows.
type Exceptions = [u32; MAX_TASK_ROWS / ROWS];

impl<K: KeyValues> Task<'_, K> {
    /// Takes all keys into all rows.
    pub(super) fn run_in_tiles(&mut self, exec: &Exec, keys: Range<usize>) {
        let all = std::mem::take(&mut self.work.split);
        let lens = split_lens(self.rows.len(), self.call.key_dim, self.stride);
        let mut split = Split::new(all, lens);
        let exceptions = self.split_queries(split.queries);
        // SAFETY: the level has tiles (the caller's choice of this path), and nothing that is called here configures others.
        let configured = unsafe { Tiles::configure() };
        let mut at = keys.start;
        while at < keys.end {
            let stop = ((at / STEP + 1) * STEP).min(keys.end);
            self.step((exec, &configured), at..stop, &mut split, exceptions);
            at = stop;
        }
        self.work.split = all;
        flush(&mut self.work.acc[..self.rows.len() * self.stride]);
    }

    /// Splits the queries, tile by tile. Gives the rows that cannot be split.
    fn split_queries(&self, split: &mut [f32]) -> Exceptions {
        let (dim, count) = (self.call.key_dim, self.rows.len());
        let blocks = dim.div_ceil(INPUTS);
        let mut exceptions = Exceptions::default();
        let tiles = split.chunks_exact_mut((blocks * ROW_FLOATS).max(1));
        for (t, tile) in tiles.enumerate() {
            let first = (t * TILE_ROWS).min(count);
            let rows = TILE_ROWS.min(count - first);
            let query = |r| self.query(self.rows.start + first + r);
            let excepted =
                pack::rows::<true>((rows, query), 0..dim, bytemuck::cast_slice_mut(tile));
            exceptions[t / 2] |= excepted << (t % 2 * TILE_ROWS);
        }
        exceptions
    }

    /// The tiles that these keys lie in: the first key of each, and its keys.
    fn tiles(keys: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let first = keys.start / KEYS * KEYS;
        (first..keys.end).step_by(KEYS).map(move |tile| {
            let some = keys.start.max(tile)..keys.end.min(tile + KEYS);
            (tile, some)
        })
    }

    /// Takes the keys of one step (or a part of it) into all rows.
    fn step(
        &mut self,
        (exec, configured): (&Exec, &Tiles),
        keys: Range<usize>,
        split: &mut Split<'_>,
        mut excepted: Exceptions,
    ) {
        let start = keys.start / STEP * STEP;
        let special = self.split_step(exec, keys.clone(), split);
        let count = self.rows.len();
        let mut any = false;
        for (pair, first) in (0..count).step_by(ROWS).enumerate() {
            let rows = first..(first + ROWS).min(count);
            let all = self.all_see(rows.clone(), start..start + STEP);
            let mut seen = [(0, 0); ROWS];
            for (i, (row, seen)) in rows.clone().zip(&mut seen).enumerate() {
                *seen = match all {
                    true => (0, STEP),
                    false => self.seen(row, start..start + STEP),
                };
                if special & bits(*seen) != 0 {
                    excepted[pair] |= 1 << i;
                }
                if excepted[pair] >> i & 1 != 0 {
                    *seen = (0, 0);
                }
            }
            any |= excepted[pair] != 0;
            self.pair_of_tiles(configured, rows, &seen, split);
        }
        if any {
            self.excepted_rows(exec, keys, &excepted);
        }
    }

    /// Splits keys and values of a step. Gives those of which either cannot be split, as bits; such values become zeros, so
    /// that rows which do not see them have what they always have.
    fn split_step(&mut self, exec: &Exec, keys: Range<usize>, split: &mut Split<'_>) -> u128 {
        let key_buffer = std::mem::take(&mut self.work.keys);
        let value_buffer = std::mem::take(&mut self.work.values);
        let keys_len = self.call.key_dim.div_ceil(INPUTS) * PANEL_FLOATS;
        let mut special = 0;
        for (tile, some) in Self::tiles(keys) {
            let values = self.fetch(exec, some.clone(), key_buffer, value_buffer);
            let seen = some.start - tile..some.end - tile;
            let t = tile % STEP / KEYS;
            let inputs = (0..self.call.key_dim, 0);
            let out = &mut split.keys[t * keys_len..][..keys_len];
            let out = bytemuck::cast_slice_mut(out);
            let excepted = u128::from(pack::panel((key_buffer, KEYS), inputs, out))
                | u128::from(self.split_values(&values, seen.clone(), (t, split.values)));
            special |= (excepted & bits((seen.start, seen.end))) << (t * KEYS);
        }
        (self.work.keys, self.work.values) = (key_buffer, value_buffer);
        special
    }

    /// Splits values of tile `t` of a step, and gives those that cannot be.
    fn split_values(
        &self,
        values: &Values<'_>,
        seen: Range<usize>,
        (t, split): (usize, &mut [f32]),
    ) -> u32 {
        let mut split = |values: &[f32], stride| {
            let mut excepted = 0;
            let panels = split.chunks_exact_mut(STEP_TILES * PANEL_FLOATS);
            for (p, panel) in panels.enumerate() {
                let there = PANEL.min(self.call.value_dim - p * PANEL);
                let inputs = (seen.clone(), seen.start);
                let out = &mut panel[t * PANEL_FLOATS..][..PANEL_FLOATS];
                let out = bytemuck::cast_slice_mut(out);
                excepted |= u128::from(pack::panel((&values[p * PANEL..], stride), inputs, out))
                    & bits((0, there));
            }
            excepted == 0
        };
        if split(values.data, values.stride) {
            return 0;
        }
        let rows = seen.end.saturating_sub(1) * values.stride + self.stride;
        let mut finite = values.data[..rows].to_vec();
        let mut excepted = 0;
        for j in seen.clone() {
            let value = &mut finite[j * values.stride..][..self.call.value_dim];
            if !pack::are_split(value) {
                excepted |= 1 << j;
                value.fill(0.0);
            }
        }
        split(&finite, values.stride);
        excepted
    }

    /// Takes keys of a step into two tiles of rows, which see of it what `seen` says.
    fn pair_of_tiles(
        &mut self,
        configured: &Tiles,
        rows: Range<usize>,
        seen: &[(usize, usize); ROWS],
        split: &mut Split<'_>,
    ) {
        let Some((first, tiles)) = tiles_seen(seen) else {
            return;
        };
        let stride = self.stride;
        // A row alone is multiplied without tiles; of others, all of a tile.
        let two = rows.len() > TILE_ROWS;
        let places = match rows.len() {
            1 => 1,
            _ => (1 + usize::from(two)) * TILE_ROWS,
        };
        self.multiply_keys(configured, (&rows, places), first..first + tiles, split);
        self.softmax_rows(rows.clone(), (seen, first, tiles), split);
        let weights = row_tiles(split.weights, tiles * ROW_FLOATS, two);
        let acc = &mut self.work.acc[rows.start * stride..];
        assert!(acc.len() >= places * stride);
        let panels = split.values.chunks_exact(STEP_TILES * PANEL_FLOATS);
        for (p, panel) in panels.enumerate() {
            let columns = &panel[first * PANEL_FLOATS..][..tiles * PANEL_FLOATS];
            let products = Operands::<true> {
                rows: weights,
                columns: bytemuck::cast_slice(columns),
                inputs: tiles * KEYS,
            };
            let place = Block {
                ptr: acc[p * PANEL..].as_mut_ptr(),
                stride,
                rows: places,
                cols: PANEL,
            };
            // SAFETY: the rows and columns lie in `acc` (asserted), which is borrowed.
            unsafe { products.multiply(configured, place, true) };
        }
    }

    /// Scores of some rows, in so many places, with some tiles of keys.
    fn multiply_keys(
        &self,
        configured: &Tiles,
        (rows, places): (&Range<usize>, usize),
        tiles: Range<usize>,
        split: &mut Split<'_>,
    ) {
        let dim = self.call.key_dim;
        if dim == 0 {
            split.scores.fill(0.0);
            return;
        }
        let blocks = dim.div_ceil(INPUTS);
        let queries = &split.queries[rows.start / TILE_ROWS * blocks * ROW_FLOATS..];
        let queries = row_tiles(queries, blocks * ROW_FLOATS, places > TILE_ROWS);
        let keys = split.keys.chunks_exact(blocks * PANEL_FLOATS);
        let keys = keys.skip(tiles.start).take(tiles.len());
        for (t, keys) in keys.enumerate() {
            let products = Operands::<true> {
                rows: queries,
                columns: bytemuck::cast_slice(keys),
                inputs: dim,
            };
            let place = Block {
                ptr: split.scores[t * KEYS..ROWS * STEP].as_mut_ptr(),
                stride: STEP,
                rows: places,
                cols: KEYS,
            };
            // SAFETY: these are 32 columns of `scores`, which have 32 rows.
            unsafe { products.multiply(configured, place, false) };
        }
    }

    /// Turns scores of a pair of tiles of rows, for `tiles` tiles of keys from tile `first` on, into split weights.
    fn softmax_rows(
        &mut self,
        rows: Range<usize>,
        (seen, first, tiles): (&[(usize, usize)], usize, usize),
        split: &mut Split<'_>,
    ) {
        let stride = self.stride;
        let softmax = SoftmaxRows {
            config: self.call.config,
            scores: bytemuck::cast_slice(split.scores),
            seen: &seen[..rows.len()],
            first: first * KEYS,
            weights: bytemuck::cast_slice_mut(split.weights),
            largest: &mut self.work.largest[rows.clone()],
            sums: &mut self.work.sums[rows.start * LANES..rows.end * LANES],
            acc: &mut self.work.acc[rows.start * stride..rows.end * stride],
            stride,
        };
        // SAFETY: where there are tiles, there is AVX-512 with dot products of bf16.
        unsafe {
            match tiles {
                1 => softmax.run::<2>(),
                2 => softmax.run::<4>(),
                3 => softmax.run::<6>(),
                _ => softmax.run::<STEP_VECTORS>(),
            }
        }
    }

    /// Takes keys of a step into rows that cannot be split, or see what cannot be, as at other levels.
    fn excepted_rows(&mut self, exec: &Exec, keys: Range<usize>, excepted: &Exceptions) {
        let key_buffer = std::mem::take(&mut self.work.keys);
        let value_buffer = std::mem::take(&mut self.work.values);
        for (tile, some) in Self::tiles(keys) {
            let values = self.fetch(exec, some, key_buffer, value_buffer);
            let copied = Copied {
                keys: key_buffer,
                values: &values,
            };
            for row in 0..self.rows.len() {
                if excepted[row / ROWS] >> (row % ROWS) & 1 == 0 {
                    continue;
                }
                let seen = self.seen(row, tile..tile + KEYS);
                if seen.0 < seen.1 {
                    self.single_row(exec, row, seen, copied);
                    // As products in tiles find them, which pass by here with weights of 0 if other rows of the pair see keys.
                    flush(&mut self.work.acc[row * self.stride..][..self.stride]);
                }
            }
        }
        (self.work.keys, self.work.values) = (key_buffer, value_buffer);
    }

    /// Takes a tile of keys into one row, as at other levels.
    fn single_row(&mut self, exec: &Exec, row: usize, seen: (usize, usize), keys: Copied<'_>) {
        let (call, dim, stride) = (self.call, self.call.key_dim, self.stride);
        let start = self.query_start(self.rows.start + row);
        exec.level.run(RowTile {
            config: call.config,
            dim,
            q: &call.q[start..][..dim],
            keys,
            seen: &[seen],
            acc: &mut self.work.acc[row * stride..][..stride],
            largest: &mut self.work.largest[row..][..1],
            sums: &mut self.work.sums[row * LANES..][..LANES],
            stride,
        });
    }
}

/// One tile of rows, of so many floats, or two.
fn row_tiles(floats: &[f32], len: usize, two: bool) -> [&[u8]; 2] {
    let (first, second) = floats[..2 * len].split_at(len);
    let second = if two { second } else { &[] };
    [bytemuck::cast_slice(first), bytemuck::cast_slice(second)]
}

/// The first tile of a step of which some row sees a key, and how many there are up to the last one.
fn tiles_seen(seen: &[(usize, usize)]) -> Option<(usize, usize)> {
    let some = || seen.iter().filter(|(start, end)| start < end);
    let first = some().map(|(start, _)| start / KEYS).min()?;
    let end = some().map(|(_, end)| end.div_ceil(KEYS)).max()?;
    Some((first, end - first))
}

/// Vectors of a row of scores.
const STEP_VECTORS: usize = STEP / LANES;

/// The running softmax of rows whose scores there are.
struct SoftmaxRows<'a> {
    config: AttnConfig,
    scores: &'a [[[f32; LANES]; STEP_VECTORS]],
    /// Row `i` sees the keys `seen[i].0..seen[i].1` of the step.
    seen: &'a [(usize, usize)],
    /// The key of the step that the first score is of.
    first: usize,
    /// Blocks of split rows, zeros for keys that are not seen.
    weights: &'a mut [u8],
    largest: &'a mut [f32],
    sums: &'a mut [f32],
    acc: &'a mut [f32],
    stride: usize,
}

impl SoftmaxRows<'_> {
    /// Takes `N` vectors of scores of each row.
    #[target_feature(
        enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
    )]
    fn run<const N: usize>(self) {
        // SAFETY: these are the features that the level stands for.
        let s = unsafe { Avx512::<true>::new() };
        let tile_len = N * LANES / KEYS * row_block(true);
        for (i, seen) in self.seen.iter().enumerate() {
            let at = |key: usize| key.saturating_sub(self.first).min(N * LANES);
            let acc = &mut self.acc[i * self.stride..][..self.stride];
            let sums = &mut self.sums[i * LANES..][..LANES];
            let largest = &mut self.largest[i];
            let weights = match (seen.0 < seen.1, self.scores[i].first_chunk::<N>()) {
                (true, Some(scores)) => {
                    let seen = (at(seen.0), at(seen.1));
                    online_softmax_update(s, self.config, scores, seen, largest, (sums, acc))
                }
                _ => None,
            };
            let weights = weights.unwrap_or([_mm512_setzero_ps(); N]);
            let tile = &mut self.weights[i / TILE_ROWS * tile_len..][..tile_len];
            let blocks = tile.chunks_exact_mut(row_block(true));
            for (pair, block) in weights.as_chunks::<2>().0.iter().zip(blocks) {
                // A weight that is no number makes its row NaN.
                pack::split_row(*pair, i % TILE_ROWS, block);
            }
        }
    }
}

/// Subnormal sums become zeros, and zeros positive: products of tiles make them so when they add zeros, which depends on what
/// other rows see.
fn flush(sums: &mut [f32]) {
    for sum in sums {
        // A NaN stays.
        *sum = if sum.abs() < f32::MIN_POSITIVE {
            0.0
        } else {
            *sum
        };
    }
}
