//! What each layer adds of embeddings of its own (Gemma 4).
//!
//! A token has a row of a table with a part for each layer, and its embedding is projected to such a row, too. Both
//! together are computed once a step; behind its feed-forward, each layer gates its part by the stream and adds what a
//! projection makes of it.

use super::norm::{Norm, next_input, norm_output};
use super::{Scratch, StepState};
use crate::linear::{Embedding, Linear};
use crate::spec::{DecoderSpec, PerLayerSpec};
use ferrum_kernels::{Act, Backend, CopyColumnsShape, NormShape, Residual, RowShape};
use ferrum_types::{Error, Result};

/// Weights outside of layers.
pub(crate) struct PerLayerTables<B: Backend> {
    /// `[tokens, layers · dim]`.
    pub(crate) table: Box<dyn Embedding<B>>,
    /// From embeddings to the same width.
    pub(crate) projection: Box<dyn Linear<B>>,
    /// `[dim]`: of what is projected, for each layer by itself.
    pub(crate) norm: B::Buffer<f32>,
}

/// Weights of a layer.
pub(crate) struct PerLayerWeights<B: Backend> {
    /// To as many elements as its part has.
    pub(crate) gate: Box<dyn Linear<B>>,
    /// From these to the stream.
    pub(crate) out: Box<dyn Linear<B>>,
    /// Behind that.
    pub(crate) norm: Norm<B>,
}

/// What a step needs for them.
pub(crate) struct PerLayerScratch<B: Backend> {
    /// `[tokens, layers · dim]`: rows of the table.
    rows: Residual<B>,
    /// The same width: what is projected, and the sum of both.
    projected: Act<B>,
    inputs: Act<B>,
    /// `[tokens, dim]`: the gate, the layer's part, and their product.
    gate: Act<B>,
    part: Act<B>,
    gated: Act<B>,
}

impl<B: Backend> PerLayerScratch<B> {
    pub(crate) fn alloc(device: &B, spec: &PerLayerSpec, max_tokens: usize) -> Result<Self> {
        let (all, one) = (max_tokens * spec.width(), max_tokens * spec.dim);
        Ok(Self {
            rows: device.alloc(all)?,
            projected: device.alloc(all)?,
            inputs: device.alloc(all)?,
            gate: device.alloc(one)?,
            part: device.alloc(one)?,
            gated: device.alloc(one)?,
        })
    }
}

impl PerLayerSpec {
    /// Elements of a token's row, for all layers.
    pub(crate) fn width(&self) -> usize {
        self.layers * self.dim
    }

    /// Elements that a token takes in scratch.
    pub(crate) fn elements(&self) -> usize {
        3 * (self.width() + self.dim)
    }
}

/// Of a scratch that was made for the same spec.
fn parts<'s, B: Backend>(
    spec: &'s DecoderSpec,
    scratch: &'s mut Option<PerLayerScratch<B>>,
) -> Result<(&'s PerLayerSpec, &'s mut PerLayerScratch<B>)> {
    let missing = || {
        let reason = "the scratch of a model without embeddings for each layer";
        Error::invalid("layer", reason)
    };
    let spec = spec.per_layer.as_ref().ok_or_else(missing)?;
    Ok((spec, scratch.as_mut().ok_or_else(missing)?))
}

/// Computes the parts of all layers, while the stream is the embeddings.
pub(crate) fn per_layer_inputs<B: Backend>(
    ctx: &mut B::Context,
    tables: &PerLayerTables<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    next_input(ctx, "per_layer_inputs", (None, false), step, scratch)?;
    let Scratch {
        normed,
        per_layer,
        profiler,
        ..
    } = scratch;
    let (spec, scratch) = parts(step.spec, per_layer)?;
    let PerLayerScratch {
        rows,
        projected,
        inputs,
        ..
    } = scratch;
    let (tokens, dim) = (step.batch.shape.tokens, spec.width());
    let len = tokens * dim;
    profiler.measure(ctx, "per_layer_inputs", |ctx| {
        // [tokens] → [tokens, layers · dim]
        let shape = RowShape { rows: tokens, dim };
        tables.table.lookup(ctx, &step.batch.tokens, rows, shape)?;
        B::scale_inplace(ctx, rows, (spec.dim as f32).sqrt(), len)?;
        // [tokens, hidden] → [tokens, layers · dim]
        tables.projection.forward(ctx, normed, projected, tokens)?;
        let scale = 1.0 / (step.spec.hidden_size as f32).sqrt();
        B::scale_inplace(ctx, projected, scale, len)?;
        let norm = NormShape {
            rows: tokens * spec.layers,
            dim: spec.dim,
            eps: step.spec.norm_eps,
        };
        B::rms_norm(ctx, projected, &tables.norm, inputs, norm)?;
        B::add_inplace(ctx, inputs, rows, len)?;
        B::scale_inplace(ctx, inputs, std::f32::consts::FRAC_1_SQRT_2, len)
    })
}

/// Adds a layer's part to the stream; it is pending then.
pub(super) fn per_layer_forward<B: Backend>(
    ctx: &mut B::Context,
    index: usize,
    weights: &PerLayerWeights<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    next_input(ctx, "per_layer", (None, true), step, scratch)?;
    let Scratch {
        normed,
        delta,
        per_layer,
        profiler,
        ..
    } = scratch;
    let (spec, parts) = parts(step.spec, per_layer)?;
    let PerLayerScratch {
        inputs,
        gate,
        part,
        gated,
        ..
    } = parts;
    let rows = step.batch.shape.tokens;
    let columns = CopyColumnsShape {
        rows,
        len: spec.dim,
        src_first: index * spec.dim,
        src_width: spec.width(),
        dst_first: 0,
        dst_width: spec.dim,
    };
    let function = spec.activation.function();
    profiler.measure(ctx, "per_layer", |ctx| {
        // [tokens, hidden] → [tokens, dim] → [tokens, hidden]
        weights.gate.forward(ctx, normed, gate, rows)?;
        B::copy_columns(ctx, inputs, part, columns)?;
        B::activate(ctx, function, gate, Some(part), gated, rows * spec.dim)?;
        weights.out.forward(ctx, gated, delta, rows)
    })?;
    norm_output(ctx, "per_layer_norm", Some(&weights.norm), step, scratch)
}
