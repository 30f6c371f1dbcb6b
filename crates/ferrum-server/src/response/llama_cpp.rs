//! llama.cpp's `/completion` and `/infill`.

use serde::Serialize;
use utoipa::ToSchema;

/// An answer at its end: in a stream, with what no chunk has told.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NativeAnswer)]
pub(crate) struct LlamaCppAnswer<'a> {
    pub(crate) index: usize,
    pub(crate) content: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) id_slot: i32,
    pub(crate) stop: bool,
    pub(crate) model: &'a str,
    pub(crate) tokens_predicted: usize,
    pub(crate) tokens_evaluated: usize,
    pub(crate) generation_settings: &'a GenerationSettings,
    pub(crate) prompt: String,
    pub(crate) has_new_line: bool,
    pub(crate) truncated: bool,
    pub(crate) stop_type: StopType,
    /// The stop string that was met; empty without one.
    pub(crate) stopping_word: String,
    pub(crate) tokens_cached: usize,
    pub(crate) timings: LlamaCppTimings,
    /// Where `n_probs` is above 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) completion_probabilities: Option<Vec<TokenProbabilities>>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopType {
    Eos,
    Limit,
    Word,
}

/// A part of an answer that is streamed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NativeChunk)]
pub(crate) struct LlamaCppChunk {
    pub(crate) index: usize,
    pub(crate) content: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) stop: bool,
    pub(crate) id_slot: i32,
    pub(crate) tokens_predicted: usize,
    pub(crate) tokens_evaluated: usize,
    /// Where `n_probs` is above 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) completion_probabilities: Option<Vec<TokenProbabilities>>,
    /// With `timings_per_token`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) timings: Option<LlamaCppTimings>,
}

/// A token and its likeliest rivals.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenProbabilities {
    #[serde(flatten)]
    pub(crate) chosen: TokenProbability,
    pub(crate) top_logprobs: Vec<TokenProbability>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenProbability {
    pub(crate) token: String,
    pub(crate) logprob: f64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) id: u32,
}

/// What an answer took, in milliseconds and tokens a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
#[schema(as = NativeTimings)]
pub(crate) struct LlamaCppTimings {
    /// Tokens of the prompt that the prefix cache had; `prompt_n` are the others.
    pub(crate) cache_n: usize,
    pub(crate) prompt_n: usize,
    pub(crate) prompt_ms: f64,
    pub(crate) prompt_per_token_ms: f64,
    pub(crate) prompt_per_second: f64,
    pub(crate) predicted_n: usize,
    pub(crate) predicted_ms: f64,
    pub(crate) predicted_per_token_ms: f64,
    pub(crate) predicted_per_second: f64,
}

/// The settings of a request, as they hold.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct GenerationSettings {
    #[serde(flatten)]
    pub(crate) samplers: SamplerSettings,
    pub(crate) n_ctx: usize,
    /// -1: as many as fit.
    pub(crate) n_predict: i64,
    pub(crate) max_tokens: i64,
    /// -1: a random one.
    pub(crate) seed: i128,
    pub(crate) stop: Vec<String>,
    pub(crate) ignore_eos: bool,
    pub(crate) stream: bool,
    pub(crate) n_probs: usize,
    pub(crate) timings_per_token: bool,
    /// Names, in the order in which they act.
    #[serde(rename = "samplers")]
    pub(crate) order: Vec<&'static str>,
}

/// The numbers of samplers under llama.cpp's names, the seed apart.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct SamplerSettings {
    pub(crate) temperature: f64,
    pub(crate) top_k: usize,
    pub(crate) top_p: f64,
    pub(crate) min_p: f64,
    pub(crate) typical_p: f64,
    pub(crate) xtc_probability: f64,
    pub(crate) xtc_threshold: f64,
    /// -1: all.
    pub(crate) repeat_last_n: i64,
    pub(crate) repeat_penalty: f64,
    pub(crate) presence_penalty: f64,
    pub(crate) frequency_penalty: f64,
    pub(crate) dry_multiplier: f64,
    pub(crate) dry_base: f64,
    pub(crate) dry_allowed_length: usize,
    /// -1: all.
    pub(crate) dry_penalty_last_n: i64,
    /// 0: off, 2: version 2.
    pub(crate) mirostat: u8,
    pub(crate) mirostat_tau: f64,
    pub(crate) mirostat_eta: f64,
}
