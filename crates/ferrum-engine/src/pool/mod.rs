//! Allocator and reference counts of the paged KV blocks, with the prefix cache.
//!
//! A [`BlockPool`] allocates the blocks of a runner's KV pools, counts references to each, and keeps
//! computed blocks for later sequences with the same prefix. It is book-keeping only:
//! it knows neither a device nor a schedule.
//!
//! A block is in one of three states:
//!
//! | state | referred to | in the prefix cache |
//! |---|---|---|
//! | free | no | no |
//! | idle | no | yes: evicted, least recently used first, when no block is free |
//! | used | by one table or more | maybe |
//!
//! Only full blocks are shared, and a full block is never written again, so there is no copy-on-write: a
//! sequence that shares a prefix owns the block that it writes to. A fork in the middle of a block computes the
//! tokens of that block again (less than a block of tokens), which needs no op on the device and gives the same bits.
//!
//! Each cache group of the model has its own blocks, and a sequence has a table in each. In a group with a window, a
//! table gets the blocks that a step writes to, and releases those that no later token reads
//! ([`BlockPool::release_before_window`]). A prefix is in the cache when groups without a window have all its blocks, and
//! those with one the blocks that the token after it reads.
//!
//! Models with recurrent layers have a state slot for each sequence beside its blocks, and spare slots for state
//! checkpoints (`states`): there a prefix is in the cache up to the last block with a checkpoint at its end.

mod check;
mod lru;
mod offload;
mod prefix;
mod states;
mod table;
#[cfg(test)]
mod tests;

pub use check::PoolFault;
pub(crate) use offload::DevicePrefix;
pub use offload::{CacheEntry, CacheEntryKind, CachedPrefix};
pub use prefix::CacheSalt;
pub use table::BlockTable;

use ferrum_models::{CacheGroup, StateSlots, spanned_blocks};
use ferrum_types::{BlockId, StateSlot, TokenId};
use lru::LruList;
use prefix::{NodeId, Parent, PrefixCache};
use states::StatePool;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use table::GroupTable;

/// Least number of nodes before old ones are dropped in a model of windows only. A node without blocks stays while nodes
/// after it have some.
const MIN_NODES: usize = 1 << 16;

/// Book-keeping of the blocks of all KV pools of a runner.
#[derive(Debug)]
pub struct BlockPool<S = RandomState> {
    block_size: usize,
    groups: Vec<GroupPool>,
    cache: PrefixCache<S>,
    /// State slots of a model with recurrent layers.
    states: Option<StatePool>,
    /// Entries evicted since the last [`take_evicted`](Self::take_evicted), if evictions are recorded.
    evicted: Option<Vec<CachedPrefix>>,
}

/// The blocks of one cache group.
#[derive(Debug)]
struct GroupPool {
    window: Option<usize>,
    /// Number of tables that refer to each block.
    refs: Vec<u32>,
    free: Vec<BlockId>,
    /// Blocks without references that are in the prefix cache.
    idle: LruList,
    /// The node of each block in the prefix cache.
    nodes: Vec<Option<NodeId>>,
    cached: usize,
}

/// References that tables lose, by group and block.
pub type LostReferences = HashMap<(usize, BlockId), u32>;

impl GroupPool {
    fn new(blocks: usize, window: Option<usize>) -> Self {
        let blocks = blocks.min(u32::MAX as usize);
        Self {
            window,
            refs: vec![0; blocks],
            // Blocks are taken from the end: low numbers first.
            free: (0..blocks as u32).rev().map(BlockId).collect(),
            idle: LruList::new(blocks),
            nodes: vec![None; blocks],
            cached: 0,
        }
    }

    fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// The first block that the token at `position`, or one after it, reads.
    fn first_seen(&self, position: usize, block_size: usize) -> usize {
        let key = |window| (position + 1).saturating_sub(window);
        self.window.map_or(0, key) / block_size
    }

    fn retain(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        if *refs == 0 {
            self.idle.remove(block.0);
        }
        *refs += 1;
    }

    fn unref(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        *refs -= 1;
        if *refs == 0 {
            if self.nodes[block.0 as usize].is_some() {
                self.idle.push_newest(block.0);
            } else {
                self.free.push(block);
            }
        }
    }

    /// Adds a block to the prefix cache, or removes it.
    fn set_node(&mut self, block: BlockId, node: Option<NodeId>) {
        let before = std::mem::replace(&mut self.nodes[block.0 as usize], node);
        self.cached += usize::from(node.is_some());
        self.cached -= usize::from(before.is_some());
    }
}

impl BlockPool {
    /// A pool of one group without a window: `blocks` free blocks of `block_size` tokens.
    pub fn new(blocks: usize, block_size: usize) -> Self {
        Self::with_hasher(&[(blocks, None)], block_size, RandomState::new())
    }

    /// The free blocks of a runner's cache groups.
    pub fn of_groups(groups: &[CacheGroup]) -> Self {
        let block_size = groups.first().map_or(1, |group| group.block_size);
        let sizes: Vec<_> = groups.iter().map(|g| (g.blocks, g.window)).collect();
        Self::with_hasher(&sizes, block_size, RandomState::new())
    }
}

impl<S: BuildHasher> BlockPool<S> {
    /// A pool of groups with these numbers of blocks and windows, whose prefix cache hashes with `hasher`.
    pub fn with_hasher(groups: &[(usize, Option<usize>)], block_size: usize, hasher: S) -> Self {
        let groups = groups.iter().map(|&(n, window)| GroupPool::new(n, window));
        let groups: Vec<_> = groups.collect();
        Self {
            block_size: block_size.max(1),
            cache: PrefixCache::new(groups.len(), hasher),
            groups,
            states: None,
            evicted: None,
        }
    }

    /// The same pool with slots for recurrent states. It needs a group without a window.
    #[must_use]
    pub fn with_states(mut self, slots: Option<StateSlots>) -> Self {
        self.states = slots.map(StatePool::new);
        self
    }

    /// Whether sequences have recurrent states.
    pub fn has_states(&self) -> bool {
        self.states.is_some()
    }

    /// Number of state checkpoints.
    pub fn kept_states(&self) -> usize {
        self.states.as_ref().map_or(0, StatePool::checkpoints)
    }

    /// The slot of the state checkpoint at the end of a table's prefix, which becomes the most recently used one.
    pub(crate) fn state_checkpoint(&mut self, table: &BlockTable) -> Option<StateSlot> {
        let states = self.states.as_mut()?;
        let slot = table.tip.and_then(|tip| states.of_node(tip))?;
        states.touch(slot);
        Some(slot)
    }

    /// Gives a table a slot for its state, if the model has states. Returns whether the table has what it needs.
    pub(crate) fn take_state(&mut self, table: &mut BlockTable) -> bool {
        let Some(states) = &mut self.states else {
            return true;
        };
        table.state = states.take_working();
        self.record_states();
        table.state.is_some()
    }

    /// Gives a table a slot in which its state is saved before a step with a draft. Returns whether it can go back to
    /// that state, or need not, as it has none.
    pub(crate) fn save_state(&mut self, table: &mut BlockTable) -> bool {
        let Some(states) = &mut self.states else {
            return true;
        };
        table.saved_state = states.take_saved();
        self.record_states();
        table.saved_state.is_some()
    }

    /// Releases the saved state of a table whose draft is decided, or after a wrong draft the state that saw it. Returns
    /// whether the table went back to its saved state.
    pub(crate) fn settle_state(&mut self, table: &mut BlockTable, wrong: bool) -> bool {
        let (Some(states), Some(saved)) = (&mut self.states, table.saved_state.take()) else {
            return false;
        };
        let unused = match wrong {
            true => table.state.replace(saved),
            false => Some(saved),
        };
        unused.into_iter().for_each(|slot| states.release(slot));
        wrong
    }

    /// Takes a slot to which a state checkpoint will be copied.
    pub(crate) fn begin_checkpoint(&mut self) -> Option<StateSlot> {
        let slot = self.states.as_mut()?.take_filling();
        self.record_states();
        slot
    }

    /// Makes the state in `slot` the checkpoint after the first `tokens` tokens of `table`, if that prefix is in the
    /// cache. Otherwise, or without a table, releases the slot.
    pub(crate) fn commit_checkpoint(
        &mut self,
        slot: StateSlot,
        prefix: Option<(&BlockTable, usize)>,
    ) {
        let Some(states) = &mut self.states else {
            return;
        };
        let node = prefix.and_then(|(table, tokens)| {
            let ends = table.registered * self.block_size == tokens;
            table.tip.filter(|_| ends)
        });
        match node {
            Some(node) => states.commit(slot, node),
            None => states.release(slot),
        }
    }

    /// Number of tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of cache groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Number of blocks in all groups.
    pub fn blocks(&self) -> usize {
        self.groups.iter().map(|group| group.refs.len()).sum()
    }

    /// Number of blocks that every group can allocate: free ones and idle ones.
    pub fn available(&self) -> usize {
        let available = self.groups.iter().map(GroupPool::available);
        available.min().unwrap_or(0)
    }

    /// Number of blocks of all groups that a table refers to.
    pub fn used(&self) -> usize {
        (0..self.groups.len())
            .map(|group| self.used_of(group))
            .sum()
    }

    /// Number of blocks of a group that a table refers to.
    pub fn used_of(&self, group: usize) -> usize {
        let group = &self.groups[group];
        group.refs.len() - group.available()
    }

    /// Number of blocks of all groups in the prefix cache, used or idle.
    pub fn cached(&self) -> usize {
        self.groups.iter().map(|group| group.cached).sum()
    }

    /// Number of blocks for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Most tokens of a sequence that uses all blocks.
    pub fn max_tokens(&self) -> usize {
        let most = self.groups.iter().map(|group| match group.window {
            Some(window) if group.refs.len() >= spanned_blocks(window, self.block_size) => {
                usize::MAX
            }
            _ => group.refs.len().saturating_mul(self.block_size),
        });
        most.min().unwrap_or(0)
    }

    /// Whether some group has a window.
    pub fn has_windows(&self) -> bool {
        self.groups.iter().any(|group| group.window.is_some())
    }

    /// A table of the blocks of the longest cached prefix of `tokens`, at most `most` blocks long.
    /// Tokens are compared, not only their hashes.
    pub fn match_prefix(
        &mut self,
        salt: &CacheSalt,
        tokens: &[TokenId],
        most: usize,
    ) -> BlockTable {
        let mut table = BlockTable::default();
        self.prepare(&mut table);
        // By group: number of consecutive blocks up to the last node.
        let mut in_row = vec![0; self.groups.len()];
        let (mut nodes, mut longest) = (Vec::new(), 0);
        let mut parent = Parent::Root(salt.clone());
        for block in tokens.chunks_exact(self.block_size).take(most) {
            let Some(node) = self.cache.find(&parent, block) else {
                break;
            };
            nodes.push(node);
            parent = Parent::Node(node);
            let (len, mut valid, mut broken) = (nodes.len(), true, false);
            for (index, (group, in_row)) in self.groups.iter().zip(&mut in_row).enumerate() {
                match self.cache.block(node, index) {
                    Some(_) => *in_row += 1,
                    None => *in_row = 0,
                }
                let first = group.first_seen(len * self.block_size, self.block_size);
                let missing = len - *in_row > first;
                valid &= !missing;
                broken |= missing && group.window.is_none();
            }
            if broken {
                break;
            }
            let restarts = self
                .states
                .as_ref()
                .is_none_or(|states| states.of_node(node).is_some());
            if valid && restarts {
                longest = len;
            }
        }
        self.take_prefix(&mut table, &nodes[..longest]);
        table
    }

    /// Adds to an empty table the blocks of a prefix that later tokens read.
    fn take_prefix(&mut self, table: &mut BlockTable, nodes: &[NodeId]) {
        let end = nodes.len() * self.block_size;
        for (index, group) in self.groups.iter_mut().enumerate() {
            let first = group.first_seen(end, self.block_size).min(nodes.len());
            let own = &mut table.groups[index];
            own.released = first;
            own.blocks.resize(first, BlockId::RELEASED);
            for &node in &nodes[first..] {
                if let Some(block) = self.cache.block(node, index) {
                    group.retain(block);
                    own.blocks.push(block);
                }
            }
        }
        table.registered = nodes.len();
        table.tip = nodes.last().copied();
        if let Some(tip) = table.tip {
            self.cache.hold(tip);
        }
    }

    /// Adds missing groups to a table.
    fn prepare(&self, table: &mut BlockTable) {
        if table.groups.len() < self.groups.len() {
            let groups = self.groups.len();
            table.groups.resize_with(groups, GroupTable::default);
        }
    }

    /// Adds blocks to `table` until it holds `tokens` tokens. Returns whether there were enough;
    /// otherwise it changes nothing. Idle blocks are evicted from the cache, least recently used first.
    #[must_use]
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> bool {
        self.grow_to(table, tokens, tokens)
    }

    /// As [`grow`](Self::grow), but in groups with a window only until it holds `windowed` tokens.
    #[must_use]
    pub fn grow_to(&mut self, table: &mut BlockTable, tokens: usize, windowed: usize) -> bool {
        let wanted = |group: &GroupPool, table: &BlockTable, index| {
            let tokens = match group.window {
                Some(_) => tokens.min(windowed),
                None => tokens,
            };
            let entries = table.group(index).len();
            tokens.div_ceil(self.block_size).saturating_sub(entries)
        };
        let lacks = |(index, group): (usize, &GroupPool)| {
            let wanted = wanted(group, table, index);
            (wanted > group.available()).then_some(())
        };
        if self.groups.iter().enumerate().find_map(lacks).is_some() {
            return false;
        }
        self.prepare(table);
        for index in 0..self.groups.len() {
            let windowed = self.groups[index].window.map_or(tokens, |_| windowed);
            self.add_blocks(table, index, tokens.min(windowed));
        }
        true
    }

    /// Adds blocks to `table` in groups with a window, as far as there are any, until it holds `tokens` tokens. Returns
    /// for how many tokens it has blocks.
    pub fn grow_windows(&mut self, table: &mut BlockTable, tokens: usize) -> usize {
        self.prepare(table);
        let room = self.groups.iter().zip(&table.groups).map(|(group, own)| {
            let more = group.window.map_or(0, |_| group.available());
            own.blocks.len() + more
        });
        let room = tokens.min(room.min().unwrap_or(0) * self.block_size);
        for index in 0..self.groups.len() {
            if self.groups[index].window.is_some() {
                self.add_blocks(table, index, room);
            }
        }
        room
    }

    /// Adds blocks in one group until it holds `tokens` tokens or there are no more.
    fn add_blocks(&mut self, table: &mut BlockTable, group: usize, tokens: usize) {
        let entries = table.groups[group].blocks.len();
        let wanted = self.blocks_for(tokens).saturating_sub(entries);
        table.groups[group].blocks.reserve(wanted);
        for _ in 0..wanted {
            let Some(block) = self.take(group) else {
                return;
            };
            table.groups[group].blocks.push(block);
        }
    }

    /// By group, the number of blocks that `table` lacks for `tokens` tokens. In a group with a window, at most as many as
    /// the window spans.
    pub fn lacking(&self, table: &BlockTable, tokens: usize) -> impl Iterator<Item = usize> {
        self.groups.iter().enumerate().map(move |(index, group)| {
            let entries = table.group(index).len();
            let missing = self.blocks_for(tokens).saturating_sub(entries);
            match group.window {
                None => missing,
                Some(window) => {
                    let span = spanned_blocks(window, self.block_size);
                    missing.min(span.saturating_sub(table.held(index)))
                }
            }
        })
    }

    /// By group: number of blocks that can be allocated.
    pub fn available_by_group(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(GroupPool::available)
    }

    /// Adds the blocks of `table` that are full of computed tokens to the prefix cache. `tokens`
    /// are the computed ones, from the first of the sequence on.
    ///
    /// Where the cache has the same tokens already, the table takes the block of the cache, and its own goes to
    /// `replaced`, to be released: rows do not depend on their batch, so both hold the same bits.
    pub fn register(
        &mut self,
        table: &mut BlockTable,
        salt: &CacheSalt,
        tokens: &[TokenId],
        replaced: &mut BlockTable,
    ) {
        let full = (tokens.len() / self.block_size).min(table.len());
        while table.registered < full && !table.sealed {
            let index = table.registered;
            let parent = table
                .tip
                .map_or_else(|| Parent::Root(salt.clone()), Parent::Node);
            let part = &tokens[index * self.block_size..][..self.block_size];
            let Some(node) = self.cache.insert(parent, part) else {
                table.sealed = true;
                break;
            };
            // The table holds its last node; that node holds its parent.
            self.cache.hold(node);
            if let Some(before) = table.tip.replace(node) {
                self.cache.unhold(before);
            }
            for group in 0..self.groups.len() {
                self.register_block(
                    &mut table.groups[group].blocks[index],
                    (group, node),
                    replaced,
                );
            }
            table.registered += 1;
        }
        self.drop_old_nodes();
    }

    /// Adds one block to the cache, or replaces it by the one that the cache already has.
    fn register_block(
        &mut self,
        block: &mut BlockId,
        (group, node): (usize, NodeId),
        replaced: &mut BlockTable,
    ) {
        let own = *block;
        if own == BlockId::RELEASED {
            return;
        }
        match self.cache.block(node, group) {
            None => {
                self.cache.put_block(node, group, own);
                self.groups[group].set_node(own, Some(node));
            }
            Some(known) if known != own => {
                self.groups[group].retain(known);
                *block = known;
                self.prepare(replaced);
                replaced.groups[group].blocks.push(own);
            }
            Some(_) => {}
        }
    }

    /// In a model of windows only, nodes outlive their blocks. Evicts idle blocks while there are too many nodes.
    fn drop_old_nodes(&mut self) {
        if !self.has_windows() {
            return;
        }
        let most = MIN_NODES.max(4 * self.blocks());
        while self.cache.len() > most && (0..self.groups.len()).any(|group| self.evict(group)) {}
    }

    /// Releases the blocks of `table` that neither the token at `position` nor any after it reads. Those in the
    /// prefix cache stay there until their memory is needed.
    pub fn release_before_window(&mut self, table: &mut BlockTable, position: usize) {
        for (group, own) in self.groups.iter_mut().zip(&mut table.groups) {
            let first = group.first_seen(position, self.block_size);
            for block in own.blocks.iter_mut().take(first).skip(own.released) {
                group.unref(std::mem::replace(block, BlockId::RELEASED));
                own.released += 1;
            }
        }
    }

    /// Releases all blocks of `table`. Those in the prefix cache stay there until their memory is
    /// needed.
    pub fn release(&mut self, table: &mut BlockTable) {
        for (group, own) in self.groups.iter_mut().zip(&mut table.groups) {
            // Blocks are released from the end, so that a block counts as older than the one it continues and is
            // evicted before it.
            while own.blocks.len() > own.released
                && let Some(block) = own.blocks.pop()
            {
                group.unref(block);
            }
            own.blocks.clear();
            own.released = 0;
        }
        if let Some(tip) = table.tip.take() {
            self.cache.unhold(tip);
        }
        table.registered = 0;
        table.sealed = false;
        if let Some(states) = &mut self.states {
            let slots = [table.state.take(), table.saved_state.take()];
            slots
                .into_iter()
                .flatten()
                .for_each(|slot| states.release(slot));
        }
    }

    /// Adds to `free`, by group, the number of blocks that releasing `table` frees, after the tables whose references
    /// `lost` counts. Blocks that other tables refer to do not count.
    pub fn freed_by(&self, table: &BlockTable, lost: &mut LostReferences, free: &mut [usize]) {
        let groups = self.groups.iter().zip(&table.groups).zip(free);
        for (index, ((group, own), free)) in groups.enumerate() {
            for &block in &own.blocks[own.released..] {
                let lost = lost.entry((index, block)).or_insert(0);
                *lost += 1;
                *free += usize::from(*lost == group.refs[block.0 as usize]);
            }
        }
    }

    /// Removes every idle block from the prefix cache.
    pub fn clear_cache(&mut self) {
        let evicted = self.evicted.take();
        for group in 0..self.groups.len() {
            while self.evict(group) {}
        }
        self.evicted = evicted;
    }

    /// Takes a block without references and sets its count to one.
    fn take(&mut self, group: usize) -> Option<BlockId> {
        if self.groups[group].free.is_empty() {
            self.evict(group);
        }
        let group = &mut self.groups[group];
        let block = group.free.pop()?;
        group.refs[block.0 as usize] = 1;
        Some(block)
    }

    /// Evicts the least recently used block, and with it what cannot be found without it: the idle blocks of the same
    /// tokens in groups with a window, and the state checkpoint. Returns whether there was one.
    fn evict(&mut self, group: usize) -> bool {
        let Some(oldest) = self.groups[group].idle.pop_oldest().map(BlockId) else {
            return false;
        };
        let node = self.groups[group].nodes[oldest.0 as usize];
        self.groups[group].free.push(oldest);
        self.groups[group].set_node(oldest, None);
        let Some(node) = node else {
            return true;
        };
        let block = oldest;
        self.record(CacheEntry::Block { group, block }, node);
        if self.groups[group].window.is_none() {
            if let Some(states) = &mut self.states {
                states.forget(node);
                self.record_states();
            }
            for other in (0..self.groups.len()).filter(|&other| other != group) {
                let own = &mut self.groups[other];
                if let Some(block) = self.cache.block(node, other)
                    && own.idle.contains(block.0)
                {
                    own.idle.remove(block.0);
                    own.free.push(block);
                    own.set_node(block, None);
                    let group = other;
                    self.record(CacheEntry::Block { group, block }, node);
                    self.cache.take_block(node, other);
                }
            }
        }
        self.cache.take_block(node, group);
        true
    }
}
