//! Shared by the commands that generate text: encoding of prompts, recommended sampling, the line of speed figures.

use crate::args::SamplingArgs;
use crate::failure::{Failure, Outcome};
use ferrum_engine::{GenerationStats, SamplingParams};
use ferrum_formats::ModelSource;
use ferrum_formats::chat_template::{ChatInput, ChatTemplate};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_models::Model;
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};

/// Tokenizer and chat template of a prompt.
pub(super) struct PromptEncoder {
    pub(super) tokenizer: Tokenizer,
    pub(super) template: Option<ChatTemplate>,
}

impl PromptEncoder {
    /// The tokens of a prompt that is continued as it is.
    pub(super) fn raw(&self, prompt: &str) -> Outcome<Vec<TokenId>> {
        Ok(self.tokenizer.encode(prompt, EncodeOptions::WRITTEN)?)
    }

    /// A conversation as the template writes it, up to where the answer begins.
    pub(super) fn written(&self, messages: &[Value]) -> Outcome<String> {
        let Some(template) = &self.template else {
            return Err(Failure::new(
                "this model has no chat template\nhint: use --raw",
            ));
        };
        let messages = Value::Array(messages.to_vec());
        Ok(template.render(&ChatInput::new(&messages))?)
    }

    /// The tokens of a conversation, up to where the answer begins.
    pub(super) fn chat(&self, messages: &[Value]) -> Outcome<Vec<TokenId>> {
        self.rendered(&self.written(messages)?)
    }

    /// The tokens of a prompt as the template wrote it.
    pub(super) fn rendered(&self, text: &str) -> Outcome<Vec<TokenId>> {
        Ok(self.tokenizer.encode(text, EncodeOptions::PROMPT)?)
    }

    pub(super) fn has_template(&self) -> bool {
        self.template.is_some()
    }
}

pub(super) fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The line of speed figures after an answer.
pub(super) fn speed(stats: &GenerationStats) -> String {
    let rate =
        |tokens: usize, time: std::time::Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    format!(
        "prompt: {} tokens, {:.1} tokens/s | answer: {} tokens, {:.1} tokens/s | first token after {:.3} s",
        stats.prompt_tokens,
        rate(stats.computed_tokens, stats.prefill),
        stats.tokens.len(),
        rate(stats.decode_steps, stats.decode),
        stats.prefill.as_secs_f64()
    )
}

/// Tokens at which an answer ends.
pub(super) fn stop_tokens(model: &Model, tokenizer: &Tokenizer) -> Vec<TokenId> {
    let mut stops = tokenizer.eos_ids().to_vec();
    if let ModelSource::Hf(folder) = &model.source {
        stops.extend(&folder.generation_config.eos_token_ids);
    }
    stops.sort_unstable();
    stops.dedup();
    stops
}

/// The sampling that the model's files recommend, validated.
pub(super) fn recommended_sampling(model: &Model) -> Outcome<SamplingArgs> {
    let recommended = match &model.source {
        ModelSource::Hf(folder) => {
            let recommended = &folder.generation_config;
            let single = |x: Option<f64>| x.map(|x| x as f32);
            // A checkpoint that says "do not sample" means greedy.
            let temperature = match recommended.do_sample {
                Some(false) => Some(0.0),
                _ => single(recommended.temperature),
            };
            SamplingArgs {
                temperature,
                top_k: recommended.top_k,
                top_p: single(recommended.top_p),
                min_p: single(recommended.min_p),
                repeat_penalty: single(recommended.repetition_penalty),
                repeat_last_n: None,
                seed: None,
            }
        }
        ModelSource::Gguf(gguf) => SamplingArgs {
            temperature: gguf.f32("general.sampling.temp")?,
            top_k: gguf.u32("general.sampling.top_k")?.map(|k| k as usize),
            top_p: gguf.f32("general.sampling.top_p")?,
            min_p: gguf.f32("general.sampling.min_p")?,
            repeat_penalty: gguf.f32("general.sampling.penalty_repeat")?,
            repeat_last_n: gguf.i32("general.sampling.penalty_last_n")?,
            seed: None,
        },
    };
    // Validated by itself, so that the error names the model's file.
    let params = SamplingParams {
        temperature: recommended.temperature.unwrap_or(0.0),
        top_p: recommended.top_p.unwrap_or(1.0),
        min_p: recommended.min_p.unwrap_or(0.0),
        repeat_penalty: recommended.repeat_penalty.unwrap_or(1.0),
        ..SamplingParams::default()
    };
    params.validate().map_err(|e| {
        let path = match &model.source {
            ModelSource::Hf(folder) => folder.dir.join("generation_config.json"),
            ModelSource::Gguf(gguf) => gguf.path().into(),
        };
        Failure::new(format!("{}: {e}", path.display()))
    })?;
    Ok(recommended)
}

/// Another seed each time.
pub(super) fn fresh_seed() -> u64 {
    // The keys of the standard library's hash tables come from the system's randomness.
    RandomState::new().build_hasher().finish()
}
