//! Truncation of prompts: `truncate_prompt_tokens`, as vLLM has it.

use crate::error::ApiError;
use crate::models::model::Model;
use crate::request::{Int, Limit};
use ferrum_engine::EncoderTokenizer;
use ferrum_types::TokenId;

/// How much of a prompt is left out at its beginning, as vLLM does it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Truncation {
    #[default]
    Nothing,
    /// All but so many of the last tokens.
    Last(usize),
    /// What leaves no room for the answer.
    Overflow,
}

impl Truncation {
    /// What the field says.
    pub(crate) fn of(field: Option<Limit>) -> Result<Self, ApiError> {
        match field {
            None => Ok(Self::Nothing),
            Some(Int(-1)) => Ok(Self::Overflow),
            Some(last) => match last.count() {
                Some(last) if last > 0 => Ok(Self::Last(last)),
                _ => {
                    let reason = "found 0, expected -1 or at least 1";
                    Err(ApiError::invalid("truncate_prompt_tokens", reason))
                }
            },
        }
    }

    /// Most tokens of a text for an encoder, which keeps the first.
    pub(crate) fn room(self, tokenizer: &EncoderTokenizer) -> usize {
        match self {
            Self::Nothing | Self::Overflow => tokenizer.max_tokens(),
            Self::Last(most) => most,
        }
    }

    /// Shortens a prompt to an answer of `answer` tokens, and says whether it had to be.
    pub(crate) fn apply(self, prompt: &mut Vec<TokenId>, model: &Model, answer: usize) -> bool {
        let most = match self {
            Self::Nothing => return false,
            Self::Last(most) => most,
            Self::Overflow => {
                let capacity = model.served.context.min(model.served.engine.kv_tokens());
                capacity.saturating_sub(answer).max(1)
            }
        };
        let cut = prompt.len().saturating_sub(most);
        prompt.drain(..cut);
        cut > 0
    }
}
