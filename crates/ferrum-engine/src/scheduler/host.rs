//! Parts of prefixes that are not on the device and need not be computed: what a sequence is given before it is admitted.

use super::Scheduler;
use super::images::keys;
use super::sequence::Sequence;
use crate::offload::StoredPart;
use crate::pool::{
    BlockPool, BlockTable, CachePart, CacheSalt, CachedPrefix, DevicePrefix, PartKind,
};
use ferrum_types::{SeqId, StateSlot, TokenId};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Where parts of prefixes are that the device has no room for.
pub(crate) trait HostParts: Send + fmt::Debug {
    /// What there is for a sequence that waits.
    fn find(&mut self, seq: SeqId, query: HostQuery<'_>) -> HostAnswer;

    /// A sequence was admitted, or is gone.
    fn forget(&mut self, seq: SeqId);
}

/// A prefix that a sequence could use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostQuery<'a> {
    pub(crate) salt: &'a CacheSalt,
    pub(crate) tokens: &'a [TokenId],
    /// What the device has of it.
    pub(crate) device: &'a DevicePrefix,
    /// Blocks after which the sequence can go on without what is elsewhere.
    pub(crate) found: usize,
    /// Blocks that need not be computed at most.
    pub(crate) most: usize,
}

/// What was found.
#[derive(Debug)]
pub(crate) enum HostAnswer {
    /// This, which is nothing where `end` is 0.
    Ready(HostPrefix),
    /// Files are being read; the sequence waits, and others go before it.
    Reading,
}

/// All that the device lacks of a prefix.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostPrefix {
    /// Blocks of the prefix.
    pub(crate) end: usize,
    /// The parts that the device lacks, by number of the block at their end.
    pub(crate) parts: HashMap<(usize, PartKind), HostPart>,
}

/// A part outside of the device.
#[derive(Clone, Debug)]
pub(crate) struct HostPart {
    pub(crate) stored: Arc<StoredPart>,
    /// Whether it had to be read from a file.
    pub(crate) from_disk: bool,
}

/// A part to be written to the device before the next step.
#[derive(Debug)]
pub(crate) struct Restore {
    pub(crate) to: CachePart,
    pub(crate) from: HostPart,
}

/// What is to be written before the next step, and the tokens that need not be computed for it.
#[derive(Debug, Default)]
pub(crate) struct Restores {
    pub(crate) parts: Vec<Restore>,
    pub(crate) tokens_from_ram: usize,
    pub(crate) tokens_from_disk: usize,
}

/// How a sequence begins that has all it needs.
#[derive(Debug)]
pub(super) struct Begun {
    /// Blocks that need not be computed.
    pub(super) known: usize,
    /// The kept state that its own begins with.
    pub(super) state: Option<StateSlot>,
}

impl Scheduler {
    /// Looks for parts of prefixes there, too, from now on, and remembers what the device gives away.
    #[must_use]
    pub(crate) fn with_host(mut self, host: Box<dyn HostParts>) -> Self {
        self.pool.record_evictions();
        self.host = Some(host);
        self
    }

    /// Parts whose memory has a new owner, who has not written to it yet. Asked for after each plan, before what
    /// [`take_restores`](Self::take_restores) gives is written, and when the plan has begun, which takes slots for states.
    pub(crate) fn take_evicted(&mut self) -> Vec<CachedPrefix> {
        self.pool.take_evicted()
    }

    /// What is to be written before the next step.
    pub(crate) fn take_restores(&mut self) -> Restores {
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
        let keys = keys(&seq.images, &seq.tokens);
        let mut table = self.pool.match_prefix(&seq.salt, keys, most);
        let found = table.len();
        self.pool.release(&mut table);
        let device = self.pool.device_prefix(&seq.salt, keys, most);
        let query = HostQuery {
            salt: &seq.salt,
            tokens: keys,
            device: &device,
            found,
            most,
        };
        match host.find(id, query) {
            HostAnswer::Ready(prefix) => {
                seq.host = prefix;
                true
            }
            HostAnswer::Reading => {
                self.reading = true;
                false
            }
        }
    }
}

impl Sequence {
    /// Takes blocks for all its tokens and a slot for its state, where its table holds what the device has of a prefix, or
    /// nothing. With a longer prefix outside of the device, the parts that are missing are to be written before the next
    /// step. `None` when there is not enough; then it has nothing.
    pub(super) fn begin(&mut self, pool: &mut BlockPool, restores: &mut Restores) -> Option<Begun> {
        let found = self.table.len();
        let host = std::mem::take(&mut self.host);
        if host.end > found {
            pool.release(&mut self.table);
            if let Some(begun) = self.begin_from_host(pool, (found, host), restores) {
                return Some(begun);
            }
            let known = found * pool.block_size();
            let keys = keys(&self.images, &self.tokens);
            self.table = pool.match_prefix(&self.salt, &keys[..known], found);
        }
        let known = self.table.len();
        self.computed = known * pool.block_size();
        let state = pool.kept_state(&self.table);
        if pool.take_state(&mut self.table) && self.grow(pool, self.tokens.len()) {
            return Some(Begun { known, state });
        }
        pool.release(&mut self.table);
        self.computed = 0;
        None
    }

    /// The same with a prefix of which the device lacks parts. They are in the prefix cache at once: nobody reads them
    /// before they are written.
    fn begin_from_host(
        &mut self,
        pool: &mut BlockPool,
        (found, mut host): (usize, HostPrefix),
        restores: &mut Restores,
    ) -> Option<Begun> {
        let size = pool.block_size();
        let end = host.end;
        let known = keys(&self.images, &self.tokens).get(..end * size)?;
        let taken = pool.take_blocks(&mut self.table, (&self.salt, known), end)?;
        self.computed = end * size;
        let mut parts = Vec::with_capacity(host.parts.len());
        for (group, entry, block) in taken.new {
            let from = host.parts.remove(&(entry, PartKind::Block(group)));
            parts.push((entry, CachePart::Block { group, block }, from));
        }
        let mut enough = pool.take_state(&mut self.table);
        if let (Some(slot), None) = (self.table.state(), taken.state) {
            let from = host.parts.remove(&(end - 1, PartKind::State));
            parts.push((end - 1, CachePart::State(slot), from));
        }
        // The device may have given away what was there when the rest was looked for.
        enough &= parts.iter().all(|(_, _, from)| from.is_some());
        if !enough || !self.grow(pool, self.tokens.len()) {
            pool.release(&mut self.table);
            self.computed = 0;
            return None;
        }
        let mut replaced = BlockTable::default();
        pool.register(
            &mut self.table,
            &self.salt,
            &keys(&self.images, &self.tokens)[..end * size],
            &mut replaced,
        );
        pool.release(&mut replaced);
        let (mut from_disk, mut last) = (0, None);
        parts.sort_unstable_by_key(|(entry, ..)| *entry);
        for (entry, to, from) in parts {
            let Some(from) = from else { continue };
            if from.from_disk && last != Some(entry) {
                (from_disk, last) = (from_disk + 1, Some(entry));
            }
            restores.parts.push(Restore { to, from });
        }
        restores.tokens_from_disk += from_disk * size;
        restores.tokens_from_ram += (end - found).saturating_sub(from_disk) * size;
        Some(Begun {
            known: end,
            state: taken.state,
        })
    }
}
