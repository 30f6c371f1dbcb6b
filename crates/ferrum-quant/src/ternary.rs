//! One bit, one trit and two bits: numbers that are a scale times −1, 0, 1 or 2.
//!
//! Source of the layouts: ggml's `block_tq1_0`, `block_tq2_0`, `block_q1_0` and `block_q2_0`.

use crate::block::{Block, EncodeBlock, F16Le, inverse, largest_magnitude, round_half_away};
use bytemuck::{Pod, Zeroable};
use ferrum_types::GgufQuantType;

/// `d · t`, five trits a byte.
///
/// A byte holds the fraction `v / 3⁵` scaled to 256 and rounded up, where v is the number whose
/// base-3 digits are the trits, the first of them most significant. So trit n is the integer part
/// of `3 · frac(byte · 3ⁿ / 256)`: two multiplications, no division.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTq1_0 {
    /// Bytes 0–31: trit n of byte j is number `32 n + j`. Bytes 32–47: trit n of byte `32 + j` is
    /// number `160 + 16 n + j`.
    pub qs: [u8; 48],
    /// Four trits a byte: trit n of byte j is number `240 + 4 n + j`.
    pub qh: [u8; 4],
    /// Scale.
    pub d: F16Le,
}

/// `d · (q − 1)`, q of 2 bits; 32 bytes hold four runs of 32 numbers, lowest bits first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTq2_0 {
    /// 2-bit codes.
    pub qs: [u8; 64],
    /// Scale.
    pub d: F16Le,
}

/// `d` for a 1 bit, `−d` for a 0 bit; 128 numbers, lowest bit first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ1_0 {
    /// Scale.
    pub d: F16Le,
    /// Signs.
    pub qs: [u8; 16],
}

/// `d · (q − 1)`, q of 2 bits; 64 numbers, four in a byte, lowest bits first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_0 {
    /// Scale.
    pub d: F16Le,
    /// 2-bit codes.
    pub qs: [u8; 16],
}

const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// Trits number n = 0, 1, … of `bytes`, one run of output for each n.
#[inline(always)]
fn unpack_trits(d: f32, bytes: &[u8], out: &mut [f32]) {
    for (out, power) in out.chunks_exact_mut(bytes.len()).zip(POWERS) {
        for (out, &byte) in out.iter_mut().zip(bytes) {
            let fraction = u16::from(byte.wrapping_mul(power));
            *out = d * (i32::from((fraction * 3) >> 8) - 1) as f32;
        }
    }
}

/// The inverse of [`unpack_trits`] for trits 0, 1, 2; missing trits count as 0.
fn pack_trits(trits: &[u8], bytes: &mut [u8]) {
    let runs = bytes.len();
    for (j, byte) in bytes.iter_mut().enumerate() {
        let digits = trits.iter().skip(j).step_by(runs).map(|&t| u16::from(t));
        let value: u16 = digits
            .zip(POWERS.iter().rev())
            .map(|(t, &p)| t * u16::from(p))
            .sum();
        // Rounded up, so that the integer parts taken by the decoder are exact.
        *byte = (value * 256).div_ceil(243) as u8;
    }
}

/// The scale of a block and each number as 0, 1 or 2.
fn trits(values: &[f32; 256]) -> (f32, [u8; 256]) {
    let d = largest_magnitude(values);
    let id = inverse(d);
    // Halves round away from zero, as C's roundf.
    let trit = |v: f32| (round_half_away(v * id).clamp(-1, 1) + 1) as u8;
    (d, values.map(trit))
}

impl Block<256> for BlockTq1_0 {
    const TYPE: GgufQuantType = GgufQuantType::TQ1_0;

    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        let (five, four) = out.split_at_mut(240);
        let (first, second) = five.split_at_mut(160);
        let (qs0, qs1) = self.qs.split_at(32);
        unpack_trits(d, qs0, first);
        unpack_trits(d, qs1, second);
        unpack_trits(d, &self.qh, four);
    }
}

impl EncodeBlock<256> for BlockTq1_0 {
    fn encode(values: &[f32; 256]) -> Self {
        let (d, trits) = trits(values);
        let mut block = BlockTq1_0 {
            qs: [0; 48],
            qh: [0; 4],
            d: F16Le::from_f32(d),
        };
        let (five, four) = trits.split_at(240);
        let (first, second) = five.split_at(160);
        let (qs0, qs1) = block.qs.split_at_mut(32);
        pack_trits(first, qs0);
        pack_trits(second, qs1);
        pack_trits(four, &mut block.qh);
        block
    }
}

impl Block<256> for BlockTq2_0 {
    const TYPE: GgufQuantType = GgufQuantType::TQ2_0;

    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (bytes, shift) = (&self.qs.as_chunks::<32>().0[run / 4], 2 * (run % 4));
            for (out, &q) in out.iter_mut().zip(bytes) {
                *out = d * (i32::from((q >> shift) & 3) - 1) as f32;
            }
        }
    }
}

impl EncodeBlock<256> for BlockTq2_0 {
    fn encode(values: &[f32; 256]) -> Self {
        let (d, trits) = trits(values);
        let mut qs = [0; 64];
        for (run, trits) in trits.as_chunks::<32>().0.iter().enumerate() {
            let bytes = &mut qs.as_chunks_mut::<32>().0[run / 4];
            for (q, &trit) in bytes.iter_mut().zip(trits) {
                *q |= trit << (2 * (run % 4));
            }
        }
        BlockTq2_0 {
            qs,
            d: F16Le::from_f32(d),
        }
    }
}

impl Block<128> for BlockQ1_0 {
    const TYPE: GgufQuantType = GgufQuantType::Q1_0;

    #[inline]
    fn decode(&self, out: &mut [f32; 128]) {
        let d = self.d.to_f32();
        for (out, &byte) in out.as_chunks_mut::<8>().0.iter_mut().zip(&self.qs) {
            for (bit, out) in out.iter_mut().enumerate() {
                *out = if (byte >> bit) & 1 == 1 { d } else { -d };
            }
        }
    }
}

impl Block<64> for BlockQ2_0 {
    const TYPE: GgufQuantType = GgufQuantType::Q2_0;

    #[inline]
    fn decode(&self, out: &mut [f32; 64]) {
        let d = self.d.to_f32();
        for (out, &byte) in out.as_chunks_mut::<4>().0.iter_mut().zip(&self.qs) {
            for (n, out) in out.iter_mut().enumerate() {
                *out = (i32::from((byte >> (2 * n)) & 3) - 1) as f32 * d;
            }
        }
    }
}
