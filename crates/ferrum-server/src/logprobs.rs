//! Log-probabilities in the two shapes that OpenAI's API has for them.

use crate::model::Model;
use ferrum_engine::sampler::{Logprobs, TokenLogprob};
use ferrum_types::TokenId;
use serde_json::{Map, Value, json};

/// What stands for minus infinity, which JSON has not.
const LOWEST: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    logprob.max(LOWEST)
}

/// Entries of a chat's `logprobs.content`.
pub(crate) fn chat_entry(model: &Model, logprobs: &Logprobs) -> Value {
    let mut entry = chat_token(model, &logprobs.chosen);
    let top = logprobs.top.iter().map(|token| chat_token(model, token));
    entry["top_logprobs"] = top.collect();
    entry
}

fn chat_token(model: &Model, token: &TokenLogprob) -> Value {
    let bytes = model.token_bytes(token.token);
    json!({
        "token": String::from_utf8_lossy(&bytes),
        "logprob": finite(token.logprob),
        "bytes": bytes,
    })
}

/// vLLM's `prompt_logprobs`: for each token of a prompt but the first, which nothing foretold, the token itself and the
/// `top` likeliest by their ids.
pub(crate) fn prompt_entries(model: &Model, logprobs: &[Logprobs], top: usize) -> Value {
    let entry = |logprobs: &Logprobs| {
        let chosen = (logprobs.rank, &logprobs.chosen);
        let top = (1..).zip(&logprobs.top).take(top);
        let entries = std::iter::once(chosen).chain(top).map(|(rank, token)| {
            let text = model.token_bytes(token.token);
            let entry = json!({
                "logprob": finite(token.logprob),
                "rank": rank,
                "decoded_token": String::from_utf8_lossy(&text),
            });
            (token.token.to_string(), entry)
        });
        Value::Object(entries.collect())
    };
    let rest = logprobs.iter().map(entry);
    std::iter::once(Value::Null).chain(rest).collect()
}

/// An entry of llama.cpp's `completion_probabilities`.
pub(crate) fn native_entry(model: &Model, logprobs: &Logprobs) -> Value {
    let with_id = |token: &TokenLogprob| {
        let mut entry = chat_token(model, token);
        entry["id"] = token.token.into();
        entry
    };
    let mut entry = with_id(&logprobs.chosen);
    entry["top_logprobs"] = logprobs.top.iter().map(with_id).collect();
    entry
}

/// The `logprobs` of a text completion, token by token.
#[derive(Debug, Default)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Value>>,
    text_offset: Vec<usize>,
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
        let mut rivals = Map::new();
        // Two tokens may have one text: the likelier one counts. The chosen token is always there.
        for token in logprobs.top.iter().take(top).chain([chosen]) {
            let text = name(&model.token_bytes(token.token));
            let value = finite(token.logprob);
            rivals.entry(text).or_insert_with(|| value.into());
        }
        self.token(model, chosen.token, offset);
        self.token_logprobs.push(Some(finite(chosen.logprob)));
        self.top_logprobs.push(Some(rivals.into()));
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

    pub(crate) fn json(&self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
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
