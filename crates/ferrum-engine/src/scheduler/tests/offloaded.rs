//! The same with an offload tier: evicted entries go there, and a restored entry is what the sequence would have computed.

use super::states::with_states;
use super::*;
use crate::kv_entry::StoredEntry;
use crate::pool::{CacheEntry, CacheEntryKind, CachedPrefix};
use std::sync::{Arc, Mutex, MutexGuard};

/// Entries by kind, salt and tokens, without a limit. Some have to be read from files first, which takes several lookups.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    block_size: usize,
    entries: HashMap<(CacheEntryKind, CacheSalt, Vec<TokenId>), Arc<StoredEntry>>,
    /// Remaining lookups of sequences that wait for files.
    reading: HashMap<SeqId, u32>,
    waited: usize,
    restored: HashMap<CacheEntryKind, usize>,
    tokens: usize,
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap()
    }
}

impl OffloadLookup for Memory {
    fn find(&mut self, seq: SeqId, query: OffloadQuery<'_>) -> OffloadLookupResult {
        let mut kept = self.lock();
        let Kept {
            block_size,
            entries,
            reading,
            waited,
            ..
        } = &mut *kept;
        let size = *block_size;
        let OffloadQuery {
            salt,
            tokens,
            device,
            found,
            most,
        } = query;
        assert!(found <= most && most * size < tokens.len());
        let known = |index: usize, kind: CacheEntryKind| {
            let prefix = tokens[..(index + 1) * size].to_vec();
            entries.get(&(kind, salt.clone(), prefix)).cloned()
        };
        assert_eq!(device.longest(most, |_, _| false), found);
        let end = device.longest(most, |index, kind| known(index, kind).is_some());
        if let Some(looks) = reading.get_mut(&seq).filter(|looks| **looks > 0) {
            *looks -= 1;
            return OffloadLookupResult::Reading;
        }
        if end > found && seq.0.is_multiple_of(3) && !reading.contains_key(&seq) {
            reading.insert(seq, seq.0 as u32 % 4);
            *waited += 1;
            return OffloadLookupResult::Reading;
        }
        let entry = |(index, kind): (usize, CacheEntryKind)| {
            let stored = known(index, kind)?;
            let from_disk = false;
            Some(((index, kind), OffloadedEntry { stored, from_disk }))
        };
        let entries = device.missing(end).map(entry);
        let entries = entries.collect::<Option<_>>().expect("what was found");
        OffloadLookupResult::Ready(OffloadedPrefix { end, entries })
    }

    fn forget(&mut self, seq: SeqId) {
        self.lock().reading.remove(&seq);
    }
}

impl Sim {
    /// The values of an entry.
    fn values(&mut self, entry: CacheEntry) -> &mut [u64] {
        let size = self.scheduler.pool().block_size();
        match entry {
            CacheEntry::Block { group, block } => {
                let first = block.0 as usize * size;
                &mut self.cells[group][first..first + size]
            }
            CacheEntry::State(slot) => &mut self.states[slot.0 as usize..][..1],
        }
    }

    /// Moves entries as the engine does after each plan and after `begin`.
    pub(super) fn move_entries(&mut self) {
        let Some(memory) = self.memory.clone() else {
            return;
        };
        for CachedPrefix {
            entry,
            salt,
            tokens,
        } in self.scheduler.take_evicted()
        {
            // The value that a sequence of these tokens writes.
            let root = scheduler_root(&salt);
            let value = tokens.iter();
            let value = value.fold(root, |value, &t| mix(value, u64::from(t) + 1));
            let values = self.values(entry);
            assert_eq!(values.last(), Some(&value), "{entry:?}");
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            let stored = Arc::new(StoredEntry::of_bytes(bytes.collect()));
            let name = (entry.kind(), salt, tokens);
            memory.lock().entries.insert(name, stored);
        }
        let restores = self.scheduler.take_restores();
        assert_eq!(restores.tokens_from_disk, 0);
        assert_eq!(restores.entries.is_empty(), restores.tokens_from_ram == 0);
        memory.lock().tokens += restores.tokens_from_ram;
        for restore in restores.entries {
            let restored = &mut memory.lock().restored;
            *restored.entry(restore.to.kind()).or_default() += 1;
            let bytes = restore.from.stored.bytes().as_chunks().0;
            let values = self.values(restore.to);
            assert_eq!(bytes.len(), values.len());
            for (value, bytes) in values.iter_mut().zip(bytes) {
                *value = u64::from_le_bytes(*bytes);
            }
        }
    }

    fn with_memory(mut self) -> (Self, Memory) {
        let memory = Memory::default();
        memory.lock().block_size = self.scheduler.pool().block_size();
        self.scheduler = self.scheduler.with_offload(Box::new(memory.clone()));
        self.memory = Some(memory.clone());
        (self, memory)
    }

    /// Random operations with an offload tier. Returns how many entries of each kind were restored.
    fn run_with_memory(self, seed: u64) -> HashMap<CacheEntryKind, usize> {
        let (mut sim, memory) = self.with_memory();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (sim.drafts, sim.ahead) = (seed % 2 == 1, seed.is_multiple_of(2));
        sim.run_random(&mut rng, 30_000);
        sim.drain();
        let kept = memory.lock();
        assert!(kept.waited > 100 && kept.tokens > 1000, "{}", kept.tokens);
        assert!(kept.reading.is_empty());
        kept.restored.clone()
    }
}

#[test]
fn what_comes_back_is_what_would_have_been_computed() {
    let shapes: [(Groups, usize); 8] = [
        (&[(12, None)], 4),
        (&[(40, None)], 1),
        (&[(30, None)], 3),
        (&[(6, None)], 2),
        (&[(12, None), (12, Some(5))], 4),
        (&[(30, None), (8, Some(4)), (10, Some(9))], 3),
        (&[(9, Some(3))], 2),
        (&[(24, Some(6))], 2),
    ];
    for ((groups, block_size), seed) in shapes.into_iter().zip(1..) {
        let sim = Sim::with_groups(CONFIG, groups, block_size);
        let restored = sim.run_with_memory(seed);
        for group in 0..groups.len() {
            let blocks = restored.get(&CacheEntryKind::Block(group));
            assert!(blocks.is_some_and(|n| *n > 300), "{groups:?} {restored:?}");
        }
    }
}

#[test]
fn states_come_back_with_the_blocks_before_them() {
    // Blocks, their size, checkpoints, and their interval.
    let shapes: [(Groups, usize, usize, usize); 4] = [
        (&[(12, None)], 4, 2, 4),
        (&[(20, None)], 2, 1, 4),
        (&[(30, None), (10, Some(5))], 3, 3, 6),
        (&[(24, None)], 2, 4, 100),
    ];
    for ((groups, block_size, kept, state_checkpoint_interval), seed) in
        shapes.into_iter().zip(60..)
    {
        let config = SchedulerConfig {
            state_checkpoint_interval,
            ..CONFIG
        };
        let sim = with_states(config, groups, block_size, kept);
        let restored = sim.run_with_memory(seed);
        let states = restored.get(&CacheEntryKind::State);
        assert!(states.is_some_and(|n| *n > 300), "{groups:?} {restored:?}");
    }
}

proptest! {
    #[test]
    fn any_operations_end_well_with_memory(
        blocks in 1usize..12,
        window in prop::option::of(1usize..9),
        block_size in 1usize..5,
        max_seqs in 1usize..5,
        kept in prop::option::of(0usize..4),
        dice in prop::collection::vec(any::<u32>(), 0..300),
    ) {
        let config = SchedulerConfig { max_seqs, ..CONFIG };
        let mut groups = vec![(blocks, None)];
        let of_window = |w: usize| (spanned_blocks(w, block_size) + 1, Some(w));
        groups.extend(window.map(of_window));
        let sim = match kept {
            Some(kept) => with_states(config, &groups, block_size, kept),
            None => Sim::with_groups(config, &groups, block_size),
        };
        let (mut sim, _memory) = sim.with_memory();
        (sim.drafts, sim.ahead) = (dice.len() % 3 == 1, dice.len() % 3 == 2);
        let mut rest = dice.into_iter();
        while rest.len() > 0 {
            sim.operate(|n| rest.next().unwrap_or(0) % n);
            sim.scheduler.check().unwrap();
        }
        sim.drain();
    }
}
