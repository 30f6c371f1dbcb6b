//! Models that answer whole tasks, such as encoders: no tokens are generated step by step, so nothing is scheduled
//! between them.
//!
//! A [`TaskEngine`] owns a [`TaskModel`] on a thread of its own; everybody else has a [`TaskHandle`]. Tasks that wait when
//! the model becomes free are computed together where the model says that they may be. A task whose
//! [`ask`](TaskHandle::ask) was dropped is not computed. What fails, and how it is told, is as with an
//! [`Engine`](crate::Engine): an error of the device or a panic ends the engine, and [`TaskMonitor::health`] says so.

use crate::engine::{Clock, EngineError, EngineStats, Health, Phase, Watchdog, panic_words};
use ferrum_types::{Error, Result};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// A model that answers whole tasks.
pub trait TaskModel: Send + 'static {
    /// What it is asked.
    type Task: Send + 'static;
    /// What it answers.
    type Answer: Send + 'static;

    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// Tokens of a task, for the figures.
    fn tokens(task: &Self::Task) -> usize;

    /// Whether `next` may be computed together with tasks of `tokens` tokens in all, of which `first` is one.
    fn joins(&self, first: &Self::Task, next: &Self::Task, tokens: usize) -> bool;

    /// Computes tasks, and gives their answers in order. Between its steps it calls `step`; when that says
    /// [`ControlFlow::Break`], nobody waits for the answers any more, and it may give fewer.
    ///
    /// # Errors
    /// `InvalidArgument` and `ContextOverflow` are the tasks' fault; anything else ends the engine.
    fn run(
        &mut self,
        tasks: &[Self::Task],
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<Self::Answer>>;
}

/// Settings of a [`TaskEngine`].
#[derive(Clone, Debug)]
pub struct TaskConfig {
    /// Most tasks that wait.
    pub max_waiting: usize,
    /// After which time without the end of a step the engine is stalled.
    pub stall_after: Duration,
    /// What it goes by.
    pub clock: Clock,
}

/// What a task got.
#[derive(Clone, Debug)]
pub struct TaskAnswer<A> {
    /// The model's answer.
    pub answer: A,
    /// How long the task waited.
    pub queued: Duration,
    /// How long it was computed.
    pub computed: Duration,
}

struct Submission<M: TaskModel> {
    task: M::Task,
    priority: i8,
    came: Duration,
    reply: oneshot::Sender<std::result::Result<TaskAnswer<M::Answer>, EngineError>>,
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
        let thread = std::thread::Builder::new().name("ferrum-tasks".into());
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

    /// A handle for whoever has tasks.
    pub fn handle(&self) -> TaskHandle<M> {
        self.handle.clone()
    }
}

impl<M: TaskModel> Drop for TaskEngine<M> {
    fn drop(&mut self) {
        // An engine that has ended reads no commands.
        let _ = self.handle.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            // Its panics are caught and told inside.
            let _ = thread.join();
        }
    }
}

/// How a [`TaskEngine`] does, whatever it runs.
#[derive(Clone, Debug)]
pub struct TaskMonitor(Arc<Shared>);

impl TaskMonitor {
    /// What the engine did and is doing. What is about caches and generated tokens is 0.
    pub fn stats(&self) -> EngineStats {
        let stats = *self.0.stats();
        EngineStats {
            waiting: self.0.queued.load(Ordering::Acquire),
            ..stats
        }
    }

    /// Whether steps end. An engine without tasks is alive.
    pub fn health(&self) -> Health {
        let shared = &self.0;
        match &*shared.phase.borrow() {
            Phase::Failed(reason) => return Health::Failed(reason.clone()),
            Phase::Stopped => return Health::Stopped,
            Phase::Running | Phase::Draining => {}
        }
        let (since_step, waited) = shared.watchdog.look(shared.config.clock.now());
        match waited {
            Some(waited) if waited > shared.config.stall_after => Health::Stalled { waited },
            _ => Health::Alive { since_step },
        }
    }

    /// Why the engine takes nothing more, if it broke.
    pub fn failure(&self) -> Option<String> {
        match &*self.0.phase.borrow() {
            Phase::Failed(reason) => Some(reason.clone()),
            Phase::Running | Phase::Draining | Phase::Stopped => None,
        }
    }

    /// Waits until the engine has ended, for whatever reason.
    pub async fn stopped(&self) {
        let mut phase = self.0.phase.subscribe();
        // The sender lives as long as this monitor.
        let _ = phase
            .wait_for(|phase| matches!(phase, Phase::Stopped | Phase::Failed(_)))
            .await;
    }
}

/// A way to a [`TaskEngine`], for many threads.
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
    /// How the engine does.
    pub fn monitor(&self) -> &TaskMonitor {
        &self.monitor
    }

    /// Takes nothing new, and stops when all tasks have ended.
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

    /// Has the model answer a task; a higher priority goes first. Dropping what this gives takes the task back.
    ///
    /// # Errors
    /// [`EngineError::Overloaded`] when the queue is full, [`EngineError::ShuttingDown`] and [`EngineError::Failed`]
    /// when the engine takes nothing more; [`EngineError::Invalid`] and [`EngineError::ContextOverflow`] for a task that
    /// the model does not take.
    pub async fn ask(
        &self,
        task: M::Task,
        priority: i8,
    ) -> std::result::Result<TaskAnswer<M::Answer>, EngineError> {
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
        let came = shared.config.clock.now();
        shared.watchdog.work_came(came);
        let (reply, answer) = oneshot::channel();
        // If nobody reads it, the reply is dropped with it.
        let _ = self.commands.send(Command::Submit(Submission {
            task,
            priority,
            came,
            reply,
        }));
        if let Ok(answer) = answer.await {
            return answer;
        }
        // A reply is dropped by an engine that ends, which then says why.
        self.monitor.stopped().await;
        let refusal = shared.phase.borrow().refusal();
        Err(refusal.unwrap_or(EngineError::ShuttingDown))
    }
}

/// What the thread has.
struct TaskLoop<M: TaskModel> {
    model: M,
    shared: Arc<Shared>,
    inbox: Receiver<Command<M>>,
    /// By priority, then as they came.
    waiting: VecDeque<Submission<M>>,
    /// Whether it ends when nothing waits.
    ends: bool,
}

impl<M: TaskModel> TaskLoop<M> {
    fn run_to_end(&mut self) {
        let backend = self.shared.backend;
        let ended = catch_unwind(AssertUnwindSafe(|| self.run()));
        let reason = match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => Some(format!("a task panicked: {}", panic_words(&*panic))),
        };
        match &reason {
            None => tracing::debug!(backend, "engine stopped"),
            Some(reason) => tracing::error!(backend, reason, "engine failed"),
        }
        let phase = reason.map_or(Phase::Stopped, Phase::Failed);
        self.shared.phase.send_replace(phase);
        // Replies that are dropped tell the phase.
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

    /// Whether it goes on.
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

    /// The next tasks that are computed together; none where nobody waits for the next one any more.
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
            replies.push((one.came, one.reply));
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
        let answers = self.model.run(&tasks, &mut step);
        let now = shared.config.clock.now();
        end_step(shared, last, now);
        {
            let mut stats = shared.stats();
            stats.running = 0;
            stats.computed_tokens += tokens as u64;
            stats.step_sizes.add(tokens);
            stats.finished_requests += replies.len() as u64;
        }
        let fault = match answers {
            Ok(answers) => {
                for ((came, reply), answer) in replies.into_iter().zip(answers) {
                    // Who asked may have gone.
                    let _ = reply.send(Ok(TaskAnswer {
                        answer,
                        queued: began.saturating_sub(came),
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

/// Books a step that ended `now`.
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

/// What is told of an error that is the tasks' fault; the others are given back.
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
