//! Log-probabilities in the shapes that OpenAI, vLLM and llama.cpp have for them.

use crate::models::model::Model;
use crate::response::{
    PromptLogprob, PromptLogprobs, TextLogprobs, TextRivals, TokenLogprob as Token, TokenLogprobs,
    TokenProbabilities, TokenProbability,
};
use ferrum_engine::sampler::{Logprobs, TokenLogprob};
use ferrum_types::TokenId;

/// What stands for minus infinity, which JSON has not.
const LOWEST: f32 = -9999.0;

fn finite(logprob: f32) -> f64 {
    logprob.max(LOWEST).into()
}

/// An entry of a chat's `logprobs.content`.
pub(crate) fn chat_entry(model: &Model, logprobs: &Logprobs) -> TokenLogprobs {
    let top = logprobs.top.iter().map(|token| chat_token(model, token));
    TokenLogprobs {
        chosen: chat_token(model, &logprobs.chosen),
        top_logprobs: top.collect(),
    }
}

fn chat_token(model: &Model, token: &TokenLogprob) -> Token {
    let bytes = model.token_bytes(token.token);
    Token {
        token: String::from_utf8_lossy(&bytes).into_owned(),
        logprob: finite(token.logprob),
        bytes,
    }
}

/// vLLM's `prompt_logprobs`: for each token of a prompt but the first, which nothing foretold, the token itself and the
/// `top` likeliest by their ids.
pub(crate) fn prompt_entries(
    model: &Model,
    logprobs: &[Logprobs],
    top: usize,
) -> Vec<Option<PromptLogprobs>> {
    let entry = |logprobs: &Logprobs| {
        let chosen = (logprobs.rank, &logprobs.chosen);
        let top = (1..).zip(&logprobs.top).take(top);
        let mut entries = PromptLogprobs::default();
        for (rank, token) in std::iter::once(chosen).chain(top) {
            let entry = PromptLogprob {
                logprob: finite(token.logprob),
                rank,
                decoded_token: String::from_utf8_lossy(&model.token_bytes(token.token))
                    .into_owned(),
            };
            entries.add(token.token.to_string(), entry);
        }
        Some(entries)
    };
    std::iter::once(None)
        .chain(logprobs.iter().map(entry))
        .collect()
}

/// An entry of llama.cpp's `completion_probabilities`.
pub(crate) fn native_entry(model: &Model, logprobs: &Logprobs) -> TokenProbabilities {
    let with_id = |token: &TokenLogprob| {
        let Token {
            token: text,
            logprob,
            bytes,
        } = chat_token(model, token);
        TokenProbability {
            token: text,
            logprob,
            bytes,
            id: token.token,
        }
    };
    TokenProbabilities {
        chosen: with_id(&logprobs.chosen),
        top_logprobs: logprobs.top.iter().map(with_id).collect(),
    }
}

impl TextLogprobs {
    /// A token with its `top` likeliest rivals, and where its text begins, in characters. `offset` moves on to the
    /// next.
    pub(crate) fn push(
        &mut self,
        model: &Model,
        logprobs: &Logprobs,
        top: usize,
        offset: &mut usize,
    ) {
        let chosen = &logprobs.chosen;
        let mut rivals = TextRivals::default();
        // Two tokens may have one text: the likelier one counts. The chosen token is always there.
        for token in logprobs.top.iter().take(top).chain([chosen]) {
            let text = name(&model.token_bytes(token.token));
            rivals.add(text, finite(token.logprob));
        }
        self.token(model, chosen.token, offset);
        self.token_logprobs.push(Some(finite(chosen.logprob)));
        self.top_logprobs.push(Some(rivals));
    }

    /// The first token of a prompt, which nothing foretold.
    pub(crate) fn push_first(&mut self, model: &Model, token: TokenId, offset: &mut usize) {
        self.token(model, token, offset);
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
    }

    fn token(&mut self, model: &Model, token: TokenId, offset: &mut usize) {
        let bytes = model.token_bytes(token);
        self.text_offset.push(*offset);
        *offset += String::from_utf8_lossy(&bytes).chars().count();
        self.tokens.push(name(&bytes));
    }

    pub(crate) fn append(&mut self, mut other: Self) {
        self.tokens.append(&mut other.tokens);
        self.token_logprobs.append(&mut other.token_logprobs);
        self.top_logprobs.append(&mut other.top_logprobs);
        self.text_offset.append(&mut other.text_offset);
    }
}

/// The text of a token; of one that is no text by itself, its bytes as OpenAI writes them.
fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", hex.collect::<String>())
        }
    }
}
