//! SmolLM3: Llama without rotation in some layers.

use super::common::{self, HfDefaults};
use super::{Family, GgufForm, names};
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "smollm3",
    title: "SmolLM3",
    hf_architectures: &["SmolLM3ForCausalLM"],
    hf_model_types: &["smollm3"],
    hf_names: &names::HF_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["smollm3"],
    gguf_form: Some(GgufForm {
        architecture: "smollm3",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(4),
        max_position: 32_768,
        tied: true,
        theta: 2e6,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("smollm3", config, &defaults)?;
    let bias = config.bool("attention_bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    let bias = config.bool("mlp_bias")?.unwrap_or(false);
    common::each_mlp(&mut spec, |mlp| mlp.bias = bias);
    let every = config.usize("no_rope_layer_interval")?.unwrap_or(4).max(1);
    let stated = config.usizes("no_rope_layers")?;
    if let Some(found) = stated.as_ref().filter(|s| s.len() != spec.layers.len()) {
        let (found, expected) = (found.len(), spec.layers.len());
        let expected = format!("one entry for each of {expected} layers, found {found}");
        return Err(config.field_error("no_rope_layers", expected).into());
    }
    // In spite of the name, 1 means that a layer rotates.
    let rotates = |i: usize| match &stated {
        Some(stated) => stated.get(i) != Some(&0),
        None => !(i + 1).is_multiple_of(every),
    };
    let window = match config.bool("use_sliding_window")?.unwrap_or(false) {
        true => config.usize("sliding_window")?,
        false => None,
    };
    common::windows_by_type(config, &mut spec, window, |i| !rotates(i))?;
    common::each_gqa(&mut spec, |i, gqa| gqa.rope = rotates(i).then_some(0));
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    // Files do not say.
    common::each_gqa(&mut spec, |i, gqa| {
        gqa.rope = ((i + 1) % 4 != 0).then_some(0);
    });
    Ok(spec)
}
