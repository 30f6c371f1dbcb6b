//! What a Whisper checkpoint is, read from a Hugging Face folder.

use crate::families::hint_of_supported;
use crate::named::WeightDtype;
use crate::named::folder;
use crate::pre_norm::PreNormSpec;
use crate::spec::Activation;
use ferrum_formats::{HfConfig, ModelSource};
use ferrum_types::{Error, Result, TokenId};

/// Sizes of a Whisper model.
#[derive(Clone, Debug, PartialEq)]
pub struct WhisperSpec {
    /// Rows of the embedding table, which is the output projection too.
    pub vocab_size: usize,
    /// Mel filters of the spectrogram.
    pub mels: usize,
    /// States of a window: two frames of the spectrogram each.
    pub positions: usize,
    /// Most tokens of a window's text, with those that begin it.
    pub tokens: usize,
    /// The layers that read.
    pub encoder: PreNormSpec,
    /// The layers that write.
    pub decoder: PreNormSpec,
    /// The token that begins a text.
    pub start: TokenId,
}

impl WhisperSpec {
    /// Frames of a window.
    pub fn frames(&self) -> usize {
        2 * self.positions
    }
}

/// A Whisper folder that has been understood.
pub struct WhisperModel {
    /// The opened folder.
    pub source: ModelSource,
    /// What the forward path needs to know of it.
    pub spec: WhisperSpec,
    /// In what type its matrices are kept on a device.
    pub dtype: WeightDtype,
}

const ARCHITECTURE: &str = "WhisperForConditionalGeneration";

/// Whether a model is one that [`read_whisper`] reads.
pub fn is_whisper(source: &ModelSource) -> bool {
    let ModelSource::Hf(folder) = source else {
        return false;
    };
    let names = folder.config.architectures();
    names.is_ok_and(|names| names.contains(&ARCHITECTURE))
}

/// Reads a Whisper model's config.
///
/// # Errors
/// [`Error::Model`] for another architecture, or a bad field.
pub fn read_whisper(source: ModelSource) -> Result<WhisperModel> {
    let opened = folder(&source)?;
    let config = &opened.config;
    if !is_whisper(&source) {
        let found = config.architectures()?.join(", ");
        return Err(Error::Model(format!(
            "{}: field \"architectures\": \"{found}\" does not transcribe speech\n{}",
            config.path().display(),
            hint_of_supported(&found, &[ARCHITECTURE])
        )));
    }
    crate::checkpoint::check_scheme(opened)?;
    let spec = spec(config)?;
    validate(&spec)
        .map_err(|reason| Error::Model(format!("{}: {reason}", config.path().display())))?;
    Ok(WhisperModel {
        source,
        spec,
        dtype: WeightDtype::default(),
    })
}

fn spec(config: &HfConfig) -> Result<WhisperSpec> {
    if config.bool("scale_embedding")?.unwrap_or(false) {
        let expected = "false, the only kind of embeddings that is supported";
        return Err(config.field_error("scale_embedding", expected).into());
    }
    let activation = match config.str("activation_function")?.unwrap_or("gelu") {
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
        _ => {
            let expected = "a form of gelu";
            return Err(config.field_error("activation_function", expected).into());
        }
    };
    let hidden = config.require_usize("d_model")?;
    let stack = |part: &str, causal: bool| -> Result<PreNormSpec> {
        Ok(PreNormSpec {
            hidden,
            layers: config.require_usize(&format!("{part}_layers"))?,
            heads: config.require_usize(&format!("{part}_attention_heads"))?,
            intermediate: config.require_usize(&format!("{part}_ffn_dim"))?,
            activation: activation.into(),
            norm_eps: 1e-5,
            causal,
        })
    };
    let start = config.require_usize("decoder_start_token_id")?;
    Ok(WhisperSpec {
        vocab_size: config.require_usize("vocab_size")?,
        mels: config.usize("num_mel_bins")?.unwrap_or(80),
        positions: config.usize("max_source_positions")?.unwrap_or(1500),
        tokens: config.usize("max_target_positions")?.unwrap_or(448),
        encoder: stack("encoder", false)?,
        decoder: stack("decoder", true)?,
        start: TokenId::try_from(start)
            .map_err(|_| config.field_error("decoder_start_token_id", "a token"))?,
    })
}

fn validate(spec: &WhisperSpec) -> std::result::Result<(), String> {
    spec.encoder.validate("encoder")?;
    spec.decoder.validate("decoder")?;
    for (name, value, most) in [
        ("vocab_size", spec.vocab_size, 1 << 24),
        ("num_mel_bins", spec.mels, 1 << 10),
        ("max_source_positions", spec.positions, 1 << 16),
        ("max_target_positions", spec.tokens, 1 << 16),
    ] {
        if value == 0 || value > most {
            return Err(format!("{name}: found {value}, expected 1 to {most}"));
        }
    }
    // Four begin a text, and one is of it.
    if spec.tokens < 8 {
        let found = spec.tokens;
        return Err(format!(
            "max_target_positions: found {found}, expected 8 at least"
        ));
    }
    match (spec.start as usize) < spec.vocab_size {
        true => Ok(()),
        false => Err(format!(
            "decoder_start_token_id: found {}, the vocabulary has {}",
            spec.start, spec.vocab_size
        )),
    }
}
