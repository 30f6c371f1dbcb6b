//! Mixture of experts: routing, products of each pair with its expert's matrices, weighted sums.
//!
//! * `routing`: which experts, and the pairs sorted by expert.
//! * `product`: the kernels of `gemm` and `quant` over the rows of each expert, all experts in one
//!   region of the pool.
//! * `sums`: what the experts of a token gave, added in the order of its pairs.
//!
//! A pair's products are those of its row alone, whichever pairs share its expert: the same bits as if
//! the token had come by itself.

mod product;
mod routing;
mod sums;

use super::CpuBackend;
use super::buffer::CpuBuffer;
use super::core::CpuContext;
use super::exec::Exec;
use super::gemm::pack::CpuWeight;
use super::marlin::{is_native_expert, native_experts};
use super::packed_store::PackedKey;
use super::quant::expand_stack;
use super::quant::pack::{Packed, is_packed};
use crate::backend::*;
use ferrum_types::{GgufQuantType, Result, SrcDtype};
use product::{Gated, Plain};

type Buf = CpuBuffer<f32>;
type Routing = MoeRouting<CpuBackend>;

/// A stack of expert matrices of one shape, each in panels of its own.
#[derive(Debug)]
pub struct CpuExperts {
    pub(super) shape: ExpertShape,
    pub(super) matrices: Matrices,
}

#[derive(Debug)]
pub(super) enum Matrices {
    Dense(Vec<CpuWeight>),
    Packed(Vec<Packed>),
}

impl Matrices {
    /// The order of an expert's inputs, where it is not their own.
    fn order(&self, expert: usize) -> Option<&[u32]> {
        match self {
            Matrices::Dense(_) => None,
            Matrices::Packed(matrices) => matrices[expert].order.as_deref(),
        }
    }
}

impl CpuExperts {
    /// Whether an expert wants its inputs in another order than their own.
    fn is_ordered(&self) -> bool {
        (0..self.shape.experts).any(|expert| self.matrices.order(expert).is_some())
    }
}

/// A stack of floats, a part for each expert.
fn dense_experts(exec: &Exec, parts: &[WeightPart<'_>], shape: ExpertShape) -> Result<CpuExperts> {
    let matrices = CpuWeight::stack(exec, parts, shape.k, parts.len())?;
    Ok(CpuExperts {
        shape,
        matrices: Matrices::Dense(matrices),
    })
}

impl BackendMoeFused for CpuBackend {
    type Experts = CpuExperts;

    fn load_expert_parts(&self, parts: &[WeightPart<'_>], k: usize) -> Result<CpuExperts> {
        let shape = check::expert_parts("load_experts", parts, k)?;
        let key = |key: &mut PackedKey| key.dense(parts, k);
        self.exec().restore_or("experts-dense", key, || {
            dense_experts(self.exec(), parts, shape)
        })
    }

    fn route_topk_softmax(
        ctx: &mut CpuContext,
        logits: &Buf,
        routing: &mut Routing,
        shape: RouteShape,
    ) -> Result<()> {
        routing::route(ctx.exec(), logits, routing, shape)
    }

    fn compute_ids_tpe(_: &mut CpuContext, routing: &mut Routing, shape: RouteShape) -> Result<()> {
        routing::sort_pairs(routing, shape)
    }

    fn moe_gemm(
        ctx: &mut CpuContext,
        x: &Buf,
        input: ExpertInput,
        experts: &CpuExperts,
        routing: &Routing,
        out: &mut Buf,
        shape: MoeShape,
    ) -> Result<()> {
        let (op, stacks) = ("moe_gemm", [experts]);
        product::per_pair::<1, Plain>(ctx.parts(), op, (x, input), stacks, routing, out, shape)
    }

    fn moe_gate_up_silu(
        ctx: &mut CpuContext,
        x: &Buf,
        (gate, up): (&CpuExperts, &CpuExperts),
        routing: &Routing,
        out: &mut Buf,
        shape: MoeShape,
    ) -> Result<()> {
        let (op, x) = ("moe_gate_up_silu", (x, ExpertInput::PerToken));
        product::per_pair::<2, Gated>(ctx.parts(), op, x, [gate, up], routing, out, shape)
    }

    fn moe_weighted_sum(
        ctx: &mut CpuContext,
        x: &Buf,
        routing: &Routing,
        out: &mut Buf,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        sums::weighted_sum(ctx.exec(), x, routing, out, shape, dim)
    }

    fn moe_weighted_sum_residual(
        ctx: &mut CpuContext,
        x: &Buf,
        routing: &Routing,
        residual: &mut Buf,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        sums::weighted_sum_residual(ctx.exec(), x, routing, residual, shape, dim)
    }

    fn moe_weighted_sum_residual_norm(
        ctx: &mut CpuContext,
        x: &Buf,
        routing: &Routing,
        residual: &mut Buf,
        norm: (&Buf, NormShape),
        out: &mut Buf,
        shape: RouteShape,
    ) -> Result<()> {
        sums::weighted_sum_residual_norm(ctx.exec(), x, routing, residual, norm, out, shape)
    }
}

impl BackendQuantExperts for CpuBackend {
    fn load_quant_experts(
        &self,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: ExpertShape,
    ) -> Result<CpuExperts> {
        let op = "load_quant_experts";
        check::expert_stack(op, shape)?;
        let ExpertShape { experts, n, k } = shape;
        let part = |bytes, rows| QuantPart::new(bytes, ty, rows);
        let whole = part(bytes, check::elements(op, &[experts, n])?);
        let key = |key: &mut PackedKey| {
            key.number(experts);
            key.blocks(&[whole], k);
        };
        self.exec().restore_or("experts-blocks", key, || {
            let matrices = if is_packed(ty) {
                Matrices::Packed(Packed::stack(self.exec(), &[whole], k, experts)?)
            } else {
                // Bytes of another length than the stack's make parts that are refused.
                let each = bytes.chunks((bytes.len() / experts).max(1));
                let parts: Vec<_> = each.map(|bytes| part(bytes, n)).collect();
                Matrices::Dense(expand_stack(self.exec(), &parts, k, experts)?)
            };
            Ok(CpuExperts { shape, matrices })
        })
    }
}

impl BackendMarlinExperts for CpuBackend {
    fn is_native_expert(weights: &QuantWeights<'_>) -> bool {
        is_native_expert(weights)
    }

    fn load_layer_experts(&self, experts: &[QuantWeights<'_>], cols: usize) -> Result<CpuExperts> {
        let op = "load_layer_experts";
        let shape = check::expert_layers(op, experts, cols)?;
        let key = |key: &mut PackedKey| key.layers(experts, cols);
        self.exec().restore_or("experts-layers", key, || {
            if let Some(matrices) = native_experts(self.exec(), experts, cols)? {
                return Ok(CpuExperts { shape, matrices });
            }
            let values = experts.iter().map(|expert| expert.expand(op, cols));
            let values = values.collect::<Result<Vec<_>>>()?;
            let parts = values.iter().map(|values| {
                WeightPart::new(bytemuck::cast_slice(values), SrcDtype::F32, shape.n)
            });
            let parts: Vec<_> = parts.collect();
            dense_experts(self.exec(), &parts, shape)
        })
    }
}
