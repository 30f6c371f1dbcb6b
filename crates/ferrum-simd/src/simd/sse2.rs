//! SSE2, which every x86-64 processor has: four registers for a vector.
//!
//! What SSE2 has no instruction for, and takes many, is a function of its own: inlined into all kernels it
//! would be most of their code.

use super::{ByteProducts, LANES, Simd};
use core::arch::x86_64::*;

/// Needs nothing that an x86-64 processor may lack.
#[derive(Clone, Copy)]
pub(crate) struct Sse2;

/// Lanes 0–3, 4–7, 8–11 and 12–15.
type V = [__m128; 4];

/// Lanes 0–3, 4–7, 8–11 and 12–15.
type I = [__m128i; 4];

/// An operation on each register of some vectors.
macro_rules! each {
    ($op:expr; $($v:expr),*) => {
        [($op)($($v[0]),*), ($op)($($v[1]),*), ($op)($($v[2]),*), ($op)($($v[3]),*)]
    };
}

/// `a · b + c` of two lanes, as f64 rounded to odd: products are exact, and what the sum loses is kept in its
/// last bit. Rounded to f32, that is what the exact value would be (Boldo and Melquiond, "Emulation of a FMA
/// and correctly rounded sums", 2008).
#[inline]
#[target_feature(enable = "sse2")]
fn fma_two(a: __m128d, b: __m128d, c: __m128d) -> __m128d {
    let product = _mm_mul_pd(a, b);
    let sum = _mm_add_pd(product, c);
    // Knuth's two-sum: NaN where the sum is not finite.
    let rest = _mm_sub_pd(sum, product);
    let lost = _mm_add_pd(
        _mm_sub_pd(product, _mm_sub_pd(sum, rest)),
        _mm_sub_pd(c, rest),
    );
    let zero = _mm_setzero_pd();
    let inexact = _mm_or_pd(_mm_cmplt_pd(lost, zero), _mm_cmpgt_pd(lost, zero));
    let (bits, one) = (_mm_castpd_si128(sum), _mm_set1_epi64x(1));
    let even = _mm_sub_epi64(_mm_and_si128(bits, one), one);
    // The odd neighbour on the side of what was lost: away from zero where both have one sign.
    let signs = _mm_srai_epi32::<31>(_mm_xor_si128(bits, _mm_castpd_si128(lost)));
    let step = _mm_or_si128(_mm_shuffle_epi32::<0b11_11_01_01>(signs), one);
    let step = _mm_and_si128(step, _mm_and_si128(_mm_castpd_si128(inexact), even));
    _mm_castsi128_pd(_mm_add_epi64(bits, step))
}

/// `a · b + c` of four lanes with one rounding.
#[inline(never)]
#[target_feature(enable = "sse2")]
fn fma_four(a: __m128, b: __m128, c: __m128) -> __m128 {
    let low = |v| _mm_cvtps_pd(v);
    let high = |v| _mm_cvtps_pd(_mm_movehl_ps(v, v));
    let first = _mm_cvtpd_ps(fma_two(low(a), low(b), low(c)));
    let second = _mm_cvtpd_ps(fma_two(high(a), high(b), high(c)));
    _mm_movelh_ps(first, second)
}

/// The last steps of [`Simd::sum`], from four lanes.
#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn sum_of_four(v: __m128) -> f32 {
    let pairs = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps::<1>(pairs, pairs)))
}

/// The last steps of [`Simd::largest`], from four lanes.
#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn largest_of_four(v: __m128) -> f32 {
    let pairs = _mm_max_ps(_mm_movehl_ps(v, v), v);
    _mm_cvtss_f32(_mm_max_ss(_mm_shuffle_ps::<1>(pairs, pairs), pairs))
}

/// Sixteen signed bytes as four words, and their sum.
#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn words_and_sum(bytes: __m128i) -> ([i32; LANES / 4], i32) {
    let mut words = [0; LANES / 4];
    // SAFETY: the array has 16 bytes.
    unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), bytes) };
    // SSE2 sums unsigned bytes only: with its top bit flipped, a byte is 128 larger.
    let unsigned = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
    let halves = _mm_sad_epu8(unsigned, _mm_setzero_si128());
    let both = _mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves));
    (words, _mm_cvtsi128_si32(both) - 128 * LANES as i32)
}

/// `table[b]` for each byte `b < 16`.
#[inline(never)]
#[target_feature(enable = "sse2")]
fn lookup(table: &[u8; 16], bytes: I) -> I {
    let mut all = [0u8; 4 * LANES];
    for (i, &part) in bytes.iter().enumerate() {
        // SAFETY: the array has four registers.
        unsafe { _mm_storeu_si128(all.as_mut_ptr().add(16 * i).cast(), part) };
    }
    for byte in &mut all {
        *byte = table[usize::from(*byte & 15)];
    }
    // SAFETY: as above.
    unsafe { Sse2.load_i(all.as_ptr()) }
}

/// Four f32 of lanes that hold an f16 each.
#[inline]
#[target_feature(enable = "sse2")]
fn of_f16(lanes: __m128i) -> __m128 {
    let magnitude = _mm_and_si128(lanes, _mm_set1_epi32(0x7fff));
    let sign = _mm_slli_epi32::<16>(_mm_xor_si128(lanes, magnitude));
    let field = _mm_castsi128_ps(_mm_slli_epi32::<13>(magnitude));
    // The biases differ by 112; subnormals become normal by the product.
    let value = _mm_mul_ps(field, _mm_castsi128_ps(_mm_set1_epi32((112 + 127) << 23)));
    let large = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
    let endless = _mm_and_si128(large, _mm_set1_epi32(0x7f80_0000));
    _mm_or_ps(value, _mm_castsi128_ps(_mm_or_si128(sign, endless)))
}

/// The f16 of four f32, rounded to nearest even, with its sign in the upper half of a lane.
#[inline]
#[target_feature(enable = "sse2")]
fn to_f16(v: __m128) -> __m128i {
    let bits = _mm_castps_si128(v);
    let magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fff_ffff));
    let sign = _mm_srai_epi32::<16>(_mm_xor_si128(bits, magnitude));
    // The biases differ by 112; half of what is cut off, and one more where the last bit is odd.
    let odd = _mm_and_si128(_mm_srli_epi32::<13>(magnitude), _mm_set1_epi32(1));
    let half = _mm_sub_epi32(odd, _mm_set1_epi32((112 << 23) - 0xfff));
    let normal = _mm_srli_epi32::<13>(_mm_add_epi32(magnitude, half));
    // Beside 0.5, the last bit is that of the subnormal numbers.
    let point = _mm_set1_epi32(0x3f00_0000);
    let sum = _mm_add_ps(_mm_castsi128_ps(magnitude), _mm_castsi128_ps(point));
    let subnormal = _mm_sub_epi32(_mm_castps_si128(sum), point);
    let payload = _mm_and_si128(_mm_srli_epi32::<13>(magnitude), _mm_set1_epi32(0x1ff));
    let nan = _mm_or_si128(payload, _mm_set1_epi32(0x7e00));
    let select = |yes, a, b| _mm_or_si128(_mm_and_si128(yes, a), _mm_andnot_si128(yes, b));
    let above = |bound| _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(bound));
    let value = select(above(0x387f_ffff), normal, subnormal);
    let value = select(above(0x477f_efff), _mm_set1_epi32(0x7c00), value);
    _mm_or_si128(sign, select(above(0x7f80_0000), nan, value))
}

/// Four f32 of lanes that hold an FP8 E4M3 each.
#[inline]
#[target_feature(enable = "sse2")]
fn of_e4m3(lanes: __m128i) -> __m128 {
    let magnitude = _mm_and_si128(lanes, _mm_set1_epi32(0x7f));
    let sign = _mm_slli_epi32::<24>(_mm_xor_si128(lanes, magnitude));
    let field = _mm_castsi128_ps(_mm_slli_epi32::<20>(magnitude));
    // As above, with biases that differ by 120.
    let value = _mm_mul_ps(field, _mm_castsi128_ps(_mm_set1_epi32((120 + 127) << 23)));
    let nan = _mm_cmpeq_epi32(magnitude, _mm_set1_epi32(0x7f));
    let nan = _mm_and_si128(nan, _mm_set1_epi32(0x7fc0_0000));
    _mm_or_ps(value, _mm_castsi128_ps(_mm_or_si128(sign, nan)))
}

/// Sixteen unsigned bytes, a lane for each.
///
/// # Safety
/// `p` is valid for reads of 16 bytes.
#[inline]
#[target_feature(enable = "sse2")]
unsafe fn load_bytes(p: *const u8) -> I {
    let zero = _mm_setzero_si128();
    // SAFETY: the caller's contract.
    let bytes = unsafe { _mm_loadu_si128(p.cast()) };
    let (low, high) = (
        _mm_unpacklo_epi8(bytes, zero),
        _mm_unpackhi_epi8(bytes, zero),
    );
    [
        _mm_unpacklo_epi16(low, zero),
        _mm_unpackhi_epi16(low, zero),
        _mm_unpacklo_epi16(high, zero),
        _mm_unpackhi_epi16(high, zero),
    ]
}

/// Sixteen numbers of 16 bits, in the low half of a lane each.
///
/// # Safety
/// `p` is valid for reads of 16 elements; any alignment.
#[inline]
#[target_feature(enable = "sse2")]
unsafe fn load_halves(p: *const u16) -> I {
    let zero = _mm_setzero_si128();
    // SAFETY: the caller's contract.
    let (low, high) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
    [
        _mm_unpacklo_epi16(low, zero),
        _mm_unpackhi_epi16(low, zero),
        _mm_unpacklo_epi16(high, zero),
        _mm_unpackhi_epi16(high, zero),
    ]
}

/// [`Simd::load_rows`] of the four rows from `first` on.
///
/// # Safety
/// Those of [`Simd::load_rows`].
#[inline]
#[target_feature(enable = "sse2")]
unsafe fn load_four_rows(rows: &[*const u8; LANES], first: usize, at: usize) -> [__m128i; 4] {
    // SAFETY: the caller's contract.
    let row = |i: usize| unsafe { _mm_loadu_si128(rows[first + i].add(at).cast()) };
    let (a, b, c, d) = (row(0), row(1), row(2), row(3));
    let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
    let (ab2, cd2) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
    [
        _mm_unpacklo_epi64(ab, cd),
        _mm_unpackhi_epi64(ab, cd),
        _mm_unpacklo_epi64(ab2, cd2),
        _mm_unpackhi_epi64(ab2, cd2),
    ]
}

/// [`Simd::zip_bytes`] of four lanes.
#[inline]
#[target_feature(enable = "sse2")]
fn zip_bytes(a: __m128i, b: __m128i) -> [__m128i; 2] {
    let two_lanes = |v| _mm_castsi128_ps(v);
    let (low, high) = (
        two_lanes(_mm_unpacklo_epi8(a, b)),
        two_lanes(_mm_unpackhi_epi8(a, b)),
    );
    [
        _mm_castps_si128(_mm_shuffle_ps::<0b10_00_10_00>(low, high)),
        _mm_castps_si128(_mm_shuffle_ps::<0b11_01_11_01>(low, high)),
    ]
}

/// The low 32 bits of the products of four lanes.
#[inline]
#[target_feature(enable = "sse2")]
fn mul_i(a: __m128i, b: __m128i) -> __m128i {
    let even = _mm_mul_epu32(a, b);
    let odd = _mm_mul_epu32(_mm_srli_epi64::<32>(a), _mm_srli_epi64::<32>(b));
    let low = |v| _mm_shuffle_epi32::<0b00_00_10_00>(v);
    _mm_unpacklo_epi32(low(even), low(odd))
}

/// The signed bytes of even places, and those of odd ones, as i16.
#[inline]
#[target_feature(enable = "sse2")]
fn signed_bytes(v: __m128i) -> [__m128i; 2] {
    let even = _mm_srai_epi16::<8>(_mm_slli_epi16::<8>(v));
    [even, _mm_srai_epi16::<8>(v)]
}

/// `total` and the products of numbers of even and of odd places, four to a lane.
#[inline]
#[target_feature(enable = "sse2")]
fn add_products(total: __m128i, w: [__m128i; 2], x: [__m128i; 2]) -> __m128i {
    let sums = _mm_add_epi32(_mm_madd_epi16(w[0], x[0]), _mm_madd_epi16(w[1], x[1]));
    _mm_add_epi32(total, sums)
}

// SAFETY of every block below: every x86-64 processor has SSE2, which is all that these intrinsics need; loads
// and stores add the contract of the trait's own unsafe methods.
impl Simd for Sse2 {
    type V = V;
    type I = I;
    const TILE_ROWS: usize = 2;
    const TILE_VECS: usize = 1;
    const DIRECT_ROWS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: see the impl.
        unsafe { [_mm_set1_ps(x); 4] }
    }
    #[inline(always)]
    fn lanes(self, x: [f32; LANES]) -> V {
        // SAFETY: the array has 16 elements.
        unsafe { self.load(x.as_ptr()) }
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
        // SAFETY: see the impl.
        unsafe { each!(_mm_add_ps; a, b) }
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { each!(_mm_sub_ps; a, b) }
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { each!(_mm_mul_ps; a, b) }
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { each!(_mm_div_ps; a, b) }
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // SAFETY: see the impl.
        unsafe { each!(fma_four; a, b, c) }
    }
    #[inline(always)]
    fn dot_bf16(self, a: V, b: V, c: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let high = _mm_castsi128_ps(_mm_set1_epi32(0xffff_0000_u32 as i32));
            let highs = |v: V| each!(|v| _mm_and_ps(v, high); v);
            let lows =
                |v: V| each!(|v| _mm_castsi128_ps(_mm_slli_epi32::<16>(_mm_castps_si128(v))); v);
            let sum = self.fma(highs(a), highs(b), c);
            self.fma(lows(a), lows(b), sum)
        }
    }
    #[inline(always)]
    fn fnma(self, a: V, b: V, c: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let sign = _mm_set1_ps(-0.0);
            let less = each!(|a| _mm_xor_ps(sign, a); a);
            self.fma(less, b, c)
        }
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { each!(_mm_max_ps; a, b) }
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        // SAFETY: see the impl.
        unsafe { each!(_mm_min_ps; a, b) }
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let select = |a, b, yes, no| {
                let less = _mm_cmplt_ps(a, b);
                _mm_or_ps(_mm_and_ps(less, yes), _mm_andnot_ps(less, no))
            };
            each!(select; a, b, yes, no)
        }
    }
    #[inline(always)]
    fn abs(self, v: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let sign = _mm_set1_ps(-0.0);
            each!(|v| _mm_andnot_ps(sign, v); v)
        }
    }
    #[inline(always)]
    fn pow2_of_magic(self, v: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let one = _mm_set1_epi32(0x3f80_0000);
            let power = |v| {
                let exponent = _mm_slli_epi32::<23>(_mm_castps_si128(v));
                _mm_castsi128_ps(_mm_add_epi32(exponent, one))
            };
            each!(power; v)
        }
    }
    #[inline(always)]
    fn bytes_of_magic(self, v: V) -> ([i32; LANES / 4], i32) {
        // SAFETY: see the impl.
        unsafe {
            // The low byte alone, as at every level: others hold garbage where there was no number.
            let low = |v| _mm_srai_epi32::<24>(_mm_slli_epi32::<24>(_mm_castps_si128(v)));
            let [a, b, c, d] = each!(low; v);
            words_and_sum(_mm_packs_epi16(
                _mm_packs_epi32(a, b),
                _mm_packs_epi32(c, d),
            ))
        }
    }
    #[inline(always)]
    fn sum(self, [a, b, c, d]: V) -> f32 {
        // SAFETY: see the impl.
        unsafe { sum_of_four(_mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d))) }
    }
    #[inline(always)]
    fn largest(self, [a, b, c, d]: V) -> f32 {
        // SAFETY: see the impl.
        unsafe { largest_of_four(_mm_max_ps(_mm_max_ps(d, b), _mm_max_ps(c, a))) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: see the impl.
        unsafe {
            let load = |i: usize| _mm_loadu_ps(p.add(4 * i));
            [load(0), load(1), load(2), load(3)]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: see the impl.
        unsafe {
            let lanes = load_halves(p);
            each!(of_f16; lanes)
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: V) {
        // SAFETY: see the impl.
        unsafe {
            // Their sign is that of the lane, so packing changes none.
            let [a, b, c, d] = each!(to_f16; v);
            _mm_storeu_si128(p.cast(), _mm_packs_epi32(a, b));
            _mm_storeu_si128(p.add(8).cast(), _mm_packs_epi32(c, d));
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> V {
        // SAFETY: see the impl.
        unsafe {
            let lanes = load_bytes(p);
            each!(of_e4m3; lanes)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        // SAFETY: see the impl.
        unsafe {
            let lanes = load_halves(p);
            each!(|v| _mm_castsi128_ps(_mm_slli_epi32::<16>(v)); lanes)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [V; 2] {
        // SAFETY: see the impl.
        unsafe {
            let pairs = self.load_i(p.cast());
            let high = _mm_set1_epi32(0xffff_0000_u32 as i32);
            [
                each!(|v| _mm_castsi128_ps(_mm_slli_epi32::<16>(v)); pairs),
                each!(|v| _mm_castsi128_ps(_mm_and_si128(v, high)); pairs),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        // SAFETY: see the impl.
        unsafe {
            for (i, part) in v.into_iter().enumerate() {
                _mm_storeu_ps(p.add(4 * i), part);
            }
        }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const u8) -> I {
        // SAFETY: see the impl.
        unsafe {
            let load = |i: usize| _mm_loadu_si128(p.add(16 * i).cast());
            [load(0), load(1), load(2), load(3)]
        }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut u8, v: I) {
        // SAFETY: see the impl.
        unsafe {
            for (i, part) in v.into_iter().enumerate() {
                _mm_storeu_si128(p.add(16 * i).cast(), part);
            }
        }
    }
    #[inline(always)]
    unsafe fn load_rows(self, rows: &[*const u8; LANES], at: usize) -> [I; 4] {
        // SAFETY: see the impl.
        unsafe {
            let four = |first| load_four_rows(rows, first, at);
            let (a, b, c, d) = (four(0), four(4), four(8), four(12));
            let word = |w: usize| [a[w], b[w], c[w], d[w]];
            [word(0), word(1), word(2), word(3)]
        }
    }
    #[inline(always)]
    unsafe fn store_low_halves(self, p: *mut u16, v: I) {
        // SAFETY: see the impl.
        unsafe {
            // Packing saturates: with the sign of its low half a lane stays as it is.
            let [a, b, c, d] = each!(|v| _mm_srai_epi32::<16>(_mm_slli_epi32::<16>(v)); v);
            _mm_storeu_si128(p.cast(), _mm_packs_epi32(a, b));
            _mm_storeu_si128(p.add(8).cast(), _mm_packs_epi32(c, d));
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: I) {
        // SAFETY: see the impl.
        unsafe {
            let [a, b, c, d] = self.and_i(v, self.splat_i(0xff));
            let bytes = _mm_packus_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> V {
        // SAFETY: see the impl.
        unsafe {
            let bytes = load_bytes(p.cast());
            self.to_f32(each!(|v| _mm_srai_epi32::<24>(_mm_slli_epi32::<24>(v)); bytes))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> V {
        // SAFETY: see the impl.
        unsafe { self.to_f32(load_bytes(p)) }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        // SAFETY: see the impl.
        unsafe { [_mm_set1_epi32(x); 4] }
    }
    #[inline(always)]
    fn add_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { each!(_mm_add_epi32; a, b) }
    }
    #[inline(always)]
    fn and_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { each!(_mm_and_si128; a, b) }
    }
    #[inline(always)]
    fn or_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { each!(_mm_or_si128; a, b) }
    }
    #[inline(always)]
    fn xor_i(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { each!(_mm_xor_si128; a, b) }
    }
    #[inline(always)]
    fn shr_i(self, v: I, n: usize) -> I {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            each!(|v| _mm_srl_epi32(v, n); v)
        }
    }
    #[inline(always)]
    fn shl_i(self, v: I, n: usize) -> I {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            each!(|v| _mm_sll_epi32(v, n); v)
        }
    }
    #[inline(always)]
    fn zip_bytes(self, a: I, b: I) -> [I; 2] {
        // SAFETY: see the impl.
        unsafe {
            let zipped = each!(zip_bytes; a, b);
            [
                each!(|v: [__m128i; 2]| v[0]; zipped),
                each!(|v: [__m128i; 2]| v[1]; zipped),
            ]
        }
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: I) -> I {
        // SAFETY: see the impl.
        unsafe { lookup(&table, bytes) }
    }
    #[inline(always)]
    fn to_f32(self, v: I) -> V {
        // SAFETY: see the impl.
        unsafe { each!(_mm_cvtepi32_ps; v) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const i8) -> I {
        // SAFETY: see the impl.
        unsafe {
            let load = |i: usize| _mm_loadu_si128(p.add(16 * i).cast());
            let (a, b) = (load(0), load(1));
            // Each byte above itself, moved down with its sign.
            let low = |v| _mm_srai_epi16::<8>(_mm_unpacklo_epi8(v, v));
            let high = |v| _mm_srai_epi16::<8>(_mm_unpackhi_epi8(v, v));
            [low(a), high(a), low(b), high(b)]
        }
    }
    #[inline(always)]
    fn shl_pairs(self, v: I, n: usize) -> I {
        // SAFETY: see the impl.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            each!(|v| _mm_sll_epi16(v, n); v)
        }
    }
    #[inline(always)]
    fn dot_pairs(self, a: I, b: I) -> I {
        // SAFETY: see the impl.
        unsafe { each!(_mm_madd_epi16; a, b) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: see the impl.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

// SAFETY of every block below: as above.
impl ByteProducts for Sse2 {
    type Products = I;
    const BYTE_ROWS: usize = 2;
    /// They have 32 bits.
    const ROOMY: bool = true;
    const WIDE_FLIP: u8 = 0;

    #[inline(always)]
    fn no_products(self) -> I {
        self.splat_i(0)
    }
    #[inline(always)]
    fn narrow(self, sums: I, w: I, x: i32) -> I {
        // SAFETY: see the impl.
        unsafe {
            let x = signed_bytes(_mm_set1_epi32(x));
            let low = _mm_set1_epi16(0xff);
            let bytes = |w| [_mm_and_si128(w, low), _mm_srli_epi16::<8>(w)];
            each!(|sums, w| add_products(sums, bytes(w), x); sums, w)
        }
    }
    #[inline(always)]
    fn collect(self, sums: I, total: I) -> I {
        self.add_i(sums, total)
    }
    #[inline(always)]
    fn factor<const SECOND: usize>(self, pairs: I) -> I {
        // SAFETY: see the impl.
        unsafe {
            let moved = self.shl_i(pairs, 16 * (1 - SECOND));
            each!(_mm_srai_epi32::<16>; moved)
        }
    }
    #[inline(always)]
    fn collect_scaled(self, sums: I, factor: I, total: I) -> I {
        // SAFETY: see the impl.
        unsafe { self.add_i(each!(mul_i; sums, factor), total) }
    }
    #[inline(always)]
    fn wide(self, total: I, w: I, x: i32) -> I {
        // SAFETY: see the impl.
        unsafe {
            let x = signed_bytes(_mm_set1_epi32(x));
            each!(|total, w| add_products(total, signed_bytes(w), x); total, w)
        }
    }
}
