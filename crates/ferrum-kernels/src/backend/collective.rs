//! Collectives between ranks that share a model. Alone, each is the identity.

use super::{Act, Backend, check};
use ferrum_types::Result;

/// How [`BackendCollective::all_reduce`] combines ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum, in rank order.
    Sum,
    /// Largest.
    Max,
    /// Smallest.
    Min,
}

/// Ranks and what they exchange. The provided methods are those of a single rank.
pub trait BackendCollective: Backend {
    /// Number of ranks.
    fn world_size(_ctx: &Self::Context) -> usize {
        1
    }

    /// This rank, from 0.
    fn rank(_ctx: &Self::Context) -> usize {
        0
    }

    /// Combines `buf[..len]` over all ranks; every rank gets the result.
    fn all_reduce(
        _ctx: &mut Self::Context,
        buf: &mut Act<Self>,
        len: usize,
        _op: ReduceOp,
    ) -> Result<()> {
        check::len("all_reduce", "buf", buf, len)
    }

    /// `dst[rank · len..][..len]` = that rank's `src[..len]`.
    fn all_gather(
        ctx: &mut Self::Context,
        src: &Act<Self>,
        dst: &mut Act<Self>,
        len: usize,
    ) -> Result<()> {
        Self::copy_slice(ctx, src, 0, dst, 0, len)
    }

    /// Every rank's `buf[..len]` becomes that of `root`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ferrum_types::Error::InvalidArgument) when `root` is not a rank.
    fn broadcast(
        ctx: &mut Self::Context,
        buf: &mut Act<Self>,
        len: usize,
        root: usize,
    ) -> Result<()> {
        let world = Self::world_size(ctx);
        if root >= world {
            let reason = format!("root {root} is not one of {world} ranks");
            return Err(ferrum_types::Error::invalid("broadcast", reason));
        }
        check::len("broadcast", "buf", buf, len)
    }
}
