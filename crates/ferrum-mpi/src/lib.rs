//! Ranks in processes of their own, over MPI.
//!
//! [`World`] is the set of processes that `mpirun` started. Its [`GroupTransport`](ferrum_kernels::GroupTransport)
//! carries the collectives of a model's ranks. The feature `mpi` links an MPI library; without it, a process can detect
//! that it was started as a rank, and reports that this build has no MPI.
//!
//! **A dead rank ends the job.** MPI does not guarantee that: over shared memory a killed process goes unnoticed, and
//! a host whose link is down is detected after minutes. Error handlers are not called in either case, and a blocking
//! collective never returns. So all calls here are non-blocking, and a thread that waits for messages checks the state of
//! the group between two polls. Every rank sends every other rank a heartbeat five times a second, from a thread of its
//! own, so that a rank in a long computation counts as alive. A rank whose heartbeats are missing for
//! [`HEARTBEAT_TIMEOUT`], or whose process on the same host has ended, fails the group: all collectives return an error
//! that names it, and the process exits [`SHUTDOWN_GRACE`] later, so that health checks see the failure.

#[cfg(feature = "mpi")]
mod calls;
#[cfg(feature = "mpi")]
mod collective;
#[cfg(feature = "mpi")]
mod group;
#[cfg(feature = "mpi")]
mod heartbeat;
#[cfg(feature = "mpi")]
mod peer;
#[cfg(feature = "mpi")]
mod state;
// Tests of builds with MPI compile it, too, so that it stays in step with `world`.
#[cfg(any(test, not(feature = "mpi")))]
#[cfg_attr(
    feature = "mpi",
    allow(dead_code, unreachable_pub, reason = "builds without MPI use it")
)]
mod stub;
#[cfg(feature = "mpi")]
mod world;

#[cfg(not(feature = "mpi"))]
pub use stub::World;
#[cfg(feature = "mpi")]
pub use world::World;

use std::time::Duration;

/// How long heartbeats of a rank may be missing before it counts as dead.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(2500);

/// How long rank 0 keeps running after the group has failed, so that requests get their errors and health checks fail. The
/// other ranks wait half as long again, because the first process that exits ends all others.
pub const SHUTDOWN_GRACE: Duration = Duration::from_millis(1000);

/// The number of processes in the job, if an MPI launcher started this process.
pub fn launched() -> Option<usize> {
    // Open MPI; MPICH, Intel MPI and Slurm.
    let names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
    let mut sizes = names.iter().filter_map(std::env::var_os);
    sizes.find_map(|size| size.to_str()?.parse().ok())
}
