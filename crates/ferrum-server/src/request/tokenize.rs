//! `/tokenize`, `/detokenize` and `/apply-template`.

use super::Natural;
use serde::Deserialize;
use utoipa::ToSchema;

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
