//! Sixteen f32 side by side, at each instruction set.
//!
//! The search gives each of sixteen sub-blocks a lane, so its sums never cross lanes. Every operation is exact
//! lane by lane (IEEE 754, nothing fused), so all sets give the same bits by construction.
//!
//! `ferrum_simd::Simd` is a larger trait of this kind, for products; that crate builds on this one.

use std::ops::{Add, Div, Mul, Sub};

/// Lanes of a vector, at every set.
pub(super) const LANES: usize = 16;

/// Entries of a table that [`Lanes::lookup`] reads.
pub(super) const TABLE: usize = 512;

/// Adding 1.5 · 2²³ rounds to an integer, which the low bits of the mantissa then hold; taking it off again
/// leaves the integer. Good for magnitudes below 2²².
pub(super) const ROUNDING_BIAS: f32 = 12_582_912.0;

/// [`LANES`] numbers.
pub(super) trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// A truth value for each lane.
    type Mask: Copy;

    /// All lanes `value`.
    fn splat(value: f32) -> Self;
    /// Lanes from an array.
    fn load(values: &[f32; LANES]) -> Self;
    /// Lanes to an array.
    fn store(self) -> [f32; LANES];
    /// `if self > other { self } else { other }`: `other` when either is NaN.
    fn max(self, other: Self) -> Self;
    /// `if self < other { self } else { other }`: `other` when either is NaN.
    fn min(self, other: Self) -> Self;
    /// Magnitudes.
    fn abs(self) -> Self;
    /// Square roots.
    fn sqrt(self) -> Self;
    /// `self < other`: false when either is NaN.
    fn less(self, other: Self) -> Self::Mask;
    /// `if mask { yes } else { no }`.
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// Whether any lane is true.
    fn any(mask: Self::Mask) -> bool;
    /// The entry of `table` at the low nine bits of each lane's representation.
    fn lookup(self, table: &[f32; TABLE]) -> Self;
    /// Number `at` of each run.
    ///
    /// # Panics
    /// `at` is not below `N`.
    fn column<const N: usize>(runs: &[[f32; N]; LANES], at: usize) -> Self;

    /// The nearest integers, of two equally near the even one; magnitudes below 2²².
    #[inline(always)]
    fn round(self) -> Self {
        let magic = Self::splat(ROUNDING_BIAS);
        (self + magic) - magic
    }

    /// The integers below or equal, for magnitudes below 2²².
    #[inline(always)]
    fn floor(self) -> Self {
        let near = self.round();
        Self::select(self.less(near), near - Self::splat(1.0), near)
    }

    /// Four integers of each lane, from −128 to 255, as the bytes of a word, the first lowest.
    #[inline(always)]
    fn bytes(numbers: [Self; 4]) -> [u32; LANES] {
        let magic = Self::splat(ROUNDING_BIAS);
        let mut words = [0; LANES];
        for (i, numbers) in numbers.into_iter().enumerate() {
            let numbers = (numbers + magic).store();
            for (lane, word) in words.iter_mut().enumerate() {
                *word |= (numbers[lane].to_bits() & 0xff) << (8 * i);
            }
        }
        words
    }
}

/// Implements the four operators.
macro_rules! operators {
    ($ty:ident, |$a:ident, $b:ident| $($op:ident :: $name:ident = $body:expr;)*) => {
        $(impl $op for $ty {
            type Output = Self;
            #[inline(always)]
            fn $name(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $body
            }
        })*
    };
}

/// An array, for every target.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

operators! { Portable, |a, b|
    Add::add = Portable(std::array::from_fn(|i| a.0[i] + b.0[i]));
    Sub::sub = Portable(std::array::from_fn(|i| a.0[i] - b.0[i]));
    Mul::mul = Portable(std::array::from_fn(|i| a.0[i] * b.0[i]));
    Div::div = Portable(std::array::from_fn(|i| a.0[i] / b.0[i]));
}

impl Lanes for Portable {
    type Mask = [bool; LANES];

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }
    #[inline(always)]
    fn load(values: &[f32; LANES]) -> Self {
        Portable(*values)
    }
    #[inline(always)]
    fn store(self) -> [f32; LANES] {
        self.0
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self::select(other.less(self), self, other)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self::select(self.less(other), self, other)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Portable(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        Portable(self.0.map(f32::sqrt))
    }
    #[inline(always)]
    fn less(self, other: Self) -> Self::Mask {
        std::array::from_fn(|i| self.0[i] < other.0[i])
    }
    #[inline(always)]
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        Portable(std::array::from_fn(|i| {
            if mask[i] { yes.0[i] } else { no.0[i] }
        }))
    }
    #[inline(always)]
    fn any(mask: Self::Mask) -> bool {
        mask.contains(&true)
    }
    #[inline(always)]
    fn lookup(self, table: &[f32; TABLE]) -> Self {
        Portable(self.0.map(|v| table[v.to_bits() as usize % TABLE]))
    }
    #[inline(always)]
    fn column<const N: usize>(runs: &[[f32; N]; LANES], at: usize) -> Self {
        Portable(std::array::from_fn(|lane| runs[lane][at]))
    }
}

/// A function that is written once for all instruction sets. `run` is inlined into a function that enables the set; so
/// must be all that it calls with vectors.
pub(super) trait SimdKernel {
    /// Does it.
    fn run<V: Lanes>(self);
}

/// An instruction set that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InstructionSet(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// The fastest.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx512f") {
            return InstructionSet(Kind::Avx512);
        }
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return InstructionSet(Kind::Avx2);
        }
        InstructionSet(Kind::Portable)
    }

    /// All that are no faster than the best.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let kinds = [
            Kind::Portable,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512,
        ];
        // A CPU with AVX-512 has AVX2.
        let best = kinds.iter().position(|&kind| kind == Self::best().0);
        let (available, missing) = kinds.split_at(best.map_or(1, |i| i + 1));
        for kind in missing {
            ferrum_test_support::skip(format_args!("this machine has no {kind:?}"));
        }
        available.iter().copied().map(InstructionSet).collect()
    }

    /// Runs the kernel with it.
    pub(super) fn run<K: SimdKernel>(self, kernel: K) {
        match self.0 {
            Kind::Portable => kernel.run::<Portable>(),
            // SAFETY: there is such a value only where the CPU has AVX2, which is all that the function enables.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { x86::run_avx2(kernel) },
            // SAFETY: likewise for AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { x86::run_avx512(kernel) },
        }
    }
}

/// The sets of x86-64.
///
/// Values of these types are made and used only under [`run_avx2`] and [`run_avx512`], which are called only where
/// the CPU has the set. "See the module" in arguments of safety means this.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Add, Div, LANES, Lanes, Mul, SimdKernel, Sub, TABLE};
    use core::arch::x86_64::*;

    /// Two registers of AVX2: lanes 0–7 and 8–15.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256, __m256);

    /// A register of AVX-512 F.
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(__m512);

    #[target_feature(enable = "avx2")]
    pub(super) fn run_avx2<K: SimdKernel>(kernel: K) {
        kernel.run::<Avx2>();
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn run_avx512<K: SimdKernel>(kernel: K) {
        kernel.run::<Avx512>();
    }

    /// An intrinsic of AVX2 for both registers.
    macro_rules! both {
        ($f:ident, $a:expr $(, $b:expr)?) => {{
            // SAFETY: the CPU has AVX2; see the module.
            unsafe { Avx2($f($a.0 $(, $b.0)?), $f($a.1 $(, $b.1)?)) }
        }};
    }

    /// An intrinsic of AVX-512 F.
    macro_rules! one {
        ($f:ident, $($a:expr),*) => {{
            // SAFETY: the CPU has AVX-512 F; see the module.
            unsafe { Avx512($f($($a.0),*)) }
        }};
    }

    operators! { Avx2, |a, b|
        Add::add = both!(_mm256_add_ps, a, b);
        Sub::sub = both!(_mm256_sub_ps, a, b);
        Mul::mul = both!(_mm256_mul_ps, a, b);
        Div::div = both!(_mm256_div_ps, a, b);
    }

    impl Lanes for Avx2 {
        type Mask = Avx2;

        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: the CPU has AVX2; see the module.
            let v = unsafe { _mm256_set1_ps(value) };
            Avx2(v, v)
        }
        #[inline(always)]
        fn load(values: &[f32; LANES]) -> Self {
            let p = values.as_ptr();
            // SAFETY: as above; the array has sixteen numbers.
            unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        fn store(self) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            let p = out.as_mut_ptr();
            // SAFETY: as above; the array has sixteen numbers.
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
            out
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            both!(_mm256_max_ps, self, other)
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            both!(_mm256_min_ps, self, other)
        }
        #[inline(always)]
        fn abs(self) -> Self {
            both!(_mm256_andnot_ps, Self::splat(-0.0), self)
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            both!(_mm256_sqrt_ps, self)
        }
        #[inline(always)]
        fn less(self, other: Self) -> Self {
            // SAFETY: the CPU has AVX2; see the module.
            unsafe {
                Avx2(
                    _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0),
                    _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, other.1),
                )
            }
        }
        #[inline(always)]
        fn select(mask: Self, yes: Self, no: Self) -> Self {
            // SAFETY: the CPU has AVX2; see the module.
            unsafe {
                Avx2(
                    _mm256_blendv_ps(no.0, yes.0, mask.0),
                    _mm256_blendv_ps(no.1, yes.1, mask.1),
                )
            }
        }
        #[inline(always)]
        fn any(mask: Self) -> bool {
            // SAFETY: the CPU has AVX2; see the module.
            unsafe { _mm256_movemask_ps(_mm256_or_ps(mask.0, mask.1)) != 0 }
        }
        #[inline(always)]
        fn lookup(self, table: &[f32; TABLE]) -> Self {
            let p = table.as_ptr();
            // SAFETY: the CPU has AVX2; see the module. The indices are below the table's length.
            unsafe {
                let low = _mm256_set1_epi32(TABLE as i32 - 1);
                let at = (
                    _mm256_and_si256(_mm256_castps_si256(self.0), low),
                    _mm256_and_si256(_mm256_castps_si256(self.1), low),
                );
                Avx2(
                    _mm256_i32gather_ps::<4>(p, at.0),
                    _mm256_i32gather_ps::<4>(p, at.1),
                )
            }
        }
        #[inline(always)]
        fn column<const N: usize>(runs: &[[f32; N]; LANES], at: usize) -> Self {
            assert!(at < N, "number {at} of {N}");
            let p = runs.as_ptr().cast::<f32>();
            // SAFETY: the CPU has AVX2; see the module. Lane `i` reads number `at` of run `i`.
            unsafe {
                let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let run = _mm256_mullo_epi32(lane, _mm256_set1_epi32(N as i32));
                Avx2(
                    _mm256_i32gather_ps::<4>(p.add(at), run),
                    _mm256_i32gather_ps::<4>(p.add(8 * N + at), run),
                )
            }
        }
    }

    operators! { Avx512, |a, b|
        Add::add = one!(_mm512_add_ps, a, b);
        Sub::sub = one!(_mm512_sub_ps, a, b);
        Mul::mul = one!(_mm512_mul_ps, a, b);
        Div::div = one!(_mm512_div_ps, a, b);
    }

    impl Lanes for Avx512 {
        type Mask = __mmask16;

        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: the CPU has AVX-512 F; see the module.
            unsafe { Avx512(_mm512_set1_ps(value)) }
        }
        #[inline(always)]
        fn load(values: &[f32; LANES]) -> Self {
            // SAFETY: as above; the array has sixteen numbers.
            unsafe { Avx512(_mm512_loadu_ps(values.as_ptr())) }
        }
        #[inline(always)]
        fn store(self) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            // SAFETY: as above; the array has sixteen numbers.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) };
            out
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            one!(_mm512_max_ps, self, other)
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            one!(_mm512_min_ps, self, other)
        }
        #[inline(always)]
        fn abs(self) -> Self {
            one!(_mm512_abs_ps, self)
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            one!(_mm512_sqrt_ps, self)
        }
        #[inline(always)]
        fn less(self, other: Self) -> __mmask16 {
            // SAFETY: the CPU has AVX-512 F; see the module.
            unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0) }
        }
        #[inline(always)]
        fn select(mask: __mmask16, yes: Self, no: Self) -> Self {
            // SAFETY: the CPU has AVX-512 F; see the module.
            unsafe { Avx512(_mm512_mask_blend_ps(mask, no.0, yes.0)) }
        }
        #[inline(always)]
        fn any(mask: __mmask16) -> bool {
            mask != 0
        }
        #[inline(always)]
        fn lookup(self, table: &[f32; TABLE]) -> Self {
            // SAFETY: the CPU has AVX-512 F; see the module. The indices are below the table's length.
            unsafe {
                let low = _mm512_set1_epi32(TABLE as i32 - 1);
                let at = _mm512_and_si512(_mm512_castps_si512(self.0), low);
                Avx512(_mm512_i32gather_ps::<4>(at, table.as_ptr()))
            }
        }
        #[inline(always)]
        fn column<const N: usize>(runs: &[[f32; N]; LANES], at: usize) -> Self {
            assert!(at < N, "number {at} of {N}");
            let p = runs.as_ptr().cast::<f32>();
            // SAFETY: the CPU has AVX-512 F; see the module. Lane `i` reads number `at` of run `i`.
            unsafe {
                let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let run = _mm512_mullo_epi32(lane, _mm512_set1_epi32(N as i32));
                Avx512(_mm512_i32gather_ps::<4>(run, p.add(at)))
            }
        }
    }
}
