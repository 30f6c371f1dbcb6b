//! AWQ checkpoints in the GEMM layout: 4-bit codes with a scale and a zero point per group.
//!
//! `weight[o, i] = scale[g, o] · (code[i, o] − zero[g, o])`, `g = i / group_size`. Source of the
//! method: "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (Lin et
//! al., 2023); of the layout: what AutoAWQ writes as `version = "gemm"`.
//!
//! Codes are packed along the output features: `qweight` is i32 `[in, out/8]`, and the eight
//! nibbles of a word, lowest first, hold the columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight. Zero
//! points (stored as meant) are packed alike, i32 `[groups, out/8]`; `scales` is f16
//! `[groups, out]`.

use crate::block::F16Le;
use crate::error::{QuantError, Result};
use crate::gptq::{check_bytes, check_output};

const FORMAT: &str = "awq";

/// The column, of the eight that share a word, that each nibble holds, lowest nibble first.
pub const NIBBLE_COLUMNS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The bit at which each of the eight columns of a word starts: [`NIBBLE_COLUMNS`] turned round.
const COLUMN_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// An AWQ linear layer as it lies in a checkpoint: little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct AwqTensors<'a> {
    /// Input features in a group; divides `in_features`.
    pub group_size: usize,
    /// Input features.
    pub in_features: usize,
    /// Output features; a multiple of 8.
    pub out_features: usize,
    /// i32 `[in, out/8]`.
    pub qweight: &'a [u8],
    /// i32 `[groups, out/8]`.
    pub qzeros: &'a [u8],
    /// f16 `[groups, out]`.
    pub scales: &'a [u8],
}

impl AwqTensors<'_> {
    /// Number of groups: in / group_size (1 for a group size of 0, which [`Self::validate`]
    /// refuses).
    pub fn groups(&self) -> usize {
        (self.in_features / self.group_size.max(1)).max(1)
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// [`QuantError::Parameter`], [`QuantError::TensorSize`] or [`QuantError::TooLarge`].
    pub fn validate(&self) -> Result<()> {
        let (k, n) = (self.in_features, self.out_features);
        let outputs_fit = n > 0 && n.is_multiple_of(8);
        parameter(outputs_fit, "out_features", n, "a positive multiple of 8")?;
        let groups_fit = self.group_size > 0 && k > 0 && k.is_multiple_of(self.group_size);
        parameter(
            groups_fit,
            "group_size",
            self.group_size,
            "a divisor of in_features",
        )?;
        // All products below are at most in × out.
        if k.checked_mul(n).is_none() {
            return Err(QuantError::TooLarge {
                format: FORMAT,
                in_features: k,
                out_features: n,
            });
        }
        check_bytes(FORMAT, "qweight", self.qweight, 4, k * (n / 8))?;
        check_bytes(FORMAT, "qzeros", self.qzeros, 4, self.groups() * (n / 8))?;
        check_bytes(FORMAT, "scales", self.scales, 2, self.groups() * n)
    }

    /// The integer codes, `[out, in]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::TensorSize`] when `out` has another size.
    pub fn codes(&self, out: &mut [u8]) -> Result<()> {
        self.validate()?;
        check_output(FORMAT, out.len(), self.in_features * self.out_features)?;
        let k = self.in_features;
        self.for_each_word(|i, first, codes| {
            for (code, column) in codes.into_iter().zip(first..) {
                out[column * k + i] = code;
            }
        });
        Ok(())
    }

    /// The zero points, `[groups, out]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::TensorSize`] when `out` has another size.
    pub fn zeros(&self, out: &mut [u8]) -> Result<()> {
        self.validate()?;
        check_output(FORMAT, out.len(), self.groups() * self.out_features)?;
        let (words, out) = (self.qzeros.as_chunks().0, out.as_chunks_mut::<8>().0);
        for (&word, out) in words.iter().zip(out) {
            *out = unpack(word);
        }
        Ok(())
    }

    /// The weights, f32 `[out, in]`. Each is exact: a 5-bit integer times an f16.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::TensorSize`] when `out` has another size.
    pub fn dequantize(&self, out: &mut [f32]) -> Result<()> {
        self.validate()?;
        let (k, n) = (self.in_features, self.out_features);
        check_output(FORMAT, out.len(), k * n)?;
        let mut zeros = vec![0; self.groups() * n];
        self.zeros(&mut zeros)?;
        let scales = self.scales.as_chunks::<2>().0;
        self.for_each_word(|i, first, codes| {
            let at = i / self.group_size * n + first;
            let (zeros, scales) = (&zeros[at..][..8], &scales[at..][..8]);
            let affine = codes.into_iter().zip(zeros).zip(scales);
            for (((code, &zero), &scale), column) in affine.zip(first..) {
                let difference = i32::from(code) - i32::from(zero);
                out[column * k + i] = F16Le(scale).to_f32() * difference as f32;
            }
        });
        Ok(())
    }

    /// Calls `each(input feature, first of eight output features, their codes)` for every word.
    ///
    /// Words go in tiles of columns, so that reads use whole cache lines of `qweight` while the
    /// writes of a transposed result stay on few lines.
    fn for_each_word(&self, mut each: impl FnMut(usize, usize, [u8; 8])) {
        const TILE: usize = 4;
        let words = self.out_features / 8;
        let (qweight, _) = self.qweight.as_chunks::<4>();
        for tile in (0..words).step_by(TILE) {
            for (i, row) in qweight.chunks_exact(words).enumerate() {
                for (&word, column) in row.iter().skip(tile).take(TILE).zip(tile..) {
                    each(i, 8 * column, unpack(word));
                }
            }
        }
    }
}

/// The eight codes of a word in the order of columns.
#[inline(always)]
fn unpack(word: [u8; 4]) -> [u8; 8] {
    let word = u32::from_le_bytes(word);
    COLUMN_SHIFTS.map(|shift| ((word >> shift) & 0x0f) as u8)
}

fn parameter(ok: bool, what: &'static str, found: usize, expected: &'static str) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(QuantError::Parameter {
        format: FORMAT,
        what,
        found: i64::try_from(found).unwrap_or(i64::MAX),
        expected,
    })
}

/// Packs codes `[out, in]` into the bytes of `qweight`.
///
/// Zero points `[groups, out]` are packed by handing in their transpose.
///
/// # Errors
/// [`QuantError::Parameter`] when `out_features` is not a positive multiple of 8 or a code needs
/// more than four bits; [`QuantError::TensorSize`] when `codes` is not `[out, in]`.
pub fn pack_codes(codes: &[u8], in_features: usize, out_features: usize) -> Result<Vec<u8>> {
    let (k, n) = (in_features, out_features);
    let outputs_fit = n > 0 && n.is_multiple_of(8);
    parameter(outputs_fit, "out_features", n, "a positive multiple of 8")?;
    let expected = k.checked_mul(n).ok_or(QuantError::TooLarge {
        format: FORMAT,
        in_features: k,
        out_features: n,
    })?;
    check_output(FORMAT, codes.len(), expected)?;
    let largest = codes.iter().copied().max().unwrap_or(0);
    parameter(largest < 16, "code", largest.into(), "less than 16")?;
    let mut out = Vec::with_capacity(expected / 2);
    for i in 0..k {
        for first in (0..n).step_by(8) {
            let columns = COLUMN_SHIFTS.iter().zip(first..);
            let word = columns.fold(0, |word, (&shift, column)| {
                word | (u32::from(codes[column * k + i]) << shift)
            });
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_follow_the_nibble_order() {
        for (nibble, &column) in NIBBLE_COLUMNS.iter().enumerate() {
            assert_eq!(COLUMN_SHIFTS[column], 4 * nibble as u32);
        }
    }
}
