//! The K blocks of ggml: 256 numbers in sub-blocks, whose scales are themselves quantised.
//!
//! Source of the layouts: ggml's `block_q2_K` … `block_q8_K`. Sub-blocks have 16 numbers (Q2_K,
//! Q3_K, Q6_K) or 32 (Q4_K, Q5_K). Codes of 2 bits lie so that one run of 32 bytes holds four
//! runs of 32 numbers, lowest bits first.

use crate::block::{Block, EncodeBlock, F16Le, extreme};
use bytemuck::{Pod, Zeroable};
use ferrum_types::GgufQuantType;

/// Numbers in one super-block.
pub const LEN: usize = 256;

/// `d · s · q − dmin · m`, q of 2 bits; s and m of 4 bits for each 16 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// For each sub-block: scale (low half) and minimum (high half).
    pub scales: [u8; 16],
    /// 2-bit codes.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minimums.
    pub dmin: F16Le,
}

/// `d · (s − 32) · (q − 4)`, q of 3 bits; s of 6 bits for each 16 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3K {
    /// Third bits: bit `b` of byte `l` belongs to number `32 b + l`.
    pub hmask: [u8; 32],
    /// Low two bits.
    pub qs: [u8; 64],
    /// 6-bit scales, see [`BlockQ3K::sub_scales`].
    pub scales: [u8; 12],
    /// Scale of the scales.
    pub d: F16Le,
}

/// `d · s · q − dmin · m`, q of 4 bits; s and m of 6 bits for each 32 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minimums.
    pub dmin: F16Le,
    /// 6-bit scales and minimums, see [`scales_and_minimums`].
    pub scales: [u8; 12],
    /// 4-bit codes: 32 bytes hold sub-block `2c` (low halves) and `2c + 1` (high halves).
    pub qs: [u8; 128],
}

/// As [`BlockQ4K`] with q of 5 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5K {
    /// Scale of the scales.
    pub d: F16Le,
    /// Scale of the minimums.
    pub dmin: F16Le,
    /// 6-bit scales and minimums, see [`scales_and_minimums`].
    pub scales: [u8; 12],
    /// Fifth bits: bit `b` of byte `l` belongs to number `32 b + l`.
    pub qh: [u8; 32],
    /// Low four bits, as in [`BlockQ4K`].
    pub qs: [u8; 128],
}

/// `d · s · (q − 32)`, q of 6 bits; s of 8 bits with sign for each 16 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// Low four bits: 64 bytes hold 64 numbers (low halves) and the next 64 (high halves).
    pub ql: [u8; 128],
    /// High two bits: 32 bytes hold four runs of 32 numbers.
    pub qh: [u8; 64],
    /// Scale of each sub-block.
    pub scales: [i8; 16],
    /// Scale of the scales.
    pub d: F16Le,
}

/// `d · q`, q of 8 bits with sign; the activation side of K dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8K {
    /// Scale, an f32.
    pub d: [u8; 4],
    /// Codes.
    pub qs: [i8; 256],
    /// Sum of each 16 codes, i16.
    pub bsums: [[u8; 2]; 16],
}

/// The eight 6-bit scales and eight 6-bit minimums of a Q4_K or Q5_K block.
///
/// Bytes 0–3 hold scales 0–3 and bytes 4–7 minimums 0–3 in their low six bits. Bytes 8–11 hold the
/// low four bits of scales 4–7 (low half) and of minimums 4–7 (high half), whose upper two bits
/// are the upper two bits of bytes 0–7.
#[inline]
pub fn scales_and_minimums(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3] = *packed;
    let low = |byte: u8| byte & 0x3f;
    let scale = |c: u8, a: u8| (c & 0x0f) | ((a >> 2) & 0x30);
    let minimum = |c: u8, b: u8| (c >> 4) | ((b >> 2) & 0x30);
    (
        [
            low(a0),
            low(a1),
            low(a2),
            low(a3),
            scale(c0, a0),
            scale(c1, a1),
            scale(c2, a2),
            scale(c3, a3),
        ],
        [
            low(b0),
            low(b1),
            low(b2),
            low(b3),
            minimum(c0, b0),
            minimum(c1, b1),
            minimum(c2, b2),
            minimum(c3, b3),
        ],
    )
}

impl BlockQ3K {
    /// The sixteen scales, −32 … 31.
    ///
    /// Bytes 0–7 hold the low four bits of scales 0–7 (low half) and 8–15 (high half); bytes 8–11
    /// hold the upper two bits, byte `8 + i` those of scales `i`, `i + 4`, `i + 8`, `i + 12`.
    #[inline]
    pub fn sub_scales(&self) -> [i8; 16] {
        let (low, high) = self.scales.split_at(8);
        let mut out = [0; 16];
        for (i, out) in out.iter_mut().enumerate() {
            let low = (low[i % 8] >> (4 * (i / 8))) & 0x0f;
            let high = (high[i % 4] >> (2 * (i / 4))) & 0x03;
            *out = (low | (high << 4)) as i8 - 32;
        }
        out
    }
}

impl Block<LEN> for BlockQ2K {
    const TYPE: GgufQuantType = GgufQuantType::Q2_K;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (runs, _) = out.as_chunks_mut::<32>();
        let (scales, _) = self.scales.as_chunks::<2>();
        for (run, (out, scales)) in runs.iter_mut().zip(scales).enumerate() {
            // Run r of 32 numbers lies in the 32 bytes r / 4, at bits 2 (r % 4).
            let (bytes, shift) = (self.qs.as_chunks::<32>().0, 2 * (run % 4));
            let (bytes, _) = bytes[run / 4].as_chunks::<16>();
            let (out, _) = out.as_chunks_mut::<16>();
            for ((out, bytes), &s) in out.iter_mut().zip(bytes).zip(scales) {
                let scale = d * f32::from(s & 0x0f);
                let minimum = dmin * f32::from(s >> 4);
                for (out, &q) in out.iter_mut().zip(bytes) {
                    *out = scale * f32::from((q >> shift) & 3) - minimum;
                }
            }
        }
    }
}

impl Block<LEN> for BlockQ3K {
    const TYPE: GgufQuantType = GgufQuantType::Q3_K;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let sub_scales = self.sub_scales();
        let (runs, _) = out.as_chunks_mut::<32>();
        let (scales, _) = sub_scales.as_chunks::<2>();
        for (run, (out, scales)) in runs.iter_mut().zip(scales).enumerate() {
            let (bytes, shift) = (self.qs.as_chunks::<32>().0, 2 * (run % 4));
            let (bytes, _) = bytes[run / 4].as_chunks::<16>();
            let (masks, _) = self.hmask.as_chunks::<16>();
            let (out, _) = out.as_chunks_mut::<16>();
            for (((out, bytes), masks), &s) in out.iter_mut().zip(bytes).zip(masks).zip(scales) {
                let scale = d * f32::from(s);
                for ((out, &q), &mask) in out.iter_mut().zip(bytes).zip(masks) {
                    let code = ((q >> shift) & 3) | (((mask >> run) & 1) << 2);
                    *out = scale * (i32::from(code) - 4) as f32;
                }
            }
        }
    }
}

impl Block<LEN> for BlockQ4K {
    const TYPE: GgufQuantType = GgufQuantType::Q4_K;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (scales, minimums) = scales_and_minimums(&self.scales);
        let (runs, _) = out.as_chunks_mut::<32>();
        for (run, ((out, &s), &m)) in runs.iter_mut().zip(&scales).zip(&minimums).enumerate() {
            let bytes = &self.qs.as_chunks::<32>().0[run / 2];
            let shift = 4 * (run % 2);
            let (scale, minimum) = (d * f32::from(s), dmin * f32::from(m));
            for (out, &q) in out.iter_mut().zip(bytes) {
                *out = scale * f32::from((q >> shift) & 0x0f) - minimum;
            }
        }
    }
}

impl Block<LEN> for BlockQ5K {
    const TYPE: GgufQuantType = GgufQuantType::Q5_K;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (scales, minimums) = scales_and_minimums(&self.scales);
        let (runs, _) = out.as_chunks_mut::<32>();
        for (run, ((out, &s), &m)) in runs.iter_mut().zip(&scales).zip(&minimums).enumerate() {
            let bytes = &self.qs.as_chunks::<32>().0[run / 2];
            let shift = 4 * (run % 2);
            let (scale, minimum) = (d * f32::from(s), dmin * f32::from(m));
            for ((out, &q), &high) in out.iter_mut().zip(bytes).zip(&self.qh) {
                let code = ((q >> shift) & 0x0f) | (((high >> run) & 1) << 4);
                *out = scale * f32::from(code) - minimum;
            }
        }
    }
}

impl Block<LEN> for BlockQ6K {
    const TYPE: GgufQuantType = GgufQuantType::Q6_K;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = self.d.to_f32();
        let (runs, _) = out.as_chunks_mut::<32>();
        let (scales, _) = self.scales.as_chunks::<2>();
        for (run, (out, scales)) in runs.iter_mut().zip(scales).enumerate() {
            // Runs 0–3 lie in the first half: 0 and 2 share their low-bit bytes, 1 and 3 too.
            let (half, part) = (run / 4, run % 4);
            let low = &self.ql.as_chunks::<32>().0[2 * half + part % 2];
            let high = &self.qh.as_chunks::<32>().0[half];
            let (low_shift, high_shift) = (4 * (part / 2), 2 * part);
            let (low, _) = low.as_chunks::<16>();
            let (high, _) = high.as_chunks::<16>();
            let (out, _) = out.as_chunks_mut::<16>();
            for (((out, low), high), &s) in out.iter_mut().zip(low).zip(high).zip(scales) {
                let scale = d * f32::from(s);
                for ((out, &low), &high) in out.iter_mut().zip(low).zip(high) {
                    let code = ((low >> low_shift) & 0x0f) | (((high >> high_shift) & 3) << 4);
                    *out = scale * (i32::from(code) - 32) as f32;
                }
            }
        }
    }
}

impl Block<LEN> for BlockQ8K {
    const TYPE: GgufQuantType = GgufQuantType::Q8_K;

    #[inline]
    fn decode(&self, out: &mut [f32; LEN]) {
        let d = f32::from_le_bytes(self.d);
        for (out, &q) in out.iter_mut().zip(&self.qs) {
            *out = d * f32::from(q);
        }
    }
}

impl EncodeBlock<LEN> for BlockQ8K {
    /// The value of largest magnitude gets the code −127, as in ggml.
    fn encode(values: &[f32; LEN]) -> Self {
        let extreme = extreme(values);
        let inverse = if extreme == 0.0 {
            0.0
        } else {
            -127.0 / extreme
        };
        if inverse == 0.0 || !inverse.is_finite() {
            // All zero, or so small that the scale cannot be expressed.
            return Zeroable::zeroed();
        }
        let qs = values.map(|v| (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8);
        let mut bsums = [[0; 2]; 16];
        for (sum, qs) in bsums.iter_mut().zip(qs.as_chunks::<16>().0) {
            *sum = qs.iter().map(|&q| i16::from(q)).sum::<i16>().to_le_bytes();
        }
        BlockQ8K {
            d: (1.0 / inverse).to_le_bytes(),
            qs,
            bsums,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q8_k_sums_belong_to_its_codes() {
        let values: [f32; LEN] = std::array::from_fn(|i| (i as f32 * 0.37).sin() * 3.0 - 0.5);
        let block = BlockQ8K::encode(&values);
        assert_eq!(block.qs.iter().copied().min(), Some(-127));
        for (sum, codes) in block.bsums.iter().zip(block.qs.as_chunks::<16>().0) {
            let expected: i16 = codes.iter().map(|&q| i16::from(q)).sum();
            assert_eq!(i16::from_le_bytes(*sum), expected);
        }
        for tiny in [0.0, f32::MIN_POSITIVE / 4.0] {
            assert_eq!(BlockQ8K::encode(&[tiny; LEN]), Zeroable::zeroed());
        }
    }

    #[test]
    fn scales_and_minimums_come_from_their_bits() {
        // Values that use all six bits, packed by the documented layout.
        let scale: [u8; 8] = std::array::from_fn(|i| i as u8 * 9);
        let minimum: [u8; 8] = std::array::from_fn(|i| 63 - i as u8);
        let mut packed = [0; 12];
        for i in 0..4 {
            packed[i] = scale[i] | ((scale[i + 4] >> 4) << 6);
            packed[4 + i] = minimum[i] | ((minimum[i + 4] >> 4) << 6);
            packed[8 + i] = (scale[i + 4] & 0x0f) | ((minimum[i + 4] & 0x0f) << 4);
        }
        assert_eq!(scales_and_minimums(&packed), (scale, minimum));
    }
}
