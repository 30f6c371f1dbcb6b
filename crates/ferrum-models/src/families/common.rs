//! What Llama-like decoders have in common, read once for all families.

use super::Family;
pub(super) use super::hf_defaults::HfDefaults;
use super::names::GGUF_NAMES;
use super::rope;
use crate::inventory::{TensorId, TensorRole, WeightNames};
use crate::spec::{
    Activation, AttentionSpec, DecoderSpec, FeedForwardSpec, GqaSpec, LayerForm, LayerSpec,
    MlpSpec, NormKind, QkNormSpec, RopeScaling, Scales,
};
use ferrum_formats::gguf::{PerLayer, Value};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// Most layers that a file may claim: far above any model, far below what exhausts memory.
const MAX_LAYERS: usize = 10_000;

/// Reads the common fields of `config.json`. The result has no biases, no q/k norms and no windows.
pub(super) fn from_hf(
    family: &'static str,
    config: &HfConfig,
    defaults: &HfDefaults,
) -> Result<DecoderSpec> {
    let heads = config.require_usize("num_attention_heads")?;
    let kv_heads = config
        .usize("num_key_value_heads")?
        .or(defaults.kv_heads)
        .unwrap_or(heads);
    let sizes = HfSizes {
        hidden_size: config.require_usize("hidden_size")?,
        heads,
        kv_heads,
        intermediate: config.require_usize("intermediate_size")?,
        layers: hf_layer_count(config, "num_hidden_layers")?,
    };
    of_sizes(family, config, &sizes, defaults)
}

/// Sizes that configs have by different names.
pub(super) struct HfSizes {
    pub(super) hidden_size: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) intermediate: usize,
    pub(super) layers: usize,
}

/// [`from_hf`] of a config that has other names for these sizes.
pub(super) fn of_sizes(
    family: &'static str,
    config: &HfConfig,
    sizes: &HfSizes,
    defaults: &HfDefaults,
) -> Result<DecoderSpec> {
    let (hidden_size, heads) = (sizes.hidden_size, sizes.heads);
    let head_dim = match config.usize("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => hidden_size.checked_div(heads).unwrap_or(0),
    };
    let trained = config
        .usize("max_position_embeddings")?
        .unwrap_or(defaults.max_position);
    let ropes = rope::from_hf(config, head_dim, defaults)?;
    let activation = activation(config, defaults.activation)?;
    let inner = sizes.intermediate;
    let layer = layer(heads, sizes.kv_heads, head_dim, inner, activation);
    let (eps, default_eps) = defaults.eps;
    let stretched = ropes.iter().map(|rope| stretched(&rope.scaling, trained));
    let tied = config.bool("tie_word_embeddings")?;
    Ok(DecoderSpec {
        family,
        vocab_size: match (config.usize("vocab_size")?, defaults.vocab_size) {
            (None, Some(usual)) => usual,
            _ => config.require_usize("vocab_size")?,
        },
        hidden_size,
        context_length: stretched.max().unwrap_or(trained),
        layers: vec![layer; sizes.layers],
        norm: defaults.norm,
        norm_eps: config.f64(eps)?.map_or(default_eps, |eps| eps as f32),
        ropes,
        learned_positions: None,
        per_layer: None,
        scales: Scales::NONE,
        tie_embeddings: tied.unwrap_or(defaults.tied),
        output_bias: false,
    })
}

/// Makes attention bidirectional where a config, or the part of it about text, says so, as those of embedding models do.
pub(super) fn bidirectional_from_hf(config: &HfConfig, spec: &mut DecoderSpec) -> Result<()> {
    for config in [config, &config.text_config()?] {
        let field = "is_causal";
        let says = config.value(field) == Some(&false.into());
        if says && spec.is_causal() && !set_bidirectional(spec) {
            return Err(config.field_error(field, ONE_WAY).into());
        }
        // That of one family, which has read it; elsewhere it may be about images.
        let field = "use_bidirectional_attention";
        let other = config
            .value(field)
            .is_some_and(|found| !found.is_null() && *found != false && *found != "vision");
        if other && spec.is_causal() {
            let expected = "false, null or \"vision\": attention is causal in models of this kind";
            return Err(config.field_error(field, expected).into());
        }
    }
    Ok(())
}

/// The same, of a GGUF file.
pub(super) fn bidirectional_from_gguf(gguf: &Gguf, spec: &mut DecoderSpec) -> Result<()> {
    let field = format!("{}.attention.causal", gguf.architecture()?);
    let says = gguf.value(&field) == Some(Value::Bool(false));
    if says && spec.is_causal() && !set_bidirectional(spec) {
        let path = gguf.path().display();
        return Err(Error::Model(format!(
            "{path}: field \"{field}\": found false, expected {ONE_WAY}"
        )));
    }
    Ok(())
}

/// What is expected of a model whose layers cannot be [bidirectional](set_bidirectional).
const ONE_WAY: &str =
    "true: attention is causal where layers have windows, states, or latent or shared keys";

/// Makes attention bidirectional; false where a layer is of a kind that cannot be.
fn set_bidirectional(spec: &mut DecoderSpec) -> bool {
    let can = spec.layers.iter().all(|layer| match &layer.attention {
        AttentionSpec::Gqa(gqa) => gqa.sliding_window.is_none() && gqa.shared_kv.is_none(),
        AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => false,
    });
    if can {
        each_gqa(spec, |_, gqa| gqa.causal = false);
    }
    can
}

/// Whether a file has norms of queries, of which its metadata says nothing.
pub(super) fn gguf_has_query_norms(family: &Family, gguf: &Gguf) -> bool {
    let norm = TensorId::in_layer(0, TensorRole::QueryNorm);
    let norm = family.gguf_names.name(norm);
    norm.is_some_and(|name| gguf.get(&name).is_some())
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
    let (kv_heads, kv_heads_of) = gguf_kv_heads(gguf, heads)?;
    let head_dim = match gguf.u32(&key("attention.key_length"))? {
        Some(head_dim) => head_dim as usize,
        None => hidden_size.checked_div(heads).unwrap_or(0),
    };
    let value_dim = gguf
        .u32(&key("attention.value_length"))?
        .map_or(head_dim, |n| n as usize);
    let context_length = size("context_length")?;
    let inner = gguf.u32_per_layer(&key("feed_forward_length"))?;
    let first = inner.as_ref().and_then(|inner| inner.get(0));
    let first = match first {
        Some(first) => first as usize,
        // Models that have experts in all layers may leave it out.
        None => match gguf.u32(&key("expert_feed_forward_length"))? {
            Some(inner) => inner as usize,
            None => size("feed_forward_length")?,
        },
    };
    let mut layer = layer(heads, kv_heads, head_dim, first, Activation::Silu);
    let names = family.gguf_names;
    let has_bias = |role: TensorRole| has_bias(gguf, names, role);
    if let AttentionSpec::Gqa(gqa) = &mut layer.attention {
        gqa.value_dim = value_dim;
        gqa.qkv_bias = has_bias(TensorRole::Query);
        gqa.out_bias = has_bias(TensorRole::AttentionOutput);
        gqa.softcap = gguf.f32(&key("attn_logit_softcapping"))?;
        if let Some(scale) = gguf.f32(&key("attention.scale"))? {
            gqa.scale = scale;
        }
    }
    if let FeedForwardSpec::GatedMlp(mlp) = &mut layer.feed_forward {
        mlp.bias = has_bias(TensorRole::Down);
    }
    let output = TensorId::global(TensorRole::Output);
    let has = |id: TensorId| names.name(id).is_some_and(|name| gguf.get(&name).is_some());
    let layer_norm_eps = gguf.f32(&key("attention.layer_norm_epsilon"))?;
    let mut spec = DecoderSpec {
        family: family.name,
        vocab_size: vocab_size(gguf)?,
        hidden_size,
        context_length,
        layers: vec![layer; gguf_layer_count(gguf, &key("block_count"))?],
        norm: NormKind::Rms,
        norm_eps: match layer_norm_eps {
            Some(eps) => eps,
            None => gguf.require_f32(&key("attention.layer_norm_rms_epsilon"))?,
        },
        ropes: vec![rope::from_gguf(gguf, head_dim, context_length, style)?],
        learned_positions: None,
        per_layer: None,
        scales: Scales::NONE,
        tie_embeddings: !has(output),
        output_bias: has(output.bias()),
    };
    let factor = |name: &str| Ok::<_, Error>(gguf.f32(&key(name))?.unwrap_or(1.0));
    spec.scales = Scales {
        embedding: factor("embedding_scale")?,
        residual: factor("residual_scale")?,
        logits: factor("logit_scale")?,
        logit_softcap: gguf.f32(&key("final_logit_softcapping"))?,
    };
    gguf_windows(gguf, &mut spec)?;
    each_gqa(&mut spec, |i, gqa| {
        let stated = kv_heads_of.as_ref().and_then(|all| all.get(i));
        gqa.kv_heads = stated.map_or(gqa.kv_heads, |n| n as usize);
    });
    if let Some(PerLayer::Each(all)) = inner {
        let mut all = all.into_iter();
        each_mlp(&mut spec, |mlp| {
            mlp.intermediate = all.next().map_or(mlp.intermediate, |n| n as usize);
        });
    }
    Ok(spec)
}

/// Key and value heads of the first layer that has some, and of each layer where a file says them of each. Layers that
/// do not attend have 0.
fn gguf_kv_heads(gguf: &Gguf, heads: usize) -> Result<(usize, Option<PerLayer<u32>>)> {
    let key = format!("{}.attention.head_count_kv", gguf.architecture()?);
    Ok(match gguf.u32_per_layer(&key)? {
        None => (heads, None),
        Some(PerLayer::All(found)) => (found as usize, None),
        Some(PerLayer::Each(all)) => {
            let first = all.iter().copied().find(|&n| n > 0);
            (first.unwrap_or(0) as usize, Some(PerLayer::Each(all)))
        }
    })
}

/// Whether the map has a bias in the first layer, or the tensor that joins it with others.
fn has_bias(gguf: &Gguf, names: &WeightNames, role: TensorRole) -> bool {
    let own = names.name(TensorId::in_layer(0, role).bias());
    let joined = names.joined.qkv.filter(|_| role == TensorRole::Query);
    let joined = joined.map(|stem| format!("{}.{stem}.bias", names.layer.replace("{}", "0")));
    let mut both = own.iter().chain(&joined);
    both.any(|name| gguf.get(name).is_some())
}

/// Gives all layers this form.
pub(super) fn set_form(spec: &mut DecoderSpec, form: LayerForm) {
    spec.layers.iter_mut().for_each(|layer| layer.form = form);
}

/// Changes every feed-forward of linear maps.
pub(super) fn each_mlp(spec: &mut DecoderSpec, mut change: impl FnMut(&mut MlpSpec)) {
    for layer in &mut spec.layers {
        if let FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp) = &mut layer.feed_forward
        {
            change(mlp);
        }
    }
}

/// Takes the gates of all feed-forwards away.
pub(super) fn without_gates(spec: &mut DecoderSpec) {
    for layer in &mut spec.layers {
        if let FeedForwardSpec::GatedMlp(mlp) = &layer.feed_forward {
            layer.feed_forward = FeedForwardSpec::Mlp(mlp.clone());
        }
    }
}

/// Biases of all projections of attention.
pub(super) fn attention_biases(spec: &mut DecoderSpec, bias: bool) {
    each_gqa(spec, |_, gqa| {
        gqa.qkv_bias = bias;
        gqa.out_bias = bias;
    });
}

/// `ARCH.name` of a GGUF file.
pub(super) fn gguf_f32(gguf: &Gguf, name: &str) -> Result<Option<f32>> {
    Ok(gguf.f32(&format!("{}.{name}", gguf.architecture()?))?)
}

/// Lets each `every`th layer see all tokens where a GGUF file does not say which of them slide.
pub(super) fn full_layers(gguf: &Gguf, spec: &mut DecoderSpec, every: usize) -> Result<()> {
    let arch = gguf.architecture()?;
    if !gguf.has(&format!("{arch}.attention.sliding_window_pattern")) {
        each_gqa(spec, |i, gqa| {
            gqa.sliding_window = gqa.sliding_window.filter(|_| (i + 1) % every != 0);
        });
    }
    Ok(())
}

/// Gives the second rotary embedding to layers with a window, where there are two.
pub(super) fn ropes_by_window(spec: &mut DecoderSpec) {
    let local = spec.ropes.len().saturating_sub(1);
    each_gqa(spec, |_, gqa| {
        gqa.rope = Some(gqa.sliding_window.map_or(0, |_| local));
    });
}

/// Lets each of the last `count` layers attend over the keys and values of the last one of its kind before them.
pub(super) fn share_last(spec: &mut DecoderSpec, count: usize) -> Result<(), String> {
    let layers = spec.layers.len();
    let Some(first) = layers.checked_sub(count).filter(|&first| first > 0) else {
        return Err(format!("less than {layers}, the number of layers"));
    };
    let mut owners = [None; 2];
    each_gqa(spec, |i, gqa| {
        let owner = &mut owners[usize::from(gqa.sliding_window.is_some())];
        match i < first {
            true => *owner = Some(i),
            false => {
                gqa.shared_kv = Some(owner.unwrap_or(usize::MAX));
                gqa.keys_are_values = false;
            }
        }
    });
    Ok(())
}

/// Elements of a head in the first layer that slides, or in the first that does not.
pub(super) fn head_dim_of(spec: &mut DecoderSpec, slides: bool) -> usize {
    let mut found = None;
    each_gqa(spec, |_, gqa| {
        if gqa.sliding_window.is_some() == slides {
            found.get_or_insert(gqa.head_dim);
        }
    });
    found.unwrap_or(2)
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
    let every = gguf.value(&pattern_key).and_then(|v| v.as_integer());
    if let Some(every) = every.filter(|&n| n > 1) {
        each_gqa(spec, |i, gqa| {
            let slides = (i as i128 + 1) % every != 0;
            gqa.sliding_window = slides.then_some(window as usize);
        });
        return Ok(());
    }
    let pattern = match (gguf.has(&pattern_key), every) {
        (true, None) => gguf.bool_per_layer(&pattern_key)?,
        _ => None,
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
            causal: true,
            sliding_window: None,
            chunked: false,
            rope: Some(0),
            query_scale: None,
            softcap: None,
            sinks: false,
            qk_norm: QkNormSpec::None,
            qkv_bias: false,
            out_bias: false,
            gate: false,
            shared_kv: None,
            keys_are_values: false,
            value_norm: false,
        }),
        feed_forward: FeedForwardSpec::GatedMlp(MlpSpec {
            intermediate,
            activation,
            bias: false,
        }),
        form: LayerForm::PreNorm,
        output_scale: false,
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

pub(super) fn hf_layer_count(config: &HfConfig, field: &str) -> Result<usize> {
    let found = config.require_usize(field)?;
    if found > MAX_LAYERS {
        return Err(config
            .field_error(field, format!("1 to {MAX_LAYERS}"))
            .into());
    }
    Ok(found)
}

fn gguf_layer_count(gguf: &Gguf, field: &str) -> Result<usize> {
    // Layers that predict further tokens are the last ones.
    let arch = gguf.architecture()?;
    let further = gguf.u32(&format!("{arch}.nextn_predict_layers"))?;
    let found = gguf
        .require_u32(field)?
        .saturating_sub(further.unwrap_or(0)) as usize;
    if (1..=MAX_LAYERS).contains(&found) {
        return Ok(found);
    }
    Err(Error::Model(format!(
        "{}: field \"{field}\": found {found}, expected 1 to {MAX_LAYERS}",
        gguf.path().display()
    )))
}

fn activation(config: &HfConfig, (key, default): (&str, &str)) -> Result<Activation> {
    match config.str(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        _ => Err(config.field_error(key, "silu or a form of gelu").into()),
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
