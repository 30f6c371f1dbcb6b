//! GLM-4 (0414): norms before and behind both parts, joined gate and up, half of each head rotated in pairs.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, LayerForm};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "glm4",
    title: "GLM-4 (0414)",
    hf_architectures: &["Glm4ForCausalLM"],
    hf_model_types: &["glm4"],
    hf_names: &names::GLM4_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::Interleaved,
    gguf_names: &names::GGUF_GATE_UP_NAMES,
    gguf_architectures: &["glm4"],
    gguf_form: Some(GgufForm {
        architecture: "glm4",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        max_position: 131_072,
        eps: ("rms_norm_eps", 1.5625e-7),
        rotary_share: Some(0.5),
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("glm4", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(true);
    common::each_gqa(&mut spec, |_, gqa| gqa.qkv_bias = bias);
    for rope in &mut spec.ropes {
        rope.style = RopeStyle::Interleaved;
    }
    common::set_form(&mut spec, LayerForm::Sandwich);
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    common::set_form(&mut spec, LayerForm::Sandwich);
    Ok(spec)
}
