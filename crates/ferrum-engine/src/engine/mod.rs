//! Continuous batching: many requests on one runner.
//!
//! An [`Engine`] owns a [`StepRunner`] on its own thread and runs steps while there are requests. Clients use an
//! [`EngineHandle`], which is cheap to clone, never waits for a step, and returns an [`EventStream`] for each request.
//!
//! Stages of a request:
//! 1. [`EngineHandle::submit`] checks it against the model and the limits, and counts it against the
//!    bound of the queue.
//! 2. The thread creates a sequence for each of its choices, and the [`Scheduler`] orders them. The first
//!    choice computes the prompt; the others share its blocks.
//! 3. Each step computes a mixed batch. For each row of logits the sequence's sampler picks a token,
//!    its [`DecodeStream`](ferrum_formats::tokenizer::DecodeStream) and [`StopMatcher`](crate::StopMatcher) turn it into
//!    text, and an event is sent.
//! 4. It ends by a stop, by length, by its deadline, or because it was cancelled: explicitly, or by
//!    dropping the stream. Its blocks are freed before the next step, or after it if that step is in flight already.
//!
//! Tokens are decoded to text on the engine's thread, between steps, because a stop string decides what the next step
//! computes. Where steps overlap, the next one is in flight by then, and its output for a choice that has ended is
//! dropped.
//!
//! Failures: an error or a panic in a step ends the engine. All requests get
//! [`Event::Failed`], [`EngineHandle::health`] reports the failure from then on, and new requests are refused. A row
//! of logits without a number fails its own request only ([`EngineError::NotANumber`]); several in a row make the
//! engine [`Health::Degraded`].

mod adapters;
mod admission;
mod choice;
mod draft;
mod draft_head;
mod drafter;
mod finish;
mod health;
mod offload;
mod overlap;
mod pooling;
mod prompt_lookup;
mod request;
mod row_outputs;
mod sampling;
mod speculation;
mod state;
mod stats;
mod step;
mod step_loop;
mod step_time;

pub use health::{Clock, DEGRADED_AFTER, Health};
pub use pooling::{DenseLayers, EmbeddingPrompts, Pooling};
pub use request::{
    EngineError, Event, EventStream, MAX_CHOICES, MAX_LOGPROB_ENTRIES, MAX_LOGPROBS,
    MAX_STOP_BYTES, MAX_STOP_TOKENS, MAX_STOPS, Request, RequestId, StopMatch, Usage,
};
pub use stats::{
    DraftCounts, EngineStats, MAX_DRAFT_TOKENS, Progress, STEP_SIZE_BUCKETS, StepSizeHistogram,
};

use crate::offload::KvOffload;
use crate::pool::BlockPool;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::mpsc::{self, Sender};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, MutexGuard};
use crate::{AdapterLoader, StepRunner};
use adapters::NewAdapter;
use draft::DraftModel;
use draft_head::DraftHead;
use drafter::{DraftSource, Drafter};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_kernels::BatchInvariance;
use ferrum_models::{AuxHiddenPoint, DraftFeatures};
use ferrum_types::AdapterId;
pub(crate) use health::Watchdog;
use request::{Limits, Submission};
use state::StepLoop;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Settings of an engine; the runner's own sizes bound the steps.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most sequences that wait for their first step; more are refused as overload.
    pub max_waiting: usize,
    /// Whether requests share the blocks of common prefixes. Choices of one request always do.
    pub prefix_cache: bool,
    /// Scheduling steps by which each priority level moves a request ahead.
    pub priority_step_credit: u32,
    /// Tokens between two checkpoints of recurrent states, besides those at ends of prompts; see
    /// [`SchedulerConfig::state_checkpoint_interval`].
    pub state_checkpoint_interval: usize,
    /// Target duration of a step with prompts while others decode, which limits the prompt tokens in it; `None`: eight
    /// times a step without prompts, and at least 100 ms.
    pub step_time: Option<Duration>,
    /// How long any step may take before the engine counts as stalled.
    pub stall_after: Duration,
    /// How many times as long as steps like it a step may take, where that is longer than
    /// [`stall_after`](Self::stall_after).
    pub stall_factor: u32,
    /// Age of the last step after which a health check of an idle engine requests a probe step.
    pub probe_after: Duration,
    /// Where blocks go that are evicted from the prefix cache; `None`: nowhere.
    pub offload: Option<EngineOffload>,
    /// Interval of integrity checks of the block pool while idle.
    pub pool_check_interval: Duration,
    /// Clock for deadlines and health.
    pub clock: Clock,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_waiting: 1024,
            prefix_cache: true,
            priority_step_credit: 256,
            state_checkpoint_interval: 512,
            step_time: None,
            stall_after: Duration::from_secs(60),
            stall_factor: 20,
            probe_after: Duration::from_secs(5),
            offload: None,
            pool_check_interval: Duration::from_secs(10),
            clock: Clock::system(),
        }
    }
}

/// KV offload of an engine.
#[derive(Clone, Debug)]
pub struct EngineOffload {
    /// The offload tiers.
    pub store: KvOffload,
    /// Identity of the model and its weights.
    pub model: String,
}

/// Lifecycle phase of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// Finishes its requests and accepts no new ones.
    Draining,
    Stopped,
    Failed(String),
}

impl Phase {
    /// Why new requests are refused, if they are.
    pub(crate) fn refusal(&self) -> Option<EngineError> {
        match self {
            Phase::Running => None,
            Phase::Draining | Phase::Stopped => Some(EngineError::ShuttingDown),
            Phase::Failed(reason) => Some(EngineError::Failed(reason.clone())),
        }
    }
}

/// State shared by the engine's thread and the handles.
#[derive(Debug)]
struct Shared {
    limits: Limits,
    /// Tokens that the KV pool holds.
    kv_tokens: usize,
    /// Most sequences of a step.
    max_seqs: usize,
    config: EngineConfig,
    phase: watch::Sender<Phase>,
    watchdog: Watchdog,
    /// Sequences that wait for their first step.
    queued: AtomicUsize,
    next_request: AtomicU64,
    next_adapter: AtomicU32,
    /// Number of consecutive requests that failed with NaN.
    nan_streak: AtomicU32,
    adapter_loader: AdapterLoader,
    /// Held while an adapter is being loaded.
    adapter_loading: Mutex<()>,
    /// LoRA adapters that requests may name.
    adapters: Mutex<BTreeSet<AdapterId>>,
    stats: Mutex<EngineStats>,
}

impl Shared {
    /// Ends a streak of NaN failures: a row of logits had numbers.
    fn reset_nan_streak(&self) {
        if self.nan_streak.load(Ordering::Relaxed) > 0 {
            self.nan_streak.store(0, Ordering::Release);
        }
    }

    /// Locks the statistics.
    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        // Nothing panics while it holds the lock.
        let stats = self.stats.lock();
        stats.unwrap_or_else(PoisonError::into_inner)
    }
}

enum Command {
    Submit(Box<Submission>),
    Cancel(RequestId),
    AddAdapter(Box<NewAdapter>),
    /// Retire an adapter.
    RetireAdapter(AdapterId),
    /// Blocks of a waiting sequence were read from files.
    BlocksRead,
    /// Run a probe step, which was requested at this time.
    Probe(Duration),
    Drain,
    Shutdown,
}

/// The model runner and an optional draft runner.
pub struct Runners {
    /// The model.
    pub model: Box<dyn StepRunner>,
    /// Drafts tokens, so that generation takes fewer steps. It does not change the output.
    pub draft: Option<DraftRunner>,
}

/// A smaller model of the same vocabulary, or a draft head.
pub struct DraftRunner {
    /// The draft model or head. It drafts only for sequences that its context and pool have room for.
    pub runner: Box<dyn StepRunner>,
    /// Most tokens of a draft, at most [`MAX_DRAFT_TOKENS`].
    pub tokens: usize,
    /// Hidden states of the model that a head reads: see [`DraftHead`](ferrum_models::DraftHead).
    pub features: Option<DraftFeatures>,
}

impl From<Box<dyn StepRunner>> for Runners {
    fn from(model: Box<dyn StepRunner>) -> Self {
        Self { model, draft: None }
    }
}

impl DraftRunner {
    /// Checks it against the model that it drafts for.
    fn check(self, model: &dyn StepRunner) -> ferrum_types::Result<Drafter> {
        if self.runner.state_slots().is_some() {
            let reason = "a model with recurrent states, which do not go back, cannot make drafts";
            return Err(ferrum_types::Error::invalid("engine", reason));
        }
        let fail = |reason| Err(ferrum_types::Error::invalid("engine", reason));
        let tokens = self
            .features
            .as_ref()
            .and_then(|reads| reads.tokens.as_ref());
        let last = tokens.and_then(|tokens| tokens.iter().max());
        let (found, expected) = (self.runner.spec().vocab_size, model.spec().vocab_size);
        match last {
            None if found != expected => {
                return fail(format!(
                    "the draft model has a vocabulary of {found} tokens, the model one of {expected}"
                ));
            }
            Some(&last) if last as usize >= expected => {
                return fail(format!(
                    "the draft head has a token {last}, the model a vocabulary of {expected}"
                ));
            }
            _ => {}
        }
        let most = self.tokens.min(MAX_DRAFT_TOKENS);
        let Some(features) = self.features else {
            let model = DraftModel::new(self.runner, most);
            return Ok(Drafter::new(DraftSource::Model(model)));
        };
        let spec = model.spec();
        let missing = |point: &&AuxHiddenPoint| match **point {
            AuxHiddenPoint::Layer(layer) => layer as usize >= spec.layers.len(),
            AuxHiddenPoint::FinalNorm => false,
        };
        if let Some(point) = features.target.iter().find(missing) {
            let layers = spec.layers.len();
            return fail(format!(
                "the draft head reads {point:?} of a model with {layers} layers"
            ));
        }
        let sizes = (most, spec.hidden_size);
        let head = DraftHead::new(self.runner, features, sizes);
        Ok(Drafter::new(DraftSource::Head(head)))
    }
}

/// Owns the thread on which a runner runs. Dropping it shuts it down.
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread. Without a tokenizer, events have no text and stop strings are refused.
    ///
    /// # Errors
    /// Those of [`Scheduler::new`]; `InvalidArgument` for a draft model of another vocabulary; `Device`
    /// when there can be no thread.
    pub fn start(
        runners: impl Into<Runners>,
        tokenizer: Option<Arc<Tokenizer>>,
        config: EngineConfig,
    ) -> ferrum_types::Result<Self> {
        let Runners {
            model: runner,
            draft,
        } = runners.into();
        let draft = draft.map(|draft| draft.check(&*runner)).transpose()?;
        let scheduling = SchedulerConfig {
            priority_step_credit: config.priority_step_credit,
            state_checkpoint_interval: config.state_checkpoint_interval,
            whole_prompts: !runner.spec().is_causal(),
            ..SchedulerConfig::for_runner(runner.config())
        };
        let blocks = BlockPool::of_groups(&runner.cache_groups()).with_states(runner.state_slots());
        let mut scheduler = Scheduler::new(scheduling, blocks)?;
        let backend = runner.backend();
        let shared = Arc::new(Shared {
            limits: Limits {
                vocab_size: runner.spec().vocab_size,
                capacity: scheduler.capacity(),
                causal: runner.spec().is_causal(),
                has_text: tokenizer.is_some(),
                hidden: runner.spec().hidden_size,
                image_tokens: image_tokens(&*runner, &scheduling),
            },
            kv_tokens: runner.config().cache_tokens(),
            max_seqs: scheduling.max_seqs,
            phase: watch::Sender::new(Phase::Running),
            watchdog: Watchdog::new(config.clock.now()),
            queued: AtomicUsize::new(0),
            next_request: AtomicU64::new(0),
            next_adapter: AtomicU32::new(0),
            nan_streak: AtomicU32::new(0),
            adapter_loader: runner.adapter_loader(),
            adapter_loading: Mutex::default(),
            adapters: Mutex::default(),
            stats: Mutex::new(EngineStats::default()),
            config,
        });
        let (sequence, kv) = (shared.limits.capacity, shared.kv_tokens);
        tracing::debug!(
            backend,
            context = sequence,
            kv_tokens = kv,
            "engine started"
        );
        if let (Some(_), BatchInvariance::WithinNmse(nmse)) = (&draft, runner.batch_invariance()) {
            tracing::warn!(
                backend,
                nmse,
                "rows computed together differ a little from rows computed alone: drafts may change a text"
            );
        }
        let (commands, inbox) = mpsc::channel();
        let connector = offload::offload_connector(&*runner, &shared.config, &commands);
        if let Some(connector) = &connector {
            scheduler = scheduler.with_offload(Box::new(Arc::clone(connector)));
            // Statistics are complete from the start, before the first step.
            shared.stats().offload = connector.stats();
        }
        let handle = EngineHandle {
            shared: Arc::clone(&shared),
            commands,
        };
        let body = move || {
            let tokenizer = tokenizer.as_deref();
            let runners = (runner, draft);
            let mut state = StepLoop::new(runners, tokenizer, scheduler, &shared, &inbox);
            state.offload = connector;
            // After a panic only the list of requests is read, to fail them.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                let ended = state.run();
                if ended.is_ok() {
                    state.offload_cached();
                }
                ended
            }));
            let reason = match ended {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(panic) => Some(format!("a step panicked: {}", panic_message(&*panic))),
            };
            match &reason {
                None => tracing::debug!(backend, "engine stopped"),
                Some(reason) => tracing::error!(backend, reason, "engine failed"),
            }
            let phase = reason.map_or(Phase::Stopped, Phase::Failed);
            shared.phase.send_replace(phase);
            state.fail_all();
        };
        let thread = thread::Builder::new()
            .name("ferrum-engine".into())
            .spawn(body)
            .map_err(|e| ferrum_types::Error::Device {
                backend,
                op: "engine",
                reason: format!("cannot start a thread: {e}"),
            })?;
        Ok(Self {
            handle,
            thread: Some(thread),
        })
    }

    /// A handle for submitting requests.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Refuses new requests, and stops when all requests have ended. [`EngineHandle::stopped`] waits for
    /// that.
    pub fn drain(&self) {
        self.handle.drain();
    }

    /// Fails open requests and waits for the thread to end (at most for the step in flight).
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        // An engine that has ended reads no commands.
        let _ = self.handle.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            // The thread catches and reports its own panics.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Most tokens of an image: those that a step has room for while all other sequences decode, and the narrowest window.
fn image_tokens(runner: &dyn StepRunner, scheduling: &SchedulerConfig) -> usize {
    let windows = runner.cache_groups().into_iter();
    let narrowest = windows.filter_map(|group| group.window).min();
    let beside = scheduling
        .max_tokens
        .saturating_sub(scheduling.max_seqs - 1);
    beside.min(narrowest.unwrap_or(usize::MAX))
}

pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("it did not say why")
}

/// A handle of an engine for many tasks and threads. No method waits for a step.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EngineHandle").field(&self.shared).finish()
    }
}

impl EngineHandle {
    /// Submits a request. Its events arrive through the stream; dropping the stream cancels it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] and [`EngineError::ContextOverflow`] for requests that can never run,
    /// [`EngineError::Overloaded`] when the queue is full, [`EngineError::ShuttingDown`] and
    /// [`EngineError::Failed`] when the engine accepts no requests.
    pub fn submit(&self, request: Request) -> Result<EventStream, EngineError> {
        let shared = &self.shared;
        if let Some(refusal) = shared.phase.borrow().refusal() {
            return Err(refusal);
        }
        shared.limits.check(&request)?;
        shared.check_adapter(&request)?;
        let (n, limit) = (request.n, shared.config.max_waiting);
        let room = |queued: usize| queued.checked_add(n).filter(|&sum| sum <= limit);
        let order = Ordering::AcqRel;
        if let Err(waiting) = shared.queued.fetch_update(order, Ordering::Acquire, room) {
            tracing::warn!(waiting, limit, "queue full, request refused");
            return Err(EngineError::Overloaded { waiting, limit });
        }
        let id = RequestId(shared.next_request.fetch_add(1, Ordering::Relaxed));
        let (events, receiver) = tokio::sync::mpsc::channel(shared.limits.max_events(&request));
        let now = shared.config.clock.now();
        let deadline = request.timeout.map(|timeout| now.saturating_add(timeout));
        let stream = EventStream::new(id, receiver, self.clone());
        shared.watchdog.work_arrived(now);
        let submission = Submission {
            id,
            request,
            arrived_at: now,
            deadline,
            events,
            progress: stream.progress(),
        };
        // If the engine has ended, the stream ends with the reason.
        let _ = self.commands.send(Command::Submit(Box::new(submission)));
        Ok(stream)
    }

    /// Cancels a request before the next step. Its stream gets the usual last events.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has ended has no requests.
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// Tokens that the KV cache holds over all sequences.
    pub fn kv_tokens(&self) -> usize {
        self.shared.kv_tokens
    }

    /// Most sequences that are computed together.
    pub fn max_seqs(&self) -> usize {
        self.shared.max_seqs
    }

    /// Statistics of the engine.
    pub fn stats(&self) -> EngineStats {
        let stats = *self.shared.stats();
        EngineStats {
            waiting: self.shared.queued.load(Ordering::Acquire),
            prefix_cache: self.shared.config.prefix_cache,
            ..stats
        }
    }

    /// Whether the engine completes steps. If it is idle and its last step is older than
    /// [`probe_after`](EngineConfig::probe_after), this requests a probe step, and a later call reports its outcome.
    pub fn health(&self) -> Health {
        let shared = &self.shared;
        match &*shared.phase.borrow() {
            Phase::Failed(reason) => return Health::Failed(reason.clone()),
            Phase::Stopped => return Health::Stopped,
            Phase::Running | Phase::Draining => {}
        }
        let now = shared.config.clock.now();
        let (since_step, waited) = shared.watchdog.poll(now);
        if waited.is_none() && since_step >= shared.config.probe_after {
            shared.watchdog.work_arrived(now);
            let _ = self.commands.send(Command::Probe(now));
        }
        let expected = shared.watchdog.expected();
        let patience = expected.saturating_mul(shared.config.stall_factor);
        let patience = patience.max(shared.config.stall_after);
        let failures = shared.nan_streak.load(Ordering::Acquire);
        match waited {
            Some(waited) if waited > patience => Health::Stalled { waited },
            _ if failures >= DEGRADED_AFTER => Health::Degraded { failures },
            _ => Health::Alive { since_step },
        }
    }

    /// Why the engine failed, if it did. Unlike [`health`](Self::health) it requests no probe step.
    pub fn failure(&self) -> Option<String> {
        match &*self.shared.phase.borrow() {
            Phase::Failed(reason) => Some(reason.clone()),
            Phase::Running | Phase::Draining | Phase::Stopped => None,
        }
    }

    /// See [`Engine::drain`].
    pub fn drain(&self) {
        self.shared.phase.send_if_modified(|phase| {
            let running = *phase == Phase::Running;
            if running {
                *phase = Phase::Draining;
            }
            running
        });
        let _ = self.commands.send(Command::Drain);
    }

    /// Waits until the engine has ended, for any reason.
    pub async fn stopped(&self) {
        let mut phase = self.shared.phase.subscribe();
        // The sender lives as long as this handle.
        let _ = phase
            .wait_for(|phase| matches!(phase, Phase::Stopped | Phase::Failed(_)))
            .await;
    }

    /// The error of a stream that ended without a last event.
    fn end_error(&self) -> EngineError {
        let refusal = self.shared.phase.borrow().refusal();
        refusal.unwrap_or(EngineError::ShuttingDown)
    }
}
