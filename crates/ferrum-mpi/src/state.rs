//! [`MpiRank`]: the state of a group that all threads of this process share.

use crate::calls::{Comm, Transfer};
use crate::collective::Collective;
use crate::peer::Peer;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Why a group has failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) reason: String,
    /// Whether another rank has reported it; this one did not detect it.
    pub(crate) from_peer: bool,
}

/// The state of the group that all threads of this process share.
#[derive(Debug)]
pub(crate) struct MpiRank {
    pub(crate) rank: usize,
    pub(crate) peers: Vec<Peer>,
    mpi: Mutex<MpiState>,
    collective: Mutex<Collective>,
    failure: Mutex<Option<Failure>>,
    has_failed: AtomicBool,
    /// Whether this rank has left after its work was done.
    pub(crate) has_left: AtomicBool,
}

/// The part of the state that one thread uses at a time: MPI, and the heartbeats that are sent through it.
#[derive(Debug)]
pub(crate) struct MpiState {
    pub(crate) comm: Comm,
    pub(crate) heartbeats: Heartbeats,
}

/// The heartbeats that this rank sends and receives, and its other control messages.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    pub(crate) last_sent: Instant,
    /// Time since the last heartbeat of each rank; `None` for a rank that has left.
    pub(crate) silent_for: Vec<Option<Duration>>,
    /// The heartbeat that is being sent to each rank.
    pub(crate) outgoing: Vec<Transfer>,
    /// The failure notice and the leave notice. Each is sent at most once.
    pub(crate) notices: [Transfer; 2],
    pub(crate) incoming: Transfer,
    /// The sender of `incoming`.
    pub(crate) source: usize,
}

impl Heartbeats {
    pub(crate) fn new(size: usize) -> Self {
        let mut outgoing = Vec::new();
        outgoing.resize_with(size, Transfer::default);
        Self {
            last_sent: Instant::now(),
            silent_for: vec![Some(Duration::ZERO); size],
            outgoing,
            notices: Default::default(),
            incoming: Transfer::default(),
            source: 0,
        }
    }
}

impl MpiRank {
    pub(crate) fn new(comm: Comm, rank: usize, peers: Vec<Peer>) -> Self {
        let size = peers.len();
        Self {
            rank,
            mpi: Mutex::new(MpiState {
                comm,
                heartbeats: Heartbeats::new(size),
            }),
            collective: Mutex::new(Collective::new(size)),
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            peers,
        }
    }

    /// Locks MPI. A lock is poisoned between two calls only, so the state is valid.
    pub(crate) fn mpi(&self) -> MutexGuard<'_, MpiState> {
        self.mpi.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks MPI unless another thread holds the lock.
    pub(crate) fn try_mpi(&self) -> Option<MutexGuard<'_, MpiState>> {
        self.mpi.try_lock().ok()
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.peers.len()).filter(move |&rank| rank != own)
    }

    /// Why the group has failed, as this rank knows; `None` while it works.
    pub(crate) fn failure(&self) -> Option<Failure> {
        match self.has_failed.load(Ordering::Acquire) {
            true => self.failures().clone(),
            false => None,
        }
    }

    fn failures(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the group as failed and reports it to the other ranks. The first failure counts.
    pub(crate) fn fail(&self, mpi: &mut MpiState, failure: Failure) {
        {
            let mut first = self.failures();
            if first.is_some() {
                return;
            }
            *first = Some(failure.clone());
            self.has_failed.store(true, Ordering::Release);
        }
        // The rank that detects a failure reports it to all others.
        if !failure.from_peer {
            mpi.broadcast_failure(self, &failure);
        }
    }

    /// Locks the collective in progress.
    pub(crate) fn collective(&self) -> MutexGuard<'_, Collective> {
        let collective = self.collective.lock();
        collective.unwrap_or_else(PoisonError::into_inner)
    }
}
