//! A group whose ranks are threads of one process: bytes go through host memory.

use super::{GroupCall, GroupHandle, GroupTransport};
use ferrum_types::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// What messages call this transport.
const NAME: &str = "local group";

/// How often a rank spins, and lets other threads run, before it sleeps: the others are mostly a few microseconds behind, and waking a
/// thread takes longer.
const SPINS: usize = 200;

/// A group of ranks in one process.
#[derive(Debug)]
pub struct LocalGroup;

impl LocalGroup {
    /// The ends of a new group of `size` ranks, by rank. Each belongs to a thread of its own.
    pub fn ranks(size: usize) -> Vec<GroupHandle> {
        let slots = (0..size).map(|_| Default::default()).collect();
        let shared = Arc::new(Shared {
            slots,
            turns: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let rank = |rank| -> GroupHandle {
            Arc::new(LocalRank {
                rank,
                turn: AtomicU64::new(0),
                shared: Arc::clone(&shared),
            })
        };
        (0..size).map(rank).collect()
    }
}

/// What all ranks see.
#[derive(Debug)]
struct Shared {
    /// What each rank posted, in even and in odd turns. A rank that posts in turn `t + 2` knows that all have posted
    /// in turn `t + 1`, so all have taken what was posted in turn `t`.
    slots: Vec<[RwLock<Slot>; 2]>,
    /// Turns in which all ranks have posted. Changed with the lock of the state held.
    turns: AtomicU64,
    state: Mutex<State>,
    /// A turn or the group has ended.
    changed: Condvar,
}

/// Bytes of a rank, aligned for every element.
#[derive(Debug, Default)]
struct Slot {
    words: Vec<u64>,
    len: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Ranks that have posted in this turn.
    posted: usize,
    /// What the first of them called.
    call: Option<(usize, GroupCall)>,
    /// The rank that ended the group, and why.
    failure: Option<(usize, String)>,
}

/// One rank's end of a [`LocalGroup`].
#[derive(Debug)]
struct LocalRank {
    rank: usize,
    /// Collectives that this rank has taken part in.
    turn: AtomicU64,
    shared: Arc<Shared>,
}

impl Slot {
    /// `len` bytes with any contents. The memory grows to the largest need and stays.
    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        let words = len.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.len = len;
        &mut bytemuck::cast_slice_mut(&mut self.words)[..len]
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl LocalRank {
    /// A thread that panicked with the lock held left nothing half done.
    fn state(&self) -> MutexGuard<'_, State> {
        let state = self.shared.state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all ranks have posted in a turn.
    fn has_ended(&self, turn: u64) -> bool {
        self.shared.turns.load(Ordering::Acquire) > turn
    }

    /// Waits a little for the others in a turn, awake.
    fn spin(&self, turn: u64) {
        for _ in 0..SPINS {
            if self.has_ended(turn) {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Which of the two slots is in use.
    fn side(&self) -> usize {
        (self.turn.load(Ordering::Relaxed) % 2) as usize
    }

    fn fail(&self, state: &mut State, reason: String) {
        state.failure.get_or_insert((self.rank, reason));
        self.shared.changed.notify_all();
    }

    /// Ends the group when `result` is an error.
    fn or_abort(&self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }

    fn ended(&self, op: &'static str, (rank, why): &(usize, String)) -> Error {
        let size = self.size();
        Error::Device {
            backend: NAME,
            op,
            reason: format!("rank {rank} of {size} ended the group: {why}"),
        }
    }
}

impl GroupTransport for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.slots.len()
    }

    fn post(
        &self,
        call: GroupCall,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(failure) = &self.state().failure {
            return Err(self.ended(call.op, failure));
        }
        let slot = self.shared.slots[self.rank][self.side()].write();
        let filled = fill(
            slot.unwrap_or_else(PoisonError::into_inner)
                .bytes_mut(bytes),
        );
        self.or_abort(filled)?;
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(self.ended(call.op, failure));
        }
        let (first, expected) = *state.call.get_or_insert((self.rank, call));
        if expected != call {
            let reason = format!("is in {call:?} and rank {first} in {expected:?}");
            self.fail(&mut state, reason.clone());
            return Err(self.ended(call.op, &(self.rank, reason)));
        }
        state.posted += 1;
        if state.posted == self.size() {
            state.posted = 0;
            state.call = None;
            self.shared.turns.fetch_add(1, Ordering::Release);
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    fn gather(&self, take: &mut dyn FnMut(&[&[u8]]) -> Result<()>) -> Result<()> {
        let turn = self.turn.load(Ordering::Relaxed);
        self.spin(turn);
        let mut state = self.state();
        // A turn that all have posted in is whole, whatever became of the group since.
        while !self.has_ended(turn) {
            if let Some(failure) = &state.failure {
                return Err(self.ended("gather", failure));
            }
            let woken = self.shared.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let side = self.side();
        let slots = self.shared.slots.iter();
        let slots: Vec<RwLockReadGuard<'_, Slot>> = slots
            .map(|slot| slot[side].read().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let parts: Vec<_> = slots.iter().map(|slot| slot.bytes()).collect();
        let taken = take(&parts);
        self.turn.store(turn + 1, Ordering::Relaxed);
        self.or_abort(taken)
    }

    fn abort(&self, reason: &str) {
        self.fail(&mut self.state(), reason.to_owned());
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.state().failure.clone()
    }
}

/// The others would wait for this rank for ever.
impl Drop for LocalRank {
    fn drop(&mut self) {
        self.abort("it went away");
    }
}
