//! [`DecoderWeights`]: what a runner computes with.

use crate::inventory::{RankShard, Stage};
use crate::layer::{DraftInput, LayerWeights, Norm, PerLayerTables};
use crate::linear::{Embedding, LogitLinear};
use ferrum_kernels::LlmBackend;
use std::sync::Arc;

/// The weights of a decoder, or of a [`Stage`] of it, on a device.
pub struct DecoderWeights<B: LlmBackend> {
    pub(crate) body: BodyWeights<B>,
    /// Of the last stage.
    pub(crate) head: Option<HeadWeights<B>>,
}

/// What gives the residual stream.
pub(crate) struct BodyWeights<B: LlmBackend> {
    /// Of the first stage.
    pub(crate) embedding: Option<Arc<dyn Embedding<B>>>,
    /// Learned positions, where there are any: of the first stage.
    pub(crate) positions: Option<Box<dyn Embedding<B>>>,
    /// Embeddings that layers have of their own.
    pub(crate) per_layer: Option<PerLayerTables<B>>,
    /// What a draft head has before its layers.
    pub(crate) draft: Option<DraftInput<B>>,
    pub(crate) layers: Vec<LayerWeights<B>>,
    /// What of each tensor they are.
    pub(crate) cut: RankShard,
    /// Of which layers they are.
    pub(crate) stage: Stage,
}

/// What makes logits of it.
pub(crate) struct HeadWeights<B: LlmBackend> {
    pub(crate) final_norm: Norm<B>,
    pub(crate) lm_head: Arc<dyn LogitLinear<B>>,
}

/// The tables of a decoder on a device, for a draft head that has none of its own: they are there once.
pub struct SharedTables<B: LlmBackend> {
    /// Of a stage that has it.
    pub(crate) embedding: Option<Arc<dyn Embedding<B>>>,
    pub(crate) lm_head: Option<Arc<dyn LogitLinear<B>>>,
}

impl<B: LlmBackend> DecoderWeights<B> {
    /// The tables that these weights have.
    pub fn shared_tables(&self) -> SharedTables<B> {
        let head = self.head.as_ref();
        SharedTables {
            embedding: self.body.embedding.clone(),
            lm_head: head.map(|head| Arc::clone(&head.lm_head)),
        }
    }
}
