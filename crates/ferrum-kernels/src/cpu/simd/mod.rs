//! Sixteen f32 lanes at every instruction-set level.
//!
//! A kernel is written once over [`Simd`], whose vector always has [`LANES`] lanes: one AVX-512
//! register, two of AVX2, four of NEON, or an array. Every operation is exact lane by lane (IEEE 754
//! with a fused multiply-add, no approximations of the hardware's own), and sums across lanes are
//! built in one fixed tree. So a kernel gives the same bits at every level by construction.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod scalar;

/// Lanes of a vector, at every level.
pub(crate) const LANES: usize = 16;

/// Operations on vectors of [`LANES`] lanes. A value is the proof that this CPU has the level.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// [`LANES`] f32 lanes.
    type V: Copy;
    /// Rows of the register tile that the GEMM kernels use.
    const TILE_ROWS: usize;
    /// Vectors of the register tile: 1 or 2.
    const TILE_VECS: usize;
    /// Rows of a tile whose columns are decoded in registers on the way.
    const DIRECT_ROWS: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Lanes from an array.
    fn lanes(self, x: [f32; LANES]) -> Self::V;
    /// Lanes to an array.
    fn to_array(self, v: Self::V) -> [f32; LANES];
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c` with one rounding.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a · b` with one rounding.
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`: `b` when either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`: `b` when either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { yes } else { no }`.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// `|v|`.
    fn abs(self, v: Self::V) -> Self::V;
    /// `2^n` from `n + 1.5·2^23`, `-126 ≤ n ≤ 127`: the low mantissa bits of the sum hold `n`.
    fn pow2_of_magic(self, v: Self::V) -> Self::V;

    /// Sixteen f32.
    ///
    /// # Safety
    /// `p` is valid for reads of 16 elements; any alignment.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Sixteen f16 (given as bits), exactly.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Sixteen bf16 (given as bits), exactly.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Thirty-two bf16, stored as sixteen u32 with lane `i` of the first vector in the low half and
    /// of the second in the high half: a shift and a mask decode them.
    ///
    /// # Safety
    /// `p` is valid for reads of 16 elements; any alignment.
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [Self::V; 2];
    /// Stores sixteen f32.
    ///
    /// # Safety
    /// `p` is valid for writes of 16 elements; any alignment.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Asks for the cache line at `p`, which need not exist.
    fn prefetch(self, p: *const u8);

    /// All lanes zero.
    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    /// The first lanes from `x` (at most 16), the others `fill`.
    #[inline(always)]
    fn load_part(self, x: &[f32], fill: f32) -> Self::V {
        let mut array = [fill; LANES];
        let n = x.len().min(LANES);
        array[..n].copy_from_slice(&x[..n]);
        self.lanes(array)
    }

    /// The first lanes to `out` (at most 16).
    #[inline(always)]
    fn store_part(self, out: &mut [f32], v: Self::V) {
        let n = out.len().min(LANES);
        out[..n].copy_from_slice(&self.to_array(v)[..n]);
    }

    /// Sum of the lanes: halves added to each other, four times.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut x = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }

    /// Largest lane of a vector without NaN.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let mut x = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] = if x[i + half] > x[i] {
                    x[i + half]
                } else {
                    x[i]
                };
            }
        }
        x[0]
    }
}
