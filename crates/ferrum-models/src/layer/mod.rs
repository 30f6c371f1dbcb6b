//! One decoder layer, composed from the choices of its [`LayerSpec`].
//!
//! The residual stream is updated by the norm that follows it: a part leaves its output in
//! `scratch.delta`, and the next norm adds it (`fused_add_rms_norm`). So a layer starts with the
//! previous layer's output pending, and leaves its own pending.

mod attention;
mod draft_input;
mod feed_forward;
mod linear_attention;
mod mla;
mod norm;
mod per_layer;
mod scratch;
mod short_conv;
pub(crate) mod widths;

pub(crate) use attention::{GqaWeights, HeadLayerNorm};
pub(crate) use draft_input::{DraftBuffers, DraftInput, DraftJoin, draft_input};
pub(crate) use feed_forward::{
    ExpertNorms, FeedForwardWeights, MlpWeights, MoeWeights, SharedExpertWeights,
};
pub(crate) use linear_attention::{LinearAttentionWeights, gate_widths};
pub(crate) use mla::{MlaWeights, MlaWidths};
pub(crate) use norm::Norm;
pub(crate) use per_layer::{PerLayerTables, PerLayerWeights, per_layer_inputs};
pub(crate) use scratch::Scratch;
pub(crate) use short_conv::ShortConvWeights;
pub(crate) use widths::scratch_widths;

use crate::images::StepImages;
use crate::kv_layer::AnyKvLayer;
use crate::lora::Adapters;
use crate::rope::RopeTables;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, LayerForm, LayerSpec};
use attention::gqa_forward;
use feed_forward::{mlp_forward, moe_forward};
use ferrum_kernels::{Backend, DeviceBatch, LlmBackend, Rope, StateShape};
use ferrum_types::{Error, Result};
use linear_attention::linear_attention_forward;
use mla::mla_forward;
use norm::{next_input, norm_output, parallel_input, scale_output};
use per_layer::per_layer_forward;
use short_conv::short_conv_forward;

/// Weights of one layer, with the norms that its [`LayerForm`] has.
pub(crate) struct LayerWeights<B: Backend> {
    pub(crate) attn_norm: Option<Norm<B>>,
    pub(crate) attention: AttentionWeights<B>,
    pub(crate) post_attn_norm: Option<Norm<B>>,
    pub(crate) ffn_norm: Option<Norm<B>>,
    pub(crate) feed_forward: FeedForwardWeights<B>,
    pub(crate) post_ffn_norm: Option<Norm<B>>,
    pub(crate) per_layer: Option<PerLayerWeights<B>>,
    pub(crate) output_scale: Option<f32>,
}

/// Weights of the part that mixes tokens, of the kind that the layer's spec says.
pub(crate) enum AttentionWeights<B: Backend> {
    Gqa(GqaWeights<B>),
    Mla(MlaWeights<B>),
    ShortConv(ShortConvWeights<B>),
    Linear(LinearAttentionWeights<B>),
}

/// The recurrent states of a layer, a row for each slot.
pub(crate) struct LayerStates<B: Backend> {
    pub(crate) states: B::Buffer<f32>,
    pub(crate) shape: StateShape,
}

impl<B: Backend> LayerStates<B> {
    /// Zeros, in so many rows.
    pub(crate) fn alloc(device: &B, rows: usize, elements: usize) -> Result<Self> {
        let shape = StateShape {
            slots: rows,
            elements,
        };
        let states = device.alloc(shape.slots.saturating_mul(elements))?;
        Ok(Self { states, shape })
    }
}

/// Where a layer keeps what it has seen.
pub(crate) enum CacheMut<'a, B: Backend> {
    Pool(&'a mut dyn AnyKvLayer<B>),
    State(&'a mut LayerStates<B>),
    None,
}

/// What all layers of a step share.
pub(crate) struct StepState<'a, B: Backend> {
    pub(crate) spec: &'a DecoderSpec,
    pub(crate) batch: &'a DeviceBatch<B>,
    /// Of each rotary embedding of the spec.
    pub(crate) ropes: &'a [RopeTables<B>],
    pub(crate) adapters: &'a Adapters<B>,
    /// Where the step has some.
    pub(crate) images: Option<&'a StepImages<B>>,
}

impl<'a, B: Backend> StepState<'a, B> {
    /// The rotation of this step's tokens by a rotary embedding of the spec.
    fn rope(&self, index: usize) -> Rope<'a, B> {
        let (tables, spec) = (&self.ropes[index], &self.spec.ropes[index]);
        Rope {
            cos: &tables.cos,
            sin: &tables.sin,
            rows: &self.batch.rope_rows,
            rot_dim: spec.rot_dim,
            style: spec.style,
        }
    }
}

/// Gives layer number `index` of a stage its input. `scratch.residual` holds the stream before the previous layer's
/// feed-forward, whose output is pending in `scratch.delta` (nothing is pending at the first layer of a stage); then it is
/// the stream behind that layer.
pub(crate) fn layer_input<B: LlmBackend>(
    ctx: &mut B::Context,
    index: usize,
    weights: &LayerWeights<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let input = (weights.attn_norm.as_ref(), index > 0);
    next_input(ctx, "attn_norm", input, step, scratch)
}

/// Runs layer number `index` of a stage on its [input](layer_input).
pub(crate) fn layer_forward<B: LlmBackend>(
    ctx: &mut B::Context,
    index: usize,
    layer: (&LayerSpec, &LayerWeights<B>),
    cache: CacheMut<'_, B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let (spec, weights) = layer;
    match (&spec.attention, &weights.attention, cache) {
        (AttentionSpec::Gqa(gqa), AttentionWeights::Gqa(weights), CacheMut::Pool(kv)) => {
            gqa_forward(ctx, index, (gqa, weights), kv, step, scratch)?;
        }
        (AttentionSpec::Mla(mla), AttentionWeights::Mla(weights), CacheMut::Pool(kv)) => {
            mla_forward(ctx, index, (mla, weights), kv, step, scratch)?;
        }
        (
            AttentionSpec::ShortConv(conv),
            AttentionWeights::ShortConv(weights),
            CacheMut::State(states),
        ) => short_conv_forward(ctx, index, (conv, weights), states, step, scratch)?,
        (
            AttentionSpec::Linear(linear),
            AttentionWeights::Linear(weights),
            CacheMut::State(states),
        ) => linear_attention_forward(ctx, index, (linear, weights), states, step, scratch)?,
        _ => return Err(other_kind(index)),
    }
    let behind = weights.post_attn_norm.as_ref();
    norm_output(ctx, "post_attn_norm", behind, step, scratch)?;
    let norm = weights.ffn_norm.as_ref();
    match spec.form {
        LayerForm::Parallel { .. } => parallel_input(ctx, norm, step, scratch)?,
        LayerForm::PreNorm | LayerForm::PostNorm | LayerForm::Sandwich => {
            next_input(ctx, "ffn_norm", (norm, true), step, scratch)?;
        }
    }
    match (&spec.feed_forward, &weights.feed_forward) {
        (
            FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp),
            FeedForwardWeights::Mlp(weights),
        ) => {
            let gated = matches!(spec.feed_forward, FeedForwardSpec::GatedMlp(_));
            mlp_forward(ctx, index, (mlp, gated, weights), step, scratch)?;
        }
        (FeedForwardSpec::Moe(_), FeedForwardWeights::Moe(weights)) => {
            moe_forward(ctx, weights, step, scratch)?;
        }
        _ => return Err(other_kind(index)),
    }
    let behind = weights.post_ffn_norm.as_ref();
    norm_output(ctx, "post_ffn_norm", behind, step, scratch)?;
    if let Some(weights) = &weights.per_layer {
        per_layer_forward(ctx, index, weights, step, scratch)?;
    }
    scale_output(ctx, weights.output_scale, step, scratch)
}

/// Weights are loaded by the spec, so this is a runner made of two different models.
fn other_kind(index: usize) -> Error {
    let reason =
        format!("the weights of layer {index} of a stage are not of the kind that its spec says");
    Error::invalid("layer", reason)
}
