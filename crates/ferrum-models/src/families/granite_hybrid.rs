//! Granite 4: Granite with the state spaces of Mamba-2 in most layers, attention without positions in the others, and a
//! shared expert beside the chosen ones, or alone.

use super::common;
use super::experts::{self, HfExperts};
use super::granite::{self, GRANITE_MOE};
use super::linear::{self, Recurrent};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec, ExpertRouting, LinearAttentionSpec, SharedExpertSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::{HeadOrder, LinearAttentionRule, RopeStyle};
use ferrum_types::{Error, Result};

pub(super) static FAMILY: Family = Family {
    name: "granitehybrid",
    title: "Granite 4",
    hf_architectures: &["GraniteMoeHybridForCausalLM"],
    hf_model_types: &["granitemoehybrid"],
    hf_names: &names::GRANITE_HYBRID_NAMES,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["granitehybrid"],
    gguf_form: Some(GgufForm {
        architecture: "granitehybrid",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
    ..GRANITE_MOE
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let shared = config.usize("shared_intermediate_size")?.unwrap_or(1024);
    let mut spec = granite::read_hf(config, FAMILY.name)?;
    common::each_mlp(&mut spec, |mlp| mlp.intermediate = shared);
    if config.str("position_embedding_type")? != Some("rope") {
        common::each_gqa(&mut spec, |_, gqa| gqa.rope = None);
    }
    let defaults = HfExperts {
        experts: 8,
        top_k: 2,
        intermediate: config.usize("intermediate_size")?.unwrap_or(11_008),
        renormalize: true,
    };
    let mut moe = experts::from_hf(config, &defaults)?;
    moe.shared = Some(SharedExpertSpec {
        intermediate: shared,
        activation: Activation::Silu,
        gated: false,
    });
    let has_experts = moe.experts > 0;
    experts::place(&mut spec, &moe, |_| has_experts)?;
    let is_recurrent = linear::hf_layers(config, spec.layers.len(), |_| true)?;
    linear::place(&mut spec, &state_space(config)?, |i| is_recurrent[i]);
    Ok(spec)
}

/// The state space of a `config.json`.
fn state_space(config: &HfConfig) -> Result<LinearAttentionSpec> {
    let size = |key: &str, default| Ok::<_, Error>(config.usize(key)?.unwrap_or(default));
    let value_heads = size("mamba_n_heads", 128)?;
    let inner = size("mamba_expand", 2)?.saturating_mul(config.require_usize("hidden_size")?);
    let value_dim = inner.checked_div(value_heads).unwrap_or(0);
    if value_dim * value_heads != inner {
        let expected = format!("a divisor of {inner}, the elements of a state space's values");
        return Err(config.field_error("mamba_n_heads", expected).into());
    }
    Ok(LinearAttentionSpec {
        rule: LinearAttentionRule::StateSpace,
        key_heads: size("mamba_n_groups", 1)?,
        value_heads,
        order: HeadOrder::Grouped,
        key_dim: size("mamba_d_state", 256)?,
        value_dim,
        kernel: size("mamba_d_conv", 4)?,
        conv_bias: config.bool("mamba_conv_bias")?.unwrap_or(true),
        bias: config.bool("mamba_proj_bias")?.unwrap_or(false),
    })
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = granite::read_gguf(&FAMILY, gguf)?;
    let rotates = gguf.bool("granitehybrid.rope.scaling.finetuned")?;
    if !rotates.unwrap_or(false) {
        common::each_gqa(&mut spec, |_, gqa| gqa.rope = None);
    }
    experts::place_gguf(gguf, &mut spec, ExpertRouting::softmax(true))?;
    let Recurrent { layers, linear } = linear::from_gguf(
        &FAMILY,
        gguf,
        spec.layers.len(),
        LinearAttentionRule::StateSpace,
    )?;
    linear::place(&mut spec, &linear, |i| layers[i]);
    Ok(spec)
}
