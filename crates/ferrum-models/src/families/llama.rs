//! Llama 2 and 3.x, and everything saved under their name.

use super::common::{self, HfDefaults};
use super::experts;
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, ExpertRouting, FeedForwardSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "llama",
    title: "Llama 2, 3, 3.1, 3.2, 3.3 (text)",
    hf_architectures: &["LlamaForCausalLM", "LlamaModel"],
    hf_model_types: &["llama"],
    hf_names: &names::HF_NAMES,
    hf_base_names: Some(&names::HF_BASE_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    // Mistral's and Mixtral's GGUF files say "llama" too; they differ only by values.
    gguf_architectures: &["llama"],
    gguf_form: Some(GgufForm {
        architecture: "llama",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: None,
        head_dim: None,
        max_position: 2048,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("llama", config, &defaults)?;
    let attention_bias = config.bool("attention_bias")?.unwrap_or(false);
    common::each_gqa(&mut spec, |_, gqa| {
        gqa.qkv_bias = attention_bias;
        gqa.out_bias = attention_bias;
    });
    let mlp_bias = config.bool("mlp_bias")?.unwrap_or(false);
    for layer in &mut spec.layers {
        if let FeedForwardSpec::GatedMlp(mlp) = &mut layer.feed_forward {
            mlp.bias = mlp_bias;
        }
    }
    Ok(spec)
}

pub(super) fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    // Converters reorder the rows of q and k so that rotated pairs are neighbours.
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(true))?;
    Ok(spec)
}
