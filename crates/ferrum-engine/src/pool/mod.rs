//! Who owns which block of the paged KV pool.
//!
//! A [`BlockPool`] hands out the blocks of a runner's KV pool, counts who refers to each, and keeps
//! what was computed for the next sequence that begins with the same tokens. It is book-keeping only:
//! it knows neither a device nor a schedule.
//!
//! A block is in one of three states:
//!
//! | state | referred to | in the prefix cache |
//! |---|---|---|
//! | free | no | no |
//! | idle | no | yes: given away, least recently used first, when no block is free |
//! | used | by one table or more | maybe |
//!
//! Only full blocks are shared, and nobody writes to a full block again, so copy-on-write never has
//! anything to copy: a sequence that shares a prefix owns the block that it writes to. What a fork in
//! the middle of a block would have copied (less than a block of tokens) is computed again, which
//! needs no op on the device and gives the same bits.

mod check;
mod lru;
mod prefix;
#[cfg(test)]
mod tests;

pub use check::PoolFault;
pub use prefix::CacheSalt;

use ferrum_types::{BlockId, TokenId};
use lru::LruList;
use prefix::{Parent, PrefixCache, Registered};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

/// The blocks of one sequence, in order of position.
///
/// It refers to blocks of one pool and has to be given back to it with [`BlockPool::release`].
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    /// Blocks from the first on that are in the prefix cache.
    registered: usize,
    /// Whether no further block of it can be in the prefix cache.
    sealed: bool,
}

impl BlockTable {
    /// The blocks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// A full block of the prefix cache, and what it holds the end of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPrefix {
    /// The block.
    pub block: BlockId,
    /// Who may share it.
    pub salt: CacheSalt,
    /// All tokens of its sequence up to its end.
    pub tokens: Vec<TokenId>,
}

/// Book-keeping of the blocks of one KV pool.
#[derive(Debug)]
pub struct BlockPool<S = RandomState> {
    block_size: usize,
    /// Tables that refer to each block.
    refs: Vec<u32>,
    free: Vec<BlockId>,
    /// Blocks that nobody refers to and that the prefix cache keeps.
    idle: LruList,
    cache: PrefixCache<S>,
    /// What the cache gave away and nobody has asked for yet, if that is wanted.
    evicted: Option<Vec<CachedPrefix>>,
}

impl BlockPool {
    /// A pool of `blocks` free blocks of `block_size` tokens.
    pub fn new(blocks: usize, block_size: usize) -> Self {
        Self::with_hasher(blocks, block_size, RandomState::new())
    }
}

impl<S: BuildHasher> BlockPool<S> {
    /// A pool whose prefix cache hashes with `hasher`.
    pub fn with_hasher(blocks: usize, block_size: usize, hasher: S) -> Self {
        let blocks = blocks.min(u32::MAX as usize);
        Self {
            block_size: block_size.max(1),
            refs: vec![0; blocks],
            // Taken from the end: low numbers first.
            free: (0..blocks as u32).rev().map(BlockId).collect(),
            idle: LruList::new(blocks),
            cache: PrefixCache::new(blocks, hasher),
            evicted: None,
        }
    }

    /// Remembers from now on what the cache gives away, for [`take_evicted`](Self::take_evicted).
    pub fn record_evictions(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// Blocks that the cache gave away since the last call, in order. Their memory is as it was until their new owner
    /// writes to it.
    pub fn take_evicted(&mut self) -> Vec<CachedPrefix> {
        self.evicted
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// All blocks of the cache, a block before those that continue it, and the idle ones that were used last first.
    pub fn cached_prefixes(&self) -> Vec<CachedPrefix> {
        let used = (0..self.blocks() as u32).map(BlockId);
        let used = used.filter(|&b| self.refs[b.0 as usize] > 0 && self.cache.contains(b));
        let mut used: Vec<_> = used.map(|block| self.prefix(block)).collect();
        used.sort_by_key(|prefix| prefix.tokens.len());
        let mut idle: Vec<_> = self.idle.iter().map(|block| self.prefix(block)).collect();
        idle.reverse();
        used.append(&mut idle);
        used
    }

    fn prefix(&self, block: BlockId) -> CachedPrefix {
        let (salt, tokens) = self.cache.prefix(block);
        CachedPrefix {
            block,
            salt,
            tokens,
        }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    pub fn blocks(&self) -> usize {
        self.refs.len()
    }

    /// Blocks that can be had: free ones and idle ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that some table refers to.
    pub fn used(&self) -> usize {
        self.blocks() - self.available()
    }

    /// Blocks that the prefix cache keeps, used or idle.
    pub fn cached(&self) -> usize {
        self.cache.len()
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// A table of the blocks that the cache has of the longest prefix of `tokens`, at most `most`
    /// blocks. Tokens are compared, not only their hashes.
    pub fn match_prefix(
        &mut self,
        salt: &CacheSalt,
        tokens: &[TokenId],
        most: usize,
    ) -> BlockTable {
        let mut table = BlockTable::default();
        let mut parent = Parent::Root(salt.clone());
        for block in tokens.chunks_exact(self.block_size).take(most) {
            let Some(found) = self.cache.find(&parent, block) else {
                break;
            };
            self.retain(found);
            table.blocks.push(found);
            parent = Parent::Block(found);
        }
        table.registered = table.blocks.len();
        table
    }

    /// Adds blocks to `table` until it holds `tokens` tokens, and says whether there were enough;
    /// else it changes nothing. Idle blocks leave the cache, least recently used first.
    #[must_use]
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> bool {
        let wanted = self.blocks_for(tokens).saturating_sub(table.blocks.len());
        if wanted > self.available() {
            return false;
        }
        table.blocks.reserve(wanted);
        for _ in 0..wanted {
            let Some(block) = self.take() else {
                return false;
            };
            table.blocks.push(block);
        }
        true
    }

    /// Puts the blocks of `table` that are full of computed tokens into the prefix cache. `tokens`
    /// are the computed ones, from the first of the sequence on.
    ///
    /// Where the cache has the same tokens already, the table takes the block of the cache, and its own goes to
    /// `replaced`, to be given back: rows do not depend on their batch, so both hold the same bits.
    pub fn register(
        &mut self,
        table: &mut BlockTable,
        salt: &CacheSalt,
        tokens: &[TokenId],
        replaced: &mut BlockTable,
    ) {
        let full = (tokens.len() / self.block_size).min(table.blocks.len());
        while table.registered < full && !table.sealed {
            let index = table.registered;
            let parent = match index {
                0 => Parent::Root(salt.clone()),
                _ => Parent::Block(table.blocks[index - 1]),
            };
            let block = table.blocks[index];
            let part = &tokens[index * self.block_size..][..self.block_size];
            match self.cache.insert(block, parent, part) {
                Registered::New => {}
                Registered::Known(known) => {
                    self.retain(known);
                    table.blocks[index] = known;
                    replaced.blocks.push(block);
                }
                Registered::Collision => {
                    table.sealed = true;
                    break;
                }
            }
            table.registered += 1;
        }
    }

    /// Gives all blocks of `table` back. Those in the prefix cache stay there until their memory is
    /// needed.
    pub fn release(&mut self, table: &mut BlockTable) {
        // From the end, so that a block is always older than the one it continues and leaves the
        // cache before it.
        while let Some(block) = table.blocks.pop() {
            self.unref(block);
        }
        table.registered = 0;
        table.sealed = false;
    }

    /// Blocks that can be had in addition once `table` has been released, after those tables that `lost` counts
    /// the references of. Blocks that others refer to are not among them.
    pub fn freed_by(&self, table: &BlockTable, lost: &mut HashMap<BlockId, u32>) -> usize {
        let mut frees = |block: &BlockId| {
            let lost = lost.entry(*block).or_insert(0);
            *lost += 1;
            *lost == self.refs[block.0 as usize]
        };
        table.blocks.iter().filter(|block| frees(block)).count()
    }

    /// Forgets every idle block of the prefix cache.
    pub fn clear_cache(&mut self) {
        while let Some(block) = self.idle.pop_oldest() {
            self.cache.remove(block);
            self.free.push(block);
        }
    }

    /// A block that nobody has, with one reference.
    fn take(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let oldest = self.idle.pop_oldest()?;
                if self.evicted.is_some() {
                    let prefix = self.prefix(oldest);
                    self.evicted.get_or_insert_default().push(prefix);
                }
                self.cache.remove(oldest);
                oldest
            }
        };
        self.refs[block.0 as usize] = 1;
        Some(block)
    }

    fn retain(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        if *refs == 0 {
            self.idle.remove(block);
        }
        *refs += 1;
    }

    fn unref(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        *refs -= 1;
        if *refs == 0 {
            if self.cache.contains(block) {
                self.idle.push_newest(block);
            } else {
                self.free.push(block);
            }
        }
    }
}
