//! [`World`] in a build without MPI: a type that cannot be created.

use ferrum_kernels::GroupHandle;
use ferrum_types::{Error, Result};
use std::convert::Infallible;

/// The processes of an MPI job. A build without MPI cannot be one of them.
#[derive(Debug)]
pub struct World(Infallible);

impl World {
    /// Joins the other processes.
    ///
    /// # Errors
    /// `Unsupported`: this build has no MPI.
    pub fn join() -> Result<Self> {
        Err(Error::Unsupported {
            op: "ranks",
            backend: "mpi",
            reason: "this build has no MPI".into(),
            hint: "build with --features mpi, or leave out mpirun: the ranks are threads of one process then".into(),
        })
    }

    /// The rank of this process, from 0.
    pub fn rank(&self) -> usize {
        match self.0 {}
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        match self.0 {}
    }

    /// The number of processes on this host.
    pub fn local_size(&self) -> usize {
        match self.0 {}
    }

    /// Of the processes on this host, how many have a lower rank.
    pub fn local_rank(&self) -> usize {
        match self.0 {}
    }

    /// This rank's transport.
    pub fn group(&self) -> GroupHandle {
        match self.0 {}
    }

    /// Whether the group has failed and another rank has reported why.
    pub fn failure_is_from_peer(&self) -> bool {
        match self.0 {}
    }

    /// Leaves the group and finalises MPI.
    pub fn finalize(&self) {
        match self.0 {}
    }
}
