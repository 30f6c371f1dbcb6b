//! Qwen 3 with experts: the attention of Qwen 3; feed-forwards of experts in all layers, or in every
//! `decoder_sparse_step`-th one that `mlp_only_layers` does not name.

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, ExpertRouting, QkNormSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "qwen3moe",
    title: "Qwen 3 MoE",
    hf_architectures: &["Qwen3MoeForCausalLM"],
    hf_model_types: &["qwen3_moe"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["qwen3moe"],
    gguf_form: Some(GgufForm {
        architecture: "qwen3moe",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(4),
        head_dim: None,
        max_position: 32_768,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("qwen3moe", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    let window = if config.bool("use_sliding_window")?.unwrap_or(false) {
        let unstated = (!config.has("sliding_window")).then_some(4096);
        config.usize("sliding_window")?.or(unstated)
    } else {
        None
    };
    common::each_gqa(&mut spec, |_, gqa| {
        gqa.qk_norm = QkNormSpec::Heads;
        gqa.qkv_bias = bias;
        gqa.out_bias = bias;
        // Unlike the dense Qwen 3, all layers have it.
        gqa.sliding_window = window;
    });
    let defaults = HfExperts {
        experts: 128,
        top_k: 8,
        intermediate: 768,
        renormalize: false,
    };
    let moe = experts::from_hf(config, &defaults)?;
    let has = experts::sparse_layers(config, &moe)?;
    experts::place(&mut spec, &moe, has)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::Heads);
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(true))?;
    Ok(spec)
}
