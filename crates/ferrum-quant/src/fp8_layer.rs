//! FP8 checkpoints: E4M3 weights with scales for the whole matrix, for each output feature, or for
//! blocks.
//!
//! `weight[o, i] = scale[o / rows, i / cols] · e4m3(code[o, i])`, where `rows × cols` is the block
//! that shares a scale. A scale for the whole matrix is a block as large as the matrix, one for each
//! output feature a block of one row.

use crate::affine::floats;
use crate::error::{QuantError, Result};
use crate::fp8_codec::e4m3_to_f32;
use crate::packed_matrix::Matrix;
use ferrum_types::SrcDtype;

const FORMAT: &str = "fp8";

/// An FP8 layer as it lies in a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Tensors<'a> {
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// Output and input features that share a scale; blocks at the ends may be smaller.
    pub block: [usize; 2],
    /// E4M3 `[out, in]`.
    pub codes: &'a [u8],
    /// `[⌈out / block[0]⌉, ⌈in / block[1]⌉]` of `scale_dtype`.
    pub scales: &'a [u8],
    /// Element type of `scales`.
    pub scale_dtype: SrcDtype,
}

impl Fp8Tensors<'_> {
    fn matrix(&self) -> Matrix {
        Matrix {
            format: FORMAT,
            in_features: self.in_features,
            out_features: self.out_features,
        }
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// [`QuantError::Parameter`], [`QuantError::TensorBytes`] or [`QuantError::TooLarge`].
    pub fn validate(&self) -> Result<()> {
        self.scales().map(|_| ())
    }

    /// Scales in f32, `[⌈out / block[0]⌉, ⌈in / block[1]⌉]`.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn scales(&self) -> Result<Vec<f32>> {
        let matrix = self.matrix();
        for size in self.block {
            matrix.check_parameter(size > 0, "block size", size, "at least 1")?;
        }
        let (codes, expected) = (self.codes.len(), matrix.elements()?);
        if codes != expected {
            return Err(QuantError::TensorBytes {
                format: FORMAT,
                tensor: "weight",
                found: codes,
                expected,
            });
        }
        // At most one for each element, so the product fits.
        let count = self.out_features.div_ceil(self.block[0]) * self.scales_of_row();
        floats(matrix, "scale", (self.scales, self.scale_dtype), count)
    }

    /// Scales along the input features.
    pub fn scales_of_row(&self) -> usize {
        self.in_features.div_ceil(self.block[1].max(1))
    }

    /// The weights, f32 `[out, in]`.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn values(&self) -> Result<Vec<f32>> {
        let scales = self.scales()?;
        let [rows, cols] = self.block;
        let table: [f32; 256] = std::array::from_fn(|code| e4m3_to_f32(code as u8));
        let mut out = Vec::with_capacity(self.codes.len());
        for (o, codes) in self.codes.chunks_exact(self.in_features.max(1)).enumerate() {
            let scales = &scales[o / rows * self.scales_of_row()..];
            for (codes, scale) in codes.chunks(cols).zip(scales) {
                out.extend(codes.iter().map(|&code| scale * table[usize::from(code)]));
            }
        }
        Ok(out)
    }
}
