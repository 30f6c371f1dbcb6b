//! Qwen 1.5 and 2 with experts: the attention of Qwen 2; beside the chosen experts one that all tokens go through, times
//! the sigmoid of a logit.

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec, ExpertRouting, SharedExpertSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "qwen2moe",
    title: "Qwen 1.5 MoE, Qwen 2 MoE",
    hf_architectures: &["Qwen2MoeForCausalLM"],
    hf_model_types: &["qwen2_moe"],
    hf_names: &names::QWEN2_MOE_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["qwen2moe"],
    gguf_form: Some(GgufForm {
        architecture: "qwen2moe",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(16),
        max_position: 32_768,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("qwen2moe", config, &defaults)?;
    let bias = config.bool("qkv_bias")?.unwrap_or(true);
    common::each_gqa(&mut spec, |_, gqa| gqa.qkv_bias = bias);
    if config.bool("use_sliding_window")?.unwrap_or(false) {
        let window = config.usize("sliding_window")?;
        // Unlike in the dense Qwen 2, every second one of the lower layers.
        let last = config.usize("max_window_layers")?.unwrap_or(28);
        common::windows_by_type(config, &mut spec, window, |i| i % 2 == 0 && i < last)?;
    }
    let defaults = HfExperts {
        experts: 60,
        top_k: 4,
        intermediate: 1408,
        renormalize: false,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    let shared = config.usize("shared_expert_intermediate_size")?;
    moe.shared = Some(SharedExpertSpec {
        intermediate: shared.unwrap_or(5632),
        activation: Activation::Silu,
        gated: true,
    });
    let has = experts::sparse_layers(config, &moe)?;
    experts::place(&mut spec, &moe, has)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(false))?;
    Ok(spec)
}
