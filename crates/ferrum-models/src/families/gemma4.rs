//! The text models of Gemma 4: Gemma 3 with wider heads in layers that see all tokens, normed values, values that
//! may be keys, last layers that share the keys and values of earlier ones, experts beside the feed-forward, and a factor
//! behind each layer.

mod gguf;

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, gemma, names, rope};
use crate::spec::{Activation, AttentionSpec, DecoderSpec, LayerForm, PerLayerSpec, QkNormSpec};
use ferrum_formats::{HfConfig, RopeConfig, RopeConfigs, RopeKind};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "gemma4",
    title: "Gemma 4 (text)",
    hf_architectures: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    hf_model_types: &["gemma4_text", "gemma4"],
    hf_names: &names::GEMMA4_NAMES,
    hf_base_names: Some(&names::GEMMA4_NESTED_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_GEMMA4_NAMES,
    gguf_architectures: &["gemma4"],
    gguf_form: Some(GgufForm {
        architecture: "gemma4",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf: gguf::read,
};

/// What configs state; sizes that are not are those of 26B-A4B.
const EXPERTS: HfExperts = HfExperts {
    experts: 128,
    top_k: 8,
    intermediate: 704,
    renormalize: true,
};

const PER_LAYER: &str = "hidden_size_per_layer_input";
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let config = &config.text_config()?;
    let defaults = HfDefaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        max_position: 131_072,
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        tied: true,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf(FAMILY.name, config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    let window = config.usize("sliding_window")?.unwrap_or(512);
    let last = spec.layers.len().saturating_sub(1);
    common::windows_by_type(config, &mut spec, Some(window), |i| (i + 1) % 6 != 0)?;
    common::each_gqa(&mut spec, |i, gqa| {
        gqa.sliding_window = gqa.sliding_window.filter(|_| i != last);
    });
    full_heads_from_hf(config, &mut spec)?;
    ropes_from_hf(config, &mut spec, &defaults)?;
    let from_keys = config.bool("attention_k_eq_v")?.unwrap_or(false);
    common::each_gqa(&mut spec, |_, gqa| {
        gqa.keys_are_values = from_keys && gqa.sliding_window.is_none();
    });
    let shared = config.usize("num_kv_shared_layers")?.unwrap_or(0);
    common::share_last(&mut spec, shared)
        .map_err(|expected| config.field_error("num_kv_shared_layers", expected))?;
    if config.bool("use_double_wide_mlp")?.unwrap_or(false) {
        let first = spec.layers.len() - shared;
        let mut layer = 0;
        common::each_mlp(&mut spec, |mlp| {
            mlp.intermediate = mlp
                .intermediate
                .saturating_mul(1 + usize::from(layer >= first));
            layer += 1;
        });
    }
    let dim = match config.has(PER_LAYER) {
        true => config.usize(PER_LAYER)?.unwrap_or(0),
        false => 256,
    };
    let rows = config.usize("vocab_size_per_layer_input")?;
    add_per_layer(&mut spec, dim, rows.unwrap_or(262_144));
    if config.bool("enable_moe_block")?.unwrap_or(false) {
        let mut moe = experts::from_hf(config, &EXPERTS)?;
        moe.top_k = config.usize("top_k_experts")?.unwrap_or(moe.top_k);
        experts::place_beside(&mut spec, &moe);
    }
    spec.scales.logit_softcap = config.f64("final_logit_softcapping")?.map(|cap| cap as f32);
    finish(&mut spec);
    Ok(spec)
}

/// Embeddings of `dim` elements for each layer, unless that is none.
fn add_per_layer(spec: &mut DecoderSpec, dim: usize, vocab_size: usize) {
    let layers = spec.layers.len();
    spec.per_layer = (dim > 0).then_some(PerLayerSpec {
        vocab_size,
        layers,
        dim,
        activation: Activation::GeluTanh,
    });
}

/// Heads of layers that see all tokens: stated for each layer, or once for all of them.
fn full_heads_from_hf(config: &HfConfig, spec: &mut DecoderSpec) -> Result<()> {
    let each = config.section("per_layer_config")?;
    let from_keys = config.bool("attention_k_eq_v")?.unwrap_or(false);
    let head_dim = config.usize("global_head_dim")?.unwrap_or(512);
    let kv_heads = config
        .usize("num_global_key_value_heads")?
        .filter(|_| from_keys);
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let AttentionSpec::Gqa(gqa) = &mut layer.attention else {
            continue;
        };
        let (dim, heads) = match &each {
            Some(each) => match each.section(&i.to_string())? {
                Some(own) => (own.usize("head_dim")?, own.usize("num_key_value_heads")?),
                None => (None, None),
            },
            None if gqa.sliding_window.is_none() => (Some(head_dim), kv_heads),
            None => (None, None),
        };
        gqa.head_dim = dim.unwrap_or(gqa.head_dim);
        gqa.value_dim = gqa.head_dim;
        gqa.kv_heads = heads.unwrap_or(gqa.kv_heads);
    }
    Ok(())
}

/// A rotation for layers that see all tokens, and one for those with a window.
fn ropes_from_hf(config: &HfConfig, spec: &mut DecoderSpec, defaults: &HfDefaults) -> Result<()> {
    let plain = |theta, share, kind| RopeConfig {
        theta,
        partial_rotary_factor: share,
        kind,
        mrope_section: None,
    };
    let stated = config.rope(defaults.theta)?;
    let of = |name: &str, default: RopeConfig| match &stated {
        RopeConfigs::ByLayerType(types) => types.get(name).cloned().unwrap_or(default),
        RopeConfigs::All(_) => default,
    };
    let proportional = RopeKind::Proportional { factor: 1.0 };
    let kinds = [
        (false, of(FULL, plain(1e6, 0.25, proportional))),
        (true, of(SLIDING, plain(1e4, 1.0, RopeKind::Default))),
    ];
    let mut ropes = Vec::new();
    for (slides, rope) in &kinds {
        let head_dim = common::head_dim_of(spec, *slides);
        ropes.push(rope::one_from_hf(config, head_dim, rope, defaults)?);
    }
    spec.ropes = ropes;
    common::ropes_by_window(spec);
    Ok(())
}

/// What every model has.
fn finish(spec: &mut DecoderSpec) {
    common::each_gqa(spec, |_, gqa| {
        gqa.scale = 1.0;
        gqa.qk_norm = QkNormSpec::Heads;
        gqa.value_norm = true;
    });
    common::set_form(spec, LayerForm::Sandwich);
    spec.layers
        .iter_mut()
        .for_each(|layer| layer.output_scale = true);
    gemma::scale_embeddings(spec);
}
