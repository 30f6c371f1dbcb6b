//! Blocks as integers: what kernels that multiply codes, not floats, are packed from.
//!
//! Every number of a block here is `d · scale · (value(code) − zero) − dmin · minimum`, with a scale
//! and a minimum for each sixteen numbers. What differs between types is how many bits a code has
//! and where they lie; that is unpacked once, at load.

use crate::block::{Block, blocks};
use crate::error::Result;
use crate::fp4::{BlockMxfp4, E2M1_DOUBLED, e8m0_half};
use crate::iq::{BlockIq4Nl, BlockIq4Xs, IQ4_VALUES};
use crate::k_quants::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, scales_and_minimums};
use crate::legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, five_bits, nibbles};
use ferrum_types::GgufQuantType as T;

/// Numbers that share a scale and a minimum.
pub const SUB: usize = 16;

/// One block unpacked. Types with blocks of 32 numbers fill the first of each list.
#[derive(Clone, Debug, PartialEq)]
pub struct UnpackedBlock {
    /// Codes as stored; of [`T::Q8_0`] the bits of a signed byte.
    pub codes: [u8; 256],
    /// For each [`SUB`] numbers; 1 where the type has one scale only.
    pub scales: [i8; 256 / SUB],
    /// For each [`SUB`] numbers; 0 or 1 where the type has none or one only.
    pub minimums: [u8; 256 / SUB],
    /// Scale of the scales.
    pub d: f32,
    /// Scale of the minimums.
    pub dmin: f32,
}

impl UnpackedBlock {
    /// All zero.
    pub const ZERO: Self = Self {
        codes: [0; 256],
        scales: [0; 256 / SUB],
        minimums: [0; 256 / SUB],
        d: 0.0,
        dmin: 0.0,
    };

    fn one_scale(&mut self, d: f32) {
        (self.d, self.dmin) = (d, 0.0);
        self.scales = [1; 256 / SUB];
        self.minimums = [0; 256 / SUB];
    }

    fn one_minimum(&mut self, d: f32, m: f32) {
        self.one_scale(d);
        self.dmin = -m;
        self.minimums = [1; 256 / SUB];
    }

    fn first(&mut self, codes: [u8; 32]) {
        if let Some(first) = self.codes.first_chunk_mut() {
            *first = codes;
        }
    }

    /// Calls `f` with the number of each code in turn.
    /// Code `i` of each run of 32 from `f(run, i)`: what lies in one run lies side by side in a block.
    #[inline(always)]
    fn each_code(&mut self, f: impl Fn(usize, usize) -> u8) {
        for run in 0..8 {
            for i in 0..32 {
                self.codes[32 * run + i] = f(run, i);
            }
        }
    }

    fn subs_of_32(&mut self, scales: [i8; 8], minimums: [u8; 8]) {
        for i in 0..256 / SUB {
            (self.scales[i], self.minimums[i]) = (scales[i / 2], minimums[i / 2]);
        }
    }
}

/// What codes of a type stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeValues {
    /// The code as an unsigned number, less `zero`.
    Unsigned {
        /// Bits of a code.
        bits: u32,
        /// What is taken off.
        zero: i32,
    },
    /// The code as a signed byte.
    Signed,
    /// An entry of a table, for codes of four bits.
    Table([i8; 16]),
}

impl CodeValues {
    /// The number that `code` stands for.
    pub fn value(&self, code: u8) -> i32 {
        match self {
            Self::Unsigned { zero, .. } => i32::from(code) - zero,
            Self::Signed => i32::from(code as i8),
            Self::Table(table) => i32::from(table[usize::from(code & 15)]),
        }
    }
}

/// What the codes of a type stand for; `None` for types that [`unpack_block`] does not take apart.
pub fn code_values(ty: T) -> Option<CodeValues> {
    let unsigned = |bits, zero| Some(CodeValues::Unsigned { bits, zero });
    match ty {
        T::Q2_K => unsigned(2, 0),
        T::Q3_K => unsigned(3, 4),
        T::Q4_0 => unsigned(4, 8),
        T::Q4_1 | T::Q4_K => unsigned(4, 0),
        T::Q5_0 => unsigned(5, 16),
        T::Q5_1 | T::Q5_K => unsigned(5, 0),
        T::Q6_K => unsigned(6, 32),
        T::Q8_0 => Some(CodeValues::Signed),
        T::IQ4_NL | T::IQ4_XS => Some(CodeValues::Table(IQ4_VALUES)),
        T::MXFP4 => Some(CodeValues::Table(E2M1_DOUBLED)),
        _ => None,
    }
}

/// Takes one block of `ty` apart. Whether there was one: `false` for a type without
/// [`code_values`].
///
/// # Errors
/// [`QuantError::PartialBlock`](crate::QuantError::PartialBlock) when `bytes` is not whole blocks.
pub fn unpack_block(ty: T, bytes: &[u8], out: &mut UnpackedBlock) -> Result<bool> {
    fn one<B: Block<N>, const N: usize>(
        bytes: &[u8],
        out: &mut UnpackedBlock,
        take: impl Fn(&B, &mut UnpackedBlock),
    ) -> Result<bool> {
        if let [block, ..] = blocks::<B, N>(bytes)? {
            take(block, out);
        }
        Ok(true)
    }
    match ty {
        T::Q4_0 => one::<BlockQ4_0, 32>(bytes, out, |b, out| {
            out.one_scale(b.d.to_f32());
            out.first(nibbles(&b.qs));
        }),
        T::Q4_1 => one::<BlockQ4_1, 32>(bytes, out, |b, out| {
            out.one_minimum(b.d.to_f32(), b.m.to_f32());
            out.first(nibbles(&b.qs));
        }),
        T::Q5_0 => one::<BlockQ5_0, 32>(bytes, out, |b, out| {
            out.one_scale(b.d.to_f32());
            out.first(five_bits(b.qh, &b.qs));
        }),
        T::Q5_1 => one::<BlockQ5_1, 32>(bytes, out, |b, out| {
            out.one_minimum(b.d.to_f32(), b.m.to_f32());
            out.first(five_bits(b.qh, &b.qs));
        }),
        T::Q8_0 => one::<BlockQ8_0, 32>(bytes, out, |b, out| {
            out.one_scale(b.d.to_f32());
            out.first(bytemuck::cast(b.qs));
        }),
        T::IQ4_NL => one::<BlockIq4Nl, 32>(bytes, out, |b, out| {
            out.one_scale(b.d.to_f32());
            out.first(nibbles(&b.qs));
        }),
        T::MXFP4 => one::<BlockMxfp4, 32>(bytes, out, |b, out| {
            out.one_scale(e8m0_half(b.e));
            out.first(nibbles(&b.qs));
        }),
        T::IQ4_XS => one::<BlockIq4Xs, 256>(bytes, out, iq4_xs),
        T::Q2_K => one::<BlockQ2K, 256>(bytes, out, q2_k),
        T::Q3_K => one::<BlockQ3K, 256>(bytes, out, q3_k),
        T::Q4_K => one::<BlockQ4K, 256>(bytes, out, q4_k),
        T::Q5_K => one::<BlockQ5K, 256>(bytes, out, q5_k),
        T::Q6_K => one::<BlockQ6K, 256>(bytes, out, q6_k),
        _ => Ok(false),
    }
}

fn iq4_xs(b: &BlockIq4Xs, out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (b.d.to_f32(), 0.0);
    let high = u16::from_le_bytes(b.scales_h);
    let scale = |i: usize| {
        let low = (b.scales_l[i / 2] >> (4 * (i % 2))) & 0x0f;
        (low | ((((high >> (2 * i)) & 3) as u8) << 4)) as i8 - 32
    };
    out.subs_of_32(std::array::from_fn(scale), [0; 8]);
    let (runs, _) = out.codes.as_chunks_mut::<32>();
    for (run, qs) in runs.iter_mut().zip(b.qs.as_chunks::<16>().0) {
        *run = nibbles(qs);
    }
}

fn q2_k(b: &BlockQ2K, out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (b.d.to_f32(), b.dmin.to_f32());
    out.scales = b.scales.map(|s| (s & 0x0f) as i8);
    out.minimums = b.scales.map(|s| s >> 4);
    out.each_code(|run, i| (b.qs[run / 4 * 32 + i] >> (2 * (run % 4))) & 3);
}

fn q3_k(b: &BlockQ3K, out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (b.d.to_f32(), 0.0);
    out.scales = b.sub_scales();
    out.minimums = [0; 16];
    out.each_code(|run, i| {
        let low = (b.qs[run / 4 * 32 + i] >> (2 * (run % 4))) & 3;
        low | (((b.hmask[i] >> run) & 1) << 2)
    });
}

fn q4_k(b: &BlockQ4K, out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (b.d.to_f32(), b.dmin.to_f32());
    let (scales, minimums) = scales_and_minimums(&b.scales);
    out.subs_of_32(scales.map(|s| s as i8), minimums);
    out.each_code(|run, i| (b.qs[run / 2 * 32 + i] >> (4 * (run % 2))) & 0x0f);
}

fn q5_k(b: &BlockQ5K, out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (b.d.to_f32(), b.dmin.to_f32());
    let (scales, minimums) = scales_and_minimums(&b.scales);
    out.subs_of_32(scales.map(|s| s as i8), minimums);
    out.each_code(|run, i| {
        let low = (b.qs[run / 2 * 32 + i] >> (4 * (run % 2))) & 0x0f;
        low | (((b.qh[i] >> run) & 1) << 4)
    });
}

fn q6_k(b: &BlockQ6K, out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (b.d.to_f32(), 0.0);
    out.scales = b.scales;
    out.minimums = [0; 16];
    out.each_code(|run, i| {
        let (half, part) = (run / 4, run % 4);
        let low = b.ql[(2 * half + part % 2) * 32 + i] >> (4 * (part / 2));
        let high = b.qh[half * 32 + i] >> (2 * part);
        (low & 0x0f) | ((high & 3) << 4)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequantize;

    #[test]
    fn integers_mean_what_the_block_means() {
        let mut state = 7u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let mut seen = 0;
        for ty in T::all() {
            let Some(values) = code_values(ty) else {
                continue;
            };
            seen += 1;
            for _ in 0..20 {
                let mut block: Vec<u8> = (0..ty.block_bytes()).map(|_| byte()).collect();
                // Keep f16 scales finite: clear the top bit of the exponent of every byte pair that
                // could be one (this changes codes too, which are random anyway).
                for b in &mut block {
                    *b &= 0xbf;
                }
                let mut expected = vec![0.0; ty.block_len()];
                dequantize(ty, &block, &mut expected).unwrap();
                let mut parts = UnpackedBlock::ZERO;
                assert!(unpack_block(ty, &block, &mut parts).unwrap());
                for (i, expected) in expected.into_iter().enumerate() {
                    let scale = parts.d * f32::from(parts.scales[i / SUB]);
                    let minimum = parts.dmin * f32::from(parts.minimums[i / SUB]);
                    let found = scale * values.value(parts.codes[i]) as f32 - minimum;
                    assert_eq!(found, expected, "{ty} number {i}");
                }
            }
        }
        assert_eq!(seen, 13);
        assert!(!unpack_block(T::IQ1_S, &[0; 50], &mut UnpackedBlock::ZERO.clone()).unwrap());
        assert!(unpack_block(T::Q4_K, &[0; 143], &mut UnpackedBlock::ZERO.clone()).is_err());
    }
}
