//! The hand-over between handles and the engine's thread in many orders: `just shuttle`.
//!
//! With the feature `shuttle`, the engine's threads meet on types of `shuttle`, which decides at each use who goes on. A
//! thread that nobody wakes is a deadlock, and fails the test with the order that led to it. Channels of events are
//! `tokio`'s: nothing happens inside of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_engine::engine::Clock;
use ferrum_engine::{
    Engine, EngineConfig, EngineError, EngineHandle, Event, EventStream, FinishReason,
    GenerationParams, Health, Request, StepRunner, TaskConfig, TaskEngine, TaskModel,
};
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{
    DecoderSpec, KvLayout, Readback, RowOutput, RunnerConfig, StepBatch, StepOutput, Ticket,
    read_model,
};
use ferrum_types::{Error, Result, TokenId};
use shuttle::future::block_on;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner, thread};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::LazyLock;
use std::time::Duration;

static DEMO: &[u8] = include_bytes!("../../../assets/demo/ferrum-demo.gguf");

static SPEC: LazyLock<DecoderSpec> = LazyLock::new(|| {
    let model = read_model(ModelSource::Gguf(Gguf::from_static(DEMO).unwrap()));
    let mut spec = model.unwrap().spec;
    spec.vocab_size = 64;
    spec
});

const CONFIG: RunnerConfig = RunnerConfig {
    context: 32,
    max_seqs: 2,
    max_tokens: 8,
    max_logit_rows: 2,
    kv_tokens: 64,
    kept_states: 0,
    layout: KvLayout::Paged { block_size: 4 },
    profile: false,
};

/// Orders of each kind that a test tries.
const ORDERS: usize = 1000;

/// Tries orders that are drawn at each step, and orders with few changes at the worst places.
fn explore(test: impl Fn() + Copy + Send + Sync + 'static) {
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let mut config = Config::new();
        config.stack_size = 1 << 20;
        config.silence_warnings = true;
        assert_eq!(Runner::new(scheduler, config).run(test), ORDERS);
    };
    run(Box::new(RandomScheduler::new(ORDERS)));
    run(Box::new(PctScheduler::new(3, ORDERS)));
}

/// [`explore`] with something to know.
fn explore_with<T: Copy + Send + Sync + 'static>(
    value: T,
    test: impl Fn(T) + Copy + Send + Sync + 'static,
) {
    explore(move || test(value));
}

/// What becomes of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Error,
    Panic,
}

/// Answers each token with the next one.
struct Counter {
    in_flight: usize,
    /// The step that does not end well.
    fault: Option<(u64, Fault)>,
    /// What the rows of the last step chose.
    chosen: Vec<TokenId>,
    ready: VecDeque<StepOutput>,
    steps: u64,
}

impl Counter {
    fn new(in_flight: usize) -> Self {
        Self {
            in_flight,
            fault: None,
            chosen: Vec::new(),
            ready: VecDeque::new(),
            steps: 0,
        }
    }

    fn start(self, max_waiting: usize) -> Engine {
        let config = EngineConfig {
            max_waiting,
            clock: Clock::manual(),
            ..EngineConfig::default()
        };
        let runner: Box<dyn StepRunner> = Box::new(self);
        Engine::start(runner, None, config).unwrap()
    }
}

impl StepRunner for Counter {
    fn backend(&self) -> &'static str {
        "counter"
    }

    fn spec(&self) -> &DecoderSpec {
        &SPEC
    }

    fn config(&self) -> &RunnerConfig {
        &CONFIG
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        // Others go on while the device works.
        thread::yield_now();
        let mut tokens = batch.tokens.clone();
        for pending in &batch.pending_tokens {
            tokens[pending.token as usize] = self.chosen[pending.row as usize];
        }
        let mut out = StepOutput::default();
        out.begin(wanted, SPEC.vocab_size, 0);
        self.chosen.clear();
        for (index, row) in batch.logit_rows.iter().enumerate() {
            let token = (tokens[*row as usize] + 1) % SPEC.vocab_size as TokenId;
            self.chosen.push(token);
            out.set_token(index, Ok(token));
            if let RowOutput::Logits(logits) = out.row(index) {
                logits.fill(0.0);
                logits[token as usize] = 1.0;
            }
        }
        self.ready.push_back(out);
        assert!(self.ready.len() <= self.in_flight);
        self.steps += 1;
        match self.fault {
            Some((step, Fault::Error)) if step == self.steps => Err(Error::Device {
                backend: "counter",
                op: "step",
                reason: "the device is lost".into(),
            }),
            // Round the hook, in which `shuttle` reports that a test failed.
            Some((step, Fault::Panic)) if step == self.steps => resume_unwind(Box::new("lost")),
            _ => Ok(Ticket::new(self.steps)),
        }
    }

    fn collect(&mut self, _: Ticket, out: &mut StepOutput) -> Result<()> {
        thread::yield_now();
        *out = self.ready.pop_front().unwrap();
        Ok(())
    }
}

const TOKENS: usize = 3;

fn request(first: TokenId) -> Request {
    let generation = GenerationParams {
        max_tokens: TOKENS,
        ..GenerationParams::default()
    };
    Request::new(vec![first, first + 1], generation)
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Whole,
    Cancelled,
    Failed(EngineError),
}

/// Reads a stream to its end: what comes is the beginning of the answer, and there is one last event.
fn read(mut stream: EventStream, first: TokenId) -> Outcome {
    let (mut tokens, mut reason) = (Vec::new(), None);
    let mut outcome = None;
    while let Some(event) = block_on(stream.next()) {
        assert_eq!(outcome, None, "{event:?} after the last one");
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::Finished { reason: why, .. } => reason = Some(why),
            Event::Done(usage) => {
                assert_eq!(usage.completion_tokens, tokens.len());
                outcome = Some(match reason {
                    Some(FinishReason::Length) => Outcome::Whole,
                    Some(FinishReason::Cancelled) => Outcome::Cancelled,
                    ref other => panic!("it ended by {other:?}"),
                });
            }
            Event::Failed(error) => outcome = Some(Outcome::Failed(error)),
            other => panic!("{other:?}"),
        }
    }
    let expected: Vec<_> = (first + 2..).take(TOKENS).collect();
    assert!(expected.starts_with(&tokens), "{tokens:?}");
    let outcome = outcome.expect("a stream has a last event");
    assert!(outcome != Outcome::Whole || tokens == expected);
    outcome
}

/// Asks and reads.
fn ask(engine: &EngineHandle, first: TokenId) -> Outcome {
    match engine.submit(request(first)) {
        Ok(stream) => read(stream, first),
        Err(error) => Outcome::Failed(error),
    }
}

/// Asks on a thread of its own.
fn asking(engine: &Engine, first: TokenId) -> thread::JoinHandle<Outcome> {
    let engine = engine.handle();
    thread::spawn(move || ask(&engine, first))
}

/// Whether a request was answered, or refused because the engine ends.
fn is_answered(outcome: &Outcome) -> bool {
    let ends = Outcome::Failed(EngineError::ShuttingDown);
    *outcome == Outcome::Whole || *outcome == ends
}

/// Waits until nothing is left of all requests.
fn rests(engine: &EngineHandle) {
    loop {
        let stats = engine.stats();
        if (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0) {
            return;
        }
        thread::yield_now();
    }
}

#[test]
fn a_request_to_an_engine_that_ends_is_answered_or_refused() {
    explore(|| {
        let engine = Counter::new(1).start(8);
        let askers = [asking(&engine, 5), asking(&engine, 20)];
        engine.shutdown();
        for asker in askers {
            let outcome = asker.join().unwrap();
            assert!(is_answered(&outcome), "{outcome:?}");
        }
    });
}

#[test]
fn an_engine_that_drains_answers_what_it_took() {
    explore(|| {
        let engine = Counter::new(2).start(8);
        let stream = engine.handle().submit(request(30)).unwrap();
        let asker = asking(&engine, 5);
        let handle = engine.handle();
        let drainer = thread::spawn(move || {
            handle.drain();
            block_on(handle.stopped());
            assert_eq!(handle.health(), Health::Stopped);
        });
        // It was there before.
        assert_eq!(read(stream, 30), Outcome::Whole);
        let outcome = asker.join().unwrap();
        assert!(is_answered(&outcome), "{outcome:?}");
        drainer.join().unwrap();
    });
}

#[test]
fn a_request_that_is_cancelled_during_a_step_ends() {
    for in_flight in [1, 2] {
        explore_with(in_flight, |in_flight| {
            let engine = Counter::new(in_flight).start(8);
            let stream = engine.handle().submit(request(5)).unwrap();
            let (handle, id) = (engine.handle(), stream.id());
            let canceller = thread::spawn(move || handle.cancel(id));
            let other = asking(&engine, 20);
            let outcome = read(stream, 5);
            assert!(
                [Outcome::Whole, Outcome::Cancelled].contains(&outcome),
                "{outcome:?}"
            );
            assert_eq!(other.join().unwrap(), Outcome::Whole);
            canceller.join().unwrap();
            rests(&engine.handle());
        });
    }
}

#[test]
fn a_stream_that_is_dropped_leaves_nothing_behind() {
    for in_flight in [1, 2] {
        explore_with(in_flight, |in_flight| {
            let engine = Counter::new(in_flight).start(8);
            let mut stream = engine.handle().submit(request(5)).unwrap();
            let other = asking(&engine, 20);
            block_on(stream.next());
            drop(stream);
            assert_eq!(other.join().unwrap(), Outcome::Whole);
            rests(&engine.handle());
            assert_eq!(ask(&engine.handle(), 40), Outcome::Whole);
        });
    }
}

#[test]
fn what_breaks_an_engine_is_told_to_everybody() {
    for fault in [Fault::Error, Fault::Panic] {
        explore_with(fault, |fault| {
            let mut runner = Counter::new(2);
            runner.fault = Some((2, fault));
            let engine = runner.start(8);
            let askers = [asking(&engine, 5), asking(&engine, 20)];
            for asker in askers {
                let reason = match asker.join().unwrap() {
                    Outcome::Failed(EngineError::Failed(reason)) => reason,
                    other => panic!("{other:?}"),
                };
                assert!(reason.contains("lost"), "{reason}");
                assert_eq!(engine.handle().health(), Health::Failed(reason));
            }
        });
    }
}

#[test]
fn the_queue_has_its_bound_and_its_places_come_back() {
    explore(|| {
        let engine = Counter::new(1).start(1);
        let askers = [asking(&engine, 5), asking(&engine, 20), asking(&engine, 40)];
        let mut answered = 0;
        for asker in askers {
            match asker.join().unwrap() {
                Outcome::Whole => answered += 1,
                Outcome::Failed(EngineError::Overloaded {
                    waiting: 1,
                    limit: 1,
                }) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(answered > 0);
        rests(&engine.handle());
        assert_eq!(ask(&engine.handle(), 10), Outcome::Whole);
    });
}

/// Doubles numbers.
struct Doubler;

impl TaskModel for Doubler {
    type Task = usize;
    type Output = usize;

    fn backend(&self) -> &'static str {
        "doubler"
    }

    fn tokens(_: &usize) -> usize {
        1
    }

    fn joins(&self, _: &usize, _: &usize, tokens: usize) -> bool {
        tokens < 2
    }

    fn run(
        &mut self,
        tasks: &[usize],
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<usize>> {
        thread::yield_now();
        match step() {
            ControlFlow::Break(()) => Ok(Vec::new()),
            ControlFlow::Continue(()) => Ok(tasks.iter().map(|task| task * 2).collect()),
        }
    }
}

#[test]
fn a_task_of_an_engine_that_ends_is_answered_or_refused() {
    explore(|| {
        let config = TaskConfig {
            max_waiting: 8,
            stall_after: Duration::from_secs(60),
            clock: Clock::manual(),
        };
        let engine = TaskEngine::start(Doubler, config).unwrap();
        let askers = [1, 2, 3].map(|task| {
            let engine = engine.handle();
            thread::spawn(move || match block_on(engine.submit(task, 0)) {
                Ok(done) => assert_eq!(done.output, 2 * task),
                Err(error) => assert_eq!(error, EngineError::ShuttingDown),
            })
        });
        drop(engine);
        for asker in askers {
            asker.join().unwrap();
        }
    });
}
