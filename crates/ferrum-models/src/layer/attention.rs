//! Grouped-query attention.

use super::{Scratch, StepState};
use crate::inventory::{Projection, ProjectionNorm};
use crate::kv_layer::AnyKvLayer;
use crate::linear::Linear;
use crate::spec::{GqaSpec, QkNormSpec};
use ferrum_kernels::{
    Act, Activation, AttnConfig, Backend, BackendCollective, CopyColumnsShape, HeadLayout,
    HeadsShape, NormShape, PagedQkv, ParallelNorm, QkNorm, QkvShape, QkvTransform, Rope, RowShape,
};
use ferrum_types::{Error, Result};

/// Weights of grouped-query attention.
pub(crate) struct GqaWeights<B: Backend> {
    /// q, k and v as one projection, or q alone where the layer shares keys and values.
    pub(crate) qkv: Box<dyn Linear<B>>,
    /// Of each head, or of all heads of a token.
    pub(crate) q_norm: Option<B::Buffer<f32>>,
    pub(crate) k_norm: Option<B::Buffer<f32>>,
    /// Of query and key heads.
    pub(crate) layer_norms: Option<[HeadLayerNorm<B>; 2]>,
    /// Ones, where value heads are normed.
    pub(crate) v_norm: Option<B::Buffer<f32>>,
    /// Norms over all heads of queries and of keys.
    pub(crate) projection_norms: [ProjectionNorm; 2],
    /// A score of each head that gives nothing.
    pub(crate) sinks: Option<B::Buffer<f32>>,
    /// Projection to the gate, by whose sigmoid attention's output is multiplied.
    pub(crate) gate: Option<Box<dyn Linear<B>>>,
    pub(crate) out: Box<dyn Linear<B>>,
}

/// A layer norm of each head.
pub(crate) struct HeadLayerNorm<B: Backend> {
    /// `[head_dim]`: the same for all heads, or ones.
    pub(crate) weight: B::Buffer<f32>,
    pub(crate) bias: Option<B::Buffer<f32>>,
    /// `[heads, head_dim]`: weights of each head's own.
    pub(crate) factors: Option<B::Buffer<B::Act>>,
}

impl<B: Backend> HeadLayerNorm<B> {
    /// `x` → `out`, with `spare` of the same length in between.
    fn forward(
        &self,
        ctx: &mut B::Context,
        (x, spare, out): (&mut Act<B>, &mut Act<B>, &mut Act<B>),
        first_rows: &B::Buffer<i32>,
        (shape, eps): (HeadsShape, f32),
    ) -> Result<()> {
        let norm = NormShape {
            rows: shape.tokens * shape.heads,
            dim: shape.head_dim,
            eps,
        };
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        let Some(factors) = &self.factors else {
            return B::layer_norm(ctx, x, weight, bias, out, norm);
        };
        B::layer_norm(ctx, x, weight, bias, spare, norm)?;
        let (rows, dim) = (shape.tokens, shape.heads * shape.head_dim);
        B::gather_rows(ctx, factors, first_rows, x, RowShape { rows, dim })?;
        B::mul(ctx, spare, x, out, rows * dim)
    }
}

impl<B: Backend> GqaWeights<B> {
    /// What happens to each head of queries and keys before attention.
    fn transform<'a>(&'a self, gqa: &GqaSpec, step: &StepState<'a, B>) -> QkvTransform<'a, B> {
        let head_norm = |weight| QkNorm {
            weight,
            eps: step.spec.norm_eps,
        };
        let of_heads = |norm: &'a Option<B::Buffer<f32>>| match gqa.qk_norm {
            QkNormSpec::Heads | QkNormSpec::Unweighted => norm.as_ref().map(head_norm),
            QkNormSpec::None
            | QkNormSpec::Projection
            | QkNormSpec::LayerHeads
            | QkNormSpec::LayerEach => None,
        };
        QkvTransform {
            q_norm: of_heads(&self.q_norm),
            k_norm: of_heads(&self.k_norm),
            rope: gqa.rope.map(|index| step.rope(index)),
        }
    }
}

impl GqaSpec {
    /// The fused projection of so many tokens.
    pub(crate) fn qkv_shape(&self, tokens: usize) -> QkvShape {
        QkvShape {
            tokens,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
        }
    }
}

/// `normed` → `delta` through attention, writing this step's keys and values if they are the layer's own.
pub(super) fn gqa_forward<B: BackendCollective>(
    ctx: &mut B::Context,
    index: usize,
    (gqa, weights): (&GqaSpec, &GqaWeights<B>),
    kv: &mut dyn AnyKvLayer<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        delta,
        qkv,
        q,
        attn,
        heads,
        first_rows,
        gates,
        lora,
        profiler,
        ..
    } = scratch;
    let projected = match gqa.shared_kv {
        // [tokens, hidden] → [tokens, q_dim + k_dim + v_dim]
        None => &mut *qkv,
        // [tokens, hidden] → [tokens, q_dim]
        Some(_) => &mut *q,
    };
    profiler.measure(ctx, "qkv", |ctx| {
        weights.qkv.forward(ctx, normed, projected, rows)?;
        step.adapters
            .add(ctx, (index, Projection::Qkv), normed, projected, lora)
    })?;
    let shape = gqa.qkv_shape(rows);
    let transform = weights.transform(gqa, step);
    match (gqa.shared_kv, gqa.qk_norm) {
        (None, QkNormSpec::Projection) => profiler.measure(ctx, "rope_kv_append", |ctx| {
            let parts = (&mut *qkv, &mut *q, heads);
            append_normed(ctx, weights, (transform.rope, shape), parts, (kv, step))
        })?,
        (None, _) if gqa.parts_heads() => profiler.measure(ctx, "rope_kv_append", |ctx| {
            let parts = (&mut *qkv, &mut *q, heads, &*first_rows);
            append_parted(ctx, (gqa, weights), (transform, shape), parts, (kv, step))
        })?,
        (None, _) => profiler.measure(ctx, "rope_kv_append", |ctx| {
            let input = PagedQkv {
                qkv,
                transform,
                shape,
            };
            kv.append_qkv(ctx, input, q, step.batch)
        })?,
        (Some(_), _) => profiler.measure(ctx, "rope", |ctx| {
            let QkvTransform { q_norm, rope, .. } = transform;
            B::qk_norm_rope(ctx, q, HeadLayout::TokenMajor, q_norm, rope, shape.q())
        })?,
    }
    let config = AttnConfig {
        heads: gqa.heads,
        kv_heads: gqa.kv_heads,
        head_dim: gqa.head_dim,
        value_dim: gqa.value_dim,
        scale: gqa.scale,
        causal: gqa.causal,
        sliding_window: gqa.sliding_window,
        chunked: gqa.chunked,
        softcap: gqa.softcap,
    };
    // [tokens, heads, head_dim] → [tokens, heads, value_dim]
    profiler.measure(ctx, "attention", |ctx| {
        let sinks = weights.sinks.as_ref();
        kv.attention(ctx, q, sinks, step.batch, attn, &config)
    })?;
    if let Some(images) = step.images {
        profiler.measure(ctx, "image_attention", |ctx| {
            let cache = (&*kv, weights.sinks.as_ref());
            images.attend(ctx, (&mut *q, &mut *qkv), cache, attn, &config)
        })?;
    }
    match (&weights.gate, gates) {
        (Some(gate), Some(gates)) => profiler.measure(ctx, "attn_gate", |ctx| {
            // [tokens, hidden] → [tokens, heads · value_dim]
            gate.forward(ctx, normed, &mut gates.output, rows)?;
            let (at, scratch) = ((index, Projection::AttnGate), &mut gates.output);
            step.adapters.add(ctx, at, normed, scratch, lora)?;
            let len = rows * gqa.heads * gqa.value_dim;
            B::activate(ctx, Activation::Sigmoid, scratch, Some(attn), q, len)
        }),
        _ => Ok(()),
    }?;
    let attended = if weights.gate.is_some() { q } else { attn };
    // [tokens, heads · value_dim] → [tokens, hidden]
    profiler.measure(ctx, "attn_out", |ctx| {
        weights.out.forward(ctx, attended, delta, rows)?;
        step.adapters
            .add(ctx, (index, Projection::AttnOut), attended, delta, lora)
    })
}

/// Splits a fused projection, norms queries and keys over all heads of a token, those of other ranks too, rotates them, and writes keys and values
/// to the pool. `qkv` is used up.
fn append_normed<B: BackendCollective>(
    ctx: &mut B::Context,
    weights: &GqaWeights<B>,
    (rope, shape): (Option<Rope<'_, B>>, QkvShape),
    (qkv, q, [queries, keys, values]): (&mut Act<B>, &mut Act<B>, &mut [Act<B>; 3]),
    (kv, step): (&mut dyn AnyKvLayer<B>, &StepState<'_, B>),
) -> Result<()> {
    let (Some(q_norm), Some(k_norm)) = (&weights.q_norm, &weights.k_norm) else {
        let reason = "the norms of queries and keys are missing";
        return Err(Error::invalid("attention", reason));
    };
    let norm = |own, norm: ProjectionNorm| ParallelNorm {
        part: NormShape {
            rows: shape.tokens,
            dim: own,
            eps: step.spec.norm_eps,
        },
        dim: norm.dim,
        counts: norm.counts,
        sums: norm.sums,
    };
    let [all_queries, all_keys] = weights.projection_norms;
    B::split_qkv(ctx, qkv, queries, keys, values, shape)?;
    B::rms_norm_parallel(ctx, queries, q_norm, q, norm(shape.q_dim(), all_queries))?;
    B::rms_norm_parallel(ctx, keys, k_norm, qkv, norm(shape.k_dim(), all_keys))?;
    if rope.is_some() {
        B::qk_norm_rope(ctx, q, HeadLayout::TokenMajor, None, rope, shape.q())?;
        B::qk_norm_rope(ctx, qkv, HeadLayout::TokenMajor, None, rope, shape.k())?;
    }
    kv.append(ctx, qkv, values, step.batch)
}

/// A fused projection, where queries go, room for the three parts, and a row number for each token.
type PartedHeads<'a, B> = (
    &'a mut Act<B>,
    &'a mut Act<B>,
    &'a mut [Act<B>; 3],
    &'a <B as Backend>::Buffer<i32>,
);

/// Parts a fused projection into queries, keys and values, norms and rotates each, and writes keys and values to the pool.
fn append_parted<B: Backend>(
    ctx: &mut B::Context,
    (gqa, weights): (&GqaSpec, &GqaWeights<B>),
    (transform, shape): (QkvTransform<'_, B>, QkvShape),
    (qkv, q, [queries, keys, values], first_rows): PartedHeads<'_, B>,
    (kv, step): (&mut dyn AnyKvLayer<B>, &StepState<'_, B>),
) -> Result<()> {
    if let Some([q_norm, k_norm]) = &weights.layer_norms {
        B::split_qkv(ctx, qkv, queries, keys, values, shape)?;
        let eps = step.spec.norm_eps;
        // [tokens, q_dim] → [tokens, q_dim]
        let parts = (&mut *queries, &mut *qkv, &mut *q);
        q_norm.forward(ctx, parts, first_rows, (shape.q(), eps))?;
        // [tokens, k_dim] → [tokens, k_dim]; queries are in their place.
        let parts = (&mut *keys, &mut *qkv, &mut *queries);
        k_norm.forward(ctx, parts, first_rows, (shape.k(), eps))?;
        B::copy_slice(ctx, queries, 0, keys, 0, shape.tokens * shape.k_dim())?;
    } else if gqa.keys_are_values {
        let (q_dim, k_dim) = (shape.q_dim(), shape.k_dim());
        // [tokens, q | k] → [tokens, q], [tokens, k]
        for (part, first, len) in [(&mut *q, 0, q_dim), (&mut *keys, q_dim, k_dim)] {
            let columns = CopyColumnsShape {
                rows: shape.tokens,
                len,
                src_first: first,
                src_width: gqa.projected_dim(),
                dst_first: 0,
                dst_width: len,
            };
            B::copy_columns(ctx, qkv, part, columns)?;
        }
        B::copy_slice(ctx, keys, 0, values, 0, shape.tokens * k_dim)?;
    } else {
        B::split_qkv(ctx, qkv, q, keys, values, shape)?;
    }
    let QkvTransform {
        q_norm,
        k_norm,
        rope,
    } = transform;
    let v_norm = weights.v_norm.as_ref().map(|weight| QkNorm {
        weight,
        eps: step.spec.norm_eps,
    });
    let layout = HeadLayout::TokenMajor;
    B::qk_norm_rope(ctx, q, layout, q_norm, rope, shape.q())?;
    B::qk_norm_rope(ctx, keys, layout, k_norm, rope, shape.k())?;
    if let Some(index) = gqa.query_scale {
        // A rotation by nothing, whose cosines are the factor.
        B::qk_norm_rope(ctx, q, layout, None, Some(step.rope(index)), shape.q())?;
    }
    if v_norm.is_some() {
        B::qk_norm_rope(ctx, values, layout, v_norm, None, shape.v())?;
    }
    kv.append(ctx, keys, values, step.batch)
}
