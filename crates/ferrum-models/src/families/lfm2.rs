//! LFM2 (dense): short convolutions in most layers, attention with norms on queries and keys in the others.

use super::common::{self, HfDefaults, HfSizes};
use super::{Family, GgufForm, names};
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{AttentionSpec, DecoderSpec, QkNormSpec, ShortConvSpec};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "lfm2",
    title: "LFM2",
    hf_architectures: &["Lfm2ForCausalLM"],
    hf_model_types: &["lfm2"],
    hf_names: &names::LFM2_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_LFM2_NAMES,
    gguf_architectures: &["lfm2"],
    gguf_form: Some(GgufForm {
        architecture: "lfm2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let heads = config.require_usize("num_attention_heads")?;
    let sizes = HfSizes {
        hidden_size: config.require_usize("hidden_size")?,
        heads,
        kv_heads: config.usize("num_key_value_heads")?.unwrap_or(8),
        intermediate: intermediate(config)?,
        layers: common::hf_layer_count(config, "num_hidden_layers")?,
    };
    let tied = config.bool("tie_embedding")?.unwrap_or(true);
    let defaults = HfDefaults {
        max_position: 128_000,
        eps: ("norm_eps", 1e-5),
        tied,
        theta: 1e6,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::of_sizes("lfm2", config, &sizes, &defaults)?;
    let attends = attention_layers(config, sizes.layers)?;
    let conv = ShortConvSpec {
        channels: sizes.hidden_size,
        kernel: config.usize("conv_L_cache")?.unwrap_or(3),
        bias: config.bool("conv_bias")?.unwrap_or(false),
    };
    place_convolutions(&mut spec, &conv, |i| !attends[i]);
    Ok(spec)
}

/// The size of feed-forwards, which configs may state as that of one without a gate.
fn intermediate(config: &HfConfig) -> Result<usize> {
    let stated = match config.usize("block_ff_dim")? {
        Some(stated) => stated,
        None => config.require_usize("intermediate_size")?,
    };
    if !config.bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(stated);
    }
    let two_thirds = stated / 3 * 2 + stated % 3 * 2 / 3;
    let key = "block_ffn_dim_multiplier";
    let factor = match config.has(key) {
        true => config.f64(key)?,
        false => Some(1.0),
    };
    Ok(match factor {
        None => two_thirds,
        Some(factor) => {
            let unit = config.usize("block_multiple_of")?.unwrap_or(256).max(1);
            ((factor * two_thirds as f64) as usize).div_ceil(unit) * unit
        }
    })
}

/// Which layers attend.
fn attention_layers(config: &HfConfig, layers: usize) -> Result<Vec<bool>> {
    if let Some(types) = config.strs("layer_types")? {
        if types.len() != layers {
            let expected = format!("one entry for each of {layers} layers");
            return Err(config.field_error("layer_types", expected).into());
        }
        return Ok(types.iter().map(|kind| *kind == "full_attention").collect());
    }
    let indices = config.usizes("full_attn_idxs")?;
    let attends = |i| indices.as_ref().is_none_or(|indices| indices.contains(&i));
    Ok((0..layers).map(attends).collect())
}

fn place_convolutions(spec: &mut DecoderSpec, conv: &ShortConvSpec, has: impl Fn(usize) -> bool) {
    common::each_gqa(spec, |_, gqa| gqa.qk_norm = QkNormSpec::Heads);
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        if has(i) {
            layer.attention = AttentionSpec::ShortConv(conv.clone());
        }
    }
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    let has = |id: TensorId| {
        let name = FAMILY.gguf_names.name(id);
        name.is_some_and(|name| gguf.get(&name).is_some())
    };
    let at = |i| TensorId::in_layer(i, TensorRole::ConvKernel);
    let is_conv: Vec<_> = (0..spec.layers.len()).map(|i| has(at(i))).collect();
    let bias = is_conv.iter().position(|&conv| conv).map(|i| at(i).bias());
    let conv = ShortConvSpec {
        channels: spec.hidden_size,
        kernel: gguf.require_u32("lfm2.shortconv.l_cache")? as usize,
        bias: bias.is_some_and(has),
    };
    place_convolutions(&mut spec, &conv, |i| is_conv[i]);
    Ok(spec)
}
