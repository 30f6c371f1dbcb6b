//! [`DecoderWeights`]: what a runner computes with.

use crate::inventory::RankCut;
use crate::layer::LayerWeights;
use crate::linear::{Embedding, Linear};
use ferrum_kernels::LlmBackend;

/// All weights of a decoder on a device.
pub struct DecoderWeights<B: LlmBackend> {
    pub(crate) body: BodyWeights<B>,
    pub(crate) head: HeadWeights<B>,
}

/// What gives the residual stream.
pub(crate) struct BodyWeights<B: LlmBackend> {
    pub(crate) embedding: Box<dyn Embedding<B>>,
    pub(crate) layers: Vec<LayerWeights<B>>,
    /// What of the decoder they are.
    pub(crate) cut: RankCut,
}

/// What makes logits of it.
pub(crate) struct HeadWeights<B: LlmBackend> {
    pub(crate) final_norm: B::Buffer<f32>,
    pub(crate) lm_head: Box<dyn Linear<B>>,
}
