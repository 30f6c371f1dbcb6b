//! Qwen3-Next and Qwen 3.5: gated delta networks in most layers, gated attention in the others. Experts as in Qwen 2 MoE,
//! or dense feed-forwards.

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::linear::{self, Recurrent};
use super::{Family, GgufForm, names};
use crate::spec::{
    Activation, DecoderSpec, ExpertRouting, LinearAttentionSpec, QkNormSpec, SharedExpertSpec,
};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::{HeadOrder, LinearAttentionRule, RopeStyle};
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "qwen3next",
    title: "Qwen3-Next",
    hf_architectures: &["Qwen3NextForCausalLM"],
    hf_model_types: &["qwen3_next"],
    hf_names: &names::QWEN3_NEXT_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_QWEN3_NEXT_NAMES,
    gguf_architectures: &["qwen3next"],
    gguf_form: Some(GgufForm {
        architecture: "qwen3next",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf: next_from_hf,
    from_gguf: next_from_gguf,
};

pub(super) static QWEN3_5: Family = Family {
    name: "qwen35",
    title: "Qwen 3.5 (text)",
    hf_architectures: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
    hf_model_types: &["qwen3_5_text", "qwen3_5"],
    hf_base_names: Some(&names::QWEN3_5_NAMES),
    gguf_architectures: &["qwen35"],
    gguf_form: Some(GgufForm {
        architecture: "qwen35",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
    ..FAMILY
};

pub(super) static QWEN3_5_MOE: Family = Family {
    name: "qwen35moe",
    title: "Qwen 3.5 MoE (text)",
    hf_architectures: &[
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    hf_model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    gguf_architectures: &["qwen35moe"],
    gguf_form: Some(GgufForm {
        architecture: "qwen35moe",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf: moe_from_hf,
    from_gguf: moe_from_gguf,
    ..QWEN3_5
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let config = config.text_config()?;
    let intermediate = config.require_usize("intermediate_size")?;
    read_hf(&config, QWEN3_5.name, intermediate)
}

fn moe_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let config = config.text_config()?;
    let defaults = HfExperts {
        experts: 256,
        top_k: 8,
        intermediate: 512,
        renormalize: true,
    };
    hf_with_experts(&config, QWEN3_5_MOE.name, &defaults)
}

fn next_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfExperts {
        experts: 512,
        top_k: 10,
        intermediate: 512,
        renormalize: true,
    };
    hf_with_experts(config, FAMILY.name, &defaults)
}

fn hf_with_experts(
    config: &HfConfig,
    family: &'static str,
    defaults: &HfExperts,
) -> Result<DecoderSpec> {
    let mut moe = experts::from_hf(config, defaults)?;
    let dense = config
        .usize("intermediate_size")?
        .unwrap_or(moe.intermediate);
    let mut spec = read_hf(config, family, dense)?;
    let shared = config.usize("shared_expert_intermediate_size")?;
    moe.shared = Some(SharedExpertSpec {
        intermediate: shared.unwrap_or(512),
        activation: Activation::Silu,
        gated: true,
    });
    let has = experts::sparse_layers(config, &moe)?;
    experts::place(&mut spec, &moe, has)?;
    Ok(spec)
}

fn read_hf(config: &HfConfig, family: &'static str, intermediate: usize) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        head_dim: Some(256),
        max_position: 32_768,
        rotary_share: Some(0.25),
        ..HfDefaults::LLAMA
    };
    let sizes = common::HfSizes {
        hidden_size: config.require_usize("hidden_size")?,
        heads: config.require_usize("num_attention_heads")?,
        kv_heads: config.require_usize("num_key_value_heads")?,
        intermediate,
        layers: common::hf_layer_count(config, "num_hidden_layers")?,
    };
    let mut spec = common::of_sizes(family, config, &sizes, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    let size =
        |key: &str, default| Ok::<_, ferrum_types::Error>(config.usize(key)?.unwrap_or(default));
    let delta = LinearAttentionSpec {
        rule: LinearAttentionRule::GatedDelta,
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        order: HeadOrder::Grouped,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
        conv_bias: false,
        bias: false,
    };
    let every = size("full_attention_interval", 4)?.max(1);
    let is_recurrent = linear::hf_layers(config, spec.layers.len(), |i| {
        !(i + 1).is_multiple_of(every)
    })?;
    place(&mut spec, &delta, |i| is_recurrent[i]);
    Ok(spec)
}

fn place(
    spec: &mut DecoderSpec,
    delta: &LinearAttentionSpec,
    is_recurrent: impl Fn(usize) -> bool,
) {
    common::each_gqa(spec, |_, gqa| {
        gqa.qk_norm = QkNormSpec::Heads;
        gqa.gate = true;
    });
    linear::place(spec, delta, is_recurrent);
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    read_gguf(&QWEN3_5, gguf, HeadOrder::Interleaved)
}

fn moe_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = read_gguf(&QWEN3_5_MOE, gguf, HeadOrder::Interleaved)?;
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(true))?;
    Ok(spec)
}

fn next_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = read_gguf(&FAMILY, gguf, HeadOrder::Grouped)?;
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(true))?;
    Ok(spec)
}

fn read_gguf(family: &Family, gguf: &Gguf, order: HeadOrder) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(family, gguf)?;
    let Recurrent { layers, mut linear } = linear::from_gguf(
        family,
        gguf,
        spec.layers.len(),
        LinearAttentionRule::GatedDelta,
    )?;
    linear.order = order;
    place(&mut spec, &linear, |i| layers[i]);
    Ok(spec)
}
