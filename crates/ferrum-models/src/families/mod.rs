//! Families: how configs and weight names of known models map onto a [`DecoderSpec`].
//!
//! A family is one file and one row in [`FAMILIES`]. It reads a Hugging Face `config.json` or GGUF
//! metadata; what most decoders have in common is read by `common.rs`, and a family states only how it
//! differs. See `docs/adding-a-model.md`.

mod cohere;
mod common;
mod deepseek;
mod experts;
mod falcon;
mod gemma;
mod gemma2;
mod gemma4;
mod gemma_embedding;
mod glm4;
mod glm4_moe;
mod gpt2;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod hf_defaults;
mod lfm2;
mod linear;
mod llama;
mod llama4;
mod mistral;
mod mixtral;
mod names;
mod olmo2;
mod phi;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod smollm3;
mod starcoder2;

use names::HF_BASE_NAMES;
pub(crate) use names::{GGUF_NAMES, HF_NAMES};

use crate::inventory::WeightNames;
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig, HfFolder, ModelSource, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// A group of models that share a config format and a layer structure.
#[derive(Debug)]
pub struct Family {
    /// Name in messages.
    pub name: &'static str,
    /// The models that it reads, for people.
    pub title: &'static str,
    /// Values of `architectures` in `config.json`.
    pub hf_architectures: &'static [&'static str],
    /// Values of `model_type` in `config.json`, for configs without `architectures`.
    pub hf_model_types: &'static [&'static str],
    /// Names of weights in Hugging Face folders.
    pub hf_names: &'static WeightNames,
    /// Names in folders that were saved without what wraps the decoder, if there are such.
    pub hf_base_names: Option<&'static WeightNames>,
    /// How rows of query and key heads pair up for rotation in them.
    pub hf_rope: RopeStyle,
    /// Names of weights in GGUF files.
    pub gguf_names: &'static WeightNames,
    /// Values of `general.architecture` in GGUF files that it reads.
    pub gguf_architectures: &'static [&'static str],
    /// What GGUF files are like that are made of its checkpoints; `None`: none are.
    pub gguf_form: Option<GgufForm>,
    /// Reads `config.json`.
    pub from_hf: fn(&HfConfig) -> Result<DecoderSpec>,
    /// Reads GGUF metadata.
    pub from_gguf: fn(&Gguf) -> Result<DecoderSpec>,
}

/// GGUF files made of a family's checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufForm {
    /// Value of `general.architecture`.
    pub architecture: &'static str,
    /// How rows of query and key heads pair up for rotation. Where checkpoints have halves, rows of pairs are in another
    /// order there.
    pub rope: RopeStyle,
}

/// The names of tensors in GGUF files of most families.
pub fn gguf_names() -> &'static WeightNames {
    &names::GGUF_NAMES
}

/// The names of the layer for multi-token prediction in checkpoints that have it beside the model, as `mtp.*`.
pub(crate) fn mtp_names() -> &'static WeightNames {
    &names::QWEN3_NEXT_MTP_NAMES
}

/// The family called `name`.
pub(crate) fn named(name: &str) -> Option<&'static Family> {
    find(|family| family.name == name)
}

/// Every family.
pub static FAMILIES: &[&Family] = &[
    &llama::FAMILY,
    &llama4::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &qwen3_next::FAMILY,
    &qwen3_next::QWEN3_5,
    &qwen3_next::QWEN3_5_MOE,
    &gemma::FAMILY,
    &gemma2::FAMILY,
    &gemma2::GEMMA3,
    &gemma2::GEMMA3_VISION,
    &gemma_embedding::FAMILY,
    &gemma4::FAMILY,
    &phi::FAMILY,
    &phi3::FAMILY,
    &olmo2::FAMILY,
    &olmo2::OLMO3,
    &smollm3::FAMILY,
    &granite::FAMILY,
    &granite::GRANITE_MOE,
    &granite_hybrid::FAMILY,
    &cohere::FAMILY,
    &cohere::COHERE2,
    &starcoder2::FAMILY,
    &glm4::FAMILY,
    &glm4_moe::FAMILY,
    &deepseek::FAMILY,
    &deepseek::DEEPSEEK3,
    &gpt_oss::FAMILY,
    &gpt2::FAMILY,
    &falcon::FAMILY,
    &lfm2::FAMILY,
];

/// The family of an opened model.
///
/// # Errors
/// [`Error::Model`] naming the architecture that was found and those that are known.
pub fn family_for(source: &ModelSource) -> Result<&'static Family> {
    family_beside(source, &[])
}

/// As [`family_for`], where models of the architectures `others` are taken, too: the error names them beside those of
/// families.
pub(crate) fn family_beside(
    source: &ModelSource,
    others: &[&'static str],
) -> Result<&'static Family> {
    match source {
        ModelSource::Gguf(gguf) => {
            let found = gguf.architecture()?;
            find(|f| f.gguf_architectures.contains(&found)).ok_or_else(|| {
                let known = [list(|f| f.gguf_architectures).as_slice(), others].concat();
                unknown(gguf.path(), "general.architecture", found, &known)
            })
        }
        ModelSource::Hf(folder) => {
            let config = &folder.config;
            let named = config.architectures()?;
            let by_class = find(|f| named.iter().any(|name| f.hf_architectures.contains(name)));
            if let Some(family) = by_class {
                return Ok(family);
            }
            if let Some(first) = named.first() {
                let known = [list(|f| f.hf_architectures).as_slice(), others].concat();
                return Err(unknown(config.path(), "architectures", first, &known));
            }
            let found = config.model_type()?;
            find(|f| f.hf_model_types.contains(&found)).ok_or_else(|| {
                let known = list(|f| f.hf_model_types);
                unknown(config.path(), "model_type", found, &known)
            })
        }
    }
}

/// The family, spec and weight names of an opened model.
pub(crate) fn read_spec(
    source: &ModelSource,
) -> Result<(&'static Family, DecoderSpec, &'static WeightNames)> {
    let family = family_for(source)?;
    match source {
        ModelSource::Gguf(gguf) => {
            let mut spec = (family.from_gguf)(gguf)?;
            common::bidirectional_from_gguf(gguf, &mut spec)?;
            Ok((family, spec, family.gguf_names))
        }
        ModelSource::Hf(folder) => {
            crate::checkpoint::check_scheme(folder)?;
            let mut spec = (family.from_hf)(&folder.config)?;
            common::bidirectional_from_hf(&folder.config, &mut spec)?;
            let table = |names: &WeightNames| format!("{}.weight", names.embedding);
            let base = family.hf_base_names;
            let base = base.filter(|names| folder.tensors.get(&table(names)).is_some());
            let names = base.unwrap_or(family.hf_names);
            // As in transformers, an output projection of its own in the file wins over the config.
            spec.tie_embeddings &= !differ(&folder.tensors, names.embedding, names.lm_head);
            let quantised = ["qweight", "weight_packed"].map(|s| format!("{}.{s}", names.lm_head));
            spec.tie_embeddings &= quantised
                .iter()
                .all(|name| folder.tensors.get(name).is_none());
            // So that it can be loaded: it is for the states, and has no logits.
            spec.tie_embeddings |= lacks_head(folder, names);
            Ok((family, spec, names))
        }
    }
}

/// Whether a checkpoint of the layers alone lacks the output projection that its config asks for.
pub(crate) fn lacks_head(folder: &HfFolder, names: &'static WeightNames) -> bool {
    let has = |suffix: &str| {
        let name = format!("{}.{suffix}", names.lm_head);
        folder.tensors.get(&name).is_some()
    };
    let tied = folder.config.bool("tie_word_embeddings");
    std::ptr::eq(names, &HF_BASE_NAMES)
        && !matches!(tied, Ok(Some(true)))
        && !["weight", "qweight", "weight_packed"].into_iter().any(has)
}

/// Whether both weights are in the file and not the same.
fn differ(tensors: &dyn TensorSource, one: &str, other: &str) -> bool {
    let bytes = |name: &str| Some(tensors.get(&format!("{name}.weight"))?.bytes);
    matches!((bytes(one), bytes(other)), (Some(one), Some(other)) if one != other)
}

fn find(wanted: impl Fn(&Family) -> bool) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| wanted(family))
}

fn list(of: impl Fn(&Family) -> &'static [&'static str]) -> Vec<&'static str> {
    let all = FAMILIES.iter().flat_map(|family| of(family));
    let mut known = Vec::new();
    for &name in all {
        if !known.contains(&name) {
            known.push(name);
        }
    }
    known
}

fn unknown(path: &std::path::Path, field: &str, found: &str, known: &[&str]) -> Error {
    Error::Model(format!(
        "{}: field \"{field}\": architecture \"{found}\" is not supported\n{}",
        path.display(),
        hint_of_supported(found, known)
    ))
}

/// A hint with the names that are known, and which of them is the nearest to `found`, if one is near.
pub(crate) fn hint_of_supported(found: &str, known: &[&str]) -> String {
    let nearest = nearest(found, known).filter(|_| known.len() > 1);
    let nearest = nearest.map(|name| format!(", of which {name} is the nearest"));
    let is = if known.len() == 1 { "is" } else { "are" };
    let (known, nearest) = (known.join(", "), nearest.unwrap_or_default());
    format!("hint: supported {is} {known}{nearest}")
}

/// The known name that takes the fewest changes to become `found`, unless that is most of its letters.
fn nearest<'k>(found: &str, known: &[&'k str]) -> Option<&'k str> {
    let found: String = found.chars().take(64).collect();
    let near = known.iter().map(|&name| (edits(&found, name), name));
    let (changes, name) = near.min_by_key(|&(changes, _)| changes)?;
    (2 * changes <= name.len()).then_some(name)
}

/// Letters that are put in, taken out or replaced to make one word of the other (Levenshtein).
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.chars().enumerate() {
            let replaced = diagonal + usize::from(!a.eq_ignore_ascii_case(&b));
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_told_if_it_is_near() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("QWEN2", "qwen2"), 0);
        let known = list(|family| family.hf_architectures);
        assert_eq!(
            nearest("Qwen4ForCausalLM", &known),
            Some("Qwen2ForCausalLM")
        );
        assert_eq!(
            nearest("Gemma3nForCausalLM", &known),
            Some("Gemma3ForCausalLM")
        );
        assert_eq!(nearest("", &known), None);
        assert_eq!(nearest("whisper", &list(|f| f.gguf_architectures)), None);
    }
}
