//! The engine: on a scripted runner for what happens when, and on the demo model for whether the
//! tokens are the same whatever happens.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod captured;
mod cuda;
mod device_sampling;
mod draft_heads;
mod embedding;
mod faults;
mod grammar;
mod invariance;
mod life;
mod limits;
#[allow(dead_code, reason = "the model tests use the rest")]
#[path = "../../../ferrum-models/tests/support/naive.rs"]
mod naive;
mod offload;
mod options;
mod overlap;
mod overlapped;
mod scripted;
mod stages;
mod states;
mod text;
mod vision;
mod windows;

use ferrum_engine::engine::{StopMatch, Usage};
use ferrum_engine::sampler::Logprobs;
use ferrum_engine::{
    EngineError, Event, EventStream, FinishReason, GenerationParams, Request, SamplingParams,
};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{Model, read_model};
use ferrum_types::TokenId;
use std::sync::Arc;

static DEMO: &[u8] = include_bytes!("../../../../assets/demo/ferrum-demo.gguf");

fn demo() -> Model {
    read_model(ModelSource::Gguf(Gguf::from_static(DEMO).unwrap())).unwrap()
}

fn demo_tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_gguf(&Gguf::from_static(DEMO).unwrap()).unwrap())
}

fn encode(text: &str) -> Vec<TokenId> {
    demo_tokenizer().encode(text, EncodeOptions::PLAIN).unwrap()
}

/// A greedy request for `max_tokens` tokens.
fn greedy(prompt: &[TokenId], max_tokens: usize) -> Request {
    let generation = GenerationParams {
        max_tokens,
        ..GenerationParams::default()
    };
    Request::new(prompt.to_vec(), generation)
}

/// The same with random choices.
fn sampled(prompt: &[TokenId], max_tokens: usize, seed: u64) -> Request {
    let mut request = greedy(prompt, max_tokens);
    request.generation.sampling = SamplingParams {
        temperature: 1.0,
        top_p: 0.95,
        seed,
        ..SamplingParams::default()
    };
    request
}

/// One choice, put together.
#[derive(Clone, Debug, Default, PartialEq)]
struct Choice {
    tokens: Vec<TokenId>,
    text: String,
    logprobs: Vec<Logprobs>,
    ended: Option<(FinishReason, Option<StopMatch>)>,
}

/// All events of a request, put together.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answered {
    choices: Vec<Choice>,
    prompt_logprobs: Vec<Logprobs>,
    embedding: Option<Vec<f32>>,
    usage: Option<Usage>,
    failed: Option<EngineError>,
}

impl Answered {
    fn tokens(&self) -> &[TokenId] {
        &self.choices[0].tokens
    }

    fn reason(&self) -> FinishReason {
        self.choices[0].ended.clone().unwrap().0
    }
}

fn take(answered: &mut Answered, event: Event) {
    assert!(
        answered.usage.is_none() && answered.failed.is_none(),
        "{event:?} after the end"
    );
    match event {
        Event::PromptLogprobs(part) => answered.prompt_logprobs.extend(part),
        Event::Embedding(states) => answered.embedding = Some(states),
        Event::Token {
            choice,
            token,
            text,
            logprobs,
        } => {
            let choice = at(&mut answered.choices, choice);
            choice.tokens.push(token);
            choice.text.push_str(&text);
            choice.logprobs.extend(logprobs);
        }
        Event::Finished {
            choice,
            text,
            reason,
            stop,
            ..
        } => {
            let choice = at(&mut answered.choices, choice);
            choice.text.push_str(&text);
            choice.ended = Some((reason, stop));
        }
        Event::Done(usage) => answered.usage = Some(usage),
        Event::Failed(error) => answered.failed = Some(error),
    }
}

fn at(choices: &mut Vec<Choice>, index: usize) -> &mut Choice {
    if choices.len() <= index {
        choices.resize(index + 1, Choice::default());
    }
    assert!(choices[index].ended.is_none(), "choice {index} had ended");
    &mut choices[index]
}

/// Waits for the end of a request.
fn collect(mut stream: EventStream) -> Answered {
    let mut answered = Answered::default();
    while let Some(event) = stream.blocking_next() {
        take(&mut answered, event);
    }
    assert!(answered.usage.is_some() != answered.failed.is_some());
    answered
}
