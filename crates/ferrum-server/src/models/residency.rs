//! Which models are loaded, who waits for one, and which has to go: decisions only.
//!
//! Nothing here waits, loads or looks at a clock: each question brings the time, and each answer says what
//! to do. So the order of things can be tested without any model.
//!
//! There are so many places; a model that is being loaded or unloaded has one, too. Models that want one
//! stand in a queue. The first takes a free place, or that of the idle model that was used least recently.
//! Where no model is ever idle, one that has been loaded for a turn takes nobody new while the queue has
//! waited that long, so it becomes idle; what it has begun goes on to its end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What stands in a place.
pub(super) trait Resident {
    /// It has ended by a fault: its memory is free, and it stays only to say so.
    fn has_failed(&self) -> bool;
}

/// Where a model is in its life.
#[derive(Debug)]
pub(super) enum State<T> {
    Unloaded,
    Loading,
    Loaded(T),
    /// Takes nothing more, and has not ended yet.
    Unloading(T),
}

/// A model.
#[derive(Debug)]
pub(super) struct Slot<T> {
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
    asked_at: Instant,
    /// Since when nobody holds it.
    idle_since: Instant,
}

/// What a waiting request has so far.
#[derive(Debug, Default)]
pub(super) struct Ticket {
    /// Whether it is counted among the holds.
    holds: bool,
    /// The load that it waits for.
    joined: Option<u64>,
}

/// What to do for a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The model is there, and held.
    Take,
    /// Load the model now.
    Load,
    /// Unload this one now.
    Unload(usize),
    /// Ask again when something has changed.
    Wait,
    /// The load that the request waited for came to nothing.
    Failed(String),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Residency<T> {
    pub(super) slots: Vec<Slot<T>>,
    /// Models that want a place, and since when.
    queue: VecDeque<(usize, Instant)>,
    most: usize,
    turn: Duration,
}

impl<T: Resident> Residency<T> {
    /// `count` models, of which `most` may be loaded. See the module about `turn`.
    pub(super) fn new(count: usize, most: usize, turn: Duration, now: Instant) -> Self {
        let slot = |_| Slot {
            state: State::Unloaded,
            holds: 0,
            waiting: 0,
            attempts: 0,
            failure: None,
            loaded_at: now,
            asked_at: now,
            idle_since: now,
        };
        Self {
            slots: (0..count).map(slot).collect(),
            queue: VecDeque::new(),
            // With none, nobody would ever be answered.
            most: most.max(1),
            turn,
        }
    }

    /// Requests that wait for a model.
    pub(super) fn waiting(&self, index: usize) -> usize {
        self.slots[index].waiting
    }

    /// A request comes to wait.
    pub(super) fn come(&mut self, index: usize) -> Ticket {
        self.slots[index].waiting += 1;
        Ticket::default()
    }

    /// What to do for a request that came. After `Take` it has left, and holds the model.
    pub(super) fn ask(&mut self, index: usize, ticket: &mut Ticket, now: Instant) -> Answer {
        match self.slots[index].state {
            State::Loaded(_) => {
                // Who has waited for it to be loaded is never turned away.
                if !ticket.holds && self.is_closed(index, now) {
                    return Answer::Wait;
                }
                let slot = &mut self.slots[index];
                slot.holds += usize::from(!ticket.holds);
                slot.waiting -= 1;
                slot.asked_at = now;
                Answer::Take
            }
            State::Loading => {
                self.join(index, ticket);
                Answer::Wait
            }
            State::Unloading(_) => Answer::Wait,
            State::Unloaded => self.ask_for_place(index, ticket, now),
        }
    }

    /// Counts a request among those that a load is for.
    fn join(&mut self, index: usize, ticket: &mut Ticket) {
        let slot = &mut self.slots[index];
        slot.holds += usize::from(!ticket.holds);
        ticket.holds = true;
        ticket.joined = Some(slot.attempts);
    }

    fn ask_for_place(&mut self, index: usize, ticket: &mut Ticket, now: Instant) -> Answer {
        if let (Some(joined), Some((failed, reason))) = (ticket.joined, &self.slots[index].failure)
            && *failed >= joined
        {
            return Answer::Failed(reason.clone());
        }
        let known = self.queue.iter().position(|&(other, _)| other == index);
        let position = known.unwrap_or_else(|| {
            self.queue.push_back((index, now));
            self.queue.len() - 1
        });
        let (free, coming) = self.room();
        if position < free {
            self.queue.remove(position);
            let slot = &mut self.slots[index];
            slot.attempts += 1;
            slot.state = State::Loading;
            self.join(index, ticket);
            return Answer::Load;
        }
        match self.victim() {
            Some(victim) if position >= free + coming => Answer::Unload(victim),
            _ => Answer::Wait,
        }
    }

    /// A request goes without the model.
    pub(super) fn leave(&mut self, index: usize, ticket: &Ticket, now: Instant) {
        self.slots[index].waiting -= 1;
        if ticket.holds {
            self.release(index, now);
        }
        if self.slots[index].waiting == 0 {
            self.queue.retain(|&(other, _)| other != index);
        }
    }

    /// One more holds a model that is held.
    pub(super) fn hold(&mut self, index: usize) {
        self.slots[index].holds += 1;
    }

    /// Whoever held a model lets go of it. Whether it was the last.
    pub(super) fn release(&mut self, index: usize, now: Instant) -> bool {
        let slot = &mut self.slots[index];
        slot.holds -= 1;
        slot.idle_since = now;
        slot.holds == 0
    }

    /// A load has ended.
    pub(super) fn loaded(&mut self, index: usize, outcome: Result<T, String>, now: Instant) {
        let slot = &mut self.slots[index];
        match outcome {
            Ok(resident) => {
                slot.state = State::Loaded(resident);
                slot.failure = None;
                (slot.loaded_at, slot.idle_since) = (now, now);
            }
            Err(reason) => {
                slot.state = State::Unloaded;
                slot.failure = Some((slot.attempts, reason));
            }
        }
    }

    /// Begins to unload a model, and gives what stands there; `None` when it is not loaded.
    pub(super) fn unload(&mut self, index: usize) -> Option<&mut T> {
        let slot = &mut self.slots[index];
        match std::mem::replace(&mut slot.state, State::Unloaded) {
            State::Loaded(resident) => slot.state = State::Unloading(resident),
            other => slot.state = other,
        }
        match &mut slot.state {
            State::Unloading(resident) => Some(resident),
            _ => None,
        }
    }

    /// A model has ended.
    pub(super) fn unloaded(&mut self, index: usize) -> State<T> {
        std::mem::replace(&mut self.slots[index].state, State::Unloaded)
    }

    /// A model that nobody has used for so long, or else the time until there may be one.
    pub(super) fn overdue(&self, idle: Duration, now: Instant) -> Result<usize, Option<Duration>> {
        let resting =
            self.slots.iter().enumerate().filter(|(_, slot)| {
                slot.holds == 0 && slot.waiting == 0 && slot.is_loaded_and_well()
            });
        let left = |slot: &Slot<T>| idle.saturating_sub(now.duration_since(slot.idle_since));
        let first = resting.min_by_key(|(_, slot)| left(slot));
        match first {
            Some((index, slot)) if left(slot).is_zero() => Ok(index),
            first => Err(first.map(|(_, slot)| left(slot))),
        }
    }

    /// Places that are free, and those that will be.
    fn room(&self) -> (usize, usize) {
        let (mut taken, mut coming) = (0, 0);
        for slot in &self.slots {
            match &slot.state {
                State::Unloaded => {}
                State::Loaded(resident) if resident.has_failed() => {}
                State::Loaded(_) | State::Loading => taken += 1,
                State::Unloading(_) => coming += 1,
            }
        }
        (self.most.saturating_sub(taken + coming), coming)
    }

    /// The idle model that was used least recently.
    fn victim(&self) -> Option<usize> {
        let idle = self.slots.iter().enumerate();
        let idle = idle.filter(|(_, slot)| slot.holds == 0 && slot.is_loaded_and_well());
        let oldest = idle.min_by_key(|(_, slot)| slot.idle_since);
        oldest.map(|(index, _)| index)
    }

    /// Whether a loaded model takes nobody new, so that others get its place.
    fn is_closed(&self, index: usize, now: Instant) -> bool {
        let Some(&(_, since)) = self.queue.front() else {
            return false;
        };
        let over = |since: Instant| now.duration_since(since) >= self.turn;
        let other_goes = self.victim().is_some_and(|victim| victim != index);
        if !over(since) || self.room() != (0, 0) || other_goes {
            return false;
        }
        let slots = self.slots.iter().enumerate();
        let had_turn = slots.filter(|(_, slot)| slot.is_loaded_and_well() && over(slot.loaded_at));
        let oldest = had_turn.min_by_key(|(_, slot)| slot.asked_at);
        oldest.is_some_and(|(oldest, _)| oldest == index)
    }
}

impl<T: Resident> Slot<T> {
    fn is_loaded_and_well(&self) -> bool {
        matches!(&self.state, State::Loaded(resident) if !resident.has_failed())
    }

    /// What stands there, be it on its way out.
    pub(super) fn resident(&self) -> Option<&T> {
        match &self.state {
            State::Loaded(resident) | State::Unloading(resident) => Some(resident),
            State::Unloaded | State::Loading => None,
        }
    }
}
