//! Qwen 2 and 2.5: biases on q, k and v; windows in the upper layers, if at all.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "qwen2",
    title: "Qwen 2, 2.5",
    hf_architectures: &["Qwen2ForCausalLM", "Qwen2Model"],
    hf_model_types: &["qwen2"],
    hf_names: &names::HF_NAMES,
    hf_base_names: Some(&names::HF_BASE_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["qwen2"],
    gguf_form: Some(GgufForm {
        architecture: "qwen2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(32),
        head_dim: None,
        max_position: 32_768,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("qwen2", config, &defaults)?;
    common::each_gqa(&mut spec, |_, gqa| gqa.qkv_bias = true);
    common::qwen_windows(config, &mut spec)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    common::from_gguf(&FAMILY, gguf)
}
