//! What the engine adds to a step: scheduling, choosing tokens, text, events.
//!
//! `cargo bench -p ferrum-engine --bench step_overhead` runs a device that computes nothing and takes a fixed
//! time for a step, and prints for several numbers of greedy sequences how much longer a decode step takes with
//! the engine around it, and how often it allocates. Medians of repeated runs.

#![allow(clippy::unwrap_used)]

use ferrum_engine::{Engine, EngineConfig, Generation, Request, StepRunner};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{
    DecoderSpec, KvLayout, Readback, RunnerConfig, StepBatch, StepOutput, Ticket, read_model,
};
use ferrum_types::{Result, TokenId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

static DEMO: &[u8] = include_bytes!("../../../assets/demo/ferrum-demo.gguf");

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; counting touches no memory of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` through `alloc` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A device whose steps take a fixed time.
struct Timed {
    spec: DecoderSpec,
    config: RunnerConfig,
    step_time: Duration,
    /// When the last step has ended.
    ends: Instant,
    ready: StepOutput,
    steps: u64,
}

impl StepRunner for Timed {
    fn backend(&self) -> &'static str {
        "timed"
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn config(&self) -> &RunnerConfig {
        &self.config
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.ends = self.ends.max(Instant::now()) + self.step_time;
        self.steps += 1;
        let words = self.spec.vocab_size as u32 - 300;
        self.ready.begin(wanted, self.spec.vocab_size, 0);
        for (row, &at) in batch.logit_rows.iter().enumerate() {
            let token = 300 + (batch.positions[at as usize] * 7 + at) % words;
            self.ready.set_token(row, Some(token));
        }
        Ok(Ticket::new(self.steps))
    }

    fn collect(&mut self, _: Ticket, out: &mut StepOutput) -> Result<()> {
        std::thread::sleep(self.ends.saturating_duration_since(Instant::now()));
        std::mem::swap(&mut self.ready, out);
        Ok(())
    }
}

/// What was measured of one run.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Measured {
    /// Of a step beyond the device's.
    micros: f64,
    allocations: f64,
}

/// `seqs` greedy answers of `tokens` tokens, all at once.
fn measure(
    seqs: usize,
    tokens: usize,
    step_time: Duration,
    tokenizer: &Arc<Tokenizer>,
) -> Measured {
    let gguf = Gguf::from_static(DEMO).unwrap();
    let runner: Box<dyn StepRunner> = Box::new(Timed {
        spec: read_model(ModelSource::Gguf(gguf)).unwrap().spec,
        config: RunnerConfig {
            context: tokens + 16,
            max_seqs: seqs,
            max_tokens: 8 * seqs,
            max_logit_rows: seqs,
            kv_tokens: seqs * (tokens + 32),
            layout: KvLayout::Paged { block_size: 16 },
            profile: false,
        },
        step_time,
        ends: Instant::now(),
        ready: StepOutput::default(),
        steps: 0,
    });
    let config = EngineConfig {
        step_time: Some(Duration::from_secs(1)),
        ..EngineConfig::default()
    };
    let engine = Engine::start(runner, Some(Arc::clone(tokenizer)), config).unwrap();
    let handle = engine.handle();
    let request = |seq: usize| {
        let generation = Generation {
            max_tokens: tokens,
            ..Generation::default()
        };
        Request::new(vec![seq as TokenId; 8], generation)
    };
    let requests: Vec<_> = (0..seqs).map(request).collect();
    let streams = requests.into_iter().map(|r| handle.submit(r).unwrap());
    let streams: Vec<_> = streams.collect();
    // The first steps have prompts and grow what is kept.
    let after = |steps: u64| {
        while handle.stats().steps < steps {
            std::thread::sleep(Duration::from_micros(200));
        }
        let allocations = ALLOCATIONS.load(Ordering::Relaxed);
        (Instant::now(), handle.stats().steps, allocations)
    };
    let (began, first, before) = after(tokens as u64 / 8);
    let (ended, last, allocations) = after(tokens as u64 * 7 / 8);
    let steps = (last - first) as f64;
    drop(streams);
    engine.shutdown();
    let each = (ended - began).as_secs_f64() / steps - step_time.as_secs_f64();
    Measured {
        micros: each * 1e6,
        allocations: (allocations - before) as f64 / steps,
    }
}

fn main() {
    let tokenizer = Tokenizer::from_gguf(&Gguf::from_static(DEMO).unwrap()).unwrap();
    let tokenizer = Arc::new(tokenizer);
    println!("step ms  sequences  added µs  allocations");
    for (step_ms, tokens, runs) in [(0, 2400, 9), (4, 400, 5)] {
        let step_time = Duration::from_millis(step_ms);
        for seqs in [1, 64, 256] {
            let run = |_| measure(seqs, tokens / (1 + seqs / 64), step_time, &tokenizer);
            let mut runs: Vec<_> = (0..runs).map(run).collect();
            runs.sort_by(|a, b| a.micros.total_cmp(&b.micros));
            let Measured {
                micros,
                allocations,
            } = runs[runs.len() / 2];
            println!("{step_ms:7}  {seqs:9}  {micros:8.1}  {allocations:11.1}");
        }
    }
}
