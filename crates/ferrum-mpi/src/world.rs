//! [`World`]: the processes of an MPI job.

use crate::HEARTBEAT_TIMEOUT;
use crate::calls::Comm;
use crate::heartbeat;
use crate::peer::{Peer, RECORD};
use crate::state::MpiRank;
use ferrum_kernels::GroupHandle;
use ferrum_types::{Error, Result};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::Communicator;
use mpi::traits::{AsRaw, CommunicatorCollectives};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The processes of an MPI job, of which this is one.
pub struct World {
    group: Arc<MpiRank>,
    /// Finalises MPI when it is dropped.
    universe: Mutex<Option<Universe>>,
}

impl World {
    /// Joins the other processes, and starts to monitor them. Ranks other than 0 ignore the signals that ask a process to
    /// terminate: rank 0 tells them when the job is done.
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
        // A communicator of its own keeps its messages apart from those of libraries.
        let own = std::mem::ManuallyDrop::new(world.duplicate());
        let comm = Comm::new(own.as_raw()).map_err(|e| fail(e.to_string()))?;
        let group = Arc::new(MpiRank::new(comm, rank, peers));
        heartbeat::start_monitor(&group)
            .map_err(|e| fail(format!("cannot start a thread: {e}")))?;
        if rank > 0 {
            ignore_signals();
        }
        Ok(Self {
            group,
            universe: Mutex::new(Some(universe)),
        })
    }

    /// The rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.group.peers.len()
    }

    /// The number of processes on this host.
    pub fn local_size(&self) -> usize {
        let own = &self.group.peers[self.group.rank];
        let peers = self.group.peers.iter();
        peers.filter(|peer| peer.shares_system(own)).count()
    }

    /// Of the processes on this host, how many have a lower rank.
    pub fn local_rank(&self) -> usize {
        let (peers, rank) = (&self.group.peers, self.group.rank);
        let lower = peers[..rank].iter();
        lower
            .filter(|peer| peer.shares_system(&peers[rank]))
            .count()
    }

    /// This rank's transport.
    pub fn group(&self) -> GroupHandle {
        Arc::clone(&self.group) as GroupHandle
    }

    /// Whether the group has failed and another rank has reported why.
    pub fn failure_is_from_peer(&self) -> bool {
        let failure = self.group.failure();
        failure.is_some_and(|failure| failure.from_peer)
    }

    /// Leaves the group and finalises MPI. All ranks of a working group call this. In a group that has failed, this ends
    /// the job and does not return; ranks other than 0 wait for rank 0 to do it.
    pub fn finalize(&self) {
        if self.group.failure().is_some() {
            if self.group.rank > 0 {
                // The monitor thread ends this process after its grace period.
                std::thread::sleep(2 * HEARTBEAT_TIMEOUT);
            }
            heartbeat::abort_job(&self.group);
        }
        let universe = self.universe.lock();
        let universe = universe.unwrap_or_else(PoisonError::into_inner).take();
        let Some(universe) = universe else {
            return;
        };
        self.group.mpi().broadcast_leave(&self.group);
        let until = Instant::now() + Duration::from_millis(500);
        while !self.group.mpi().notices_sent() && Instant::now() < until {
            std::thread::yield_now();
        }
        self.group.has_left.store(true, Ordering::Release);
        let group = Arc::clone(&self.group);
        // MPI_Finalize waits for all ranks, and some may be dead by now.
        let guard = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(2 * HEARTBEAT_TIMEOUT);
            heartbeat::abort_job(&group);
        });
        if guard.is_ok() {
            let mpi = self.group.mpi();
            drop(universe);
            drop(mpi);
        }
    }
}

/// A terminal and `mpirun` send signals to all processes, but rank 0 alone decides when the job ends: after it has
/// answered its requests.
fn ignore_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
