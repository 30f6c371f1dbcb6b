//! Mistral: Llama with a sliding window in every layer.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "mistral",
    title: "Mistral",
    hf_architectures: &["MistralForCausalLM", "MistralModel"],
    hf_model_types: &["mistral"],
    hf_names: &names::HF_NAMES,
    hf_base_names: Some(&names::HF_BASE_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["mistral"],
    gguf_form: Some(GgufForm {
        architecture: "llama",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(8),
        head_dim: None,
        max_position: 131_072,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("mistral", config, &defaults)?;
    // `null` means none; only a key that is absent means the default.
    let window = if config.has("sliding_window") {
        config.usize("sliding_window")?
    } else {
        Some(4096)
    };
    // With `layer_types`, transformers takes the model for a Ministral, where some layers see all.
    common::windows_by_type(config, &mut spec, window, |_| true)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    common::from_gguf(&FAMILY, gguf)
}
