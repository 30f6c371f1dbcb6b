//! Plain Rust: the level of processors for which there is no other, and what all levels mean.

use super::{ByteProducts, LANES, Simd};
use ferrum_quant::fp8_codec::e4m3_to_f32;
use half::{bf16, f16};

/// Needs nothing of the CPU.
#[derive(Clone, Copy)]
pub struct Scalar;

#[inline(always)]
fn each(mut f: impl FnMut(usize) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (i, lane) in out.iter_mut().enumerate() {
        *lane = f(i);
    }
    out
}

#[inline(always)]
fn each_i(mut f: impl FnMut(usize) -> i32) -> [i32; LANES] {
    let mut out = [0; LANES];
    for (i, lane) in out.iter_mut().enumerate() {
        *lane = f(i);
    }
    out
}

/// Two i16 in 32 bits, the first in the low half.
#[inline(always)]
fn pair([low, high]: [i32; 2]) -> i32 {
    (low & 0xffff) | high << 16
}

/// The numbers of a [`pair`].
#[inline(always)]
fn numbers(pair: i32) -> [i32; 2] {
    [i32::from(pair as i16), pair >> 16]
}

impl Simd for Scalar {
    type V = [f32; LANES];
    type I = [i32; LANES];
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
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V {
        // SAFETY: the caller's contract is this read's.
        let codes = unsafe { p.cast::<[u8; LANES]>().read() };
        each(|i| e4m3_to_f32(codes[i]))
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
    unsafe fn load_i(self, p: *const u8) -> Self::I {
        // SAFETY: the caller's contract is this read's.
        let words = unsafe { p.cast::<Self::I>().read_unaligned() };
        each_i(|i| i32::from_le(words[i]))
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut u8, v: Self::I) {
        // SAFETY: the caller's contract is this write's.
        unsafe {
            p.cast::<Self::I>()
                .write_unaligned(each_i(|i| v[i].to_le()))
        }
    }
    #[inline(always)]
    unsafe fn load_rows(self, rows: &[*const u8; LANES], at: usize) -> [Self::I; 4] {
        let mut out = [[0; LANES]; 4];
        for (i, row) in rows.iter().enumerate() {
            // SAFETY: the caller's contract is this read's.
            let words = unsafe { row.add(at).cast::<[i32; 4]>().read_unaligned() };
            for (w, out) in out.iter_mut().enumerate() {
                out[i] = i32::from_le(words[w]);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn store_low_halves(self, p: *mut u16, v: Self::I) {
        let mut halves = [0; LANES];
        for (i, half) in halves.iter_mut().enumerate() {
            *half = v[i] as u16;
        }
        // SAFETY: the caller's contract is this write's.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(halves) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: Self::I) {
        let mut bytes = [0; LANES];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = v[i] as u8;
        }
        // SAFETY: the caller's contract is this write's.
        unsafe { p.cast::<[u8; LANES]>().write(bytes) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::V {
        // SAFETY: the caller's contract is this read's.
        let bytes = unsafe { p.cast::<[i8; LANES]>().read() };
        each(|i| f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::V {
        // SAFETY: the caller's contract is this read's.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read() };
        each(|i| f32::from(bytes[i]))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_i(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_i(|i| a[i] & b[i])
    }
    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_i(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_i(|i| a[i] ^ b[i])
    }
    #[inline(always)]
    fn shr_i(self, v: Self::I, n: usize) -> Self::I {
        each_i(|i| (v[i] as u32 >> n) as i32)
    }
    #[inline(always)]
    fn shl_i(self, v: Self::I, n: usize) -> Self::I {
        each_i(|i| v[i] << n)
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: Self::I) -> Self::I {
        each_i(|i| {
            let found = bytes[i].to_le_bytes().map(|b| table[usize::from(b & 15)]);
            i32::from_le_bytes(found)
        })
    }
    #[inline(always)]
    fn to_f32(self, v: Self::I) -> Self::V {
        each(|i| v[i] as f32)
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const i8) -> Self::I {
        // SAFETY: the caller's contract is this read's.
        let bytes = unsafe { p.cast::<[[i8; 2]; LANES]>().read() };
        each_i(|i| pair(bytes[i].map(i32::from)))
    }
    #[inline(always)]
    fn shl_pairs(self, v: Self::I, n: usize) -> Self::I {
        each_i(|i| pair(numbers(v[i]).map(|x| x << n)))
    }
    #[inline(always)]
    fn dot_pairs(self, a: Self::I, b: Self::I) -> Self::I {
        each_i(|i| {
            let (a, b) = (numbers(a[i]), numbers(b[i]));
            a[0] * b[0] + a[1] * b[1]
        })
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}

impl ByteProducts for Scalar {
    type Products = [i32; LANES];
    const BYTE_ROWS: usize = 2;
    const ROOMY: bool = false;
    const WIDE_FLIP: u8 = 0;

    #[inline(always)]
    fn no_products(self) -> Self::Products {
        [0; LANES]
    }
    #[inline(always)]
    fn narrow(self, sums: Self::Products, w: Self::I, x: i32) -> Self::Products {
        let x = x.to_le_bytes().map(|b| i32::from(b as i8));
        each_i(|i| {
            let w = w[i].to_le_bytes().map(i32::from);
            sums[i] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]
        })
    }
    #[inline(always)]
    fn collect(self, sums: Self::Products, total: Self::I) -> Self::I {
        self.add_i(sums, total)
    }
    #[inline(always)]
    fn factor<const SECOND: usize>(self, pairs: Self::I) -> Self::I {
        each_i(|i| numbers(pairs[i])[SECOND])
    }
    #[inline(always)]
    fn collect_scaled(self, sums: Self::Products, factor: Self::I, total: Self::I) -> Self::I {
        each_i(|i| total[i] + sums[i] * factor[i])
    }
    #[inline(always)]
    fn wide(self, total: Self::I, w: Self::I, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|b| i32::from(b as i8));
        each_i(|i| {
            let w = w[i].to_le_bytes().map(|b| i32::from(b as i8));
            total[i] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]
        })
    }
}
