//! Weights that stay quantised on the device.

use super::*;
use ferrum_quant::affine::{Affine, PackedCodes};
pub use ferrum_quant::awq::AwqTensors as AwqWeights;
pub use ferrum_quant::compressed::{PackedTensors as PackedWeights, PackedZeros};
pub use ferrum_quant::fp8::Fp8Tensors as Fp8Weights;
pub use ferrum_quant::gptq::{GptqTensors as GptqWeights, ZeroPoints as GptqZeroPoints};
use ferrum_types::{Error, FloatElement, GgufQuantType, Result, SrcDtype};

/// The quantisation schemes that a checkpoint can come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantKind {
    /// GPTQ: group scales along the input features, optionally in activation order.
    Gptq,
    /// AWQ: 4 bit, asymmetric, interleaved nibbles.
    Awq,
    /// `pack-quantized` of compressed-tensors.
    Packed,
    /// E4M3 with scales.
    Fp8,
    /// ggml block formats.
    Gguf(GgufQuantType),
}

/// Rows of a GGUF tensor: a whole weight, or a part of a fused projection.
#[derive(Clone, Copy, Debug)]
pub struct QuantPart<'a> {
    /// From the first block of the first row to the last block of the last row.
    pub bytes: &'a [u8],
    /// Block format.
    pub ty: GgufQuantType,
    /// Rows (output features) in this part.
    pub rows: usize,
    /// Bytes from the start of a row to that of the next, as [`WeightPart::row_stride`].
    pub row_stride: Option<usize>,
}

impl<'a> QuantPart<'a> {
    /// Rows that follow each other.
    pub fn new(bytes: &'a [u8], ty: GgufQuantType, rows: usize) -> Self {
        Self {
            bytes,
            ty,
            rows,
            row_stride: None,
        }
    }

    /// The `row_bytes` bytes of row `row`.
    ///
    /// # Panics
    /// When there is no such row; [`check::quant_part`] says whether all are there.
    pub fn row(&self, row: usize, row_bytes: usize) -> &'a [u8] {
        let start = row * self.row_stride.unwrap_or(row_bytes);
        &self.bytes[start..start + row_bytes]
    }

    /// The same rows as a part of a dense weight, where they are floats.
    pub fn floats(&self) -> Option<WeightPart<'a>> {
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
    Gptq(GptqWeights<'a>),
    /// AWQ.
    Awq(AwqWeights<'a>),
    /// `pack-quantized` of compressed-tensors.
    Packed(PackedWeights<'a>),
    /// E4M3 with scales.
    Fp8(Fp8Weights<'a>),
    /// ggml blocks, or floats as they are.
    Gguf(QuantPart<'a>),
}

impl<'a> QuantWeights<'a> {
    /// Its scheme.
    pub fn kind(&self) -> QuantKind {
        match self {
            Self::Gptq(_) => QuantKind::Gptq,
            Self::Awq(_) => QuantKind::Awq,
            Self::Packed(_) => QuantKind::Packed,
            Self::Fp8(_) => QuantKind::Fp8,
            Self::Gguf(part) => QuantKind::Gguf(part.ty),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        match self {
            Self::Gptq(layer) => layer.out_features,
            Self::Awq(layer) => layer.out_features,
            Self::Packed(layer) => layer.out_features,
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
            Self::Packed(layer) => {
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
            Self::Packed(layer) => format!("{}-bit pack-quantized", layer.bits),
            Self::Fp8(_) => "FP8".into(),
            Self::Gguf(part) => part.ty.name().into(),
        }
    }

    /// Floats that need no decoding, as a part of a dense weight.
    pub fn floats(&self) -> Option<WeightPart<'a>> {
        match self {
            Self::Gguf(part) => part.floats(),
            _ => None,
        }
    }

    /// Scales, zero points and codes of a group scheme; `None` for other schemes.
    ///
    /// # Errors
    /// `InvalidArgument` of `op` when sizes disagree.
    pub fn affine(&self, op: &'static str) -> Result<Option<(Affine, PackedCodes<'a>)>> {
        let affine = match self {
            Self::Gptq(layer) => layer.affine(),
            Self::Awq(layer) => layer.affine(),
            Self::Packed(layer) => layer.affine(),
            Self::Fp8(_) | Self::Gguf(_) => return Ok(None),
        };
        affine.map(Some).map_err(wrong(op))
    }

    /// All numbers in f32, `[rows, cols]`.
    ///
    /// # Errors
    /// `Shape` or `InvalidArgument` of `op` when sizes disagree.
    pub fn expand(&self, op: &'static str, cols: usize) -> Result<Vec<f32>> {
        let found = match self {
            Self::Gptq(layer) => layer.in_features,
            Self::Awq(layer) => layer.in_features,
            Self::Packed(layer) => layer.in_features,
            Self::Fp8(layer) => layer.in_features,
            Self::Gguf(part) => return part.expand(op, cols),
        };
        if found != cols {
            let reason = format!("a layer has {found} input features, expected {cols}");
            return Err(Error::invalid(op, reason));
        }
        let values = match self {
            Self::Gptq(layer) => layer.values(),
            Self::Awq(layer) => layer.values(),
            Self::Packed(layer) => layer.values(),
            Self::Fp8(layer) => layer.values(),
            Self::Gguf(part) => return part.expand(op, cols),
        };
        values.map_err(wrong(op))
    }
}

impl QuantPart<'_> {
    /// All numbers in f32, `[rows, cols]`.
    ///
    /// # Errors
    /// `InvalidArgument` of `op` when a row is no whole number of blocks, `Shape` when the bytes are
    /// not as many as the rows take.
    pub fn expand(&self, op: &'static str, cols: usize) -> Result<Vec<f32>> {
        let row_bytes = check::quant_part(op, self, cols)?;
        let mut values = vec![0.0; check::elements(op, &[self.rows, cols])?];
        if self.row_stride.is_none() {
            ferrum_quant::dequantize(self.ty, self.bytes, &mut values).map_err(wrong(op))?;
            return Ok(values);
        }
        for (row, values) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            let bytes = self.row(row, row_bytes);
            ferrum_quant::dequantize(self.ty, bytes, values).map_err(wrong(op))?;
        }
        Ok(values)
    }
}

/// What `ferrum-quant` says of wrong bytes, as an error of `op`.
fn wrong(op: &'static str) -> impl Fn(ferrum_quant::QuantError) -> Error {
    move |error| Error::invalid(op, error.to_string())
}

/// ggml block formats, computed on as they are.
pub trait BackendQuantGguf: Backend {
    /// A matrix in the backend's favourite form of its block format(s).
    type GgufWeight: Send + Sync;

    /// Whether weights of this type are computed on as they are, and not expanded at load.
    fn is_native(ty: GgufQuantType) -> bool;

    /// Loads `[rows, cols]` blocks.
    ///
    /// # Errors
    /// `Shape` when bytes and sizes disagree; `Unsupported` for a type this device cannot compute on.
    fn load_quant(
        &self,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: MatShape,
    ) -> Result<Self::GgufWeight> {
        self.load_quant_fused(&[QuantPart::new(bytes, ty, shape.rows)], shape.cols)
    }

    /// Loads one projection from parts, which may be of different types.
    fn load_quant_fused(&self, parts: &[QuantPart<'_>], cols: usize) -> Result<Self::GgufWeight>;

    /// [`Backend::gemm`] with a quantised weight.
    fn gemm_quant<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GgufWeight,
        out: &mut Self::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()>;

    /// [`Backend::embedding_lookup`] with a quantised table.
    fn embedding_lookup_quant(
        ctx: &mut Self::Context,
        table: &Self::GgufWeight,
        ids: &Self::Buffer<i32>,
        out: &mut Residual<Self>,
        shape: RowShape,
    ) -> Result<()>;
}

/// Stacks of experts in ggml block formats.
pub trait BackendQuantExperts: BackendQuantGguf + BackendMoeFused {
    /// Loads a 3-D stack `[experts, n, k]`.
    ///
    /// # Errors
    /// As [`load_quant_fused`](BackendQuantGguf::load_quant_fused).
    fn load_quant_experts(
        &self,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: ExpertShape,
    ) -> Result<Self::Experts>;
}

/// Weights of quantised checkpoints other than GGUF: GPTQ, AWQ (the layouts that Marlin kernels serve
/// on CUDA), `pack-quantized` and FP8.
pub trait BackendQuantMarlin: Backend {
    /// A matrix in the backend's favourite form.
    type GptqWeight: Send + Sync;

    /// Whether such a weight is computed on as it is, and not expanded at load.
    fn is_native_layer(weights: &QuantWeights<'_>) -> bool;

    /// Loads one projection from parts, which may be of different schemes, with rows of `cols` numbers.
    ///
    /// # Errors
    /// `Shape` when bytes and sizes disagree; `InvalidArgument` for bits or groups out of range.
    fn load_layers_fused(
        &self,
        parts: &[QuantWeights<'_>],
        cols: usize,
    ) -> Result<Self::GptqWeight>;

    /// Loads a GPTQ layer.
    ///
    /// # Errors
    /// As [`load_layers_fused`](Self::load_layers_fused).
    fn load_gptq(&self, weights: &GptqWeights<'_>) -> Result<Self::GptqWeight> {
        self.load_layers_fused(&[QuantWeights::Gptq(*weights)], weights.in_features)
    }

    /// Loads an AWQ layer.
    ///
    /// # Errors
    /// As [`load_layers_fused`](Self::load_layers_fused).
    fn load_awq(&self, weights: &AwqWeights<'_>) -> Result<Self::GptqWeight> {
        self.load_layers_fused(&[QuantWeights::Awq(*weights)], weights.in_features)
    }

    /// [`Backend::gemm`] with such a weight.
    fn gemm_gptq<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GptqWeight,
        out: &mut Self::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()>;
}

/// Stacks of experts that are each a layer of a quantised checkpoint.
pub trait BackendMarlinExperts: BackendQuantMarlin + BackendMoeFused {
    /// Whether such a weight is computed on as it is when it is an expert's; if it is not for one of
    /// them, all experts of a stack are expanded at load.
    fn is_native_expert(weights: &QuantWeights<'_>) -> bool;

    /// Loads a layer for each expert, all of one shape with rows of `cols` numbers.
    ///
    /// # Errors
    /// As [`load_layers_fused`](BackendQuantMarlin::load_layers_fused); `InvalidArgument` for no
    /// experts.
    fn load_layer_experts(
        &self,
        experts: &[QuantWeights<'_>],
        cols: usize,
    ) -> Result<Self::Experts>;

    /// Loads one GPTQ layer for each expert.
    ///
    /// # Errors
    /// As [`load_layer_experts`](Self::load_layer_experts).
    fn load_gptq_experts(&self, experts: &[GptqWeights<'_>]) -> Result<Self::Experts> {
        let cols = experts.first().map_or(0, |layer| layer.in_features);
        let layers: Vec<_> = experts.iter().copied().map(QuantWeights::Gptq).collect();
        self.load_layer_experts(&layers, cols)
    }

    /// Loads one AWQ layer for each expert.
    ///
    /// # Errors
    /// As [`load_layer_experts`](Self::load_layer_experts).
    fn load_awq_experts(&self, experts: &[AwqWeights<'_>]) -> Result<Self::Experts> {
        let cols = experts.first().map_or(0, |layer| layer.in_features);
        let layers: Vec<_> = experts.iter().copied().map(QuantWeights::Awq).collect();
        self.load_layer_experts(&layers, cols)
    }
}
