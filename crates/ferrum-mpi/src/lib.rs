//! Ranks in processes of their own, over MPI.
//!
//! [`World`] is what a process that `mpirun` started is among: its [`GroupTransport`](ferrum_kernels::GroupTransport)
//! carries the collectives of a model's ranks. The feature `mpi` links an MPI library; without it, a process can tell
//! that it was started as a rank and that this build cannot be one.
//!
//! **A rank that is gone ends the job.** MPI itself does not promise that: over shared memory nobody notices that a
//! process was killed, and a host whose link is down is silent for minutes. Error handlers are not asked in either case,
//! and a blocking collective never returns. So no call here blocks: messages are sent and received without waiting, and
//! whoever waits looks at the state of the group between two looks at its messages. Every rank sends every other one a
//! sign of life five times a second, from a thread of its own, so that a rank which computes for long counts as alive.
//! One that is silent for [`SILENCE`], or whose process on the same host has ended, has ended the group: all collectives
//! give an error that names it, and the process ends [`GRACE`] later, when health has been seen to be red.

#[cfg(feature = "mpi")]
mod calls;
#[cfg(feature = "mpi")]
mod group;
// Builds with MPI compile it for their tests, so that it stays right.
#[cfg(any(test, not(feature = "mpi")))]
#[cfg_attr(
    feature = "mpi",
    allow(dead_code, unreachable_pub, reason = "it is for builds without MPI")
)]
mod missing;
#[cfg(feature = "mpi")]
mod peer;
#[cfg(feature = "mpi")]
mod watch;
#[cfg(feature = "mpi")]
mod world;

#[cfg(not(feature = "mpi"))]
pub use missing::World;
#[cfg(feature = "mpi")]
pub use world::World;

use std::time::Duration;

/// How long a rank may be silent before it counts as gone.
pub const SILENCE: Duration = Duration::from_millis(2500);

/// How long rank 0 goes on after the group has ended, so that requests are told and health is seen to be red. The other
/// ranks give it half as long again: the first process that ends takes all others with it.
pub const GRACE: Duration = Duration::from_millis(1000);

/// How many ranks this process was started among, where an MPI launcher has started it.
pub fn launched() -> Option<usize> {
    // Open MPI; MPICH, Intel MPI and Slurm.
    let names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
    let mut sizes = names.iter().filter_map(std::env::var_os);
    sizes.find_map(|size| size.to_str()?.parse().ok())
}
