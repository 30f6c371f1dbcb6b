//! An opened model file with its family, spec and tensor names.

use crate::families::{self, Family};
use crate::inventory::WeightNames;
use crate::model_kind::ModelKind;
use crate::pooling::Pooling;
use crate::spec::DecoderSpec;
use ferrum_formats::{ModelSource, TensorDtype, TensorSource};
use ferrum_types::{Dtype, Error, Result};

/// An opened model file with its family, spec and tensor names.
pub struct Model {
    /// The opened file or folder.
    pub source: ModelSource,
    /// Its family.
    pub family: &'static Family,
    /// What the forward path needs to know of it.
    pub spec: DecoderSpec,
    pub(crate) names: &'static WeightNames,
}

/// Finds the family of an opened file and reads its spec.
///
/// # Errors
/// [`Error::Model`] for an unknown architecture (naming those that are known) or a bad field.
pub fn read_model(source: ModelSource) -> Result<Model> {
    ModelKind::Decoder.check(&source)?;
    let (family, spec, names) = families::read_spec(&source)?;
    spec.validate().map_err(|reason| {
        let path = match &source {
            ModelSource::Gguf(gguf) => gguf.path(),
            ModelSource::Hf(folder) => folder.config.path(),
        };
        Error::Model(format!("{}: {reason}", path.display()))
    })?;
    Ok(Model {
        source,
        family,
        spec,
        names,
    })
}

impl Model {
    /// Whether it has an output projection. A checkpoint of the layers alone, as models for embeddings are saved, may have
    /// none: its states mean something, and its logits do not.
    pub fn has_head(&self) -> bool {
        match &self.source {
            ModelSource::Gguf(_) => true,
            ModelSource::Hf(folder) => !families::lacks_head(folder, self.names),
        }
    }

    /// Whether it generates text: it has an output projection, and its attention is causal. Others make embeddings.
    pub fn generates(&self) -> bool {
        self.spec.is_causal() && self.has_head()
    }

    /// How states become an embedding where the model's files do not say: the last token has seen all others, unless all
    /// have.
    pub fn usual_pooling(&self) -> Pooling {
        match self.spec.is_causal() {
            true => Pooling::Last,
            false => Pooling::Mean,
        }
    }

    /// The tensors of the file.
    pub fn tensors(&self) -> &dyn TensorSource {
        self.source.tensors()
    }

    /// Whether quantised weights are worth keeping: dequantised to f32, the weights would not stay in the
    /// caches of a processor. Below that, f32 costs no speed and rounds nothing.
    pub fn keeps_blocks(&self) -> bool {
        const CACHES: u64 = 64 << 20;
        4 * self.spec.parameters() > CACHES
    }

    /// Whether every matrix is stored in f32, so that a cache of less would be the only rounding.
    pub fn is_f32(&self) -> bool {
        self.tensors()
            .infos()
            .filter(|info| info.shape.len() > 1)
            .all(|info| info.dtype == TensorDtype::Plain(Dtype::F32))
    }

    /// Whether most weights are stored in bf16.
    pub fn is_bf16(&self) -> bool {
        let (mut bf16, mut all) = (0, 0);
        for info in self.tensors().infos() {
            let size = info.shape.iter().product::<usize>();
            all += size;
            if info.dtype == TensorDtype::Plain(Dtype::BF16) {
                bf16 += size;
            }
        }
        2 * bf16 > all
    }
}
