//! A matrix of a checkpoint on the host, whatever its scheme: what a device is given to load.

use crate::QuantError;
use crate::affine::{GroupParams, PackedCodes};
use crate::awq::AwqTensors;
use crate::compressed_tensors::{PackQuantizedTensors, PackedZeros};
use crate::fp8_layer::Fp8Tensors;
use crate::gptq::GptqTensors;
use ferrum_types::check::{check_rows, elements};
use ferrum_types::{Error, GgufQuantType, Result, SrcDtype, WeightPart};

/// The quantisation schemes that a checkpoint can come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantKind {
    /// GPTQ: group scales along the input features, optionally in activation order.
    Gptq,
    /// AWQ: 4 bit, asymmetric, interleaved nibbles.
    Awq,
    /// `pack-quantized` of compressed-tensors.
    PackQuantized,
    /// E4M3 with scales.
    Fp8,
    /// ggml block formats.
    Gguf(GgufQuantType),
}

/// Rows of a GGUF tensor: a whole weight, or a part of a fused projection.
#[derive(Clone, Copy, Debug)]
pub struct GgufRows<'a> {
    /// From the first block of the first row to the last block of the last row.
    pub bytes: &'a [u8],
    /// Block format.
    pub ty: GgufQuantType,
    /// Rows (output features) in this part.
    pub rows: usize,
    /// Bytes from the start of a row to that of the next, as [`WeightPart::row_stride`].
    pub row_stride: Option<usize>,
    /// What all numbers are multiplied with: files with NVFP4 have a number beside a tensor. 1 for formats that devices compute on.
    pub factor: f32,
}

impl<'a> GgufRows<'a> {
    /// Rows that follow each other.
    pub fn new(bytes: &'a [u8], ty: GgufQuantType, rows: usize) -> Self {
        Self {
            bytes,
            ty,
            rows,
            row_stride: None,
            factor: 1.0,
        }
    }

    /// The `row_bytes` bytes of row `row`.
    ///
    /// # Panics
    /// When there is no such row; [`check_quant_rows`] says whether all are there.
    #[inline]
    pub fn row(&self, row: usize, row_bytes: usize) -> &'a [u8] {
        let start = row * self.row_stride.unwrap_or(row_bytes);
        &self.bytes[start..start + row_bytes]
    }

    /// The same rows as a part of a dense weight, where they are floats; otherwise `None`.
    pub fn as_dense(&self) -> Option<WeightPart<'a>> {
        let dtype = match self.ty {
            GgufQuantType::F32 => SrcDtype::F32,
            GgufQuantType::F16 => SrcDtype::F16,
            GgufQuantType::BF16 => SrcDtype::BF16,
            _ => return None,
        };
        Some(WeightPart {
            bytes: self.bytes,
            dtype,
            rows: self.rows,
            row_stride: self.row_stride,
        })
    }
}

/// A weight on the host, whatever its scheme: a whole matrix, or the rows of one part of a fused
/// projection.
#[derive(Clone, Copy, Debug)]
pub enum QuantWeights<'a> {
    /// GPTQ.
    Gptq(GptqTensors<'a>),
    /// AWQ.
    Awq(AwqTensors<'a>),
    /// `pack-quantized` of compressed-tensors.
    PackQuantized(PackQuantizedTensors<'a>),
    /// E4M3 with scales.
    Fp8(Fp8Tensors<'a>),
    /// ggml blocks, or floats as they are.
    Gguf(GgufRows<'a>),
}

impl<'a> QuantWeights<'a> {
    /// Its scheme.
    pub fn kind(&self) -> QuantKind {
        match self {
            Self::Gptq(_) => QuantKind::Gptq,
            Self::Awq(_) => QuantKind::Awq,
            Self::PackQuantized(_) => QuantKind::PackQuantized,
            Self::Fp8(_) => QuantKind::Fp8,
            Self::Gguf(part) => QuantKind::Gguf(part.ty),
        }
    }

    /// Output features.
    #[inline]
    pub fn rows(&self) -> usize {
        match self {
            Self::Gptq(layer) => layer.out_features,
            Self::Awq(layer) => layer.out_features,
            Self::PackQuantized(layer) => layer.out_features,
            Self::Fp8(layer) => layer.out_features,
            Self::Gguf(part) => part.rows,
        }
    }

    /// Bytes in its file.
    pub fn stored_bytes(&self) -> usize {
        match self {
            Self::Gptq(layer) => {
                let order = layer.g_idx.map_or(0, <[u8]>::len);
                layer.qweight.len() + layer.qzeros.len() + layer.scales.len() + order
            }
            Self::Awq(layer) => layer.qweight.len() + layer.qzeros.len() + layer.scales.len(),
            Self::PackQuantized(layer) => {
                let zeros = match layer.zeros {
                    PackedZeros::None => 0,
                    PackedZeros::Words(bytes) | PackedZeros::Bytes(bytes) => bytes.len(),
                };
                layer.codes.len() + layer.scales.len() + zeros
            }
            Self::Fp8(layer) => layer.codes.len() + layer.scales.len(),
            Self::Gguf(part) => part.bytes.len(),
        }
    }

    /// What it is, in a word or two: `Q4_K`, `4-bit GPTQ`.
    pub fn label(&self) -> String {
        match self {
            Self::Gptq(layer) => format!("{}-bit GPTQ", layer.bits),
            Self::Awq(_) => "4-bit AWQ".into(),
            Self::PackQuantized(layer) => format!("{}-bit pack-quantized", layer.bits),
            Self::Fp8(_) => "FP8".into(),
            Self::Gguf(part) => part.ty.name().into(),
        }
    }

    /// Floats that need no decoding, as a part of a dense weight.
    pub fn as_dense(&self) -> Option<WeightPart<'a>> {
        match self {
            Self::Gguf(part) => part.as_dense(),
            _ => None,
        }
    }

    /// Scales, zero points and codes of a group scheme; `None` for other schemes.
    ///
    /// # Errors
    /// `InvalidArgument` of `op` when sizes disagree.
    pub fn affine(&self, op: &'static str) -> Result<Option<(GroupParams, PackedCodes<'a>)>> {
        let affine = match self {
            Self::Gptq(layer) => layer.affine(),
            Self::Awq(layer) => layer.affine(),
            Self::PackQuantized(layer) => layer.affine(),
            Self::Fp8(_) | Self::Gguf(_) => return Ok(None),
        };
        affine.map(Some).map_err(wrong(op))
    }

    /// Dequantises all rows to f32, `[rows, cols]`.
    ///
    /// # Errors
    /// `Shape` or `InvalidArgument` of `op` when sizes disagree.
    pub fn dequantize(&self, op: &'static str, cols: usize) -> Result<Vec<f32>> {
        let found = match self {
            Self::Gptq(layer) => layer.in_features,
            Self::Awq(layer) => layer.in_features,
            Self::PackQuantized(layer) => layer.in_features,
            Self::Fp8(layer) => layer.in_features,
            Self::Gguf(part) => return part.dequantize(op, cols),
        };
        if found != cols {
            let reason = format!("a layer has {found} input features, expected {cols}");
            return Err(Error::invalid(op, reason));
        }
        let values = match self {
            Self::Gptq(layer) => layer.values(),
            Self::Awq(layer) => layer.values(),
            Self::PackQuantized(layer) => layer.values(),
            Self::Fp8(layer) => layer.values(),
            Self::Gguf(part) => return part.dequantize(op, cols),
        };
        values.map_err(wrong(op))
    }
}

impl GgufRows<'_> {
    /// Dequantises all rows to f32, `[rows, cols]`.
    ///
    /// # Errors
    /// `InvalidArgument` of `op` when a row is no whole number of blocks, `Shape` when the bytes are
    /// not as many as the rows take.
    pub fn dequantize(&self, op: &'static str, cols: usize) -> Result<Vec<f32>> {
        let row_bytes = check_quant_rows(op, self, cols)?;
        let mut values = vec![0.0; elements(op, &[self.rows, cols])?];
        if self.row_stride.is_none() {
            crate::dequantize(self.ty, self.bytes, &mut values).map_err(wrong(op))?;
        } else {
            for (row, values) in values.chunks_exact_mut(cols.max(1)).enumerate() {
                let bytes = self.row(row, row_bytes);
                crate::dequantize(self.ty, bytes, values).map_err(wrong(op))?;
            }
        }
        if self.factor != 1.0 {
            values.iter_mut().for_each(|value| *value *= self.factor);
        }
        Ok(values)
    }
}

/// What `ferrum-quant` says of wrong bytes, as an error of `op`.
fn wrong(op: &'static str) -> impl Fn(QuantError) -> Error {
    move |error| Error::invalid(op, error.to_string())
}

/// Checks that the bytes are those of rows of whole blocks with `cols` elements each. Returns the bytes of a row.
///
/// # Errors
/// `InvalidArgument` when a row is no whole number of blocks, `Shape` when the bytes are not as many
/// as the rows take.
pub fn check_quant_rows(op: &'static str, part: &GgufRows<'_>, cols: usize) -> Result<usize> {
    let ty = part.ty;
    let row_bytes = ty.bytes_for(cols).ok_or_else(|| {
        let block = ty.block_len();
        let reason = format!("rows have {cols} elements, expected a multiple of {block} for {ty}");
        Error::invalid(op, reason)
    })?;
    check_rows(op, part.bytes, part.rows, row_bytes, part.row_stride)?;
    Ok(row_bytes)
}
