//! Phi 1 and 2: attention and feed-forward in parallel behind one layer norm, biases everywhere.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{Activation, DecoderSpec, LayerForm, NormKind, QkNormSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "phi",
    title: "Phi 1, 1.5, 2",
    hf_architectures: &["PhiForCausalLM"],
    hf_model_types: &["phi"],
    hf_names: &names::PHI_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["phi2"],
    gguf_form: Some(GgufForm {
        architecture: "phi2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        eps: ("layer_norm_eps", 1e-5),
        activation: ("hidden_act", "gelu_new"),
        rotary_share: Some(0.5),
        norm: NormKind::Layer { bias: true },
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("phi", config, &defaults)?;
    common::attention_biases(&mut spec, true);
    common::each_mlp(&mut spec, |mlp| mlp.bias = true);
    spec.output_bias = true;
    if config.bool("qk_layernorm")?.unwrap_or(false) {
        common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::LayerHeads);
    }
    parallel(&mut spec);
    Ok(spec)
}

fn parallel(spec: &mut DecoderSpec) {
    common::without_gates(spec);
    common::set_form(spec, LayerForm::Parallel { shared_norm: true });
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    spec.norm = NormKind::Layer { bias: true };
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::GeluTanh);
    if common::gguf_has_query_norms(&FAMILY, gguf) {
        common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::LayerHeads);
    }
    parallel(&mut spec);
    Ok(spec)
}
