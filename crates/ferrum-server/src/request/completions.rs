//! `/v1/completions`: OpenAI's older route.

use super::{Alternatives, Limit, Prompts, Quantity};
use serde::Deserialize;
use utoipa::ToSchema;

/// `/v1/completions` beside [`Sampling`](super::Sampling) and [`Choices`](super::Choices).
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Completion {
    pub(crate) prompt: Prompts,
    /// Whether the prompt comes before its answers.
    pub(crate) echo: Option<bool>,
    /// Most tokens of an answer; -1: as many as fit.
    #[serde(alias = "n_predict")]
    pub(crate) max_tokens: Option<Limit>,
    pub(crate) logprobs: Option<Alternatives>,
    pub(crate) best_of: Option<Quantity>,
    pub(crate) suffix: Option<String>,
    pub(crate) store: Option<bool>,
}
