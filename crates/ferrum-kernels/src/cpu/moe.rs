//! Mixture of experts: routing, products of each pair with its expert's matrices, weighted sums.

use super::{CpuBackend, CpuContext};
use crate::backend::*;
use ferrum_simd::marlin;
use ferrum_simd::memory::CpuBuffer;
use ferrum_simd::moe::{self, CpuExperts};
use ferrum_simd::packed_store::PackedKey;
use ferrum_types::{GgufQuantType, Result};

type Buf = CpuBuffer<f32>;
type Routing = MoeRouting<CpuBackend>;

/// What experts gave, with the weights of their pairs.
fn pairs<'a>(x: &'a Buf, routing: &'a Routing, shape: RouteShape, dim: usize) -> moe::Pairs<'a> {
    moe::Pairs {
        x: x.as_slice(),
        weights: routing.weights.as_slice(),
        top_k: shape.top_k,
        dim,
    }
}

/// The stack and the biases of a projection of experts.
fn stack(projection: ExpertProjection<'_, CpuBackend>) -> moe::ExpertLinear<'_> {
    moe::ExpertLinear {
        matrices: projection.matrices,
        bias: projection.bias.map(CpuBuffer::as_slice),
    }
}

/// A routing of `pairs` pairs, sorted by expert.
fn sorted(routing: &Routing, pairs: usize, shape: MoeShape) -> check::SortedPairs<'_> {
    let experts = shape.experts.experts;
    check::SortedPairs {
        expert_ids: &routing.expert_ids.as_slice()[..pairs],
        sorted_pairs: &routing.sorted_pairs.as_slice()[..pairs],
        tokens_per_expert: &routing.tokens_per_expert.as_slice()[..experts],
        offsets: &routing.offsets.as_slice()[..=experts],
    }
}

impl BackendMoeFused for CpuBackend {
    type Experts = CpuExperts;

    fn load_expert_parts(&self, parts: &[WeightPart<'_>], k: usize) -> Result<CpuExperts> {
        let shape = check::expert_parts("load_experts", parts, k)?;
        let key = |key: &mut PackedKey| key.dense(parts, k);
        self.exec().restore_or("experts-dense", key, || {
            CpuExperts::dense(self.exec(), parts, shape)
        })
    }

    fn route_topk(
        ctx: &mut CpuContext,
        logits: &Buf,
        bias: Option<&Buf>,
        routing: &mut Routing,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::route_topk(logits, bias, routing, shape)?;
        let ids = &mut routing.expert_ids.as_mut_slice()[..pairs];
        let weights = &mut routing.weights.as_mut_slice()[..pairs];
        let bias = bias.map(CpuBuffer::as_slice);
        moe::route(ctx.exec(), (logits.as_slice(), bias), (ids, weights), shape);
        Ok(())
    }

    fn compute_ids_tpe(_: &mut CpuContext, routing: &mut Routing, shape: RouteShape) -> Result<()> {
        sort_pairs(routing, shape)
    }

    fn moe_gemm(
        ctx: &mut CpuContext,
        x: &Buf,
        input: ExpertInput,
        experts: ExpertProjection<'_, Self>,
        routing: &Routing,
        out: &mut Buf,
        shape: MoeShape,
    ) -> Result<()> {
        let maps = [(experts, experts.matrices.shape())];
        let lens = check::moe_product("moe_gemm", (x, input), &maps, routing, out, shape)?;
        let pairs = sorted(routing, lens.pairs, shape);
        let x = (&x.as_slice()[..lens.x], input);
        let out = &mut out.as_mut_slice()[..lens.out];
        moe::gemm(ctx.parts(), x, stack(experts), pairs, out, shape)
    }

    fn moe_gate_up(
        ctx: &mut CpuContext,
        x: &Buf,
        gate_up: [ExpertProjection<'_, Self>; 2],
        activation: ExpertActivation,
        routing: &Routing,
        out: &mut Buf,
        shape: MoeShape,
    ) -> Result<()> {
        let (op, input) = ("moe_gate_up", (x, ExpertInput::PerToken));
        let maps = gate_up.map(|maps| (maps, maps.matrices.shape()));
        let lens = check::moe_product(op, input, &maps, routing, out, shape)?;
        let pairs = sorted(routing, lens.pairs, shape);
        let x = &x.as_slice()[..lens.x];
        let out = &mut out.as_mut_slice()[..lens.out];
        let gate_up = (gate_up.map(stack), activation);
        moe::gate_up(ctx.parts(), x, gate_up, pairs, out, shape)
    }

    fn moe_down(
        ctx: &mut CpuContext,
        x: &Buf,
        experts: ExpertProjection<'_, Self>,
        (routing, weights): (&Routing, &Routing),
        room: &mut Buf,
        (out, add): (&mut Buf, bool),
        shape: MoeShape,
    ) -> Result<()> {
        let sized = (experts, experts.matrices.shape());
        let lens = check::moe_down(x, sized, (routing, weights), room, out, shape)?;
        let pairs = (
            sorted(routing, lens.pairs, shape),
            weights.weights.as_slice(),
        );
        let x = &x.as_slice()[..lens.x];
        let out = (&mut out.as_mut_slice()[..lens.out], add);
        moe::down(ctx.parts(), x, stack(experts), pairs, out, shape)
    }

    fn split_expert_sums(experts: &mut CpuExperts, split: SumSplit) {
        experts.split_sums(split);
    }

    fn moe_scale_weights(
        _: &mut CpuContext,
        routing: &mut Routing,
        factors: &Buf,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::moe_scale_weights(routing, factors, shape)?;
        let (ids, factors) = (routing.expert_ids.as_slice(), factors.as_slice());
        let weights = &mut routing.weights.as_mut_slice()[..pairs];
        for (weight, &id) in weights.iter_mut().zip(ids) {
            *weight *=
                factors[check::index("moe_scale_weights", "an expert id", id, shape.experts)?];
        }
        Ok(())
    }

    fn moe_weighted_sum(
        ctx: &mut CpuContext,
        x: &Buf,
        routing: &Routing,
        (out, add): (&mut Buf, bool),
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        let op = "moe_weighted_sum";
        let lens = check::weighted_sum(op, x, routing, ("out", out), shape, dim)?;
        let out = &mut out.as_mut_slice()[..lens.out];
        moe::weighted_sum(ctx.exec(), pairs(x, routing, shape, dim), out, add);
        Ok(())
    }

    fn moe_weighted_sum_residual(
        ctx: &mut CpuContext,
        x: &Buf,
        routing: &Routing,
        residual: &mut Buf,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        let op = "moe_weighted_sum_residual";
        let lens = check::weighted_sum(op, x, routing, ("residual", residual), shape, dim)?;
        let residual = &mut residual.as_mut_slice()[..lens.out];
        moe::weighted_sum(ctx.exec(), pairs(x, routing, shape, dim), residual, true);
        Ok(())
    }

    fn moe_weighted_sum_residual_norm(
        ctx: &mut CpuContext,
        x: &Buf,
        routing: &Routing,
        residual: &mut Buf,
        (weight, norm): (&Buf, NormShape),
        out: &mut Buf,
        shape: RouteShape,
    ) -> Result<()> {
        check::weighted_sum_norm(x, routing, residual, (weight, norm), out, shape)?;
        let pairs = pairs(x, routing, shape, norm.dim);
        let (residual, out) = (residual.as_mut_slice(), out.as_mut_slice());
        moe::weighted_sum_norm(ctx.exec(), pairs, residual, (weight.as_slice(), norm), out);
        Ok(())
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
        let whole = GgufRows::new(bytes, ty, check::elements(op, &[experts, n])?);
        let key = |key: &mut PackedKey| {
            key.number(experts);
            key.blocks(&[whole], k);
        };
        self.exec().restore_or("experts-blocks", key, || {
            CpuExperts::blocks(self.exec(), bytes, ty, shape)
        })
    }
}

impl BackendMarlinExperts for CpuBackend {
    fn is_native_expert(weights: &QuantWeights<'_>) -> bool {
        marlin::is_native_expert(weights)
    }

    fn load_layer_experts(&self, experts: &[QuantWeights<'_>], cols: usize) -> Result<CpuExperts> {
        let op = "load_layer_experts";
        let shape = check::expert_layers(op, experts, cols)?;
        let key = |key: &mut PackedKey| key.layers(experts, cols);
        self.exec().restore_or("experts-layers", key, || {
            CpuExperts::layers(self.exec(), experts, shape)
        })
    }
}

/// Stable bucket sort of pairs by expert.
fn sort_pairs(routing: &mut Routing, shape: RouteShape) -> Result<()> {
    let pairs = check::compute_ids_tpe(routing, shape)?;
    let experts = shape.experts;
    let expert_ids = &routing.expert_ids.as_slice()[..pairs];
    let ids = &mut routing.sorted_pairs.as_mut_slice()[..pairs];
    let tpe = &mut routing.tokens_per_expert.as_mut_slice()[..experts];
    let offsets = &mut routing.offsets.as_mut_slice()[..=experts];
    tpe.fill(0);
    for &expert in expert_ids {
        tpe[check::index("compute_ids_tpe", "an expert id", expert, experts)?] += 1;
    }
    let mut next = 0;
    for (offset, count) in offsets.iter_mut().zip(&mut *tpe) {
        *offset = next;
        // From here on it counts the pairs that have found their place.
        next += std::mem::take(count);
    }
    offsets[experts] = next;
    for (pair, &expert) in (0i32..).zip(expert_ids) {
        let expert = expert as usize;
        ids[(offsets[expert] + tpe[expert]) as usize] = pair;
        tpe[expert] += 1;
    }
    Ok(())
}
