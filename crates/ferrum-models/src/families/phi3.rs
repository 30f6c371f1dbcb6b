//! Phi 3, 3.5 and 4: Llama with joined projections, part of each head rotated, and LongRoPE.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "phi3",
    title: "Phi 3, 3.5, 4",
    hf_architectures: &["Phi3ForCausalLM"],
    hf_model_types: &["phi3"],
    hf_names: &names::PHI3_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_GATE_UP_NAMES,
    gguf_architectures: &["phi3"],
    gguf_form: Some(GgufForm {
        architecture: "phi3",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        max_position: 4096,
        eps: ("rms_norm_eps", 1e-5),
        rotary_share: Some(1.0),
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("phi3", config, &defaults)?;
    let window = config.usize("sliding_window")?;
    common::windows_by_type(config, &mut spec, window, |_| true)?;
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    common::from_gguf(&FAMILY, gguf)
}
