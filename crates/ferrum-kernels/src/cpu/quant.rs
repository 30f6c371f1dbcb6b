//! Weights that stay integers: ggml blocks.

use super::{CpuBackend, CpuContext};
use crate::backend::*;
use ferrum_simd::exec::{Exec, Scratch};
use ferrum_simd::memory::CpuBuffer;
use ferrum_simd::packed_store::PackedKey;
use ferrum_simd::quant::{self, CpuQuantWeight};
use ferrum_types::{FloatElement, GgufQuantType, Result, SumSplit};

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(super) fn gemm(
    exec: &Exec,
    scratch: &mut Scratch,
    op: &'static str,
    x: &CpuBuffer<f32>,
    weight: &CpuQuantWeight,
    out: &mut CpuBuffer<f32>,
    shape: GemmShape,
) -> Result<()> {
    check::gemm(op, x, weight.shape(), out, shape)?;
    let (x, out) = (x.as_slice(), out.as_mut_slice());
    quant::gemm(exec, scratch, x, weight, out, shape)
}

impl BackendQuantGguf for CpuBackend {
    type GgufWeight = CpuQuantWeight;

    fn is_native(ty: GgufQuantType) -> bool {
        quant::is_packed(ty)
    }

    fn load_quant_fused(&self, parts: &[GgufRows<'_>], cols: usize) -> Result<CpuQuantWeight> {
        let key = |key: &mut PackedKey| key.blocks(parts, cols);
        self.exec().restore_or("blocks", key, || {
            CpuQuantWeight::blocks(self.exec(), parts, cols)
        })
    }

    fn split_quant_sums(weight: &mut CpuQuantWeight, split: SumSplit) {
        weight.split_sums(split);
    }

    fn gemm_quant<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &CpuBuffer<f32>,
        weight: &CpuQuantWeight,
        out: &mut CpuBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        let out = check::only_mut::<Self, T, f32>("gemm_quant", out)?;
        let (exec, scratch) = ctx.parts();
        gemm(exec, scratch, "gemm_quant", x, weight, out, shape)
    }

    fn embedding_lookup_quant(
        ctx: &mut CpuContext,
        table: &CpuQuantWeight,
        ids: &CpuBuffer<i32>,
        out: &mut CpuBuffer<f32>,
        shape: RowShape,
    ) -> Result<()> {
        check::embedding_lookup("embedding_lookup_quant", table.shape(), ids, out, shape)?;
        let (ids, out) = (ids.as_slice(), out.as_mut_slice());
        quant::embedding_lookup(ctx.exec(), table, ids, out, shape);
        Ok(())
    }
}
