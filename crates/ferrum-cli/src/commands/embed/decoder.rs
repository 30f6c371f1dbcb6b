//! Vectors of decoders, such as Qwen3-Embedding and EmbeddingGemma: the states after the final norm, which an engine computes
//! for many texts in a step, as `/v1/embeddings` does.

use crate::args::{DtypeArg, EmbedArgs};
use crate::failure::{Failure, Outcome};
use crate::load_model;
use crate::ui::Progress;
use ferrum_engine::engine::{Event, EventStream};
use ferrum_engine::{
    CacheWriter, Embedded, Engine, EngineConfig, EngineError, GenerationParams, KvDtype, Placement,
    Request,
};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_models::{
    DenseLayers, EmbeddingPrompts, KvLayout, Model, Pooling, RunnerConfig, StatedPooling,
    read_model,
};
use ferrum_types::TokenId;
use std::collections::VecDeque;

/// Texts of a step at most. As many wait for the next one, so that the engine never does.
const MAX_SEQS: usize = 64;

/// The same for models with recurrent states, of which each text has one.
const MAX_STATES: usize = 4;

/// Tokens of a block of the KV pool.
const BLOCK_SIZE: usize = 32;

/// A decoder, understood but not loaded.
pub(super) struct Decoder {
    model: Model,
    pooling: Option<Pooling>,
    /// What makes embeddings of pooled states.
    dense: DenseLayers,
    prompts: EmbeddingPrompts,
}

impl Decoder {
    pub(super) fn read(source: ModelSource) -> Outcome<Self> {
        let model = read_model(source)?;
        let pooling = StatedPooling::of(&model.source)?.or(model.usual_pooling());
        let dense = DenseLayers::of(&model.source, model.spec.hidden_size)?;
        let prompts = EmbeddingPrompts::of(&model.source)?;
        Ok(Self {
            model,
            pooling,
            dense,
            prompts,
        })
    }

    /// How its files say that states are pooled; `None` for ways that are not known.
    pub(super) fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// What it may be given before texts.
    pub(super) fn prompts(&self) -> &EmbeddingPrompts {
        &self.prompts
    }

    /// Elements of a vector.
    pub(super) fn dimensions(&self) -> usize {
        self.dense.dimensions(self.model.spec.hidden_size)
    }

    /// A vector of each text, at its own length, and what writes the packed weights, if they are to be kept.
    pub(super) fn embed(
        &self,
        args: &EmbedArgs,
        texts: &[String],
        pooling: Pooling,
    ) -> Outcome<(Vec<Embedded>, Option<CacheWriter>)> {
        if args.dtype.dtype != DtypeArg::Auto {
            return Err(Failure::new(
                "--dtype is for text encoders, and this model is a decoder: its weights stay as they are stored",
            ));
        }
        let prompts = self.tokens(texts)?;
        let (engine, kept) = self.start(args, &prompts)?;
        let handle = engine.handle();
        let (mut embedded, mut waiting) = (Vec::with_capacity(texts.len()), VecDeque::new());
        let mut bar = Progress::count("embedding");
        let total = prompts.len() as u64;
        let mut prompts = prompts.into_iter();
        loop {
            while waiting.len() < 2 * MAX_SEQS
                && let Some(prompt) = prompts.next()
            {
                let tokens = prompt.len();
                let request = Request {
                    pooling: Some(pooling),
                    ..Request::new(prompt, GenerationParams::default())
                };
                waiting.push_back((tokens, handle.submit(request)));
            }
            let Some((tokens, events)) = waiting.pop_front() else {
                return Ok((embedded, kept));
            };
            let number = embedded.len() + 1;
            let failed = |e: EngineError| Failure::new(format!("text {number}: {e}"));
            embedded.push(Embedded {
                vector: self.dense.apply(events.and_then(vector).map_err(failed)?),
                tokens,
                cut: false,
            });
            bar.set(embedded.len() as u64, total);
        }
    }

    /// The tokens of each text.
    fn tokens(&self, texts: &[String]) -> Outcome<Vec<Vec<TokenId>>> {
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
    fn start(
        &self,
        args: &EmbedArgs,
        prompts: &[Vec<TokenId>],
    ) -> Outcome<(Engine, Option<CacheWriter>)> {
        let (kind, options) = (args.device.backend, args.device.options());
        let placement = Placement::for_model(kind, None, &self.model, options)?;
        let has_states = RunnerConfig::single(1)
            .state_slots(&self.model.spec)
            .is_some();
        let max_seqs = if has_states { MAX_STATES } else { MAX_SEQS };
        let step_tokens = match self.model.spec.is_causal() {
            true => placement.step_tokens(),
            // Each is computed in one step.
            false => {
                let longest = prompts.iter().map(Vec::len).max();
                placement.step_tokens().max(longest.unwrap_or(0))
            }
        };
        let sizes = sizes(prompts, max_seqs, step_tokens);
        let sizes = (sizes, KvDtype::for_model(&self.model));
        let loaded = load_model::load_on(&placement, &args.weights, &self.model, sizes, None)?;
        let runner = loaded.session.into_runner();
        let engine = Engine::start(runner, None, EngineConfig::default())?;
        Ok((engine, loaded.kept))
    }
}

/// Sizes for these prompts, of which up to `max_seqs` are computed together.
fn sizes(prompts: &[Vec<TokenId>], max_seqs: usize, step_tokens: usize) -> RunnerConfig {
    let lens = || prompts.iter().map(Vec::len);
    let longest = lens().max().unwrap_or(1);
    let max_seqs = prompts.len().clamp(1, max_seqs);
    let max_tokens = step_tokens.min(lens().sum()).max(1);
    RunnerConfig {
        max_seqs,
        max_tokens,
        // The engine takes no more sequences than a step has rows for.
        max_logit_rows: max_seqs,
        // Those of a step and of the next one, each ending in a block of its own, and a long one that is computed in parts.
        kv_tokens: longest + 2 * (max_tokens + max_seqs * BLOCK_SIZE),
        layout: KvLayout::Grouped {
            block_size: BLOCK_SIZE,
        },
        ..RunnerConfig::single(longest)
    }
}

/// Waits for the vector of a request.
fn vector(mut events: EventStream) -> Result<Vec<f32>, EngineError> {
    while let Some(event) = events.blocking_next() {
        match event {
            Event::Embedding(vector) => return Ok(vector),
            Event::Failed(error) => return Err(error),
            _ => {}
        }
    }
    Err(EngineError::Failed("it ended without a vector".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_engine::scheduler::SchedulerConfig;

    #[test]
    fn texts_are_computed_together() {
        for (count, len, seqs, tokens) in [(1, 9, 1, 9), (100, 3, 64, 300), (100, 300, 64, 512)] {
            let sizes = sizes(&vec![vec![0; len]; count], MAX_SEQS, 512);
            let scheduler = SchedulerConfig::for_runner(&sizes);
            assert_eq!((scheduler.max_seqs, sizes.max_tokens), (seqs, tokens));
            assert!(sizes.max_logit_rows >= seqs && sizes.context == len);
        }
    }
}
