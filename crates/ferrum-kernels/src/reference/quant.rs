//! Quantised weights: decoded to f32 by `ferrum-quant` at load, then ordinary matrices.

use super::buffer::RefBuffer;
use super::core::RefContext;
use super::gemm::{self, RefWeight};
use super::{Precision, RefExperts, Reference};
use crate::backend::*;
use ferrum_types::{FloatElement, GgufQuantType, Result};

impl<P: Precision> BackendQuantGguf for Reference<P> {
    type GgufWeight = RefWeight;

    fn is_native(_: GgufQuantType) -> bool {
        false
    }

    fn load_quant_fused(&self, parts: &[GgufRows<'_>], cols: usize) -> Result<RefWeight> {
        let mut values = Vec::new();
        let mut rows = 0;
        for part in parts {
            values.extend(part.dequantize("load_quant", cols)?);
            rows += part.rows;
        }
        let shape = MatShape { rows, cols };
        Ok(RefWeight { values, shape })
    }

    fn gemm_quant<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        weight: &RefWeight,
        out: &mut RefBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm("gemm_quant", x, weight, out, shape)
    }

    fn embedding_lookup_quant(
        _: &mut RefContext<P>,
        table: &RefWeight,
        ids: &RefBuffer<i32>,
        out: &mut RefBuffer<P::Residual>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup("embedding_lookup_quant", table, ids, out, shape)
    }
}

impl<P: Precision> BackendQuantExperts for Reference<P> {
    fn load_quant_experts(
        &self,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: ExpertShape,
    ) -> Result<RefExperts> {
        let op = "load_quant_experts";
        check::expert_stack(op, shape)?;
        let rows = check::elements(op, &[shape.experts, shape.n])?;
        let values = GgufRows::new(bytes, ty, rows).dequantize(op, shape.k)?;
        Ok(RefExperts::from_values(&values, shape))
    }
}

impl<P: Precision> BackendQuantMarlin for Reference<P> {
    type GptqWeight = RefWeight;

    fn is_native_layer(_: &QuantWeights<'_>) -> bool {
        false
    }

    fn load_layers_fused(&self, parts: &[QuantWeights<'_>], cols: usize) -> Result<RefWeight> {
        let mut values = Vec::new();
        let mut rows = 0;
        for part in parts {
            values.extend(part.dequantize("load_layers", cols)?);
            rows += part.rows();
        }
        let shape = MatShape { rows, cols };
        Ok(RefWeight { values, shape })
    }

    fn gemm_gptq<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Act>,
        weight: &RefWeight,
        out: &mut RefBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm("gemm_gptq", x, weight, out, shape)
    }
}

impl<P: Precision> BackendMarlinExperts for Reference<P> {
    fn is_native_expert(_: &QuantWeights<'_>) -> bool {
        false
    }

    fn load_layer_experts(&self, experts: &[QuantWeights<'_>], cols: usize) -> Result<RefExperts> {
        let op = "load_layer_experts";
        let shape = check::expert_layers(op, experts, cols)?;
        let mut values = Vec::new();
        for expert in experts {
            values.extend(expert.dequantize(op, cols)?);
        }
        Ok(RefExperts::from_values(&values, shape))
    }
}
