//! Mixtures of experts.

use super::{check_weight_parts, elements, len, require};
use crate::backend::{
    Act, Backend, BackendMoeFused, DeviceBuffer, ExpertGroups, ExpertInput, ExpertProjection,
    ExpertShape, Logits, MoeRouting, MoeShape, NormShape, QuantWeights, Residual, RouteShape,
    WeightPart,
};
use ferrum_types::Result;

/// Elements of the buffers of a product with experts.
#[derive(Clone, Copy, Debug)]
pub struct MoeLen {
    /// Pairs of tokens and experts.
    pub pairs: usize,
    /// The input.
    pub x: usize,
    /// The output.
    pub out: usize,
}

/// A stack has experts, and its matrices rows and columns: one of nothing would have no size that its
/// bytes could be checked against.
pub fn expert_stack(op: &'static str, shape: ExpertShape) -> Result<()> {
    let ExpertShape { experts, n, k } = shape;
    require(op, experts > 0 && n > 0 && k > 0, || {
        format!("the stack is [{experts}, {n}, {k}], expected at least 1 of each")
    })
}

/// [`load_expert_parts`](crate::BackendMoeFused::load_expert_parts): the stack that the parts make.
pub fn expert_parts(op: &'static str, parts: &[WeightPart<'_>], k: usize) -> Result<ExpertShape> {
    let shape = stack_of(op, parts.iter().map(|part| part.rows), k)?;
    check_weight_parts(op, parts, k)?;
    Ok(shape)
}

/// [`load_layer_experts`](crate::BackendMarlinExperts::load_layer_experts): the stack that the layers
/// make. Their bytes are checked where they are decoded.
pub fn expert_layers(
    op: &'static str,
    layers: &[QuantWeights<'_>],
    k: usize,
) -> Result<ExpertShape> {
    stack_of(op, layers.iter().map(QuantWeights::rows), k)
}

/// Experts of so many rows each, which have to be as many.
fn stack_of(
    op: &'static str,
    rows: impl ExactSizeIterator<Item = usize> + Clone,
    k: usize,
) -> Result<ExpertShape> {
    let shape = ExpertShape {
        experts: rows.len(),
        n: rows.clone().next().unwrap_or(0),
        k,
    };
    expert_stack(op, shape)?;
    for found in rows {
        require(op, found == shape.n, || {
            let expected = shape.n;
            format!("an expert has {found} rows, expected {expected} as the first")
        })?;
    }
    Ok(shape)
}

/// Pairs of tokens and experts, whose numbers are 32 bits wide.
fn pairs(op: &'static str, tokens: usize, top_k: usize) -> Result<usize> {
    let pairs = elements(op, &[tokens, top_k])?;
    require(op, i32::try_from(pairs).is_ok(), || {
        format!("{pairs} pairs, expected at most {}", i32::MAX)
    })?;
    Ok(pairs)
}

/// [`route_topk`](crate::BackendMoeFused::route_topk): the number of pairs.
pub fn route_topk<B: Backend>(
    logits: &Logits<B>,
    bias: Option<&B::Buffer<f32>>,
    routing: &MoeRouting<B>,
    shape: RouteShape,
) -> Result<usize> {
    let op = "route_topk";
    let RouteShape {
        tokens,
        experts,
        top_k,
        ..
    } = shape;
    require(op, (1..=experts).contains(&top_k), || {
        format!("top_k is {top_k}, expected 1 to {experts}, the number of experts")
    })?;
    require(op, i32::try_from(experts).is_ok(), || {
        format!("{experts} experts, expected at most {}", i32::MAX)
    })?;
    if let Some(groups) = shape.groups {
        expert_groups(op, groups, (experts, top_k))?;
    }
    let pairs = pairs(op, tokens, top_k)?;
    len(op, "logits", logits, elements(op, &[tokens, experts])?)?;
    if let Some(bias) = bias {
        len(op, "bias", bias, experts)?;
    }
    len(op, "expert_ids", &routing.expert_ids, pairs)?;
    len(op, "weights", &routing.weights, pairs)?;
    Ok(pairs)
}

/// Groups of so many experts, of which the best have enough for a token.
fn expert_groups(
    op: &'static str,
    found: ExpertGroups,
    (experts, top_k): (usize, usize),
) -> Result<()> {
    let ExpertGroups { groups, top, .. } = found;
    let fits = (1..=ExpertGroups::MAX).contains(&groups)
        && (1..=groups).contains(&top)
        && experts.is_multiple_of(groups)
        && top_k <= top * (experts / groups);
    require(op, fits, || {
        let most = ExpertGroups::MAX;
        format!(
            "{top} of {groups} groups of {experts} experts, expected at most {most} of equal size of which those taken \
             have {top_k} experts"
        )
    })
}

/// [`compute_ids_tpe`](crate::BackendMoeFused::compute_ids_tpe): the number of pairs.
pub fn compute_ids_tpe<B: Backend>(routing: &MoeRouting<B>, shape: RouteShape) -> Result<usize> {
    let op = "compute_ids_tpe";
    let pairs = pairs(op, shape.tokens, shape.top_k)?;
    sorted(op, routing, pairs, shape.experts)?;
    Ok(pairs)
}

/// The buffers of a routing for `count` pairs, sorted.
fn sorted<B: Backend>(
    op: &'static str,
    routing: &MoeRouting<B>,
    count: usize,
    experts: usize,
) -> Result<()> {
    len(op, "expert_ids", &routing.expert_ids, count)?;
    len(op, "ids", &routing.sorted_pairs, count)?;
    len(op, "tpe", &routing.tokens_per_expert, experts)?;
    len(op, "offsets", &routing.offsets, experts.saturating_add(1))
}

/// [`moe_gemm`](crate::BackendMoeFused::moe_gemm) and [`moe_gate_up`](crate::BackendMoeFused::moe_gate_up) with these
/// maps and the sizes of their matrices.
pub fn moe_product<B: BackendMoeFused>(
    op: &'static str,
    (x, input): (&Act<B>, ExpertInput),
    projections: &[(ExpertProjection<'_, B>, ExpertShape)],
    routing: &MoeRouting<B>,
    out: &Act<B>,
    shape: MoeShape,
) -> Result<MoeLen> {
    let ExpertShape { experts, n, k } = shape.experts;
    for (projection, found) in projections {
        require(op, *found == shape.experts, || {
            format!("the stack is {found:?}, expected {:?}", shape.experts)
        })?;
        if let Some(bias) = projection.bias {
            len(op, "bias", bias, elements(op, &[experts, n])?)?;
        }
    }
    let pairs = pairs(op, shape.tokens, shape.top_k)?;
    sorted(op, routing, pairs, experts)?;
    let rows = match input {
        ExpertInput::PerToken => shape.tokens,
        ExpertInput::PerPair => pairs,
    };
    let lens = MoeLen {
        pairs,
        x: elements(op, &[rows, k])?,
        out: elements(op, &[pairs, n])?,
    };
    len(op, "x", x, lens.x)?;
    len(op, "out", out, lens.out)?;
    Ok(lens)
}

/// [`moe_down`](crate::BackendMoeFused::moe_down) with a stack of this shape: what is wrong is said of the two ops that it is made of,
/// as the provided method does. `out` of the sizes is that of the result.
pub fn moe_down<B: BackendMoeFused>(
    x: &Act<B>,
    experts: (ExpertProjection<'_, B>, ExpertShape),
    (routing, weights): (&MoeRouting<B>, &MoeRouting<B>),
    pairs: &Act<B>,
    out: &Act<B>,
    shape: MoeShape,
) -> Result<MoeLen> {
    let input = (x, ExpertInput::PerPair);
    let lens = moe_product("moe_gemm", input, &[experts], routing, pairs, shape)?;
    let ExpertShape { experts, n, .. } = shape.experts;
    let route = RouteShape::softmax(shape.tokens, experts, shape.top_k);
    let op = "moe_weighted_sum";
    let sums = weighted_sum(op, pairs, weights, ("out", out), route, n)?;
    Ok(MoeLen {
        out: sums.out,
        ..lens
    })
}

/// [`moe_scale_weights`](crate::BackendMoeFused::moe_scale_weights): the number of pairs.
pub fn moe_scale_weights<B: Backend>(
    routing: &MoeRouting<B>,
    factors: &B::Buffer<f32>,
    shape: RouteShape,
) -> Result<usize> {
    let op = "moe_scale_weights";
    let pairs = pairs(op, shape.tokens, shape.top_k)?;
    len(op, "expert_ids", &routing.expert_ids, pairs)?;
    len(op, "weights", &routing.weights, pairs)?;
    len(op, "factors", factors, shape.experts)?;
    Ok(pairs)
}

/// Sums of what a token's experts gave, to the buffer called `what`: elements of `x` and of it.
pub fn weighted_sum<B: Backend>(
    op: &'static str,
    x: &Act<B>,
    routing: &MoeRouting<B>,
    (what, out): (&'static str, &impl DeviceBuffer),
    shape: RouteShape,
    dim: usize,
) -> Result<MoeLen> {
    let pairs = pairs(op, shape.tokens, shape.top_k)?;
    let lens = MoeLen {
        pairs,
        x: elements(op, &[pairs, dim])?,
        out: elements(op, &[shape.tokens, dim])?,
    };
    len(op, "x", x, lens.x)?;
    len(op, "weights", &routing.weights, pairs)?;
    len(op, what, out, lens.out)?;
    Ok(lens)
}

/// [`moe_weighted_sum_residual_norm`](crate::BackendMoeFused::moe_weighted_sum_residual_norm).
pub fn weighted_sum_norm<B: Backend>(
    x: &Act<B>,
    routing: &MoeRouting<B>,
    residual: &Residual<B>,
    (weight, norm): (&B::Buffer<f32>, NormShape),
    out: &Act<B>,
    shape: RouteShape,
) -> Result<MoeLen> {
    let op = "moe_weighted_sum_residual_norm";
    let NormShape { rows, dim, .. } = norm;
    require(op, rows == shape.tokens, || {
        let tokens = shape.tokens;
        format!("{rows} rows to norm, expected {tokens}, one for each token")
    })?;
    let lens = weighted_sum(op, x, routing, ("residual", residual), shape, dim)?;
    len(op, "weight", weight, dim)?;
    len(op, "out", out, lens.out)?;
    Ok(lens)
}
