//! OLMo 2 and 3: norms behind both parts only, and over all query and all key heads together.
//!
//! OLMo 3 has windows in three of four layers, whose frequencies are not scaled.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, LayerForm, QkNormSpec, RopeScaling, RopeSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "olmo2",
    title: "OLMo 2",
    hf_architectures: &["Olmo2ForCausalLM"],
    hf_model_types: &["olmo2"],
    hf_names: &names::OLMO2_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["olmo2"],
    gguf_form: Some(GgufForm {
        architecture: "olmo2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf: olmo2_from_hf,
    from_gguf,
};

pub(super) static OLMO3: Family = Family {
    name: "olmo3",
    title: "OLMo 3",
    hf_architectures: &["Olmo3ForCausalLM"],
    hf_model_types: &["olmo3"],
    hf_names: &names::OLMO2_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &[],
    gguf_form: Some(GgufForm {
        architecture: "olmo2",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf: olmo3_from_hf,
    from_gguf,
};

fn olmo2_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    read_hf(config, FAMILY.name)
}

fn olmo3_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = read_hf(config, OLMO3.name)?;
    let window = match config.has("sliding_window") {
        true => config.usize("sliding_window")?,
        false => Some(4096),
    };
    common::windows_by_type(config, &mut spec, window, |i| (i + 1) % 4 != 0)?;
    unscaled_windows(&mut spec);
    Ok(spec)
}

fn read_hf(config: &HfConfig, family: &'static str) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        eps: ("rms_norm_eps", 1e-5),
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf(family, config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    norms_behind(&mut spec);
    Ok(spec)
}

fn norms_behind(spec: &mut DecoderSpec) {
    common::set_form(spec, LayerForm::PostNorm);
    common::each_gqa(spec, |_, gqa| gqa.qk_norm = QkNormSpec::Projection);
}

/// Where one rotary embedding is stated, its scaling is that of layers which see all tokens.
fn unscaled_windows(spec: &mut DecoderSpec) {
    if let [global] = spec.ropes.as_slice()
        && global.scaling != RopeScaling::None
    {
        let local = RopeSpec {
            scaling: RopeScaling::None,
            ..global.clone()
        };
        spec.ropes.push(local);
    }
    common::ropes_by_window(spec);
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    common::full_layers(gguf, &mut spec, 4)?;
    norms_behind(&mut spec);
    unscaled_windows(&mut spec);
    Ok(spec)
}
