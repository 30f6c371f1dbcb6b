//! The integrity check: whether the books of a pool and the tables of all sequences agree.

use super::prefix::Parent;
use super::{BlockPool, BlockTable};
use ferrum_types::BlockId;
use std::hash::BuildHasher;

/// Something that must never be true of a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV pool: {0}")]
pub struct PoolFault(String);

impl PoolFault {
    pub(crate) fn new(what: String) -> Self {
        Self(what)
    }
}

impl<S: BuildHasher> BlockPool<S> {
    /// Checks that every block is in exactly one state, that references are exactly those of
    /// `tables` (all that there are), and that the prefix cache is a tree.
    ///
    /// # Errors
    /// What is wrong first.
    pub fn check<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), PoolFault> {
        self.check_references(tables)?;
        self.check_states()?;
        (0..self.blocks() as u32).try_for_each(|b| self.check_entry(BlockId(b)))
    }

    fn check_references<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), PoolFault> {
        let mut counted = vec![0u32; self.blocks()];
        for table in tables {
            for (index, &block) in table.blocks.iter().enumerate() {
                match counted.get_mut(block.0 as usize) {
                    Some(count) => *count += 1,
                    None => return fault(block, "is in a table and not in the pool"),
                }
                let registered = index < table.registered;
                let entry = self.cache.entry(block);
                if registered != entry.is_some() {
                    return fault(block, "is cached for the table or the cache, not for both");
                }
                let continues = |e: &super::prefix::Entry| match (&e.parent, index) {
                    (Parent::Root(_), 0) => true,
                    (Parent::Block(before), 1..) => *before == table.blocks[index - 1],
                    _ => false,
                };
                if registered && !entry.is_some_and(continues) {
                    return fault(block, "is not cached after the block that it continues");
                }
            }
        }
        for (index, (&refs, counted)) in self.refs.iter().zip(counted).enumerate() {
            if refs != counted {
                let words = format!("has {refs} references, {counted} are in tables");
                return fault(BlockId(index as u32), &words);
            }
        }
        Ok(())
    }

    /// Free, idle or used; and what is idle is cached.
    fn check_states(&self) -> Result<(), PoolFault> {
        let mut seen = vec![false; self.blocks()];
        let free = self.free.iter().map(|&b| (b, false));
        let idle = self.idle.iter().map(|b| (b, true));
        for (block, cached) in free.chain(idle) {
            if std::mem::replace(&mut seen[block.0 as usize], true) {
                return fault(block, "is listed twice");
            }
            if self.refs[block.0 as usize] != 0 {
                return fault(block, "is listed and used");
            }
            if self.cache.contains(block) != cached || self.idle.contains(block) != cached {
                return fault(block, "is in the wrong list");
            }
        }
        match (0..self.blocks()).find(|&b| !seen[b] && self.refs[b] == 0) {
            Some(lost) => fault(BlockId(lost as u32), "is lost"),
            None => Ok(()),
        }
    }

    fn check_entry(&self, block: BlockId) -> Result<(), PoolFault> {
        let Some(entry) = self.cache.entry(block) else {
            return Ok(());
        };
        if !self.cache.finds_itself(block) {
            return fault(block, "is cached and not found");
        }
        let Parent::Block(parent) = entry.parent else {
            return Ok(());
        };
        if !self.cache.contains(parent) {
            return fault(block, "is cached and continues a block that is not");
        }
        let used = |b: BlockId| self.refs[b.0 as usize] > 0;
        if used(block) && !used(parent) {
            return fault(block, "is used and continues a block that is not");
        }
        Ok(())
    }
}

fn fault(block: BlockId, what: &str) -> Result<(), PoolFault> {
    Err(PoolFault(format!("block {} {what}", block.0)))
}
