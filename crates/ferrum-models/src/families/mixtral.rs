//! Mixtral: Mistral with experts in every layer. Its GGUF files say "llama"; `llama.rs` reads them.

use super::common::{self, HfDefaults};
use super::experts::{self, HfExperts};
use super::{Family, GgufForm, names};
use crate::spec::DecoderSpec;
use ferrum_formats::HfConfig;
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "mixtral",
    title: "Mixtral",
    hf_architectures: &["MixtralForCausalLM"],
    hf_model_types: &["mixtral"],
    hf_names: &names::MIXTRAL_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &[],
    gguf_form: Some(GgufForm {
        architecture: "llama",
        rope: RopeStyle::Interleaved,
    }),
    from_hf,
    from_gguf: super::llama::from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let defaults = HfDefaults {
        kv_heads: Some(8),
        head_dim: None,
        max_position: 131_072,
        ..HfDefaults::LLAMA
    };
    let mut spec = common::from_hf("mixtral", config, &defaults)?;
    let window = config.usize("sliding_window")?;
    common::each_gqa(&mut spec, |_, gqa| gqa.sliding_window = window);
    let defaults = HfExperts {
        experts: 8,
        top_k: 2,
        // This family says it in the word of dense models.
        intermediate: config.require_usize("intermediate_size")?,
        renormalize: true,
    };
    let moe = experts::from_hf(config, &defaults)?;
    experts::place(&mut spec, &moe, |_| true)?;
    Ok(spec)
}
