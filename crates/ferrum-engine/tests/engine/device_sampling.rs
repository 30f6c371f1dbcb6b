//! Tokens that a device chooses are those that the host would.

use crate::{Answered, collect, demo, demo_tokenizer, encode};
use ferrum_engine::sampler::SamplingParams;
use ferrum_engine::{Engine, EngineConfig, Generation, Request, StepRunner};
use ferrum_models::{DecoderSpec, Readback, RunnerConfig, StepBatch, StepOutput, Ticket};
use ferrum_types::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A runner that says whether it samples, and counts the rows of logits that are read.
struct Told {
    runner: Box<dyn StepRunner>,
    samples: bool,
    rows: Arc<AtomicUsize>,
}

impl StepRunner for Told {
    fn backend(&self) -> &'static str {
        self.runner.backend()
    }

    fn spec(&self) -> &DecoderSpec {
        self.runner.spec()
    }

    fn config(&self) -> &RunnerConfig {
        self.runner.config()
    }

    fn samples(&self) -> bool {
        self.samples && self.runner.samples()
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        let rows = wanted.iter().filter(|w| **w == Readback::Logits).count();
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.runner.submit(batch, wanted)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.runner.collect(ticket, out)
    }
}

/// All settings, four sequences each, and how many rows of logits were read.
fn answers(samples: bool) -> (Vec<Answered>, usize) {
    let rows = Arc::new(AtomicUsize::new(0));
    let runner: Box<dyn StepRunner> = Box::new(Told {
        runner: crate::invariance::session(&demo(), crate::invariance::ROOMY).into_runner(),
        samples,
        rows: Arc::clone(&rows),
    });
    let engine = Engine::start(runner, Some(demo_tokenizer()), EngineConfig::default()).unwrap();
    let prompt = encode("Tell me a story.");
    let streams: Vec<_> = settings()
        .into_iter()
        .flat_map(|(sampling, logprobs)| [(sampling.clone(), logprobs), (sampling, None)])
        .enumerate()
        .map(|(i, (sampling, logprobs))| {
            let generation = Generation {
                sampling: SamplingParams {
                    seed: i as u64,
                    ..sampling
                },
                max_tokens: 24,
                ..Generation::default()
            };
            let mut request = Request::new(prompt.clone(), generation);
            request.logprobs = logprobs;
            request.n = 2;
            engine.handle().submit(request).unwrap()
        })
        .collect();
    let answers = streams.into_iter().map(collect).collect();
    (answers, rows.load(Ordering::Relaxed))
}

/// What devices do all of.
fn settings() -> Vec<(SamplingParams, Option<usize>)> {
    let warm = SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    };
    vec![
        (SamplingParams::default(), Some(3)),
        (warm.clone(), Some(0)),
        (
            SamplingParams {
                top_k: 30,
                ..warm.clone()
            },
            Some(5),
        ),
        (
            SamplingParams {
                top_p: 0.9,
                min_p: 0.02,
                ..warm.clone()
            },
            None,
        ),
        (
            SamplingParams {
                repeat_penalty: 1.2,
                repeat_last_n: 8,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                logit_bias: vec![(300, 2.0), (301, f32::NEG_INFINITY)],
                ..warm
            },
            Some(2),
        ),
    ]
}

#[test]
fn a_device_chooses_what_the_host_would() {
    let (host, read) = answers(false);
    assert!(read > 0);
    let (device, read) = answers(true);
    assert_eq!(read, 0, "rows of logits that nobody asked for");
    crate::invariance::assert_same(&device, &host, "on the device");
}
