//! GPTQ checkpoints: integer codes of 2, 3, 4 or 8 bits with a scale and a zero point per group.
//!
//! `weight[o, i] = scale[g, o] · (code[i, o] − zero[g, o])` with `g` the group of input feature
//! `i`. Source of the method: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
//! Transformers" (Frantar et al., 2022); of the layout: what AutoGPTQ and GPTQModel write.
//!
//! Codes are packed along the input features: `qweight` is i32 `[in·bits/32, out]`, and in each
//! column 32 codes are a little-endian stream of `bits` words (so a 3-bit code may straddle two
//! words). Zero points are packed in the same way along the output features: `qzeros` is i32
//! `[groups, out·bits/32]`. `scales` is f16 `[groups, out]`. With activation order (`desc_act`),
//! `g_idx` i32 `[in]` names the group of each input feature; otherwise groups are runs of
//! `group_size` features.

use crate::affine::{GroupParams, PackedCodes};
use crate::error::Result;
use crate::packed_matrix::{Groups, Matrix, TILE_ROWS, group_indices, half_floats};

const FORMAT: &str = "gptq";

/// What the stored zero points mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroPoints {
    /// `checkpoint_format = "gptq"` (version 1): one less than meant.
    ///
    /// Writers take 1 from every packed field at once, so a zero point of 0 wraps around and
    /// borrows from the next field of its word. Reading adds the 1 back to the packed word, which
    /// undoes both.
    MinusOne,
    /// `checkpoint_format = "gptq_v2"`: as meant.
    AsIs,
}

/// A GPTQ linear layer as it lies in a checkpoint: little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct GptqTensors<'a> {
    /// Bits of a code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Input features in a group; the last group may be short.
    pub group_size: usize,
    /// Meaning of `qzeros`.
    pub zero_points: ZeroPoints,
    /// Input features; a multiple of 32 / bits (of 32 for 3 bits).
    pub in_features: usize,
    /// Output features; a multiple of the same.
    pub out_features: usize,
    /// i32 `[in·bits/32, out]`.
    pub qweight: &'a [u8],
    /// i32 `[groups, out·bits/32]`.
    pub qzeros: &'a [u8],
    /// f16 `[groups, out]`.
    pub scales: &'a [u8],
    /// i32 `[in]`, or `None` for runs of `group_size`.
    pub g_idx: Option<&'a [u8]>,
}

/// How many codes make a packing unit, and of how many words: no code straddles two units.
#[derive(Clone, Copy)]
struct Unit {
    bits: u32,
    codes: usize,
    words: usize,
}

impl Unit {
    /// For a matrix `[out, in]` packed along the input features, or its transpose.
    fn new(matrix: Matrix, bits: u32) -> Result<Self> {
        let (codes, words) = match bits {
            2 => (16, 1),
            3 => (32, 3),
            4 => (8, 1),
            8 => (4, 1),
            _ => (1, 0),
        };
        matrix.check_parameter(words > 0, "bits", bits as usize, "2, 3, 4 or 8")?;
        Ok(Unit { bits, codes, words })
    }

    /// Words that hold `count` codes.
    fn words_for(self, matrix: Matrix, what: &'static str, count: usize) -> Result<usize> {
        let whole = count > 0 && count.is_multiple_of(self.codes);
        let expected = "a positive multiple of 32 / bits (for 3 bits, of 32)";
        matrix.check_parameter(whole, what, count, expected)?;
        // Not larger than `count`, so it cannot overflow.
        Ok(count / self.codes * self.words)
    }

    /// Splits a packed unit into its codes; `out` has as many elements.
    #[inline(always)]
    fn unpack(self, packed: u128, out: &mut [u8]) {
        // Constant widths and counts make straight code; only 3 bits need more than a word.
        let word = packed as u32;
        match self.bits {
            2 => fields::<16>(out, |i| word >> (2 * i), 0x03),
            4 => fields::<8>(out, |i| word >> (4 * i), 0x0f),
            8 => fields::<4>(out, |i| word >> (8 * i), 0xff),
            _ => fields::<32>(out, |i| (packed >> (3 * i)) as u32, 0x07),
        }
    }

    fn pack(self, codes: impl Iterator<Item = u8>) -> u128 {
        let shifts = (0..).step_by(self.bits as usize);
        codes.zip(shifts).fold(0, |packed, (code, shift)| {
            packed | (u128::from(code) << shift)
        })
    }

    /// 1 in every field of a unit for version 1, 0 for version 2.
    fn zero_offset(self, zero_points: ZeroPoints) -> u128 {
        match zero_points {
            ZeroPoints::MinusOne => self.pack(std::iter::repeat_n(1, self.codes)),
            ZeroPoints::AsIs => 0,
        }
    }
}

#[inline(always)]
fn fields<const N: usize>(out: &mut [u8], shifted: impl Fn(u32) -> u32, mask: u32) {
    if let Some(out) = out.first_chunk_mut::<N>() {
        for (code, i) in out.iter_mut().zip(0..) {
            *code = (shifted(i) & mask) as u8;
        }
    }
}

/// A layer whose sizes and group indices have been checked.
struct Checked<'a> {
    matrix: Matrix,
    unit: Unit,
    qweight: &'a [[u8; 4]],
    qzeros: &'a [[u8; 4]],
    scales: &'a [[u8; 2]],
    zero_points: ZeroPoints,
    group_of_input: Vec<usize>,
    groups: usize,
}

impl<'a> GptqTensors<'a> {
    /// Number of groups: ⌈in / group_size⌉ (1 for a group size of 0, which [`Self::validate`]
    /// refuses).
    pub fn groups(&self) -> usize {
        self.in_features.div_ceil(self.group_size.max(1)).max(1)
    }

    /// Checks bits, sizes and group indices.
    ///
    /// # Errors
    /// [`crate::QuantError::Parameter`], [`crate::QuantError::TensorBytes`], [`crate::QuantError::TooLarge`] or
    /// [`crate::QuantError::GroupIndex`]; nothing is allocated for a layer whose sizes do not fit.
    pub fn validate(&self) -> Result<()> {
        self.check().map(|_| ())
    }

    fn check(&self) -> Result<Checked<'a>> {
        let (k, n) = (self.in_features, self.out_features);
        let matrix = Matrix {
            format: FORMAT,
            in_features: k,
            out_features: n,
        };
        let unit = Unit::new(matrix, self.bits)?;
        let k_words = unit.words_for(matrix, "in_features", k)?;
        let n_words = unit.words_for(matrix, "out_features", n)?;
        matrix.check_parameter(
            self.group_size > 0,
            "group_size",
            self.group_size,
            "at least 1",
        )?;
        matrix.elements()?;
        let groups = self.groups();
        Ok(Checked {
            matrix,
            unit,
            qweight: matrix.tensor("qweight", self.qweight, k_words * n)?,
            qzeros: matrix.tensor("qzeros", self.qzeros, groups * n_words)?,
            scales: matrix.tensor("scales", self.scales, groups * n)?,
            zero_points: self.zero_points,
            group_of_input: match self.g_idx {
                None => (0..k).map(|i| i / self.group_size).collect(),
                Some(bytes) => group_indices(FORMAT, matrix.tensor("g_idx", bytes, k)?, groups)?,
            },
            groups,
        })
    }

    /// The integer codes, `[out, in]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`crate::QuantError::LayerLength`] when `out` has another size.
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

    /// The zero points as meant, `[groups, out]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`crate::QuantError::LayerLength`] when `out` has another size.
    pub fn zeros(&self, out: &mut [u8]) -> Result<()> {
        let checked = self.check()?;
        checked
            .matrix
            .check_len("output", out.len(), checked.scales.len())?;
        checked.zeros(out);
        Ok(())
    }

    /// The group of each input feature, `[in]`.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn groups_of_inputs(&self) -> Result<Vec<usize>> {
        self.check().map(|checked| checked.group_of_input)
    }

    /// Scales and zero points, and codes as they lie.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn affine(&self) -> Result<(GroupParams, PackedCodes<'a>)> {
        let checked = self.check()?;
        let mut zeros = vec![0; checked.scales.len()];
        checked.zeros(&mut zeros);
        let affine = GroupParams {
            bits: self.bits,
            in_features: self.in_features,
            out_features: self.out_features,
            scales: half_floats(checked.scales),
            zeros,
            group_of_input: checked.group_of_input,
        };
        Ok((affine, PackedCodes::Columns(checked.qweight)))
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

    /// The weights, f32 `[out, in]`. Each is exact: a 9-bit integer times an f16.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`crate::QuantError::LayerLength`] when `out` has another size.
    pub fn dequantize(&self, out: &mut [f32]) -> Result<()> {
        let checked = self.check()?;
        checked
            .matrix
            .check_len("output", out.len(), checked.matrix.elements()?)?;
        let mut zeros = vec![0; checked.groups * self.out_features];
        checked.zeros(&mut zeros);
        let groups = Groups {
            scales: checked.scales,
            zeros: &zeros,
            group_of_input: &checked.group_of_input,
            out_features: self.out_features,
        };
        let k = self.in_features;
        checked.for_each_span(|column, first, codes| {
            groups.decode(column, first, codes, &mut out[column * k + first..]);
        });
        Ok(())
    }
}

impl Checked<'_> {
    /// Calls `each(column, first input feature, codes)` for spans that make up the matrix.
    fn for_each_span(&self, each: impl FnMut(usize, usize, &[u8])) {
        let (unit, n) = (self.unit, self.matrix.out_features);
        self.matrix.for_each_span(
            |row, column, tile| {
                // [units][words][out]
                let rows = &self.qweight[row / unit.codes * unit.words * n..];
                for (i, rows) in (0..TILE_ROWS / unit.codes).zip(rows.chunks_exact(unit.words * n))
                {
                    for (codes, column) in tile.iter_mut().zip(column..n) {
                        let words = rows.iter().skip(column).step_by(n);
                        unit.unpack(join(words), &mut codes[i * unit.codes..][..unit.codes]);
                    }
                }
            },
            each,
        );
    }

    fn zeros(&self, out: &mut [u8]) {
        let unit = self.unit;
        let offset = unit.zero_offset(self.zero_points);
        let packed = self.qzeros.chunks_exact(unit.words);
        for (words, out) in packed.zip(out.chunks_exact_mut(unit.codes)) {
            unit.unpack(join(words.iter()).wrapping_add(offset), out);
        }
    }
}

/// Words of a unit as one number, the first lowest.
#[inline(always)]
fn join<'a>(words: impl Iterator<Item = &'a [u8; 4]>) -> u128 {
    let shifts = (0..).step_by(32);
    words.zip(shifts).fold(0, |packed, (&word, shift)| {
        packed | (u128::from(u32::from_le_bytes(word)) << shift)
    })
}

/// Packs codes `[out, in]` into the bytes of `qweight`.
///
/// # Errors
/// [`crate::QuantError::Parameter`] for sizes that do not pack or a code that needs more than `bits`,
/// [`crate::QuantError::LayerLength`] when `codes` has another size than in · out.
pub fn pack_codes(
    bits: u32,
    codes: &[u8],
    in_features: usize,
    out_features: usize,
) -> Result<Vec<u8>> {
    let matrix = Matrix {
        format: FORMAT,
        in_features,
        out_features,
    };
    let unit = Unit::new(matrix, bits)?;
    unit.words_for(matrix, "in_features", in_features)?;
    matrix.check_len("codes", codes.len(), matrix.elements()?)?;
    check_range(matrix, bits, codes)?;
    let mut out = Vec::with_capacity(codes.len() / unit.codes * unit.words * 4);
    for first in (0..in_features).step_by(unit.codes) {
        let rows = codes.chunks_exact(in_features);
        let units: Vec<u128> = rows
            .map(|row| unit.pack(row[first..][..unit.codes].iter().copied()))
            .collect();
        for word in 0..unit.words {
            let words = units.iter().map(|&packed| (packed >> (32 * word)) as u32);
            out.extend(words.flat_map(u32::to_le_bytes));
        }
    }
    Ok(out)
}

/// Packs zero points `[groups, out]` into the bytes of `qzeros`.
///
/// # Errors
/// [`crate::QuantError::Parameter`] for a number of output features that does not pack or a zero point
/// that needs more than `bits`; [`crate::QuantError::LayerLength`] when `zeros` is not whole groups.
pub fn pack_zeros(
    bits: u32,
    zero_points: ZeroPoints,
    zeros: &[u8],
    out_features: usize,
) -> Result<Vec<u8>> {
    let groups = zeros.len() / out_features.max(1);
    let matrix = Matrix {
        format: FORMAT,
        in_features: groups,
        out_features,
    };
    let unit = Unit::new(matrix, bits)?;
    unit.words_for(matrix, "out_features", out_features)?;
    matrix.check_len("zeros", zeros.len(), groups * out_features)?;
    check_range(matrix, bits, zeros)?;
    let offset = unit.zero_offset(zero_points);
    let mut out = Vec::with_capacity(zeros.len() / unit.codes * unit.words * 4);
    for codes in zeros.chunks_exact(unit.codes) {
        let packed = unit.pack(codes.iter().copied()).wrapping_sub(offset);
        out.extend_from_slice(&packed.to_le_bytes()[..4 * unit.words]);
    }
    Ok(out)
}

fn check_range(matrix: Matrix, bits: u32, codes: &[u8]) -> Result<()> {
    let largest = codes.iter().copied().max().unwrap_or(0);
    matrix.check_parameter(
        u32::from(largest) >> bits == 0,
        "code",
        largest.into(),
        "less than 2^bits",
    )
}
