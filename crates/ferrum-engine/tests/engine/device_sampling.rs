//! Tokens that a device chooses are those that the host would, also when its steps overlap.

use crate::captured::fixture;
use crate::invariance::{ROOMY, assert_same, session};
use crate::{Answered, collect, demo};
use ferrum_engine::sampler::SamplingParams;
use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, Engine, EngineConfig, GenerationParams, KvDtype,
    Request, StepRunner,
};
use ferrum_models::{DecoderSpec, Readback, RunnerConfig, StepBatch, StepOutput, Ticket};
use ferrum_test_support::skip;
use ferrum_types::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A runner of which something is hidden. It counts the rows of logits that are read, and the steps that were submitted
/// before the one before them was collected.
struct Told {
    runner: Box<dyn StepRunner>,
    samples: bool,
    overlaps: bool,
    counts: Arc<Counts>,
    in_flight: usize,
}

#[derive(Default)]
struct Counts {
    rows: AtomicUsize,
    early: AtomicUsize,
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

    fn in_flight(&self) -> usize {
        if self.overlaps {
            self.runner.in_flight()
        } else {
            1
        }
    }

    fn samples(&self) -> bool {
        self.samples && self.runner.samples()
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        let rows = wanted.iter().filter(|w| **w == Readback::Logits).count();
        self.counts.rows.fetch_add(rows, Ordering::Relaxed);
        self.counts
            .early
            .fetch_add(self.in_flight, Ordering::Relaxed);
        self.in_flight += 1;
        self.runner.submit(batch, wanted)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.in_flight -= 1;
        self.runner.collect(ticket, out)
    }
}

/// All settings, two requests each for `n` choices.
fn answers(
    runner: Box<dyn StepRunner>,
    n: usize,
    [samples, overlaps]: [bool; 2],
) -> (Vec<Answered>, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    let runner: Box<dyn StepRunner> = Box::new(Told {
        runner,
        samples,
        overlaps,
        counts: Arc::clone(&counts),
        in_flight: 0,
    });
    let engine = Engine::start(runner, None, EngineConfig::default()).unwrap();
    let prompt: Vec<_> = (0..7).map(|at| 60 + 9 * at).collect();
    let streams: Vec<_> = settings()
        .into_iter()
        .flat_map(|(sampling, logprobs)| [(sampling.clone(), logprobs), (sampling, None)])
        .enumerate()
        .map(|(i, (sampling, logprobs))| {
            let generation = GenerationParams {
                sampling: SamplingParams {
                    seed: i as u64,
                    ..sampling
                },
                max_tokens: 16,
                ..GenerationParams::default()
            };
            let mut request = Request::new(prompt.clone(), generation);
            request.logprobs = logprobs;
            request.n = n;
            engine.handle().submit(request).unwrap()
        })
        .collect();
    (streams.into_iter().map(collect).collect(), counts)
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
                logit_bias: vec![(200, 2.0), (201, f32::NEG_INFINITY)],
                ..warm
            },
            Some(2),
        ),
    ]
}

#[test]
fn a_device_chooses_what_the_host_would() {
    let runner = || session(&demo(), ROOMY).into_runner();
    let (host, counts) = answers(runner(), 2, [false, true]);
    assert!(counts.rows.load(Ordering::Relaxed) > 0);
    let (device, counts) = answers(runner(), 2, [true, true]);
    let read = counts.rows.load(Ordering::Relaxed);
    assert_eq!(read, 0, "rows of logits that nobody asked for");
    assert_same(&device, &host, "on the device");
}

#[test]
fn steps_of_a_gpu_overlap() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
    }
    for kind in [BackendKind::Gpu, BackendKind::Cuda] {
        // Which sequences share a step depends on when they come.
        let options = BackendOptions {
            batch_invariant: true,
            ..BackendOptions::default()
        };
        let device = match BackendDispatch::from_kind(kind, options) {
            Ok(device) => device,
            Err(error) => {
                skip(error);
                continue;
            }
        };
        let model = fixture("llama-gptq4");
        let load = || device.load(&model, ROOMY, KvDtype::F16, &mut |_, _| ());
        let runner = || load().unwrap().into_runner();
        let (one_by_one, counts) = answers(runner(), 1, [true, false]);
        assert_eq!(counts.early.load(Ordering::Relaxed), 0, "{kind}");
        let (overlapped, counts) = answers(runner(), 1, [true, true]);
        let early = counts.early.load(Ordering::Relaxed);
        assert!(early > 10, "{kind}: {early} steps overlap");
        assert_same(
            &overlapped,
            &one_by_one,
            &format!("in steps of {kind} that overlap"),
        );
    }
}
