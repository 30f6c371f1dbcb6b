//! The inner loop of products with quantised weights: half a panel's unit times some rows.
//!
//! Integers are exact, so their order is free; the f32 sums of an output take one multiply-add for
//! each unit and one for its minimum, in ascending `k`. That is the same for one row and for many,
//! at every level and from packed or decoded weights, so all give the same bits.

use super::acts::word;
use super::format::{CodeLayout, STEPS, ScaleLayout};
use crate::simd::{ByteProducts, Simd};
use crate::unrolled::unrolled;
use std::marker::PhantomData;

/// Bytes of a vector.
const VECTOR: usize = 64;

/// Half a unit of a panel, wherever it lies.
pub(crate) trait HalfUnit: Copy {
    /// What its codes are.
    type CodeLayout: CodeLayout;
    /// What its scales are.
    type ScaleLayout: ScaleLayout;

    /// Step `t` of the codes.
    ///
    /// # Safety
    /// All of the weights that this stands for are valid for reads, here and below.
    unsafe fn step<S: Simd>(self, s: S, t: usize) -> S::I;
    /// See [`Scales::scale`].
    ///
    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn scale<S: Simd>(self, s: S) -> S::V;
    /// See [`Scales::minimum`].
    ///
    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn minimum<S: Simd>(self, s: S) -> S::V;
    /// The integer scales of both sixteens, with `SUBS` of 2.
    ///
    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn factors<S: ByteProducts>(self, s: S) -> [S::I; 2];
    /// Both as pairs, times what codes are too large by.
    ///
    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn offsets<S: Simd>(self, s: S) -> S::I;
    /// The integer minimums of both sixteens as pairs, with `SUBS` of 2.
    ///
    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn minimum_pairs<S: Simd>(self, s: S) -> S::I;
}

/// As it lies in a panel.
#[derive(Clone, Copy)]
pub(crate) struct Stored<C, F> {
    pub(crate) codes: C,
    /// Head of the block, what lies beside the unit, and its codes.
    pub(crate) parts: (*const u8, *const u8, *const u8),
    pub(crate) half: usize,
    pub(crate) scales: PhantomData<F>,
}

impl<C: CodeLayout, F: ScaleLayout> HalfUnit for Stored<C, F> {
    type CodeLayout = C;
    type ScaleLayout = F;

    #[inline(always)]
    unsafe fn step<S: Simd>(self, s: S, t: usize) -> S::I {
        // SAFETY: the caller's contract.
        unsafe { self.codes.step(s, self.parts.2, self.half, t) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, s: S) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { F::scale(s, self.parts.0, self.parts.1, self.half) }
    }
    #[inline(always)]
    unsafe fn minimum<S: Simd>(self, s: S) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { F::minimum(s, self.parts.0, self.parts.1, self.half) }
    }
    #[inline(always)]
    unsafe fn factors<S: ByteProducts>(self, s: S) -> [S::I; 2] {
        // SAFETY: the caller's contract.
        let pairs = unsafe { F::pairs::<S, false>(s, self.parts.1, self.half) };
        [s.factor::<0>(pairs), s.factor::<1>(pairs)]
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(self, s: S) -> S::I {
        // SAFETY: the caller's contract.
        let pairs = unsafe { F::pairs::<S, false>(s, self.parts.1, self.half) };
        s.shl_pairs(pairs, C::ZERO.trailing_zeros() as usize)
    }
    #[inline(always)]
    unsafe fn minimum_pairs<S: Simd>(self, s: S) -> S::I {
        // SAFETY: the caller's contract.
        unsafe { F::pairs::<S, true>(s, self.parts.1, self.half) }
    }
}

/// Taken apart by [`decode`]: the vectors of all steps, and after them what its scales need.
#[derive(Clone, Copy)]
pub(crate) struct Decoded<C, F> {
    pub(crate) at: *const u8,
    pub(crate) formats: PhantomData<(C, F)>,
}

impl<C: CodeLayout, F: ScaleLayout> Decoded<C, F> {
    const FACTORS: usize = STEPS + 1 + F::MINIMUMS as usize;
    /// Vectors of half a unit.
    const VECTORS: usize = Self::FACTORS
        + if F::SUBS == 2 {
            3 + F::MINIMUMS as usize
        } else {
            0
        };
    /// Bytes of half a unit.
    pub(crate) const BYTES: usize = Self::VECTORS * VECTOR;

    #[inline(always)]
    unsafe fn vector<S: Simd>(self, s: S, number: usize) -> S::I {
        // SAFETY: the caller's contract: the half unit has this vector.
        unsafe { s.load_i(self.at.add(number * VECTOR)) }
    }
}

/// Bytes of half a unit, at most.
pub(crate) const MAX_BYTES: usize = (STEPS + 6) * VECTOR;

impl<C: CodeLayout, F: ScaleLayout> HalfUnit for Decoded<C, F> {
    type CodeLayout = C;
    type ScaleLayout = F;

    #[inline(always)]
    unsafe fn step<S: Simd>(self, s: S, t: usize) -> S::I {
        // SAFETY: the caller's contract.
        unsafe { self.vector(s, t) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, s: S) -> S::V {
        // SAFETY: the caller's contract; the floats follow the steps.
        unsafe { s.load(self.at.add(STEPS * VECTOR).cast()) }
    }
    #[inline(always)]
    unsafe fn minimum<S: Simd>(self, s: S) -> S::V {
        // SAFETY: as above.
        unsafe { s.load(self.at.add((STEPS + 1) * VECTOR).cast()) }
    }
    #[inline(always)]
    unsafe fn factors<S: ByteProducts>(self, s: S) -> [S::I; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let first = self.vector(s, Self::FACTORS);
            [first, self.vector(s, Self::FACTORS + 1)]
        }
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(self, s: S) -> S::I {
        // SAFETY: the caller's contract.
        unsafe { self.vector(s, Self::FACTORS + 2) }
    }
    #[inline(always)]
    unsafe fn minimum_pairs<S: Simd>(self, s: S) -> S::I {
        // SAFETY: the caller's contract.
        unsafe { self.vector(s, Self::FACTORS + 3) }
    }
}

/// Writes half a unit as [`Decoded`] reads it.
///
/// # Safety
/// The weights are valid for reads, and `out` for writes of [`Decoded::BYTES`].
#[inline(always)]
pub(crate) unsafe fn decode<S: ByteProducts, C: CodeLayout, F: ScaleLayout>(
    s: S,
    from: Stored<C, F>,
    out: *mut u8,
) {
    const { assert!(Decoded::<C, F>::BYTES <= MAX_BYTES) };
    let factors = Decoded::<C, F>::FACTORS;
    // SAFETY: the caller's contract; all places are below `Decoded::VECTORS`.
    unsafe {
        for t in 0..STEPS {
            s.store_i(out.add(t * VECTOR), from.step(s, t));
        }
        s.store(out.add(STEPS * VECTOR).cast(), from.scale(s));
        if F::MINIMUMS {
            s.store(out.add((STEPS + 1) * VECTOR).cast(), from.minimum(s));
        }
        if F::SUBS == 2 {
            let [first, second] = from.factors(s);
            s.store_i(out.add(factors * VECTOR), first);
            s.store_i(out.add((factors + 1) * VECTOR), second);
            s.store_i(out.add((factors + 2) * VECTOR), from.offsets(s));
            if F::MINIMUMS {
                s.store_i(out.add((factors + 3) * VECTOR), from.minimum_pairs(s));
            }
        }
    }
}

/// Words of a unit of a tile of `MR` rows.
#[derive(Clone, Copy)]
struct Rows<const MR: usize>(*const i32);

impl<const MR: usize> Rows<MR> {
    /// # Safety
    /// The unit is valid for reads, `word` is below [`WORDS`](super::acts::WORDS) and `row` below `MR`.
    #[inline(always)]
    unsafe fn int(self, word: usize, row: usize) -> i32 {
        // SAFETY: the caller's contract.
        unsafe { *self.0.add(word * MR + row) }
    }

    /// # Safety
    /// As [`int`](Self::int).
    #[inline(always)]
    unsafe fn float(self, word: usize, row: usize) -> f32 {
        // SAFETY: the caller's contract.
        f32::from_bits(unsafe { self.int(word, row) } as u32)
    }

    /// The negated sum of a row's codes, times a power of two, in all lanes.
    ///
    /// # Safety
    /// As [`int`](Self::int).
    #[inline(always)]
    unsafe fn negated_sum<S: Simd>(self, s: S, row: usize, times: i32) -> S::I {
        debug_assert!(
            times.count_ones() == 1,
            "a shift multiplies by a power of two"
        );
        // SAFETY: the caller's contract.
        let sum = s.splat_i(unsafe { self.int(word::NEGATED_SUM, row) });
        s.shl_i(sum, times.trailing_zeros() as usize)
    }
}

/// Adds half a unit times `MR` rows to `sums`.
///
/// # Safety
/// The weights are valid for reads, and `acts` is one unit of a tile of `MR` rows.
#[inline(always)]
pub(crate) unsafe fn unit<S: ByteProducts, W: HalfUnit, const MR: usize>(
    s: S,
    weights: W,
    acts: *const i32,
    sums: &mut [S::V; MR],
) {
    // SAFETY: the caller's contract; words are those of `acts::word`, and rows are below MR.
    unsafe {
        let rows = Rows::<MR>(acts);
        let totals = totals::<S, W, MR>(s, weights, rows);
        let scale = weights.scale(s);
        unrolled!(r < MR => {
            let scale = s.mul(scale, s.splat(rows.float(word::SCALE, r)));
            sums[r] = s.fma(scale, s.to_f32(totals[r]), sums[r]);
        });
        if !W::ScaleLayout::MINIMUMS {
            return;
        }
        let minimum = weights.minimum(s);
        if W::ScaleLayout::SUBS == 1 {
            unrolled!(r < MR => {
                let scaled = s.splat(rows.float(word::SCALED_SUM, r));
                sums[r] = s.fnma(minimum, scaled, sums[r]);
            });
            return;
        }
        let pairs = weights.minimum_pairs(s);
        unrolled!(r < MR => {
            let less = s.dot_pairs(pairs, s.splat_i(rows.int(word::NEGATED_SUMS, r)));
            let minimum = s.mul(minimum, s.splat(rows.float(word::SCALE, r)));
            sums[r] = s.fma(minimum, s.to_f32(less), sums[r]);
        });
    }
}

/// How level `S` adds the products of `W`'s steps. A constant, so that only the branch of [`totals`] in use is
/// compiled.
struct Steps<S, W>(PhantomData<(S, W)>);

impl<S: ByteProducts, W: HalfUnit> Steps<S, W> {
    /// Steps whose products are added before they are widened.
    const RUN: usize = {
        let (narrow, steps) = (W::CodeLayout::NARROW_STEPS, STEPS / W::ScaleLayout::SUBS);
        if S::ROOMY || narrow > steps {
            steps
        } else {
            narrow
        }
    };
}

/// The sums of half a unit's products, with integer scales where there are some.
///
/// # Safety
/// As [`unit`].
#[inline(always)]
unsafe fn totals<S: ByteProducts, W: HalfUnit, const MR: usize>(
    s: S,
    weights: W,
    rows: Rows<MR>,
) -> [S::I; MR] {
    let subs = W::ScaleLayout::SUBS;
    let steps_of = STEPS / subs;
    let run = Steps::<S, W>::RUN;
    let mut totals = [s.splat_i(0); MR];
    let mut products = [s.no_products(); MR];
    // What codes are too large by: their zero point, or what the level flips.
    let above = match (W::CodeLayout::WIDE, S::WIDE_FLIP) {
        (false, _) => W::CodeLayout::ZERO,
        (true, 0) => 0,
        (true, _) => 128,
    };
    // SAFETY: the caller's contract; words are those of `acts::word`, and rows are below MR.
    unsafe {
        if subs == 1 && above != 0 && W::CodeLayout::WIDE {
            unrolled!(r < MR => {
                totals[r] = rows.negated_sum(s, r, above);
            });
        }
        let mut factors = [s.splat_i(0); 2];
        if subs == 2 {
            factors = weights.factors(s);
        }
        if subs == 2 && W::CodeLayout::ZERO != 0 {
            let offsets = weights.offsets(s);
            unrolled!(r < MR => {
                totals[r] = s.dot_pairs(offsets, s.splat_i(rows.int(word::NEGATED_SUMS, r)));
            });
        }
        unrolled!(t < STEPS => {
            let step = weights.step(s, t);
            if const { W::CodeLayout::WIDE } {
                unrolled!(r < MR => {
                    totals[r] = s.wide(totals[r], step, rows.int(t, r));
                });
            } else if const { Steps::<S, W>::RUN == 2 } {
                // One row after the other: its products need no register for long.
                if t % 2 == 1 {
                    let before = weights.step(s, t - 1);
                    unrolled!(r < MR => {
                        let products = s.narrow(s.no_products(), before, rows.int(t - 1, r));
                        let products = s.narrow(products, step, rows.int(t, r));
                        totals[r] = collect::<S, W>(s, products, factors[t / steps_of], totals[r]);
                    });
                }
            } else {
                unrolled!(r < MR => {
                    let partial = if t.is_multiple_of(run) { s.no_products() } else { products[r] };
                    products[r] = s.narrow(partial, step, rows.int(t, r));
                });
                if (t + 1).is_multiple_of(run) {
                    unrolled!(r < MR => {
                        totals[r] = collect::<S, W>(s, products[r], factors[t / steps_of], totals[r]);
                    });
                }
            }
        });
        if subs == 1 && above != 0 && !W::CodeLayout::WIDE {
            unrolled!(r < MR => {
                totals[r] = s.add_i(totals[r], rows.negated_sum(s, r, above));
            });
        }
    }
    totals
}

/// `total` and the products of each lane, times `factor` where sixteen numbers have a scale.
#[inline(always)]
fn collect<S: ByteProducts, W: HalfUnit>(
    s: S,
    products: S::Products,
    factor: S::I,
    total: S::I,
) -> S::I {
    if W::ScaleLayout::SUBS == 2 {
        s.collect_scaled(products, factor, total)
    } else {
        s.collect(products, total)
    }
}
