//! Gemma 1: Llama with scaled embeddings and norms that are stored less 1.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "gemma",
    title: "Gemma 1",
    hf_architectures: &["GemmaForCausalLM"],
    hf_model_types: &["gemma"],
    hf_names: &names::GEMMA_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["gemma"],
    gguf_form: Some(GgufForm {
        architecture: "gemma",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(16),
        head_dim: Some(256),
        max_position: 8192,
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        tied: true,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("gemma", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    scale_embeddings(&mut spec);
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::GeluTanh);
    scale_embeddings(&mut spec);
    Ok(spec)
}

/// Embeddings are as long as what layers add.
pub(super) fn scale_embeddings(spec: &mut DecoderSpec) {
    spec.scales.embedding = (spec.hidden_size as f32).sqrt();
}
