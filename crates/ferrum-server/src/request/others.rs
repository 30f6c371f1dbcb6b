//! Completions, embeddings, tokens and adapters.

use super::{Alternatives, Anything, Document, Limit, Natural, Prompts, Quantity};
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

/// `/v1/embeddings` and `/pooling`, beside a [`Conversation`](super::Conversation).
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Embeddings {
    /// Texts, if there are no messages.
    pub(crate) input: Option<Prompts>,
    pub(crate) dimensions: Option<Quantity>,
    /// `float` or `base64`.
    pub(crate) encoding_format: Option<String>,
    /// Only so many of a text's last tokens; -1: as many as fit.
    pub(crate) truncate_prompt_tokens: Option<Limit>,
    /// Of messages, as vLLM has them: whether an answer would begin after them; false where it is not said.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Of messages: whether the tokenizer adds what it puts around texts; false where it is not said.
    pub(crate) add_special_tokens: Option<bool>,
}

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

/// `/tokenize` beside a [`Conversation`](super::Conversation).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Tokenize {
    #[serde(rename = "model")]
    _model: Option<String>,
    /// A text, if there are no messages.
    pub(crate) prompt: Option<String>,
    pub(crate) add_special_tokens: Option<bool>,
    pub(crate) return_token_strs: Option<bool>,
    /// llama.cpp's: a text.
    pub(crate) content: Option<String>,
    /// llama.cpp's, for `content`; false where it is not said.
    pub(crate) add_special: Option<bool>,
    /// llama.cpp's: whether tokens come with their text.
    pub(crate) with_pieces: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
}

/// `/apply-template` beside a [`Conversation`](super::Conversation).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Template {
    #[serde(rename = "model")]
    _model: Option<String>,
    pub(crate) add_generation_prompt: Option<bool>,
}

/// `/detokenize`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Detokenize {
    #[serde(rename = "model")]
    _model: Option<String>,
    pub(crate) tokens: Vec<Natural>,
}

/// `/v1/load_lora_adapter`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct LoadAdapter {
    pub(crate) lora_name: String,
    /// A folder inside the server's.
    pub(crate) lora_path: String,
    pub(crate) base_model_name: Option<String>,
    /// Whether an adapter of the name is replaced, which is not supported.
    pub(crate) load_inplace: Option<bool>,
}

/// `/v1/unload_lora_adapter`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct UnloadAdapter {
    pub(crate) lora_name: String,
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<Anything>,
}
