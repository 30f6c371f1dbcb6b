//! AVX2 with FMA and F16C, and possibly AVX-VNNI: two registers for a vector.

use super::sse2::{largest_of_four, sum_of_four, words_and_sum};
use super::{ByteProducts, LANES, Simd};
use core::arch::x86_64::*;

/// Proof of `avx2`, `fma` and `f16c`, and with `VNNI` of `avxvnni`.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C, and with `VNNI` AVX-VNNI.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// `v`, computed here: sums of integers may be taken in any order, and the compiler's own needs so many
/// vectors at once that it stores and reloads most of them.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(mut v: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe {
        core::arch::asm!("/* {0} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags));
    }
    v
}

/// Lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub(crate) struct V(__m256, __m256);

/// Lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub(crate) struct I(__m256i, __m256i);

/// The last steps of [`Simd::sum`], from eight lanes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn sum_of_eight(v: __m256) -> f32 {
    sum_of_four(_mm_add_ps(
        _mm256_castps256_ps128(v),
        _mm256_extractf128_ps::<1>(v),
    ))
}

/// The last steps of [`Simd::largest`], from eight lanes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn largest_of_eight(v: __m256) -> f32 {
    largest_of_four(_mm_max_ps(
        _mm256_extractf128_ps::<1>(v),
        _mm256_castps256_ps128(v),
    ))
}

/// The low half of each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn low_halves(v: I) -> __m256i {
    let mask = _mm256_set1_epi32(0xffff);
    let (low, high) = (_mm256_and_si256(v.0, mask), _mm256_and_si256(v.1, mask));
    // Packing works on halves of a register: bring quarters back in order.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
}

/// [`Simd::load_rows`] of eight rows from `first` on.
///
/// # Safety
/// Those of [`Simd::load_rows`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_eight_rows(rows: &[*const u8; LANES], first: usize, at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        // Halves of a register transpose four rows that follow one another.
        let [a, b, c, d] = [
            two_rows(rows, first, at),
            two_rows(rows, first + 1, at),
            two_rows(rows, first + 2, at),
            two_rows(rows, first + 3, at),
        ];
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ab2, cd2) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ab2, cd2),
            _mm256_unpackhi_epi64(ab2, cd2),
        ]
    }
}

/// Sixteen bytes of row `first` and of the fourth after it.
///
/// # Safety
/// Those of [`Simd::load_rows`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn two_rows(rows: &[*const u8; LANES], first: usize, at: usize) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe {
        let low = _mm_loadu_si128(rows[first].add(at).cast());
        let high = _mm_loadu_si128(rows[first + 4].add(at).cast());
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
    }
}

// SAFETY of every block below: `self` proves that the CPU has AVX2, FMA and F16C, which is all that
// these intrinsics need; loads and stores add the contract of the trait's own unsafe methods.
impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = V;
    type I = I;
    const TILE_ROWS: usize = 6;
    const TILE_VECS: usize = 1;
    const DIRECT_ROWS: usize = 3;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: see the impl.
        let v = unsafe { _mm256_set1_ps(x) };
        V(v, v)
    }
    #[inline(always)]
    fn lanes(self, x: [f32; LANES]) -> V {
        // SAFETY: see the impl; the array has 16 elements.
        unsafe { self.load(x.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, v: V) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: see the impl; the array has 16 elements.
        unsafe { self.store(out.as_mut_ptr(), v) };
        out
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            V(
                _mm256_fmadd_ps(a.0, b.0, c.0),
                _mm256_fmadd_ps(a.1, b.1, c.1),
            )
        }
    }
    #[inline(always)]
    fn fnma(self, a: V, b: V, c: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            V(
                _mm256_fnmadd_ps(a.0, b.0, c.0),
                _mm256_fnmadd_ps(a.1, b.1, c.1),
            )
        }
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let lt0 = _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0);
            let lt1 = _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1);
            V(
                _mm256_blendv_ps(no.0, yes.0, lt0),
                _mm256_blendv_ps(no.1, yes.1, lt1),
            )
        }
    }
    #[inline(always)]
    fn abs(self, v: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            V(_mm256_andnot_ps(sign, v.0), _mm256_andnot_ps(sign, v.1))
        }
    }
    #[inline(always)]
    fn pow2_of_magic(self, v: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let one = _mm256_set1_epi32(0x3f80_0000);
            let a = _mm256_slli_epi32::<23>(_mm256_castps_si256(v.0));
            let b = _mm256_slli_epi32::<23>(_mm256_castps_si256(v.1));
            V(
                _mm256_castsi256_ps(_mm256_add_epi32(a, one)),
                _mm256_castsi256_ps(_mm256_add_epi32(b, one)),
            )
        }
    }
    #[inline(always)]
    fn bytes_of_magic(self, v: V) -> ([i32; LANES / 4], i32) {
        // SAFETY: see the impl.
        unsafe {
            // The low byte alone, as at every level: others hold garbage where there was no number.
            let a = _mm256_slli_epi32::<24>(_mm256_castps_si256(v.0));
            let b = _mm256_slli_epi32::<24>(_mm256_castps_si256(v.1));
            let (a, b) = (_mm256_srai_epi32::<24>(a), _mm256_srai_epi32::<24>(b));
            // Packing works on halves of a register: bring quarters back in order.
            let pairs = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b));
            let bytes = _mm256_packs_epi16(pairs, pairs);
            let bytes = _mm256_permute4x64_epi64::<0b00_00_10_00>(bytes);
            words_and_sum(_mm256_castsi256_si128(bytes))
        }
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        // SAFETY: see the impl.
        unsafe { sum_of_eight(_mm256_add_ps(v.0, v.1)) }
    }
    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        // SAFETY: see the impl.
        unsafe { largest_of_eight(_mm256_max_ps(v.1, v.0)) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: see the impl.
        unsafe {
            V(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: V) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        // SAFETY: see the impl.
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<NEAREST>(v.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<NEAREST>(v.1));
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> V {
        // SAFETY: see the impl.
        unsafe {
            // Exponent and mantissa in the places of an f16 are 2^-8 of the value, since the biases
            // differ by 8; subnormals too.
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(codes, magnitude));
            let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            let half = _mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), sign);
            let half = _mm256_or_si256(half, nan);
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            let high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half));
            let scale = _mm256_set1_ps(256.0);
            V(_mm256_mul_ps(low, scale), _mm256_mul_ps(high, scale))
        }
    }
    #[inline(always)]
    unsafe fn load_small_e4m3(self, p: *const u8) -> V {
        // SAFETY: see the impl.
        unsafe {
            // As above, with the sign above the exponent twice, of which one is taken away.
            let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let fields = _mm256_set1_epi16(0xbf80_u16 as i16);
            let half = _mm256_and_si256(_mm256_slli_epi16::<7>(codes), fields);
            V(
                _mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        // SAFETY: see the impl.
        unsafe {
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            V(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [V; 2] {
        // SAFETY: see the impl.
        unsafe {
            let a = _mm256_loadu_si256(p.cast());
            let b = _mm256_loadu_si256(p.add(8).cast());
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                V(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
                ),
                V(
                    _mm256_castsi256_ps(_mm256_and_si256(a, high)),
                    _mm256_castsi256_ps(_mm256_and_si256(b, high)),
                ),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const u8) -> I {
        // SAFETY: see the impl.
        unsafe {
            I(
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(32).cast()),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut u8, v: I) {
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_si256(p.cast(), v.0);
            _mm256_storeu_si256(p.add(32).cast(), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_rows(self, rows: &[*const u8; LANES], at: usize) -> [I; 4] {
        // SAFETY: see the impl.
        unsafe {
            let low = load_eight_rows(rows, 0, at);
            let high = load_eight_rows(rows, 8, at);
            [
                I(low[0], high[0]),
                I(low[1], high[1]),
                I(low[2], high[2]),
                I(low[3], high[3]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_low_halves(self, p: *mut u16, v: I) {
        // SAFETY: see the impl.
        unsafe { _mm256_storeu_si256(p.cast(), low_halves(v)) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: I) {
        // SAFETY: see the impl.
        unsafe {
            let halves = low_halves(self.and_i(v, self.splat_i(0xff)));
            let high = _mm256_extracti128_si256::<1>(halves);
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), high);
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> V {
        // SAFETY: see the impl.
        unsafe {
            let a = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let b = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            self.to_f32(I(a, b))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> V {
        // SAFETY: see the impl.
        unsafe {
            let a = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            self.to_f32(I(a, b))
        }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        // SAFETY: see the impl.
        let v = unsafe { _mm256_set1_epi32(x) };
        I(v, v)
    }
    #[inline(always)]
    fn add_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { I(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    fn and_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { I(_mm256_and_si256(a.0, b.0), _mm256_and_si256(a.1, b.1)) }
    }
    #[inline(always)]
    fn or_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { I(_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1)) }
    }
    #[inline(always)]
    fn xor_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { I(_mm256_xor_si256(a.0, b.0), _mm256_xor_si256(a.1, b.1)) }
    }
    #[inline(always)]
    fn shr_i(self, v: I, n: usize) -> I {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            I(_mm256_srl_epi32(v.0, n), _mm256_srl_epi32(v.1, n))
        }
    }
    #[inline(always)]
    fn shl_i(self, v: I, n: usize) -> I {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            I(_mm256_sll_epi32(v.0, n), _mm256_sll_epi32(v.1, n))
        }
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: I) -> I {
        // SAFETY: see the impl; the table has 16 bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            I(
                _mm256_shuffle_epi8(table, bytes.0),
                _mm256_shuffle_epi8(table, bytes.1),
            )
        }
    }
    #[inline(always)]
    fn to_f32(self, v: I) -> V {
        // SAFETY: see the impl.
        unsafe { V(_mm256_cvtepi32_ps(v.0), _mm256_cvtepi32_ps(v.1)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const i8) -> I {
        // SAFETY: see the impl.
        unsafe {
            I(
                _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())),
                _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(16).cast())),
            )
        }
    }
    #[inline(always)]
    fn shl_pairs(self, v: I, n: usize) -> I {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            I(_mm256_sll_epi16(v.0, n), _mm256_sll_epi16(v.1, n))
        }
    }
    #[inline(always)]
    fn dot_pairs(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { I(_mm256_madd_epi16(a.0, b.0), _mm256_madd_epi16(a.1, b.1)) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch is a hint and faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

// SAFETY of every block below: as above.
impl ByteProducts for Avx2<false> {
    /// Pairs of sums in 16 bits.
    type Products = I;
    const BYTE_ROWS: usize = 4;
    const ROOMY: bool = false;
    const WIDE_FLIP: u8 = 0;

    #[inline(always)]
    fn no_products(self) -> I {
        self.splat_i(0)
    }
    #[inline(always)]
    fn narrow(self, sums: I, w: I, x: i32) -> I {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_set1_epi32(x);
            I(
                in_order(_mm256_add_epi16(sums.0, _mm256_maddubs_epi16(w.0, x))),
                in_order(_mm256_add_epi16(sums.1, _mm256_maddubs_epi16(w.1, x))),
            )
        }
    }
    #[inline(always)]
    fn collect(self, sums: I, total: I) -> I {
        // SAFETY: see the impl.
        unsafe {
            let one = _mm256_set1_epi16(1);
            let sums = I(
                _mm256_madd_epi16(sums.0, one),
                _mm256_madd_epi16(sums.1, one),
            );
            self.add_i(sums, total)
        }
    }
    /// The number in both places of its pair.
    #[inline(always)]
    fn factor<const SECOND: usize>(self, pairs: I) -> I {
        // SAFETY: see the impl.
        unsafe {
            let (a, b) = (2 * SECOND as i8, 2 * SECOND as i8 + 1);
            let (c, d) = (a + 4, b + 4);
            let places = _mm_setr_epi8(
                a,
                b,
                a,
                b,
                c,
                d,
                c,
                d,
                a + 8,
                b + 8,
                a + 8,
                b + 8,
                c + 8,
                d + 8,
                c + 8,
                d + 8,
            );
            let places = _mm256_broadcastsi128_si256(places);
            I(
                _mm256_shuffle_epi8(pairs.0, places),
                _mm256_shuffle_epi8(pairs.1, places),
            )
        }
    }
    #[inline(always)]
    fn collect_scaled(self, sums: I, factor: I, total: I) -> I {
        let I(low, high) = self.add_i(self.dot_pairs(sums, factor), total);
        // SAFETY: see the impl.
        unsafe { I(in_order(low), in_order(high)) }
    }
    #[inline(always)]
    fn wide(self, total: I, w: I, x: i32) -> I {
        // SAFETY: see the impl.
        unsafe {
            // |w| · (x with w's sign): the first factor fits an unsigned byte, and two products 16 bits.
            let x = _mm256_set1_epi32(x);
            let pairs = |w| _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            let I(low, high) = self.collect(I(pairs(w.0), pairs(w.1)), total);
            I(in_order(low), in_order(high))
        }
    }
}

/// `sums` and the products of unsigned bytes of `w` with signed ones of `x`, four to a lane.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn dot(sums: I, w: I, x: i32) -> I {
    let x = _mm256_set1_epi32(x);
    let low = _mm256_dpbusd_avx_epi32(sums.0, w.0, x);
    let high = _mm256_dpbusd_avx_epi32(sums.1, w.1, x);
    I(in_order(low), in_order(high))
}

// SAFETY of every block below: as above, and `self` proves AVX-VNNI too.
impl ByteProducts for Avx2<true> {
    type Products = I;
    const BYTE_ROWS: usize = 4;
    const ROOMY: bool = false;
    /// `vpdpbusd` takes unsigned weights.
    const WIDE_FLIP: u8 = 0x80;

    #[inline(always)]
    fn no_products(self) -> I {
        self.splat_i(0)
    }
    #[inline(always)]
    fn narrow(self, sums: I, w: I, x: i32) -> I {
        // SAFETY: see the impl.
        unsafe { dot(sums, w, x) }
    }
    #[inline(always)]
    fn collect(self, sums: I, total: I) -> I {
        self.add_i(sums, total)
    }
    #[inline(always)]
    fn factor<const SECOND: usize>(self, pairs: I) -> I {
        let I(low, high) = self.shl_i(pairs, 16 * (1 - SECOND));
        // SAFETY: see the impl.
        unsafe { I(_mm256_srai_epi32::<16>(low), _mm256_srai_epi32::<16>(high)) }
    }
    #[inline(always)]
    fn collect_scaled(self, sums: I, factor: I, total: I) -> I {
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_mullo_epi32(sums.0, factor.0);
            let high = _mm256_mullo_epi32(sums.1, factor.1);
            self.add_i(I(low, high), total)
        }
    }
    #[inline(always)]
    fn wide(self, total: I, w: I, x: i32) -> I {
        self.narrow(total, w, x)
    }
}
