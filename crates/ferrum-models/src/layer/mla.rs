//! Multi-head latent attention.

use super::{Scratch, StepState};
use crate::experts::PerHeadLinear;
use crate::inventory::Projection;
use crate::kv_layer::AnyKvLayer;
use crate::linear::Linear;
use crate::spec::{AttentionSpec, DecoderSpec, MlaSpec};
use ferrum_kernels::{
    Act, Backend, CopyColumnsShape, HeadLayout, HeadsShape, MoeRouting, NormShape,
};
use ferrum_types::{Error, Result};

/// A compression of queries, and its norm.
pub(crate) type QueryDown<B> = (Box<dyn Linear<B>>, <B as Backend>::Buffer<f32>);

/// Weights of multi-head latent attention.
pub(crate) struct MlaWeights<B: Backend> {
    /// If queries are compressed.
    pub(crate) q_down: Option<QueryDown<B>>,
    /// To each head's queries, `[nope | rope]`.
    pub(crate) q: Box<dyn Linear<B>>,
    /// To the compressed row and the rotated part of keys.
    pub(crate) latent: Box<dyn Linear<B>>,
    /// The norm of the row.
    pub(crate) latent_norm: B::Buffer<f32>,
    /// From the queries of each head to what compressed rows are multiplied with.
    pub(crate) keys: Box<dyn PerHeadLinear<B>>,
    /// From sums of compressed rows to the values of each head.
    pub(crate) values: Box<dyn PerHeadLinear<B>>,
    pub(crate) out: Box<dyn Linear<B>>,
}

/// What a step through latent attention needs for a moment, reused by all layers. Rows are tokens.
pub(crate) struct MlaScratch<B: Backend> {
    /// `[tokens, q_rank]`: compressed queries, and those normed.
    low: [Act<B>; 2],
    /// `[tokens, heads, nope]` and `[tokens, heads, rope]`.
    parts: [Act<B>; 2],
    /// `[tokens, rank + rope]`: what is kept of a token.
    latent: Act<B>,
    /// `[tokens, rank]`: its compressed part, and that normed.
    compressed: [Act<B>; 2],
    /// `[tokens, rope]`: its rotated part.
    rotated: Act<B>,
    /// Which matrix is of which head, for each token.
    heads: MoeRouting<B>,
}

/// Elements of a token in [`MlaScratch`]: the largest among the layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MlaWidths {
    heads: usize,
    q_rank: usize,
    nope: usize,
    rope: usize,
    latent: usize,
    rank: usize,
    rotated: usize,
}

impl MlaWidths {
    /// `None` for a model without latent attention. All of its layers have equally many heads.
    pub(crate) fn of(spec: &DecoderSpec) -> Option<Self> {
        let mut widths: Option<Self> = None;
        for layer in &spec.layers {
            if let AttentionSpec::Mla(mla) = &layer.attention {
                let all = widths.get_or_insert_default();
                all.heads = mla.heads;
                all.q_rank = all.q_rank.max(mla.q_rank.unwrap_or(0));
                all.nope = all.nope.max(mla.heads * mla.nope_dim);
                all.rope = all.rope.max(mla.heads * mla.rope_dim);
                all.latent = all.latent.max(mla.latent_dim());
                all.rank = all.rank.max(mla.rank);
                all.rotated = all.rotated.max(mla.rope_dim);
            }
        }
        widths
    }

    /// Elements that a token takes.
    pub(crate) fn elements(self) -> usize {
        let rows = 2 * self.q_rank + self.nope + self.rope;
        rows + self.latent + 2 * self.rank + self.rotated + 3 * self.heads
    }
}

impl<B: Backend> MlaScratch<B> {
    pub(crate) fn alloc(device: &B, widths: MlaWidths, max_tokens: usize) -> Result<Self> {
        let alloc = |width: usize| device.alloc::<B::Act>(max_tokens * width);
        let heads = widths.heads;
        let mut routing = MoeRouting::alloc(device, max_tokens, heads, heads)?;
        let of_each: Vec<i32> = (0i32..).take(heads).collect();
        routing.expert_ids = device.from_slice(&of_each.repeat(max_tokens))?;
        Ok(Self {
            low: [alloc(widths.q_rank)?, alloc(widths.q_rank)?],
            parts: [alloc(widths.nope)?, alloc(widths.rope)?],
            latent: alloc(widths.latent)?,
            compressed: [alloc(widths.rank)?, alloc(widths.rank)?],
            rotated: alloc(widths.rotated)?,
            heads: routing,
        })
    }
}

/// Columns from `from.0` on of rows of `from.1`, to those from `to.0` on of rows of `to.1`.
fn columns(
    rows: usize,
    len: usize,
    (src_first, src_width): (usize, usize),
    (dst_first, dst_width): (usize, usize),
) -> CopyColumnsShape {
    CopyColumnsShape {
        rows,
        len,
        src_first,
        src_width,
        dst_first,
        dst_width,
    }
}

/// `normed` → `delta` through latent attention, writing this step's rows.
pub(super) fn mla_forward<B: Backend>(
    ctx: &mut B::Context,
    index: usize,
    (mla, weights): (&MlaSpec, &MlaWeights<B>),
    kv: &mut dyn AnyKvLayer<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    queries(ctx, index, (mla, weights), step, scratch)?;
    latent_rows(ctx, (mla, weights), step, scratch)?;
    let Scratch {
        delta,
        qkv,
        q,
        attn,
        mla: own,
        lora,
        profiler,
        ..
    } = scratch;
    let own = own.as_mut().ok_or_else(other_model)?;
    // [tokens, heads, rank + rope] → [tokens, heads, rank]
    profiler.measure(ctx, "attention", |ctx| {
        kv.append_latent(ctx, &own.latent, step.batch)?;
        let config = (mla.heads, mla.scale);
        kv.mla_attention(ctx, q, step.batch, attn, config)
    })?;
    // [tokens, heads, rank] → [tokens, heads, value_dim]
    profiler.measure(ctx, "values", |ctx| {
        weights.values.forward(ctx, attn, &own.heads, qkv, rows)
    })?;
    // [tokens, heads · value_dim] → [tokens, hidden]
    profiler.measure(ctx, "attn_out", |ctx| {
        weights.out.forward(ctx, qkv, delta, rows)?;
        let place = (index, Projection::AttnOut);
        step.adapters.add(ctx, place, qkv, delta, lora)
    })
}

/// `normed` → `q`: what the rows of the cache are multiplied with.
fn queries<B: Backend>(
    ctx: &mut B::Context,
    index: usize,
    (mla, weights): (&MlaSpec, &MlaWeights<B>),
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        qkv,
        q,
        attn,
        mla: own,
        lora,
        profiler,
        ..
    } = scratch;
    let own = own.as_mut().ok_or_else(other_model)?;
    // [tokens, hidden] → [tokens, heads, nope | rope]
    profiler.measure(ctx, "queries", |ctx| match &weights.q_down {
        Some((down, norm)) => {
            let [low, low_normed] = &mut own.low;
            down.forward(ctx, normed, low, rows)?;
            let shape = NormShape {
                rows,
                dim: mla.q_rank.unwrap_or(0),
                eps: mla.norm_eps,
            };
            B::rms_norm(ctx, low, norm, low_normed, shape)?;
            weights.q.forward(ctx, low_normed, qkv, rows)
        }
        None => {
            weights.q.forward(ctx, normed, qkv, rows)?;
            let place = (index, Projection::Qkv);
            step.adapters.add(ctx, place, normed, qkv, lora)
        }
    })?;
    let (all, nope, rope) = (rows * mla.heads, mla.nope_dim, mla.rope_dim);
    let (whole, wide) = (mla.query_dim(), mla.latent_dim());
    profiler.measure(ctx, "absorb", |ctx| {
        let [straight, turned] = &mut own.parts;
        B::copy_columns(
            ctx,
            qkv,
            straight,
            columns(all, nope, (0, whole), (0, nope)),
        )?;
        B::copy_columns(
            ctx,
            qkv,
            turned,
            columns(all, rope, (nope, whole), (0, rope)),
        )?;
        let heads = HeadsShape {
            tokens: rows,
            heads: mla.heads,
            head_dim: rope,
        };
        let rotation = Some(step.rope(mla.rope));
        B::qk_norm_rope(ctx, turned, HeadLayout::TokenMajor, None, rotation, heads)?;
        // [tokens, heads, nope] → [tokens, heads, rank]
        weights.keys.sort(ctx, &mut own.heads, rows)?;
        weights
            .keys
            .forward(ctx, straight, &own.heads, attn, rows)?;
        let rank = mla.rank;
        B::copy_columns(ctx, attn, q, columns(all, rank, (0, rank), (0, wide)))?;
        B::copy_columns(ctx, turned, q, columns(all, rope, (0, rope), (rank, wide)))
    })
}

/// `normed` → the rows that are kept of this step's tokens.
fn latent_rows<B: Backend>(
    ctx: &mut B::Context,
    (mla, weights): (&MlaSpec, &MlaWeights<B>),
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        mla: own,
        profiler,
        ..
    } = scratch;
    let own = own.as_mut().ok_or_else(other_model)?;
    let (rank, rope, wide) = (mla.rank, mla.rope_dim, mla.latent_dim());
    // [tokens, hidden] → [tokens, rank + rope]
    profiler.measure(ctx, "latent", |ctx| {
        let MlaScratch {
            latent,
            compressed: [plain, scaled],
            rotated,
            ..
        } = own;
        weights.latent.forward(ctx, normed, latent, rows)?;
        B::copy_columns(
            ctx,
            latent,
            plain,
            columns(rows, rank, (0, wide), (0, rank)),
        )?;
        let shape = NormShape {
            rows,
            dim: rank,
            eps: mla.norm_eps,
        };
        B::rms_norm(ctx, plain, &weights.latent_norm, scaled, shape)?;
        B::copy_columns(
            ctx,
            scaled,
            latent,
            columns(rows, rank, (0, rank), (0, wide)),
        )?;
        let turned = columns(rows, rope, (rank, wide), (0, rope));
        B::copy_columns(ctx, latent, rotated, turned)?;
        let heads = HeadsShape {
            tokens: rows,
            heads: 1,
            head_dim: rope,
        };
        let rotation = Some(step.rope(mla.rope));
        B::qk_norm_rope(ctx, rotated, HeadLayout::TokenMajor, None, rotation, heads)?;
        let turned = columns(rows, rope, (0, rope), (rank, wide));
        B::copy_columns(ctx, rotated, latent, turned)
    })
}

fn other_model() -> Error {
    Error::invalid("layer", "the scratch of a model without latent attention")
}
