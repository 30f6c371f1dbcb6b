//! Many requests on one runner.
//!
//! An [`Engine`] owns a [`StepRunner`] on a thread of its own and runs step after step for as long as
//! somebody wants tokens. Everybody else has an [`EngineHandle`], which is cheap to clone, never waits
//! for a step, and gives an [`EventStream`] for each request.
//!
//! A request's life:
//! 1. [`EngineHandle::submit`] checks it against the model and the limits, and counts it against the
//!    bound of the queue.
//! 2. The thread makes a sequence of each of its choices, and the [`Scheduler`] orders them. The first
//!    choice computes the prompt; the others share its blocks.
//! 3. Each step computes a mixed batch. For each row of logits the sequence's sampler picks a token,
//!    its [`DecodeStream`](ferrum_formats::tokenizer::DecodeStream) and [`StopMatcher`](crate::StopMatcher) turn it into text, and an event goes out.
//! 4. It ends by a stop, by length, by its deadline, or because it was cancelled: explicitly, or by
//!    dropping the stream. Its blocks are free before the next step, or after it where that one is under way.
//!
//! Text is made on the engine's thread, between steps: whether a stop string has come decides what the
//! next step computes. Where steps overlap, the next one is under way by then, and what it computed of an answer that
//! has ended is dropped.
//!
//! What fails: an error or a panic in a step ends the engine. All requests get
//! [`Event::Failed`], [`EngineHandle::health`] says so from then on, and new requests are refused. A row
//! of logits that is nothing but NaN fails the request that it is for ([`EngineError::NotANumber`]) and nobody
//! else; several in a row make the engine [`Health::Degraded`].

mod adapters;
mod admission;
mod answer;
mod draft;
mod draft_head;
mod drafter;
mod finish;
mod health;
mod lookup;
mod offload;
mod overlap;
mod pooling;
mod request;
mod rows;
mod sampling;
mod speculation;
mod stats;
mod step;
mod step_loop;
mod step_time;

pub use health::{Clock, DEGRADED_AFTER, Health};
pub use pooling::Pooling;
pub use request::{
    EngineError, Event, EventStream, MAX_CHOICES, MAX_LOGPROB_ENTRIES, MAX_LOGPROBS,
    MAX_STOP_BYTES, MAX_STOP_TOKENS, MAX_STOPS, Request, RequestId, StopMatch, Usage,
};
pub use stats::{DraftCounts, EngineStats, MAX_DRAFT_TOKENS, Progress, STEP_TOKENS, StepSizes};

use crate::offload::KvOffload;
use crate::pool::BlockPool;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::{AdapterLoader, StepRunner};
use adapters::NewAdapter;
use draft::DraftModel;
use draft_head::DraftHead;
use drafter::{DraftSource, Drafter};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_kernels::BatchInvariance;
use ferrum_models::{DraftFeatures, TapPoint};
use ferrum_types::AdapterId;
pub(crate) use health::Watchdog;
use request::{Limits, Submission};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use step_loop::StepLoop;
use tokio::sync::watch;

/// Settings of an engine; the runner's own sizes bound the steps.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most sequences that wait for their first step; more are refused as overload.
    pub max_waiting: usize,
    /// Whether requests share what they have in common. Choices of one request always do.
    pub prefix_cache: bool,
    /// Steps by which one level of priority lets a request go before its turn.
    pub head_start: u32,
    /// Tokens from one recurrent state that is kept to the next, beside those at ends of prompts; see
    /// [`SchedulerConfig::state_stride`].
    pub state_stride: usize,
    /// How long a step with prompts may take while others decode, which decides how many tokens of prompts are in
    /// it; `None`: eight times a step without prompts, and at least 100 ms.
    pub step_time: Option<Duration>,
    /// How long any step may take before the engine counts as stalled.
    pub stall_after: Duration,
    /// How many times as long as steps like it a step may take, where that is longer than
    /// [`stall_after`](Self::stall_after).
    pub stall_factor: u32,
    /// How old the last step may be before a look at the health of an idle engine asks for a step.
    pub probe_after: Duration,
    /// Where blocks go that the prefix cache gives away; `None`: nowhere.
    pub offload: Option<EngineOffload>,
    /// How often the books of the block pool are checked, when there is nothing else to do.
    pub check_every: Duration,
    /// What time it is.
    pub clock: Clock,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_waiting: 1024,
            prefix_cache: true,
            head_start: 256,
            state_stride: 512,
            step_time: None,
            stall_after: Duration::from_secs(60),
            stall_factor: 20,
            probe_after: Duration::from_secs(5),
            offload: None,
            check_every: Duration::from_secs(10),
            clock: Clock::system(),
        }
    }
}

/// What an engine keeps outside of its device.
#[derive(Clone, Debug)]
pub struct EngineOffload {
    /// Where.
    pub store: KvOffload,
    /// What tells the model from others, and from itself with other weights.
    pub model: String,
}

/// Where an engine is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// Ends what it has and takes nothing new.
    Draining,
    Stopped,
    Failed(String),
}

impl Phase {
    /// Why nothing new is taken.
    pub(crate) fn refusal(&self) -> Option<EngineError> {
        match self {
            Phase::Running => None,
            Phase::Draining | Phase::Stopped => Some(EngineError::ShuttingDown),
            Phase::Failed(reason) => Some(EngineError::Failed(reason.clone())),
        }
    }
}

/// What the thread and the handles have in common.
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
    /// Requests in a row for which the model computed no numbers.
    nan_streak: AtomicU32,
    adapter_loader: AdapterLoader,
    /// Held while an adapter is being loaded.
    adapter_loading: Mutex<()>,
    /// LoRA adapters that requests may name.
    adapters: Mutex<BTreeSet<AdapterId>>,
    stats: Mutex<EngineStats>,
}

impl Shared {
    /// A row of logits had numbers: whatever was odd is over.
    fn numbers_came(&self) {
        if self.nan_streak.load(Ordering::Relaxed) > 0 {
            self.nan_streak.store(0, Ordering::Release);
        }
    }

    /// What the engine did.
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
    /// An adapter is not to be used any more.
    RetireAdapter(AdapterId),
    /// Files of blocks were read for somebody.
    BlocksRead,
    /// Run a step for the sake of it; asked at this time.
    Probe(Duration),
    Drain,
    Shutdown,
}

/// A model, and maybe something smaller that drafts what it will say.
pub struct Runners {
    /// Answers.
    pub model: Box<dyn StepRunner>,
    /// Makes answers come in fewer steps, and changes nothing else about them.
    pub draft: Option<DraftRunner>,
}

/// A smaller model of the same vocabulary, or a draft head.
pub struct DraftRunner {
    /// The model; sequences that its context or pool has no room for are not drafted for.
    pub runner: Box<dyn StepRunner>,
    /// Most tokens to draft at a time, at most [`MAX_DRAFT_TOKENS`].
    pub tokens: usize,
    /// What it reads of the model's hidden states, where it is a head: see [`DraftHead`](ferrum_models::DraftHead).
    pub features: Option<DraftFeatures>,
}

impl From<Box<dyn StepRunner>> for Runners {
    fn from(model: Box<dyn StepRunner>) -> Self {
        Self { model, draft: None }
    }
}

impl DraftRunner {
    /// Holds it against the model that it drafts for.
    fn check(self, model: &dyn StepRunner) -> ferrum_types::Result<Drafter> {
        let states = |runner: &dyn StepRunner| runner.state_slots().is_some();
        if states(model) || states(&*self.runner) {
            let reason = "a model with recurrent states, which do not go back, cannot have drafts or make them";
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
        let missing = |point: &&TapPoint| match **point {
            TapPoint::Layer(layer) => layer as usize >= spec.layers.len(),
            TapPoint::FinalNorm => false,
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
            head_start: config.head_start,
            state_stride: config.state_stride,
            ..SchedulerConfig::for_runner(runner.config())
        };
        let blocks = BlockPool::of_groups(&runner.cache_groups()).with_states(runner.state_slots());
        let mut scheduler = Scheduler::new(scheduling, blocks)?;
        let backend = runner.backend();
        let shared = Arc::new(Shared {
            limits: Limits {
                vocab_size: runner.spec().vocab_size,
                capacity: scheduler.capacity(),
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
        let host = offload::host_cache(&*runner, &shared.config, &commands);
        if let Some(host) = &host {
            scheduler = scheduler.with_host(Box::new(Arc::clone(host)));
            // Known from the start: the first step may be long in coming.
            shared.stats().offload = host.stats();
        }
        let handle = EngineHandle {
            shared: Arc::clone(&shared),
            commands,
        };
        let body = move || {
            let tokenizer = tokenizer.as_deref();
            let runners = (runner, draft);
            let mut state = StepLoop::new(runners, tokenizer, scheduler, &shared, &inbox);
            state.host = host;
            // After a panic only the list of requests is looked at, to tell them.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                let ended = state.run();
                if ended.is_ok() {
                    state.keep_cached();
                }
                ended
            }));
            let reason = match ended {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(panic) => Some(format!("a step panicked: {}", panic_words(&*panic))),
            };
            match &reason {
                None => tracing::debug!(backend, "engine stopped"),
                Some(reason) => tracing::error!(backend, reason, "engine failed"),
            }
            let phase = reason.map_or(Phase::Stopped, Phase::Failed);
            shared.phase.send_replace(phase);
            state.fail_all();
        };
        let thread = std::thread::Builder::new()
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

    /// A handle for whoever has requests.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Takes nothing new, and stops when all requests have ended. [`EngineHandle::stopped`] waits for
    /// that.
    pub fn drain(&self) {
        self.handle.drain();
    }

    /// Fails what is still there and waits for the thread to end (at most for the step it is in).
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        // An engine that has ended reads no commands.
        let _ = self.handle.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            // Its panics are caught and told inside.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Most tokens of an image that a step takes with everybody else decoding in it, and that all layers see.
fn image_tokens(runner: &dyn StepRunner, scheduling: &SchedulerConfig) -> usize {
    let windows = runner.cache_groups().into_iter();
    let narrowest = windows.filter_map(|group| group.window).min();
    let beside = scheduling
        .max_tokens
        .saturating_sub(scheduling.max_seqs - 1);
    beside.min(narrowest.unwrap_or(usize::MAX))
}

pub(crate) fn panic_words(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("it did not say why")
}

/// A way to an engine, for many tasks and threads. No method waits for a step.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl EngineHandle {
    /// Hands a request in. Its events come through the stream; dropping the stream cancels it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] and [`EngineError::ContextOverflow`] for what can never run,
    /// [`EngineError::Overloaded`] when the queue is full, [`EngineError::ShuttingDown`] and
    /// [`EngineError::Failed`] when the engine takes nothing more.
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
        let (events, receiver) = tokio::sync::mpsc::channel(shared.limits.most_events(&request));
        let now = shared.config.clock.now();
        let deadline = request.timeout.map(|timeout| now.saturating_add(timeout));
        let stream = EventStream::new(id, receiver, self.clone());
        shared.watchdog.work_came(now);
        let submission = Submission {
            id,
            request,
            came: now,
            deadline,
            events,
            progress: stream.progress(),
        };
        // If nobody reads it, the stream ends with the reason.
        let _ = self.commands.send(Command::Submit(Box::new(submission)));
        Ok(stream)
    }

    /// Ends a request before the next step. Its stream gets what a request that ends gets.
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

    /// What the engine did and is doing.
    pub fn stats(&self) -> EngineStats {
        let stats = *self.shared.stats();
        EngineStats {
            waiting: self.shared.queued.load(Ordering::Acquire),
            prefix_cache: self.shared.config.prefix_cache,
            ..stats
        }
    }

    /// Whether the engine really makes steps. When it is idle and its last step is long ago, it is
    /// asked for one, and a later look tells how that went.
    pub fn health(&self) -> Health {
        let shared = &self.shared;
        match &*shared.phase.borrow() {
            Phase::Failed(reason) => return Health::Failed(reason.clone()),
            Phase::Stopped => return Health::Stopped,
            Phase::Running | Phase::Draining => {}
        }
        let now = shared.config.clock.now();
        let (since_step, waited) = shared.watchdog.look(now);
        if waited.is_none() && since_step >= shared.config.probe_after {
            shared.watchdog.work_came(now);
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

    /// Why the engine takes nothing more, if it broke. Unlike [`health`](Self::health) it asks for no step.
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

    /// Waits until the engine has ended, for whatever reason.
    pub async fn stopped(&self) {
        let mut phase = self.shared.phase.subscribe();
        // The sender lives as long as this handle.
        let _ = phase
            .wait_for(|phase| matches!(phase, Phase::Stopped | Phase::Failed(_)))
            .await;
    }

    /// Why a stream ended without having been told.
    fn ending(&self) -> EngineError {
        let refusal = self.shared.phase.borrow().refusal();
        refusal.unwrap_or(EngineError::ShuttingDown)
    }
}
