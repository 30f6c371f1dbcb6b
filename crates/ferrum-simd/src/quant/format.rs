//! How packed weights lie in memory: codes of some bits, and their scales beside them.
//!
//! A panel is 32 features; along `k` it is cut into *units* of 32 numbers. In a unit, 32-bit lane `j`
//! of a vector belongs to one feature and holds four consecutive numbers, a *step*; so a product of
//! bytes leaves sums that need no further addition across lanes. Features 0–15 are the first *half*
//! of a panel. Codes of fewer than eight bits share bytes such that a mask and a shift make a step.

use crate::gemm::tile::PANEL;
use crate::math::MAGIC;
use crate::panels::{VECTOR_BYTES, extract_bits, put_low_bytes, put_low_halves, put_vector};
use crate::simd::{LANES, Simd};
use half::f16;

/// Numbers of one feature in a unit.
pub const UNIT: usize = 32;
/// Steps of four numbers in a unit.
pub const STEPS: usize = UNIT / 4;
/// Where the codes of a unit lie.
pub trait CodeLayout: Copy + Send + Sync + 'static {
    /// Bytes of a unit.
    const BYTES: usize;
    /// Vectors of a half of it.
    const VECTORS: usize = Self::BYTES / (2 * VECTOR_BYTES);
    /// Parts that a code is put together from.
    const PARTS: usize;
    /// Whether codes are signed bytes, for [`wide`](crate::simd::ByteProducts::wide); else they are unsigned and below 64.
    const WIDE: bool;
    /// What unsigned codes are too large by: 0 or a power of two.
    const ZERO: i32;
    /// Steps whose products fit the 16 bits of [`narrow`](crate::simd::ByteProducts::narrow); 1 for signed bytes.
    const NARROW_STEPS: usize;

    /// Step `t` of a half.
    ///
    /// # Safety
    /// `unit` is valid for reads of [`BYTES`](Self::BYTES).
    unsafe fn step<S: Simd>(self, s: S, unit: *const u8, half: usize, t: usize) -> S::I;

    /// Codes that may stand for entries of `table` (with the level's flip applied).
    fn of(table: [u8; 16]) -> Self;

    /// The vectors that the codes of a half become, [`VECTORS`](Self::VECTORS) of which are used. `flip` is
    /// [`WIDE_FLIP`](crate::simd::ByteProducts::WIDE_FLIP) of the level that will read them, in every byte.
    fn vectors<S: Simd>(s: S, steps: &[S::I; STEPS], flip: S::I) -> [S::I; STEPS];

    /// Where vector `i` of a half begins.
    fn place(half: usize, i: usize) -> usize;

    /// Stores the vectors of a half.
    #[inline(always)]
    fn put<S: Simd>(s: S, unit: &mut [u8], half: usize, vectors: &[S::I; STEPS]) {
        #[expect(
            clippy::needless_range_loop,
            reason = "with an iterator, vectors go through memory"
        )]
        for i in 0..STEPS {
            if i < Self::VECTORS {
                put_vector(s, unit, Self::place(half, i), vectors[i]);
            }
        }
    }

    /// The code of number `k` of feature `j`, as [`put`](Self::put) stored it.
    fn get(unit: &[u8], j: usize, k: usize, flip: u8) -> u8;
}

#[inline(always)]
fn get_u32(bytes: &[u8], at: usize) -> u32 {
    let b = &bytes[at..at + 4];
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// Codes of `BITS` bits (2, 3, 4, 5 or 6) that are too large by `ZERO`.
#[derive(Clone, Copy)]
pub struct BitPlanes<const BITS: usize, const ZERO: i32>;

impl<const BITS: usize, const ZERO: i32> BitPlanes<BITS, ZERO> {
    /// Bytes of the part with four bits of each code, and of those with two and with one.
    const FOURS: usize = if BITS >= 4 { UNIT * PANEL / 2 } else { 0 };
    const TWOS: usize = if BITS == 6 || BITS < 4 {
        UNIT * PANEL / 4
    } else {
        0
    };
    const ONES: usize = if BITS == 5 || BITS == 3 {
        UNIT * PANEL / 8
    } else {
        0
    };
    /// Where in a code the parts after the first begin.
    const SECOND: usize = if BITS >= 4 { 4 } else { 2 };

    /// Byte, bit and width of the parts of a code, the lowest first.
    #[inline(always)]
    fn parts(j: usize, k: usize) -> impl Iterator<Item = ((usize, usize), usize)> {
        let (half, lane) = (j / LANES, j % LANES);
        let (t, byte) = (k / 4, 4 * lane + k % 4);
        let fours = ((half * 4 + t % 4) * VECTOR_BYTES + byte, t / 4 * 4);
        let twos = (
            Self::FOURS + (half * 2 + t / 4) * VECTOR_BYTES + byte,
            t % 4 * 2,
        );
        let ones = (Self::FOURS + Self::TWOS + half * VECTOR_BYTES + byte, t);
        let all = [
            (Self::FOURS, (fours, 4)),
            (Self::TWOS, (twos, 2)),
            (Self::ONES, (ones, 1)),
        ];
        all.into_iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(_, part)| part)
    }
}

impl<const BITS: usize, const ZERO: i32> CodeLayout for BitPlanes<BITS, ZERO> {
    const BYTES: usize = Self::FOURS + Self::TWOS + Self::ONES;
    const PARTS: usize =
        (Self::FOURS > 0) as usize + (Self::TWOS > 0) as usize + (Self::ONES > 0) as usize;
    const WIDE: bool = false;
    const ZERO: i32 = ZERO;
    const NARROW_STEPS: usize = 128 / (1 << BITS);

    fn of(_: [u8; 16]) -> Self {
        Self
    }

    #[inline(always)]
    unsafe fn step<S: Simd>(self, s: S, unit: *const u8, half: usize, t: usize) -> S::I {
        // SAFETY: all offsets lie inside the unit.
        let load = |offset: usize| unsafe { s.load_i(unit.add(offset)) };
        let part = |v: S::I, bit: usize, mask: i32, to: usize| {
            // One shift, whichever way the bits have to go.
            let moved = if bit >= to {
                s.shr_i(v, bit - to)
            } else {
                s.shl_i(v, to - bit)
            };
            s.and_i(moved, s.splat_i(mask << to))
        };
        let mut code = None;
        let mut add = |v: S::I| code = Some(code.map_or(v, |code| s.or_i(code, v)));
        if Self::FOURS > 0 {
            add(part(
                load((half * 4 + t % 4) * VECTOR_BYTES),
                t / 4 * 4,
                0x0f0f_0f0f,
                0,
            ));
        }
        if Self::TWOS > 0 {
            let to = if BITS == 6 { Self::SECOND } else { 0 };
            let v = load(Self::FOURS + (half * 2 + t / 4) * VECTOR_BYTES);
            add(part(v, t % 4 * 2, 0x0303_0303, to));
        }
        if Self::ONES > 0 {
            let v = load(Self::FOURS + Self::TWOS + half * VECTOR_BYTES);
            add(part(v, t, 0x0101_0101, Self::SECOND));
        }
        code.unwrap_or(s.splat_i(0))
    }

    /// Parts of four bits, of two, and of one.
    #[inline(always)]
    fn vectors<S: Simd>(s: S, steps: &[S::I; STEPS], _: S::I) -> [S::I; STEPS] {
        // Some bits of a step, in the place that `parts` says.
        let part = |t: usize, width: usize, bit: usize| {
            let from = if width == 4 || (width == 2 && BITS < 4) {
                0
            } else {
                Self::SECOND
            };
            let mask = ((1 << width) - 1) * 0x0101_0101;
            s.shl_i(extract_bits(s, steps[t], from, mask), bit)
        };
        let mut vectors = [s.splat_i(0); STEPS];
        let mut count = 0;
        if Self::FOURS > 0 {
            for (t, vector) in vectors.iter_mut().take(4).enumerate() {
                *vector = s.or_i(part(t, 4, 0), part(t + 4, 4, 4));
            }
            count = 4;
        }
        if Self::TWOS > 0 {
            for i in 0..2 {
                let low = s.or_i(part(4 * i, 2, 0), part(4 * i + 1, 2, 2));
                let high = s.or_i(part(4 * i + 2, 2, 4), part(4 * i + 3, 2, 6));
                vectors[count + i] = s.or_i(low, high);
            }
            count += 2;
        }
        if Self::ONES > 0 {
            let mut word = part(0, 1, 0);
            for t in 1..STEPS {
                word = s.or_i(word, part(t, 1, t));
            }
            vectors[count] = word;
        }
        vectors
    }

    #[inline(always)]
    fn place(half: usize, i: usize) -> usize {
        let (fours, twos) = (
            Self::FOURS / (2 * VECTOR_BYTES),
            Self::TWOS / (2 * VECTOR_BYTES),
        );
        if i < fours {
            (half * fours + i) * VECTOR_BYTES
        } else if i < fours + twos {
            Self::FOURS + (half * twos + i - fours) * VECTOR_BYTES
        } else {
            Self::FOURS + Self::TWOS + half * VECTOR_BYTES
        }
    }

    fn get(unit: &[u8], j: usize, k: usize, _: u8) -> u8 {
        let (mut code, mut at) = (0, 0);
        for ((byte, bit), width) in Self::parts(j, k) {
            code |= ((unit[byte] >> bit) & ((1 << width) - 1)) << at;
            at += width;
        }
        code
    }
}

/// Signed bytes.
#[derive(Clone, Copy)]
pub struct ByteCodes;

impl CodeLayout for ByteCodes {
    const BYTES: usize = UNIT * PANEL;
    const PARTS: usize = 1;
    const WIDE: bool = true;
    const ZERO: i32 = 0;
    const NARROW_STEPS: usize = 1;

    fn of(_: [u8; 16]) -> Self {
        Self
    }

    #[inline(always)]
    unsafe fn step<S: Simd>(self, s: S, unit: *const u8, half: usize, t: usize) -> S::I {
        // SAFETY: the caller's contract.
        unsafe { s.load_i(unit.add((half * STEPS + t) * VECTOR_BYTES)) }
    }

    #[inline(always)]
    fn vectors<S: Simd>(s: S, steps: &[S::I; STEPS], flip: S::I) -> [S::I; STEPS] {
        let mut vectors = *steps;
        for v in &mut vectors {
            *v = s.xor_i(*v, flip);
        }
        vectors
    }

    #[inline(always)]
    fn place(half: usize, i: usize) -> usize {
        (half * STEPS + i) * VECTOR_BYTES
    }

    fn get(unit: &[u8], j: usize, k: usize, flip: u8) -> u8 {
        unit[byte_place(j, k)] ^ flip
    }
}

/// Where a byte for itself lies.
fn byte_place(j: usize, k: usize) -> usize {
    (j / LANES * STEPS + k / 4) * VECTOR_BYTES + 4 * (j % LANES) + k % 4
}

type Nibbles = BitPlanes<4, 0>;

/// Four bits that stand for an entry of a table of signed bytes (with the level's flip applied).
#[derive(Clone, Copy)]
pub struct LookupCodes([u8; 16]);

impl CodeLayout for LookupCodes {
    const BYTES: usize = Nibbles::BYTES;
    const PARTS: usize = 1;
    const WIDE: bool = true;
    const ZERO: i32 = 0;
    const NARROW_STEPS: usize = 1;

    fn of(table: [u8; 16]) -> Self {
        Self(table)
    }

    #[inline(always)]
    unsafe fn step<S: Simd>(self, s: S, unit: *const u8, half: usize, t: usize) -> S::I {
        // SAFETY: the caller's contract.
        s.lookup(self.0, unsafe { BitPlanes::<4, 0>.step(s, unit, half, t) })
    }

    #[inline(always)]
    fn vectors<S: Simd>(s: S, steps: &[S::I; STEPS], flip: S::I) -> [S::I; STEPS] {
        Nibbles::vectors(s, steps, flip)
    }

    #[inline(always)]
    fn place(half: usize, i: usize) -> usize {
        Nibbles::place(half, i)
    }

    fn get(unit: &[u8], j: usize, k: usize, flip: u8) -> u8 {
        Nibbles::get(unit, j, k, flip)
    }
}

/// How scales and minimums lie beside the codes.
///
/// Where a unit has one scale for each feature, that is its f32 value. Where each sixteen numbers have
/// one ([`SUBS`](Self::SUBS) of 2), these are integers, and the f32 value is what both share.
pub trait ScaleLayout: Copy + Default + Send + Sync + 'static {
    /// Units that share a head.
    const UNITS: usize;
    /// Bytes before the first unit of a block.
    const BLOCK_HEADER_BYTES: usize;
    /// Bytes before the codes of each unit.
    const UNIT_SCALE_BYTES: usize;
    /// Scales in a unit for each feature: 1, or 2 for sixteen numbers each.
    const SUBS: usize;
    /// Whether there are minimums.
    const MINIMUMS: bool;

    /// Scales of a half.
    ///
    /// # Safety
    /// `head` is valid for reads of `HEAD` bytes, `beside` of `BESIDE`.
    unsafe fn scale<S: Simd>(s: S, head: *const u8, beside: *const u8, half: usize) -> S::V;

    /// Minimums of a half; only where there are some.
    ///
    /// # Safety
    /// As [`scale`](Self::scale).
    unsafe fn minimum<S: Simd>(s: S, head: *const u8, beside: *const u8, half: usize) -> S::V;

    /// Both integer scales of each feature of a half, or, with `MIN`, both minimums; only with
    /// [`SUBS`](Self::SUBS) of 2.
    ///
    /// # Safety
    /// As [`scale`](Self::scale), for `beside`.
    #[inline(always)]
    unsafe fn pairs<S: Simd, const MIN: bool>(s: S, _beside: *const u8, _half: usize) -> S::I {
        s.splat_i(0)
    }

    /// Stores what a block of each feature of a half has: its scale and, where there are
    /// [`MINIMUMS`](Self::MINIMUMS), the scale of those, in the form that is said at each implementation.
    fn put_head<S: Simd>(s: S, head: &mut [u8], half: usize, scale: S::I, minimum: S::I);

    /// Stores the integer scales and minimums of a unit of each feature of a half: a byte of each lane,
    /// or two with [`SUBS`](Self::SUBS) of 2.
    #[inline(always)]
    fn put_beside<S: Simd>(_: S, _: &mut [u8], _half: usize, _scales: S::I, _minimums: S::I) {}

    /// Scale and minimum of number `k` of feature `j`.
    fn get(head: &[u8], beside: &[u8], j: usize, k: usize) -> (f32, f32);
}

/// One f16 scale for each 32 numbers; with `MIN`, an f16 minimum too.
#[derive(Clone, Copy, Default)]
pub struct F16Scales<const MIN: bool>;

fn get_f16(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32()
}

impl<const MIN: bool> ScaleLayout for F16Scales<MIN> {
    const UNITS: usize = 1;
    const BLOCK_HEADER_BYTES: usize = 2 * PANEL * (1 + MIN as usize);
    const UNIT_SCALE_BYTES: usize = 0;
    const SUBS: usize = 1;
    const MINIMUMS: bool = MIN;

    #[inline(always)]
    unsafe fn scale<S: Simd>(s: S, head: *const u8, _: *const u8, half: usize) -> S::V {
        // SAFETY: the head has 32 scales.
        unsafe { s.load_f16(head.cast::<u16>().add(half * LANES)) }
    }

    #[inline(always)]
    unsafe fn minimum<S: Simd>(s: S, head: *const u8, _: *const u8, half: usize) -> S::V {
        // SAFETY: with minimums, the head has 32 of them after the scales.
        unsafe { s.load_f16(head.cast::<u16>().add(PANEL + half * LANES)) }
    }

    /// Both in f16.
    #[inline(always)]
    fn put_head<S: Simd>(s: S, head: &mut [u8], half: usize, scale: S::I, minimum: S::I) {
        put_low_halves(s, head, 2 * LANES * half, scale);
        if MIN {
            put_low_halves(s, head, 2 * (PANEL + LANES * half), minimum);
        }
    }

    fn get(head: &[u8], _: &[u8], j: usize, _: usize) -> (f32, f32) {
        let minimum = if MIN { get_f16(head, PANEL + j) } else { 0.0 };
        (get_f16(head, j), minimum)
    }
}

/// One power of two for each 32 numbers, as its exponent plus 127.
#[derive(Clone, Copy, Default)]
pub struct E8m0Scales;

impl ScaleLayout for E8m0Scales {
    const UNITS: usize = 1;
    const BLOCK_HEADER_BYTES: usize = PANEL;
    const UNIT_SCALE_BYTES: usize = 0;
    const SUBS: usize = 1;
    const MINIMUMS: bool = false;

    #[inline(always)]
    unsafe fn scale<S: Simd>(s: S, head: *const u8, _: *const u8, half: usize) -> S::V {
        // SAFETY: the head has 32 bytes.
        let exponents = unsafe { s.load_u8(head.add(half * LANES)) };
        s.pow2_of_magic(s.add(exponents, s.splat(MAGIC - 127.0)))
    }

    #[inline(always)]
    unsafe fn minimum<S: Simd>(s: S, _: *const u8, _: *const u8, _: usize) -> S::V {
        s.zero()
    }

    /// A scale below the smallest normal number (2^-126) becomes 0: what it adds is below 1e-36.
    ///
    /// The scale as its exponent.
    #[inline(always)]
    fn put_head<S: Simd>(s: S, head: &mut [u8], half: usize, scale: S::I, _: S::I) {
        put_low_bytes(s, head, LANES * half, scale);
    }

    fn get(head: &[u8], _: &[u8], j: usize, _: usize) -> (f32, f32) {
        (f32::from_bits(u32::from(head[j]) << 23), 0.0)
    }
}

/// Blocks of 256 numbers: f32 in the head, and a byte for each unit, or for each half of one
/// (`SUBS` of 2), that multiplies it; with `MIN` the same for minimums.
#[derive(Clone, Copy, Default)]
pub struct SuperBlockScales<const SUBS: usize, const MIN: bool>;

/// Stores the f16 of each lane as f32 from byte `at` on.
#[inline(always)]
fn put_f32<S: Simd>(s: S, out: &mut [u8], at: usize, v: S::I) {
    let (mut halves, out) = ([0u16; LANES], &mut out[at..at + VECTOR_BYTES]);
    // SAFETY: the array has sixteen elements, and so many f32 have room.
    unsafe {
        s.store_low_halves(halves.as_mut_ptr(), v);
        s.store(out.as_mut_ptr().cast(), s.load_f16(halves.as_ptr()));
    }
}

fn get_f32(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(get_u32(bytes, 4 * at))
}

impl<const SUBS: usize, const MIN: bool> ScaleLayout for SuperBlockScales<SUBS, MIN> {
    const UNITS: usize = 256 / UNIT;
    const BLOCK_HEADER_BYTES: usize = 4 * PANEL * (1 + MIN as usize);
    const UNIT_SCALE_BYTES: usize = PANEL * SUBS * (1 + MIN as usize);
    const SUBS: usize = SUBS;
    const MINIMUMS: bool = MIN;

    #[inline(always)]
    unsafe fn scale<S: Simd>(s: S, head: *const u8, beside: *const u8, half: usize) -> S::V {
        let lanes = half * LANES;
        // SAFETY: the head has 32 f32, and each unit SUBS times 32 scales.
        unsafe {
            let d = s.load(head.cast::<f32>().add(lanes));
            if SUBS == 2 {
                return d;
            }
            s.mul(d, s.load_i8(beside.add(lanes).cast()))
        }
    }

    #[inline(always)]
    unsafe fn minimum<S: Simd>(s: S, head: *const u8, beside: *const u8, half: usize) -> S::V {
        let lanes = half * LANES;
        // SAFETY: minimums follow the scales in both places.
        unsafe {
            let d = s.load(head.cast::<f32>().add(PANEL + lanes));
            if SUBS == 2 {
                return d;
            }
            s.mul(d, s.load_u8(beside.add(PANEL + lanes)))
        }
    }

    #[inline(always)]
    unsafe fn pairs<S: Simd, const MINS: bool>(s: S, beside: *const u8, half: usize) -> S::I {
        // Minimums of sixteen numbers have four bits, so they are signed bytes too.
        let at = (MINS as usize * PANEL + half * LANES) * SUBS;
        // SAFETY: with `SUBS` of 2 there are 32 pairs of scales, and of minimums after them.
        unsafe { s.load_pairs(beside.add(at).cast()) }
    }

    /// Both in f16.
    #[inline(always)]
    fn put_head<S: Simd>(s: S, head: &mut [u8], half: usize, scale: S::I, minimum: S::I) {
        put_f32(s, head, VECTOR_BYTES * half, scale);
        if MIN {
            put_f32(s, head, 4 * PANEL + VECTOR_BYTES * half, minimum);
        }
    }

    #[inline(always)]
    fn put_beside<S: Simd>(s: S, beside: &mut [u8], half: usize, scales: S::I, minimums: S::I) {
        let at = SUBS * LANES * half;
        for (at, v) in [(at, scales), (SUBS * PANEL + at, minimums)] {
            match SUBS {
                _ if at >= Self::UNIT_SCALE_BYTES => {}
                2 => put_low_halves(s, beside, at, v),
                _ => put_low_bytes(s, beside, at, v),
            }
        }
    }

    fn get(head: &[u8], beside: &[u8], j: usize, k: usize) -> (f32, f32) {
        let sub = k * SUBS / UNIT;
        let scale = get_f32(head, j) * f32::from(beside[j * SUBS + sub] as i8);
        if !MIN {
            return (scale, 0.0);
        }
        let minimum = get_f32(head, PANEL + j) * f32::from(beside[(PANEL + j) * SUBS + sub]);
        (scale, minimum)
    }
}

/// One f16 scale for each `UNITS` units; with `ZERO`, a signed byte too: what the group's zero point is
/// above the middle of the codes, whose product with the scale is the minimum.
#[derive(Clone, Copy, Default)]
pub struct GroupScales<const UNITS: usize, const ZERO: bool>;

impl<const UNITS: usize, const ZERO: bool> ScaleLayout for GroupScales<UNITS, ZERO> {
    const UNITS: usize = UNITS;
    const BLOCK_HEADER_BYTES: usize = PANEL * (2 + ZERO as usize);
    const UNIT_SCALE_BYTES: usize = 0;
    const SUBS: usize = 1;
    const MINIMUMS: bool = ZERO;

    #[inline(always)]
    unsafe fn scale<S: Simd>(s: S, head: *const u8, _: *const u8, half: usize) -> S::V {
        // SAFETY: the head has 32 scales.
        unsafe { s.load_f16(head.cast::<u16>().add(half * LANES)) }
    }

    #[inline(always)]
    unsafe fn minimum<S: Simd>(s: S, head: *const u8, _: *const u8, half: usize) -> S::V {
        // SAFETY: with zero points, the head has 32 of them after the scales.
        unsafe {
            let scale = s.load_f16(head.cast::<u16>().add(half * LANES));
            // 11 bits times 8 bits: exact.
            s.mul(scale, s.load_i8(head.add(2 * PANEL + half * LANES).cast()))
        }
    }

    /// The scale in f16, and the signed byte.
    #[inline(always)]
    fn put_head<S: Simd>(s: S, head: &mut [u8], half: usize, scale: S::I, minimum: S::I) {
        put_low_halves(s, head, 2 * LANES * half, scale);
        if ZERO {
            put_low_bytes(s, head, 2 * PANEL + LANES * half, minimum);
        }
    }

    fn get(head: &[u8], _: &[u8], j: usize, _: usize) -> (f32, f32) {
        let scale = get_f16(head, j);
        if !ZERO {
            return (scale, 0.0);
        }
        (scale, scale * f32::from(head[2 * PANEL + j] as i8))
    }
}

/// Bytes of a block: a head, and its units.
pub const fn block_bytes<C: CodeLayout, F: ScaleLayout>() -> usize {
    F::BLOCK_HEADER_BYTES + F::UNITS * (F::UNIT_SCALE_BYTES + C::BYTES)
}

/// A generic function of a pair of formats.
pub trait FormatVisitor {
    /// What [`run`](Self::run) returns.
    type Output;

    /// Does the work.
    fn run<C: CodeLayout, F: ScaleLayout>(self, codes: C, scales: F) -> Self::Output;
}
