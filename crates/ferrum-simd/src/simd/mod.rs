//! Sixteen f32 lanes at every instruction-set level.
//!
//! A kernel is written once over [`Simd`], whose vector always has [`LANES`] lanes: one AVX-512
//! register, two of AVX2, four of SSE2 or NEON, or an array. Every operation is exact lane by lane (IEEE 754
//! with a fused multiply-add, no approximations of the hardware's own), and sums across lanes are
//! built in one fixed tree. So a kernel gives the same bits at every level by construction (but for
//! [dot products of bf16](Simd::dot_bf16)).

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub mod scalar;
#[cfg(target_arch = "x86_64")]
pub(super) mod sse2;

use half::f16;

/// Lanes of a vector, at every level.
pub const LANES: usize = 16;

/// Bytes of a cache line, for prefetches.
pub const LINE: usize = 64;

/// Operations on vectors of [`LANES`] lanes. A value is the proof that this CPU has the level.
pub trait Simd: Copy + Send + Sync + 'static {
    /// [`LANES`] f32 lanes.
    type V: Copy;
    /// [`LANES`] i32 lanes, or as many groups of four bytes.
    type I: Copy;
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
    /// `c` and the products of both pairs of bf16 in each lane of `a` and `b`: those of the high halves
    /// first, then the low ones, each with one rounding. Unlike all others, a level's instruction for this
    /// may do it otherwise: take subnormal numbers as zeros and give such for zeros.
    #[inline(always)]
    fn dot_bf16(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let (a, b) = (self.to_array(a), self.to_array(b));
        let mut sums = self.to_array(c);
        for (i, sum) in sums.iter_mut().enumerate() {
            let high = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
            let low = |x: f32| f32::from_bits(x.to_bits() << 16);
            *sum = high(a[i]).mul_add(high(b[i]), *sum);
            *sum = low(a[i]).mul_add(low(b[i]), *sum);
        }
        self.lanes(sums)
    }
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
    /// `2^n` from `n + 1.5·2^23`, `-127 ≤ n ≤ 128`, whose ends give 0 and infinity: the low mantissa bits of
    /// the sum hold `n`.
    fn pow2_of_magic(self, v: Self::V) -> Self::V;

    /// Sixteen integers `-127 ≤ n ≤ 127` from `n + 1.5·2^23`, as bytes, and their sum.
    #[inline(always)]
    fn bytes_of_magic(self, v: Self::V) -> ([i32; LANES / 4], i32) {
        let lanes = self.to_array(v);
        let (mut words, mut sum) = ([0; LANES / 4], 0);
        for (i, lane) in lanes.iter().enumerate() {
            let byte = lane.to_bits() as i8;
            sum += i32::from(byte);
            words[i / 4] |= i32::from(byte as u8) << (i % 4 * 8);
        }
        (words, sum)
    }

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
    /// Sixteen FP8 E4M3 (given as bits), of which none is NaN, as 2^-8 of what they are.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    #[inline(always)]
    unsafe fn load_small_e4m3(self, p: *const u8) -> Self::V {
        // SAFETY: the caller's contract.
        self.mul(unsafe { self.load_e4m3(p) }, self.splat(1.0 / 256.0))
    }
    /// Sixteen bf16 (given as bits), exactly.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Sixteen FP8 E4M3 (given as bits), exactly.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V;
    /// Thirty-two bf16, stored as sixteen u32 with lane `i` of the first vector in the low half and
    /// of the second in the high half: a shift and a mask decode them.
    ///
    /// # Safety
    /// `p` is valid for reads of 16 elements; any alignment.
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [Self::V; 2];
    /// Stores sixteen f32 as f16 (its bits), rounded to nearest even.
    ///
    /// # Safety
    /// `p` is valid for writes of 16 elements; any alignment.
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::V) {
        let lanes = self.to_array(v);
        for (i, lane) in lanes.iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { p.add(i).write_unaligned(f16::from_f32(*lane).to_bits()) };
        }
    }
    /// Stores sixteen f32.
    ///
    /// # Safety
    /// `p` is valid for writes of 16 elements; any alignment.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Sixty-four bytes.
    ///
    /// # Safety
    /// `p` is valid for reads of 64 bytes; any alignment.
    unsafe fn load_i(self, p: *const u8) -> Self::I;
    /// Stores sixty-four bytes.
    ///
    /// # Safety
    /// `p` is valid for writes of 64 bytes; any alignment.
    unsafe fn store_i(self, p: *mut u8, v: Self::I);
    /// Sixteen bytes of each of sixteen rows, from byte `at` of it on: the first four bytes of all rows, a
    /// lane for each, then the next four, and so on.
    ///
    /// # Safety
    /// Each row is valid for reads of `at + 16` bytes; any alignment.
    unsafe fn load_rows(self, rows: &[*const u8; LANES], at: usize) -> [Self::I; 4];
    /// Stores the low half of each lane.
    ///
    /// # Safety
    /// `p` is valid for writes of 16 elements; any alignment.
    unsafe fn store_low_halves(self, p: *mut u16, v: Self::I);
    /// Stores the low byte of each lane.
    ///
    /// # Safety
    /// `p` is valid for writes of 16 bytes.
    unsafe fn store_low_bytes(self, p: *mut u8, v: Self::I);
    /// Sixteen signed bytes as f32.
    ///
    /// # Safety
    /// `p` is valid for reads of 16 bytes.
    unsafe fn load_i8(self, p: *const i8) -> Self::V;
    /// Sixteen unsigned bytes as f32.
    ///
    /// # Safety
    /// `p` is valid for reads of 16 bytes.
    unsafe fn load_u8(self, p: *const u8) -> Self::V;
    /// All lanes `x`.
    fn splat_i(self, x: i32) -> Self::I;
    /// `a + b` of i32 lanes, wrapping.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a & b`.
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a | b`.
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a ^ b`.
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Each 32-bit lane moved `n` bits (below 32) towards the low end.
    fn shr_i(self, v: Self::I, n: usize) -> Self::I;
    /// Each 32-bit lane moved `n` bits (below 32) towards the high end.
    fn shl_i(self, v: Self::I, n: usize) -> Self::I;
    /// Lane by lane, bytes 0 and 1 of `a` each followed by those of `b`, and the same for bytes 2 and 3.
    #[inline(always)]
    fn zip_bytes(self, a: Self::I, b: Self::I) -> [Self::I; 2] {
        let (a, b) = exchange(self, a, b, 8, 0x00ff_00ff);
        let (a, b) = exchange(self, a, b, 16, 0x0000_ffff);
        [a, b]
    }
    /// `table[b]` for each byte `b < 16`.
    fn lookup(self, table: [u8; 16], bytes: Self::I) -> Self::I;
    /// i32 lanes as f32, rounded to nearest even.
    fn to_f32(self, v: Self::I) -> Self::V;

    /// Sixteen pairs of signed bytes, as pairs of i16 in 32 bits.
    ///
    /// # Safety
    /// `p` is valid for reads of 32 bytes.
    unsafe fn load_pairs(self, p: *const i8) -> Self::I;
    /// Each i16 of pairs times `2^n`.
    fn shl_pairs(self, v: Self::I, n: usize) -> Self::I;
    /// Sum of the products of the pairs of `a` and `b`, lane by lane of 32 bits.
    fn dot_pairs(self, a: Self::I, b: Self::I) -> Self::I;

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

    /// Largest lane, by [`max`](Self::max) of the high half and the low one, four times.
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

/// Products of bytes, in which levels differ that are alike in everything else.
pub trait ByteProducts: Simd {
    /// Sums of products of bytes that are not yet sums of four.
    type Products: Copy;
    /// Rows of the register tile of products of bytes.
    const BYTE_ROWS: usize;
    /// Whether sums hold the products of a whole unit, whatever its bytes.
    const ROOMY: bool;
    /// What is added to the weights of [`wide`](Self::wide), as bits that are flipped.
    const WIDE_FLIP: u8;

    /// `p`, without the compiler knowing: what has been read there is read again. For levels whose
    /// products take a number from memory to all lanes for nothing, where keeping so many for a second use
    /// would only fill the stack with them.
    #[inline(always)]
    fn again(self, p: *const i32) -> *const i32 {
        p
    }

    /// No products.
    fn no_products(self) -> Self::Products;
    /// Adds the products of the unsigned bytes of `w` with the four signed bytes of `x`, lane by lane
    /// of 32 bits. The largest byte of `w` times the number of additions since
    /// [`no_products`](Self::no_products) is at most 128, so that 16 bits hold pairs of sums; there is no
    /// limit where they are [`ROOMY`](Self::ROOMY).
    fn narrow(self, sums: Self::Products, w: Self::I, x: i32) -> Self::Products;
    /// `total` and the products of each 32-bit lane.
    fn collect(self, sums: Self::Products, total: Self::I) -> Self::I;
    /// Numbers `SECOND` (0 or 1) of pairs of signed bytes, as [`collect_scaled`](Self::collect_scaled)
    /// takes them.
    fn factor<const SECOND: usize>(self, pairs: Self::I) -> Self::I;
    /// `total` and the products of each 32-bit lane times its factor.
    fn collect_scaled(self, sums: Self::Products, factor: Self::I, total: Self::I) -> Self::I;
    /// `total` and the products of the signed bytes of `w` with the four signed bytes of `x`, none of
    /// which is -128. `w` is given with [`WIDE_FLIP`](Self::WIDE_FLIP) applied; where that is not 0,
    /// `total` grows by 128 times the sum of `x`'s bytes.
    fn wide(self, total: Self::I, w: Self::I, x: i32) -> Self::I;
}

/// Exchanges the bits of `a` that are `by` above those of `mask` with the bits `mask` of `b`.
#[inline(always)]
pub(crate) fn exchange<S: Simd>(s: S, a: S::I, b: S::I, by: usize, mask: i32) -> (S::I, S::I) {
    let differ = s.and_i(s.xor_i(s.shr_i(a, by), b), s.splat_i(mask));
    (s.xor_i(a, s.shl_i(differ, by)), s.xor_i(b, differ))
}
