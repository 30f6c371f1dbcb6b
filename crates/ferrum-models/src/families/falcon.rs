//! Falcon of 7 billion parameters and those like it: one key and value head, and usually attention and feed-forward in
//! parallel behind one layer norm.
//!
//! Falcons with more key and value heads store queries, keys and values in turns, which is not read.

use super::common::{self, HfDefaults, HfSizes};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec, LayerForm, NormKind};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "falcon",
    title: "Falcon (7B)",
    hf_architectures: &["FalconForCausalLM"],
    hf_model_types: &["falcon"],
    hf_names: &names::FALCON_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["falcon"],
    gguf_form: Some(GgufForm {
        architecture: "falcon",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    for (key, default, expected) in [
        ("alibi", false, false),
        ("new_decoder_architecture", false, false),
        ("multi_query", true, true),
    ] {
        if config.bool(key)?.unwrap_or(default) != expected {
            let expected = format!("{expected}: other Falcons are not supported");
            return Err(config.field_error(key, expected).into());
        }
    }
    let hidden_size = config.require_usize("hidden_size")?;
    let sizes = HfSizes {
        hidden_size,
        heads: config.require_usize("num_attention_heads")?,
        kv_heads: 1,
        intermediate: config.usize("ffn_hidden_size")?.unwrap_or(4 * hidden_size),
        layers: common::hf_layer_count(config, "num_hidden_layers")?,
    };
    let defaults = HfDefaults {
        eps: ("layer_norm_epsilon", 1e-5),
        activation: ("activation", "gelu"),
        tied: true,
        norm: NormKind::Layer { bias: true },
        ..HfDefaults::LLAMA
    };
    let mut spec = common::of_sizes("falcon", config, &sizes, &defaults)?;
    let bias = config.bool("bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    common::each_mlp(&mut spec, |mlp| mlp.bias = bias);
    common::without_gates(&mut spec);
    if config.bool("parallel_attn")?.unwrap_or(true) {
        common::set_form(&mut spec, LayerForm::Parallel { shared_norm: true });
    }
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    spec.norm = NormKind::Layer { bias: true };
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::Gelu);
    common::without_gates(&mut spec);
    common::set_form(&mut spec, LayerForm::Parallel { shared_norm: true });
    Ok(spec)
}
