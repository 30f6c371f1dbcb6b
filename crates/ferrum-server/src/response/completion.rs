//! `/v1/completions`.

use super::{Entries, PromptLogprobs, Usage};
use serde::Serialize;
use utoipa::ToSchema;

literals! {
    TextCompletionObject = "text_completion";
}

/// An answer that came whole, or a part of one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TextCompletion<'a> {
    pub(crate) id: &'a str,
    #[schema(inline)]
    pub(crate) object: TextCompletionObject,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<TextChoice>,
    /// In a stream, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub(crate) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TextChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    #[schema(required)]
    pub(crate) logprobs: Option<TextLogprobs>,
    /// Null in a stream until the answer ends.
    #[schema(required)]
    pub(crate) finish_reason: Option<TextFinishReason>,
    /// vLLM's, where they were asked for; null for the first token, which nothing foretold.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TextFinishReason {
    Stop,
    Length,
}

/// Tokens of an answer, in lists of equal length. The first token of a prompt, which nothing foretold, has nulls.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct TextLogprobs {
    pub(crate) tokens: Vec<String>,
    pub(crate) token_logprobs: Vec<Option<f64>>,
    pub(crate) top_logprobs: Vec<Option<TextRivals>>,
    /// Where the text of a token begins, in characters.
    pub(crate) text_offset: Vec<usize>,
}

/// Log-probabilities by text.
pub(crate) type TextRivals = Entries<f64>;
