//! Granite 3: Llama with factors on embeddings, scores, what layers add, and logits.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::DecoderSpec;
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

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = common::from_hf("granite", config, &HfDefaults::LLAMA)?;
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
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    // Here it is a divisor.
    spec.scales.logits = 1.0 / spec.scales.logits;
    Ok(spec)
}
