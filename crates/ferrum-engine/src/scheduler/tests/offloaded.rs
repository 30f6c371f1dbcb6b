//! The same with memory beside the device: what is evicted goes there, and what a sequence is given from there is what
//! it would have computed.

use super::*;
use crate::offload::StoredBlock;
use crate::pool::CachedPrefix;
use std::sync::{Arc, Mutex, MutexGuard};

/// Blocks by salt and tokens, for ever. Some have to be read from files first, which takes some looks.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    blocks: HashMap<(CacheSalt, Vec<TokenId>), Arc<StoredBlock>>,
    /// How often those who wait for files still have to look.
    reading: HashMap<SeqId, u32>,
    waited: usize,
    restored: usize,
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap()
    }
}

impl HostBlocks for Memory {
    fn find(&mut self, seq: SeqId, query: HostQuery<'_>) -> HostPrefix {
        let mut kept = self.lock();
        let HostQuery {
            salt,
            tokens,
            from,
            most,
        } = query;
        assert!(most * BLOCK_OF.with(std::cell::Cell::get) < tokens.len());
        let size = BLOCK_OF.with(std::cell::Cell::get);
        let known = |block: usize| {
            let prefix = tokens[..(block + 1) * size].to_vec();
            kept.blocks.get(&(salt.clone(), prefix)).cloned()
        };
        let found: Vec<_> = (from..most).map_while(known).collect();
        if let Some(looks) = kept.reading.get_mut(&seq).filter(|looks| **looks > 0) {
            *looks -= 1;
            return HostPrefix::Reading;
        }
        if !found.is_empty() && seq.0.is_multiple_of(3) && !kept.reading.contains_key(&seq) {
            kept.reading.insert(seq, seq.0 as u32 % 4);
            kept.waited += 1;
            return HostPrefix::Reading;
        }
        let blocks = found.into_iter().map(|stored| HostBlock {
            stored,
            from_disk: false,
        });
        HostPrefix::Ready(blocks.collect())
    }

    fn forget(&mut self, seq: SeqId) {
        self.lock().reading.remove(&seq);
    }
}

thread_local! {
    /// Tokens of a block in this test.
    static BLOCK_OF: std::cell::Cell<usize> = const { std::cell::Cell::new(1) };
}

impl Sim {
    /// As the engine does after each plan.
    pub(super) fn move_blocks(&mut self) {
        let Some(memory) = self.memory.clone() else {
            return;
        };
        let size = self.scheduler.pool().block_size();
        let cells = |block: BlockId| block.0 as usize * size..(block.0 as usize + 1) * size;
        for evicted in self.scheduler.take_evicted() {
            let CachedPrefix {
                block,
                salt,
                tokens,
            } = evicted;
            let bytes = self.cells[0][cells(block)].iter();
            let bytes = bytes.flat_map(|cell| cell.to_le_bytes()).collect();
            // A sequence by itself would have written this.
            let root = scheduler_root(&salt);
            let value = tokens.iter();
            let value = value.fold(root, |value, &t| mix(value, u64::from(t) + 1));
            assert_eq!(self.cells[0][cells(block).end - 1], value);
            let stored = Arc::new(StoredBlock::of_bytes(bytes));
            memory.lock().blocks.insert((salt, tokens), stored);
        }
        let restores = self.scheduler.take_restores();
        memory.lock().restored += restores.len();
        for restore in restores {
            let bytes = restore.from.stored.bytes().as_chunks().0.iter();
            let values = bytes.map(|bytes| u64::from_le_bytes(*bytes));
            for (cell, value) in self.cells[0][cells(restore.to)].iter_mut().zip(values) {
                *cell = value;
            }
        }
    }

    fn with_memory(mut self) -> (Self, Memory) {
        let memory = Memory::default();
        BLOCK_OF.with(|size| size.set(self.scheduler.pool().block_size()));
        self.scheduler = self.scheduler.with_host(Box::new(memory.clone()));
        self.memory = Some(memory.clone());
        (self, memory)
    }
}

#[test]
fn what_comes_back_is_what_would_have_been_computed() {
    for (seed, blocks, block_size) in [(1, 12, 4), (2, 40, 1), (3, 30, 3), (4, 6, 2)] {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut sim, memory) = Sim::new(CONFIG, blocks, block_size).with_memory();
        (sim.drafts, sim.ahead) = (seed % 2 == 1, seed.is_multiple_of(2));
        while sim.scheduler.counters().steps < 40_000 {
            sim.operate(|n| ((u64::from(rng.next_u32()) * u64::from(n)) >> 32) as u32);
            if rng.next_u32() % 16 == 0 {
                sim.scheduler.check().unwrap();
            }
        }
        sim.drain();
        let kept = memory.lock();
        assert!(
            kept.restored > 1000 && kept.waited > 100,
            "{}",
            kept.restored
        );
        assert!(kept.reading.is_empty());
    }
}

proptest! {
    #[test]
    fn any_operations_end_well_with_memory(
        blocks in 1usize..12,
        block_size in 1usize..5,
        max_seqs in 1usize..5,
        dice in prop::collection::vec(any::<u32>(), 0..300),
    ) {
        let config = SchedulerConfig { max_seqs, ..CONFIG };
        let (mut sim, _memory) = Sim::new(config, blocks, block_size).with_memory();
        (sim.drafts, sim.ahead) = (dice.len() % 3 == 1, dice.len() % 3 == 2);
        let mut rest = dice.into_iter();
        while rest.len() > 0 {
            sim.operate(|n| rest.next().unwrap_or(0) % n);
            sim.scheduler.check().unwrap();
        }
        sim.drain();
    }
}
