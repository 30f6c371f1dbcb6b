//! Quantised weights: decoded to f32 by `ferrum-quant` at load, then ordinary matrices.

use super::buffer::{RefBuffer, elements};
use super::core::RefContext;
use super::gemm::{self, RefWeight};
use super::{RefExperts, ReferenceBackend};
use crate::backend::*;
use ferrum_types::{Error, GgufQuantType, Result};

/// What `ferrum-quant` says of wrong bytes, as an error of `op`.
fn wrong(op: &'static str) -> impl Fn(ferrum_quant::QuantError) -> Error {
    move |error| Error::invalid(op, error.to_string())
}

/// Decodes `rows · cols` numbers. A row is a whole number of blocks.
fn gguf(
    op: &'static str,
    bytes: &[u8],
    ty: GgufQuantType,
    rows: usize,
    cols: usize,
) -> Result<Vec<f32>> {
    let row_bytes = ty.bytes_for(cols).ok_or_else(|| {
        let block = ty.block_len();
        Error::invalid(
            op,
            format!("rows have {cols} elements, expected a multiple of {block} for {ty}"),
        )
    })?;
    let expected = elements(op, &[rows, row_bytes])?;
    if bytes.len() != expected {
        return Err(Error::Shape {
            op,
            what: "weight (in bytes)",
            found: bytes.len(),
            expected,
        });
    }
    let mut values = vec![0.0; elements(op, &[rows, cols])?];
    ferrum_quant::dequantize(ty, bytes, &mut values).map_err(wrong(op))?;
    Ok(values)
}

impl BackendQuantGguf for ReferenceBackend {
    type GgufWeight = RefWeight;

    fn is_native(_: GgufQuantType) -> bool {
        false
    }

    fn load_quant_fused(&self, parts: &[QuantPart<'_>], cols: usize) -> Result<RefWeight> {
        let mut values = Vec::new();
        let mut rows = 0;
        for part in parts {
            values.extend(gguf("load_quant", part.bytes, part.ty, part.rows, cols)?);
            rows += part.rows;
        }
        let shape = MatShape { rows, cols };
        Ok(RefWeight { values, shape })
    }

    fn gemm_quant(
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        weight: &RefWeight,
        out: &mut RefBuffer<f32>,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm("gemm_quant", x, weight, out, shape)
    }

    fn embedding_lookup_quant(
        _: &mut RefContext,
        table: &RefWeight,
        ids: &RefBuffer<i32>,
        out: &mut RefBuffer<f32>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup("embedding_lookup_quant", table, ids, out, shape)
    }
}

impl BackendQuantExperts for ReferenceBackend {
    fn load_quant_experts(
        &self,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: ExpertShape,
    ) -> Result<RefExperts> {
        let op = "load_quant_experts";
        let rows = elements(op, &[shape.experts, shape.n])?;
        RefExperts::from_values(op, gguf(op, bytes, ty, rows, shape.k)?, shape)
    }
}

impl BackendQuantMarlin for ReferenceBackend {
    type GptqWeight = RefWeight;

    fn load_gptq(&self, weights: &GptqWeights<'_>) -> Result<RefWeight> {
        let wrong = wrong("load_gptq");
        weights.validate().map_err(&wrong)?;
        let shape = MatShape {
            rows: weights.out_features,
            cols: weights.in_features,
        };
        let mut values = vec![0.0; shape.rows * shape.cols];
        weights.dequantize(&mut values).map_err(&wrong)?;
        Ok(RefWeight { values, shape })
    }

    fn load_awq(&self, weights: &AwqWeights<'_>) -> Result<RefWeight> {
        let wrong = wrong("load_awq");
        weights.validate().map_err(&wrong)?;
        let shape = MatShape {
            rows: weights.out_features,
            cols: weights.in_features,
        };
        let mut values = vec![0.0; shape.rows * shape.cols];
        weights.dequantize(&mut values).map_err(&wrong)?;
        Ok(RefWeight { values, shape })
    }

    fn gemm_gptq(
        _: &mut RefContext,
        x: &RefBuffer<f32>,
        weight: &RefWeight,
        out: &mut RefBuffer<f32>,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm("gemm_gptq", x, weight, out, shape)
    }

    fn load_gptq_experts(&self, experts: &[GptqWeights<'_>]) -> Result<RefExperts> {
        let matrices = experts
            .iter()
            .map(|expert| self.load_gptq(expert))
            .collect();
        RefExperts::from_matrices("load_gptq_experts", matrices)
    }

    fn load_awq_experts(&self, experts: &[AwqWeights<'_>]) -> Result<RefExperts> {
        let matrices = experts.iter().map(|expert| self.load_awq(expert)).collect();
        RefExperts::from_matrices("load_awq_experts", matrices)
    }
}
