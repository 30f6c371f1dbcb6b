//! ggml blocks of sixteen features at once, a lane for each, into half a block of a panel.
//!
//! What a block means is said by [`ferrum_quant::unpack`], one number after the other; here is the same for
//! what [`LaneRows`] takes of sixteen blocks, four bytes to a lane. Four numbers that follow one another are a
//! step of a panel, so codes need shifts and masks alone.

use super::format::{
    BitPlanes, ByteCodes, CodeLayout, E8m0Scales, F16Scales, LookupCodes, STEPS, ScaleLayout,
    SuperBlockScales,
};
use crate::panels::{LaneRows, ROW_CHUNK_BYTES, extract_bits};
use crate::simd::{Simd, exchange};
use ferrum_types::GgufQuantType;
use std::marker::PhantomData;

/// Masks of bytes.
const FOUR_BITS: i32 = 0x0f0f_0f0f;
const TWO_BITS: i32 = 0x0303_0303;
const ONE_BIT: i32 = 0x0101_0101;

/// Half a block of a panel, while it is packed.
pub(super) struct HalfBlock<'a, S: Simd, C, F> {
    pub(super) s: S,
    /// The block: a head, and units.
    pub(super) block: &'a mut [u8],
    pub(super) half: usize,
    /// All bits of the features that there are.
    pub(super) present: S::I,
    /// What signed bytes of these are flipped by.
    pub(super) flip: S::I,
    pub(super) formats: PhantomData<(C, F)>,
}

impl<S: Simd, C: CodeLayout, F: ScaleLayout> HalfBlock<'_, S, C, F> {
    /// Stores what [`Scales::put_head`] takes.
    #[inline(always)]
    pub(super) fn head(&mut self, scale: S::I, minimum: S::I) {
        F::put_head(
            self.s,
            &mut self.block[..F::BLOCK_HEADER_BYTES],
            self.half,
            scale,
            minimum,
        );
    }

    /// Stores unit number `u`: its codes, and what [`Scales::put_beside`] takes.
    #[inline(always)]
    pub(super) fn unit(&mut self, u: usize, steps: &[S::I; STEPS], scales: S::I, minimums: S::I) {
        let vectors = C::vectors(self.s, steps, self.flip);
        self.vectors(u, &vectors, scales, minimums);
    }

    /// Stores unit number `u`, whose codes are as [`Codes::put`] takes them.
    #[inline(always)]
    pub(super) fn vectors(
        &mut self,
        u: usize,
        vectors: &[S::I; STEPS],
        scales: S::I,
        minimums: S::I,
    ) {
        let at = F::BLOCK_HEADER_BYTES + u * (F::UNIT_SCALE_BYTES + C::BYTES);
        let (beside, codes) =
            self.block[at..][..F::UNIT_SCALE_BYTES + C::BYTES].split_at_mut(F::UNIT_SCALE_BYTES);
        F::put_beside(self.s, beside, self.half, scales, minimums);
        C::put(self.s, codes, self.half, vectors);
    }

    /// Stores the only unit of a block.
    #[inline(always)]
    fn only(&mut self, scale: S::I, minimum: S::I, steps: &[S::I; STEPS]) {
        self.head(scale, minimum);
        let none = self.s.splat_i(0);
        self.unit(0, steps, none, none);
    }

    /// Six bits in every byte, less 32.
    #[inline(always)]
    fn less_32(&self, v: S::I) -> S::I {
        let s = self.s;
        // The top bit keeps bytes from borrowing of each other.
        let top = s.splat_i(0x8080_8080_u32 as i32);
        let less = s.add_i(s.or_i(v, top), s.splat_i(-0x2020_2020));
        s.and_i(s.xor_i(less, top), self.present)
    }
}

/// A type of blocks that is packed.
pub(super) trait Blocks: Copy + Send + Sync + 'static {
    /// The type.
    const TYPE: GgufQuantType;
    /// How its codes lie in panels.
    type CodeLayout: CodeLayout;
    /// How its scales do.
    type ScaleLayout: ScaleLayout;

    /// Stores the blocks that begin at byte `at` of each row.
    fn put<S: Simd>(
        rows: &LaneRows<'_>,
        at: usize,
        out: HalfBlock<'_, S, Self::CodeLayout, Self::ScaleLayout>,
    );
}

/// Work that is written once for every type of blocks.
pub(super) trait OnBlocks {
    /// What [`run`](Self::run) returns.
    type Output;

    /// Does the work.
    fn run<B: Blocks>(self) -> Self::Output;
}

/// Defines the types that are packed: how they lie in panels, and the function that stores them.
macro_rules! types {
    ($($name:ident: $codes:ty, $scales:ty, $put:ident;)*) => {
        $(
            #[doc = concat!("[`GgufQuantType::", stringify!($name), "`].")]
            #[derive(Clone, Copy)]
            #[allow(non_camel_case_types)]
            pub(super) struct $name;

            impl Blocks for $name {
                const TYPE: GgufQuantType = GgufQuantType::$name;
                type CodeLayout = $codes;
                type ScaleLayout = $scales;

                #[inline(always)]
                fn put<S: Simd>(rows: &LaneRows<'_>, at: usize, out: HalfBlock<'_, S, $codes, $scales>) {
                    $put(rows, at, out);
                }
            }
        )*

        /// Runs `work` with the blocks of `ty`; `None` for a type that is not packed.
        pub(super) fn with_blocks<W: OnBlocks>(ty: GgufQuantType, work: W) -> Option<W::Output> {
            Some(match ty {
                $(GgufQuantType::$name => work.run::<$name>(),)*
                _ => return None,
            })
        }
    };
}
types! {
    Q4_0: BitPlanes<4, 8>, F16Scales<false>, nibbles;
    Q4_1: BitPlanes<4, 0>, F16Scales<true>, nibbles;
    Q5_0: BitPlanes<5, 16>, F16Scales<false>, five_bits;
    Q5_1: BitPlanes<5, 0>, F16Scales<true>, five_bits;
    Q8_0: ByteCodes, F16Scales<false>, bytes;
    IQ4_NL: LookupCodes, F16Scales<false>, nibbles;
    MXFP4: LookupCodes, E8m0Scales, mxfp4;
    IQ4_XS: LookupCodes, SuperBlockScales<1, false>, iq4_xs;
    Q2_K: BitPlanes<2, 0>, SuperBlockScales<2, true>, q2_k;
    Q3_K: BitPlanes<3, 4>, SuperBlockScales<2, false>, q3_k;
    Q4_K: BitPlanes<4, 0>, SuperBlockScales<1, true>, q4_k;
    Q5_K: BitPlanes<5, 0>, SuperBlockScales<1, true>, q5_k;
    Q6_K: BitPlanes<6, 32>, SuperBlockScales<2, false>, q6_k;
}

/// The steps of 32 codes of four bits: those of the low halves of sixteen bytes, then the high ones.
#[inline(always)]
fn of_nibbles<S: Simd>(s: S, words: [S::I; 4]) -> [S::I; STEPS] {
    let mut steps = [s.splat_i(0); STEPS];
    for (t, step) in steps.iter_mut().enumerate() {
        *step = extract_bits(s, words[t % 4], t / 4 * 4, FOUR_BITS);
    }
    steps
}

/// Minimums in f16, which blocks add and panels take off: their signs changed.
#[inline(always)]
fn taken_off<S: Simd, C, F>(out: &HalfBlock<'_, S, C, F>, halves: S::I) -> S::I {
    let s = out.s;
    s.xor_i(halves, s.and_i(out.present, s.splat_i(0x8000)))
}

/// Scale, minimum if there is one, and codes of four bits.
#[inline(always)]
fn nibbles<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    let first = rows.words(s, at)[0];
    let codes = rows.words(s, at + 2 + 2 * F::MINIMUMS as usize);
    let minimum = taken_off(&out, s.shr_i(first, 16));
    out.only(first, minimum, &of_nibbles(s, codes));
}

/// The same with a word of fifth bits before the codes.
#[inline(always)]
fn five_bits<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    let [first, second, _, _] = rows.words(s, at);
    let (codes, fifths) = match F::MINIMUMS {
        true => (8, second),
        false => (6, s.or_i(s.shr_i(first, 16), s.shl_i(second, 16))),
    };
    let mut steps = of_nibbles(s, rows.words(s, at + codes));
    let fifths = by_steps(s, fifths);
    for (t, step) in steps.iter_mut().enumerate() {
        *step = s.or_i(*step, s.shl_i(extract_bits(s, fifths, t, ONE_BIT), 4));
    }
    let minimum = taken_off(&out, s.shr_i(first, 16));
    out.only(first, minimum, &steps);
}

/// A bit for each of 32 numbers: bit `4t + b` of each lane to bit `8b + t`, so that bits `t` of its four bytes
/// are those of step `t`.
#[inline(always)]
fn by_steps<S: Simd>(s: S, v: S::I) -> S::I {
    // The five digits of a bit's number go round by two. Each line exchanges two of them: 4 and 1, 3 and
    // 0, 2 and 1, 1 and 0.
    let v = exchange_within(s, v, 14, 0x0000_cccc);
    let v = exchange_within(s, v, 7, 0x00aa_00aa);
    let v = exchange_within(s, v, 2, 0x0c0c_0c0c);
    exchange_within(s, v, 1, 0x2222_2222)
}

/// Exchanges the bits of `mask` with those `by` above them.
#[inline(always)]
fn exchange_within<S: Simd>(s: S, v: S::I, by: usize, mask: i32) -> S::I {
    let differ = s.and_i(s.xor_i(v, s.shr_i(v, by)), s.splat_i(mask));
    s.xor_i(s.xor_i(v, differ), s.shl_i(differ, by))
}

#[inline(always)]
fn bytes<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    let scale = rows.words(s, at)[0];
    out.only(scale, s.splat_i(0), &rows.eight_words(s, at + 2));
}

#[inline(always)]
fn mxfp4<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    // The scale is half of what the exponent says, and the smallest are 0: one less, if there is one.
    let exponent = s.and_i(rows.words(s, at)[0], s.splat_i(0xff));
    let any = s.shr_i(s.add_i(exponent, s.splat_i(0xff)), 8);
    let less = s.add_i(exponent, s.splat_i(-1));
    let scale = s.add_i(less, s.xor_i(any, s.splat_i(1)));
    out.only(scale, s.splat_i(0), &of_nibbles(s, rows.words(s, at + 1)));
}

#[inline(always)]
fn iq4_xs<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    // f16, a u16 of two high bits for each scale, four low bits for each.
    let [first, low, _, _] = rows.words(s, at);
    out.head(first, s.splat_i(0));
    for u in 0..F::UNITS {
        let high = extract_bits(s, first, 16 + 2 * u, 3);
        let scale = s.or_i(extract_bits(s, low, 4 * u, 0x0f), s.shl_i(high, 4));
        let scale = out.less_32(scale);
        let steps = of_nibbles(s, rows.words(s, at + 8 + u * ROW_CHUNK_BYTES));
        out.unit(u, &steps, scale, s.splat_i(0));
    }
}

/// Parts of `BITS` bits (1, 2 or 4) of eight words of codes, of which each byte has one of each of several units:
/// exchanged such that a byte has parts of one unit, as panels have them.
#[inline(always)]
fn by_units<S: Simd, const BITS: usize>(s: S, mut words: [S::I; STEPS]) -> [S::I; STEPS] {
    // Each time, a digit of the number of a unit changes places with one of the number of a step.
    for (by, mask) in [(1, 0x5555_5555), (2, 0x3333_3333), (4, FOUR_BITS)] {
        // The two parts of a byte are those of steps that are four apart.
        let apart = if BITS == 4 { 4 } else { by / BITS };
        for low in 0..STEPS {
            if by >= BITS && low & apart == 0 {
                let (a, b) = exchange(s, words[low], words[low + apart], by, mask);
                (words[low], words[low + apart]) = (a, b);
            }
        }
    }
    words
}

#[inline(always)]
fn q2_k<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    // Scales (low halves) and minimums (high ones), 64 bytes of codes, two f16.
    let scales = rows.words(s, at);
    let last = rows.words(s, at + 84 - ROW_CHUNK_BYTES)[3];
    out.head(last, s.shr_i(last, 16));
    for c in 0..2 {
        let codes = by_units::<S, 2>(s, rows.eight_words(s, at + 16 + 32 * c));
        for i in 0..4 {
            let (low, high) = (codes[i], codes[4 + i]);
            let vectors = [low, high, high, high, high, high, high, high];
            let u = 4 * c + i;
            let pair = s.shr_i(scales[u / 2], u % 2 * 16);
            let scale = s.and_i(pair, s.splat_i(FOUR_BITS));
            out.vectors(u, &vectors, scale, extract_bits(s, pair, 4, FOUR_BITS));
        }
    }
}

#[inline(always)]
fn q3_k<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    // 32 bytes of third bits, 64 of codes, eight of low bits of scales, four of high ones, an f16.
    let thirds = by_units::<S, 1>(s, rows.eight_words(s, at));
    let [_, low, lows, highs] = rows.words(s, at + 92);
    let lows = [low, lows];
    out.head(
        s.shr_i(rows.words(s, at + 110 - ROW_CHUNK_BYTES)[3], 16),
        s.splat_i(0),
    );
    for c in 0..2 {
        let codes = by_units::<S, 2>(s, rows.eight_words(s, at + 32 + 32 * c));
        for i in 0..4 {
            let u = 4 * c + i;
            let (low, high, ones) = (codes[i], codes[4 + i], thirds[u]);
            let vectors = [low, high, ones, ones, ones, ones, ones, ones];
            // Scales 4g to 4g + 3 are the bytes of a word, two for a unit.
            let g = u / 2;
            let low = extract_bits(s, lows[g % 2], g / 2 * 4, FOUR_BITS);
            let high = s.shl_i(extract_bits(s, highs, 2 * g, TWO_BITS), 4);
            let scales = out.less_32(s.or_i(low, high));
            out.vectors(u, &vectors, s.shr_i(scales, u % 2 * 16), s.splat_i(0));
        }
    }
}

/// The f16 that blocks of Q4_K and Q5_K begin with, and twelve bytes of six-bit scales and minimums (see
/// [`scales_and_minimums`](ferrum_quant::k_quants::scales_and_minimums)): four to a word.
#[inline(always)]
fn k_scales<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    out: &mut HalfBlock<'_, S, C, F>,
) -> ([S::I; 2], [S::I; 2]) {
    let s = out.s;
    let [first, scales, minimums, low] = rows.words(s, at);
    out.head(first, s.shr_i(first, 16));
    let six = s.splat_i(0x3f3f_3f3f);
    let (high, top) = (0x3030_3030, 2);
    let later_scales = s.or_i(
        s.and_i(low, s.splat_i(FOUR_BITS)),
        extract_bits(s, scales, top, high),
    );
    let later_minimums = s.or_i(
        extract_bits(s, low, 4, FOUR_BITS),
        extract_bits(s, minimums, top, high),
    );
    (
        [s.and_i(scales, six), later_scales],
        [s.and_i(minimums, six), later_minimums],
    )
}

#[inline(always)]
fn q4_k<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    let (scales, minimums) = k_scales(rows, at, &mut out);
    for c in 0..F::UNITS / 2 {
        let codes = by_units::<S, 4>(s, rows.eight_words(s, at + 16 + 32 * c));
        for i in 0..2 {
            let fours = |t: usize| codes[4 * i + t];
            let [p, q, r, t] = [fours(0), fours(1), fours(2), fours(3)];
            let vectors = [p, q, r, t, t, t, t, t];
            let u = 2 * c + i;
            let (word, shift) = (u / 4, u % 4 * 8);
            let scale = s.shr_i(scales[word], shift);
            out.vectors(u, &vectors, scale, s.shr_i(minimums[word], shift));
        }
    }
}

#[inline(always)]
fn q5_k<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    let (scales, minimums) = k_scales(rows, at, &mut out);
    let fifths = by_units::<S, 1>(s, rows.eight_words(s, at + 16));
    for c in 0..F::UNITS / 2 {
        let codes = by_units::<S, 4>(s, rows.eight_words(s, at + 48 + 32 * c));
        for i in 0..2 {
            let u = 2 * c + i;
            let fours = |t: usize| codes[4 * i + t];
            let [p, q, r, t] = [fours(0), fours(1), fours(2), fours(3)];
            let e = fifths[u];
            let vectors = [p, q, r, t, e, e, e, e];
            let (word, shift) = (u / 4, u % 4 * 8);
            let scale = s.shr_i(scales[word], shift);
            out.vectors(u, &vectors, scale, s.shr_i(minimums[word], shift));
        }
    }
}

#[inline(always)]
fn q6_k<S: Simd, C: CodeLayout, F: ScaleLayout>(
    rows: &LaneRows<'_>,
    at: usize,
    mut out: HalfBlock<'_, S, C, F>,
) {
    let s = out.s;
    // 128 bytes of low bits, 64 of high ones, sixteen scales, an f16.
    let scales = rows.words(s, at + 192);
    out.head(
        s.shr_i(rows.words(s, at + 210 - ROW_CHUNK_BYTES)[3], 16),
        s.splat_i(0),
    );
    for c in 0..2 {
        let low = [
            rows.eight_words(s, at + 64 * c),
            rows.eight_words(s, at + 64 * c + 32),
        ];
        let high = rows.eight_words(s, at + 128 + 32 * c);
        for i in 0..4 {
            let mut steps = [s.splat_i(0); STEPS];
            for (t, step) in steps.iter_mut().enumerate() {
                let high = s.shl_i(extract_bits(s, high[t], 2 * i, TWO_BITS), 4);
                *step = s.or_i(extract_bits(s, low[i % 2][t], i / 2 * 4, FOUR_BITS), high);
            }
            let u = 4 * c + i;
            let scales = s.shr_i(scales[u / 2], u % 2 * 16);
            out.unit(u, &steps, scales, s.splat_i(0));
        }
    }
}
