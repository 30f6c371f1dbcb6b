//! Gemma 2 and the decoders of Gemma 3: norms before and behind both parts, and windows in most layers.
//!
//! Gemma 2 bounds scores and logits; Gemma 3 norms queries and keys in its place, and rotates layers with a window by
//! frequencies of their own.

use super::common::{self, HfDefaults, HfSizes};
use super::{Family, GgufForm, gemma, names};
use crate::spec::{Activation, DecoderSpec, LayerForm, QkNormSpec, RopeScaling, RopeSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "gemma2",
    title: "Gemma 2",
    hf_architectures: &["Gemma2ForCausalLM"],
    hf_model_types: &["gemma2"],
    hf_names: &names::GEMMA2_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["gemma2"],
    gguf_form: Some(GgufForm {
        architecture: "gemma2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf: gemma2_from_hf,
    from_gguf: gemma2_from_gguf,
};

pub(super) static GEMMA3: Family = Family {
    name: "gemma3",
    title: "Gemma 3 (text)",
    hf_architectures: &["Gemma3ForCausalLM"],
    hf_model_types: &["gemma3_text"],
    hf_names: &names::GEMMA2_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["gemma3"],
    gguf_form: Some(GgufForm {
        architecture: "gemma3",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf: gemma3_from_hf,
    from_gguf: gemma3_from_gguf,
};

/// Gemma 3 with the tower that [vision](crate::vision) reads.
pub(super) static GEMMA3_VISION: Family = Family {
    name: "gemma3-vision",
    title: "Gemma 3 (images and text)",
    hf_architectures: &["Gemma3ForConditionalGeneration"],
    hf_model_types: &["gemma3"],
    hf_names: &names::GEMMA3_VISION_NAMES,
    hf_base_names: Some(&names::GEMMA3_NESTED_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &[],
    gguf_form: GEMMA3.gguf_form,
    from_hf: gemma3_from_hf,
    from_gguf: gemma3_from_gguf,
};

fn gemma2_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = from_hf(config, (FAMILY.name, 10_000.0), 2)?;
    let cap = |key: &str, default: f32| match config.has(key) {
        true => Ok::<_, ferrum_types::Error>(config.f64(key)?.map(|cap| cap as f32)),
        false => Ok(Some(default)),
    };
    let softcap = cap("attn_logit_softcapping", 50.0)?;
    spec.scales.logit_softcap = cap("final_logit_softcapping", 30.0)?;
    common::each_gqa(&mut spec, |_, gqa| gqa.softcap = softcap);
    Ok(spec)
}

pub(super) fn gemma3_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let config = &config.text_config()?;
    let pattern = match config.usize("sliding_window_pattern")? {
        Some(every) => Some(every),
        None => config.usize("_sliding_window_pattern")?,
    };
    let mut spec = from_hf(config, (GEMMA3.name, 1e6), pattern.unwrap_or(6))?;
    let cap = config.f64("final_logit_softcapping")?;
    spec.scales.logit_softcap = cap.map(|cap| cap as f32);
    two_ropes(&mut spec, 10_000.0);
    common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::Heads);
    Ok(spec)
}

/// What both have in common. Each `every`th layer sees all tokens.
fn from_hf(
    config: &HfConfig,
    (family, theta): (&'static str, f64),
    every: usize,
) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        max_position: if theta > 10_000.0 { 131_072 } else { 8192 },
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        tied: true,
        vocab_size: (family == GEMMA3.name).then_some(262_208),
        theta,
        ..HfDefaults::LLAMA
    };
    let heads = match config.usize("num_attention_heads")? {
        // The configs of Gemma 3 beside an image tower leave out what is usual.
        None if family == GEMMA3.name => 8,
        _ => config.require_usize("num_attention_heads")?,
    };
    let sizes = HfSizes {
        hidden_size: config.require_usize("hidden_size")?,
        heads,
        kv_heads: config.usize("num_key_value_heads")?.unwrap_or(4),
        intermediate: config.require_usize("intermediate_size")?,
        layers: common::hf_layer_count(config, "num_hidden_layers")?,
    };
    let mut spec = common::of_sizes(family, config, &sizes, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    let window = match config.has("sliding_window") {
        true => config.usize("sliding_window")?,
        false => Some(4096),
    };
    common::windows_by_type(config, &mut spec, window, |i| (i + 1) % every.max(1) != 0)?;
    let scalar = config.f64("query_pre_attn_scalar")?.unwrap_or(256.0);
    common::each_gqa(&mut spec, |_, gqa| gqa.scale = scalar.powf(-0.5) as f32);
    sandwich(&mut spec);
    Ok(spec)
}

fn sandwich(spec: &mut DecoderSpec) {
    common::set_form(spec, LayerForm::Sandwich);
    gemma::scale_embeddings(spec);
}

/// Layers with a window have a base of their own, and no scaling.
fn two_ropes(spec: &mut DecoderSpec, theta: f32) {
    if let [global] = spec.ropes.as_slice() {
        let local = RopeSpec {
            theta,
            scaling: RopeScaling::None,
            ..global.clone()
        };
        spec.ropes.push(local);
    }
    common::ropes_by_window(spec);
}

fn gemma2_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    from_gguf(&FAMILY, gguf, (2, 46))
}

pub(super) fn gemma3_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = from_gguf(&GEMMA3, gguf, (6, 62))?;
    let theta = common::gguf_f32(gguf, "rope.freq_base_swa")?;
    two_ropes(&mut spec, theta.unwrap_or(10_000.0));
    common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::Heads);
    Ok(spec)
}

/// Each `every`th layer sees all tokens; the model of 27 billion parameters, which has `large` layers, divides scores by
/// the width of the stream for each head.
fn from_gguf(family: &Family, gguf: &Gguf, (every, large): (usize, usize)) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(family, gguf)?;
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::GeluTanh);
    common::full_layers(gguf, &mut spec, every)?;
    let stated = common::gguf_f32(gguf, "attention.scale")?.is_some();
    let (hidden, is_large) = (spec.hidden_size, spec.layers.len() == large);
    common::each_gqa(&mut spec, |_, gqa| {
        if is_large && !stated && gqa.heads > 0 {
            gqa.scale = 1.0 / ((hidden / gqa.heads) as f32).sqrt();
        }
    });
    sandwich(&mut spec);
    Ok(spec)
}
