//! What Llama-like decoders have in common, read once for all families.

use super::Family;
use super::names::GGUF_NAMES;
use super::rope;
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{
    Activation, AttentionSpec, DecoderSpec, FeedForwardSpec, GatedMlpSpec, GqaSpec, LayerSpec,
    RopeScaling,
};
use ferrum_formats::gguf::PerLayer;
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// Most layers that a file may claim: far above any model, far below what exhausts memory.
const MAX_LAYERS: usize = 10_000;

/// What `transformers` takes for keys that a `config.json` leaves out.
pub(super) struct HfDefaults {
    /// `num_key_value_heads`; `None`: as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// `head_dim`; `None`: `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// `max_position_embeddings`.
    pub(super) max_position: usize,
}

/// Reads the common fields of `config.json`. The result has no biases, no q/k norms and no windows.
pub(super) fn from_hf(
    family: &'static str,
    config: &HfConfig,
    defaults: &HfDefaults,
) -> Result<DecoderSpec> {
    let hidden_size = config.require_usize("hidden_size")?;
    let heads = config.require_usize("num_attention_heads")?;
    let kv_heads = config
        .usize("num_key_value_heads")?
        .or(defaults.kv_heads)
        .unwrap_or(heads);
    let head_dim = match config.usize("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => hidden_size.checked_div(heads).unwrap_or(0),
    };
    let trained = config
        .usize("max_position_embeddings")?
        .unwrap_or(defaults.max_position);
    let rope = rope::from_hf(config, head_dim)?;
    let intermediate = config.require_usize("intermediate_size")?;
    let layer = layer(heads, kv_heads, head_dim, intermediate, activation(config)?);
    Ok(DecoderSpec {
        family,
        vocab_size: config.require_usize("vocab_size")?,
        hidden_size,
        context_length: stretched(&rope.scaling, trained),
        layers: vec![layer; hf_layer_count(config)?],
        norm_eps: config.f64("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope,
        tie_embeddings: config.bool("tie_word_embeddings")?.unwrap_or(false),
    })
}

/// Reads the common metadata of a GGUF file. Biases are there if their tensors are.
pub(super) fn from_gguf(family: &Family, gguf: &Gguf) -> Result<DecoderSpec> {
    let style = family
        .gguf_form
        .map_or(RopeStyle::HalfSplit, |form| form.rope);
    let arch = gguf.architecture()?;
    let key = |name: &str| format!("{arch}.{name}");
    let size = |name: &str| -> Result<usize> { Ok(gguf.require_u32(&key(name))? as usize) };
    let hidden_size = size("embedding_length")?;
    let heads = size("attention.head_count")?;
    let kv_heads = gguf
        .u32(&key("attention.head_count_kv"))?
        .map_or(heads, |n| n as usize);
    let head_dim = match gguf.u32(&key("attention.key_length"))? {
        Some(head_dim) => head_dim as usize,
        None => hidden_size.checked_div(heads).unwrap_or(0),
    };
    let value_dim = gguf
        .u32(&key("attention.value_length"))?
        .map_or(head_dim, |n| n as usize);
    let context_length = size("context_length")?;
    let mut layer = layer(
        heads,
        kv_heads,
        head_dim,
        size("feed_forward_length")?,
        Activation::Silu,
    );
    let has = |id: TensorId| {
        let name = GGUF_NAMES.name(id);
        name.is_some_and(|name| gguf.get(&name).is_some())
    };
    let has_bias = |role: TensorRole| has(TensorId::in_layer(0, role).bias());
    if let AttentionSpec::Gqa(gqa) = &mut layer.attention {
        gqa.value_dim = value_dim;
        gqa.qkv_bias = has_bias(TensorRole::Query);
        gqa.out_bias = has_bias(TensorRole::AttentionOutput);
    }
    if let FeedForwardSpec::GatedMlp(mlp) = &mut layer.feed_forward {
        mlp.bias = has_bias(TensorRole::Gate);
    }
    let mut spec = DecoderSpec {
        family: family.name,
        vocab_size: vocab_size(gguf)?,
        hidden_size,
        context_length,
        layers: vec![layer; gguf_layer_count(gguf, &key("block_count"))?],
        norm_eps: gguf.require_f32(&key("attention.layer_norm_rms_epsilon"))?,
        rope: rope::from_gguf(gguf, head_dim, context_length, style)?,
        tie_embeddings: !has(TensorId::global(TensorRole::Output)),
    };
    gguf_windows(gguf, &mut spec)?;
    Ok(spec)
}

/// Changes the attention of every layer that has heads.
pub(super) fn each_gqa(spec: &mut DecoderSpec, mut change: impl FnMut(usize, &mut GqaSpec)) {
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        if let AttentionSpec::Gqa(gqa) = &mut layer.attention {
            change(i, gqa);
        }
    }
}

/// The windows of Qwen: used only if `use_sliding_window`, in the layers that `layer_types` names or
/// else in those from `max_window_layers` on.
pub(super) fn qwen_windows(config: &HfConfig, spec: &mut DecoderSpec) -> Result<()> {
    if !config.bool("use_sliding_window")?.unwrap_or(false) {
        return Ok(());
    }
    let window = if config.has("sliding_window") {
        config.usize("sliding_window")?
    } else {
        Some(4096)
    };
    let first = config.usize("max_window_layers")?.unwrap_or(28);
    windows_by_type(config, spec, window, |i| i >= first)
}

/// Gives `window` to the layers that `layer_types` calls sliding, or, without that field, to those
/// for which `slides` holds.
pub(super) fn windows_by_type(
    config: &HfConfig,
    spec: &mut DecoderSpec,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<()> {
    let types = config.strs("layer_types")?;
    if let Some(types) = &types
        && types.len() != spec.layers.len()
    {
        let expected = format!("one entry for each of {} layers", spec.layers.len());
        return Err(config.field_error("layer_types", expected).into());
    }
    each_gqa(spec, |i, gqa| {
        let slides = match &types {
            Some(types) => types.get(i) == Some(&"sliding_attention"),
            None => slides(i),
        };
        gqa.sliding_window = window.filter(|_| slides);
    });
    Ok(())
}

/// `attention.sliding_window`, in all layers or in those that `sliding_window_pattern` marks.
fn gguf_windows(gguf: &Gguf, spec: &mut DecoderSpec) -> Result<()> {
    let arch = gguf.architecture()?;
    let window = gguf.u32(&format!("{arch}.attention.sliding_window"))?;
    let Some(window) = window.filter(|&n| n > 0) else {
        return Ok(());
    };
    let pattern_key = format!("{arch}.attention.sliding_window_pattern");
    let pattern = if gguf.has(&pattern_key) {
        gguf.bool_per_layer(&pattern_key)?
    } else {
        None
    };
    if let Some(PerLayer::Each(marks)) = &pattern
        && marks.len() != spec.layers.len()
    {
        return Err(Error::Model(format!(
            "{}: field \"{pattern_key}\": found {} entries, expected one for each of {} layers",
            gguf.path().display(),
            marks.len(),
            spec.layers.len()
        )));
    }
    each_gqa(spec, |i, gqa| {
        let slides = pattern
            .as_ref()
            .is_none_or(|marks| marks.get(i) == Some(true));
        gqa.sliding_window = slides.then_some(window as usize);
    });
    Ok(())
}

fn layer(
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    activation: Activation,
) -> LayerSpec {
    LayerSpec {
        attention: AttentionSpec::Gqa(GqaSpec {
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            sliding_window: None,
            qk_norm: false,
            qkv_bias: false,
            out_bias: false,
            shared_kv: None,
        }),
        feed_forward: FeedForwardSpec::GatedMlp(GatedMlpSpec {
            intermediate,
            activation,
            bias: false,
        }),
    }
}

/// The context of a model whose config states the length that it was trained on.
fn stretched(scaling: &RopeScaling, trained: usize) -> usize {
    match *scaling {
        RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => {
            (trained as f64 * f64::from(factor)) as usize
        }
        RopeScaling::Yarn {
            factor,
            original_max_position,
            ..
        } => trained.max((original_max_position as f64 * f64::from(factor)) as usize),
        _ => trained,
    }
}

fn hf_layer_count(config: &HfConfig) -> Result<usize> {
    let field = "num_hidden_layers";
    let found = config.require_usize(field)?;
    if found > MAX_LAYERS {
        return Err(config
            .field_error(field, format!("1 to {MAX_LAYERS}"))
            .into());
    }
    Ok(found)
}

fn gguf_layer_count(gguf: &Gguf, field: &str) -> Result<usize> {
    let found = gguf.require_u32(field)? as usize;
    if (1..=MAX_LAYERS).contains(&found) {
        return Ok(found);
    }
    Err(Error::Model(format!(
        "{}: field \"{field}\": found {found}, expected 1 to {MAX_LAYERS}",
        gguf.path().display()
    )))
}

fn activation(config: &HfConfig) -> Result<Activation> {
    match config.str("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        _ => Err(config
            .field_error("hidden_act", "silu or a form of gelu")
            .into()),
    }
}

fn vocab_size(gguf: &Gguf) -> Result<usize> {
    let id = TensorId::global(TensorRole::TokenEmbedding);
    let name = GGUF_NAMES.name(id).unwrap_or_default();
    let table = gguf.require(&name)?;
    match table.shape {
        [rows, _] => Ok(*rows),
        other => Err(Error::Model(format!(
            "{}: tensor \"{name}\" has shape {other:?}, expected two dimensions",
            gguf.path().display()
        ))),
    }
}
