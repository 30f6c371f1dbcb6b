//! Functions of a vector, lane by lane, and reductions of a row with a fixed order.

use super::simd::{LANES, Simd};

/// `1.5·2^23`: adding it rounds to an integer and leaves that in the low mantissa bits.
pub const MAGIC: f32 = 12_582_912.0;
/// `ln 2` in two parts; the first has so few bits that its products with small integers are exact.
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;

/// `x` as `n·ln 2 + r`, `|r| ≤ ln 2 / 2`: gives `(n + MAGIC, r)`.
#[inline(always)]
fn reduce<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let magic = s.splat(MAGIC);
    let t = s.fma(x, s.splat(std::f32::consts::LOG2_E), magic);
    let n = s.sub(t, magic);
    let r = s.fnma(n, s.splat(LN2_HIGH), x);
    (t, s.fnma(n, s.splat(LN2_LOW), r))
}

/// `(e^r - 1) / r` for `|r| ≤ ln 2 / 2` by its Taylor series; the first term left out is below 2^-27.
#[inline(always)]
fn expm1_over_r<S: Simd>(s: S, r: S::V) -> S::V {
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    p
}

/// `e^x`; 0 below -86.6 (where the result would be close to subnormal), infinity above 88.72.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let low = s.splat(-86.6);
    // The order of arguments keeps NaN.
    let c = s.max(low, s.min(s.splat(89.0), x));
    let (t, r) = reduce(s, c);
    let p = s.fma(r, expm1_over_r(s, r), s.splat(1.0));
    // 2^128 is no f32, so the scale is applied as 2^(n-1) and 2.
    let half = s.pow2_of_magic(s.sub(t, s.splat(1.0)));
    let e = s.mul(s.mul(p, half), s.splat(2.0));
    s.select_lt(x, low, s.zero(), e)
}

/// `tanh x` from `e^2x - 1`, which stays accurate for small `x`.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    // Beyond 10 the result rounds to ±1.
    let c = s.max(s.splat(-10.0), s.min(s.splat(10.0), x));
    let (t, r) = reduce(s, s.add(c, c));
    let q = s.mul(r, expm1_over_r(s, r));
    let scale = s.pow2_of_magic(t);
    let em1 = s.fma(scale, q, s.sub(scale, s.splat(1.0)));
    s.div(em1, s.add(em1, s.splat(2.0)))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.zero(), x))))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.zero(), x));
    s.div(x, s.add(s.splat(1.0), e))
}

/// GELU with tanh, as `x · sigmoid(2u)`: `(1 + tanh u)/2` would cancel for negative `x`.
#[inline(always)]
pub fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    // u = √(2/π) · (x + 0.044715 x³)
    let x2 = s.mul(x, x);
    let inner = s.fma(s.mul(x2, s.splat(0.044_715)), x, x);
    let e = exp(s, s.mul(inner, s.splat(-1.595_769)));
    s.div(x, s.add(s.splat(1.0), e))
}

/// Coefficients of `ln(erfc(z)/t) + z²` in `t = 1/(1 + z/2)`, highest first: a Chebyshev fit on
/// `0.165 ≤ t ≤ 1` (beyond that `e^-z²` is 0) with an error below 1e-8.
const ERFC: [f32; 11] = [
    -0.151_983_3,
    1.031_278_5,
    -2.940_873_8,
    4.466_083,
    -3.769_299_5,
    1.805_016_5,
    -0.770_256_1,
    0.241_952_46,
    0.351_708_26,
    1.001_957_3,
    -1.265_583_6,
];

/// Exact GELU, `x/2 · erfc(-x/√2)`.
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let z = s.mul(s.abs(x), s.splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = s.div(s.splat(1.0), s.fma(z, s.splat(0.5), s.splat(1.0)));
    let mut p = s.splat(ERFC[0]);
    for c in &ERFC[1..] {
        p = s.fma(p, t, s.splat(*c));
    }
    let e = exp(s, s.fnma(z, z, p));
    // erfc(z)/2, the share that is missing from x (positive) or left of it (negative).
    let tail = s.mul(s.mul(e, t), s.splat(0.5));
    let part = s.mul(x, tail);
    s.select_lt(x, s.zero(), part, s.sub(x, part))
}

/// Calls `f(offset, length)` for each vector of a row of `len` elements; the last may be shorter.
#[inline(always)]
pub fn for_vectors(len: usize, mut f: impl FnMut(usize, usize)) {
    let whole = len / LANES * LANES;
    let mut i = 0;
    while i < whole {
        f(i, LANES);
        i += LANES;
    }
    if whole < len {
        f(whole, len - whole);
    }
}

/// A vector of `x` from `at`, zero past the end.
#[inline(always)]
pub fn load_at<S: Simd>(s: S, x: &[f32], at: usize) -> S::V {
    match x.get(at..at + LANES) {
        // SAFETY: the slice has 16 elements.
        Some(x) => unsafe { s.load(x.as_ptr()) },
        None => s.load_part(&x[at.min(x.len())..], 0.0),
    }
}

/// Stores a vector to `out` at `at`, leaving out what is past the end.
#[inline(always)]
pub fn store_at<S: Simd>(s: S, out: &mut [f32], at: usize, v: S::V) {
    match out.get_mut(at..at + LANES) {
        // SAFETY: the slice has 16 elements.
        Some(out) => unsafe { s.store(out.as_mut_ptr(), v) },
        None => {
            let at = at.min(out.len());
            s.store_part(&mut out[at..], v);
        }
    }
}

/// Sum of a function of the vectors of a row; lanes past the end count as zero. Four accumulators
/// hide the latency of addition.
#[inline(always)]
fn sum_of<S: Simd>(s: S, len: usize, mut add: impl FnMut(usize, S::V) -> S::V) -> f32 {
    let mut acc = [s.zero(); 4];
    let mut at = 0;
    while at + 4 * LANES <= len {
        acc[0] = add(at, acc[0]);
        acc[1] = add(at + LANES, acc[1]);
        acc[2] = add(at + 2 * LANES, acc[2]);
        acc[3] = add(at + 3 * LANES, acc[3]);
        at += 4 * LANES;
    }
    while at < len {
        acc[0] = add(at, acc[0]);
        at += LANES;
    }
    s.sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// `Σ x²`.
#[inline(always)]
pub fn sum_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    sum_of(
        s,
        x.len(),
        #[inline(always)]
        |at, acc| {
            let v = load_at(s, x, at);
            s.fma(v, v, acc)
        },
    )
}

/// `Σ x`.
#[inline(always)]
pub fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    sum_of(
        s,
        x.len(),
        #[inline(always)]
        |at, acc| s.add(load_at(s, x, at), acc),
    )
}

/// `Σ (x - mean)²`.
#[inline(always)]
pub fn sum_square_deviations<S: Simd>(s: S, x: &[f32], mean: f32) -> f32 {
    sum_of(
        s,
        x.len(),
        #[inline(always)]
        |at, acc| {
            // Lanes past the end must count as the mean, not as zero.
            let v = match x.get(at..at + LANES) {
                // SAFETY: the slice has 16 elements.
                Some(x) => unsafe { s.load(x.as_ptr()) },
                None => s.load_part(&x[at..], mean),
            };
            let d = s.sub(v, s.splat(mean));
            s.fma(d, d, acc)
        },
    )
}

/// `cap · tanh(x / cap)`.
#[inline(always)]
pub fn softcap<S: Simd>(s: S, x: S::V, cap: f32) -> S::V {
    let cap = s.splat(cap);
    s.mul(cap, tanh(s, s.div(x, cap)))
}
