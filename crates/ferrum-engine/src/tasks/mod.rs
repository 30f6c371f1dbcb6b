//! Runs models that compute whole tasks, such as encoders: they generate no tokens step by step, so nothing is scheduled
//! between steps.
//!
//! A [`TaskEngine`] owns a [`TaskModel`] on its own thread; clients have a [`TaskHandle`]. Tasks that wait when
//! the model becomes free are computed together if the model allows it. A task whose
//! [`submit`](TaskHandle::submit) was dropped is not computed. Failures are handled as in an
//! [`Engine`](crate::Engine): an error of the device or a panic ends the engine, and [`TaskMonitor::health`] reports it.

pub mod classify;
mod encoder;
pub mod transcribe;
pub mod vision;

pub use encoder::{
    Embedded, Encoder, EncoderAnswer, EncoderInput, EncoderTask, EncoderTokenizer, EncoderWant,
};

use crate::engine::{Clock, EngineError, EngineStats, Health, Phase, Watchdog, panic_message};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::mpsc::{self, Receiver, Sender};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, MutexGuard};
use ferrum_types::{Error, Result};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// A model that computes whole tasks.
pub trait TaskModel: Send + 'static {
    /// The input of a task.
    type Task: Send + 'static;
    /// The output of a task.
    type Output: Send + 'static;

    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// Number of tokens of a task, for the statistics.
    fn tokens(task: &Self::Task) -> usize;

    /// Whether `next` may be computed together with tasks of `tokens` tokens in all, of which `first` is one.
    fn joins(&self, first: &Self::Task, next: &Self::Task, tokens: usize) -> bool;

    /// Computes tasks, and returns their outputs in order. Between its steps it calls `step`. When that returns
    /// [`ControlFlow::Break`], all callers have stopped waiting, and it may return fewer outputs.
    ///
    /// # Errors
    /// `InvalidArgument` and `ContextOverflow` fail the tasks; anything else ends the engine.
    fn run(
        &mut self,
        tasks: &[Self::Task],
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<Self::Output>>;
}

/// Settings of a [`TaskEngine`].
#[derive(Clone, Debug)]
pub struct TaskConfig {
    /// Most tasks that wait.
    pub max_waiting: usize,
    /// How long a step may take before the engine counts as stalled.
    pub stall_after: Duration,
    /// Clock for timeouts.
    pub clock: Clock,
}

/// Output of a task, and its times.
#[derive(Clone, Debug)]
pub struct TaskOutput<T> {
    /// The model's output.
    pub output: T,
    /// How long the task waited.
    pub queued: Duration,
    /// How long it was computed.
    pub computed: Duration,
}

struct Submission<M: TaskModel> {
    task: M::Task,
    priority: i8,
    arrived_at: Duration,
    reply: oneshot::Sender<std::result::Result<TaskOutput<M::Output>, EngineError>>,
}

enum Command<M: TaskModel> {
    Submit(Submission<M>),
    Drain,
    Shutdown,
}

#[derive(Debug)]
struct Shared {
    backend: &'static str,
    config: TaskConfig,
    phase: watch::Sender<Phase>,
    watchdog: Watchdog,
    queued: AtomicUsize,
    stats: Mutex<EngineStats>,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Owns the thread on which a [`TaskModel`] runs. Dropping it shuts it down.
#[derive(Debug)]
pub struct TaskEngine<M: TaskModel> {
    handle: TaskHandle<M>,
    thread: Option<JoinHandle<()>>,
}

impl<M: TaskModel> TaskEngine<M> {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Device` when there can be no thread.
    pub fn start(model: M, config: TaskConfig) -> Result<Self> {
        let backend = model.backend();
        let shared = Arc::new(Shared {
            backend,
            watchdog: Watchdog::new(config.clock.now()),
            config,
            phase: watch::Sender::new(Phase::Running),
            queued: AtomicUsize::new(0),
            stats: Mutex::default(),
        });
        let (commands, inbox) = mpsc::channel();
        let monitor = TaskMonitor(Arc::clone(&shared));
        let mut work = TaskLoop {
            model,
            shared,
            inbox,
            waiting: VecDeque::new(),
            ends: false,
        };
        let thread = thread::Builder::new().name("ferrum-tasks".into());
        let thread = thread.spawn(move || work.run_to_end());
        let thread = thread.map_err(|e| Error::Device {
            backend,
            op: "engine",
            reason: format!("cannot start a thread: {e}"),
        })?;
        Ok(Self {
            handle: TaskHandle { monitor, commands },
            thread: Some(thread),
        })
    }

    /// A handle for submitting tasks.
    pub fn handle(&self) -> TaskHandle<M> {
        self.handle.clone()
    }
}

impl<M: TaskModel> Drop for TaskEngine<M> {
    fn drop(&mut self) {
        // An engine that has ended reads no commands.
        let _ = self.handle.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            // The thread catches and reports its own panics.
            let _ = thread.join();
        }
    }
}

/// Health and statistics of a [`TaskEngine`].
#[derive(Clone, Debug)]
pub struct TaskMonitor(Arc<Shared>);

impl TaskMonitor {
    /// Statistics of the engine. Those of caches and generated tokens are 0.
    pub fn stats(&self) -> EngineStats {
        let stats = *self.0.stats();
        EngineStats {
            waiting: self.0.queued.load(Ordering::Acquire),
            ..stats
        }
    }

    /// Whether steps complete. An engine without tasks is alive.
    pub fn health(&self) -> Health {
        let shared = &self.0;
        match &*shared.phase.borrow() {
            Phase::Failed(reason) => return Health::Failed(reason.clone()),
            Phase::Stopped => return Health::Stopped,
            Phase::Running | Phase::Draining => {}
        }
        let (since_step, waited) = shared.watchdog.poll(shared.config.clock.now());
        match waited {
            Some(waited) if waited > shared.config.stall_after => Health::Stalled { waited },
            _ => Health::Alive { since_step },
        }
    }

    /// Why the engine failed, if it did.
    pub fn failure(&self) -> Option<String> {
        match &*self.0.phase.borrow() {
            Phase::Failed(reason) => Some(reason.clone()),
            Phase::Running | Phase::Draining | Phase::Stopped => None,
        }
    }

    /// Waits until the engine has ended, for any reason.
    pub async fn stopped(&self) {
        let mut phase = self.0.phase.subscribe();
        // The sender lives as long as this monitor.
        let _ = phase
            .wait_for(|phase| matches!(phase, Phase::Stopped | Phase::Failed(_)))
            .await;
    }
}

/// A handle of a [`TaskEngine`] for many threads.
pub struct TaskHandle<M: TaskModel> {
    monitor: TaskMonitor,
    commands: Sender<Command<M>>,
}

impl<M: TaskModel> Clone for TaskHandle<M> {
    fn clone(&self) -> Self {
        Self {
            monitor: self.monitor.clone(),
            commands: self.commands.clone(),
        }
    }
}

impl<M: TaskModel> std::fmt::Debug for TaskHandle<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("TaskHandle").field(&self.monitor).finish()
    }
}

impl<M: TaskModel> TaskHandle<M> {
    /// Health and statistics of the engine.
    pub fn monitor(&self) -> &TaskMonitor {
        &self.monitor
    }

    /// Refuses new tasks, and stops when all tasks have ended.
    pub fn drain(&self) {
        self.monitor.0.phase.send_if_modified(|phase| {
            let running = *phase == Phase::Running;
            if running {
                *phase = Phase::Draining;
            }
            running
        });
        let _ = self.commands.send(Command::Drain);
    }

    /// Submits a task and waits for its output; a higher priority goes first. Dropping the future cancels the task.
    ///
    /// # Errors
    /// [`EngineError::Overloaded`] when the queue is full, [`EngineError::ShuttingDown`] and [`EngineError::Failed`]
    /// when the engine accepts no tasks; [`EngineError::Invalid`] and [`EngineError::ContextOverflow`] for a task that
    /// the model refuses.
    pub async fn submit(
        &self,
        task: M::Task,
        priority: i8,
    ) -> std::result::Result<TaskOutput<M::Output>, EngineError> {
        let shared = &self.monitor.0;
        if let Some(refusal) = shared.phase.borrow().refusal() {
            return Err(refusal);
        }
        let limit = shared.config.max_waiting;
        let room = |queued: usize| Some(queued + 1).filter(|&sum| sum <= limit);
        let order = Ordering::AcqRel;
        if let Err(waiting) = shared.queued.fetch_update(order, Ordering::Acquire, room) {
            tracing::warn!(waiting, limit, "queue full, task refused");
            return Err(EngineError::Overloaded { waiting, limit });
        }
        let arrived_at = shared.config.clock.now();
        shared.watchdog.work_arrived(arrived_at);
        let (reply, received) = oneshot::channel();
        // If the engine has ended, the reply is dropped with the task.
        let _ = self.commands.send(Command::Submit(Submission {
            task,
            priority,
            arrived_at,
            reply,
        }));
        if let Ok(outcome) = received.await {
            return outcome;
        }
        // An engine that ends drops the reply and sets the reason.
        self.monitor.stopped().await;
        let refusal = shared.phase.borrow().refusal();
        Err(refusal.unwrap_or(EngineError::ShuttingDown))
    }
}

/// State of the engine's thread.
struct TaskLoop<M: TaskModel> {
    model: M,
    shared: Arc<Shared>,
    inbox: Receiver<Command<M>>,
    /// By priority, then by arrival.
    waiting: VecDeque<Submission<M>>,
    /// Whether it ends when no task waits.
    ends: bool,
}

impl<M: TaskModel> TaskLoop<M> {
    fn run_to_end(&mut self) {
        let backend = self.shared.backend;
        let ended = catch_unwind(AssertUnwindSafe(|| self.run()));
        let reason = match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => Some(format!("a task panicked: {}", panic_message(&*panic))),
        };
        match &reason {
            None => tracing::debug!(backend, "engine stopped"),
            Some(reason) => tracing::error!(backend, reason, "engine failed"),
        }
        let phase = reason.map_or(Phase::Stopped, Phase::Failed);
        self.shared.phase.send_replace(phase);
        // Dropped replies make their callers read the phase.
        self.waiting.clear();
        while self.inbox.try_recv().is_ok() {}
        self.shared.queued.store(0, Ordering::Release);
        self.shared.stats().running = 0;
    }

    fn run(&mut self) -> Result<()> {
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                if !self.take(command) {
                    return Ok(());
                }
            }
            if !self.waiting.is_empty() {
                self.compute()?;
                continue;
            }
            self.shared.watchdog.idle();
            if self.ends {
                return Ok(());
            }
            // The owner of the thread has a sender, so this fails only when it is gone.
            let Ok(command) = self.inbox.recv() else {
                return Ok(());
            };
            if !self.take(command) {
                return Ok(());
            }
        }
    }

    /// Executes a command. Returns whether to continue.
    fn take(&mut self, command: Command<M>) -> bool {
        match command {
            Command::Submit(new) => {
                let before = |other: &Submission<M>| other.priority >= new.priority;
                let at = self.waiting.partition_point(before);
                self.waiting.insert(at, new);
            }
            Command::Drain => self.ends = true,
            Command::Shutdown => return false,
        }
        true
    }

    /// The next tasks to be computed together; none if their callers have stopped waiting.
    fn next_batch(&mut self) -> Vec<Submission<M>> {
        let mut batch: Vec<Submission<M>> = Vec::new();
        let mut tokens = 0;
        while let Some(next) = self.waiting.front() {
            let joins = batch
                .first()
                .is_none_or(|first| self.model.joins(&first.task, &next.task, tokens));
            if !joins && !next.reply.is_closed() {
                break;
            }
            self.shared.queued.fetch_sub(1, Ordering::AcqRel);
            let Some(next) = self.waiting.pop_front() else {
                break;
            };
            if !next.reply.is_closed() {
                tokens += M::tokens(&next.task);
                batch.push(next);
            }
        }
        batch
    }

    fn compute(&mut self) -> Result<()> {
        let batch = self.next_batch();
        if batch.is_empty() {
            return Ok(());
        }
        let shared = &self.shared;
        let began = shared.config.clock.now();
        let (mut tasks, mut replies) = (Vec::new(), Vec::new());
        for one in batch {
            tasks.push(one.task);
            replies.push((one.arrived_at, one.reply));
        }
        let tokens: usize = tasks.iter().map(M::tokens).sum();
        {
            let mut stats = shared.stats();
            stats.running = tasks.len();
            stats.prompt_tokens += tokens as u64;
        }
        let mut last = began;
        let mut step = || {
            let now = shared.config.clock.now();
            end_step(shared, last, now);
            last = now;
            match replies.iter().all(|(_, reply)| reply.is_closed()) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let outputs = self.model.run(&tasks, &mut step);
        let now = shared.config.clock.now();
        end_step(shared, last, now);
        {
            let mut stats = shared.stats();
            stats.running = 0;
            stats.computed_tokens += tokens as u64;
            stats.step_sizes.add(tokens);
            stats.finished_requests += replies.len() as u64;
        }
        let fault = match outputs {
            Ok(outputs) => {
                for ((arrived_at, reply), output) in replies.into_iter().zip(outputs) {
                    // The caller may have stopped waiting.
                    let _ = reply.send(Ok(TaskOutput {
                        output,
                        queued: began.saturating_sub(arrived_at),
                        computed: now.saturating_sub(began),
                    }));
                }
                return Ok(());
            }
            Err(error) => fault_of_tasks(error)?,
        };
        for (_, reply) in replies {
            let _ = reply.send(Err(fault.clone()));
        }
        Ok(())
    }
}

/// Records a step that ended `now`.
fn end_step(shared: &Shared, began: Duration, now: Duration) {
    shared.watchdog.step_ended(now);
    let mut stats = shared.stats();
    let took = now.saturating_sub(began);
    stats.steps += 1;
    stats.step_time += took;
    stats.model_time += took;
    stats.last_step_time = took;
    stats.last_step = now;
}

/// The error for callers, if the tasks caused it; returns other errors.
fn fault_of_tasks(error: Error) -> Result<EngineError> {
    match error {
        Error::ContextOverflow {
            requested,
            capacity,
        } => Ok(EngineError::ContextOverflow {
            requested,
            capacity,
        }),
        Error::InvalidArgument { reason, .. } => Ok(EngineError::Invalid {
            field: "input",
            reason,
        }),
        error => Err(error),
    }
}
