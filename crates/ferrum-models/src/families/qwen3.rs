//! Qwen 3 (dense): RMS norm of each q and k head before rotation, no biases by default.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, QkNormSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "qwen3",
    title: "Qwen 3",
    hf_architectures: &["Qwen3ForCausalLM", "Qwen3Model"],
    hf_model_types: &["qwen3"],
    hf_names: &names::HF_NAMES,
    hf_base_names: Some(&names::HF_BASE_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["qwen3"],
    gguf_form: Some(GgufForm {
        architecture: "qwen3",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(32),
        head_dim: Some(128),
        max_position: 32_768,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("qwen3", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::each_gqa(&mut spec, |_, gqa| {
        gqa.qk_norm = QkNormSpec::Heads;
        gqa.qkv_bias = bias;
        gqa.out_bias = bias;
    });
    common::qwen_windows(config, &mut spec)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::Heads);
    Ok(spec)
}
