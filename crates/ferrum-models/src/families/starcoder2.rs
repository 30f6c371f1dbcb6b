//! StarCoder 2: layer norms with biases, and a feed-forward without a gate.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec, NormKind};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "starcoder2",
    title: "StarCoder 2",
    hf_architectures: &["Starcoder2ForCausalLM"],
    hf_model_types: &["starcoder2"],
    hf_names: &names::STARCODER2_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["starcoder2"],
    gguf_form: Some(GgufForm {
        architecture: "starcoder2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(2),
        max_position: 4096,
        eps: ("norm_epsilon", 1e-5),
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        tied: true,
        norm: NormKind::Layer { bias: true },
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("starcoder2", config, &defaults)?;
    let bias = config.bool("use_bias")?.unwrap_or(true);
    common::attention_biases(&mut spec, bias);
    common::each_mlp(&mut spec, |mlp| mlp.bias = bias);
    common::without_gates(&mut spec);
    let window = config.usize("sliding_window")?;
    common::windows_by_type(config, &mut spec, window, |_| true)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    spec.norm = NormKind::Layer { bias: true };
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::GeluTanh);
    common::without_gates(&mut spec);
    Ok(spec)
}
