//! Layers of quantised checkpoints.

use super::quant;
use super::{CpuBackend, CpuContext};
use crate::backend::*;
use ferrum_simd::marlin;
use ferrum_simd::memory::CpuBuffer;
use ferrum_simd::packed_store::PackedKey;
use ferrum_simd::quant::CpuQuantWeight;
use ferrum_types::{FloatElement, Result, SumSplit};

impl BackendQuantMarlin for CpuBackend {
    type GptqWeight = CpuQuantWeight;

    fn is_native_layer(weights: &QuantWeights<'_>) -> bool {
        marlin::is_native_layer(weights)
    }

    fn load_layers_fused(&self, parts: &[QuantWeights<'_>], cols: usize) -> Result<CpuQuantWeight> {
        let key = |key: &mut PackedKey| key.layers(parts, cols);
        self.exec()
            .restore_or("layers", key, || marlin::load(self.exec(), parts, cols))
    }

    fn split_layer_sums(weight: &mut CpuQuantWeight, split: SumSplit) {
        weight.split_sums(split);
    }

    fn gemm_gptq<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &CpuBuffer<f32>,
        weight: &CpuQuantWeight,
        out: &mut CpuBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        let out = check::only_mut::<Self, T, f32>("gemm_gptq", out)?;
        let (exec, scratch) = ctx.parts();
        quant::gemm(exec, scratch, "gemm_gptq", x, weight, out, shape)
    }
}
