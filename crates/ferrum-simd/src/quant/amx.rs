//! Products of bytes by AMX, for tiles of more rows than AVX-512 takes at once.
//!
//! One instruction multiplies up to sixteen rows with sixteen features, and adds up a unit of them in integers, or half a
//! unit where sixteen numbers have a scale. These sums go through memory, since no instruction takes them from a tile to
//! vectors, and are scaled and added as in [`tile`](super::tile): in f32, a unit after the other. Integers are exact, so the
//! bits are those of every other level.
//!
//! For some 200 cycles after an instruction on tiles, processors (Sapphire Rapids) start one f32 operation of 512 bits a
//! cycle instead of two. So several units are multiplied first, and then scaled; their sums stay in the first-level cache.

use super::acts::{FEW_ROWS, WORDS, word};
use super::format::{CodeLayout, STEPS, ScaleLayout, UNIT};
use super::task::{DecodedUnits, Task, UNITS_AT_ONCE};
use super::tile::{Decoded, HalfUnit, Stored};
use crate::gemm::Columns;
use crate::gemm::tile::PANEL;
use crate::math;
use crate::memory::SharedMut;
use crate::simd::amx::{Config, ROW_BYTES, TILE_ROWS, Tiles};
use crate::simd::{ByteProducts, LANES, LINE};
use crate::unrolled::unrolled;
use core::arch::asm;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Sums of a tile.
const TILE: usize = TILE_ROWS * LANES;
/// Tiles whose sums are held at once: 16 KiB.
const TILES_AT_ONCE: usize = 16;

/// Sums of units: of both halves of each, and of both sixteens where these have scales.
#[repr(align(64))]
struct Sums([MaybeUninit<i32>; TILES_AT_ONCE * TILE]);

/// What is added up of a panel, a row of it for each row of a tile.
#[repr(align(64))]
struct RowSums([[f32; PANEL]; TILE_ROWS]);

/// The shapes of tiles: sums of both halves, for whole tiles of rows and for the last one; activations of both; weights.
fn config<F: ScaleLayout>(rows: usize, last: usize) -> Config {
    let bytes = UNIT / F::SUBS;
    let (sums, last_sums) = ((rows, ROW_BYTES), (last, ROW_BYTES));
    let weights = (bytes / 4, ROW_BYTES);
    Config::new([
        sums,
        sums,
        last_sums,
        last_sums,
        (rows, bytes),
        (last, bytes),
        weights,
        weights,
    ])
}

/// Writes half a unit as [`Decoded`], but with signed bytes for codes, and with scales of sixteens in f32.
///
/// # Safety
/// The weights are valid for reads, and `out` for writes of [`Decoded::BYTES`].
#[inline(always)]
unsafe fn decode<S: ByteProducts, C: CodeLayout, F: ScaleLayout>(
    s: S,
    from: Stored<C, F>,
    out: *mut u8,
) {
    // SAFETY: the caller's contract; all places are below `Decoded::VECTORS`.
    unsafe {
        let vector = |number: usize| out.add(number * ROW_BYTES);
        for t in 0..STEPS {
            s.store_i(vector(t), signed::<S, C>(s, from.step(s, t)));
        }
        s.store(vector(STEPS).cast(), from.scale(s));
        if F::MINIMUMS {
            s.store(vector(STEPS + 1).cast(), from.minimum(s));
        }
        if F::SUBS == 2 {
            let factors = Decoded::<C, F>::FACTORS;
            let [first, second] = from.factors(s);
            s.store(vector(factors).cast(), s.to_f32(first));
            s.store(vector(factors + 1).cast(), s.to_f32(second));
            if F::MINIMUMS {
                s.store_i(vector(factors + 3), from.minimum_pairs(s));
            }
        }
    }
}

/// Codes as signed bytes: without what the level flips, and less what they are too large by.
#[inline(always)]
fn signed<S: ByteProducts, C: CodeLayout>(s: S, codes: S::I) -> S::I {
    let splat = |byte: u8| s.splat_i(i32::from_le_bytes([byte; 4]));
    if C::WIDE {
        return s.xor_i(codes, splat(S::WIDE_FLIP));
    }
    if C::ZERO == 0 {
        return codes;
    }
    // Codes are below 64. The top bit keeps bytes from borrowing of each other.
    let zero = i32::from_le_bytes([C::ZERO as u8; 4]);
    let less = s.add_i(s.or_i(codes, splat(0x80)), s.splat_i(zero.wrapping_neg()));
    s.xor_i(less, splat(0x80))
}

/// Multiplies a unit (or the sixteens of one whose activations and weights are given) of rows with both halves of a panel's, the second
/// `$bytes` behind the first.
macro_rules! multiply {
    ($first:literal, $second:literal, $acts:literal, ($a:expr, $b:expr, $sums:expr), $bytes:expr, $apart:expr) => {
        asm!(
            concat!("tileloadd ", $acts, ", [{a} + {unit}]"),
            "tileloadd tmm6, [{b} + {line}]",
            concat!("tilezero ", $first),
            concat!("tdpbssd ", $first, ", ", $acts, ", tmm6"),
            "tileloadd tmm7, [{b} + {line} + {bytes}]",
            concat!("tilezero ", $second),
            concat!("tdpbssd ", $second, ", ", $acts, ", tmm7"),
            concat!("tilestored [{sums} + {line}], ", $first),
            concat!("tilestored [{sums} + {line} + {apart}], ", $second),
            a = in(reg) $a,
            b = in(reg) $b,
            sums = in(reg) $sums,
            unit = in(reg) UNIT,
            line = in(reg) ROW_BYTES,
            bytes = const $bytes,
            apart = const $apart,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags),
        )
    };
}

/// The exact sums of a unit's products, of each sixteen by itself where these have scales: `[halves][SUBS][rows][LANES]`. The rows are
/// those of a whole tile of rows, or with `LAST` of the last one.
///
/// # Safety
/// Tiles are configured by [`config`] for these rows. `acts` is valid for reads of a unit of them, row after row; `weights` of
/// both halves of a unit; `sums` for writes of `2 * SUBS` tiles.
#[inline(always)]
unsafe fn products<C: CodeLayout, F: ScaleLayout, const LAST: bool>(
    _: &Tiles,
    acts: *const i32,
    weights: *const u8,
    sums: *mut i32,
) {
    for sub in 0..F::SUBS {
        // SAFETY: the caller's contract. The configuration makes tiles of activations `UNIT / SUBS` bytes of each row wide, whose
        // weights are as many vectors / 4, and those of sums sixteen lanes; so the loads and stores stay inside what the caller gives.
        unsafe {
            let a = acts.add(sub * (STEPS / F::SUBS));
            let b = weights.add(sub * (STEPS / F::SUBS) * ROW_BYTES);
            let sums = sums.add(sub * TILE);
            if LAST {
                multiply!(
                    "tmm2",
                    "tmm3",
                    "tmm5",
                    (a, b, sums),
                    Decoded::<C, F>::BYTES,
                    F::SUBS * TILE * 4
                );
            } else {
                multiply!(
                    "tmm0",
                    "tmm1",
                    "tmm4",
                    (a, b, sums),
                    Decoded::<C, F>::BYTES,
                    F::SUBS * TILE * 4
                );
            }
        }
    }
}

/// Units of a tile of rows whose products are known, and where they are.
#[derive(Clone, Copy)]
struct Known {
    units: usize,
    /// As [`decode`] writes them.
    weights: *const u8,
    /// The words of the tile's units, and its number of rows.
    acts: *const i32,
    count: usize,
    /// As [`products`] writes them.
    sums: *const i32,
}

impl Known {
    /// Adds half `half` of the units times `R` rows from `first` on to their sums, a row every [`PANEL`] floats.
    ///
    /// # Safety
    /// All that this stands for is valid for reads; `out` is valid for reads and writes of half a panel of `R` rows.
    #[inline(always)]
    unsafe fn add<S: ByteProducts, C: CodeLayout, F: ScaleLayout, const R: usize>(
        self,
        s: S,
        (half, first): (usize, usize),
        out: *mut f32,
    ) {
        let mut sums = [s.zero(); R];
        // SAFETY: the caller's contract: units, halves and rows are below their counts, words below `WORDS`.
        unsafe {
            unrolled!(r < R => {
                sums[r] = s.load(out.add(r * PANEL));
            });
            for u in 0..self.units {
                let weights = Decoded::<C, F> {
                    at: self.weights.add((2 * u + half) * Decoded::<C, F>::BYTES),
                    formats: PhantomData,
                };
                let acts = self.acts.add(u * WORDS * self.count + first);
                let int = |word: usize, r: usize| *acts.add(word * self.count + r);
                let float = |word: usize, r: usize| f32::from_bits(int(word, r) as u32);
                let total = self
                    .sums
                    .add(((2 * u + half) * F::SUBS * TILE_ROWS + first) * LANES);
                let total = |sub: usize, r: usize| {
                    s.to_f32(s.load_i(total.add((sub * TILE_ROWS + r) * LANES).cast()))
                };
                let scale = weights.scale(s);
                if F::SUBS == 1 {
                    unrolled!(r < R => {
                        let scale = s.mul(scale, s.splat(float(word::SCALE, r)));
                        sums[r] = s.fma(scale, total(0, r), sums[r]);
                    });
                } else {
                    let [one, two] = weights.float_factors(s);
                    unrolled!(r < R => {
                        // Integers below 2^24 (`Decoded::FLOATS_ARE_EXACT`), so f32 sums are theirs.
                        let total = s.fma(two, total(1, r), s.mul(one, total(0, r)));
                        let scale = s.mul(scale, s.splat(float(word::SCALE, r)));
                        sums[r] = s.fma(scale, total, sums[r]);
                    });
                }
                if F::MINIMUMS && F::SUBS == 1 {
                    let minimum = weights.minimum(s);
                    unrolled!(r < R => {
                        let scaled = s.splat(float(word::SCALED_SUM, r));
                        sums[r] = s.fnma(minimum, scaled, sums[r]);
                    });
                } else if F::MINIMUMS {
                    let (minimum, pairs) = (weights.minimum(s), weights.minimum_pairs(s));
                    unrolled!(r < R => {
                        let less = s.dot_pairs(pairs, s.splat_i(int(word::NEGATED_SUMS, r)));
                        let minimum = s.mul(minimum, s.splat(float(word::SCALE, r)));
                        sums[r] = s.fma(minimum, s.to_f32(less), sums[r]);
                    });
                }
            }
            unrolled!(r < R => {
                s.store(out.add(r * PANEL), sums[r]);
            });
        }
    }
}

impl<C: CodeLayout, F: ScaleLayout> Task<'_, C, F> {
    /// Configures tiles for the rows of this task.
    ///
    /// # Safety
    /// The level has AMX, and tiles are not configured on this thread.
    pub(super) unsafe fn configure(&self) -> Tiles {
        let rows = self.product.tile_rows;
        let (_, last) = self.rows(self.tiles.end - 1);
        // SAFETY: the caller's contract.
        unsafe { Tiles::configure_as(&config::<F>(rows, last)) }
    }

    /// Some tiles of more rows than vectors take at once, from units of panels that are decoded first. Gives what is left: a last tile of
    /// fewer rows, or none.
    #[inline(always)]
    pub(super) fn amx_tiles<S: ByteProducts>(
        &self,
        s: S,
        configured: &Tiles,
        tiles: Range<usize>,
        partials: [SharedMut<'_, f32>; 2],
    ) -> Range<usize> {
        const { assert!(!S::TILES || S::BYTE_ROWS == FEW_ROWS) };
        let (_, count) = self.rows(tiles.end - 1);
        let end = tiles.end - (count <= S::BYTE_ROWS) as usize;
        let (many, rest) = (tiles.start..end, end..tiles.end);
        if many.is_empty() {
            return rest;
        }
        let mut decoded = DecodedUnits([MaybeUninit::uninit(); _]);
        let rows = self.rows(many.start).0;
        let (last, count) = self.rows(many.end - 1);
        let rows = rows..last + count;
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
                        let next = self.decode(
                            panel,
                            some.clone(),
                            &mut decoded,
                            #[inline(always)]
                            // SAFETY: `Task::decode` gives units of the panel, and room for each.
                            |from, out| unsafe { decode(s, from, out) },
                        );
                        let share = next.1.div_ceil(many.len());
                        for (i, tile) in many.clone().enumerate() {
                            let place = (panel, some.clone(), to, first > units.start);
                            let ahead = (next.0.wrapping_add(i * share), share);
                            self.amx_tile(s, configured, place, tile, &decoded, ahead);
                        }
                    }
                },
            );
        }
        rest
    }

    /// A tile of rows times decoded units, into these columns or, with `add`, added to them.
    #[inline(always)]
    fn amx_tile<S: ByteProducts>(
        &self,
        s: S,
        configured: &Tiles,
        (panel, units, to, add): (usize, Range<usize>, Columns<'_>, bool),
        tile: usize,
        decoded: &DecodedUnits,
        (next, share): (*const u8, usize),
    ) {
        const { assert!(Decoded::<C, F>::FLOATS_ARE_EXACT) };
        let (row, count) = self.rows(tile);
        let words = self.product.weight.shape.cols / UNIT * WORDS;
        let acts = &self.product.acts[row * words..];
        let acts = &acts[units.start * count * WORDS..][..units.len() * count * WORDS];
        let mut out = RowSums([[0.0; PANEL]; TILE_ROWS]);
        if add {
            self.each_line(to, panel, (row, count), |r, half, columns| {
                math::store_at(
                    s,
                    &mut out.0[r][half * LANES..],
                    0,
                    math::load_at(s, columns, 0),
                );
            });
        } else {
            self.prefetch_out(s, to, panel, (row, count));
        }
        let mut sums = Sums([MaybeUninit::uninit(); _]);
        let sums = sums.0.as_mut_ptr().cast::<i32>();
        let pace = share.div_ceil(units.len());
        let last = count != self.product.tile_rows;
        for first in (0..units.len()).step_by(TILES_AT_ONCE / (2 * F::SUBS)) {
            let some = (units.len() - first).min(TILES_AT_ONCE / (2 * F::SUBS));
            // SAFETY: these units were decoded, there are activations for each (sliced so), and there is room for the sums of each. Tiles are
            // configured for the rows of whole tiles and of the last one, and activations of more rows than vectors take lie row by row.
            unsafe {
                let weights = decoded
                    .0
                    .as_ptr()
                    .cast::<u8>()
                    .add(2 * first * Decoded::<C, F>::BYTES);
                let acts = acts.as_ptr().add(first * count * WORDS);
                for u in 0..some {
                    for line in (0..pace).step_by(LINE) {
                        s.prefetch(next.wrapping_add((first + u) * pace + line));
                    }
                    let acts = acts.add(u * count * WORDS);
                    let weights = weights.add(2 * u * Decoded::<C, F>::BYTES);
                    let sums = sums.add(2 * u * F::SUBS * TILE);
                    match last {
                        false => products::<C, F, false>(configured, acts, weights, sums),
                        true => products::<C, F, true>(configured, acts, weights, sums),
                    }
                }
                let known = Known {
                    units: some,
                    weights,
                    acts,
                    count,
                    sums,
                };
                let mut first = 0;
                while first < count {
                    let out = out.0.as_mut_ptr().cast::<f32>().add(first * PANEL);
                    let left = count - first;
                    for half in 0..2 {
                        let (at, out) = ((half, first), out.add(half * LANES));
                        match left {
                            8.. => known.add::<S, C, F, 8>(s, at, out),
                            4.. => known.add::<S, C, F, 4>(s, at, out),
                            2.. => known.add::<S, C, F, 2>(s, at, out),
                            _ => known.add::<S, C, F, 1>(s, at, out),
                        }
                    }
                    first += [1, 2, 4, 8][left.ilog2().min(3) as usize];
                }
            }
        }
        self.each_line(to, panel, (row, count), |r, half, columns| {
            math::store_at(
                s,
                columns,
                0,
                math::load_at(s, &out.0[r][half * LANES..], 0),
            );
        });
    }

    /// Calls `f` with each row of a tile, and its columns of each half of a panel that has some.
    #[inline(always)]
    fn each_line(
        &self,
        columns: Columns<'_>,
        panel: usize,
        (row, count): (usize, usize),
        mut f: impl FnMut(usize, usize, &mut [f32]),
    ) {
        let n = self.product.weight.shape.rows;
        for r in 0..count {
            for half in 0..2 {
                let column = panel * PANEL + half * LANES;
                if column < n {
                    let len = LANES.min(n - column);
                    // SAFETY: a task has its panels and tiles for itself, so no other thread has these rows' columns.
                    f(r, half, unsafe { columns.part(row + r, column, len) });
                }
            }
        }
    }
}
