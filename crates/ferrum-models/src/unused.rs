//! Tensors of a file that nothing reads.
//!
//! A bias or a norm that the spec does not know changes every logit, and nothing else would tell: the file is whole, and so is the
//! model. What files are known to hold beside the decoder (image towers, layers that predict further tokens, masks and tables that
//! follow from the config) does not count.

use crate::dense::GGUF_NAMES as DENSE_LAYERS;
use crate::draft_head::further_layers;
use crate::inventory::{TensorId, TensorLocation, TensorPart, TensorRole, TensorShape, of_expert};
use crate::model::Model;
use crate::spec::AttentionSpec;
use ferrum_formats::TensorDtype;
use ferrum_types::GgufQuantType;
use std::collections::HashSet;

/// What checkpoints hold of a matrix beside, or instead of, its `weight`, by the schemes that it may be quantised with.
const PARTS_OF_WEIGHTS: [&str; 13] = [
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    // Of activations and of stored keys and values, which are rounded by scales of their own here.
    "input_scale",
    "k_scale",
    "v_scale",
];

/// Modules beside the decoder, anywhere in a name.
const OTHER_MODULES: [&str; 9] = [
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "mtp.",
    ".nextn.",
];

/// Ends of the names of what follows from the config, and of scales for stored keys and values.
const OTHER_ENDS: [&str; 13] = [
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rope_freqs.weight",
    "position_ids",
    "attn.q_scale",
    "attn.k_scale",
    "attn.v_scale",
    ".kv_scale",
];

impl Model {
    /// The names of tensors in the file that neither this decoder reads nor files are known to hold beside one, in the order
    /// of the file.
    pub fn unused_tensors(&self) -> Vec<&str> {
        let (read, shared) = (self.read_names(), self.shared_names());
        let further = self.spec.layers.len()..self.spec.layers.len() + further_layers(self);
        let infos = self.tensors().infos().map(|info| info.name.as_str());
        let unused = infos.filter(|name| {
            let further = self.layer_of(name).is_some_and(|at| further.contains(&at));
            let used = read.has(name)
                || self.is_read_factor(name, &read)
                || self.is_empty_bias(name, &read);
            !(used || further || shared.contains(*name) || self.is_known_extra(name))
        });
        unused.collect()
    }

    /// Whether files are known to hold a tensor of this name beside any decoder.
    fn is_known_extra(&self, name: &str) -> bool {
        // The projection of a model whose output is its table of embeddings.
        let output = self.names.name(TensorId::global(TensorRole::Output));
        output.is_some_and(|output| output == name)
            || DENSE_LAYERS.contains(&name)
            || OTHER_MODULES.iter().any(|module| name.contains(module))
            || OTHER_ENDS.iter().any(|end| name.ends_with(end))
    }

    /// The layer that a tensor belongs to by its name.
    fn layer_of(&self, name: &str) -> Option<usize> {
        let prefix = self.names.layer.split("{}").next()?;
        let (layer, _) = name.strip_prefix(prefix)?.split_once('.')?;
        layer.parse().ok()
    }

    /// Whether a tensor is the factor of a weight of NVFP4, as GGUF files have it.
    fn is_read_factor(&self, name: &str, read: &ReadNames) -> bool {
        let weight = name.strip_suffix(".scale").and_then(|module| {
            read.modules.contains(module).then_some(())?;
            self.tensors().get(&format!("{module}.weight"))
        });
        weight.is_some_and(|weight| weight.dtype == TensorDtype::Quant(GgufQuantType::NVFP4))
    }

    /// Whether a tensor is a bias of zeros beside a weight that has none: some quantisers write it for every layer.
    fn is_empty_bias(&self, name: &str, read: &ReadNames) -> bool {
        let module = name.strip_suffix(".bias");
        module.is_some_and(|module| read.modules.contains(module))
            && self
                .tensors()
                .get(name)
                .is_some_and(|bias| bias.bytes.iter().all(|&byte| byte == 0))
    }

    /// The maps to keys and values of layers that read those of another, which some files hold nevertheless.
    fn shared_names(&self) -> HashSet<String> {
        let shares = |layer: &AttentionSpec| matches!(layer, AttentionSpec::Gqa(gqa) if gqa.shared_kv.is_some());
        let layers = self.spec.layers.iter().enumerate();
        let layers = layers.filter(|(_, layer)| shares(&layer.attention));
        let roles = [TensorRole::Key, TensorRole::Value, TensorRole::KeyNorm];
        let names = layers.flat_map(|(layer, _)| {
            roles.map(|role| self.names.name(TensorId::in_layer(layer, role)))
        });
        names.flatten().collect()
    }

    fn read_names(&self) -> ReadNames {
        let mut read = ReadNames::default();
        for tensor in self.spec.tensors() {
            for place in self.names.locations(&tensor) {
                match place {
                    TensorLocation::Whole(name)
                    | TensorLocation::Rows { name, .. }
                    | TensorLocation::Runs { name, .. } => read.add(name, tensor.id.part),
                    TensorLocation::Reordered { name, .. } => {
                        for suffix in ["_blocks", "_scales"] {
                            read.names.insert(format!("{name}{suffix}"));
                        }
                        read.add(name, tensor.id.part);
                    }
                    TensorLocation::PerExpert(pattern) => {
                        let experts = match tensor.shape {
                            TensorShape::Stack(shape) => shape.experts,
                            TensorShape::Biases { experts, .. } => experts,
                            _ => 0,
                        };
                        let modules = (0..experts).map(|expert| of_expert(&pattern, expert));
                        modules.for_each(|module| {
                            read.add(
                                format!("{module}.{}", tensor.id.part.suffix()),
                                tensor.id.part,
                            );
                        });
                    }
                }
            }
        }
        read
    }
}

/// Names that a decoder may read.
#[derive(Default)]
struct ReadNames {
    names: HashSet<String>,
    /// Modules of weights, which may be several tensors.
    modules: HashSet<String>,
}

impl ReadNames {
    fn add(&mut self, name: String, part: TensorPart) {
        if let (TensorPart::Weight, Some(module)) = (part, name.strip_suffix(".weight")) {
            self.modules.insert(module.to_owned());
        }
        self.names.insert(name);
    }

    fn has(&self, name: &str) -> bool {
        let of_weight = |(module, suffix): (&str, &str)| {
            PARTS_OF_WEIGHTS.contains(&suffix) && self.modules.contains(module)
        };
        self.names.contains(name) || name.rsplit_once('.').is_some_and(of_weight)
    }
}
