//! Four-bit floats with shared scales: MXFP4 (OCP microscaling) and NVFP4.
//!
//! Sources: the OCP Microscaling Formats (MX) specification 1.0 for E2M1 and E8M0, NVIDIA's NVFP4
//! description for unsigned E4M3 scales on 16 numbers, ggml's `block_mxfp4` and `block_nvfp4` for
//! the order of the codes. ggml keeps E2M1 values doubled, as small integers, and halves the scale;
//! so does this file, since it makes the arithmetic exact in the same places.

use crate::block::{Block, EncodeBlock, largest_magnitude};
use bytemuck::{Pod, Zeroable};
use ferrum_types::GgufQuantType;

/// Twice the value of each E2M1 code.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 32 E2M1 numbers with one power-of-two scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockMxfp4 {
    /// E8M0 scale: `2^(e − 127)`.
    pub e: u8,
    /// Codes: byte j holds number j (low half) and j + 16 (high half).
    pub qs: [u8; 16],
}

/// 64 E2M1 numbers with an unsigned E4M3 scale for each 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockNvfp4 {
    /// Scales; bit 7 is not used.
    pub d: [u8; 4],
    /// Codes: of each eight bytes, byte j holds number j (low half) and j + 8 (high half).
    pub qs: [u8; 32],
}

/// Half of the E8M0 number `2^(e − 127)`, exact for every code (also for 0 and 1, where it is a
/// subnormal f32). Code 255, which the OCP specification calls NaN, is `2^127` here, as in ggml.
#[inline]
pub fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(match e {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        e => u32::from(e - 1) << 23,
    })
}

/// Half of the unsigned E4M3 number; bit 7 is ignored and the NaN code 0x7f is 0, as in ggml.
#[inline]
pub fn ue4m3_half(x: u8) -> f32 {
    if x == 0x7f {
        return 0.0;
    }
    let (exponent, mantissa) = (u32::from(x >> 3) & 0x0f, u32::from(x & 7));
    if exponent == 0 {
        // mantissa · 2^-9, halved.
        mantissa as f32 * (1.0 / 1024.0)
    } else {
        // (1 + mantissa / 8) · 2^(exponent − 7), halved.
        f32::from_bits(((exponent + 127 - 8) << 23) | (mantissa << 20))
    }
}

/// Decodes codes: low halves to the first half of `out`, high halves to the second.
#[inline(always)]
fn decode_codes(d: f32, qs: &[u8], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(qs.len());
    for ((&q, low), high) in qs.iter().zip(low).zip(high) {
        *low = d * f32::from(E2M1_DOUBLED[usize::from(q & 0x0f)]);
        *high = d * f32::from(E2M1_DOUBLED[usize::from(q >> 4)]);
    }
}

impl Block<32> for BlockMxfp4 {
    const TYPE: GgufQuantType = GgufQuantType::MXFP4;

    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        decode_codes(e8m0_half(self.e), &self.qs, out);
    }
}

impl EncodeBlock<32> for BlockMxfp4 {
    /// The scale puts the largest magnitude into 4 … 8 (6 is the largest code); each number then
    /// takes the nearest code, the lower-numbered one of two equally near.
    fn encode(values: &[f32; 32]) -> Self {
        let largest = largest_magnitude(values);
        let e = if largest > 0.0 {
            (largest.log2().floor() - 2.0 + 127.0) as u8
        } else {
            0
        };
        let d = e8m0_half(e);
        let codes = values.map(|v| nearest_code(d, v));
        let (low, high) = codes.split_at(16);
        let mut qs = [0; 16];
        for ((q, &low), &high) in qs.iter_mut().zip(low).zip(high) {
            *q = low | (high << 4);
        }
        BlockMxfp4 { e, qs }
    }
}

fn nearest_code(d: f32, v: f32) -> u8 {
    // The codes are symmetric, so the search is over magnitudes.
    let (positive, _) = E2M1_DOUBLED.split_at(8);
    let magnitude = v.abs();
    let mut best = (0, f32::INFINITY);
    for (code, &value) in (0..).zip(positive) {
        let error = (d * f32::from(value) - magnitude).abs();
        if error < best.1 {
            best = (code, error);
        }
    }
    // There is a −0, but ggml does not write it.
    if v < 0.0 && best.0 > 0 {
        best.0 | 8
    } else {
        best.0
    }
}

impl Block<64> for BlockNvfp4 {
    const TYPE: GgufQuantType = GgufQuantType::NVFP4;

    #[inline]
    fn decode(&self, out: &mut [f32; 64]) {
        let parts = self
            .qs
            .as_chunks::<8>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<16>().0);
        for (&scale, (qs, out)) in self.d.iter().zip(parts) {
            decode_codes(ue4m3_half(scale), qs, out);
        }
    }
}
