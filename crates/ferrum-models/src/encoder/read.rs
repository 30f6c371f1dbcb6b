//! Reads an encoder, and tells whether a model is one, by the kind of file it comes in.

use super::config::EncoderModel;
use super::{gguf, hf};
use crate::dense::DenseLayers;
use crate::embedding_prompts::EmbeddingPrompts;
use crate::named::WeightDtype;
use crate::pooling::{Pooling, StatedPooling};
use ferrum_formats::ModelSource;
use ferrum_types::Result;

/// Whether a model is an encoder that [`read_encoder`] reads.
pub fn is_encoder(source: &ModelSource) -> bool {
    match source {
        ModelSource::Hf(folder) => hf::is_encoder(folder),
        ModelSource::Gguf(file) => gguf::is_encoder(file),
    }
}

/// The architectures of encoders in files of that kind.
pub(crate) fn architectures(source: &ModelSource) -> Vec<&'static str> {
    match source {
        ModelSource::Hf(_) => hf::architectures(),
        ModelSource::Gguf(_) => gguf::ARCHITECTURES.to_vec(),
    }
}

/// Reads an encoder's config.
///
/// # Errors
/// [`Error::Model`](ferrum_types::Error::Model) for an architecture that is none of the encoders known, or a bad field.
pub fn read_encoder(source: ModelSource) -> Result<EncoderModel> {
    let (spec, names) = match &source {
        ModelSource::Hf(folder) => hf::read(folder)?,
        ModelSource::Gguf(file) => gguf::read(file)?,
    };
    Ok(EncoderModel {
        dense: DenseLayers::of(&source, spec.hidden_size)?,
        prompts: EmbeddingPrompts::of(&source)?,
        spec,
        pooling: StatedPooling::of(&source)?.or(Pooling::Mean),
        max_seq_length: match &source {
            ModelSource::Hf(folder) => hf::max_seq_length(folder)?,
            ModelSource::Gguf(_) => None,
        },
        dtype: WeightDtype::default(),
        names,
        source,
    })
}
