//! How much memory a run will take, before it takes it.
//!
//! Weights are counted tensor by tensor of the inventory, in the form that the device's own policy keeps
//! them in.

use crate::cache::LayerCache;
use crate::experts::{ExpertSource, MoeWidths};
use crate::inventory::{DecoderTensor, RankShard, Stage, TensorRole, TensorShape};
use crate::layer::{MlaWidths, gate_widths, scratch_widths};
use crate::model::Model;
use crate::runner::RunnerConfig;
use crate::spec::{DecoderSpec, FeedForwardSpec, MoeSpec, PerLayerSpec};
use crate::stored::Stored;
use crate::weight_shard::MatShard;
use crate::weights::WeightPolicy;
use ferrum_kernels::{KvDtypeKind, QuantWeights};

/// Bytes that a run takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights in the form in which they are kept.
    pub weights: u64,
    /// KV cache of one token more, over all layers whose pools hold as many tokens as the cache.
    pub kv_per_token: u64,
    /// Of `kv`, the pools of layers whose window needs fewer.
    pub kv_windows: u64,
    /// All KV pools.
    pub kv: u64,
    /// Recurrent states of all slots.
    pub states: u64,
    /// Activations, logits and RoPE tables, and what backends need to rearrange their inputs.
    pub scratch: u64,
    /// What the process holds beside them: the program itself and the tokenizer. Known to whoever
    /// plans, 0 until then.
    pub program: u64,
}

impl MemoryPlan {
    /// This plan on a device that takes so many bytes for itself while it computes.
    #[must_use]
    pub fn with_workspace(self, bytes: u64) -> Self {
        Self {
            scratch: self.scratch.saturating_add(bytes),
            ..self
        }
    }

    /// Everything together.
    pub fn peak(&self) -> u64 {
        self.weights
            .saturating_add(self.kv)
            .saturating_add(self.states)
            .saturating_add(self.scratch)
            .saturating_add(self.program)
    }

    /// This and another one together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            kv_per_token: self.kv_per_token.saturating_add(other.kv_per_token),
            kv_windows: self.kv_windows.saturating_add(other.kv_windows),
            kv: self.kv.saturating_add(other.kv),
            states: self.states.saturating_add(other.states),
            scratch: self.scratch.saturating_add(other.scratch),
            program: self.program.saturating_add(other.program),
        }
    }
}

/// Plans a run with the given sizes and a cache of element `K`, on a device that keeps weights as `policy`
/// says.
pub fn memory_plan<K: KvDtypeKind>(
    model: &Model,
    policy: WeightPolicy,
    config: &RunnerConfig,
) -> MemoryPlan {
    rank_memory_plan::<K>(model, policy, config, &RankShard::whole(&model.spec))
}

/// Plans what one rank of a group takes.
///
/// Slices are counted by their share of a tensor, and in f32 where they end inside a block. That a device might
/// dequantise a slice whose groups have become too small is not counted: [`Model::dequantized_slices`] reads the slices
/// to tell.
pub fn rank_memory_plan<K: KvDtypeKind>(
    model: &Model,
    policy: WeightPolicy,
    config: &RunnerConfig,
    cut: &RankShard,
) -> MemoryPlan {
    part_memory_plan::<K>(model, policy, config, (cut, &Stage::whole(&model.spec)))
}

/// Plans what one stage takes on its device.
pub fn stage_memory_plan<K: KvDtypeKind>(
    model: &Model,
    policy: WeightPolicy,
    config: &RunnerConfig,
    stage: &Stage,
) -> MemoryPlan {
    let whole = RankShard::whole(&model.spec);
    part_memory_plan::<K>(model, policy, config, (&whole, stage))
}

fn part_memory_plan<K: KvDtypeKind>(
    model: &Model,
    policy: WeightPolicy,
    config: &RunnerConfig,
    (cut, stage): (&RankShard, &Stage),
) -> MemoryPlan {
    let spec = &stage.spec(&cut.rank_spec());
    let [whole, kv_windows] = kv_bytes::<K>(spec, config);
    let (blocks, block_size) = config.blocks();
    let tokens = (blocks * block_size).max(1) as u64;
    let widths = scratch_widths(spec);
    // A backend may pack the widest input of a product once more.
    let packed = widths.iter().max().copied().unwrap_or(0) / 2;
    let moe = MoeWidths::of(spec);
    let [inputs, outputs] = cut.gathered_widths();
    let packed = packed.max(moe.map_or(0, MoeWidths::packed) + inputs);
    let moe = moe.map_or(0, MoeWidths::elements);
    let mla = MlaWidths::of(spec).map_or(0, MlaWidths::elements);
    let gates = gate_widths(spec).map_or(0, |[output, state]| output + state);
    let per_layer = spec.per_layer.as_ref().map_or(0, PerLayerSpec::elements);
    // Inputs of all ranks are held once more where they are exchanged.
    let gathered = 2 * inputs + outputs;
    let widths = widths.iter().sum::<usize>() + mla + moe + gates + per_layer + packed + gathered;
    // Logits are held on the device and once more where the sampler reads them.
    let logits = match stage.is_last() {
        true => 2 * config.max_logit_rows * spec.vocab_size,
        false => 0,
    };
    let ropes = spec.ropes.iter().map(|rope| rope.rot_dim).sum::<usize>();
    let floats = config.max_tokens * widths + logits + config.context * ropes;
    MemoryPlan {
        weights: model.weight_bytes(policy, (cut, stage)),
        kv_per_token: whole / tokens,
        kv_windows,
        kv: whole.saturating_add(kv_windows),
        states: state_bytes(spec, config),
        scratch: 4 * floats as u64,
        program: 0,
    }
}

/// Bytes of the pools that hold all tokens of the cache, and of those that hold fewer.
fn kv_bytes<K: KvDtypeKind>(spec: &DecoderSpec, config: &RunnerConfig) -> [u64; 2] {
    let (all, _) = config.blocks();
    let mut bytes = [0u64; 2];
    for cache in config.layer_caches(spec) {
        let LayerCache::Pool { shape: pool, .. } = cache else {
            continue;
        };
        let found = pool.bytes::<K>().map_or(u64::MAX, |bytes| bytes as u64);
        let kind = &mut bytes[usize::from(pool.blocks < all)];
        *kind = kind.saturating_add(found);
    }
    bytes
}

/// Bytes of the recurrent states of all slots.
fn state_bytes(spec: &DecoderSpec, config: &RunnerConfig) -> u64 {
    let rows = config.state_rows(spec) as u64;
    let sizes = config.layer_caches(spec).into_iter();
    let sizes = sizes.map(|cache| match cache {
        LayerCache::State(elements) => rows.saturating_mul(4 * elements as u64),
        LayerCache::Pool { .. } | LayerCache::Shared(_) | LayerCache::None => 0,
    });
    sizes.fold(0, u64::saturating_add)
}

impl DecoderSpec {
    /// The experts of a tensor's layer; `None` for a tensor that is not of experts.
    fn experts_of(&self, tensor: &DecoderTensor) -> Option<&MoeSpec> {
        let layer = self.layers.get(tensor.id.layer?)?;
        match &layer.feed_forward {
            FeedForwardSpec::Moe(moe) if tensor.id.role.is_expert() => Some(moe),
            FeedForwardSpec::Moe(_) | FeedForwardSpec::GatedMlp(_) | FeedForwardSpec::Mlp(_) => {
                None
            }
        }
    }
}

impl Model {
    /// Parameters that each token is multiplied with in every layer (tables apart): of experts, those of
    /// the chosen.
    pub fn layer_parameters(&self) -> u64 {
        let tensors = self.spec.tensors().filter(DecoderTensor::is_parameter);
        let tensors = tensors.filter(|tensor| {
            let role = tensor.id.role;
            !matches!(
                role,
                TensorRole::TokenEmbedding
                    | TensorRole::PositionEmbedding
                    | TensorRole::PerLayerEmbedding
                    | TensorRole::Output
            )
        });
        let used = tensors.map(|tensor| self.used_part(&tensor, tensor.shape.elements()));
        used.fold(0, u64::saturating_add)
    }

    /// Parameters of the model, however its file holds them.
    pub fn parameters(&self) -> u64 {
        self.spec.parameters()
    }

    /// Bytes of weights that one decode step of one sequence reads of a stage on a device that keeps weights as
    /// `policy` says: all of them, but of an embedding table that is not also the output projection only a
    /// row, and of experts only the chosen.
    pub fn decode_bytes(&self, policy: WeightPolicy, stage: &Stage) -> u64 {
        let tensors = self.spec.tensors().filter(DecoderTensor::is_parameter);
        let read = tensors.filter(|tensor| match tensor.id.role {
            TensorRole::TokenEmbedding => self.spec.tie_embeddings && stage.is_last(),
            TensorRole::PositionEmbedding | TensorRole::PerLayerEmbedding => false,
            _ => stage.holds(&self.spec, tensor.id),
        });
        let bytes = read.map(|tensor| self.used_part(&tensor, self.loaded_bytes(&tensor, policy)));
        bytes.fold(0, u64::saturating_add)
    }

    /// Of `all` that a tensor has, what a token uses: of experts, as much as of those that it chooses.
    fn used_part(&self, tensor: &DecoderTensor, all: u64) -> u64 {
        match self.spec.experts_of(tensor) {
            // All experts of a layer are of one size.
            Some(moe) => {
                let one = all / moe.experts.max(1) as u64;
                all - one * moe.experts.saturating_sub(moe.top_k) as u64
            }
            None => all,
        }
    }

    /// Bytes of all weights once loaded.
    fn weight_bytes(&self, policy: WeightPolicy, (cut, stage): (&RankShard, &Stage)) -> u64 {
        let tensors = self.spec.tensors().filter(DecoderTensor::is_parameter);
        let tensors = tensors.filter(|tensor| stage.holds(&self.spec, tensor.id));
        let bytes = tensors.map(|tensor| self.held_bytes(&tensor, policy, cut));
        bytes.fold(0, u64::saturating_add)
    }

    /// Bytes of what a rank holds of a tensor once loaded.
    fn held_bytes(&self, tensor: &DecoderTensor, policy: WeightPolicy, cut: &RankShard) -> u64 {
        let slice = cut.slice(tensor);
        let share = |all: u64| {
            let (part, whole) = (
                slice.range.len() as u64,
                tensor.shape.dims()[slice.dim] as u64,
            );
            all.saturating_mul(part) / whole.max(1)
        };
        let (shape, mut in_format) = (tensor.shape.matrix(), true);
        if let (Some(shape), false) = (shape, cut.is_whole()) {
            let at = MatShard::held(cut, tensor, shape);
            match self.stored(tensor) {
                Ok(Stored::Matrix(matrix)) => in_format = matrix.keeps_format(&at),
                Ok(Stored::Experts(source)) => source.each(|weights| {
                    in_format &= at.keeps_format(&weights, shape.cols);
                }),
                Ok(Stored::Vector) | Err(_) => {}
            }
        }
        share(match in_format {
            true => self.loaded_bytes(tensor, policy),
            false => 4 * tensor.shape.elements(),
        })
    }

    /// Bytes of a tensor once loaded; of one that cannot be read, those that it takes in f32.
    fn loaded_bytes(&self, tensor: &DecoderTensor, policy: WeightPolicy) -> u64 {
        let in_f32 = 4 * tensor.shape.elements();
        match self.stored(tensor) {
            Ok(Stored::Matrix(matrix)) => {
                let weights = &matrix.weights;
                let widened = tensor.id.role.widens_floats() && weights.as_dense().is_some();
                // Packed forms have about the size of what they are made of.
                match (widened, policy.keeps(weights)) {
                    (true, _) => in_f32,
                    (false, true) => matrix.stored_bytes(),
                    (false, false) => {
                        policy.dequantized_dtype().size() as u64 * tensor.shape.elements()
                    }
                }
            }
            Ok(Stored::Experts(source)) => expert_bytes(&source, tensor.shape, policy),
            Ok(Stored::Vector) | Err(_) => in_f32,
        }
    }
}

/// Bytes of the experts of a stack once loaded: where they do not all stay as they are, floats still do.
fn expert_bytes(source: &ExpertSource<'_>, shape: TensorShape, policy: WeightPolicy) -> u64 {
    if policy.keeps_experts(source) {
        return source.stored_bytes();
    }
    let cols = shape.dims().last().map_or(0, |&cols| cols as u64);
    let mut bytes = 0;
    source.each(|one: QuantWeights<'_>| {
        bytes += match one.as_dense() {
            Some(_) => one.stored_bytes() as u64,
            None => (policy.dequantized_dtype().size() * one.rows()) as u64 * cols,
        };
    });
    bytes
}
