//! [`DecoderWeights`]: what a runner computes with.

use crate::inventory::{RankCut, Stage};
use crate::layer::{LayerWeights, Norm, PerLayerTables};
use crate::linear::{Embedding, LogitLinear};
use ferrum_kernels::LlmBackend;

/// The weights of a decoder, or of a [`Stage`] of it, on a device.
pub struct DecoderWeights<B: LlmBackend> {
    pub(crate) body: BodyWeights<B>,
    /// Of the last stage.
    pub(crate) head: Option<HeadWeights<B>>,
}

/// What gives the residual stream.
pub(crate) struct BodyWeights<B: LlmBackend> {
    /// Of the first stage.
    pub(crate) embedding: Option<Box<dyn Embedding<B>>>,
    /// Learned positions, where there are any: of the first stage.
    pub(crate) positions: Option<Box<dyn Embedding<B>>>,
    /// Embeddings that layers have of their own.
    pub(crate) per_layer: Option<PerLayerTables<B>>,
    pub(crate) layers: Vec<LayerWeights<B>>,
    /// What of each tensor they are.
    pub(crate) cut: RankCut,
    /// Of which layers they are.
    pub(crate) stage: Stage,
}

/// What makes logits of it.
pub(crate) struct HeadWeights<B: LlmBackend> {
    pub(crate) final_norm: Norm<B>,
    pub(crate) lm_head: Box<dyn LogitLinear<B>>,
}
