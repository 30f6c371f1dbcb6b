//! `/v1/score` and `/v1/rerank`.

use super::{Document, Limit, Prompts, Quantity};
use serde::Deserialize;
use utoipa::ToSchema;

/// `/v1/score`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Score {
    /// One text, or as many as in `text_2`.
    #[serde(alias = "queries")]
    pub(crate) text_1: Prompts,
    #[serde(alias = "documents")]
    pub(crate) text_2: Prompts,
    pub(crate) truncate_prompt_tokens: Option<Limit>,
}

/// `/v1/rerank`, as Cohere, Jina and vLLM have it.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Rerank {
    pub(crate) query: String,
    pub(crate) documents: Vec<Document>,
    /// Only so many of the best; all where it is not said.
    pub(crate) top_n: Option<Quantity>,
    /// Whether results have the text of their document; false where it is not said.
    pub(crate) return_documents: Option<bool>,
    /// Only so many tokens of a pair; where it is not said, as many as fit.
    pub(crate) truncate_prompt_tokens: Option<Limit>,
}
