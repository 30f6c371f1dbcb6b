//! Granite 3: Llama with factors on embeddings, scores, what layers add, and logits; with experts in some models.

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, ExpertRouting};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "granite",
    title: "Granite 3",
    hf_architectures: &["GraniteForCausalLM"],
    hf_model_types: &["granite"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["granite"],
    gguf_form: Some(GgufForm {
        architecture: "granite",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
};

pub(super) static GRANITE_MOE: Family = Family {
    name: "granitemoe",
    title: "Granite 3 MoE",
    hf_architectures: &["GraniteMoeForCausalLM"],
    hf_model_types: &["granitemoe"],
    hf_names: &names::GRANITE_MOE_NAMES,
    gguf_architectures: &["granitemoe"],
    gguf_form: Some(GgufForm {
        architecture: "granitemoe",
        rope: RopeStyle::Interleaved,
    }),
    from_hf: moe_from_hf,
    from_gguf: moe_from_gguf,
    ..FAMILY
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    read_hf(config, FAMILY.name)
}

fn moe_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = read_hf(config, GRANITE_MOE.name)?;
    let defaults = HfExperts {
        experts: 8,
        top_k: 2,
        intermediate: config.require_usize("intermediate_size")?,
        renormalize: true,
    };
    let moe = experts::from_hf(config, &defaults)?;
    experts::place(&mut spec, &moe, |_| true)?;
    Ok(spec)
}

pub(super) fn read_hf(config: &HfConfig, family: &'static str) -> Result<DecoderSpec> {
    let mut spec = common::from_hf(family, config, &HfDefaults::LLAMA)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    let bias = config.bool("mlp_bias")?.unwrap_or(false);
    common::each_mlp(&mut spec, |mlp| mlp.bias = bias);
    let factor = |key: &str| Ok::<_, ferrum_types::Error>(config.f64(key)?.unwrap_or(1.0));
    spec.scales.embedding = factor("embedding_multiplier")? as f32;
    spec.scales.residual = factor("residual_multiplier")? as f32;
    spec.scales.logits = (1.0 / factor("logits_scaling")?) as f32;
    let scale = factor("attention_multiplier")? as f32;
    common::each_gqa(&mut spec, |_, gqa| gqa.scale = scale);
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    read_gguf(&FAMILY, gguf)
}

fn moe_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = read_gguf(&GRANITE_MOE, gguf)?;
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(true))?;
    Ok(spec)
}

pub(super) fn read_gguf(family: &Family, gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(family, gguf)?;
    // Here it is a divisor.
    spec.scales.logits = 1.0 / spec.scales.logits;
    Ok(spec)
}
