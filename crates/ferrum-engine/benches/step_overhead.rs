//! What the engine adds to a step: scheduling, choosing tokens, text, events.
//!
//! `cargo bench -p ferrum-engine --bench step_overhead` runs a device that computes nothing and takes a fixed
//! time for a step, and prints for several numbers of sequences how much longer a decode step takes with the engine
//! around it, for how long the device has nothing to do between two steps, and how often the engine allocates: on a
//! device that takes one step at a time, and on one whose steps overlap with the host's work. All sequences are greedy,
//! or one is sampled by the host, or all are by the device. Medians of repeated runs.
//!
//! Then it prints a trace of a few steps that overlap: when each was submitted, when the device computed it, and when
//! it was collected. The host's work lies between collecting a step and submitting the next one but one, while the
//! device computes the next.

#![allow(clippy::unwrap_used)]

use ferrum_engine::{Engine, EngineConfig, GenerationParams, Request, StepRunner};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{
    DecoderSpec, KvLayout, Readback, RunnerConfig, StepBatch, StepOutput, Ticket, read_model,
};
use ferrum_types::{Result, TokenId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
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

/// A device whose steps take a fixed time, one after the other.
struct Timed {
    spec: DecoderSpec,
    config: RunnerConfig,
    step_time: Duration,
    overlaps: bool,
    samples: bool,
    /// When the last step ends.
    ends: Instant,
    steps: u64,
    /// Steps in flight: when each ends, and what it gives.
    flights: VecDeque<(Instant, StepOutput)>,
    spare: Vec<StepOutput>,
    trace: Arc<Mutex<Vec<Traced>>>,
}

/// When a step was where.
#[derive(Clone, Copy)]
struct Traced {
    submitted: Instant,
    begins: Instant,
    ends: Instant,
    collected: Option<Instant>,
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

    fn in_flight(&self) -> usize {
        1 + usize::from(self.overlaps)
    }

    fn samples(&self) -> bool {
        self.samples
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        let submitted = Instant::now();
        let begins = self.ends.max(submitted);
        self.ends = begins + self.step_time;
        self.steps += 1;
        self.trace.lock().unwrap().push(Traced {
            submitted,
            begins,
            ends: self.ends,
            collected: None,
        });
        let words = self.spec.vocab_size as u32 - 300;
        let mut ready = self.spare.pop().unwrap_or_default();
        ready.begin(wanted, self.spec.vocab_size, 0);
        for (row, &at) in batch.logit_rows.iter().enumerate() {
            let token = 300 + (batch.positions[at as usize] * 7 + at) % words;
            ready.set_token(row, Ok(token));
        }
        self.flights.push_back((self.ends, ready));
        Ok(Ticket::new(self.steps))
    }

    fn collect(&mut self, _: Ticket, out: &mut StepOutput) -> Result<()> {
        let (ends, mut ready) = self.flights.pop_front().unwrap();
        std::thread::sleep(ends.saturating_duration_since(Instant::now()));
        let step = self.steps as usize - self.flights.len() - 1;
        if let Some(traced) = self.trace.lock().unwrap().get_mut(step) {
            traced.collected = Some(Instant::now());
        }
        std::mem::swap(&mut ready, out);
        self.spare.push(ready);
        Ok(())
    }
}

/// What is measured.
#[derive(Clone, Copy)]
struct Case {
    step_ms: u64,
    overlaps: bool,
    seqs: usize,
    /// How many of them are not greedy.
    sampled: usize,
    /// Whether the device chooses their tokens.
    on_device: bool,
}

/// What was measured of one run.
#[derive(Clone)]
struct Measured {
    /// Of a step beyond the device's.
    micros: f64,
    /// In which the device had nothing to do, for each step.
    idle: f64,
    allocations: f64,
    /// Some steps in the middle.
    trace: Vec<Traced>,
}

/// Answers of `tokens` tokens, all at once.
fn measure(case: Case, tokens: usize, tokenizer: &Arc<Tokenizer>) -> Measured {
    let trace = Arc::new(Mutex::new(Vec::with_capacity(4 * tokens)));
    let seqs = case.seqs;
    let step_time = Duration::from_millis(case.step_ms);
    let gguf = Gguf::from_static(DEMO).unwrap();
    let runner: Box<dyn StepRunner> = Box::new(Timed {
        spec: read_model(ModelSource::Gguf(gguf)).unwrap().spec,
        config: RunnerConfig {
            context: tokens + 16,
            max_seqs: seqs,
            max_tokens: 8 * seqs,
            max_logit_rows: seqs,
            kv_tokens: seqs * (tokens + 32),
            kept_states: 0,
            layout: KvLayout::Paged { block_size: 16 },
            profile: false,
        },
        step_time,
        overlaps: case.overlaps,
        samples: case.on_device,
        ends: Instant::now(),
        steps: 0,
        flights: VecDeque::new(),
        spare: Vec::new(),
        trace: Arc::clone(&trace),
    });
    let config = EngineConfig {
        step_time: Some(Duration::from_secs(1)),
        ..EngineConfig::default()
    };
    let engine = Engine::start(runner, Some(Arc::clone(tokenizer)), config).unwrap();
    let handle = engine.handle();
    let request = |seq: usize| {
        let mut generation = GenerationParams {
            max_tokens: tokens,
            ..GenerationParams::default()
        };
        if seq < case.sampled {
            generation.sampling.temperature = 1.0;
        }
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
    let trace = trace.lock().unwrap();
    let middle = &trace[first as usize..last as usize];
    let gaps = middle.windows(2).map(|w| w[1].begins - w[0].ends);
    Measured {
        micros: each * 1e6,
        idle: gaps.sum::<Duration>().as_secs_f64() * 1e6 / (middle.len() - 1) as f64,
        allocations: (allocations - before) as f64 / steps,
        trace: middle[middle.len() / 2..][..4].to_vec(),
    }
}

fn main() {
    let tokenizer = Tokenizer::from_gguf(&Gguf::from_static(DEMO).unwrap()).unwrap();
    let tokenizer = Arc::new(tokenizer);
    println!("step ms  steps    sequences  sampled        added µs  device idle µs  allocations");
    let mut traces = Vec::new();
    let cases = [
        (0, false, 0, false),
        (0, false, 1, false),
        (4, false, 0, false),
        (4, true, 0, false),
        (4, true, 1, false),
        (4, true, usize::MAX, true),
    ];
    for (step_ms, overlaps, sampled, on_device) in cases {
        let (tokens, runs) = if step_ms == 0 { (2400, 9) } else { (400, 5) };
        for seqs in [1, 64, 256] {
            let case = Case {
                step_ms,
                overlaps,
                seqs,
                sampled: sampled.min(seqs),
                on_device,
            };
            let run = |_| measure(case, tokens / (1 + seqs / 64), &tokenizer);
            let mut runs: Vec<_> = (0..runs).map(run).collect();
            runs.sort_by(|a, b| a.micros.total_cmp(&b.micros));
            let found = &runs[runs.len() / 2];
            let (micros, idle, allocations) = (found.micros, found.idle, found.allocations);
            let steps = if overlaps { "overlap" } else { "alone" };
            let by = if on_device { "device" } else { "host" };
            let sampled = case_sampled(sampled, seqs, by);
            println!(
                "{step_ms:7}  {steps:7}  {seqs:9}  {sampled:13}  {micros:8.1}  {idle:14.1}  {allocations:11.1}"
            );
            if step_ms > 0 && sampled == "none" && seqs > 1 {
                traces.push((steps, seqs, found.trace.clone()));
            }
        }
    }
    for (steps, seqs, trace) in traces {
        print_trace(&format!("{steps}, {seqs} sequences"), &trace);
    }
}

fn case_sampled(sampled: usize, seqs: usize, by: &str) -> String {
    match sampled {
        0 => "none".into(),
        n if n < seqs => format!("{n} by {by}"),
        _ => format!("all by {by}"),
    }
}

/// Steps in microseconds since the first was submitted.
fn print_trace(title: &str, trace: &[Traced]) {
    let zero = trace[0].submitted;
    let at = |instant: Instant| (instant - zero).as_micros();
    println!("\n{title}, µs\nsubmitted  computed            collected");
    for step in trace {
        let (submitted, begins, ends) = (at(step.submitted), at(step.begins), at(step.ends));
        let collected = step.collected.map_or(0, at);
        println!("{submitted:9}  {begins:8} to {ends:6}  {collected:9}");
    }
}
