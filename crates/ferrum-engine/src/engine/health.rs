//! Whether an engine is alive: not whether its thread exists, but whether its steps end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Requests in a row for which the model computed no numbers, from which on an engine is degraded: fewer may
/// be the requests' fault.
pub const DEGRADED_AFTER: u32 = 3;

/// What an engine goes by for deadlines and health: the time since some start.
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
    /// Steps end, but the last requests were failed because the model computed NaN for them, at least
    /// [`DEGRADED_AFTER`] and none that went well between. Requests are still taken: it may be they that
    /// are odd. The first row of numbers ends it.
    Degraded {
        /// Requests that failed in a row.
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

/// When the engine last ended a step, and since when it should have.
#[derive(Debug)]
pub(crate) struct Watchdog {
    last_step: AtomicU64,
    /// When the first work came that no step has ended for; [`NEVER`]: there is none.
    work_since: AtomicU64,
    /// What the step under way should take, in microseconds; 0: nobody knows.
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

    /// What the step under way, or the last one, should take.
    pub(crate) fn expected(&self) -> Duration {
        Duration::from_micros(self.expected.load(Ordering::Acquire))
    }

    pub(crate) fn work_came(&self, now: Duration) {
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

    /// Time since the last step, and for how long a step is overdue.
    pub(crate) fn look(&self, now: Duration) -> (Duration, Option<Duration>) {
        let last = self.last_step.load(Ordering::Acquire);
        let work = self.work_since.load(Ordering::Acquire);
        let since = |at: u64| now.saturating_sub(Duration::from_micros(at));
        let waited = (work != NEVER).then(|| since(work.max(last)));
        (since(last), waited)
    }
}
