//! [`World`]: the processes that an MPI launcher has started together.

use crate::SILENCE;
use crate::calls::Comm;
use crate::group::MpiRank;
use crate::peer::{Peer, RECORD};
use crate::watch;
use ferrum_kernels::GroupRank;
use ferrum_types::{Error, Result};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::Communicator;
use mpi::traits::{AsRaw, CommunicatorCollectives};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The processes that an MPI launcher has started together, of which this is one.
pub struct World {
    group: Arc<MpiRank>,
    /// Finalises MPI when it is dropped.
    universe: Mutex<Option<Universe>>,
}

impl World {
    /// Joins the other processes, and begins to watch over them. Ranks but the first ignore the signals that ask a
    /// process to end: rank 0 says when there is nothing left to do.
    ///
    /// # Errors
    /// `Device` when MPI was initialised before, takes calls of one thread only, or fails.
    pub fn join() -> Result<Self> {
        let fail = |reason: String| Error::Device {
            backend: "mpi",
            op: "join",
            reason,
        };
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| fail("MPI was initialised before".into()))?;
        if threading < Threading::Serialized {
            return Err(fail(format!(
                "this MPI takes calls of {threading:?}, expected Serialized or more"
            )));
        }
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        let mut records = vec![0; RECORD * size];
        world.all_gather_into(&Peer::own().to_record()[..], &mut records[..]);
        let (records, _) = records.as_chunks::<RECORD>();
        let peers: Vec<_> = records.iter().map(Peer::from_record).collect();
        // Messages of its own, whatever a library sends in the world.
        let own = std::mem::ManuallyDrop::new(world.duplicate());
        let comm = Comm::new(own.as_raw()).map_err(|e| fail(e.to_string()))?;
        let group = Arc::new(MpiRank::new(comm, rank, peers));
        watch::start(&group).map_err(|e| fail(format!("cannot start a thread: {e}")))?;
        if rank > 0 {
            ignore_signals();
        }
        Ok(Self {
            group,
            universe: Mutex::new(Some(universe)),
        })
    }

    /// This process, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.group.peers.len()
    }

    /// How many of them are on this host.
    pub fn local(&self) -> usize {
        let own = &self.group.peers[self.group.rank];
        let peers = self.group.peers.iter();
        peers.filter(|peer| peer.is_beside(own)).count()
    }

    /// This rank's end of the group of all.
    pub fn group(&self) -> GroupRank {
        Arc::clone(&self.group) as GroupRank
    }

    /// Whether another rank has said why the group ended, and says so to whoever looks.
    pub fn was_told(&self) -> bool {
        let failure = self.group.failure_here();
        failure.is_some_and(|failure| failure.told)
    }

    /// Ends this process's part. Where the group works, all ranks come here; where it has ended, so does the job, and
    /// this does not return: a rank other than the first waits for the first one to end it.
    pub fn end(&self) {
        if self.group.failure_here().is_some() {
            if self.group.rank > 0 {
                // The watch ends this process after its grace.
                std::thread::sleep(2 * SILENCE);
            }
            watch::end_job(&self.group);
        }
        let universe = self.universe.lock();
        let universe = universe.unwrap_or_else(PoisonError::into_inner).take();
        let Some(universe) = universe else {
            return;
        };
        self.group.calls().tell_leaving(&self.group);
        let until = Instant::now() + Duration::from_millis(500);
        while !self.group.calls().was_said() && Instant::now() < until {
            std::thread::yield_now();
        }
        self.group.has_left.store(true, Ordering::Release);
        let group = Arc::clone(&self.group);
        // Others may be gone by now, and MPI's own end waits for all.
        let guard = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(2 * SILENCE);
            watch::end_job(&group);
        });
        if guard.is_ok() {
            let calls = self.group.calls();
            drop(universe);
            drop(calls);
        }
    }
}

/// Rank 0 ends the job when it has answered what was asked; a terminal and `mpirun` send their signals to all.
fn ignore_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
