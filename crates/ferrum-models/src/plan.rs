//! How much memory a run will take, before it takes it.

use crate::experts::{ExpertSource, MoeWidths};
use crate::layer::scratch_widths;
use crate::load::Model;
use crate::runner::RunnerConfig;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, MoeSpec};
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::{
    BackendMarlinExperts, BackendQuantMarlin, KvDtypeKind, MatShape, QuantWeights,
};

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
    let moe = MoeWidths::of(spec);
    let packed = packed.max(moe.map_or(0, MoeWidths::packed));
    let moe = moe.map_or(0, MoeWidths::elements);
    let widths = widths.iter().sum::<usize>() + moe + packed;
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
    /// Parameters that each token is multiplied with in every layer (norms and tables apart): of
    /// experts, those of the chosen.
    pub fn layer_parameters(&self) -> u64 {
        let tables = if self.spec.tie_embeddings { 1 } else { 2 };
        let table = (self.spec.vocab_size * self.spec.hidden_size) as u64;
        count(&self.spec, |moe| moe.top_k) - tables * table
    }

    /// Parameters of the model, however its file holds them.
    pub fn parameters(&self) -> u64 {
        parameters(&self.spec)
    }

    /// Bytes of weights that one decode step of one sequence reads: all of them, but of an embedding
    /// table that is not also the output projection only a row, and of experts only the chosen.
    pub fn decode_bytes(&self) -> u64 {
        let all = weight_bytes(self) - self.idle_bytes();
        match self.matrices().first() {
            Some((name, shape)) if !self.spec.tie_embeddings => {
                all - matrix_bytes(self, name, *shape)
            }
            _ => all,
        }
    }

    /// Bytes of the experts that a token does not choose.
    fn idle_bytes(&self) -> u64 {
        let layers = self.spec.layers.iter().enumerate();
        let idle = layers.map(|(i, layer)| match &layer.feed_forward {
            FeedForwardSpec::GatedMlp(_) => 0,
            // All experts of a layer are of one size.
            FeedForwardSpec::Moe(moe) => {
                let one = expert_bytes(self, i, moe) / moe.experts.max(1) as u64;
                one * moe.experts.saturating_sub(moe.top_k) as u64
            }
        });
        idle.sum()
    }
}

/// Bytes of all weights once loaded.
fn weight_bytes(model: &Model) -> u64 {
    let spec = &model.spec;
    // Experts apart, what is no matrix is a vector.
    let mut vectors = count(spec, |_| 0);
    let mut bytes = 0;
    for (name, shape) in model.matrices() {
        vectors = vectors.saturating_sub(elements(shape));
        bytes += matrix_bytes(model, &name, shape);
    }
    for (i, layer) in spec.layers.iter().enumerate() {
        if let FeedForwardSpec::Moe(moe) = &layer.feed_forward {
            bytes += expert_bytes(model, i, moe);
        }
    }
    bytes + 4 * vectors
}

/// Bytes of one matrix once loaded.
fn matrix_bytes(model: &Model, name: &str, shape: MatShape) -> u64 {
    match model.matrix(name, shape) {
        Ok(weights) => kept_bytes(model, &weights, shape.cols),
        Err(_) => 4 * elements(shape),
    }
}

/// Bytes of the experts of a layer once loaded.
fn expert_bytes(model: &Model, index: usize, moe: &MoeSpec) -> u64 {
    let (hidden, inner) = (model.spec.hidden_size, moe.intermediate);
    let Ok(stacks) = model.experts(index, moe) else {
        return 12 * moe.experts as u64 * hidden as u64 * inner as u64;
    };
    let parts = [
        (stacks.gate, hidden),
        (stacks.up, hidden),
        (stacks.down, inner),
    ];
    let bytes = parts.iter().map(|(source, cols)| match source {
        ExpertSource::Stack(part) => kept_bytes(model, &QuantWeights::Gguf(*part), *cols),
        ExpertSource::Each(all) => {
            let kept = model.keeps_blocks() && all.iter().all(CpuBackend::is_native_expert);
            let one = |one: &QuantWeights<'_>| match kept || one.floats().is_some() {
                true => one.stored_bytes() as u64,
                false => 4 * one.rows() as u64 * *cols as u64,
            };
            all.iter().map(one).sum()
        }
    });
    bytes.sum()
}

/// Bytes of weights once loaded, with rows of `cols` numbers: floats as stored; quantised weights as
/// stored where the CPU computes on them (its packed forms have about their size), else in f32.
fn kept_bytes(model: &Model, weights: &QuantWeights<'_>, cols: usize) -> u64 {
    let kept = || model.keeps_blocks() && CpuBackend::is_native_layer(weights);
    match weights.floats().is_some() || kept() {
        true => weights.stored_bytes() as u64,
        false => 4 * weights.rows() as u64 * cols as u64,
    }
}

fn elements(shape: MatShape) -> u64 {
    shape.rows as u64 * shape.cols as u64
}

/// Number of parameters that a spec uses.
pub(crate) fn parameters(spec: &DecoderSpec) -> u64 {
    count(spec, |moe| moe.experts)
}

/// [`parameters`], with as many experts as `experts` says.
fn count(spec: &DecoderSpec, experts: impl Fn(&MoeSpec) -> usize) -> u64 {
    let hidden = spec.hidden_size as u64;
    let tables = if spec.tie_embeddings { 1 } else { 2 };
    let mut sum = tables * spec.vocab_size as u64 * hidden + hidden;
    for layer in &spec.layers {
        let AttentionSpec::Gqa(gqa) = &layer.attention;
        let q_dim = (gqa.heads * gqa.head_dim) as u64;
        let kv_dim = (gqa.kv_heads * gqa.head_dim) as u64;
        // A layer of valid sizes fits; a great many claimed ones may not.
        let mut layer_sum = 2 * hidden * (q_dim + kv_dim) + 2 * hidden;
        layer_sum +=
            u64::from(gqa.qkv_bias) * (q_dim + 2 * kv_dim) + u64::from(gqa.out_bias) * hidden;
        layer_sum += u64::from(gqa.qk_norm) * 2 * gqa.head_dim as u64;
        match &layer.feed_forward {
            FeedForwardSpec::GatedMlp(mlp) => {
                let inner = mlp.intermediate as u64;
                layer_sum += 3 * hidden * inner + u64::from(mlp.bias) * (2 * inner + hidden);
            }
            FeedForwardSpec::Moe(moe) => {
                let inner = (experts(moe) * moe.intermediate) as u64;
                layer_sum += 3 * hidden * inner + hidden * moe.experts as u64;
            }
        }
        sum = sum.saturating_add(layer_sum);
    }
    sum
}
