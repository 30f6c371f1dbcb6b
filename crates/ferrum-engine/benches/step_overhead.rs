//! What the engine adds to a step: scheduling, choosing tokens, text, events.
//!
//! `cargo bench -p ferrum-engine --bench step_overhead` runs a device that computes nothing and takes a fixed
//! time for a step, and prints for several numbers of greedy sequences how much longer a decode step takes with
//! the engine around it, and how often it allocates. Medians of repeated runs.

#![allow(clippy::unwrap_used)]

use ferrum_engine::{
    AdapterLoader, Engine, EngineConfig, Generation, LoadedAdapter, Request, StepRunner,
};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, ModelSource};
use ferrum_kernels::{PagedKvShape, Span};
use ferrum_models::{DecoderSpec, KvLayout, RunnerConfig, StepBatch, read_model};
use ferrum_types::{AdapterId, Result, TokenId};
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
    chosen: Vec<TokenId>,
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

    fn pool(&self) -> PagedKvShape {
        self.config.pool_shape(&self.spec)
    }

    fn step(&mut self, batch: &StepBatch) -> Result<()> {
        self.ends = self.ends.max(Instant::now()) + self.step_time;
        let words = self.spec.vocab_size as u32 - 300;
        let chosen = |&row: &u32| 300 + (batch.positions[row as usize] * 7 + row) % words;
        self.chosen.clear();
        self.chosen.extend(batch.logit_rows.iter().map(chosen));
        Ok(())
    }

    fn read_logits(&mut self, out: &mut [f32]) -> Result<()> {
        out.fill(0.0);
        Ok(())
    }

    fn read_hidden(&mut self, out: &mut [f32]) -> Result<()> {
        out.fill(0.0);
        Ok(())
    }

    fn read_argmax(&mut self, out: &mut [TokenId]) -> Result<()> {
        std::thread::sleep(self.ends.saturating_duration_since(Instant::now()));
        out.copy_from_slice(&self.chosen);
        Ok(())
    }

    fn take_spans(&mut self) -> Result<Vec<Span>> {
        Ok(Vec::new())
    }

    fn adapter_loader(&self) -> AdapterLoader {
        AdapterLoader::new(|_| Ok(LoadedAdapter::new(())))
    }

    fn add_adapter(&mut self, _: AdapterId, _: LoadedAdapter) -> Result<()> {
        Ok(())
    }

    fn unload_adapter(&mut self, _: AdapterId) -> bool {
        true
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
        chosen: Vec::new(),
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
