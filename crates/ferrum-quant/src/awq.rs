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

use crate::affine::{COLUMN_SHIFTS, GroupParams, PackedCodes};
use crate::error::Result;
use crate::packed_matrix::{Groups, Matrix, TILE_ROWS, half_floats};

const FORMAT: &str = "awq";

/// The column, of the eight that share a word, that each nibble holds, lowest nibble first.
pub const NIBBLE_COLUMNS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

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

/// A layer whose sizes have been checked.
struct Checked<'a> {
    matrix: Matrix,
    qweight: &'a [[u8; 4]],
    qzeros: &'a [[u8; 4]],
    scales: &'a [[u8; 2]],
}

impl<'a> AwqTensors<'a> {
    /// Number of groups: in / group_size (1 for a group size of 0, which [`Self::validate`]
    /// refuses).
    pub fn groups(&self) -> usize {
        (self.in_features / self.group_size.max(1)).max(1)
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// [`QuantError::Parameter`], [`QuantError::TensorBytes`] or [`QuantError::TooLarge`].
    ///
    /// [`QuantError::Parameter`]: crate::QuantError::Parameter
    /// [`QuantError::TensorBytes`]: crate::QuantError::TensorBytes
    /// [`QuantError::TooLarge`]: crate::QuantError::TooLarge
    pub fn validate(&self) -> Result<()> {
        self.check().map(|_| ())
    }

    fn check(&self) -> Result<Checked<'a>> {
        let (k, n) = (self.in_features, self.out_features);
        let matrix = matrix(k, n)?;
        let whole = self.group_size > 0 && k > 0 && k.is_multiple_of(self.group_size);
        matrix.check_parameter(
            whole,
            "group_size",
            self.group_size,
            "a divisor of in_features",
        )?;
        matrix.elements()?;
        Ok(Checked {
            matrix,
            qweight: matrix.tensor("qweight", self.qweight, k * (n / 8))?,
            qzeros: matrix.tensor("qzeros", self.qzeros, self.groups() * (n / 8))?,
            scales: matrix.tensor("scales", self.scales, self.groups() * n)?,
        })
    }

    /// The integer codes, `[out, in]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::LayerLength`] when `out` has another size.
    ///
    /// [`QuantError::LayerLength`]: crate::QuantError::LayerLength
    pub fn codes(&self, out: &mut [u8]) -> Result<()> {
        let checked = self.check()?;
        checked
            .matrix
            .check_len("output", out.len(), checked.matrix.elements()?)?;
        let k = self.in_features;
        checked.for_each_span(|column, first, codes| {
            out[column * k + first..][..codes.len()].copy_from_slice(codes);
        });
        Ok(())
    }

    /// The zero points, `[groups, out]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::LayerLength`] when `out` has another size.
    ///
    /// [`QuantError::LayerLength`]: crate::QuantError::LayerLength
    pub fn zeros(&self, out: &mut [u8]) -> Result<()> {
        let checked = self.check()?;
        checked
            .matrix
            .check_len("output", out.len(), checked.scales.len())?;
        for (&word, out) in checked.qzeros.iter().zip(out.as_chunks_mut::<8>().0) {
            *out = unpack(word);
        }
        Ok(())
    }

    /// Scales and zero points, and codes as they lie.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn affine(&self) -> Result<(GroupParams, PackedCodes<'a>)> {
        let checked = self.check()?;
        let (k, n) = (self.in_features, self.out_features);
        let mut zeros = vec![0; checked.scales.len()];
        self.zeros(&mut zeros)?;
        let affine = GroupParams {
            bits: 4,
            in_features: k,
            out_features: n,
            scales: half_floats(checked.scales),
            zeros,
            group_of_input: (0..k).map(|i| i / self.group_size).collect(),
        };
        Ok((affine, PackedCodes::Interleaved(checked.qweight)))
    }

    /// The weights, as [`dequantize`](Self::dequantize) writes them.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn values(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.check()?.matrix.elements()?];
        self.dequantize(&mut out)?;
        Ok(out)
    }

    /// The weights, f32 `[out, in]`. Each is exact: a 5-bit integer times an f16.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::LayerLength`] when `out` has another size.
    ///
    /// [`QuantError::LayerLength`]: crate::QuantError::LayerLength
    pub fn dequantize(&self, out: &mut [f32]) -> Result<()> {
        let checked = self.check()?;
        checked
            .matrix
            .check_len("output", out.len(), checked.matrix.elements()?)?;
        let (k, n) = (self.in_features, self.out_features);
        let mut zeros = vec![0; checked.scales.len()];
        self.zeros(&mut zeros)?;
        let group_of_input: Vec<usize> = (0..k).map(|i| i / self.group_size).collect();
        let groups = Groups {
            scales: checked.scales,
            zeros: &zeros,
            group_of_input: &group_of_input,
            out_features: n,
        };
        checked.for_each_span(|column, first, codes| {
            groups.decode(column, first, codes, &mut out[column * k + first..]);
        });
        Ok(())
    }
}

impl Checked<'_> {
    /// Calls `each(column, first input feature, codes)` for spans that make up the matrix.
    fn for_each_span(&self, each: impl FnMut(usize, usize, &[u8])) {
        let words = self.matrix.out_features / 8;
        self.matrix.for_each_span(
            |row, column, tile| {
                // [in][out/8]
                let rows = self.qweight[row * words..].chunks_exact(words);
                for (i, words) in (0..TILE_ROWS).zip(rows) {
                    let columns = tile.as_chunks_mut::<8>().0;
                    for (columns, &word) in columns.iter_mut().zip(&words[column / 8..]) {
                        for (codes, code) in columns.iter_mut().zip(unpack(word)) {
                            codes[i] = code;
                        }
                    }
                }
            },
            each,
        );
    }
}

/// The shape of a layer, with the check of its output features.
fn matrix(in_features: usize, out_features: usize) -> Result<Matrix> {
    let matrix = Matrix {
        format: FORMAT,
        in_features,
        out_features,
    };
    let whole = out_features > 0 && out_features.is_multiple_of(8);
    matrix.check_parameter(
        whole,
        "out_features",
        out_features,
        "a positive multiple of 8",
    )?;
    Ok(matrix)
}

/// The eight codes of a word in the order of columns.
#[inline(always)]
fn unpack(word: [u8; 4]) -> [u8; 8] {
    let word = u32::from_le_bytes(word);
    COLUMN_SHIFTS.map(|shift| ((word >> shift) & 0x0f) as u8)
}

/// Packs codes `[out, in]` into the bytes of `qweight`.
///
/// Zero points `[groups, out]` are packed by handing in their transpose.
///
/// # Errors
/// [`QuantError::Parameter`] when `out_features` is not a positive multiple of 8 or a code needs
/// more than four bits; [`QuantError::LayerLength`] when `codes` is not `[out, in]`.
///
/// [`QuantError::Parameter`]: crate::QuantError::Parameter
/// [`QuantError::LayerLength`]: crate::QuantError::LayerLength
pub fn pack_codes(codes: &[u8], in_features: usize, out_features: usize) -> Result<Vec<u8>> {
    let matrix = matrix(in_features, out_features)?;
    matrix.check_len("codes", codes.len(), matrix.elements()?)?;
    let largest = codes.iter().copied().max().unwrap_or(0);
    matrix.check_parameter(largest < 16, "code", largest.into(), "less than 16")?;
    let mut out = Vec::with_capacity(codes.len() / 2);
    for i in 0..in_features {
        for first in (0..out_features).step_by(8) {
            let columns = COLUMN_SHIFTS.iter().zip(first..);
            let word = columns.fold(0, |word, (&shift, column)| {
                word | (u32::from(codes[column * in_features + i]) << shift)
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
