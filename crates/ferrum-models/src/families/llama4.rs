//! Llama 4 (text): attention in chunks in layers that rotate, and over all tokens in every fourth, which does not rotate
//! and has queries multiplied by their position; experts whose weights multiply what goes into them, in all layers or in
//! some, beside a shared one.

use super::common::{self, HfDefaults, HfSizes};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, names};
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{
    Activation, DecoderSpec, ExpertRouting, MoeSpec, QkNormSpec, RopeScaling, RopeSpec,
    SharedExpertSpec,
};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::{ExpertScore, RopeStyle};
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "llama4",
    title: "Llama 4 (text)",
    hf_architectures: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    hf_model_types: &["llama4_text", "llama4"],
    hf_names: &names::LLAMA4_NAMES,
    hf_base_names: Some(&names::LLAMA4_NESTED_NAMES),
    hf_rope: RopeStyle::Interleaved,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["llama4"],
    gguf_form: Some(GgufForm {
        architecture: "llama4",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
};

/// Tokens of a chunk, and of a step of the factor on queries.
const CHUNK: usize = 8192;
/// Growth of the factor on queries.
const SCALE: f64 = 0.1;
/// Every so manieth layer does not rotate.
const EVERY: usize = 4;

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let config = &config.text_config()?;
    let sizes = HfSizes {
        hidden_size: config.require_usize("hidden_size")?,
        heads: config.require_usize("num_attention_heads")?,
        kv_heads: config.usize("num_key_value_heads")?.unwrap_or(8),
        intermediate: config.usize("intermediate_size_mlp")?.unwrap_or(16_384),
        layers: common::hf_layer_count(config, "num_hidden_layers")?,
    };
    let defaults = HfDefaults {
        head_dim: Some(128),
        max_position: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        theta: 500_000.0,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::of_sizes(FAMILY.name, config, &sizes, &defaults)?;
    spec.ropes
        .iter_mut()
        .for_each(|rope| rope.style = RopeStyle::Interleaved);
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    attention_from_hf(config, &mut spec)?;
    let inner = config.usize("intermediate_size")?.unwrap_or(8192);
    let defaults = HfExperts {
        experts: 16,
        top_k: 1,
        intermediate: inner,
        renormalize: false,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    moe.intermediate = inner;
    scale_inputs(&mut moe);
    let stated = config.usizes("moe_layers")?;
    let step = config
        .usize("interleave_moe_layer_step")?
        .unwrap_or(1)
        .max(1);
    experts::place(&mut spec, &moe, |i| match &stated {
        Some(stated) => stated.contains(&i),
        None => (i + 1).is_multiple_of(step),
    })?;
    Ok(spec)
}

/// Which layers rotate, which are chunked, and what norms and factors they have.
fn attention_from_hf(config: &HfConfig, spec: &mut DecoderSpec) -> Result<()> {
    let layers = spec.layers.len();
    let every = config
        .usize("no_rope_layer_interval")?
        .unwrap_or(EVERY)
        .max(1);
    let stated = config
        .usizes("no_rope_layers")?
        .filter(|all| !all.is_empty());
    let types = config.strs("layer_types")?;
    for (key, found) in [
        ("no_rope_layers", stated.as_ref().map(Vec::len)),
        ("layer_types", types.as_ref().map(Vec::len)),
    ] {
        if found.is_some_and(|found| found < layers) {
            let expected = format!("one entry for each of {layers} layers");
            return Err(config.field_error(key, expected).into());
        }
    }
    // In spite of the name, 1 means that a layer rotates.
    let rotates = |i: usize| match &stated {
        Some(stated) => stated.get(i) != Some(&0),
        None => !(i + 1).is_multiple_of(every),
    };
    let chunk = match config.has("attention_chunk_size") {
        true => config.usize("attention_chunk_size")?,
        false => Some(CHUNK),
    };
    let is_chunked = |i: usize| match &types {
        Some(types) => types.get(i) == Some(&"chunked_attention"),
        None => rotates(i),
    };
    // Older files have a number here.
    let tuned = config.value("attn_temperature_tuning");
    let tuned = tuned.is_none_or(|tuned| tuned.as_bool().unwrap_or(tuned.as_u64() != Some(0)));
    let temperature = RopeScaling::Temperature {
        floor: config.f64("floor_scale")?.unwrap_or(CHUNK as f64) as f32,
        scale: config.f64("attn_scale")?.unwrap_or(SCALE) as f32,
    };
    let normed = config.bool("use_qk_norm")?.unwrap_or(true);
    place_attention(spec, &rotates, normed, tuned.then_some(temperature));
    common::each_gqa(spec, |i, gqa| {
        gqa.sliding_window = chunk.filter(|_| is_chunked(i));
        gqa.chunked = gqa.sliding_window.is_some();
    });
    Ok(())
}

/// Rotation and norms in some layers, the factor on queries in the others. A rotation keeps the length of a head, so
/// that norms, which have no weights, may stand before it.
fn place_attention(
    spec: &mut DecoderSpec,
    rotates: &dyn Fn(usize) -> bool,
    normed: bool,
    temperature: Option<RopeScaling>,
) {
    let head_dim = spec.ropes.first().map_or(0, |rope| rope.rot_dim);
    let factor = temperature.map(|scaling| {
        spec.ropes.push(RopeSpec {
            rot_dim: head_dim,
            theta: 1.0,
            style: RopeStyle::Interleaved,
            scaling,
        });
        spec.ropes.len() - 1
    });
    common::each_gqa(spec, |i, gqa| match rotates(i) {
        true if normed => gqa.qk_norm = QkNormSpec::Unweighted,
        true => {}
        false => (gqa.rope, gqa.query_scale) = (None, factor),
    });
}

/// Sigmoids multiply what goes into experts, and one as wide as they are takes all tokens.
fn scale_inputs(moe: &mut MoeSpec) {
    moe.input_scale = true;
    moe.routing = ExpertRouting {
        score: ExpertScore::Sigmoid,
        ..ExpertRouting::softmax(false)
    };
    moe.shared = Some(SharedExpertSpec {
        intermediate: moe.intermediate,
        activation: Activation::Silu,
        gated: false,
    });
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    // Files say of chunks only that there are none; then all layers rotate.
    let whole = gguf.u32("llama4.attention.sliding_window")? == Some(0);
    let temperature = RopeScaling::Temperature {
        floor: CHUNK as f32,
        scale: SCALE as f32,
    };
    let rotates = |i: usize| whole || !(i + 1).is_multiple_of(EVERY);
    let moe = experts::from_gguf(gguf, ExpertRouting::softmax(false))?;
    // The model of 128 experts has no norms of queries and keys.
    let normed = moe.as_ref().is_none_or(|moe| moe.experts != 128);
    place_attention(&mut spec, &rotates, normed, (!whole).then_some(temperature));
    common::each_gqa(&mut spec, |i, gqa| {
        gqa.sliding_window = (!whole && rotates(i)).then_some(CHUNK);
        gqa.chunked = gqa.sliding_window.is_some();
    });
    let Some(mut moe) = moe else {
        return Ok(spec);
    };
    scale_inputs(&mut moe);
    experts::place(&mut spec, &moe, |i| {
        let router = FAMILY
            .gguf_names
            .name(TensorId::in_layer(i, TensorRole::Router));
        router.is_some_and(|name| gguf.get(&name).is_some())
    })?;
    Ok(spec)
}
