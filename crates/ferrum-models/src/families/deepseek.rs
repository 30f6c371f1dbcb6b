//! DeepSeek V2, V2-Lite, V3 and R1: latent attention over a compressed cache, pairs rotated; dense layers first, then
//! experts beside shared ones, chosen in groups.

use super::common::{self, HfDefaults};
use super::experts::{self, Grouped, HfExperts};
use super::rope;
use super::{Family, GgufForm, names};
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{AttentionSpec, DecoderSpec, ExpertRouting, MlaSpec, RopeScaling};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::{ExpertScore, GroupScore, RopeStyle};
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "deepseek2",
    title: "DeepSeek V2, V2-Lite",
    hf_architectures: &["DeepseekV2ForCausalLM"],
    hf_model_types: &["deepseek_v2"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::Interleaved,
    gguf_names: &names::GGUF_NAMES,
    // Files of V3 say the same, and differ by values.
    gguf_architectures: &["deepseek2"],
    gguf_form: Some(GgufForm {
        architecture: "deepseek2",
        rope: RopeStyle::Interleaved,
    }),
    from_hf: v2_from_hf,
    from_gguf,
};

pub(super) static DEEPSEEK3: Family = Family {
    name: "deepseek3",
    title: "DeepSeek V3, R1",
    hf_architectures: &["DeepseekV3ForCausalLM"],
    hf_model_types: &["deepseek_v3"],
    gguf_architectures: &["deepseek2"],
    from_hf: v3_from_hf,
    ..FAMILY
};

/// The epsilon of norms of compressed vectors, whatever the file says of the others.
const LATENT_EPS: f32 = 1e-6;

fn v2_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = read_hf(config, (FAMILY.name, 2048), true)?;
    let defaults = HfExperts {
        experts: 64,
        top_k: config.require_usize("num_experts_per_tok")?,
        intermediate: 1407,
        renormalize: false,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    if moe.routing.renormalize {
        let expected = "false in this architecture";
        return Err(config.field_error("norm_topk_prob", expected).into());
    }
    let grouped = match config.str("topk_method")?.unwrap_or("greedy") {
        "greedy" => None,
        "group_limited_greedy" => Some(GroupScore::Best),
        _ => {
            let expected = "greedy or group_limited_greedy";
            return Err(config.field_error("topk_method", expected).into());
        }
    };
    let defaults = Grouped {
        scale: 1.0,
        groups: (1, 1),
        shared: 2,
    };
    experts::grouped_from_hf(config, &mut moe, &defaults, grouped)?;
    let first = config.usize("first_k_dense_replace")?.unwrap_or(0);
    experts::place(&mut spec, &moe, |i| i >= first)?;
    Ok(spec)
}

fn v3_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let pairs = config.bool("rope_interleave")?.unwrap_or(true);
    let mut spec = read_hf(config, (DEEPSEEK3.name, 4096), pairs)?;
    let defaults = HfExperts {
        experts: 256,
        top_k: 8,
        intermediate: 2048,
        renormalize: true,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    moe.routing.score = ExpertScore::Sigmoid;
    moe.routing.correction = true;
    let defaults = Grouped {
        scale: 2.5,
        groups: (8, 4),
        shared: 1,
    };
    experts::grouped_from_hf(config, &mut moe, &defaults, Some(GroupScore::BestTwo))?;
    let first = config.usize("first_k_dense_replace")?.unwrap_or(3);
    experts::place(&mut spec, &moe, |i| i >= first)?;
    Ok(spec)
}

/// What both have in common, all layers dense.
fn read_hf(
    config: &HfConfig,
    (family, max_position): (&'static str, usize),
    pairs: bool,
) -> Result<DecoderSpec> {
    let size =
        |key: &str, default| Ok::<_, ferrum_types::Error>(config.usize(key)?.unwrap_or(default));
    let rope_dim = size("qk_rope_head_dim", 64)?;
    let defaults = HfDefaults {
        head_dim: Some(rope_dim),
        max_position,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf(family, config, &defaults)?;
    for rope in &mut spec.ropes {
        rope.style = match pairs {
            true => RopeStyle::Interleaved,
            false => RopeStyle::HalfSplit,
        };
    }
    let nope_dim = size("qk_nope_head_dim", 128)?;
    // `null` says that queries are not compressed, nothing that they are as in the larger models.
    let states_rank = config.keys().any(|key| key == "q_lora_rank");
    let default = (!states_rank).then_some(1536);
    let q_rank = config.usize("q_lora_rank")?.or(default);
    let stretched = rope::yarn_score_factor(config, &defaults)?;
    let mla = MlaSpec {
        heads: config.require_usize("num_attention_heads")?,
        q_rank,
        rank: size("kv_lora_rank", 512)?,
        nope_dim,
        rope_dim,
        value_dim: size("v_head_dim", 128)?,
        scale: (((nope_dim + rope_dim) as f64).powf(-0.5) * stretched) as f32,
        rope: 0,
        norm_eps: LATENT_EPS,
        bias: config.bool("attention_bias")?.unwrap_or(false),
    };
    let mlp_bias = config.bool("mlp_bias")?.unwrap_or(false);
    common::each_mlp(&mut spec, |mlp| mlp.bias = mlp_bias);
    attend(&mut spec, &mla);
    Ok(spec)
}

fn attend(spec: &mut DecoderSpec, mla: &MlaSpec) {
    for layer in &mut spec.layers {
        layer.attention = AttentionSpec::Mla(mla.clone());
    }
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    let key = |name: &str| format!("deepseek2.{name}");
    let size = |name: &str| Ok::<_, ferrum_types::Error>(gguf.u32(&key(name))?.map(|n| n as usize));
    // Files with absorbed maps have other sizes under the names of all architectures.
    let query_dim = match size("attention.key_length_mla")? {
        Some(dim) => dim,
        None => gguf.require_u32(&key("attention.key_length"))? as usize,
    };
    let value_dim = match size("attention.value_length_mla")? {
        Some(dim) => dim,
        None => gguf.require_u32(&key("attention.value_length"))? as usize,
    };
    let rope_dim = gguf.require_u32(&key("rope.dimension_count"))? as usize;
    // The factor on sines and cosines is that of `mscale` by that of `mscale_all_dim`, which are equal.
    let multiplier = gguf.f32(&key("rope.scaling.yarn_log_multiplier"))?;
    let stated = gguf.has(&key("rope.scaling.yarn_attn_factor"));
    let mut stretched = 1.0;
    for rope in &mut spec.ropes {
        rope.style = RopeStyle::Interleaved;
        let RopeScaling::Yarn {
            factor,
            attention_factor,
            ..
        } = &mut rope.scaling
        else {
            continue;
        };
        if let Some(multiplier) = multiplier.filter(|&m| m != 0.0) {
            let magnitude = 1.0 + f64::from(multiplier) * f64::from(*factor).max(1.0).ln();
            stretched = magnitude * magnitude;
            if !stated {
                *attention_factor = 1.0;
            }
        }
    }
    let bias = FAMILY
        .gguf_names
        .name(TensorId::in_layer(0, TensorRole::LatentDown).bias());
    let mla = MlaSpec {
        heads: gguf.require_u32(&key("attention.head_count"))? as usize,
        q_rank: size("attention.q_lora_rank")?.filter(|&rank| rank > 0),
        rank: gguf.require_u32(&key("attention.kv_lora_rank"))? as usize,
        nope_dim: query_dim.saturating_sub(rope_dim),
        rope_dim,
        value_dim,
        scale: ((query_dim as f64).powf(-0.5) * stretched) as f32,
        rope: 0,
        norm_eps: LATENT_EPS,
        bias: bias.is_some_and(|name| gguf.get(&name).is_some()),
    };
    attend(&mut spec, &mla);
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(false))?;
    Ok(spec)
}
