//! AVX-512: one register for a vector. The level with dot products of bf16 differs in those alone.

use super::avx2::{largest_of_eight, sum_of_eight};
use super::sse2::words_and_sum;
use super::{ByteProducts, LANES, Simd};
use core::arch::asm;
use core::arch::x86_64::*;

/// Proof of `avx512f` (and what [`super::super::isa`] asks for beside it), with `BF16` of `avx512bf16`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    /// # Safety
    /// The CPU has every feature that [`super::super::isa`] asks for at this level.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// Sixteen bytes of each fourth row from `first` on.
///
/// # Safety
/// Those of [`Simd::load_rows`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn rows_apart(rows: &[*const u8; LANES], first: usize, at: usize) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe {
        let v = _mm512_castsi128_si512(_mm_loadu_si128(rows[first].add(at).cast()));
        let v = _mm512_inserti32x4::<1>(v, _mm_loadu_si128(rows[first + 4].add(at).cast()));
        let v = _mm512_inserti32x4::<2>(v, _mm_loadu_si128(rows[first + 8].add(at).cast()));
        _mm512_inserti32x4::<3>(v, _mm_loadu_si128(rows[first + 12].add(at).cast()))
    }
}

/// Lanes 0–7 and 8–15.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(v: __m512) -> [__m256; 2] {
    let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v));
    [_mm512_castps512_ps256(v), _mm256_castpd_ps(high)]
}

// SAFETY of every block below: `self` proves that the CPU has AVX-512 F, BW and VNNI (and BF16 where it is
// `Avx512<true>`), which is all that these intrinsics need; loads and stores add the contract of the trait's own unsafe methods.
impl<const BF16: bool> Simd for Avx512<BF16> {
    type V = __m512;
    type I = __m512i;
    const TILE_ROWS: usize = 12;
    const TILE_VECS: usize = 2;
    const DIRECT_ROWS: usize = 12;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn lanes(self, x: [f32; LANES]) -> Self::V {
        // SAFETY: see the impl; the array has 16 elements.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: see the impl; the array has 16 elements.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) };
        out
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn dot_bf16(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        const { assert!(BF16, "only this level has the instruction") };
        // SAFETY: see the impl, and the line above; both types are 512 bits, whatever they mean.
        unsafe {
            let pairs = |v: __m512| core::mem::transmute::<__m512, __m512bh>(v);
            _mm512_dpbf16_ps(c, pairs(a), pairs(b))
        }
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe {
            let lt = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b);
            _mm512_mask_blend_ps(lt, no, yes)
        }
    }
    #[inline(always)]
    fn abs(self, v: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_abs_ps(v) }
    }
    #[inline(always)]
    fn pow2_of_magic(self, v: Self::V) -> Self::V {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(v));
            _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f80_0000)))
        }
    }
    #[inline(always)]
    fn bytes_of_magic(self, v: Self::V) -> ([i32; LANES / 4], i32) {
        // SAFETY: see the impl.
        unsafe { words_and_sum(_mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let [low, high] = halves(v);
            sum_of_eight(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let [low, high] = halves(v);
            largest_of_eight(_mm256_max_ps(high, low))
        }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::V) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        // SAFETY: see the impl.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<NEAREST>(v)) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V {
        // SAFETY: see the impl.
        unsafe {
            // As with AVX2: an f16 with the same fields is 2^-8 of the value.
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(codes, magnitude));
            let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            let half = _mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), sign);
            let half = _mm256_or_si256(half, nan);
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        }
    }
    #[inline(always)]
    unsafe fn load_small_e4m3(self, p: *const u8) -> Self::V {
        // SAFETY: see the impl.
        unsafe {
            // As with AVX2.
            let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let fields = _mm256_set1_epi16(0xbf80_u16 as i16);
            _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16::<7>(codes), fields))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        // SAFETY: see the impl.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [Self::V; 2] {
        // SAFETY: see the impl.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
                _mm512_castsi512_ps(_mm512_and_si512(pairs, high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const u8) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut u8, v: Self::I) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_rows(self, rows: &[*const u8; LANES], at: usize) -> [Self::I; 4] {
        // SAFETY: see the impl.
        unsafe {
            // Quarters of a register transpose four rows that follow one another.
            let [a, b, c, d] = [
                rows_apart(rows, 0, at),
                rows_apart(rows, 1, at),
                rows_apart(rows, 2, at),
                rows_apart(rows, 3, at),
            ];
            let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
            let (ab2, cd2) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab, cd),
                _mm512_unpackhi_epi64(ab, cd),
                _mm512_unpacklo_epi64(ab2, cd2),
                _mm512_unpackhi_epi64(ab2, cd2),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_low_halves(self, p: *mut u16, v: Self::I) {
        // SAFETY: see the impl.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(v)) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: Self::I) {
        // SAFETY: see the impl.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    fn shr_i(self, v: Self::I, n: usize) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_srl_epi32(v, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    fn shl_i(self, v: Self::I, n: usize) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_sll_epi32(v, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: Self::I) -> Self::I {
        // SAFETY: see the impl; the table has 16 bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, bytes)
        }
    }
    #[inline(always)]
    fn to_f32(self, v: Self::I) -> Self::V {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const i8) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    fn shl_pairs(self, v: Self::I, n: usize) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_sll_epi16(v, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    fn dot_pairs(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_madd_epi16(a, b) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch is a hint and faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

// SAFETY of every block below: as above.
impl ByteProducts for Avx512<false> {
    type Products = __m512i;
    const BYTE_ROWS: usize = 8;
    /// Sums are of 32 bits, and there are registers for them beside the totals.
    const ROOMY: bool = true;
    /// `vpdpbusd` takes unsigned weights.
    const WIDE_FLIP: u8 = 0x80;

    #[inline(always)]
    fn again(self, mut p: *const i32) -> *const i32 {
        // SAFETY: there is no instruction.
        unsafe { asm!("/* {0} */", inout(reg) p, options(readonly, nostack, preserves_flags)) };
        p
    }
    #[inline(always)]
    fn no_products(self) -> Self::Products {
        self.splat_i(0)
    }
    #[inline(always)]
    fn narrow(self, sums: Self::Products, w: Self::I, x: i32) -> Self::Products {
        // SAFETY: see the impl.
        unsafe { _mm512_dpbusd_epi32(sums, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    fn collect(self, sums: Self::Products, total: Self::I) -> Self::I {
        self.add_i(sums, total)
    }
    #[inline(always)]
    fn factor<const SECOND: usize>(self, pairs: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let first = _mm512_sll_epi32(pairs, _mm_cvtsi32_si128(16 * (1 - SECOND as i32)));
            _mm512_srai_epi32::<16>(first)
        }
    }
    #[inline(always)]
    fn collect_scaled(self, sums: Self::Products, factor: Self::I, total: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { _mm512_add_epi32(_mm512_mullo_epi32(sums, factor), total) }
    }
    #[inline(always)]
    fn wide(self, total: Self::I, w: Self::I, x: i32) -> Self::I {
        self.narrow(total, w, x)
    }
}
