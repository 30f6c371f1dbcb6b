//! The rank that weights were cut for. A weight checks it against its context before it sums or gathers over ranks.

use crate::inventory::RankShard;
use ferrum_kernels::BackendCollective;
use ferrum_types::{Error, Result};

/// Which rank of how many a weight was cut for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankIndex {
    rank: usize,
    ranks: usize,
}

impl RankIndex {
    pub(crate) fn of(cut: &RankShard) -> Self {
        Self {
            rank: cut.rank(),
            ranks: cut.ranks(),
        }
    }

    /// This rank's of what all ranks have.
    pub(crate) fn of_rank(self, all: &[usize]) -> usize {
        all.get(self.rank).copied().unwrap_or(0)
    }

    /// A context of another rank would give the sums of other weights.
    pub(crate) fn check<B: BackendCollective>(self, ctx: &B::Context) -> Result<()> {
        let Self { rank, ranks } = self;
        let (found, size) = (B::rank(ctx), B::world_size(ctx));
        if (found, size) == (rank, ranks) {
            return Ok(());
        }
        let reason = format!(
            "the weights are those of rank {rank} of {ranks}, the context is rank {found} of {size}"
        );
        Err(Error::invalid("linear", reason))
    }
}
