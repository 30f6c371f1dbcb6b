//! Mixtures of experts: routing, products of pairs with their experts, weighted sums. All of it follows what is on the
//! device, and nothing is read back.

use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::gemm::COLUMNS;
use super::pack::{Order, Orders};
use super::quant::{row_blocks, row_bytes};
use super::quant_gemv::{self, GemvPairs};
use super::quant_kernels::{kernels, weight_args};
use super::quant_weight::{CudaQuantWeight, QuantSlab, is_native_layer};
use super::role::{CudaAct, of_role};
use super::tile::{self, Epilogue, TilePairs};
use super::tile_operands::{Pairs, TileOut, TileRows};
use super::weight::row_stride;
use super::{elementwise, norm};
use crate::backend::check::{self, elements};
use crate::backend::*;
use ferrum_types::{FloatElement, GgufQuantType, Result, SrcDtype};

type Buf = CudaBuffer<f32>;
type Routing<A> = MoeRouting<CudaBackend<A>>;

/// A stack of matrices `[experts, n, k]`, kept as one of `experts · n` rows.
pub struct CudaExperts {
    slab: QuantSlab,
    shape: ExpertShape,
}

impl CudaExperts {
    /// Parts that become one slab; where they do not, all are dequantised to f32.
    fn load<A: CudaAct>(
        device: &CudaBackend<A>,
        op: &'static str,
        parts: &[QuantWeights<'_>],
        shape: ExpertShape,
    ) -> Result<Self> {
        let loaded = CudaQuantWeight::load(device, op, parts, shape.k, Orders::OfEach)?;
        let files = match loaded.slabs[..] {
            [QuantSlab::Packed(_)] if tile::is_for::<A>() => &[
                KernelFile::Moe,
                KernelFile::QuantPairs,
                KernelFile::QuantDown,
                KernelFile::QuantGroups,
            ][..],
            _ => &[KernelFile::Moe],
        };
        device.shared.prepare(files);
        if let Ok([slab]) = <[QuantSlab; 1]>::try_from(loaded.slabs) {
            return Ok(Self { slab, shape });
        }
        let mut values = Vec::new();
        for part in parts {
            values.extend(part.dequantize(op, shape.k)?);
        }
        let rows = elements(op, &[shape.experts, shape.n])?;
        let part = WeightPart::new(bytemuck::cast_slice(&values), SrcDtype::F32, rows);
        Self::dense(device, op, &[part], shape)
    }

    /// Floats of one dtype, or of several, which become f32.
    fn dense<A: CudaAct>(
        device: &CudaBackend<A>,
        op: &'static str,
        parts: &[WeightPart<'_>],
        shape: ExpertShape,
    ) -> Result<Self> {
        let ctx = device.new_context()?;
        let mut weight = super::weight::load(ctx, op, parts, shape.k)?;
        match (weight.slabs.pop(), weight.slabs.is_empty()) {
            (Some(slab), true) => Ok(Self {
                slab: QuantSlab::Dense(slab),
                shape,
            }),
            _ => {
                let blocks = |part: &WeightPart<'_>| {
                    let ty = match part.dtype {
                        SrcDtype::F32 => GgufQuantType::F32,
                        SrcDtype::F16 => GgufQuantType::F16,
                        SrcDtype::BF16 => GgufQuantType::BF16,
                    };
                    let mut bytes = Vec::new();
                    let row_bytes = shape.k * part.dtype.size();
                    (0..part.rows)
                        .for_each(|row| bytes.extend_from_slice(part.row(row, row_bytes)));
                    GgufRows::new(&bytes, ty, part.rows).dequantize(op, shape.k)
                };
                let values = parts
                    .iter()
                    .map(blocks)
                    .collect::<Result<Vec<_>>>()?
                    .concat();
                let rows = elements(op, &[shape.experts, shape.n])?;
                let part = WeightPart::new(bytemuck::cast_slice(&values), SrcDtype::F32, rows);
                Self::dense(device, op, &[part], shape)
            }
        }
    }
}

/// The same by tiles of pairs, with what follows on the sums; to activations, or with a flag to f32.
fn tiled_product<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, pairs_per_row): (TileRows, usize),
    experts: &CudaExperts,
    routing: &Routing<A>,
    (at, is_f32, pairs): (u64, bool, usize),
    epilogue: Epilogue,
) -> Result<()> {
    let n = experts.shape.n;
    let of = TilePairs {
        of: pairs_of(routing, experts.shape, (pairs, pairs_per_row)),
        offsets: (&routing.offsets).into(),
    };
    let out = TileOut {
        at,
        is_f32,
        columns: n,
        first: 0,
        n,
    };
    let weight = (&experts.slab).into();
    tile::pairs(ctx, op, (x, of), weight, (out, epilogue))
}

/// An activation as the kernels have it: its number, alpha and limit.
fn gating(activation: ExpertActivation) -> (usize, f32, f32) {
    match activation {
        ExpertActivation::Silu => (1, 0.0, 0.0),
        ExpertActivation::GeluTanh => (2, 0.0, 0.0),
        ExpertActivation::ClampedSwiglu { alpha, limit } => (3, alpha, limit),
    }
}

/// Gate and up by tiles: the second product takes the first, in f32, as the factor of its sums.
fn tiled_gate_up<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: (TileRows, usize),
    [gate, up]: [ExpertProjection<'_, CudaBackend<A>>; 2],
    (activation, routing): (ExpertActivation, &Routing<A>),
    (out, pairs): (u64, usize),
) -> Result<()> {
    let elements = elements(op, &[pairs, gate.matrices.shape.n, size_of::<f32>()])?;
    let gated = ctx.second_scratch(elements)?;
    let bias = |maps: ExpertProjection<'_, CudaBackend<A>>| Epilogue {
        bias: maps.bias.into(),
        ..Epilogue::NONE
    };
    let to = (gated, true, pairs);
    tiled_product(ctx, op, x, gate.matrices, routing, to, bias(gate))?;
    let (activation, alpha, limit) = gating(activation);
    let epilogue = Epilogue {
        gate: Arg::At(gated),
        activation,
        alpha,
        limit,
        ..bias(up)
    };
    let to = (out, false, pairs);
    tiled_product(ctx, op, x, up.matrices, routing, to, epilogue)
}

/// Pairs of which `pairs_per_row` have a row of x.
fn pairs_of<A: CudaAct>(
    routing: &Routing<A>,
    shape: ExpertShape,
    (pairs, pairs_per_row): (usize, usize),
) -> Pairs {
    Pairs {
        expert_ids: (&routing.expert_ids).into(),
        ids: (&routing.sorted_pairs).into(),
        pairs,
        experts: shape.experts,
        pairs_per_row: pairs_per_row.max(1),
    }
}

/// The same as `quant_gemv.rs` takes those of so many tokens.
fn gemv_pairs<A: CudaAct>(
    ctx: &CudaContext<A>,
    experts: &CudaExperts,
    (routing, tokens): (&Routing<A>, usize),
    (pairs, pairs_per_row): (usize, usize),
) -> GemvPairs {
    let shape = experts.shape;
    let sizes = (pairs, shape.experts);
    let by_groups = quant_gemv::takes_groups(ctx, &experts.slab, tokens, sizes);
    GemvPairs {
        of: pairs_of(routing, shape, (pairs, pairs_per_row)),
        offsets: by_groups.then(|| (&routing.offsets).into()),
        n: shape.n,
    }
}

/// Whether products of so many tokens and pairs are tiles.
fn takes_tiles<A: CudaAct>(
    ctx: &CudaContext<A>,
    experts: &CudaExperts,
    (tokens, pairs): (usize, usize),
) -> bool {
    let sizes = (pairs, experts.shape.experts);
    let by_groups = quant_gemv::takes_groups(ctx, &experts.slab, tokens, sizes);
    tile::takes_pairs(ctx, pairs, sizes.1) && !by_groups
}

/// `out[pair, n] = x · expert(pair)ᵀ + bias(pair)`, where `pairs_per_row` pairs have a row of x; the caller has checked all arguments.
fn pair_product<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, pairs_per_row): (&CudaBuffer<A>, usize),
    maps: ExpertProjection<'_, CudaBackend<A>>,
    (routing, tokens): (&Routing<A>, usize),
    (out, pairs): (u64, usize),
) -> Result<()> {
    let experts = maps.matrices;
    let ExpertShape {
        experts: count,
        n,
        k,
    } = experts.shape;
    let blocks = elements(op, &[pairs, n.div_ceil(COLUMNS)])?;
    let grid = (blocks, 32 * COLUMNS as u32, 0);
    let [of_pair, ids] = [&routing.expert_ids, &routing.sorted_pairs].map(Arg::from);
    let ends = [Arg::Int(n), Arg::Int(count), Arg::Int(pairs_per_row.max(1))];
    match &experts.slab {
        QuantSlab::Dense(slab) => {
            let kernel = match slab.dtype {
                SrcDtype::F32 => "moe_gemm_f32",
                SrcDtype::F16 => "moe_gemm_f16",
                SrcDtype::BF16 => "moe_gemm_bf16",
            };
            let args = [
                Arg::At(out),
                x.into(),
                Arg::At(slab.memory.at),
                of_pair,
                ids,
                Arg::Int(pairs),
                Arg::Int(k),
                Arg::Long(row_stride(k)),
                ends[0],
                ends[1],
                ends[2],
            ];
            ctx.launch(op, (KernelFile::Gemm, kernel), grid, args)?;
        }
        QuantSlab::Float8(slab) => {
            let mut args = [Arg::At(0); 14];
            args[..2].copy_from_slice(&[Arg::At(out), x.into()]);
            args[2..7].copy_from_slice(&slab.args());
            args[7..11].copy_from_slice(&[of_pair, ids, Arg::Int(pairs), Arg::Int(k)]);
            args[11..].copy_from_slice(&ends);
            ctx.launch(op, (KernelFile::Float8, "float8_moe"), grid, args)?;
        }
        QuantSlab::Packed(slab) if tile::is_for::<A>() => {
            let rows = TileRows::of(x, pairs / pairs_per_row.max(1), k);
            let of = gemv_pairs(ctx, experts, (routing, tokens), (pairs, pairs_per_row));
            return quant_gemv::pairs(ctx, op, rows, of, (slab, maps.bias.into()), out);
        }
        QuantSlab::Packed(slab) => {
            let blocks = row_blocks(ctx, n, pairs);
            let mut args = [Arg::At(0); 18];
            args[..2].copy_from_slice(&[Arg::At(out), x.into()]);
            args[2..8].copy_from_slice(&weight_args(slab));
            args[8..14].copy_from_slice(&[
                Arg::At(slab.order.as_ref().map_or(0, Order::at)),
                of_pair,
                ids,
                Arg::Int(pairs),
                Arg::Int(k),
                Arg::Int(slab.groups),
            ]);
            args[14..17].copy_from_slice(&ends);
            args[17] = Arg::Int(blocks);
            let grid = (
                elements(op, &[pairs, blocks])?,
                grid.1,
                row_bytes(slab.groups),
            );
            let kernel = kernels(slab.format).experts;
            ctx.launch(op, (KernelFile::Quant, kernel), grid, args)?;
        }
    }
    let total = elements(op, &[pairs, n])?;
    add_bias(ctx, op, maps, routing, (Arg::At(out), total))
}

/// `out[pair, :] += bias(pair)` of `total` products, if the experts have biases; the caller has checked all arguments.
fn add_bias<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    experts: ExpertProjection<'_, CudaBackend<A>>,
    routing: &Routing<A>,
    (out, total): (Arg, usize),
) -> Result<()> {
    let Some(bias) = experts.bias else {
        return Ok(());
    };
    let ExpertShape { experts, n, .. } = experts.matrices.shape;
    let args = [
        out,
        bias.into(),
        (&routing.expert_ids).into(),
        Arg::Long(total),
        Arg::Long(n),
        Arg::Int(experts),
    ];
    ctx.launch_elementwise(op, (KernelFile::Moe, "add_pair_bias"), total, args)
}

/// Tokens and pairs of `moe.cu`'s `route_pairs`, at most.
const ROUTED_TOKENS: usize = 8;
const ROUTED_PAIRS: usize = 256;

/// `ROUTE_PARAMS` of `moe.cu`.
const ROUTE_ARGS: usize = 13;

fn route_args<A: CudaAct>(
    logits: &Buf,
    bias: Option<&Buf>,
    routing: &mut Routing<A>,
    shape: RouteShape,
) -> [Arg; ROUTE_ARGS] {
    let (groups, top_groups, best_two) = shape.groups.map_or((0, 0, false), |of| {
        (of.groups, of.top, of.score == GroupScore::BestTwo)
    });
    [
        (&mut routing.expert_ids).into(),
        (&mut routing.weights).into(),
        logits.into(),
        bias.into(),
        Arg::Int(shape.experts),
        Arg::Int(shape.top_k),
        shape.renormalize.into(),
        Arg::Float(shape.scale),
        (shape.score == ExpertScore::Sigmoid).into(),
        shape.ranks_logits(bias.is_some()).into(),
        Arg::Int(groups),
        Arg::Int(top_groups),
        best_two.into(),
    ]
}

/// `out[token, :] (+)= Σ weights[pair] · x[pair, :]`; the caller has checked all arguments.
fn weighted_sum<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, routing): (&CudaBuffer<A>, &Routing<A>),
    (out, adds): (&mut CudaBuffer<T>, bool),
    shape: RouteShape,
    (total, dim): (usize, usize),
) -> Result<()> {
    let args = [
        out.into(),
        x.into(),
        (&routing.weights).into(),
        Arg::Long(total),
        Arg::Long(dim),
        Arg::Int(shape.top_k),
        adds.into(),
    ];
    let kernel = of_role::<A, T>(op, ["weighted_sum_act", "weighted_sum_f32"])?;
    ctx.launch_elementwise(op, (KernelFile::Moe, kernel), total, args)
}

impl<A: CudaAct> BackendMoeFused for CudaBackend<A> {
    type Experts = CudaExperts;

    fn load_expert_parts(&self, parts: &[WeightPart<'_>], k: usize) -> Result<CudaExperts> {
        const OP: &str = "load_experts";
        let shape = check::expert_parts(OP, parts, k)?;
        CudaExperts::dense(self, OP, parts, shape)
    }

    fn route_topk(
        ctx: &mut CudaContext<A>,
        logits: &Buf,
        bias: Option<&Buf>,
        routing: &mut Routing<A>,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::route_topk::<Self>(logits, bias, routing, shape)?;
        let args = route_args(logits, bias, routing, shape);
        let tokens = if pairs == 0 { 0 } else { shape.tokens };
        let kernel = (KernelFile::Moe, "route");
        ctx.launch("route_topk", kernel, (tokens, 32, 0), args)
    }

    fn route_pairs(
        ctx: &mut CudaContext<A>,
        logits: &Buf,
        bias: Option<&Buf>,
        routing: &mut Routing<A>,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::route_topk::<Self>(logits, bias, routing, shape)?;
        check::compute_ids_tpe(routing, shape)?;
        if pairs == 0 || pairs > ROUTED_PAIRS || shape.tokens > ROUTED_TOKENS {
            Self::route_topk(ctx, logits, bias, routing, shape)?;
            return Self::compute_ids_tpe(ctx, routing, shape);
        }
        let mut args = [Arg::Int(shape.tokens); ROUTE_ARGS + 4];
        args[..ROUTE_ARGS].copy_from_slice(&route_args(logits, bias, routing, shape));
        args[ROUTE_ARGS..ROUTE_ARGS + 3].copy_from_slice(&[
            (&mut routing.sorted_pairs).into(),
            (&mut routing.tokens_per_expert).into(),
            (&mut routing.offsets).into(),
        ]);
        let kernel = (KernelFile::Moe, "route_pairs");
        let grid = (1, 32 * ROUTED_TOKENS as u32, 0);
        ctx.launch("route_pairs", kernel, grid, args)
    }

    fn compute_ids_tpe(
        ctx: &mut CudaContext<A>,
        routing: &mut Routing<A>,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::compute_ids_tpe(routing, shape)?;
        let args = [
            (&mut routing.sorted_pairs).into(),
            (&mut routing.tokens_per_expert).into(),
            (&mut routing.offsets).into(),
            (&routing.expert_ids).into(),
            Arg::Int(pairs),
            Arg::Int(shape.experts),
        ];
        ctx.launch(
            "compute_ids_tpe",
            (KernelFile::Moe, "sort_pairs"),
            (shape.experts.div_ceil(4), 128, 0),
            args,
        )
    }

    fn moe_gemm(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        input: ExpertInput,
        experts: ExpertProjection<'_, Self>,
        routing: &Routing<A>,
        out: &mut CudaBuffer<A>,
        shape: MoeShape,
    ) -> Result<()> {
        const OP: &str = "moe_gemm";
        let maps = [(experts, experts.matrices.shape)];
        let lens = check::moe_product(OP, (x, input), &maps, routing, out, shape)?;
        let x = match input {
            ExpertInput::PerToken => (x, shape.tokens, shape.top_k),
            ExpertInput::PerPair => (x, lens.pairs, 1),
        };
        let (x, rows, pairs_per_row) = x;
        if takes_tiles(ctx, experts.matrices, (shape.tokens, lens.pairs)) {
            let x = (TileRows::of(x, rows, shape.experts.k), pairs_per_row);
            let to = (out.at(0), false, lens.pairs);
            let epilogue = Epilogue {
                bias: experts.bias.into(),
                ..Epilogue::NONE
            };
            return tiled_product(ctx, OP, x, experts.matrices, routing, to, epilogue);
        }
        let to = (out.at(0), lens.pairs);
        pair_product(
            ctx,
            OP,
            (x, pairs_per_row),
            experts,
            (routing, shape.tokens),
            to,
        )
    }

    fn moe_gate_up(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        [gate, up]: [ExpertProjection<'_, Self>; 2],
        activation: ExpertActivation,
        routing: &Routing<A>,
        out: &mut CudaBuffer<A>,
        shape: MoeShape,
    ) -> Result<()> {
        const OP: &str = "moe_gate_up";
        let maps = [gate, up].map(|maps| (maps, maps.matrices.shape));
        let input = ExpertInput::PerToken;
        let lens = check::moe_product(OP, (x, input), &maps, routing, out, shape)?;
        let tiled = |maps: &CudaExperts| takes_tiles(ctx, maps, (shape.tokens, lens.pairs));
        if tiled(gate.matrices) || tiled(up.matrices) {
            let x = TileRows::of(x, shape.tokens, shape.experts.k);
            let (of, to) = ((activation, routing), (out.at(0), lens.pairs));
            return tiled_gate_up(ctx, OP, (x, shape.top_k), [gate, up], of, to);
        }
        if let (QuantSlab::Packed(a), QuantSlab::Packed(b)) =
            (&gate.matrices.slab, &up.matrices.slab)
            && tile::is_for::<A>()
            && quant_gemv::takes_gated(a, b)
        {
            let shape_of = gate.matrices.shape;
            let rows = TileRows::of(x, shape.tokens, shape_of.k);
            let of = gemv_pairs(
                ctx,
                gate.matrices,
                (routing, shape.tokens),
                (lens.pairs, shape.top_k),
            );
            let maps = [(a, gate.bias.into()), (b, up.bias.into())];
            let to = (gating(activation), out.at(0));
            return quant_gemv::gated_pairs(ctx, OP, rows, of, maps, to);
        }
        let x = (x, shape.top_k);
        let gated = ctx.second_scratch(lens.out.saturating_mul(size_of::<A>()))?;
        let of = (routing, shape.tokens);
        pair_product(ctx, OP, x, gate, of, (gated, lens.pairs))?;
        pair_product(ctx, OP, x, up, of, (out.at(0), lens.pairs))?;
        let (alpha, limit) = match activation {
            ExpertActivation::Silu => (0.0, 0.0),
            ExpertActivation::GeluTanh => {
                let kind = elementwise::number(Activation::Gelu(GeluKind::Tanh));
                let (kind, total) = (Arg::Int(kind), Arg::Long(lens.out));
                let args = [
                    (&mut *out).into(),
                    Arg::At(gated),
                    (&mut *out).into(),
                    kind,
                    total,
                ];
                return ctx.launch_elementwise(
                    OP,
                    (KernelFile::Elementwise, "unary_mul_act"),
                    lens.out,
                    args,
                );
            }
            ExpertActivation::ClampedSwiglu { alpha, limit } => (alpha, limit),
        };
        let args = [
            out.into(),
            Arg::At(gated),
            Arg::Long(lens.out),
            Arg::Float(alpha),
            Arg::Float(limit),
        ];
        ctx.launch_elementwise(OP, (KernelFile::Moe, "activate_pairs"), lens.out, args)
    }

    fn moe_down(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        experts: ExpertProjection<'_, Self>,
        routings: (&Routing<A>, &Routing<A>),
        pairs: &mut CudaBuffer<A>,
        (out, adds): (&mut CudaBuffer<A>, bool),
        shape: MoeShape,
    ) -> Result<()> {
        const OP: &str = "moe_down";
        let CudaExperts { slab, shape: stack } = experts.matrices;
        let lens = check::moe_down::<Self>(x, (experts, *stack), routings, pairs, out, shape)?;
        match slab {
            QuantSlab::Packed(packed) if quant_gemv::takes_weighted_sums(ctx, slab, shape) => {
                let (routing, weights) = routings;
                let rows = TileRows::of(x, lens.pairs, shape.experts.k);
                let of = pairs_of(routing, *stack, (lens.pairs, 1));
                let x = (rows, of, (&weights.weights).into());
                let maps = (packed, experts.bias.into());
                quant_gemv::weighted_sums(ctx, OP, x, maps, (out.at(0), adds), shape)
            }
            _ => compose::moe_down::<Self>(ctx, x, experts, routings, pairs, (out, adds), shape),
        }
    }

    fn moe_scale_weights(
        ctx: &mut CudaContext<A>,
        routing: &mut Routing<A>,
        factors: &Buf,
        shape: RouteShape,
    ) -> Result<()> {
        let pairs = check::moe_scale_weights::<Self>(routing, factors, shape)?;
        let args = [
            (&mut routing.weights).into(),
            factors.into(),
            (&routing.expert_ids).into(),
            Arg::Long(pairs),
            Arg::Int(shape.experts),
        ];
        let kernel = (KernelFile::Moe, "scale_weights");
        ctx.launch_elementwise("moe_scale_weights", kernel, pairs, args)
    }

    fn moe_weighted_sum(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        routing: &Routing<A>,
        (out, adds): (&mut CudaBuffer<A>, bool),
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        const OP: &str = "moe_weighted_sum";
        let lens = check::weighted_sum(OP, x, routing, ("out", out), shape, dim)?;
        let sizes = (lens.out, dim);
        weighted_sum(ctx, OP, (x, routing), (out, adds), shape, sizes)
    }

    fn moe_weighted_sum_residual(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        routing: &Routing<A>,
        residual: &mut Buf,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()> {
        const OP: &str = "moe_weighted_sum_residual";
        let lens = check::weighted_sum(OP, x, routing, ("residual", residual), shape, dim)?;
        let sizes = (lens.out, dim);
        weighted_sum(ctx, OP, (x, routing), (residual, true), shape, sizes)
    }

    fn moe_weighted_sum_residual_norm(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        routing: &Routing<A>,
        residual: &mut Buf,
        (weight, norm): (&Buf, NormShape),
        out: &mut CudaBuffer<A>,
        shape: RouteShape,
    ) -> Result<()> {
        const OP: &str = "moe_weighted_sum_residual_norm";
        let lens = check::weighted_sum_norm(x, routing, residual, (weight, norm), out, shape)?;
        let sizes = (lens.out, norm.dim);
        weighted_sum(ctx, OP, (x, routing), (residual, true), shape, sizes)?;
        norm::rms_norm(ctx, residual, weight, out, norm)
    }
}

impl<A: CudaAct> BackendQuantExperts for CudaBackend<A> {
    fn load_quant_experts(
        &self,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: ExpertShape,
    ) -> Result<CudaExperts> {
        const OP: &str = "load_quant_experts";
        check::expert_stack(OP, shape)?;
        let rows = elements(OP, &[shape.experts, shape.n])?;
        let part = QuantWeights::Gguf(GgufRows::new(bytes, ty, rows));
        CudaExperts::load(self, OP, &[part], shape)
    }
}

impl<A: CudaAct> BackendMarlinExperts for CudaBackend<A> {
    fn is_native_expert(weights: &QuantWeights<'_>) -> bool {
        is_native_layer(weights)
    }

    fn load_layer_experts(&self, experts: &[QuantWeights<'_>], cols: usize) -> Result<CudaExperts> {
        const OP: &str = "load_layer_experts";
        let shape = check::expert_layers(OP, experts, cols)?;
        if experts.iter().all(Self::is_native_expert) {
            return CudaExperts::load(self, OP, experts, shape);
        }
        let dequantized = |layer: &QuantWeights<'_>| layer.dequantize(OP, cols);
        let values = experts
            .iter()
            .map(dequantized)
            .collect::<Result<Vec<_>>>()?
            .concat();
        let rows = elements(OP, &[shape.experts, shape.n])?;
        let part = WeightPart::new(bytemuck::cast_slice(&values), SrcDtype::F32, rows);
        CudaExperts::dense(self, OP, &[part], shape)
    }
}
