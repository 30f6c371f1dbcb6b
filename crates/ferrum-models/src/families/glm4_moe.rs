//! GLM-4.5 and 4.6: half of each head rotated, norms of heads in the larger ones; dense layers first, then experts chosen
//! by sigmoids and a correction, beside one that all tokens go through. Layers that predict further tokens are read as
//! [draft heads](crate::draft_head) alone.

use super::common::{self, HfDefaults};
use super::experts::{self, Grouped, HfExperts};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, ExpertRouting, QkNormSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::{ExpertScore, GroupScore, RopeStyle};
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "glm4moe",
    title: "GLM-4.5, 4.6",
    hf_architectures: &["Glm4MoeForCausalLM"],
    hf_model_types: &["glm4_moe"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_POST_NORM_NAMES,
    gguf_architectures: &["glm4moe"],
    gguf_form: Some(GgufForm {
        architecture: "glm4moe",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

/// How the family chooses experts, if nothing else is said.
const ROUTING: ExpertRouting = ExpertRouting {
    score: ExpertScore::Sigmoid,
    correction: true,
    ..ExpertRouting::softmax(true)
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(8),
        max_position: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        rotary_share: Some(0.5),
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("glm4moe", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    let normed = config.bool("use_qk_norm")?.unwrap_or(false);
    common::each_gqa(&mut spec, |_, gqa| {
        gqa.qkv_bias = bias;
        if normed {
            gqa.qk_norm = QkNormSpec::Heads;
        }
    });
    let defaults = HfExperts {
        experts: 128,
        top_k: 8,
        intermediate: 1408,
        renormalize: true,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    moe.routing = ExpertRouting {
        renormalize: moe.routing.renormalize,
        ..ROUTING
    };
    let defaults = Grouped {
        scale: 1.0,
        groups: (1, 1),
        shared: 1,
    };
    experts::grouped_from_hf(config, &mut moe, &defaults, Some(GroupScore::BestTwo))?;
    let first = config.usize("first_k_dense_replace")?.unwrap_or(1);
    experts::place(&mut spec, &moe, |i| i >= first)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    if common::gguf_has_query_norms(&FAMILY, gguf) {
        common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::Heads);
    }
    experts::place_gguf(gguf, &mut spec, ROUTING)?;
    Ok(spec)
}
