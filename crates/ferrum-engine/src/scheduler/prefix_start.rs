//! The prefix from which an admitted sequence starts: entries on the device, and those to be restored to it.

use super::Scheduler;
use super::images::keys;
use super::offload::{
    OffloadLookup, OffloadLookupResult, OffloadQuery, OffloadedPrefix, Restore, Restores,
};
use super::sequence::Sequence;
use crate::pool::{BlockPool, BlockTable, CacheEntry, CacheEntryKind, CachedPrefix};
use ferrum_types::{SeqId, StateSlot};

/// The cached prefix from which an admitted sequence starts.
#[derive(Debug)]
pub(super) struct PrefixStart {
    /// Number of blocks that need not be computed.
    pub(super) known: usize,
    /// The state checkpoint with which its state starts.
    pub(super) state: Option<StateSlot>,
}

impl Scheduler {
    /// Looks up prefixes in the offload tiers, too, and records evictions from the device.
    #[must_use]
    pub(crate) fn with_offload(mut self, offload: Box<dyn OffloadLookup>) -> Self {
        self.pool.record_evictions();
        self.offload = Some(offload);
        self
    }

    /// Evicted entries whose memory the new owner has not overwritten yet. Must be called after each plan, before the
    /// entries of [`take_restores`](Self::take_restores) are written, and again after [`begin`](Self::begin), which takes
    /// slots for states.
    pub(crate) fn take_evicted(&mut self) -> Vec<CachedPrefix> {
        self.pool.take_evicted()
    }

    /// Entries to be written before the next step.
    pub(crate) fn take_restores(&mut self) -> Restores {
        std::mem::take(&mut self.restores)
    }

    /// Whether the last plan skipped a sequence whose files are being read.
    pub(crate) fn waits_for_files(&self) -> bool {
        self.reading
    }

    /// Whether a sequence may be admitted: not before its leader's prompt is computed, nor while its files are being read.
    pub(super) fn is_ready(&mut self, id: SeqId) -> bool {
        if !self.leader_is_ready(id) {
            return false;
        }
        let (Some(offload), Some(seq)) = (&mut self.offload, self.seqs.get_mut(&id)) else {
            return true;
        };
        let most = seq.max_cached() / self.pool.block_size();
        let keys = keys(&seq.images, &seq.tokens);
        let mut table = self.pool.match_prefix(&seq.salt, keys, most);
        let found = table.len();
        self.pool.release(&mut table);
        let device = self.pool.device_prefix(&seq.salt, keys, most);
        let query = OffloadQuery {
            salt: &seq.salt,
            tokens: keys,
            device: &device,
            found,
            most,
        };
        match offload.find(id, query) {
            OffloadLookupResult::Ready(prefix) => {
                seq.offload = prefix;
                true
            }
            OffloadLookupResult::Reading => {
                self.reading = true;
                false
            }
        }
    }
}

impl Sequence {
    /// Takes blocks for all its tokens and a slot for its state. Its table holds the entries of a prefix on the device, or
    /// nothing. If the offload tiers have a longer prefix, adds its missing entries to `restores`, to be written before the
    /// next step. `None` if there are too few blocks or slots; the table is empty then.
    pub(super) fn begin(
        &mut self,
        pool: &mut BlockPool,
        restores: &mut Restores,
    ) -> Option<PrefixStart> {
        let found = self.table.len();
        let offloaded = std::mem::take(&mut self.offload);
        if offloaded.end > found {
            pool.release(&mut self.table);
            if let Some(start) = self.begin_from_offload(pool, (found, offloaded), restores) {
                return Some(start);
            }
            let known = found * pool.block_size();
            let keys = keys(&self.images, &self.tokens);
            self.table = pool.match_prefix(&self.salt, &keys[..known], found);
        }
        let known = self.table.len();
        self.computed = known * pool.block_size();
        let state = pool.state_checkpoint(&self.table);
        if pool.take_state(&mut self.table) && self.grow(pool, self.tokens.len()) {
            return Some(PrefixStart { known, state });
        }
        pool.release(&mut self.table);
        self.computed = 0;
        None
    }

    /// The same with a prefix of which the device lacks entries. They are registered in the prefix cache at once, as they
    /// are written before the next step reads them.
    fn begin_from_offload(
        &mut self,
        pool: &mut BlockPool,
        (found, mut offloaded): (usize, OffloadedPrefix),
        restores: &mut Restores,
    ) -> Option<PrefixStart> {
        let size = pool.block_size();
        let end = offloaded.end;
        let known = keys(&self.images, &self.tokens).get(..end * size)?;
        let taken = pool.take_blocks(&mut self.table, (&self.salt, known), end)?;
        self.computed = end * size;
        let mut entries = Vec::with_capacity(offloaded.entries.len());
        for (group, index, block) in taken.new {
            let from = offloaded
                .entries
                .remove(&(index, CacheEntryKind::Block(group)));
            entries.push((index, CacheEntry::Block { group, block }, from));
        }
        let mut enough = pool.take_state(&mut self.table);
        if let (Some(slot), None) = (self.table.state(), taken.state) {
            let from = offloaded.entries.remove(&(end - 1, CacheEntryKind::State));
            entries.push((end - 1, CacheEntry::State(slot), from));
        }
        // Entries that were on the device at the lookup may have been evicted since.
        enough &= entries.iter().all(|(_, _, from)| from.is_some());
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
        entries.sort_unstable_by_key(|(index, ..)| *index);
        for (index, to, from) in entries {
            let Some(from) = from else { continue };
            if from.from_disk && last != Some(index) {
                (from_disk, last) = (from_disk + 1, Some(index));
            }
            restores.entries.push(Restore { to, from });
        }
        restores.tokens_from_disk += from_disk * size;
        restores.tokens_from_ram += (end - found).saturating_sub(from_disk) * size;
        Some(PrefixStart {
            known: end,
            state: taken.state,
        })
    }
}
