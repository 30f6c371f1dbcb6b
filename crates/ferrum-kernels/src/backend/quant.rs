//! Weights that stay quantised on the device.

use super::*;
pub use ferrum_quant::awq::AwqTensors as AwqWeights;
pub use ferrum_quant::gptq::{GptqTensors as GptqWeights, ZeroPoints as GptqZeroPoints};
use ferrum_types::{GgufQuantType, Result};

/// The quantisation schemes that a checkpoint can come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantKind {
    /// GPTQ: group scales along the input features, optionally in activation order.
    Gptq,
    /// AWQ: 4 bit, asymmetric, interleaved nibbles.
    Awq,
    /// ggml block formats.
    Gguf(GgufQuantType),
}

/// Rows of a GGUF tensor: a whole weight, or a part of a fused projection.
#[derive(Clone, Copy, Debug)]
pub struct QuantPart<'a> {
    /// Blocks, row after row.
    pub bytes: &'a [u8],
    /// Block format.
    pub ty: GgufQuantType,
    /// Rows (output features) in this part.
    pub rows: usize,
}

/// A quantised weight on the host, whatever its scheme.
#[derive(Clone, Debug)]
pub enum QuantWeights<'a> {
    /// GPTQ.
    Gptq(GptqWeights<'a>),
    /// AWQ.
    Awq(AwqWeights<'a>),
    /// ggml blocks; several parts make one fused projection.
    Gguf {
        /// Parts in row order.
        parts: Vec<QuantPart<'a>>,
        /// Input features.
        cols: usize,
    },
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
        self.load_quant_fused(
            &[QuantPart {
                bytes,
                ty,
                rows: shape.rows,
            }],
            shape.cols,
        )
    }

    /// Loads one projection from parts, which may be of different types.
    fn load_quant_fused(&self, parts: &[QuantPart<'_>], cols: usize) -> Result<Self::GgufWeight>;

    /// [`Backend::gemm`] with a quantised weight.
    fn gemm_quant(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GgufWeight,
        out: &mut Act<Self>,
        shape: GemmShape,
    ) -> Result<()>;

    /// [`Backend::embedding_lookup`] with a quantised table.
    fn embedding_lookup_quant(
        ctx: &mut Self::Context,
        table: &Self::GgufWeight,
        ids: &Self::Buffer<i32>,
        out: &mut Act<Self>,
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

/// GPTQ and AWQ weights (the layouts that Marlin kernels serve on CUDA).
pub trait BackendQuantMarlin: Backend {
    /// A matrix in the backend's favourite form.
    type GptqWeight: Send + Sync;

    /// Loads a GPTQ layer.
    ///
    /// # Errors
    /// `Shape` when bytes and sizes disagree; `InvalidArgument` for bits or groups out of range.
    fn load_gptq(&self, weights: &GptqWeights<'_>) -> Result<Self::GptqWeight>;

    /// Loads an AWQ layer.
    fn load_awq(&self, weights: &AwqWeights<'_>) -> Result<Self::GptqWeight>;

    /// [`Backend::gemm`] with such a weight.
    fn gemm_gptq(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GptqWeight,
        out: &mut Act<Self>,
        shape: GemmShape,
    ) -> Result<()>;

    /// Loads one GPTQ layer for each expert; all of one shape.
    fn load_gptq_experts(&self, experts: &[GptqWeights<'_>]) -> Result<Self::Experts>
    where
        Self: BackendMoeFused;

    /// Loads one AWQ layer for each expert; all of one shape.
    fn load_awq_experts(&self, experts: &[AwqWeights<'_>]) -> Result<Self::Experts>
    where
        Self: BackendMoeFused;
}
