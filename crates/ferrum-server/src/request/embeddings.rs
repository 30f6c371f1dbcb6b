//! `/v1/embeddings` and `/pooling`.

use super::{Limit, Prompts, Quantity};
use serde::Deserialize;
use utoipa::ToSchema;

/// `/v1/embeddings` and `/pooling`, beside a [`Conversation`](super::Conversation).
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Embeddings {
    /// Texts, if there are no messages.
    pub(crate) input: Option<Prompts>,
    pub(crate) dimensions: Option<Quantity>,
    /// Which of the model's prompts is put before each text, as text-embeddings-inference has it; its default where none is named.
    pub(crate) prompt_name: Option<String>,
    /// `float` or `base64`.
    pub(crate) encoding_format: Option<String>,
    /// Only so many of a text's last tokens; -1: as many as fit.
    pub(crate) truncate_prompt_tokens: Option<Limit>,
    /// Of messages, as vLLM has them: whether an answer would begin after them; false where it is not said.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Of messages: whether the tokenizer adds what it puts around texts; false where it is not said.
    pub(crate) add_special_tokens: Option<bool>,
}
