//! GPT-2: learned positions, layer norms, and matrices that checkpoints store with a row for each input.

use super::common::{self, HfDefaults, HfSizes};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec, NormKind};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "gpt2",
    title: "GPT-2",
    hf_architectures: &["GPT2LMHeadModel"],
    hf_model_types: &["gpt2"],
    hf_names: &names::GPT2_NAMES,
    hf_base_names: Some(&names::GPT2_BASE_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["gpt2"],
    gguf_form: Some(GgufForm {
        architecture: "gpt2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let hidden_size = config.require_usize("n_embd")?;
    let heads = config.require_usize("n_head")?;
    let sizes = HfSizes {
        hidden_size,
        heads,
        kv_heads: heads,
        intermediate: config.usize("n_inner")?.unwrap_or(4 * hidden_size),
        layers: common::hf_layer_count(config, "n_layer")?,
    };
    let defaults = HfDefaults {
        max_position: config.usize("n_positions")?.unwrap_or(1024),
        eps: ("layer_norm_epsilon", 1e-5),
        activation: ("activation_function", "gelu_new"),
        tied: true,
        norm: NormKind::Layer { bias: true },
        ..HfDefaults::LLAMA
    };
    let mut spec = common::of_sizes("gpt2", config, &sizes, &defaults)?;
    common::attention_biases(&mut spec, true);
    common::each_mlp(&mut spec, |mlp| mlp.bias = true);
    let scaled = config.bool("scale_attn_weights")?.unwrap_or(true);
    let by_layer = config
        .bool("scale_attn_by_inverse_layer_idx")?
        .unwrap_or(false);
    common::each_gqa(&mut spec, |i, gqa| {
        if !scaled {
            gqa.scale = 1.0;
        }
        if by_layer {
            gqa.scale /= (i + 1) as f32;
        }
    });
    learned_positions(&mut spec);
    Ok(spec)
}

fn learned_positions(spec: &mut DecoderSpec) {
    spec.learned_positions = Some(spec.context_length);
    spec.ropes.clear();
    common::each_gqa(spec, |_, gqa| gqa.rope = None);
    common::without_gates(spec);
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    spec.norm = NormKind::Layer { bias: true };
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::GeluTanh);
    learned_positions(&mut spec);
    Ok(spec)
}
