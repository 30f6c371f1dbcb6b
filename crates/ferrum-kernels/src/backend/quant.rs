//! Weights that stay quantised on the device.

use super::*;
pub use ferrum_quant::awq::AwqTensors as AwqWeights;
pub use ferrum_quant::compressed_tensors::{
    PackQuantizedTensors as PackQuantizedWeights, PackedZeros,
};
pub use ferrum_quant::fp8_layer::Fp8Tensors as Fp8Weights;
pub use ferrum_quant::gptq::{GptqTensors as GptqWeights, ZeroPoints as GptqZeroPoints};
pub use ferrum_quant::weights::{GgufRows, QuantKind, QuantWeights};
use ferrum_types::{FloatElement, GgufQuantType, Result};

/// ggml block formats, computed on as they are.
pub trait BackendQuantGguf: Backend {
    /// A matrix in the backend's favourite form of its block format(s).
    type GgufWeight: Send + Sync;

    /// Whether weights of this type are computed on as they are, and not dequantised at load.
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
        self.load_quant_fused(&[GgufRows::new(bytes, ty, shape.rows)], shape.cols)
    }

    /// Loads one projection from parts, which may be of different types.
    fn load_quant_fused(&self, parts: &[GgufRows<'_>], cols: usize) -> Result<Self::GgufWeight>;

    /// As [`Backend::split_sums`].
    fn split_quant_sums(_weight: &mut Self::GgufWeight, _split: SumSplit) {}

    /// [`Backend::gemm`] with a quantised weight.
    fn gemm_quant<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GgufWeight,
        out: &mut Self::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()>;

    /// [`Backend::gemm_gated`] with a quantised weight.
    fn gemm_quant_gated(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GgufWeight,
        activation: Activation,
        (room, out): (&mut Act<Self>, &mut Act<Self>),
        shape: GemmShape,
    ) -> Result<()> {
        let halves = check::gemm_gated("gemm_quant_gated", x, (&*room, &*out), shape)?;
        Self::gemm_quant(ctx, x, weight, room, shape)?;
        Self::activate_split(ctx, activation, room, out, halves)
    }

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

    /// Whether such a weight is computed on as it is, and not dequantised at load.
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

    /// As [`Backend::split_sums`].
    fn split_layer_sums(_weight: &mut Self::GptqWeight, _split: SumSplit) {}

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

    /// [`Backend::gemm_gated`] with such a weight.
    fn gemm_gptq_gated(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::GptqWeight,
        activation: Activation,
        (room, out): (&mut Act<Self>, &mut Act<Self>),
        shape: GemmShape,
    ) -> Result<()> {
        let halves = check::gemm_gated("gemm_gptq_gated", x, (&*room, &*out), shape)?;
        Self::gemm_gptq(ctx, x, weight, room, shape)?;
        Self::activate_split(ctx, activation, room, out, halves)
    }
}

/// Stacks of experts that are each a layer of a quantised checkpoint.
pub trait BackendMarlinExperts: BackendQuantMarlin + BackendMoeFused {
    /// Whether such a weight is computed on as it is when it is an expert's; if it is not for one of
    /// them, all experts of a stack are dequantised at load.
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
