//! Transcripts.

use serde::Serialize;
use utoipa::ToSchema;

/// The text of a recording.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Transcription {
    pub(crate) text: String,
}

/// The text with times and language (`verbose_json`).
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct VerboseTranscription {
    #[schema(inline)]
    pub(crate) task: TranscriptionTask,
    /// Its code; null for a model that knows one language.
    #[schema(required)]
    pub(crate) language: Option<String>,
    /// Seconds.
    pub(crate) duration: f64,
    pub(crate) text: String,
    pub(crate) segments: Vec<TranscriptionSegment>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TranscriptionTask {
    Transcribe,
    Translate,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TranscriptionSegment {
    pub(crate) id: usize,
    /// Seconds from the beginning.
    pub(crate) start: f64,
    /// Seconds from the beginning.
    pub(crate) end: f64,
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    /// The temperature that the tokens were sampled at.
    pub(crate) temperature: f32,
    /// Mean log-probability of the tokens of the window.
    pub(crate) avg_logprob: f32,
    /// How far the text of the window compresses: much, where it repeats itself.
    pub(crate) compression_ratio: f32,
    /// Probability that there is no speech.
    pub(crate) no_speech_prob: f32,
}
