//! The input of a draft head: of each token its embedding, and hidden states of the token before it.
//!
//! Multi-token prediction (DeepSeek-AI, "DeepSeek-V3 technical report", 2024) projects both, normed, to the residual stream.
//! EAGLE-3 (Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time test",
//! 2025) fuses hidden states of several layers by a map, takes the result as the stream, and gives the first attention
//! both, normed.

use super::{Norm, Scratch, StepState};
use crate::batch::FeatureSource;
use crate::linear::Linear;
use ferrum_kernels::{Act, Backend, CopyColumnsShape, HostBuffer, Residual};
use ferrum_types::{FloatElement, Result};

/// Weights before the first layer of a draft head.
pub(crate) struct DraftInput<B: Backend> {
    pub(crate) embedding_norm: Norm<B>,
    pub(crate) hidden_norm: Norm<B>,
    /// Rows of the embedding table: tokens that may go in.
    pub(crate) vocab_size: usize,
    pub(crate) join: DraftJoin<B>,
}

/// How embeddings and hidden states become the stream.
pub(crate) enum DraftJoin<B: Backend> {
    /// By a map `[embedding | hidden] → [hidden]`.
    Project(Box<dyn Linear<B>>),
    /// The first attention reads `[embedding | hidden]`.
    Attend {
        /// From the target's hidden states to the stream.
        fuse: Box<dyn Linear<B>>,
        /// Whether the stream is what is behind the norm of hidden states.
        normed_stream: bool,
    },
}

impl<B: Backend> DraftInput<B> {
    /// Numbers of hidden states for each token, where the stream has `hidden` elements.
    pub(crate) fn width(&self, source: FeatureSource, hidden: usize) -> usize {
        match (&self.join, source) {
            (DraftJoin::Attend { fuse, .. }, FeatureSource::Target) => fuse.in_features(),
            _ => hidden,
        }
    }
}

/// Memory for it.
pub(crate) struct DraftBuffers<B: Backend> {
    /// `[tokens, width]`: hidden states as they came.
    features: Act<B>,
    source: FeatureSource,
    /// `[tokens, hidden]`: those of the target, fused.
    fused: Act<B>,
    /// `[tokens, hidden]`: behind a norm.
    normed: Act<B>,
    /// `[tokens, hidden]`.
    zeros: Residual<B>,
    staging: HostBuffer<B::Act>,
}

impl<B: Backend> DraftBuffers<B> {
    /// Memory for steps of `tokens` tokens. Makes room in `scratch`, too, for both parts side by side.
    pub(crate) fn alloc(
        device: &B,
        input: &DraftInput<B>,
        (tokens, hidden): (usize, usize),
        scratch: &mut Scratch<B>,
    ) -> Result<Self> {
        let widest = input.width(FeatureSource::Target, hidden).max(hidden);
        scratch.normed = device.alloc(tokens * 2 * hidden)?;
        Ok(Self {
            features: device.alloc(tokens * widest)?,
            source: FeatureSource::default(),
            fused: device.alloc(tokens * hidden)?,
            normed: device.alloc(tokens * hidden)?,
            zeros: device.alloc(tokens * hidden)?,
            staging: device.host_buffer(tokens * widest)?,
        })
    }

    /// Uploads the hidden states of a step of so many tokens, and zeros for those that fill it up.
    pub(crate) fn write(
        &mut self,
        ctx: &mut B::Context,
        features: &[f32],
        source: FeatureSource,
        (tokens, padding): (usize, usize),
    ) -> Result<()> {
        self.source = source;
        let filled = features.len() / tokens.max(1) * padding;
        let staging = &mut self.staging[..features.len() + filled];
        let features = features.iter().copied();
        let features = features.chain(std::iter::repeat_n(0.0, filled));
        for (to, x) in staging.iter_mut().zip(features) {
            *to = B::Act::from_f32(x);
        }
        B::write(ctx, &mut self.features, 0, staging)
    }
}

/// Makes the residual stream of embeddings, which are there, and hidden states. Whether `normed` is the input of the first
/// layer's attention already.
pub(crate) fn draft_input<B: Backend>(
    ctx: &mut B::Context,
    input: &DraftInput<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
    buffers: &mut DraftBuffers<B>,
) -> Result<bool> {
    let (spec, rows) = (step.spec, step.batch.shape.tokens);
    let len = rows * spec.hidden_size;
    let Scratch {
        residual,
        normed: both,
        delta,
        profiler,
        ..
    } = scratch;
    let DraftBuffers {
        features,
        source,
        fused,
        normed,
        zeros,
        ..
    } = buffers;
    profiler.measure(ctx, "draft_input", |ctx| {
        let hidden = match (&input.join, source) {
            (DraftJoin::Attend { fuse, .. }, FeatureSource::Target) => {
                // [tokens, layers · hidden] → [tokens, hidden]
                fuse.forward(ctx, features, fused, rows)?;
                &*fused
            }
            _ => &*features,
        };
        // [tokens, hidden], [tokens, hidden] → [tokens, embedding | hidden]
        let norm = &input.embedding_norm;
        norm.norm(ctx, spec, residual, normed, rows)?;
        B::copy_columns(ctx, normed, both, part(rows, spec.hidden_size, 0))?;
        let norm = &input.hidden_norm;
        norm.norm(ctx, spec, hidden, normed, rows)?;
        B::copy_columns(ctx, normed, both, part(rows, spec.hidden_size, 1))?;
        B::copy_slice(ctx, zeros, 0, residual, 0, len)?;
        let stream = match &input.join {
            DraftJoin::Project(map) => {
                map.forward(ctx, both, delta, rows)?;
                &*delta
            }
            DraftJoin::Attend { normed_stream, .. } => match normed_stream {
                true => &*normed,
                false => hidden,
            },
        };
        B::add_inplace(ctx, residual, stream, len)
    })?;
    Ok(matches!(input.join, DraftJoin::Attend { .. }))
}

/// Rows that are the part number `index` of rows of two.
fn part(rows: usize, len: usize, index: usize) -> CopyColumnsShape {
    CopyColumnsShape {
        rows,
        len,
        src_first: 0,
        src_width: len,
        dst_first: index * len,
        dst_width: 2 * len,
    }
}
