//! The engine on a device that captures steps and overlaps with the host: the answers are those of a device that does
//! neither, and nearly all steps are replayed.

use crate::invariance::assert_same;
use crate::{Answered, collect, greedy, sampled};
use ferrum_conformance::minimal::Minimal;
use ferrum_engine::{Engine, EngineConfig, Request, StepRunner};
use ferrum_formats::ModelSource;
use ferrum_kernels::reference::{Mixed, Reference};
use ferrum_kernels::{KvF32, LlmBackend};
use ferrum_models::{
    CacheGroup, DecoderRunner, DecoderSpec, Dequantized, GraphCounts, KvLayout, Model, ModelRunner,
    Readback, RunnerConfig, StepBatch, StepOutput, Ticket, load_weights, read_model,
};
use ferrum_types::{Result, TokenId};
use half::bf16;
use std::path::Path;
use std::sync::{Arc, Mutex};

const CONFIG: RunnerConfig = RunnerConfig {
    context: 96,
    max_seqs: 6,
    max_tokens: 48,
    max_logit_rows: 48,
    kv_tokens: 6 * 96,
    layout: KvLayout::Grouped { block_size: 8 },
    kept_states: 0,
    profile: false,
};

pub(crate) fn fixture(name: &str) -> Model {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    read_model(ModelSource::open(models.join(name)).unwrap()).unwrap()
}

fn runner<B: LlmBackend>(device: &B, model: &Model) -> DecoderRunner<B> {
    let weights = load_weights::<B, Dequantized>(device, model, &mut |_, _| ()).unwrap();
    let runner = ModelRunner::<B, KvF32>::new(device, model.spec.clone(), weights, CONFIG);
    runner.unwrap().into()
}

/// What came of its steps.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    graphs: GraphCounts,
    steps: u64,
    bytes: u64,
}

/// A runner that tells how its steps were run.
struct Counted {
    runner: DecoderRunner<Minimal>,
    device: Minimal,
    counts: Arc<Mutex<Counts>>,
}

impl StepRunner for Counted {
    fn backend(&self) -> &'static str {
        "minimal"
    }

    fn spec(&self) -> &DecoderSpec {
        self.runner.spec()
    }

    fn config(&self) -> &RunnerConfig {
        self.runner.config()
    }

    fn cache_groups(&self) -> Vec<CacheGroup> {
        self.runner.cache_groups().to_vec()
    }

    fn in_flight(&self) -> usize {
        self.runner.in_flight()
    }

    fn samples(&self) -> bool {
        self.runner.samples()
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        let before = self.device.uploads().bytes;
        let ticket = self.runner.submit(batch, wanted)?;
        let mut counts = self.counts.lock().unwrap();
        counts.graphs = self.runner.graph_counts();
        counts.steps += 1;
        counts.bytes += self.device.uploads().bytes - before;
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.runner.collect(ticket, out)
    }
}

/// Answers on a runner to some requests at once.
fn answers(runner: Box<dyn StepRunner>, change: fn(usize, &mut Request)) -> Vec<Answered> {
    let engine = Engine::start(runner, None, EngineConfig::default()).unwrap();
    let request = |i: usize| {
        let prompt: Vec<_> = (0..6 + i)
            .map(|at| (at * (i + 3) % 11 + 5) as TokenId)
            .collect();
        let mut request = match i % 2 {
            0 => greedy(&prompt, 20 + 3 * i),
            _ => sampled(&prompt, 20 + 3 * i, i as u64),
        };
        change(i, &mut request);
        engine.handle().submit(request).unwrap()
    };
    let streams: Vec<_> = (0..9).map(request).collect();
    streams.into_iter().map(collect).collect()
}

fn on_both(name: &str, change: fn(usize, &mut Request)) -> Counts {
    let model = fixture(name);
    let plain = runner(&Reference::<Mixed<bf16>>::new(), &model);
    let expected = answers(Box::new(plain), change);
    let (device, counts) = (Minimal::default(), Arc::default());
    let captured = Counted {
        runner: runner(&device, &model),
        device,
        counts: Arc::clone(&counts),
    };
    let found = answers(Box::new(captured), change);
    assert_same(&found, &expected, name);
    let told = counts.lock().unwrap();
    *told
}

#[test]
fn answers_of_replayed_steps_are_the_same() {
    for name in ["llama3-tied", "mistral-window"] {
        let Counts {
            graphs,
            steps,
            bytes,
        } = on_both(name, |_, _| ());
        // Sizes 1, 2, 4 and 6.
        assert!(graphs.held <= 4, "{name}: {graphs:?}");
        assert!(graphs.captured <= 4 + graphs.reset, "{name}: {graphs:?}");
        assert!(
            graphs.replayed * 10 > steps * 7,
            "{name}: {graphs:?} of {steps}"
        );
        // Whole tables of 12 blocks would be more than what all else takes.
        assert!(
            bytes / steps < 6 * (5 * 4 + 64 + 100),
            "{name}: {bytes} in {steps}"
        );
    }
}

#[test]
fn so_are_those_with_drafts_and_what_else_there_is() {
    let change = |i: usize, request: &mut Request| match i % 4 {
        0 => request.draft_tokens = 4,
        1 => request.generation.sampling.repeat_penalty = 1.2,
        2 => request.logprobs = Some(2),
        _ => request.draft_tokens = 2,
    };
    let Counts { graphs, steps, .. } = on_both("llama3-tied", change);
    // Four sizes, drafts of up to 1, 2 and 4 tokens and none, tokens that the device chooses or not.
    assert!(graphs.held <= 4 * 4 * 2, "{graphs:?}");
    assert!(graphs.replayed > 10, "{graphs:?} of {steps}");
}
