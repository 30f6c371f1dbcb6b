//! How much memory a run will take, before it takes it.

use crate::layer::scratch_widths;
use crate::load::Model;
use crate::runner::RunnerConfig;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec};
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::{BackendQuantMarlin, KvDtypeKind, MatShape};

/// Bytes that a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights in the form in which they are kept.
    pub weights: u64,
    /// KV cache of one token over all layers.
    pub kv_per_token: u64,
    /// The whole KV pool.
    pub kv: u64,
    /// Activations, logits and RoPE tables, and what backends need to rearrange their inputs.
    pub scratch: u64,
    /// What the process holds beside them: the program itself and the tokenizer. Known to whoever
    /// plans, 0 until then.
    pub program: u64,
}

impl MemoryPlan {
    /// Everything together.
    pub fn peak(&self) -> u64 {
        self.weights
            .saturating_add(self.kv)
            .saturating_add(self.scratch)
            .saturating_add(self.program)
    }
}

/// Plans a run with the given sizes and a cache of element `K`.
pub fn memory_plan<K: KvDtypeKind>(model: &Model, config: &RunnerConfig) -> MemoryPlan {
    let spec = &model.spec;
    let pool = config.pool_shape(spec);
    let layers = spec.layers.len() as u64;
    let layer_bytes = pool.bytes::<K>().map_or(u64::MAX, |bytes| bytes as u64);
    let kv = layer_bytes.saturating_mul(layers);
    let tokens = (pool.blocks * pool.block_size).max(1) as u64;
    let widths = scratch_widths(spec);
    // A backend may pack the widest input of a product once more.
    let packed = widths.iter().max().copied().unwrap_or(0) / 2;
    let widths = widths.iter().sum::<usize>() + packed;
    // Logits are held on the device and once more where the sampler reads them.
    let floats = config.max_tokens * widths
        + 2 * config.max_logit_rows * spec.vocab_size
        + config.context * spec.rope.rot_dim;
    MemoryPlan {
        weights: weight_bytes(model),
        kv_per_token: kv / tokens,
        kv,
        scratch: 4 * floats as u64,
        program: 0,
    }
}

impl Model {
    /// Parameters that each token is multiplied with in every layer (norms and tables apart).
    pub fn layer_parameters(&self) -> u64 {
        let tables = if self.spec.tie_embeddings { 1 } else { 2 };
        let table = (self.spec.vocab_size * self.spec.hidden_size) as u64;
        parameters(&self.spec) - tables * table
    }

    /// Parameters of the model, however its file holds them.
    pub fn parameters(&self) -> u64 {
        parameters(&self.spec)
    }

    /// Bytes of weights that one decode step of one sequence reads: all of them, but of an embedding
    /// table that is not also the output projection only a row.
    pub fn decode_bytes(&self) -> u64 {
        let all = weight_bytes(self);
        match self.matrices().first() {
            Some((name, shape)) if !self.spec.tie_embeddings => {
                all - matrix_bytes(self, name, *shape)
            }
            _ => all,
        }
    }
}

/// Bytes of all weights once loaded.
fn weight_bytes(model: &Model) -> u64 {
    let mut vectors = parameters(&model.spec);
    let mut bytes = 0;
    for (name, shape) in model.matrices() {
        vectors = vectors.saturating_sub(elements(shape));
        bytes += matrix_bytes(model, &name, shape);
    }
    bytes + 4 * vectors
}

/// Bytes of one matrix once loaded: floats as stored; quantised weights as stored where the CPU computes
/// on them (its packed forms have about their size), else in f32.
fn matrix_bytes(model: &Model, name: &str, shape: MatShape) -> u64 {
    match model.matrix(name, shape) {
        Ok(weights) if weights.floats().is_some() => weights.stored_bytes() as u64,
        Ok(weights) if model.keeps_blocks() && CpuBackend::is_native_layer(&weights) => {
            weights.stored_bytes() as u64
        }
        _ => 4 * elements(shape),
    }
}

fn elements(shape: MatShape) -> u64 {
    shape.rows as u64 * shape.cols as u64
}

/// Number of parameters that a spec uses.
pub(crate) fn parameters(spec: &DecoderSpec) -> u64 {
    let hidden = spec.hidden_size as u64;
    let tables = if spec.tie_embeddings { 1 } else { 2 };
    let mut sum = tables * spec.vocab_size as u64 * hidden + hidden;
    for layer in &spec.layers {
        let AttentionSpec::Gqa(gqa) = &layer.attention;
        let FeedForwardSpec::GatedMlp(mlp) = &layer.feed_forward;
        let q_dim = (gqa.heads * gqa.head_dim) as u64;
        let kv_dim = (gqa.kv_heads * gqa.head_dim) as u64;
        let inner = mlp.intermediate as u64;
        sum += 2 * hidden * (q_dim + kv_dim) + 3 * hidden * inner + 2 * hidden;
        sum += u64::from(gqa.qkv_bias) * (q_dim + 2 * kv_dim) + u64::from(gqa.out_bias) * hidden;
        sum += u64::from(gqa.qk_norm) * 2 * gqa.head_dim as u64;
        sum += u64::from(mlp.bias) * (2 * inner + hidden);
    }
    sum
}
