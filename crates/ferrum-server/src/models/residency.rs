//! Model residency: decides which models to load and evict. Decisions only.
//!
//! Has no clock, threads or I/O: callers pass the time and carry out the returned action, so tests need no model.
//!
//! Capacity is fixed; loading and unloading models count. Waiting models queue. The first takes free capacity or evicts
//! the least recently used idle model. If no model is idle and the queue has waited for `min_residency`, one that has been
//! loaded for as long stops accepting requests, finishes its running requests and is evicted: the one requested least
//! recently.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A loaded model.
pub(super) trait Resident {
    /// It has ended by a fault: its memory is free, and it stays only to say so.
    fn has_failed(&self) -> bool;
}

/// Load state of a model.
#[derive(Debug)]
pub(super) enum State<T> {
    Unloaded,
    Loading,
    Loaded(T),
    /// Accepts no requests, and has not ended yet.
    Unloading(T),
}

/// A model.
#[derive(Debug)]
pub(super) struct ModelState<T> {
    pub(super) state: State<T>,
    /// Requests that use it, and those that will as soon as it is loaded: it stays for them.
    holds: usize,
    /// Requests that wait for it.
    waiting: usize,
    /// Loads that were begun.
    pub(super) attempts: u64,
    /// The last load, if it came to nothing: its number and why.
    pub(super) failure: Option<(u64, String)>,
    loaded_at: Instant,
    /// When it was last asked for.
    requested_at: Instant,
    /// When its last hold was released.
    idle_since: Instant,
}

/// What a waiting request has so far.
#[derive(Debug, Default)]
pub(super) struct LoadWaiter {
    /// Whether it is counted among the holds.
    holds: bool,
    /// The load that it waits for.
    joined: Option<u64>,
}

/// What to do for a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The model is there, and held.
    Take,
    /// Load the model now.
    Load,
    /// Unload this one now.
    Unload(usize),
    /// Poll again after a change.
    Wait,
    /// The load that the request waited for failed.
    Failed(String),
}

/// Which model has been idle for the idle timeout.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum IdleExpiry {
    /// This one has.
    Expired(usize),
    /// None before this time is over.
    In(Duration),
    /// None is idle.
    Never,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Residency<T> {
    pub(super) models: Vec<ModelState<T>>,
    /// Models that wait for capacity, and since when.
    queue: VecDeque<(usize, Instant)>,
    capacity: usize,
    min_residency: Duration,
}

impl<T: Resident> Residency<T> {
    /// `count` models, of which `capacity` may be loaded. The module explains `min_residency`.
    pub(super) fn new(
        count: usize,
        capacity: usize,
        min_residency: Duration,
        now: Instant,
    ) -> Self {
        let model = |_| ModelState {
            state: State::Unloaded,
            holds: 0,
            waiting: 0,
            attempts: 0,
            failure: None,
            loaded_at: now,
            requested_at: now,
            idle_since: now,
        };
        Self {
            models: (0..count).map(model).collect(),
            queue: VecDeque::new(),
            // With no capacity, no request would ever be answered.
            capacity: capacity.max(1),
            min_residency,
        }
    }

    /// Requests that wait for a model.
    pub(super) fn waiting(&self, index: usize) -> usize {
        self.models[index].waiting
    }

    /// A request comes to wait.
    pub(super) fn enqueue(&mut self, index: usize) -> LoadWaiter {
        self.models[index].waiting += 1;
        LoadWaiter::default()
    }

    /// What to do for a request that came. After `Take` it has left, and holds the model.
    pub(super) fn poll(&mut self, index: usize, waiter: &mut LoadWaiter, now: Instant) -> Action {
        match self.models[index].state {
            State::Loaded(_) => {
                // Who has waited for it to be loaded is never turned away.
                if !waiter.holds && self.is_draining(index, now) {
                    return Action::Wait;
                }
                let model = &mut self.models[index];
                model.holds += usize::from(!waiter.holds);
                model.waiting -= 1;
                model.requested_at = now;
                Action::Take
            }
            State::Loading => {
                self.join(index, waiter);
                Action::Wait
            }
            State::Unloading(_) => Action::Wait,
            State::Unloaded => self.poll_unloaded(index, waiter, now),
        }
    }

    /// Counts a request among those that a load is for.
    fn join(&mut self, index: usize, waiter: &mut LoadWaiter) {
        let model = &mut self.models[index];
        model.holds += usize::from(!waiter.holds);
        waiter.holds = true;
        waiter.joined = Some(model.attempts);
    }

    fn poll_unloaded(&mut self, index: usize, waiter: &mut LoadWaiter, now: Instant) -> Action {
        if let (Some(joined), Some((failed, reason))) = (waiter.joined, &self.models[index].failure)
            && *failed >= joined
        {
            return Action::Failed(reason.clone());
        }
        let known = self.queue.iter().position(|&(other, _)| other == index);
        let position = known.unwrap_or_else(|| {
            self.queue.push_back((index, now));
            self.queue.len() - 1
        });
        let (free, coming) = self.free_capacity();
        if position < free {
            self.queue.remove(position);
            let model = &mut self.models[index];
            model.attempts += 1;
            model.state = State::Loading;
            self.join(index, waiter);
            return Action::Load;
        }
        match self.lru_idle() {
            Some(idle) if position >= free + coming => Action::Unload(idle),
            _ => Action::Wait,
        }
    }

    /// A request goes without the model.
    pub(super) fn cancel(&mut self, index: usize, waiter: &LoadWaiter, now: Instant) {
        self.models[index].waiting -= 1;
        if waiter.holds {
            self.release(index, now);
        }
        if self.models[index].waiting == 0 {
            self.queue.retain(|&(other, _)| other != index);
        }
    }

    /// One more holds a model that is held.
    pub(super) fn hold(&mut self, index: usize) {
        self.models[index].holds += 1;
    }

    /// Releases a hold of a model; returns whether it was the last.
    pub(super) fn release(&mut self, index: usize, now: Instant) -> bool {
        let model = &mut self.models[index];
        model.holds -= 1;
        model.idle_since = now;
        model.holds == 0
    }

    /// A load has ended.
    pub(super) fn loaded(&mut self, index: usize, outcome: Result<T, String>, now: Instant) {
        let model = &mut self.models[index];
        match outcome {
            Ok(resident) => {
                model.state = State::Loaded(resident);
                model.failure = None;
                (model.loaded_at, model.idle_since) = (now, now);
            }
            Err(reason) => {
                model.state = State::Unloaded;
                model.failure = Some((model.attempts, reason));
            }
        }
    }

    /// Begins to unload a model, and gives what stands there; `None` when it is not loaded.
    pub(super) fn unload(&mut self, index: usize) -> Option<&mut T> {
        let model = &mut self.models[index];
        match std::mem::replace(&mut model.state, State::Unloaded) {
            State::Loaded(resident) => model.state = State::Unloading(resident),
            other => model.state = other,
        }
        match &mut model.state {
            State::Unloading(resident) => Some(resident),
            _ => None,
        }
    }

    /// A model has ended.
    pub(super) fn unloaded(&mut self, index: usize) -> State<T> {
        std::mem::replace(&mut self.models[index].state, State::Unloaded)
    }

    /// The model that has been idle longest, if it has been for `timeout`.
    pub(super) fn idle_expiry(&self, timeout: Duration, now: Instant) -> IdleExpiry {
        let resting = self.models.iter().enumerate().filter(|(_, model)| {
            model.holds == 0 && model.waiting == 0 && model.is_loaded_and_well()
        });
        let left =
            |model: &ModelState<T>| timeout.saturating_sub(now.duration_since(model.idle_since));
        let first = resting.min_by_key(|(_, model)| left(model));
        match first {
            Some((index, model)) if left(model).is_zero() => IdleExpiry::Expired(index),
            Some((_, model)) => IdleExpiry::In(left(model)),
            None => IdleExpiry::Never,
        }
    }

    /// Places that are free, and those that will be.
    fn free_capacity(&self) -> (usize, usize) {
        let (mut taken, mut coming) = (0, 0);
        for model in &self.models {
            match &model.state {
                State::Unloaded => {}
                State::Loaded(resident) if resident.has_failed() => {}
                State::Loaded(_) | State::Loading => taken += 1,
                State::Unloading(_) => coming += 1,
            }
        }
        (self.capacity.saturating_sub(taken + coming), coming)
    }

    /// The idle model that was used least recently.
    fn lru_idle(&self) -> Option<usize> {
        let idle = self.models.iter().enumerate();
        let idle = idle.filter(|(_, model)| model.holds == 0 && model.is_loaded_and_well());
        let oldest = idle.min_by_key(|(_, model)| model.idle_since);
        oldest.map(|(index, _)| index)
    }

    /// Whether a loaded model accepts no new requests, so that it becomes idle and is evicted.
    fn is_draining(&self, index: usize, now: Instant) -> bool {
        let Some(&(_, since)) = self.queue.front() else {
            return false;
        };
        let over = |since: Instant| now.duration_since(since) >= self.min_residency;
        let other_goes = self.lru_idle().is_some_and(|idle| idle != index);
        if !over(since) || self.free_capacity() != (0, 0) || other_goes {
            return false;
        }
        let models = self.models.iter().enumerate();
        let replaceable =
            models.filter(|(_, model)| model.is_loaded_and_well() && over(model.loaded_at));
        let oldest = replaceable.min_by_key(|(_, model)| model.requested_at);
        oldest.is_some_and(|(oldest, _)| oldest == index)
    }
}

impl<T: Resident> ModelState<T> {
    fn is_loaded_and_well(&self) -> bool {
        matches!(&self.state, State::Loaded(resident) if !resident.has_failed())
    }

    /// The resident, also while it is being unloaded.
    pub(super) fn resident(&self) -> Option<&T> {
        match &self.state {
            State::Loaded(resident) | State::Unloading(resident) => Some(resident),
            State::Unloaded | State::Loading => None,
        }
    }
}
