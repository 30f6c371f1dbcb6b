//! Plain Rust: the level of every machine, and the meaning of the others.

use super::{LANES, Simd};
use half::{bf16, f16};

/// Needs nothing of the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn each(mut f: impl FnMut(usize) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (i, lane) in out.iter_mut().enumerate() {
        *lane = f(i);
    }
    out
}

impl Simd for Scalar {
    type V = [f32; LANES];
    const TILE_ROWS: usize = 4;
    const TILE_VECS: usize = 1;
    const DIRECT_ROWS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn lanes(self, x: [f32; LANES]) -> Self::V {
        x
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        v
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each(|i| (-a[i]).mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        each(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn abs(self, v: Self::V) -> Self::V {
        each(|i| v[i].abs())
    }
    #[inline(always)]
    fn pow2_of_magic(self, v: Self::V) -> Self::V {
        each(|i| f32::from_bits((v[i].to_bits() << 23).wrapping_add(0x3f80_0000)))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the caller's contract is this read's.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        // SAFETY: the caller's contract is this read's.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| f16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        // SAFETY: the caller's contract is this read's.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| bf16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [Self::V; 2] {
        // SAFETY: the caller's contract is this read's.
        let bits = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        [
            each(|i| f32::from_bits(bits[i] << 16)),
            each(|i| f32::from_bits(bits[i] & 0xffff_0000)),
        ]
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller's contract is this write's.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}
