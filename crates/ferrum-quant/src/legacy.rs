//! The first generation of ggml blocks: 32 numbers, one scale, sometimes one offset.
//!
//! Source of the layouts: ggml's `block_q4_0` … `block_q8_1`. Four-bit codes lie so that byte `j`
//! holds number `j` in its low half and number `j + 16` in its high half.

use crate::block::{Block, F16Le};
use bytemuck::{Pod, Zeroable};
use ferrum_types::GgufQuantType;

/// Numbers in one block of this family.
pub const LEN: usize = 32;

/// `d · (q − 8)`, q of 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: F16Le,
    /// Two codes a byte.
    pub qs: [u8; 16],
}

/// `d · q + m`, q of 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Scale.
    pub d: F16Le,
    /// Minimum.
    pub m: F16Le,
    /// Two codes a byte.
    pub qs: [u8; 16],
}

/// `d · (q − 16)`, q of 5 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Scale.
    pub d: F16Le,
    /// Fifth bits: bit `i` of the little-endian u32 belongs to number `i`.
    pub qh: [u8; 4],
    /// Low four bits, two a byte.
    pub qs: [u8; 16],
}

/// `d · q + m`, q of 5 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Scale.
    pub d: F16Le,
    /// Minimum.
    pub m: F16Le,
    /// Fifth bits: bit `i` of the little-endian u32 belongs to number `i`.
    pub qh: [u8; 4],
    /// Low four bits, two a byte.
    pub qs: [u8; 16],
}

/// `d · q`, q of 8 bits with sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: F16Le,
    /// Codes.
    pub qs: [i8; 32],
}

/// `d · q`, q of 8 bits with sign; the activation side of `*_1` dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_1 {
    /// Scale.
    pub d: F16Le,
    /// `d · Σ q`, which a dot product with a minimum needs.
    pub s: F16Le,
    /// Codes.
    pub qs: [i8; 32],
}

/// Spreads 4-bit codes: low halves first, then high halves.
#[inline(always)]
pub(crate) fn nibbles(qs: &[u8; 16]) -> [u8; 32] {
    let mut codes = [0; 32];
    for (i, q) in qs.iter().enumerate() {
        codes[i] = q & 0x0f;
        codes[16 + i] = q >> 4;
    }
    codes
}

/// Spreads 5-bit codes from their low halves and the word of fifth bits.
#[inline(always)]
pub(crate) fn five_bits(qh: [u8; 4], qs: &[u8; 16]) -> [u8; 32] {
    let qh = u32::from_le_bytes(qh);
    let mut codes = nibbles(qs);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (((qh >> i) & 1) as u8) << 4;
    }
    codes
}

#[inline(always)]
fn scaled(d: f32, zero: i32, codes: &[u8; 32], out: &mut [f32; 32]) {
    for (out, &q) in out.iter_mut().zip(codes) {
        *out = d * (i32::from(q) - zero) as f32;
    }
}

#[inline(always)]
fn affine(d: f32, m: f32, codes: &[u8; 32], out: &mut [f32; 32]) {
    for (out, &q) in out.iter_mut().zip(codes) {
        *out = d * f32::from(q) + m;
    }
}

impl Block<LEN> for BlockQ4_0 {
    const TYPE: GgufQuantType = GgufQuantType::Q4_0;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        scaled(self.d.to_f32(), 8, &nibbles(&self.qs), out);
    }
}

impl Block<LEN> for BlockQ4_1 {
    const TYPE: GgufQuantType = GgufQuantType::Q4_1;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        affine(self.d.to_f32(), self.m.to_f32(), &nibbles(&self.qs), out);
    }
}

impl Block<LEN> for BlockQ5_0 {
    const TYPE: GgufQuantType = GgufQuantType::Q5_0;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        scaled(self.d.to_f32(), 16, &five_bits(self.qh, &self.qs), out);
    }
}

impl Block<LEN> for BlockQ5_1 {
    const TYPE: GgufQuantType = GgufQuantType::Q5_1;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let codes = five_bits(self.qh, &self.qs);
        affine(self.d.to_f32(), self.m.to_f32(), &codes, out);
    }
}

impl Block<LEN> for BlockQ8_0 {
    const TYPE: GgufQuantType = GgufQuantType::Q8_0;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        for (out, &q) in out.iter_mut().zip(&self.qs) {
            *out = d * f32::from(q);
        }
    }
}

impl Block<LEN> for BlockQ8_1 {
    const TYPE: GgufQuantType = GgufQuantType::Q8_1;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        for (out, &q) in out.iter_mut().zip(&self.qs) {
            *out = d * f32::from(q);
        }
    }
}

/// Gathers the fifth bits of codes.
#[inline(always)]
pub(crate) fn pack_fifth_bits(codes: &[u8; LEN]) -> [u8; 4] {
    let mut bits = [0; 4];
    let (eights, _) = codes.as_chunks::<8>();
    for (i, bits) in bits.iter_mut().enumerate() {
        let fifths = (u64::from_le_bytes(eights[i]) >> 4) & 0x0101_0101_0101_0101;
        // Byte i holds 0 or 1; the product has it at bit 56 + i, and no two terms meet.
        *bits = (fifths.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
    }
    bits
}
