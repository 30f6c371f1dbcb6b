//! Some panels times some tiles of rows, on one thread.

use super::Product;
use super::acts::WORDS;
use super::format::{CodeLayout, ScaleLayout, UNIT, block_bytes};
use super::pack::panel_bytes;
use super::tile::{self, Decoded, MAX_BYTES, Stored};
use crate::gemm::tile::PANEL;
use crate::gemm::{AddColumns, Columns, PartSums, add_partials};
use crate::isa::{ByteKernel, Kernel};
use crate::math;
use crate::memory::SharedMut;
use crate::simd::{ByteProducts, LANES, LINE};
use ferrum_types::MatShape;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Panels that one row takes side by side, as streams from memory.
const STREAMS: usize = 3;
/// How far ahead of the sums weights are asked for, in bytes: a unit takes so many instructions that
/// the processor alone does not look far enough.
const AHEAD: usize = 512;
/// Bytes of activations that several panels are multiplied with before the next: they stay in the
/// second-level cache.
const ACTS_AT_ONCE: usize = 192 << 10;
/// Tiles of rows up to which codes in several parts are put together for each of them.
const DIRECT_TILES: usize = 2;
/// Rows whose activations of a unit have room in the registers of any level.
const FEW_ROWS: usize = 2;
/// Up to so many rows, results are taken to be in a cache and are not prefetched.
const CACHED_ROWS: usize = 16;
/// Units of a panel that are decoded at once: with a tile's activations they stay in the
/// first-level cache. A multiple of the units of every block.
const UNITS_AT_ONCE: usize = 16;

/// Rows whose sums are held at once beside the result, where sums are cut.
const PARTIAL_ROWS: usize = 64;

/// Sums of parts of some rows of a panel.
#[repr(align(64))]
struct Partials([[f32; PARTIAL_ROWS * PANEL]; 2]);

/// Decoded units of a panel.
#[repr(align(64))]
struct DecodedUnits([MaybeUninit<u8>; 2 * UNITS_AT_ONCE * MAX_BYTES]);

/// Some panels times some tiles of rows.
pub(super) struct Task<'a, C, F> {
    pub(super) product: Product<'a>,
    pub(super) codes: C,
    pub(super) panels: Range<usize>,
    pub(super) tiles: Range<usize>,
    pub(super) scales: PhantomData<F>,
}

/// Runs `$body` with the constant `$mr` equal to `$rows`, 1 to the most that level `$s` uses.
macro_rules! with_byte_rows {
    ($s:ty, $rows:expr, $mr:ident => $body:expr) => {
        with_byte_rows!(@ $s, $rows, $mr, $body, 1 2 3 4 5 6 7 8)
    };
    (@ $s:ty, $rows:expr, $mr:ident, $body:expr, $($n:literal)*) => {
        match $rows {
            $($n if const { $n <= <$s as ByteProducts>::BYTE_ROWS } => {
                const $mr: usize = $n;
                if const { $n <= <$s as ByteProducts>::BYTE_ROWS } {
                    $body
                }
            })*
            more => unreachable!("{more} rows in a tile"),
        }
    };
}

impl<C: CodeLayout, F: ScaleLayout> ByteKernel for Task<'_, C, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: ByteProducts>(self, s: S) {
        let (rows, units) = (self.product.rows, self.product.weight.shape.cols / UNIT);
        let tile_bytes = 4 * WORDS * self.product.tile_rows * units;
        let most = match self.partials() {
            false => usize::MAX,
            true => PARTIAL_ROWS / self.product.tile_rows,
        };
        let at_once = (ACTS_AT_ONCE / tile_bytes.max(1)).min(most).max(1);
        let mut partials = MaybeUninit::uninit();
        let partials = match self.partials() {
            false => [&mut [][..], &mut []],
            true => {
                let Partials(both) = partials.write(Partials([[0.0; _]; 2]));
                both.each_mut().map(|one| &mut one[..])
            }
        };
        let [left, right] = partials;
        let partials = [SharedMut::new(left), SharedMut::new(right)];
        let mut panels = self.panels.clone();
        while rows == 1 && panels.len() >= STREAMS {
            self.direct::<S, 1, STREAMS>(s, panels.start, (0, true), partials);
            panels.start += STREAMS;
        }
        for first in self.tiles.clone().step_by(at_once) {
            let tiles = first..(first + at_once).min(self.tiles.end);
            if const { C::PARTS > 1 } && self.tiles.len() > DIRECT_TILES {
                self.decoded_tiles(s, tiles, partials);
                continue;
            }
            for panel in panels.clone() {
                for tile in tiles.clone() {
                    let (row, count) = self.rows(tile);
                    let first = tile == tiles.start;
                    with_byte_rows!(S, count, MR => {
                        self.direct::<S, MR, 1>(s, panel, (row, first), partials);
                    });
                }
            }
        }
    }
}

impl<C: CodeLayout, F: ScaleLayout> Task<'_, C, F> {
    /// Whether sums of parts are held beside the result.
    #[inline(always)]
    fn partials(&self) -> bool {
        matches!(self.product.sums, PartSums::Tree(split) if split.parts() > 1)
    }

    /// Half `half` of unit `u` of the panel that begins at `panel`.
    #[inline(always)]
    fn stored(&self, panel: *const u8, u: usize, half: usize) -> Stored<C, F> {
        let head = panel.wrapping_add(u / F::UNITS * block_bytes::<C, F>());
        let unit = F::BLOCK_HEADER_BYTES + u % F::UNITS * (F::UNIT_SCALE_BYTES + C::BYTES);
        let beside = head.wrapping_add(unit);
        Stored {
            codes: self.codes,
            parts: (head, beside, beside.wrapping_add(F::UNIT_SCALE_BYTES)),
            half,
            scales: PhantomData,
        }
    }

    /// First row of a tile, and how many it has.
    #[inline(always)]
    fn rows(&self, tile: usize) -> (usize, usize) {
        let row = tile * self.product.tile_rows;
        (row, self.product.tile_rows.min(self.product.rows - row))
    }

    /// `N` panels side by side, from number `first`, times the `MR` rows of the tile that begins with
    /// `row`; `ahead` when they come from memory.
    #[inline(always)]
    fn direct<S: ByteProducts, const MR: usize, const N: usize>(
        &self,
        s: S,
        first: usize,
        (row, ahead): (usize, bool),
        partials: [SharedMut<'_, f32>; 2],
    ) {
        let Product { weight, acts, .. } = self.product;
        let k = weight.shape.cols;
        let stride = panel_bytes::<C, F>(k);
        let bytes = &weight.bytes()[first * stride..][..N * stride];
        let acts = &acts[row * (k / UNIT) * WORDS..][..k / UNIT * MR * WORDS];
        let unit_bytes = block_bytes::<C, F>() / F::UNITS;
        let ahead = if ahead { unit_bytes } else { 0 };
        self.each_part(
            s,
            partials,
            (row..row + MR, first..first + N),
            #[inline(always)]
            |units, to| {
                for panel in first..first + N {
                    self.prefetch_out::<S, MR>(s, to, panel, row);
                }
                let mut sums = [[[s.zero(); MR]; 2]; N];
                for u in units {
                    for (p, sums) in sums.iter_mut().enumerate() {
                        let panel = bytes.as_ptr().wrapping_add(p * stride);
                        let beside = self.stored(panel, u, 0).parts.1;
                        for line in (0..ahead).step_by(LINE) {
                            s.prefetch(beside.wrapping_add(AHEAD + line));
                        }
                        for (half, sums) in sums.iter_mut().enumerate() {
                            let weights = self.stored(panel, u, half);
                            let mut acts = acts.as_ptr().wrapping_add(u * MR * WORDS);
                            if MR > FEW_ROWS {
                                acts = s.again(acts);
                            }
                            // SAFETY: a panel has these units, and the activations have a unit of MR rows for
                            // each (both sliced so).
                            unsafe { tile::unit(s, weights, acts, sums) };
                        }
                    }
                }
                for (p, sums) in sums.iter().enumerate() {
                    for (half, sums) in sums.iter().enumerate() {
                        self.each_row::<MR>(
                            to,
                            (first + p, half),
                            row,
                            #[inline(always)]
                            |r, out| {
                                math::store_at(s, out, 0, sums[r]);
                            },
                        );
                    }
                }
            },
        );
    }

    /// Calls `f` with the units of each part, and to where it writes their sums of some rows and panels, and adds up sums of parts where that is
    /// wanted.
    #[inline(always)]
    fn each_part<S: ByteProducts>(
        &self,
        s: S,
        partials: [SharedMut<'_, f32>; 2],
        (rows, panels): (Range<usize>, Range<usize>),
        mut f: impl FnMut(Range<usize>, Columns<'_>),
    ) {
        let Product {
            weight,
            sums,
            columns: out,
            ..
        } = self.product;
        let MatShape { rows: n, cols: k } = weight.shape;
        let columns = panels.start * PANEL..(panels.end * PANEL).min(n);
        let places = (panels.len() * PANEL, (rows.start, columns.start));
        // Written out: `map` is a call here, of code for any processor.
        let [left, right] = partials;
        let left = Columns::from(left, places.0, places.1);
        let right = Columns::from(right, places.0, places.1);
        let split = sums.split();
        for part in 0..split.parts() {
            let units = split.part(part, k / UNIT);
            assert!(units.end <= k / UNIT, "a cut behind the last unit");
            let some = !units.is_empty();
            let to = sums.place(part, out, [left, right]);
            if some {
                f(units, to);
            }
            if self.partials() {
                add_partials(
                    part,
                    some,
                    [left, right],
                    out,
                    #[inline(always)]
                    |from, to| {
                        let (rows, columns) = (rows.clone(), columns.clone());
                        // SAFETY: partial sums are memory of this task, and apart; in the result, it has its panels and tiles for itself.
                        unsafe { AddColumns::new((from, to), rows, columns) }.run(s);
                    },
                );
            }
        }
    }

    /// Prefetches the cache lines to which a tile's sums of a panel will be stored. Stores reach memory in order: while one waits for
    /// its line, those of the next tile fill the processor's queue of stores.
    #[inline(always)]
    fn prefetch_out<S: ByteProducts, const MR: usize>(
        &self,
        s: S,
        columns: Columns<'_>,
        panel: usize,
        row: usize,
    ) {
        if MR <= FEW_ROWS || self.product.rows <= CACHED_ROWS {
            return;
        }
        let cols = PANEL.min(self.product.weight.shape.rows - panel * PANEL);
        let start = columns.rows(row..row + MR, panel * PANEL, cols);
        for r in 0..MR {
            for at in (0..cols).step_by(LANES) {
                s.prefetch(start.wrapping_add(r * columns.stride + at).cast());
            }
        }
    }

    /// Calls `f` with each row of a tile and its columns of half a panel, if there are some.
    #[inline(always)]
    fn each_row<const MR: usize>(
        &self,
        columns: Columns<'_>,
        (panel, half): (usize, usize),
        row: usize,
        mut f: impl FnMut(usize, &mut [f32]),
    ) -> bool {
        let n = self.product.weight.shape.rows;
        let column = panel * PANEL + half * LANES;
        if column >= n {
            return false;
        }
        for r in 0..MR {
            let len = LANES.min(n - column);
            // SAFETY: a task has its panels and tiles for itself, so no other thread has these rows'
            // columns.
            f(r, unsafe { columns.part(row + r, column, len) });
        }
        true
    }

    /// Some tiles, from units of panels that are decoded first; at most [`PARTIAL_ROWS`] rows where sums are cut.
    #[inline(always)]
    fn decoded_tiles<S: ByteProducts>(
        &self,
        s: S,
        tiles: Range<usize>,
        partials: [SharedMut<'_, f32>; 2],
    ) {
        let mut decoded = DecodedUnits([MaybeUninit::uninit(); _]);
        let Product {
            tile_rows, rows, ..
        } = self.product;
        let rows = tiles.start * tile_rows..(tiles.end * tile_rows).min(rows);
        for panel in self.panels.clone() {
            let place = (rows.clone(), panel..panel + 1);
            self.each_part(
                s,
                partials,
                place,
                #[inline(always)]
                |units, to| {
                    for first in units.clone().step_by(UNITS_AT_ONCE) {
                        let some = first..(first + UNITS_AT_ONCE).min(units.end);
                        let next = self.decode(s, panel, some.clone(), &mut decoded);
                        let add = first > units.start;
                        self.tiles(s, (panel, some, to, add), tiles.clone(), &decoded, next);
                    }
                },
            );
        }
    }

    /// Takes some units of a panel apart; gives the bytes that come after them.
    #[inline(always)]
    fn decode<S: ByteProducts>(
        &self,
        s: S,
        panel: usize,
        units: Range<usize>,
        decoded: &mut DecodedUnits,
    ) -> (*const u8, usize) {
        let weight = self.product.weight;
        let stride = panel_bytes::<C, F>(weight.shape.cols);
        let bytes = &weight.bytes()[panel * stride..][..stride];
        let out = decoded.0.as_mut_ptr().cast::<u8>();
        for (i, u) in units.clone().enumerate() {
            for half in 0..2 {
                let from = self.stored(bytes.as_ptr(), u, half);
                // SAFETY: the panel has these units, and the buffer has room for as many.
                unsafe {
                    let out = out.add((2 * i + half) * Decoded::<C, F>::BYTES);
                    tile::decode(s, from, out);
                }
            }
        }
        let len = units.len() / F::UNITS * block_bytes::<C, F>();
        let end = self.stored(bytes.as_ptr(), units.end, 0).parts.0;
        (end, len)
    }

    /// Some tiles times decoded units. The units after them are prefetched meanwhile.
    #[inline(always)]
    fn tiles<S: ByteProducts>(
        &self,
        s: S,
        (panel, units, to, add): (usize, Range<usize>, Columns<'_>, bool),
        tiles: Range<usize>,
        decoded: &DecodedUnits,
        (next, len): (*const u8, usize),
    ) {
        let share = len.div_ceil(tiles.len());
        for (i, tile) in tiles.enumerate() {
            let next = next.wrapping_add(i * share);
            let (row, count) = self.rows(tile);
            with_byte_rows!(S, count, MR => {
                let some = (panel, units.clone(), to, add);
                self.tile::<S, MR>(s, some, row, decoded, (next, share));
            });
        }
    }

    /// The `MR` rows of the tile that begins with `row` times decoded units, into these columns or, with `add`, added to them.
    #[inline(always)]
    fn tile<S: ByteProducts, const MR: usize>(
        &self,
        s: S,
        (panel, units, to, add): (usize, Range<usize>, Columns<'_>, bool),
        row: usize,
        decoded: &DecodedUnits,
        (next, share): (*const u8, usize),
    ) {
        let MatShape { cols: k, .. } = self.product.weight.shape;
        let acts = &self.product.acts[row * (k / UNIT) * WORDS..];
        let acts = &acts[units.start * MR * WORDS..][..units.len() * MR * WORDS];
        let pace = share.div_ceil(units.len());
        if !add {
            self.prefetch_out::<S, MR>(s, to, panel, row);
        }
        for half in 0..2 {
            let mut sums = [s.zero(); MR];
            let some = self.each_row::<MR>(
                to,
                (panel, half),
                row,
                #[inline(always)]
                |r, out| {
                    if add {
                        sums[r] = math::load_at(s, out, 0);
                    }
                },
            );
            if !some {
                return;
            }
            for i in 0..units.len() {
                if half == 0 {
                    for line in (0..pace).step_by(LINE) {
                        s.prefetch(next.wrapping_add(i * pace + line));
                    }
                }
                // SAFETY: these units were decoded, and there are activations for each (sliced so).
                unsafe {
                    let at = (2 * i + half) * Decoded::<C, F>::BYTES;
                    let weights = Decoded::<C, F> {
                        at: decoded.0.as_ptr().cast::<u8>().add(at),
                        formats: PhantomData,
                    };
                    tile::unit(s, weights, acts.as_ptr().add(i * MR * WORDS), &mut sums);
                }
            }
            self.each_row::<MR>(
                to,
                (panel, half),
                row,
                #[inline(always)]
                |r, out| {
                    math::store_at(s, out, 0, sums[r]);
                },
            );
        }
    }
}
