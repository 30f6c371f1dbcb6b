//! Blocks that are not on the device and need not be computed: what a sequence is given before it is admitted.

use super::Scheduler;
use super::sequence::Sequence;
use crate::offload::StoredBlock;
use crate::pool::{BlockPool, BlockTable, CacheSalt, CachedPrefix};
use ferrum_types::{BlockId, SeqId, TokenId};
use std::fmt;
use std::sync::Arc;

/// Where blocks are that the device has no room for.
pub(crate) trait HostBlocks: Send + fmt::Debug {
    /// What there is for a sequence that waits.
    fn find(&mut self, seq: SeqId, query: HostQuery<'_>) -> HostPrefix;

    /// A sequence was admitted, or is gone.
    fn forget(&mut self, seq: SeqId);
}

/// Blocks that a sequence could use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostQuery<'a> {
    pub(crate) salt: &'a CacheSalt,
    pub(crate) tokens: &'a [TokenId],
    /// Blocks that the device has.
    pub(crate) from: usize,
    /// Blocks that need not be computed at most.
    pub(crate) most: usize,
}

/// What was found.
#[derive(Debug)]
pub(crate) enum HostPrefix {
    /// These blocks, the first of them the first that was asked for.
    Ready(Vec<HostBlock>),
    /// Files are being read; the sequence waits, and others go before it.
    Reading,
}

/// A block outside of the device.
#[derive(Clone, Debug)]
pub(crate) struct HostBlock {
    pub(crate) stored: Arc<StoredBlock>,
    /// Whether it had to be read from a file.
    pub(crate) from_disk: bool,
}

/// A block to be written to the device before the next step.
#[derive(Debug)]
pub(crate) struct Restore {
    pub(crate) to: BlockId,
    pub(crate) from: HostBlock,
}

impl Scheduler {
    /// Looks for blocks there, too, from now on, and remembers what the device gives away.
    #[must_use]
    pub(crate) fn with_host(mut self, host: Box<dyn HostBlocks>) -> Self {
        self.pool.record_evictions();
        self.host = Some(host);
        self
    }

    /// Blocks whose memory has a new owner, who has not written to it yet. Asked for after each plan, and before
    /// what [`take_restores`](Self::take_restores) gives is written.
    pub(crate) fn take_evicted(&mut self) -> Vec<CachedPrefix> {
        self.pool.take_evicted()
    }

    /// Blocks to be written before the next step.
    pub(crate) fn take_restores(&mut self) -> Vec<Restore> {
        std::mem::take(&mut self.restores)
    }

    /// Whether the last plan passed somebody over for whom files are being read.
    pub(crate) fn waits_for_files(&self) -> bool {
        self.reading
    }

    /// Whether a sequence may be admitted: not before the prompt that it will share is computed, nor while files are
    /// being read for it.
    pub(super) fn is_ready(&mut self, id: SeqId) -> bool {
        if !self.leader_is_ready(id) {
            return false;
        }
        let (Some(host), Some(seq)) = (&mut self.host, self.seqs.get_mut(&id)) else {
            return true;
        };
        let most = seq.most_cached() / self.pool.block_size();
        let mut table = self.pool.match_prefix(&seq.salt, &seq.tokens, most);
        let from = table.blocks().len();
        self.pool.release(&mut table);
        let query = HostQuery {
            salt: &seq.salt,
            tokens: &seq.tokens,
            from,
            most,
        };
        match host.find(id, query) {
            HostPrefix::Ready(blocks) => {
                seq.host = (from, blocks);
                true
            }
            HostPrefix::Reading => {
                self.reading = true;
                false
            }
        }
    }
}

impl Sequence {
    /// Has blocks from outside written behind the first `found` ones of the table, which has room for them; how many.
    /// They are in the prefix cache at once: nobody reads them before they are written.
    pub(super) fn restore(
        &mut self,
        found: usize,
        pool: &mut BlockPool,
        restores: &mut Vec<Restore>,
    ) -> usize {
        let (from, blocks) = std::mem::take(&mut self.host);
        if from != found || blocks.is_empty() {
            return 0;
        }
        let (count, end) = (blocks.len(), found + blocks.len());
        let places = self.table.blocks()[found..end].iter();
        let new = places.zip(blocks).map(|(&to, from)| Restore { to, from });
        restores.extend(new);
        let tokens = &self.tokens[..end * pool.block_size()];
        let mut replaced = BlockTable::default();
        pool.register(&mut self.table, &self.salt, tokens, &mut replaced);
        pool.release(&mut replaced);
        count
    }
}
