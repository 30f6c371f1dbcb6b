//! GPT-OSS: attention sinks, windows in every second layer, biases everywhere; experts whose gate and up are bounded, in
//! MXFP4 as they are published.

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, ExpertRouting, MoeSpec, RopeScaling};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::{ExpertActivation, RopeStyle};
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "gptoss",
    title: "GPT-OSS",
    hf_architectures: &["GptOssForCausalLM"],
    hf_model_types: &["gpt_oss"],
    hf_names: &names::GPT_OSS_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_POST_NORM_NAMES,
    gguf_architectures: &["gpt-oss"],
    gguf_form: Some(GgufForm {
        architecture: "gpt-oss",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

/// Factor and bound of the activation of experts.
const SWIGLU: (f32, f32) = (1.702, 7.0);

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(8),
        head_dim: Some(64),
        max_position: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        theta: 150_000.0,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("gptoss", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(true);
    common::attention_biases(&mut spec, bias);
    common::each_gqa(&mut spec, |_, gqa| gqa.sinks = true);
    let states_window = config.keys().any(|key| key == "sliding_window");
    let default = (!states_window).then_some(128);
    let window = config.usize("sliding_window")?.or(default);
    common::windows_by_type(config, &mut spec, window, |i| i % 2 == 0)?;
    let defaults = HfExperts {
        experts: 128,
        top_k: 4,
        intermediate: config.require_usize("intermediate_size")?,
        renormalize: true,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    // A softmax of the chosen alone.
    moe.routing = ExpertRouting::softmax(true);
    moe.bias = true;
    let number = |key: &str, default: f32| {
        let found = config.f64(key)?;
        Ok::<_, ferrum_types::Error>(found.map_or(default, |x| x as f32))
    };
    moe.activation = ExpertActivation::ClampedSwiglu {
        alpha: number("swiglu_alpha", SWIGLU.0)?,
        limit: number("swiglu_limit", SWIGLU.1)?,
    };
    experts::place(&mut spec, &moe, |_| true)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    common::each_gqa(&mut spec, |_, gqa| gqa.sinks = true);
    common::full_layers(gguf, &mut spec, 2)?;
    for rope in &mut spec.ropes {
        if let RopeScaling::Yarn { truncate, .. } = &mut rope.scaling {
            *truncate = false;
        }
    }
    if let Some(moe) = experts::from_gguf(gguf, ExpertRouting::softmax(true))? {
        let moe = MoeSpec {
            routing: ExpertRouting::softmax(true),
            activation: ExpertActivation::ClampedSwiglu {
                alpha: SWIGLU.0,
                limit: SWIGLU.1,
            },
            ..moe
        };
        experts::place(&mut spec, &moe, |_| true)?;
    }
    Ok(spec)
}
