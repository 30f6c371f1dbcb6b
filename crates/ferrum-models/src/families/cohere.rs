//! Command-R, Command-R+ and Command-R7B: attention and feed-forward in parallel behind one norm without a bias.
//!
//! Command-R+ norms each head of queries and keys with weights of its own. Command-R7B has windows in three of four layers, and rotates only those.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::{DecoderSpec, LayerForm, NormKind, QkNormSpec};
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "cohere",
    title: "Command-R, Command-R+",
    hf_architectures: &["CohereForCausalLM"],
    hf_model_types: &["cohere"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::Interleaved,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["command-r"],
    gguf_form: Some(GgufForm {
        architecture: "command-r",
        rope: RopeStyle::Interleaved,
    }),
    from_hf: cohere_from_hf,
    from_gguf: cohere_from_gguf,
};

pub(super) static COHERE2: Family = Family {
    name: "cohere2",
    title: "Command-R7B",
    hf_architectures: &["Cohere2ForCausalLM"],
    hf_model_types: &["cohere2"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::Interleaved,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["cohere2"],
    gguf_form: Some(GgufForm {
        architecture: "cohere2",
        rope: RopeStyle::Interleaved,
    }),
    from_hf: cohere2_from_hf,
    from_gguf: cohere2_from_gguf,
};

fn cohere_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = read_hf(config, (FAMILY.name, 500_000.0), None)?;
    if config.bool("use_qk_norm")?.unwrap_or(false) {
        common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::LayerEach);
    }
    Ok(spec)
}

fn cohere2_from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let mut spec = read_hf(config, (COHERE2.name, 10_000.0), Some(128))?;
    let window = match config.has("sliding_window") {
        true => config.usize("sliding_window")?,
        false => Some(4096),
    };
    let every = config.usize("sliding_window_pattern")?.unwrap_or(4).max(1);
    common::windows_by_type(config, &mut spec, window, |i| (i + 1) % every != 0)?;
    rotate_windows(&mut spec);
    Ok(spec)
}

fn read_hf(
    config: &HfConfig,
    (family, theta): (&'static str, f64),
    head_dim: Option<usize>,
) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        head_dim,
        max_position: 8192,
        eps: ("layer_norm_eps", 1e-5),
        tied: true,
        theta,
        norm: NormKind::Layer { bias: false },
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf(family, config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    for rope in &mut spec.ropes {
        rope.style = RopeStyle::Interleaved;
    }
    spec.scales.logits = config.f64("logit_scale")?.unwrap_or(0.0625) as f32;
    common::set_form(&mut spec, LayerForm::Parallel { shared_norm: true });
    Ok(spec)
}

fn rotate_windows(spec: &mut DecoderSpec) {
    common::each_gqa(spec, |_, gqa| gqa.rope = gqa.sliding_window.map(|_| 0));
}

fn cohere_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = read_gguf(&FAMILY, gguf)?;
    if common::gguf_has_query_norms(&FAMILY, gguf) {
        common::each_gqa(&mut spec, |_, gqa| gqa.qk_norm = QkNormSpec::LayerEach);
    }
    Ok(spec)
}

fn cohere2_from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = read_gguf(&COHERE2, gguf)?;
    common::full_layers(gguf, &mut spec, 4)?;
    rotate_windows(&mut spec);
    Ok(spec)
}

fn read_gguf(family: &Family, gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(family, gguf)?;
    spec.norm = NormKind::Layer { bias: false };
    common::set_form(&mut spec, LayerForm::Parallel { shared_norm: true });
    Ok(spec)
}
