//! Families: how configs and weight names of known models map onto a [`DecoderSpec`].
//!
//! A family is one file and one row in [`FAMILIES`]. It reads a Hugging Face `config.json` or GGUF
//! metadata; what most decoders have in common is read by `common.rs`, and a family states only how it
//! differs. See `docs/adding-a-model.md`.

mod common;
mod experts;
mod llama;
mod mistral;
mod mixtral;
mod names;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;

pub(crate) use names::{GGUF_NAMES, HF_NAMES};

use crate::inventory::WeightNames;
use crate::spec::DecoderSpec;
use ferrum_formats::{Gguf, HfConfig, ModelSource, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// A group of models that share a config format and a layer structure.
#[derive(Debug)]
pub struct Family {
    /// Name in messages.
    pub name: &'static str,
    /// Values of `architectures` in `config.json`.
    pub hf_architectures: &'static [&'static str],
    /// Values of `model_type` in `config.json`, for configs without `architectures`.
    pub hf_model_types: &'static [&'static str],
    /// Names of weights in Hugging Face folders.
    pub hf_names: &'static WeightNames,
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
    /// How rows of query and key heads pair up for rotation; in checkpoints they are halves.
    pub rope: RopeStyle,
}

/// The names of tensors in GGUF files, whatever the family.
pub fn gguf_names() -> &'static WeightNames {
    &names::GGUF_NAMES
}

/// The family called `name`.
pub(crate) fn named(name: &str) -> Option<&'static Family> {
    find(|family| family.name == name)
}

/// Every family.
pub static FAMILIES: &[&Family] = &[
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
];

/// The family of an opened model.
///
/// # Errors
/// [`Error::Model`] naming the architecture that was found and those that are known.
pub fn family_for(source: &ModelSource) -> Result<&'static Family> {
    match source {
        ModelSource::Gguf(gguf) => {
            let found = gguf.architecture()?;
            find(|f| f.gguf_architectures.contains(&found)).ok_or_else(|| {
                let known = list(|f| f.gguf_architectures);
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
                let known = list(|f| f.hf_architectures);
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
        ModelSource::Gguf(gguf) => Ok((family, (family.from_gguf)(gguf)?, &names::GGUF_NAMES)),
        ModelSource::Hf(folder) => {
            crate::checkpoint::check_scheme(folder)?;
            let mut spec = (family.from_hf)(&folder.config)?;
            let names = family.hf_names;
            // As in transformers, an output projection of its own in the file wins over the config.
            spec.tie_embeddings &= !differ(&folder.tensors, names.embedding, names.lm_head);
            let quantised = ["qweight", "weight_packed"].map(|s| format!("{}.{s}", names.lm_head));
            spec.tie_embeddings &= quantised
                .iter()
                .all(|name| folder.tensors.get(name).is_none());
            Ok((family, spec, names))
        }
    }
}

/// Whether both weights are in the file and not the same.
fn differ(tensors: &dyn TensorSource, one: &str, other: &str) -> bool {
    let bytes = |name: &str| Some(tensors.get(&format!("{name}.weight"))?.bytes);
    matches!((bytes(one), bytes(other)), (Some(one), Some(other)) if one != other)
}

fn find(wanted: impl Fn(&Family) -> bool) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| wanted(family))
}

fn list(of: impl Fn(&Family) -> &'static [&'static str]) -> String {
    let all: Vec<_> = FAMILIES
        .iter()
        .flat_map(|family| of(family))
        .copied()
        .collect();
    all.join(", ")
}

fn unknown(path: &std::path::Path, field: &str, found: &str, known: &str) -> Error {
    Error::Model(format!(
        "{}: field \"{field}\": architecture \"{found}\" is not supported\nhint: supported are {known}",
        path.display()
    ))
}
