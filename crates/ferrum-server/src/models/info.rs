//! The kind of a loaded model, its sizes and its recommended samplers.

use crate::error::ApiError;

/// What a model does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelKind {
    Decoder,
    Encoder,
    Transcriber,
}

impl ModelKind {
    /// What it does, and which routes take it.
    fn described(self) -> (&'static str, &'static str) {
        match self {
            ModelKind::Decoder => ("generates text", "/v1/chat/completions and /v1/completions"),
            ModelKind::Encoder => (
                "is a text encoder",
                "/v1/embeddings, /v1/rerank and /v1/score",
            ),
            ModelKind::Transcriber => (
                "transcribes speech",
                "/v1/audio/transcriptions and /v1/audio/translations",
            ),
        }
    }

    /// The error of a request to a route that does not take such a model.
    pub(crate) fn refusal(self, model: &str) -> ApiError {
        let (what, routes) = self.described();
        ApiError::wrong_model(format!(
            "model: {model:?} {what}, which this route does not do; use {routes}"
        ))
    }

    /// In a word, for `/v1/models`.
    pub(crate) fn word(self) -> &'static str {
        match self {
            ModelKind::Decoder => "decoder",
            ModelKind::Encoder => "encoder",
            ModelKind::Transcriber => "speech",
        }
    }
}

/// Sizes and recommended samplers of a model, available once it has been loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelInfo {
    pub(crate) kind: ModelKind,
    /// Tokens of the longest sequence or text; `None` where sequences are not texts.
    pub(crate) context: Option<usize>,
    /// Tokens that the KV cache holds over all sequences, if it has one.
    pub(crate) kv_tokens: Option<usize>,
    /// For models that generate.
    pub(crate) defaults: Option<SamplingDefaults>,
}

/// The samplers that hold where a request names none, as `/v1/models` shows them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SamplingDefaults {
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) top_k: usize,
    pub(crate) min_p: f32,
}
