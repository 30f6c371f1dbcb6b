//! The inner loop of products with quantised weights: one unit of a half panel times some rows.
//!
//! Integers are exact, so their order is free; the f32 sums of an output take one multiply-add for
//! each scale and one for each minimum, in ascending `k`. That is the same for one row and for many,
//! at every level and from packed or decoded weights, so all give the same bits.

use super::acts::word;
use super::format::{Codes, STEPS, Scales};
use crate::cpu::simd::Simd;

/// Adds a unit of half a panel times `MR` rows to `sums`.
///
/// # Safety
/// `weights` are valid for reads: `(head, beside, codes)` of the formats' sizes. `acts` is one unit of
/// a tile of `MR` rows.
#[inline(always)]
pub(crate) unsafe fn unit<S: Simd, C: Codes, F: Scales, const MR: usize>(
    s: S,
    (codes, zero): (C, i32),
    (head, beside, unit): (*const u8, *const u8, *const u8),
    half: usize,
    acts: *const i32,
    sums: &mut [S::V; MR],
) {
    // SAFETY: a unit of a tile has WORDS words for each of the MR rows, and `word` is one of them.
    let int = |word: usize, r: usize| unsafe { *acts.add(word * MR + r) };
    let float = |word: usize, r: usize| f32::from_bits(int(word, r) as u32);
    // What a sum of codes stands for beside the products: the zero point, or the level's own.
    let offset = if C::WIDE {
        if S::WIDE_FLIP == 0 { 0 } else { -128 }
    } else {
        -zero
    };
    for sub in 0..F::SUBS {
        let steps = STEPS / F::SUBS;
        let mut totals = [s.splat_i(0); MR];
        for (r, total) in totals.iter_mut().enumerate() {
            let sum = if F::SUBS == 1 {
                int(word::SUM, r) + int(word::SUM + 1, r)
            } else {
                int(word::SUM + sub, r)
            };
            *total = s.splat_i(offset * sum);
        }
        let mut products = [s.no_products(); MR];
        for i in 0..steps {
            let t = sub * steps + i;
            // SAFETY: the caller's contract.
            let w = unsafe { codes.step(s, unit, half, t) };
            for r in 0..MR {
                if C::WIDE {
                    totals[r] = s.wide(totals[r], w, int(t, r));
                } else {
                    products[r] = s.narrow(products[r], w, int(t, r));
                }
            }
            if !C::WIDE && ((i + 1) % C::NARROW_STEPS == 0 || i + 1 == steps) {
                for r in 0..MR {
                    totals[r] = s.collect(products[r], totals[r]);
                    products[r] = s.no_products();
                }
            }
        }
        // SAFETY: the caller's contract.
        let scale = unsafe { F::scale(s, head, beside, half, sub) };
        for r in 0..MR {
            let scale = s.mul(scale, s.splat(float(word::SCALE, r)));
            sums[r] = s.fma(scale, s.to_f32(totals[r]), sums[r]);
        }
        if F::MINIMUMS {
            // SAFETY: the caller's contract.
            let minimum = unsafe { F::minimum(s, head, beside, half, sub) };
            for (r, sums) in sums.iter_mut().enumerate() {
                let sum = if F::SUBS == 1 {
                    float(word::SCALED_TOTAL, r)
                } else {
                    float(word::SCALED_SUM + sub, r)
                };
                *sums = s.fnma(minimum, s.splat(sum), *sums);
            }
        }
    }
}
