//! What stands for [`World`] in a build without MPI.

use ferrum_kernels::GroupRank;
use ferrum_types::{Error, Result};
use std::convert::Infallible;

/// The processes that an MPI launcher has started together. This build is none of them.
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

    /// This process, from 0.
    pub fn rank(&self) -> usize {
        match self.0 {}
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        match self.0 {}
    }

    /// How many of them are on this host.
    pub fn local(&self) -> usize {
        match self.0 {}
    }

    /// This rank's end of the group of all.
    pub fn group(&self) -> GroupRank {
        match self.0 {}
    }

    /// Whether another rank has said why the group ended, and says so to whoever looks.
    pub fn was_told(&self) -> bool {
        match self.0 {}
    }

    /// Ends this process's part.
    pub fn end(&self) {
        match self.0 {}
    }
}
