//! A Hugging Face model that is to become a GGUF file, in the terms of both.

use crate::draft_head::{MtpLayer, MtpNames};
use crate::families::{self, FAMILIES};
use crate::inventory::WeightNames;
use crate::model_kind::ModelKind;
use crate::spec::DecoderSpec;
use ferrum_formats::{HfFolder, ModelSource, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// What a Hugging Face model is in the terms of GGUF.
pub(super) struct HfModel<'m> {
    pub(super) folder: &'m HfFolder,
    pub(super) spec: DecoderSpec,
    pub(super) names: &'static WeightNames,
    /// Those of the new file.
    pub(super) gguf_names: &'static WeightNames,
    /// `general.architecture`.
    pub(super) arch: &'static str,
    /// How the rows of query and key heads pair up in the new file.
    pub(super) rope: RopeStyle,
    /// Its layer for multi-token prediction, if it has one.
    pub(super) mtp: Option<MtpLayer>,
}

/// Architectures whose files have a layer for multi-token prediction as one more block. Those of others are without it, as
/// llama.cpp makes them.
const WITH_MTP: [&str; 4] = ["glm4moe", "qwen3next", "qwen35", "qwen35moe"];

impl<'m> HfModel<'m> {
    /// Reads the spec of a folder and finds its architecture.
    pub(super) fn read(source: &ModelSource, folder: &'m HfFolder) -> Result<Self> {
        let path = folder.config.path().display();
        if folder.quantization.is_some() {
            return Err(Error::Model(format!(
                "{path}: the weights are quantised already, expected floats\nhint: take the unquantised \
                 checkpoint"
            )));
        }
        ModelKind::Decoder.check(source)?;
        let (family, spec, names) = families::read_spec(source)?;
        if families::lacks_head(folder, names) {
            return Err(Error::Model(format!(
                "{path}: the checkpoint has no {}.weight, and a GGUF file without one means that the embeddings are tied\nhint: take the \
                 checkpoint that has one",
                names.lm_head
            )));
        }
        spec.validate()
            .map_err(|reason| Error::Model(format!("{path}: {reason}")))?;
        let Some(form) = family.gguf_form else {
            let known = FAMILIES.iter().filter(|family| family.gguf_form.is_some());
            let known: Vec<_> = known.map(|family| family.name).collect();
            return Err(Error::Model(format!(
                "{path}: the family {} cannot be converted, expected one of {}\nhint: make a float GGUF \
                 file of it with llama.cpp's convert_hf_to_gguf.py and quantise that",
                family.name,
                known.join(", ")
            )));
        };
        let parts = MtpNames::of(source, &spec, names);
        let projection = format!("{}.weight", parts.projection);
        let mtp = folder.tensors.get(&projection);
        Ok(Self {
            folder,
            mtp: mtp.and_then(|_| MtpLayer::of(&spec, names, parts)),
            spec,
            names,
            gguf_names: family.gguf_names,
            arch: form.architecture,
            rope: form.rope,
        })
    }

    /// The layer for multi-token prediction, where the new file has it.
    pub(super) fn kept_mtp(&self) -> Option<&MtpLayer> {
        let kept = WITH_MTP.contains(&self.arch);
        self.mtp.as_ref().filter(|_| kept)
    }

    /// The same with the layers that the new file speaks of: those of the model, and that for multi-token prediction.
    pub(super) fn with_further_layers(mut self) -> Self {
        let further = self
            .kept_mtp()
            .and_then(|mtp| mtp.spec.layers.last().cloned());
        self.spec.layers.extend(further);
        self
    }
}
