//! The IQ blocks of ggml: short vectors taken from a codebook, or single numbers from a curve.
//!
//! Source of the layouts: ggml's `block_iq1_s` … `block_iq4_xs`; of the codebooks: see
//! `iq_grids.rs`. The codebooks of IQ2 and IQ3 hold magnitudes, their signs are stored beside
//! them; those of IQ1 hold −1, 0 and 1 and are shifted by an eighth.

use crate::block::{Block, F16Le};
use crate::iq_grids;
use bytemuck::{Pod, Zeroable};
use ferrum_types::GgufQuantType;

/// Numbers in one block of this family, except [`BlockIq4Nl`].
pub const LEN: usize = 256;

/// The sixteen numbers of IQ4_NL and IQ4_XS.
pub const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// 1.56 bits: 32 numbers share a 3-bit scale and the sign of the shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq1S {
    /// Scale.
    pub d: F16Le,
    /// Low eight bits of the codebook indices.
    pub qs: [u8; 32],
    /// For 32 numbers, a u16: four times three high index bits, the scale (bits 12–14), and
    /// whether the shift is negative (bit 15).
    pub qh: [[u8; 2]; 8],
}

/// 1.75 bits: 16 numbers share a 3-bit scale, 8 the sign of the shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq1M {
    /// Low eight bits of the codebook indices.
    pub qs: [u8; 32],
    /// For each index four bits: three high index bits and the sign of the shift.
    pub qh: [u8; 16],
    /// Four u16: each holds four 3-bit scales and, in its upper four bits, a quarter of the f16
    /// block scale, lowest quarter first.
    pub scales: [[u8; 2]; 4],
}

/// 2.06 bits: 32 numbers share a 4-bit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xxs {
    /// Scale.
    pub d: F16Le,
    /// For 32 numbers: four codebook indices, then a u32 of four 7-bit sign words and the scale.
    pub qs: [[u8; 8]; 8],
}

/// 2.31 bits: 16 numbers share a 4-bit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xs {
    /// Scale.
    pub d: F16Le,
    /// For 8 numbers, a u16: codebook index (9 bits) and sign word (7 bits).
    pub qs: [[u8; 2]; 32],
    /// Two scales a byte, low half first.
    pub scales: [u8; 8],
}

/// 2.56 bits: 16 numbers share a 4-bit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2S {
    /// Scale.
    pub d: F16Le,
    /// Low eight bits of the codebook indices.
    pub qs: [u8; 32],
    /// Signs, one bit a number.
    pub signs: [u8; 32],
    /// High two bits of four indices a byte.
    pub qh: [u8; 8],
    /// Two scales a byte, low half first.
    pub scales: [u8; 8],
}

/// 3.06 bits: 32 numbers share a 4-bit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3Xxs {
    /// Scale.
    pub d: F16Le,
    /// Codebook indices, one for 4 numbers.
    pub qs: [u8; 64],
    /// For 32 numbers, a u32 of four 7-bit sign words and the scale.
    pub scales_and_signs: [[u8; 4]; 8],
}

/// 3.44 bits: 32 numbers share a 4-bit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3S {
    /// Scale.
    pub d: F16Le,
    /// Low eight bits of the codebook indices, one for 4 numbers.
    pub qs: [u8; 64],
    /// Ninth bits of eight indices a byte.
    pub qh: [u8; 8],
    /// Signs, one bit a number.
    pub signs: [u8; 32],
    /// Two scales a byte, low half first.
    pub scales: [u8; 4],
}

/// 4.5 bits: 32 numbers of a curve with one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: F16Le,
    /// Codes: byte j holds number j (low half) and j + 16 (high half).
    pub qs: [u8; 16],
}

/// 4.25 bits: 32 numbers of a curve share a 6-bit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale.
    pub d: F16Le,
    /// High two bits of the eight scales, a u16.
    pub scales_h: [u8; 2],
    /// Low four bits of the scales, two a byte, low half first.
    pub scales_l: [u8; 4],
    /// Codes; 16 bytes hold 32 numbers as in [`BlockIq4Nl`].
    pub qs: [u8; 128],
}

/// Eight signs from seven bits: the eighth makes the number of minus signs even.
#[inline(always)]
fn even_signs(word: u32) -> u8 {
    let word = (word & 0x7f) as u8;
    word | ((word.count_ones() as u8 & 1) << 7)
}

/// `db · grid`, negative where the bit in `signs` is set.
#[inline(always)]
fn signed<const WIDTH: usize>(db: f32, grid: &[i8; WIDTH], signs: u8, out: &mut [f32]) {
    for (bit, (out, &g)) in out.iter_mut().zip(grid).enumerate() {
        let magnitude = db * f32::from(g);
        // Flips the sign bit, which vectorises better than a choice.
        let sign = u32::from((signs >> bit) & 1) << 31;
        *out = f32::from_bits(magnitude.to_bits() ^ sign);
    }
}

/// Numbers 0 … 15 from low halves, 16 … 31 from high halves.
#[inline(always)]
fn curve(d: f32, qs: &[u8; 16], out: &mut [f32; 32]) {
    let (low, high) = out.split_at_mut(16);
    for ((&q, low), high) in qs.iter().zip(low).zip(high) {
        *low = d * f32::from(IQ4_VALUES[usize::from(q & 0x0f)]);
        *high = d * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
    }
}

/// Half `i` of a byte array that holds two values a byte, low half first.
#[inline(always)]
fn half(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 2] >> (4 * (i % 2))) & 0x0f
}

/// Eight numbers of an IQ1 block.
#[inline(always)]
fn shifted(dl: f32, index: u16, negative: bool, out: &mut [f32; 8]) {
    let delta = if negative { -0.125 } else { 0.125 };
    for (out, &g) in out
        .iter_mut()
        .zip(&iq_grids::IQ1[usize::from(index & 2047)])
    {
        *out = dl * (f32::from(g) + delta);
    }
}

impl Block<LEN> for BlockIq1S {
    const TYPE: GgufQuantType = GgufQuantType::IQ1_S;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let parts = self.qs.as_chunks::<4>().0.iter().zip(&self.qh);
        for (out, (qs, &qh)) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts) {
            let qh = u16::from_le_bytes(qh);
            let dl = d * f32::from(2 * ((qh >> 12) & 7) + 1);
            for (i, (out, &q)) in out.as_chunks_mut::<8>().0.iter_mut().zip(qs).enumerate() {
                let index = u16::from(q) | (((qh >> (3 * i)) & 7) << 8);
                shifted(dl, index, qh & 0x8000 != 0, out);
            }
        }
    }
}

impl Block<LEN> for BlockIq1M {
    const TYPE: GgufQuantType = GgufQuantType::IQ1_M;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let scales = self.scales.map(u16::from_le_bytes);
        let quarters = scales.iter().rev();
        let d = quarters.fold(0, |bits, s| (bits << 4) | (s >> 12));
        let d = F16Le(d.to_le_bytes()).to_f32();
        let parts = self.qs.as_chunks::<2>().0.iter().zip(&self.qh);
        // [16 scales][2 indices][8 numbers]
        for (i, (out, (qs, &qh))) in out
            .as_chunks_mut::<16>()
            .0
            .iter_mut()
            .zip(parts)
            .enumerate()
        {
            let dl = d * f32::from(2 * ((scales[i / 4] >> (3 * (i % 4))) & 7) + 1);
            let (first, second) = (u16::from(qh & 0x0f), u16::from(qh >> 4));
            for ((out, &q), high) in out
                .as_chunks_mut::<8>()
                .0
                .iter_mut()
                .zip(qs)
                .zip([first, second])
            {
                shifted(dl, u16::from(q) | ((high & 7) << 8), high & 8 != 0, out);
            }
        }
    }
}

impl Block<LEN> for BlockIq2Xxs {
    const TYPE: GgufQuantType = GgufQuantType::IQ2_XXS;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        for (out, qs) in out.as_chunks_mut::<32>().0.iter_mut().zip(&self.qs) {
            let &[i0, i1, i2, i3, s0, s1, s2, s3] = qs;
            let word = u32::from_le_bytes([s0, s1, s2, s3]);
            let db = d * (0.5 + (word >> 28) as f32) * 0.25;
            let out = out.as_chunks_mut::<8>().0.iter_mut();
            for (i, (out, index)) in out.zip([i0, i1, i2, i3]).enumerate() {
                let grid = &iq_grids::IQ2_XXS[usize::from(index)];
                signed(db, grid, even_signs(word >> (7 * i)), out);
            }
        }
    }
}

impl Block<LEN> for BlockIq2Xs {
    const TYPE: GgufQuantType = GgufQuantType::IQ2_XS;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let parts = self.qs.as_chunks::<2>().0;
        for (i, (out, qs)) in out
            .as_chunks_mut::<16>()
            .0
            .iter_mut()
            .zip(parts)
            .enumerate()
        {
            let db = d * (0.5 + f32::from(half(&self.scales, i))) * 0.25;
            for (out, &q) in out.as_chunks_mut::<8>().0.iter_mut().zip(qs) {
                let q = u16::from_le_bytes(q);
                let grid = &iq_grids::IQ2_XS[usize::from(q & 511)];
                signed(db, grid, even_signs(u32::from(q >> 9)), out);
            }
        }
    }
}

impl Block<LEN> for BlockIq2S {
    const TYPE: GgufQuantType = GgufQuantType::IQ2_S;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let parts = self.qs.iter().zip(&self.signs);
        for (i, (out, (&q, &signs))) in out.as_chunks_mut::<8>().0.iter_mut().zip(parts).enumerate()
        {
            let db = d * (0.5 + f32::from(half(&self.scales, i / 2))) * 0.25;
            let high = (self.qh[i / 4] >> (2 * (i % 4))) & 3;
            let grid = &iq_grids::IQ2_S[usize::from(q) | (usize::from(high) << 8)];
            signed(db, grid, signs, out);
        }
    }
}

impl Block<LEN> for BlockIq3Xxs {
    const TYPE: GgufQuantType = GgufQuantType::IQ3_XXS;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let parts = self
            .qs
            .as_chunks::<8>()
            .0
            .iter()
            .zip(&self.scales_and_signs);
        for (out, (qs, &word)) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts) {
            let word = u32::from_le_bytes(word);
            let db = d * (0.5 + (word >> 28) as f32) * 0.5;
            for (i, (out, &q)) in out.as_chunks_mut::<4>().0.iter_mut().zip(qs).enumerate() {
                // Eight signs serve two codebook entries.
                let signs = even_signs(word >> (7 * (i / 2))) >> (4 * (i % 2));
                signed(db, &iq_grids::IQ3_XXS[usize::from(q)], signs, out);
            }
        }
    }
}

impl Block<LEN> for BlockIq3S {
    const TYPE: GgufQuantType = GgufQuantType::IQ3_S;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        for (i, (out, &q)) in out
            .as_chunks_mut::<4>()
            .0
            .iter_mut()
            .zip(&self.qs)
            .enumerate()
        {
            let db = d * f32::from(2 * half(&self.scales, i / 8) + 1);
            let high = (self.qh[i / 8] >> (i % 8)) & 1;
            let grid = &iq_grids::IQ3_S[usize::from(q) | (usize::from(high) << 8)];
            signed(db, grid, half(&self.signs, i), out);
        }
    }
}

impl Block<32> for BlockIq4Nl {
    const TYPE: GgufQuantType = GgufQuantType::IQ4_NL;

    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        curve(self.d.to_f32(), &self.qs, out);
    }
}

impl Block<LEN> for BlockIq4Xs {
    const TYPE: GgufQuantType = GgufQuantType::IQ4_XS;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let high = u16::from_le_bytes(self.scales_h);
        let parts = self.qs.as_chunks::<16>().0;
        for (i, (out, qs)) in out
            .as_chunks_mut::<32>()
            .0
            .iter_mut()
            .zip(parts)
            .enumerate()
        {
            let scale = half(&self.scales_l, i) | ((((high >> (2 * i)) & 3) as u8) << 4);
            curve(d * (i32::from(scale) - 32) as f32, qs, out);
        }
    }
}
