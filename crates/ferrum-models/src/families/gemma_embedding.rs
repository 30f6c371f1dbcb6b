//! EmbeddingGemma: Gemma 3 with bidirectional attention, for embeddings alone (Vera et al., "EmbeddingGemma",
//! 2025). Windows reach to both sides, half as far to each.

use super::{Family, GgufForm, common, gemma2, names};
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "gemma-embedding",
    title: "EmbeddingGemma",
    hf_architectures: &["Gemma3TextModel"],
    hf_model_types: &[],
    hf_names: &names::GEMMA2_NAMES,
    hf_base_names: Some(&names::GEMMA3_BASE_NAMES),
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["gemma-embedding"],
    gguf_form: Some(GgufForm {
        architecture: "gemma-embedding",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    let both_ways = "use_bidirectional_attention";
    if config.bool(both_ways)? != Some(true) {
        let expected = "true: the layers of a Gemma 3 that generates are called Gemma3ForCausalLM";
        return Err(config.field_error(both_ways, expected).into());
    }
    let mut spec = gemma2::gemma3_from_hf(config)?;
    set_bidirectional(&mut spec);
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = gemma2::gemma3_from_gguf(gguf)?;
    set_bidirectional(&mut spec);
    Ok(spec)
}

/// Files state windows as the number of all tokens in one.
fn set_bidirectional(spec: &mut DecoderSpec) {
    spec.family = FAMILY.name;
    common::each_gqa(spec, |_, gqa| {
        gqa.causal = false;
        gqa.sliding_window = gqa.sliding_window.map(|window| window / 2 + 1);
    });
}
