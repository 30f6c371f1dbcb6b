//! `pack-quantized` of compressed-tensors: codes of 4 or 8 bits with a scale, and possibly a zero
//! point, per group or output feature.
//!
//! Codes are signed integers with 2^(bits−1) added, packed along the *input* features: `weight_packed`
//! is i32 `[out, ⌈in·bits/32⌉]`, lowest bits first. `weight_scale` is `[out, groups]`.
//! `weight_zero_point` is packed along the *output* features (i32 `[⌈out·bits/32⌉, groups]`) or, in
//! older files, i8 `[out, groups]`; without it the layer is symmetric. With activation order
//! `weight_g_idx` i32 `[in]` names the group of each input feature.

use crate::affine::{GroupParams, PackedCodes, floats};
use crate::error::{QuantError, Result};
use crate::packed_matrix::Matrix;
use ferrum_types::SrcDtype;

const FORMAT: &str = "pack-quantized";

/// Zero points of a [`PackQuantizedTensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedZeros<'a> {
    /// All zero: a symmetric layer.
    None,
    /// i32 `[⌈out·bits/32⌉, groups]`, with 2^(bits−1) added like codes.
    Words(&'a [u8]),
    /// i8 `[out, groups]`.
    Bytes(&'a [u8]),
}

/// A `pack-quantized` layer as it lies in a checkpoint: little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct PackQuantizedTensors<'a> {
    /// Bits of a code: 4 or 8.
    pub bits: u32,
    /// Input features in a group; the last group may be short.
    pub group_size: usize,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// i32 `[out, ⌈in·bits/32⌉]`.
    pub codes: &'a [u8],
    /// `[out, groups]` of `scale_dtype`.
    pub scales: &'a [u8],
    /// Element type of `scales`.
    pub scale_dtype: SrcDtype,
    /// `weight_zero_point`.
    pub zeros: PackedZeros<'a>,
    /// i32 `[in]`, or `None` for runs of `group_size`.
    pub g_idx: Option<&'a [u8]>,
}

impl<'a> PackQuantizedTensors<'a> {
    /// Number of groups: ⌈in / group_size⌉ (1 for a group size of 0, which [`Self::validate`]
    /// refuses).
    pub fn groups(&self) -> usize {
        self.in_features.div_ceil(self.group_size.max(1)).max(1)
    }

    fn matrix(&self) -> Matrix {
        Matrix {
            format: FORMAT,
            in_features: self.in_features,
            out_features: self.out_features,
        }
    }

    /// Checks bits, sizes and group indices.
    ///
    /// # Errors
    /// [`QuantError::Parameter`], [`QuantError::TensorBytes`], [`QuantError::TooLarge`] or
    /// [`QuantError::GroupIndex`].
    pub fn validate(&self) -> Result<()> {
        let (matrix, n, groups) = (self.matrix(), self.out_features, self.groups());
        let bits = self.bits;
        matrix.check_parameter(matches!(bits, 4 | 8), "bits", bits as usize, "4 or 8")?;
        let size = self.group_size;
        matrix.check_parameter(size > 0, "group_size", size, "at least 1")?;
        matrix.check_parameter(self.in_features > 0, "in_features", 0, "at least 1")?;
        matrix.elements()?;
        let words = self.words(self.in_features);
        matrix.tensor::<4>("weight_packed", self.codes, n * words)?;
        let scale_bytes = (n * groups).saturating_mul(self.scale_dtype.size());
        if self.scales.len() != scale_bytes {
            return Err(QuantError::TensorBytes {
                format: FORMAT,
                tensor: "weight_scale",
                found: self.scales.len(),
                expected: scale_bytes,
            });
        }
        match self.zeros {
            PackedZeros::None => {}
            PackedZeros::Words(bytes) => {
                matrix.tensor::<4>("weight_zero_point", bytes, self.words(n) * groups)?;
            }
            PackedZeros::Bytes(bytes) => {
                matrix.tensor::<1>("weight_zero_point", bytes, n * groups)?;
            }
        }
        self.groups_of_inputs().map(|_| ())
    }

    /// Words that hold `count` codes.
    fn words(&self, count: usize) -> usize {
        count.div_ceil(32 / self.bits.max(1) as usize)
    }

    /// The group of each input feature, `[in]`.
    ///
    /// # Errors
    /// [`QuantError::TensorBytes`] or [`QuantError::GroupIndex`].
    pub fn groups_of_inputs(&self) -> Result<Vec<usize>> {
        let k = self.in_features;
        match self.g_idx {
            None => Ok((0..k).map(|i| i / self.group_size.max(1)).collect()),
            Some(bytes) => {
                let indices = self.matrix().tensor("weight_g_idx", bytes, k)?;
                crate::packed_matrix::group_indices(FORMAT, indices, self.groups())
            }
        }
    }

    /// Scales and zero points, and codes as they lie.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn affine(&self) -> Result<(GroupParams, PackedCodes<'a>)> {
        self.validate()?;
        let (k, n, groups) = (self.in_features, self.out_features, self.groups());
        let matrix = self.matrix();
        let by_row = floats(
            matrix,
            "weight_scale",
            (self.scales, self.scale_dtype),
            n * groups,
        )?;
        let per_word = 32 / self.bits as usize;
        let codes = matrix.tensor("weight_packed", self.codes, n * self.words(k))?;
        // [out, groups] → [groups, out]
        let transposed = |at: &dyn Fn(usize, usize) -> u8| -> Vec<u8> {
            let group = |g: usize| (0..n).map(move |o| at(o, g));
            (0..groups).flat_map(group).collect()
        };
        let middle = 1u8 << (self.bits - 1);
        let zeros = match self.zeros {
            PackedZeros::None => vec![middle; groups * n],
            PackedZeros::Words(bytes) => {
                transposed(&|o, g| self.field(bytes, o / per_word * groups + g, o % per_word))
            }
            PackedZeros::Bytes(bytes) => {
                transposed(&|o, g| bytes[o * groups + g].wrapping_add(middle))
            }
        };
        let scales = (0..groups).flat_map(|g| (0..n).map(move |o| (o, g)));
        let scales = scales.map(|(o, g)| by_row[o * groups + g]).collect();
        let affine = GroupParams {
            bits: self.bits,
            in_features: k,
            out_features: n,
            scales,
            zeros,
            group_of_input: self.groups_of_inputs()?,
        };
        Ok((affine, PackedCodes::Rows(codes)))
    }

    /// The weights, f32 `[out, in]`: an integer of at most 9 bits times a scale, rounded once.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn values(&self) -> Result<Vec<f32>> {
        let (affine, codes) = self.affine()?;
        let mut out = Vec::with_capacity(self.matrix().elements()?);
        for o in 0..self.out_features {
            for (i, group) in affine.group_of_input.iter().enumerate() {
                let at = group * self.out_features + o;
                let steps = i32::from(codes.code(&affine, o, i)) - i32::from(affine.zeros[at]);
                out.push(affine.scales[at] * steps as f32);
            }
        }
        Ok(out)
    }

    /// Field `i` of word `word`.
    fn field(&self, bytes: &[u8], word: usize, i: usize) -> u8 {
        let bit = i * self.bits as usize;
        let byte = bytes[4 * word + bit / 8];
        if self.bits == 8 {
            byte
        } else {
            (byte >> (bit % 8)) & 0x0f
        }
    }
}
