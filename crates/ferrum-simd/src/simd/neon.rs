//! NEON, possibly with dot products of bytes: four registers for a vector. Executed in an emulator
//! only (`tools/emulate`), so it stays simple: mostly one intrinsic to each operation.

use super::{ByteProducts, LANES, Simd};
use core::arch::aarch64::*;
use ferrum_quant::fp8_codec::e4m3_to_f32;

/// Proof of `neon`, which every aarch64 target has, and with `DOT` of `dotprod`.
#[derive(Clone, Copy)]
pub(crate) struct Neon<const DOT: bool>(());

impl<const DOT: bool> Neon<DOT> {
    /// # Safety
    /// The CPU has NEON, and with `DOT` the dot products of Armv8.2.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// Four lanes each.
#[derive(Clone, Copy)]
pub(crate) struct V([float32x4_t; 4]);

/// Four lanes each.
#[derive(Clone, Copy)]
pub(crate) struct I([int32x4_t; 4]);

/// `I` with lane group `i` computed by an expression.
macro_rules! each_i {
    ($i:ident => $e:expr) => {{
        // SAFETY: as in `each`.
        unsafe {
            I([
                {
                    let $i = 0;
                    $e
                },
                {
                    let $i = 1;
                    $e
                },
                {
                    let $i = 2;
                    $e
                },
                {
                    let $i = 3;
                    $e
                },
            ])
        }
    }};
}

/// `V` with lane group `i` computed by an expression.
macro_rules! each {
    ($i:ident => $e:expr) => {{
        // SAFETY: the token that every method takes proves NEON, which is all that the intrinsics in
        // `$e` need; loads add the contract of the trait's own unsafe methods.
        unsafe {
            V([
                { let $i = 0; $e },
                { let $i = 1; $e },
                { let $i = 2; $e },
                { let $i = 3; $e },
            ])
        }
    }};
}

/// Four f16 to f32, exactly and without the half-precision extension: exponent and mantissa are
/// shifted into place, and a multiplication by 2^112 corrects the bias (subnormals included).
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn widen_f16(h: uint16x4_t) -> float32x4_t {
    // SAFETY: the caller has NEON.
    unsafe {
        let w = vmovl_u16(h);
        let sign = vshlq_n_u32::<16>(vandq_u32(w, vdupq_n_u32(0x8000)));
        let rest = vandq_u32(w, vdupq_n_u32(0x7fff));
        let scaled = vmulq_f32(
            vreinterpretq_f32_u32(vshlq_n_u32::<13>(rest)),
            vdupq_n_f32(f32::from_bits(0x7780_0000)),
        );
        let special = vcgeq_u32(rest, vdupq_n_u32(0x7c00));
        let exponent = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
        let bits = vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(scaled), exponent), sign);
        vreinterpretq_f32_u32(bits)
    }
}

/// [`Simd::load_rows`] of four rows from `first` on.
///
/// # Safety
/// Those of [`Simd::load_rows`], and the CPU has NEON.
#[inline(always)]
unsafe fn load_four_rows(rows: &[*const u8; LANES], first: usize, at: usize) -> [int32x4_t; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        let row = |i: usize| vreinterpretq_s32_u8(vld1q_u8(rows[first + i].add(at)));
        let pairs = |a, b| {
            let (low, high) = (vzip1q_s32(a, b), vzip2q_s32(a, b));
            (vreinterpretq_s64_s32(low), vreinterpretq_s64_s32(high))
        };
        let (ab, ab2) = pairs(row(0), row(1));
        let (cd, cd2) = pairs(row(2), row(3));
        [
            vreinterpretq_s32_s64(vzip1q_s64(ab, cd)),
            vreinterpretq_s32_s64(vzip2q_s64(ab, cd)),
            vreinterpretq_s32_s64(vzip1q_s64(ab2, cd2)),
            vreinterpretq_s32_s64(vzip2q_s64(ab2, cd2)),
        ]
    }
}

impl<const DOT: bool> Simd for Neon<DOT> {
    type V = V;
    type I = I;
    const TILE_ROWS: usize = 5;
    const TILE_VECS: usize = 1;
    const DIRECT_ROWS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        each!(_i => vdupq_n_f32(x))
    }
    #[inline(always)]
    fn lanes(self, x: [f32; LANES]) -> V {
        each!(i => vld1q_f32(x.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn to_array(self, v: V) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { self.store(out.as_mut_ptr(), v) };
        out
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(i => vaddq_f32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(i => vsubq_f32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(i => vmulq_f32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(i => vdivq_f32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        each!(i => vfmaq_f32(c.0[i], a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn fnma(self, a: V, b: V, c: V) -> V {
        each!(i => vfmsq_f32(c.0[i], a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each!(i => vbslq_f32(vcgtq_f32(a.0[i], b.0[i]), a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each!(i => vbslq_f32(vcltq_f32(a.0[i], b.0[i]), a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        each!(i => vbslq_f32(vcltq_f32(a.0[i], b.0[i]), yes.0[i], no.0[i]))
    }
    #[inline(always)]
    fn abs(self, v: V) -> V {
        each!(i => vabsq_f32(v.0[i]))
    }
    #[inline(always)]
    fn pow2_of_magic(self, v: V) -> V {
        each!(i => {
            let n = vshlq_n_u32::<23>(vreinterpretq_u32_f32(v.0[i]));
            vreinterpretq_f32_u32(vaddq_u32(n, vdupq_n_u32(0x3f80_0000)))
        })
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        each!(i => vld1q_f32(p.add(4 * i)))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        each!(i => widen_f16(vld1_u16(p.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> V {
        // SAFETY: the caller allows reads of 16 bytes at `p`.
        let codes = unsafe { p.cast::<[u8; LANES]>().read() };
        self.lanes(codes.map(e4m3_to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        each!(i => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * i)))))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [V; 2] {
        [
            each!(i => vreinterpretq_f32_u32(vshlq_n_u32::<16>(vld1q_u32(p.add(4 * i))))),
            each!(i => {
                let high = vandq_u32(vld1q_u32(p.add(4 * i)), vdupq_n_u32(0xffff_0000));
                vreinterpretq_f32_u32(high)
            }),
        ]
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        for (i, lanes) in v.0.into_iter().enumerate() {
            // SAFETY: the caller allows writes of 16 elements at `p`; `self` proves NEON.
            unsafe { vst1q_f32(p.add(4 * i), lanes) };
        }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const u8) -> I {
        each_i!(i => vreinterpretq_s32_u8(vld1q_u8(p.add(16 * i))))
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut u8, v: I) {
        for (i, lanes) in v.0.into_iter().enumerate() {
            // SAFETY: the caller allows writes of 64 bytes at `p`; `self` proves NEON.
            unsafe { vst1q_u8(p.add(16 * i), vreinterpretq_u8_s32(lanes)) };
        }
    }
    #[inline(always)]
    unsafe fn load_rows(self, rows: &[*const u8; LANES], at: usize) -> [I; 4] {
        // SAFETY: the caller allows reads of 16 bytes there; `self` proves NEON.
        unsafe {
            let [a, b, c, d] = [
                load_four_rows(rows, 0, at),
                load_four_rows(rows, 4, at),
                load_four_rows(rows, 8, at),
                load_four_rows(rows, 12, at),
            ];
            [
                I([a[0], b[0], c[0], d[0]]),
                I([a[1], b[1], c[1], d[1]]),
                I([a[2], b[2], c[2], d[2]]),
                I([a[3], b[3], c[3], d[3]]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_low_halves(self, p: *mut u16, v: I) {
        for (i, lanes) in v.0.into_iter().enumerate() {
            // SAFETY: the caller allows writes of 16 elements at `p`; `self` proves NEON.
            unsafe { vst1_u16(p.add(4 * i), vmovn_u32(vreinterpretq_u32_s32(lanes))) };
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: I) {
        for (i, lanes) in v.0.as_chunks::<2>().0.iter().enumerate() {
            // SAFETY: the caller allows writes of 16 bytes at `p`; `self` proves NEON.
            unsafe {
                let low = vmovn_u32(vreinterpretq_u32_s32(lanes[0]));
                let high = vmovn_u32(vreinterpretq_u32_s32(lanes[1]));
                vst1_u8(p.add(8 * i), vmovn_u16(vcombine_u16(low, high)));
            }
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> V {
        // SAFETY: the caller allows reads of 16 bytes at `p`.
        let bytes = unsafe { p.cast::<[i8; LANES]>().read() };
        self.lanes(bytes.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> V {
        // SAFETY: the caller allows reads of 16 bytes at `p`.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read() };
        self.lanes(bytes.map(f32::from))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        each_i!(_i => vdupq_n_s32(x))
    }
    #[inline(always)]
    fn add_i(self, a: I, b: I) -> I {
        each_i!(i => vaddq_s32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn and_i(self, a: I, b: I) -> I {
        each_i!(i => vandq_s32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn or_i(self, a: I, b: I) -> I {
        each_i!(i => vorrq_s32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn xor_i(self, a: I, b: I) -> I {
        each_i!(i => veorq_s32(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn shr_i(self, v: I, n: usize) -> I {
        each_i!(i => {
            let moved = vshlq_u32(vreinterpretq_u32_s32(v.0[i]), vdupq_n_s32(-(n as i32)));
            vreinterpretq_s32_u32(moved)
        })
    }
    #[inline(always)]
    fn shl_i(self, v: I, n: usize) -> I {
        each_i!(i => vshlq_s32(v.0[i], vdupq_n_s32(n as i32)))
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: I) -> I {
        each_i!(i => {
            let table = vld1q_u8(table.as_ptr());
            vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(bytes.0[i])))
        })
    }
    #[inline(always)]
    fn to_f32(self, v: I) -> V {
        each!(i => vcvtq_f32_s32(v.0[i]))
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const i8) -> I {
        each_i!(i => vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p.add(8 * i)))))
    }
    #[inline(always)]
    fn shl_pairs(self, v: I, n: usize) -> I {
        each_i!(i => {
            let pairs = vreinterpretq_s16_s32(v.0[i]);
            vreinterpretq_s32_s16(vshlq_s16(pairs, vdupq_n_s16(n as i16)))
        })
    }
    #[inline(always)]
    fn dot_pairs(self, a: I, b: I) -> I {
        each_i!(i => {
            let (a, b) = (vreinterpretq_s16_s32(a.0[i]), vreinterpretq_s16_s32(b.0[i]));
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            let high = vmull_s16(vget_high_s16(a), vget_high_s16(b));
            vpaddq_s32(low, high)
        })
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}

/// `sum` and the products of the signed bytes of `w` and `x`, four to a lane, in one instruction.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(mut sum: int32x4_t, w: int32x4_t, x: int32x4_t) -> int32x4_t {
    // The intrinsic, `vdotq_s32`, is not stable.
    // SAFETY: one instruction on registers, which the function's features have.
    unsafe {
        core::arch::asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl<const DOT: bool> ByteProducts for Neon<DOT> {
    type Products = I;
    const BYTE_ROWS: usize = if DOT { 4 } else { 3 };
    const ROOMY: bool = false;
    const WIDE_FLIP: u8 = 0;

    #[inline(always)]
    fn no_products(self) -> I {
        self.splat_i(0)
    }
    #[inline(always)]
    fn narrow(self, sums: I, w: I, x: i32) -> I {
        self.wide(sums, w, x)
    }
    #[inline(always)]
    fn collect(self, sums: I, total: I) -> I {
        self.add_i(sums, total)
    }
    #[inline(always)]
    fn factor<const SECOND: usize>(self, pairs: I) -> I {
        let up = 16 * (1 - SECOND as i32);
        each_i!(i => vshrq_n_s32::<16>(vshlq_s32(pairs.0[i], vdupq_n_s32(up))))
    }
    #[inline(always)]
    fn collect_scaled(self, sums: I, factor: I, total: I) -> I {
        each_i!(i => vmlaq_s32(total.0[i], sums.0[i], factor.0[i]))
    }
    #[inline(always)]
    fn wide(self, total: I, w: I, x: i32) -> I {
        each_i!(i => {
            let x = vdupq_n_s32(x);
            if DOT {
                dot(total.0[i], w.0[i], x)
            } else {
                let (w, x) = (vreinterpretq_s8_s32(w.0[i]), vreinterpretq_s8_s32(x));
                let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
                let high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(x)));
                vaddq_s32(total.0[i], vpaddq_s32(low, high))
            }
        })
    }
}
