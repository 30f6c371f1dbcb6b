//! Vectors of models that generate text (Qwen3-Embedding, E5-Mistral and their kin): the states after the final norm, which
//! an engine computes for many texts in a step, as `/v1/embeddings` does.

use crate::args::{DtypeArg, EmbedArgs};
use crate::failure::{Failure, Outcome};
use crate::load_model;
use crate::ui::Progress;
use ferrum_engine::engine::{Event, EventStream};
use ferrum_engine::{
    Embedded, Engine, EngineConfig, EngineError, GenerationParams, KvDtype, Placement, Request,
};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_models::{Model, Pooling, RunnerConfig, read_model};
use ferrum_types::TokenId;
use std::collections::VecDeque;

/// Texts that are with the engine at a time.
const AT_A_TIME: usize = 64;

/// Tokens of a block of the KV pool, as [`RunnerConfig::single`] has it.
const BLOCK_SIZE: usize = 32;

/// A model that generates text, understood but not loaded.
pub(super) struct Decoder {
    model: Model,
    pooling: Option<Pooling>,
}

impl Decoder {
    pub(super) fn read(source: ModelSource) -> Outcome<Self> {
        let model = read_model(source)?;
        let pooling = Pooling::of_model(&model.source, Pooling::Last)?;
        Ok(Self { model, pooling })
    }

    /// How its files say that states are pooled; `None` for ways that are not known.
    pub(super) fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// Elements of a vector.
    pub(super) fn dimensions(&self) -> usize {
        self.model.spec.hidden_size
    }

    /// A vector of each text, at its own length.
    pub(super) fn embed(
        &self,
        args: &EmbedArgs,
        texts: &[String],
        pooling: Pooling,
    ) -> Outcome<Vec<Embedded>> {
        if args.dtype.dtype != DtypeArg::Auto {
            return Err(Failure::new(
                "--dtype is for text encoders, and this model generates text: its weights stay as they are stored",
            ));
        }
        let prompts = self.prompts(texts)?;
        let engine = self.start(args, &prompts)?;
        let handle = engine.handle();
        let (mut embedded, mut waiting) = (Vec::with_capacity(texts.len()), VecDeque::new());
        let mut bar = Progress::count("embedding");
        let total = prompts.len() as u64;
        let mut prompts = prompts.into_iter();
        loop {
            while waiting.len() < AT_A_TIME
                && let Some(prompt) = prompts.next()
            {
                let tokens = prompt.len();
                let request = Request {
                    pooling: Some(pooling),
                    ..Request::new(prompt, GenerationParams::default())
                };
                let events = handle.submit(request).map_err(failure)?;
                waiting.push_back((tokens, events));
            }
            let Some((tokens, events)) = waiting.pop_front() else {
                return Ok(embedded);
            };
            embedded.push(Embedded {
                vector: vector(events)?,
                tokens,
                cut: false,
            });
            bar.set(embedded.len() as u64, total);
        }
    }

    /// The tokens of each text.
    fn prompts(&self, texts: &[String]) -> Outcome<Vec<Vec<TokenId>>> {
        let tokenizer = load_model::tokenizer_of(&self.model)?;
        let most = self.model.spec.context_length;
        let prompt = |(i, text): (usize, &String)| {
            let tokens = tokenizer.encode(text, EncodeOptions::WRITTEN)?;
            let (number, found) = (i + 1, tokens.len());
            match found {
                0 => Err(Failure::new(format!("text {number} has no token"))),
                _ if found > most => Err(Failure::new(format!(
                    "text {number} has {found} tokens, the model reads {most} at most\nhint: cut it into shorter texts"
                ))),
                _ => Ok(tokens),
            }
        };
        texts.iter().enumerate().map(prompt).collect()
    }

    /// Loads the model, with room for these prompts.
    fn start(&self, args: &EmbedArgs, prompts: &[Vec<TokenId>]) -> Outcome<Engine> {
        let (kind, options) = (args.device.backend, args.device.options());
        let placement = Placement::for_model(kind, None, &self.model, options)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
        let max_seqs = prompts.len().clamp(1, AT_A_TIME);
        let all: usize = prompts.iter().map(Vec::len).sum();
        let max_tokens = placement.step_tokens().min(all).max(max_seqs);
        let config = RunnerConfig {
            max_seqs,
            max_tokens,
            // Those of a step and of the next one, each ending in a block of its own, and a long one that is computed in parts.
            kv_tokens: longest + 2 * (max_tokens + max_seqs * BLOCK_SIZE),
            ..RunnerConfig::single(longest)
        };
        let kv = KvDtype::for_model(&self.model);
        let sizes = (config, kv);
        let loaded = load_model::load_on(&placement, &args.weights, &self.model, sizes, None)?;
        let config = EngineConfig::default();
        Ok(Engine::start(loaded.session.into_runner(), None, config)?)
    }
}

/// Waits for the vector of a request.
fn vector(mut events: EventStream) -> Outcome<Vec<f32>> {
    while let Some(event) = events.blocking_next() {
        match event {
            Event::Embedding(vector) => return Ok(vector),
            Event::Failed(error) => return Err(failure(error)),
            _ => {}
        }
    }
    Err(Failure::new("the engine ended without a vector"))
}

fn failure(error: EngineError) -> Failure {
    Failure::new(error.to_string())
}
