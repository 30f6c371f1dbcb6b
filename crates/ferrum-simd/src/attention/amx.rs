//! Tiles of keys in tiles of AMX, where keys and values are f32: queries, keys, weights and values are split in two of bf16
//! each, as in [products](crate::gemm::amx).
//!
//! A tile of 32 keys is the panel of one product and the block of inputs of the other, always whole: values of keys that a row
//! does not see have the weight 0, values that are not there are 0. What that adds to a row's sums is zeros, which
//! changes nothing but subnormal sums and the sign of zero, and results are freed of these ([`flush`]).
//!
//! Rows whose query cannot be split, and in a tile those that see such keys or values, take the path of the other levels one
//! by one.

use super::softmax::{RowTile, SoftmaxRows};
use super::{Copied, KEYS, KeyValues, MAX_TASK_ROWS, Task, Values};
use crate::exec::Exec;
use crate::gemm::amx::{Block, INPUTS, Operands, SPLIT_BLOCK, pack, row_block};
use crate::gemm::tile::PANEL;
use crate::isa::Level;
use crate::simd::LANES;
use crate::simd::amx::{TILE_ROWS, Tiles};
use std::ops::Range;

/// Floats of a block of split rows.
const ROW_FLOATS: usize = row_block(true) / 4;
/// Floats of a block of a split panel.
const PANEL_FLOATS: usize = SPLIT_BLOCK / 4;
/// Rows that are multiplied at once.
const ROWS: usize = 2 * TILE_ROWS;

/// Tiles of rows for some rows, of which pairs are multiplied.
fn row_tiles(rows: usize) -> usize {
    rows.div_ceil(ROWS) * 2
}

/// Floats of a task for split queries, keys and values; none at a level that splits none.
pub(super) fn split_len(level: Level, rows: usize, key_dim: usize, stride: usize) -> usize {
    match level.splits_f32() {
        true => split_lens(rows, key_dim, stride).iter().sum(),
        false => 0,
    }
}

/// The first bits.
fn lanes(count: usize) -> u32 {
    u32::try_from((1u64 << count) - 1).unwrap_or(u32::MAX)
}

/// The floats of each of the three.
fn split_lens(rows: usize, key_dim: usize, stride: usize) -> [usize; 3] {
    let blocks = key_dim.div_ceil(INPUTS);
    [
        row_tiles(rows) * blocks * ROW_FLOATS,
        blocks * PANEL_FLOATS,
        stride / PANEL * PANEL_FLOATS,
    ]
}

/// Which rows of a task, tile by tile, have a query that cannot be split.
pub(super) type Exceptions = [u32; MAX_TASK_ROWS.div_ceil(ROWS) * 2];

/// Weights of a tile of keys for 32 rows.
#[repr(align(64))]
struct Scores([[f32; KEYS]; ROWS]);

/// The same, split.
#[repr(align(64))]
struct SplitWeights([u8; 2 * row_block(true)]);

impl<K: KeyValues> Task<'_, K> {
    /// Takes all keys into all rows.
    pub(super) fn run_in_tiles(&mut self, exec: &Exec, keys: Range<usize>) {
        let all = std::mem::take(&mut self.work.split);
        let lens = split_lens(self.rows.len(), self.call.key_dim, self.stride);
        let (queries, rest) = all.split_at_mut(lens[0]);
        let (split_keys, rest) = rest.split_at_mut(lens[1]);
        let split_values = &mut rest[..lens[2]];
        let exceptions = self.split_queries(queries);
        // SAFETY: the level has tiles (the caller's choice of this path), and nothing that is called here configures others.
        let configured = unsafe { Tiles::configure() };
        let mut at = keys.start;
        while at < keys.end {
            let stop = ((at / KEYS + 1) * KEYS).min(keys.end);
            let split = (&*queries, &mut *split_keys, &mut *split_values);
            self.key_tile_in_tiles((exec, &configured), at..stop, split, &exceptions);
            at = stop;
        }
        self.work.split = all;
        flush(&mut self.work.acc[..self.rows.len() * self.stride]);
    }

    /// Splits the queries, tile by tile.
    fn split_queries(&self, split: &mut [f32]) -> Exceptions {
        let (dim, count) = (self.call.key_dim, self.rows.len());
        let blocks = dim.div_ceil(INPUTS);
        let mut exceptions = Exceptions::default();
        let tiles = split.chunks_exact_mut((blocks * ROW_FLOATS).max(1));
        for (t, tile) in tiles.enumerate() {
            let first = (t * TILE_ROWS).min(count);
            let rows = TILE_ROWS.min(count - first);
            let query = |r| self.query(self.rows.start + first + r);
            exceptions[t] =
                pack::rows::<true>((rows, query), 0..dim, bytemuck::cast_slice_mut(tile));
        }
        exceptions
    }

    /// Takes the keys of one tile (or a part of it) into all rows.
    fn key_tile_in_tiles(
        &mut self,
        (exec, configured): (&Exec, &Tiles),
        keys: Range<usize>,
        (queries, split_keys, split_values): (&[f32], &mut [f32], &mut [f32]),
        exceptions: &Exceptions,
    ) {
        let (tile, count) = (keys.start / KEYS * KEYS, self.rows.len());
        let key_buffer = std::mem::take(&mut self.work.keys);
        let value_buffer = std::mem::take(&mut self.work.values);
        let values = self.fetch(exec, keys.clone(), key_buffer, value_buffer);
        let seen = keys.start - tile..keys.end - tile;
        let special = self.split_tile(
            (key_buffer, &values),
            seen,
            (&mut *split_keys, &mut *split_values),
        );
        for first in (0..count).step_by(ROWS) {
            let rows = first..(first + ROWS).min(count);
            let mut seen = [(0, 0); ROWS];
            for (row, seen) in rows.clone().zip(&mut seen) {
                *seen = self.seen(row, tile);
            }
            if seen.iter().all(|(start, end)| start >= end) {
                continue;
            }
            let t = first / TILE_ROWS;
            let mut excepted = exceptions[t] | exceptions[t + 1] << TILE_ROWS;
            let mut of_tiles = seen;
            for (i, seen) in of_tiles.iter_mut().enumerate() {
                if special & lanes(seen.1) & !lanes(seen.0) != 0 {
                    excepted |= 1 << i;
                }
                if excepted >> i & 1 != 0 {
                    *seen = (0, 0);
                }
            }
            let split = (queries, &*split_keys, &*split_values);
            self.pair_of_tiles((exec, configured), rows.clone(), &of_tiles, split);
            let copied = Copied {
                keys: key_buffer,
                values: &values,
            };
            for (i, row) in rows.enumerate() {
                if excepted >> i & 1 != 0 && seen[i].0 < seen[i].1 {
                    self.single_row(exec, row, seen[i], copied);
                }
            }
        }
        (self.work.keys, self.work.values) = (key_buffer, value_buffer);
    }

    /// Splits keys and values of a tile, of which `seen` are there. Gives those that cannot be split, as bits; the values of
    /// these become zeros, so that rows which do not see them have what they always have.
    fn split_tile(
        &self,
        (keys, values): (&[f32], &Values<'_>),
        seen: Range<usize>,
        (split_keys, split_values): (&mut [f32], &mut [f32]),
    ) -> u32 {
        let inputs = (0..self.call.key_dim, 0);
        let keys = pack::panel((keys, KEYS), inputs, bytemuck::cast_slice_mut(split_keys));
        let mut excepted = keys & (lanes(seen.end) & !lanes(seen.start));
        let dim = self.call.value_dim;
        if self.split_values((values.data, values.stride), seen.clone(), split_values) {
            return excepted;
        }
        let mut finite =
            values.data[..seen.end.saturating_sub(1) * values.stride + self.stride].to_vec();
        for j in seen.clone() {
            let value = &mut finite[j * values.stride..][..dim];
            if !pack::are_split(value) {
                excepted |= 1 << j;
                value.fill(0.0);
            }
        }
        self.split_values((&finite, values.stride), seen, split_values);
        excepted
    }

    /// Splits values, and gives whether they can be.
    fn split_values(
        &self,
        (values, stride): (&[f32], usize),
        seen: Range<usize>,
        split: &mut [f32],
    ) -> bool {
        let mut excepted = 0;
        for (p, panel) in split.chunks_exact_mut(PANEL_FLOATS).enumerate() {
            let there = lanes(PANEL.min(self.call.value_dim - p * PANEL));
            let inputs = (seen.clone(), seen.start);
            let out = bytemuck::cast_slice_mut(panel);
            excepted |= pack::panel((&values[p * PANEL..], stride), inputs, out) & there;
        }
        excepted == 0
    }

    /// Takes a tile of keys into two tiles of rows, which see of it what `seen` says.
    fn pair_of_tiles(
        &mut self,
        (exec, configured): (&Exec, &Tiles),
        rows: Range<usize>,
        seen: &[(usize, usize); ROWS],
        (queries, keys, values): (&[f32], &[f32], &[f32]),
    ) {
        let (dim, stride) = (self.call.key_dim, self.stride);
        let len = dim.div_ceil(INPUTS) * ROW_FLOATS;
        let tile = |t: usize| bytemuck::cast_slice(&queries[t * len..][..len]);
        let t = rows.start / TILE_ROWS;
        let mut scores = Scores([[0.0; KEYS]; ROWS]);
        let place = Block {
            ptr: scores.0.as_mut_ptr().cast(),
            stride: KEYS,
            rows: ROWS,
            cols: KEYS,
        };
        if dim > 0 {
            let products = Operands::<true> {
                rows: [tile(t), tile(t + 1)],
                columns: bytemuck::cast_slice(keys),
                inputs: dim,
            };
            // SAFETY: the array has 32 rows of 32 columns.
            unsafe { products.multiply(configured, place, false) };
        }
        exec.level.run(SoftmaxRows {
            config: self.call.config,
            scores: &mut scores.0[..rows.len()],
            seen: &seen[..rows.len()],
            largest: &mut self.work.largest[rows.clone()],
            sums: &mut self.work.sums[rows.start * LANES..rows.end * LANES],
            acc: &mut self.work.acc[rows.start * stride..rows.end * stride],
            stride,
        });
        let mut weights = SplitWeights([0; 2 * row_block(true)]);
        let (low, high) = weights.0.split_at_mut(row_block(true));
        for (half, out) in [low, high].into_iter().enumerate() {
            // A weight that is no number makes its row NaN without a low half, too.
            let row = |r: usize| &scores.0[half * TILE_ROWS + r][..];
            pack::rows::<true>((TILE_ROWS, row), 0..KEYS, out);
        }
        let acc = &mut self.work.acc[rows.start * stride..rows.end * stride];
        let (low, high) = weights.0.split_at(row_block(true));
        for (p, panel) in values.chunks_exact(PANEL_FLOATS).enumerate() {
            let products = Operands::<true> {
                rows: [low, high],
                columns: bytemuck::cast_slice(panel),
                inputs: KEYS,
            };
            let place = Block {
                ptr: acc[p * PANEL..].as_mut_ptr(),
                stride,
                rows: rows.len(),
                cols: PANEL,
            };
            // SAFETY: the rows and columns lie in `acc`, which is borrowed.
            unsafe { products.multiply(configured, place, true) };
        }
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
