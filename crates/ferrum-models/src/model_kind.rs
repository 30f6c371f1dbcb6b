//! What a checkpoint is for, and the error of a command that is for another kind.

use crate::clip::is_clip;
use crate::encoder::{self, is_encoder};
use crate::families::{family_beside, family_for};
use crate::whisper::is_whisper;
use ferrum_formats::ModelSource;
use ferrum_types::{Error, Result};

/// Values of `architectures` of EAGLE-3 heads.
const EAGLE3: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];

/// What a checkpoint is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// Generates text.
    Decoder,
    /// Drafts tokens for a decoder (EAGLE-3).
    DraftHead,
    /// Makes vectors or scores of texts.
    Encoder,
    /// Writes what is said in a recording (Whisper).
    Speech,
    /// Compares images with texts (CLIP, SigLIP).
    Clip,
}

impl ModelKind {
    /// The kind of an opened model; none for an architecture that is unknown.
    pub fn of(source: &ModelSource) -> Option<Self> {
        Some(match source {
            _ if is_encoder(source) => Self::Encoder,
            _ if is_whisper(source) => Self::Speech,
            _ if is_clip(source) => Self::Clip,
            _ if is_eagle3(source) => Self::DraftHead,
            _ if family_for(source).is_ok() => Self::Decoder,
            _ => return None,
        })
    }

    /// The kind of a model that gives embeddings: a decoder or an encoder.
    ///
    /// # Errors
    /// [`Error::Model`] for a model of another kind, saying which command runs it, and for one of an unknown architecture,
    /// naming those of both kinds.
    pub fn of_embedder(source: &ModelSource) -> Result<Self> {
        match Self::of(source) {
            Some(Self::Decoder) => Ok(Self::Decoder),
            Some(_) => Self::Encoder.check(source).map(|()| Self::Encoder),
            None => family_beside(source, &encoder::architectures(source)).map(|_| Self::Decoder),
        }
    }

    /// Checks that a model is of this kind. One of an unknown architecture passes: who reads it says more.
    ///
    /// # Errors
    /// [`Error::Model`] saying of which kind it is, and which command runs that.
    pub fn check(self, source: &ModelSource) -> Result<()> {
        let found = match Self::of(source) {
            Some(found) if found != self => found,
            _ => return Ok(()),
        };
        let (path, field, architecture) = match source {
            ModelSource::Hf(folder) => {
                let named = folder.config.architectures()?.join(", ");
                (folder.config.path(), "architectures", named)
            }
            ModelSource::Gguf(gguf) => {
                let named = gguf.architecture()?.to_owned();
                (gguf.path(), "general.architecture", named)
            }
        };
        Err(Error::Model(format!(
            "{}: field \"{field}\": \"{architecture}\" is {}, not {}\nhint: {}",
            path.display(),
            found.name(),
            self.name(),
            found.command()
        )))
    }

    /// What such a model is, in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Decoder => "a model that generates text",
            Self::DraftHead => "a draft head",
            Self::Encoder => "a text encoder",
            Self::Speech => "a speech recogniser",
            Self::Clip => "an image and text encoder",
        }
    }

    /// What runs it, in words.
    pub fn command(self) -> &'static str {
        match self {
            Self::Decoder => "ferrum run, ferrum embed and ferrum serve run it",
            Self::DraftHead => "ferrum serve takes it with --draft-model, beside its target",
            Self::Encoder => "ferrum embed and ferrum rerank run it",
            Self::Speech => "ferrum transcribe runs it",
            Self::Clip => "ferrum classify runs it",
        }
    }
}

fn is_eagle3(source: &ModelSource) -> bool {
    let ModelSource::Hf(folder) = source else {
        return false;
    };
    let named = folder.config.architectures().unwrap_or_default();
    named.iter().any(|name| EAGLE3.contains(name))
}
