//! A device whose steps overlap: a thread of its own runs a [`Scripted`] runner, and takes the next step while it
//! is still at the last one.

use crate::scripted::Scripted;
use ferrum_engine::{AdapterLoader, Engine, EngineConfig, LoadedAdapter, StepRunner};
use ferrum_models::{DecoderSpec, Readback, RunnerConfig, StepBatch, StepOutput, Ticket};
use ferrum_types::{AdapterId, Error, Result, TokenId};
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// What happened to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happened {
    Submitted(u64),
    Collected(u64),
}

type Asked = (StepBatch, Vec<Readback>);

pub(crate) struct Overlapped {
    spec: DecoderSpec,
    config: RunnerConfig,
    samples: bool,
    steps: Option<Sender<Asked>>,
    results: Receiver<Result<StepOutput>>,
    thread: Option<JoinHandle<()>>,
    submitted: u64,
    /// Adapters of the sequences in each step in flight.
    in_flight: VecDeque<Vec<Option<AdapterId>>>,
    log: Arc<Mutex<Vec<Happened>>>,
    /// Rows of logits that were read.
    rows: Arc<AtomicUsize>,
}

impl Overlapped {
    /// Runs `runner` beside the host.
    pub(crate) fn new(runner: Scripted) -> Self {
        Self::taking(runner, Duration::ZERO)
    }

    /// The same, and each step takes so long.
    pub(crate) fn taking(mut runner: Scripted, time: Duration) -> Self {
        let (spec, config) = (runner.spec().clone(), *runner.config());
        let samples = runner.samples();
        let (steps, asked) = channel::<Asked>();
        let (done, results) = channel();
        let compute = move || {
            let mut last: Vec<TokenId> = Vec::new();
            while let Ok((mut batch, wanted)) = asked.recv() {
                for chosen in std::mem::take(&mut batch.pending_tokens) {
                    batch.tokens[chosen.token as usize] = last[chosen.row as usize];
                }
                let mut out = StepOutput::default();
                let ran = runner.run(&batch, &wanted, &mut out);
                last = runner.choices();
                std::thread::sleep(time);
                if done.send(ran.map(|()| out)).is_err() {
                    return;
                }
            }
        };
        Self {
            spec,
            config,
            samples,
            steps: Some(steps),
            results,
            thread: Some(std::thread::spawn(compute)),
            submitted: 0,
            in_flight: VecDeque::new(),
            log: Arc::default(),
            rows: Arc::default(),
        }
    }

    /// What happened to its steps, in order.
    pub(crate) fn log(&self) -> Arc<Mutex<Vec<Happened>>> {
        Arc::clone(&self.log)
    }

    /// How many rows of logits were read.
    pub(crate) fn rows_read(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.rows)
    }

    pub(crate) fn start(self, config: EngineConfig) -> Engine {
        let runner: Box<dyn StepRunner> = Box::new(self);
        Engine::start(runner, Some(crate::demo_tokenizer()), config).unwrap()
    }

    fn note(&self, happened: Happened) {
        self.log.lock().unwrap().push(happened);
    }

    /// How the thread ended.
    fn lost(&mut self) -> Error {
        drop(self.steps.take());
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            resume_unwind(panic);
        }
        Error::invalid("step", "the device has gone")
    }
}

impl Drop for Overlapped {
    fn drop(&mut self) {
        drop(self.steps.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl StepRunner for Overlapped {
    fn backend(&self) -> &'static str {
        "overlapped"
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn config(&self) -> &RunnerConfig {
        &self.config
    }

    fn in_flight(&self) -> usize {
        2
    }

    fn samples(&self) -> bool {
        self.samples
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        assert!(self.in_flight.len() < 2, "a third step");
        assert!(batch.pending_tokens.is_empty() || self.in_flight.len() == 1);
        let rows = wanted.iter().filter(|w| **w == Readback::Logits).count();
        self.rows.fetch_add(rows, Ordering::Relaxed);
        let step = (batch.clone(), wanted.to_vec());
        let steps = self.steps.as_ref();
        if steps.is_none_or(|steps| steps.send(step).is_err()) {
            return Err(self.lost());
        }
        self.submitted += 1;
        self.in_flight.push_back(batch.adapters.clone());
        self.note(Happened::Submitted(self.submitted));
        Ok(Ticket::new(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        let oldest = self.submitted + 1 - self.in_flight.len() as u64;
        assert_eq!(ticket.number(), oldest, "steps are collected in order");
        self.in_flight.pop_front();
        *out = match self.results.recv() {
            Ok(result) => result?,
            Err(_) => return Err(self.lost()),
        };
        self.note(Happened::Collected(oldest));
        Ok(())
    }

    fn adapter_loader(&self) -> AdapterLoader {
        AdapterLoader::new(|_| Ok(LoadedAdapter::new(())))
    }

    fn add_adapter(&mut self, _: AdapterId, adapter: LoadedAdapter) -> Result<()> {
        adapter.take::<()>()
    }

    fn unload_adapter(&mut self, id: AdapterId) -> bool {
        let mut named = self.in_flight.iter().flatten();
        assert!(!named.any(|named| *named == Some(id)), "a step uses it");
        true
    }
}
