//! Blocks of rows and of panels: numbers of f32 as two of bf16 each, or rounded to one.
//!
//! The conversions round to nearest even and take subnormal numbers as zeros.

use super::super::format::{SPLIT_LOW, split_place};
use super::super::tile::PANEL;
use super::tile::{INPUTS, SPLIT_BLOCK, row_block};
use crate::simd::LANES;
use crate::simd::amx::{ROW_BYTES, TILE_ROWS};
use core::arch::x86_64::*;
use std::ops::Range;

/// The least magnitude, as bits, that becomes infinite when it is rounded to bf16, or is no number.
const EXCEPTIONS: u32 = 0x7f7f_8000;

/// Whether all numbers can be split.
pub(crate) fn are_split(numbers: &[f32]) -> bool {
    let exception = |x: &f32| x.to_bits() & 0x7fff_ffff >= EXCEPTIONS;
    // Without a branch in the inner loop, it is made of vectors.
    let mut chunks = numbers.chunks(1024);
    !chunks.any(|chunk| chunk.iter().fold(false, |any, x| any | exception(x)))
}

/// Thirty-two numbers rounded to bf16: those of `low` first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both types are 512 bits, whatever they mean.
    unsafe { core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Numbers less what rounding keeps of them, where `kept` has the bits of bf16 in the high halves of lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn rest(x: __m512, kept: __m512i) -> __m512 {
    _mm512_sub_ps(x, _mm512_castsi512_ps(kept))
}

/// Lanes that are infinite or no number.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn not_finite(kept: __m512i) -> u16 {
    const CLASSES: i32 = 0x99;
    _mm512_fpclass_ps_mask::<CLASSES>(_mm512_castsi512_ps(kept))
}

/// Splits 32 numbers into row `row` of a block, and gives whether one of them cannot be split.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub(crate) fn split_row([low, high]: [__m512; 2], row: usize, block: &mut [u8]) -> bool {
    let rounded = round(low, high);
    let kept = |half: __m256i| _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half));
    let kept_low = kept(_mm512_castsi512_si256(rounded));
    let kept_high = kept(_mm512_extracti64x4_epi64::<1>(rounded));
    let rest = round(rest(low, kept_low), rest(high, kept_high));
    let (highs, lows) = block.split_at_mut(TILE_ROWS * ROW_BYTES);
    for (half, numbers) in [(highs, rounded), (lows, rest)] {
        let out = &mut half[row * ROW_BYTES..][..ROW_BYTES];
        // SAFETY: the slice is a row of a tile.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), numbers) };
    }
    not_finite(kept_low) | not_finite(kept_high) != 0
}

/// Packs inputs `inputs` of at most 16 rows, so many and what gives each, into `out`, which is whole blocks, and fills inputs
/// up with zeros. Other rows of a tile keep what is there, which gives sums that nobody reads. Gives a bit for each row that has
/// numbers which cannot be split; where they were, there is anything.
pub(crate) fn rows<'a, const SPLIT: bool>(
    rows: (usize, impl Fn(usize) -> &'a [f32]),
    inputs: Range<usize>,
    out: &mut [u8],
) -> u32 {
    // SAFETY: there are tiles only where there is AVX-512 with dot products of bf16.
    unsafe { pack_rows::<SPLIT>(rows, inputs, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
fn pack_rows<'a, const SPLIT: bool>(
    (count, of): (usize, impl Fn(usize) -> &'a [f32]),
    inputs: Range<usize>,
    out: &mut [u8],
) -> u32 {
    let mut excepted = 0;
    assert!(count <= TILE_ROWS);
    for (block, out) in out.chunks_exact_mut(row_block(SPLIT)).enumerate() {
        let first = inputs.start + block * INPUTS;
        let len = INPUTS.min(inputs.end - first);
        let lanes = u32::MAX >> (INPUTS - len);
        let (low_lanes, high_lanes) = (lanes as u16, (lanes >> LANES) as u16);
        for r in 0..count {
            let row = &of(r)[first..first + len];
            // SAFETY: lanes past the end of the row are not read.
            let (low, high) = unsafe {
                let high = row.as_ptr().wrapping_add(LANES);
                (
                    _mm512_maskz_loadu_ps(low_lanes, row.as_ptr()),
                    _mm512_maskz_loadu_ps(high_lanes, high),
                )
            };
            if SPLIT {
                excepted |= u32::from(split_row([low, high], r, out)) << r;
                continue;
            }
            let out = &mut out[r * ROW_BYTES..][..ROW_BYTES];
            // SAFETY: the slice is a row of a tile.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), round(low, high)) };
        }
    }
    excepted
}

/// Splits inputs of 32 columns of f32, rows of which lie `stride` elements apart, into `out`, which is whole blocks: the first
/// of `inputs` becomes input `place` of the blocks. All others become zeros. Gives the columns with numbers that cannot be
/// split, as bits.
pub(crate) fn panel(
    (columns, stride): (&[f32], usize),
    (inputs, place): (Range<usize>, usize),
    out: &mut [u8],
) -> u32 {
    assert!(out.len() == (place + inputs.len()).div_ceil(INPUTS) * SPLIT_BLOCK);
    let columns = match inputs.is_empty() {
        true => &[],
        false => &columns[inputs.start * stride..(inputs.end - 1) * stride + PANEL],
    };
    // SAFETY: there are tiles only where there is AVX-512 with dot products of bf16; the slice begins with the first input
    // and ends with the last one, and `out` has a block for each 32 of them.
    unsafe { split_panel((columns.as_ptr(), stride), (inputs.len(), place), out) }
}

/// Inputs of a split panel, from any one on, as blocks that begin with the first of them. Those behind the last become zeros.
pub(super) fn realigned(panel: &[u8], inputs: Range<usize>, out: &mut [u8]) {
    let (panel, out): (&[u16], &mut [u16]) =
        (bytemuck::cast_slice(panel), bytemuck::cast_slice_mut(out));
    out.fill(0);
    for input in inputs.clone() {
        for feature in 0..PANEL {
            let from = split_place(input, feature);
            let to = split_place(input - inputs.start, feature);
            for half in [0, SPLIT_LOW] {
                out[to + half] = panel[from + half];
            }
        }
    }
}

/// # Safety
/// The columns have so many inputs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
unsafe fn split_panel(
    (columns, stride): (*const f32, usize),
    (count, place): (usize, usize),
    out: &mut [u8],
) -> u32 {
    const TILE: usize = TILE_ROWS * ROW_BYTES;
    let mut excepted = [0u16; 2];
    // Numbers of two inputs, which follow each other: those of a feature into one lane.
    let pairs: [u16; 2 * LANES] = std::array::from_fn(|i| (i / 2 + i % 2 * LANES) as u16);
    // SAFETY: the array is 64 bytes.
    let pairs = unsafe { _mm512_loadu_si512(pairs.as_ptr().cast()) };
    let high_halves = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for (block, out) in out.chunks_exact_mut(SPLIT_BLOCK).enumerate() {
        for step in 0..TILE_ROWS {
            let first = block * INPUTS + 2 * step;
            for half in 0..2 {
                let input = |at: usize| {
                    let k = at.wrapping_sub(place);
                    if k >= count {
                        return _mm512_setzero_ps();
                    }
                    // SAFETY: the columns have input `k`.
                    unsafe { _mm512_loadu_ps(columns.add(k * stride + half * LANES)) }
                };
                let (a, b) = (input(first), input(first + 1));
                let high = _mm512_permutexvar_epi16(pairs, round(a, b));
                let kept = [
                    _mm512_slli_epi32::<16>(high),
                    _mm512_and_si512(high, high_halves),
                ];
                excepted[half] |= not_finite(kept[0]) | not_finite(kept[1]);
                let (a, b) = (rest(a, kept[0]), rest(b, kept[1]));
                let low = _mm512_permutexvar_epi16(pairs, round(a, b));
                let (highs, lows) = out[half * TILE + step * ROW_BYTES..].split_at_mut(2 * TILE);
                // SAFETY: both slices have a row of a tile, 64 bytes.
                unsafe {
                    _mm512_storeu_si512(highs[..ROW_BYTES].as_mut_ptr().cast(), high);
                    _mm512_storeu_si512(lows[..ROW_BYTES].as_mut_ptr().cast(), low);
                }
            }
        }
    }
    u32::from(excepted[0]) | u32::from(excepted[1]) << LANES
}
