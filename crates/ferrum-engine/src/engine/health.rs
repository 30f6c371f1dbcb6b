//! Engine health: a watchdog on completed steps.

use crate::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of consecutive requests that failed with NaN after which an engine is degraded. Fewer may be caused by the
/// requests.
pub const DEGRADED_AFTER: u32 = 3;

/// Clock for deadlines and health: the time since some start.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    System(Instant),
    /// Microseconds.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's clock, at 0 now.
    pub fn system() -> Self {
        Self(Source::System(Instant::now()))
    }

    /// A clock that stands at 0 and moves by [`advance`](Self::advance) only; its clones move with it.
    pub fn manual() -> Self {
        Self(Source::Manual(Arc::default()))
    }

    /// Moves a manual clock; the machine's own cannot be moved.
    pub fn advance(&self, by: Duration) {
        if let Source::Manual(at) = &self.0 {
            at.fetch_add(micros(by), Ordering::AcqRel);
        }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Source::System(start) => start.elapsed(),
            Source::Manual(at) => Duration::from_micros(at.load(Ordering::Acquire)),
        }
    }
}

/// What [`EngineHandle::health`](super::EngineHandle::health) found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Steps end, or there is nothing to do.
    Alive {
        /// Time since the last step ended (or since the start).
        since_step: Duration,
    },
    /// Steps end, but at least the last [`DEGRADED_AFTER`] requests failed because the model computed NaN for them.
    /// Requests are still accepted: they may be the cause. The first row without NaN ends this state.
    Degraded {
        /// Number of consecutive failed requests.
        failures: u32,
    },
    /// There is work, and no step ends.
    Stalled {
        /// For how long.
        waited: Duration,
    },
    /// A step failed; the engine takes no more requests.
    Failed(String),
    /// The engine was shut down.
    Stopped,
}

impl Health {
    /// Whether requests can be expected to be answered.
    pub fn is_alive(&self) -> bool {
        matches!(self, Health::Alive { .. } | Health::Degraded { .. })
    }
}

/// No work.
const NEVER: u64 = u64::MAX;

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(NEVER - 1)
}

/// When the last step ended, and since when work is waiting.
#[derive(Debug)]
pub(crate) struct Watchdog {
    last_step: AtomicU64,
    /// When work arrived while the engine was idle; [`NEVER`]: the engine is idle.
    work_since: AtomicU64,
    /// Expected duration of the step in flight, in microseconds; 0: unknown.
    expected: AtomicU64,
}

impl Watchdog {
    pub(crate) fn new(now: Duration) -> Self {
        Self {
            last_step: AtomicU64::new(micros(now)),
            work_since: AtomicU64::new(NEVER),
            expected: AtomicU64::new(0),
        }
    }

    pub(crate) fn step_begins(&self, expected: Duration) {
        self.expected.store(micros(expected), Ordering::Release);
    }

    /// Expected duration of the step in flight, or of the last one; zero: unknown.
    pub(crate) fn expected(&self) -> Duration {
        Duration::from_micros(self.expected.load(Ordering::Acquire))
    }

    pub(crate) fn work_arrived(&self, now: Duration) {
        // Only the first counts.
        self.work_since.fetch_min(micros(now), Ordering::AcqRel);
    }

    pub(crate) fn step_ended(&self, now: Duration) {
        self.last_step.store(micros(now), Ordering::Release);
    }

    pub(crate) fn idle(&self) {
        self.work_since.store(NEVER, Ordering::Release);
        self.expected.store(0, Ordering::Release);
    }

    /// Time since the last step, and, if there is work, how long it has waited for a step to end.
    pub(crate) fn poll(&self, now: Duration) -> (Duration, Option<Duration>) {
        let last = self.last_step.load(Ordering::Acquire);
        let work = self.work_since.load(Ordering::Acquire);
        let since = |at: u64| now.saturating_sub(Duration::from_micros(at));
        let waited = (work != NEVER).then(|| since(work.max(last)));
        (since(last), waited)
    }
}
