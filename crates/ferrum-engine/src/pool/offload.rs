//! The pool's side of KV offload: entries that leave the prefix cache, and blocks for entries that return.
//!
//! A prefix consists of entries: the blocks of each cache group, and state checkpoints at the end of some of them. A
//! sequence can continue after a prefix when every entry that it needs is on the device or in an offload tier
//! ([`DevicePrefix`]). It gets new blocks for entries that are not on the device, which are written before the next step.

use super::prefix::{CacheSalt, NodeId, Parent};
use super::{BlockPool, BlockTable};
use ferrum_types::{BlockId, StateSlot, TokenId};
use std::collections::HashSet;
use std::hash::BuildHasher;

/// An entry of the prefix cache on the device: what the device has at the end of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEntry {
    /// The block of its last tokens in a cache group.
    Block {
        /// The group.
        group: usize,
        /// The block.
        block: BlockId,
    },
    /// The recurrent state after it.
    State(StateSlot),
}

/// The kind of an entry, on the device or in an offload tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheEntryKind {
    /// A block of a cache group.
    Block(usize),
    /// A recurrent state.
    State,
}

impl CacheEntry {
    /// Its kind.
    pub fn kind(self) -> CacheEntryKind {
        match self {
            CacheEntry::Block { group, .. } => CacheEntryKind::Block(group),
            CacheEntry::State(_) => CacheEntryKind::State,
        }
    }
}

/// An entry of the prefix cache, and the prefix at whose end it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPrefix {
    /// The entry.
    pub entry: CacheEntry,
    /// The salt of the prefix.
    pub salt: CacheSalt,
    /// All tokens of the prefix.
    pub tokens: Vec<TokenId>,
}

/// Which entries of the prefixes of a sequence are on the device, and which are needed.
#[derive(Clone, Debug)]
pub(crate) struct DevicePrefix {
    block_size: usize,
    /// By cache group.
    windows: Vec<Option<usize>>,
    has_states: bool,
    /// By index of the block at the end of the prefix.
    entries: HashSet<(usize, CacheEntryKind)>,
}

impl DevicePrefix {
    /// The entries that the device lacks and that a sequence needs to continue after `end` blocks: first those of groups
    /// without a window, in order.
    pub(crate) fn missing(&self, end: usize) -> impl Iterator<Item = (usize, CacheEntryKind)> {
        let whole = (0..end).flat_map(|index| self.whole().map(move |kind| (index, kind)));
        let needed = whole.chain(self.near_end(end));
        needed.filter(|entry| !self.entries.contains(entry))
    }

    /// The most blocks, up to `most`, after which a sequence can continue with the entries on the device and those that
    /// are `elsewhere`.
    pub(crate) fn longest(
        &self,
        most: usize,
        mut elsewhere: impl FnMut(usize, CacheEntryKind) -> bool,
    ) -> usize {
        let mut has = |entry: (usize, CacheEntryKind)| {
            self.entries.contains(&entry) || elsewhere(entry.0, entry.1)
        };
        let in_row = |index: &usize| self.whole().all(|kind| has((*index, kind)));
        let whole = (0..most).take_while(in_row).count();
        let mut ends = (1..=whole).rev();
        ends.find(|&end| self.near_end(end).all(&mut has))
            .unwrap_or(0)
    }

    /// Groups without a window.
    fn whole(&self) -> impl Iterator<Item = CacheEntryKind> {
        let groups = self.windows.iter().enumerate();
        groups
            .filter_map(|(group, window)| window.is_none().then_some(CacheEntryKind::Block(group)))
    }

    /// Entries that are needed near the end only: the state, and the blocks of windows.
    fn near_end(&self, end: usize) -> impl Iterator<Item = (usize, CacheEntryKind)> {
        let state = (self.has_states && end > 0).then(|| (end - 1, CacheEntryKind::State));
        let windows = self.windows.iter().enumerate();
        let windows = windows.filter_map(|(group, window)| Some((group, (*window)?)));
        let blocks = windows.flat_map(move |(group, window)| {
            let first = (end * self.block_size + 1).saturating_sub(window) / self.block_size;
            let kind = CacheEntryKind::Block(group);
            (first.min(end)..end).rev().map(move |index| (index, kind))
        });
        state.into_iter().chain(blocks)
    }
}

/// Blocks that a table got for a prefix that is partly off the device.
#[derive(Debug)]
pub(crate) struct TakenBlocks {
    /// New blocks: their group, and their index in the sequence.
    pub(crate) new: Vec<(usize, usize, BlockId)>,
    /// The state checkpoint after them, if the device has one.
    pub(crate) state: Option<StateSlot>,
}

impl<S: BuildHasher> BlockPool<S> {
    /// Records evictions from now on, for [`take_evicted`](Self::take_evicted).
    pub fn record_evictions(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// Entries that were evicted since the last call, in order. Their memory is unchanged until its new owner writes to it.
    pub fn take_evicted(&mut self) -> Vec<CachedPrefix> {
        self.evicted
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Records an entry that leaves the cache, if evictions are recorded.
    pub(super) fn record(&mut self, entry: CacheEntry, node: NodeId) {
        if self.evicted.is_some() {
            let left = self.prefix(entry, node);
            self.evicted.get_or_insert_default().push(left);
        }
    }

    /// Records dropped state checkpoints.
    pub(super) fn record_states(&mut self) {
        let forgotten = self.states.as_mut().map(|states| states.take_forgotten());
        for (node, slot) in forgotten.unwrap_or_default() {
            self.record(CacheEntry::State(slot), node);
        }
    }

    /// All entries of the cache: state checkpoints, then the blocks of each group. Used blocks come before idle ones, a
    /// block before those that continue it, and idle ones most recently used first.
    pub fn cached_prefixes(&self) -> Vec<CachedPrefix> {
        let states = self.states.iter().flat_map(|states| states.by_last_use());
        let states = states.map(|(node, slot)| self.prefix(CacheEntry::State(slot), node));
        let mut all: Vec<_> = states.collect();
        for (index, group) in self.groups.iter().enumerate() {
            let cached = |block: BlockId| {
                let node = group.nodes[block.0 as usize]?;
                let entry = CacheEntry::Block {
                    group: index,
                    block,
                };
                Some(self.prefix(entry, node))
            };
            let used = (0..group.refs.len() as u32).map(BlockId);
            let used = used.filter(|block| group.refs[block.0 as usize] > 0);
            let mut used: Vec<_> = used.filter_map(cached).collect();
            used.sort_by_key(|prefix| prefix.tokens.len());
            let idle = group.idle.iter().map(BlockId);
            let mut idle: Vec<_> = idle.filter_map(cached).collect();
            idle.reverse();
            all.append(&mut used);
            all.append(&mut idle);
        }
        all
    }

    fn prefix(&self, entry: CacheEntry, node: NodeId) -> CachedPrefix {
        let (salt, tokens) = self.cache.prefix(node);
        CachedPrefix {
            entry,
            salt,
            tokens,
        }
    }

    /// The nodes of the leading blocks of `tokens` that are in the cache.
    fn path(&self, salt: &CacheSalt, tokens: &[TokenId], most: usize) -> Vec<NodeId> {
        let mut parent = Parent::Root(salt.clone());
        let blocks = tokens.chunks_exact(self.block_size).take(most);
        let nodes = blocks.map_while(|block| {
            let node = self.cache.find(&parent, block)?;
            parent = Parent::Node(node);
            Some(node)
        });
        nodes.collect()
    }

    /// The entries on the device of the first `most` blocks of `tokens`.
    pub(crate) fn device_prefix(
        &self,
        salt: &CacheSalt,
        tokens: &[TokenId],
        most: usize,
    ) -> DevicePrefix {
        let mut entries = HashSet::new();
        for (index, &node) in self.path(salt, tokens, most).iter().enumerate() {
            let groups = 0..self.groups.len();
            let groups = groups.filter(|&group| self.cache.block(node, group).is_some());
            entries.extend(groups.map(|group| (index, CacheEntryKind::Block(group))));
            let states = self.states.as_ref();
            if states.is_some_and(|states| states.of_node(node).is_some()) {
                entries.insert((index, CacheEntryKind::State));
            }
        }
        DevicePrefix {
            block_size: self.block_size,
            windows: self.groups.iter().map(|group| group.window).collect(),
            has_states: self.has_states(),
            entries,
        }
    }

    /// Gives an empty table the first `end` blocks of `tokens`, as far as later tokens read them: those that the cache has,
    /// and new ones for the others. `None` if there are not enough; the table stays empty then.
    ///
    /// New blocks are not in the cache before they are [registered](Self::register).
    pub(crate) fn take_blocks(
        &mut self,
        table: &mut BlockTable,
        (salt, tokens): (&CacheSalt, &[TokenId]),
        end: usize,
    ) -> Option<TakenBlocks> {
        self.prepare(table);
        let path = self.path(salt, tokens, end);
        let state = (path.get(end.wrapping_sub(1)).copied())
            .and_then(|node| self.states.as_mut()?.of_node(node));
        if let (Some(states), Some(state)) = (&mut self.states, state) {
            states.touch(state);
        }
        let mut new = Vec::new();
        // References to cached blocks are taken first, so that taking new blocks does not evict them.
        for (index, group) in self.groups.iter_mut().enumerate() {
            let own = &mut table.groups[index];
            let first = group.first_seen(end * self.block_size, self.block_size);
            own.released = first.min(end);
            own.blocks.resize(own.released, BlockId::RELEASED);
            for entry in own.released..end {
                let node = path.get(entry).copied();
                let known = node.and_then(|node| self.cache.block(node, index));
                match known {
                    Some(block) => group.retain(block),
                    None => new.push((index, entry)),
                }
                own.blocks.push(known.unwrap_or(BlockId::RELEASED));
            }
        }
        let mut taken = Vec::with_capacity(new.len());
        for (group, entry) in new {
            let Some(block) = self.take(group) else {
                self.release_partial(table, &taken);
                return None;
            };
            taken.push((group, entry, block));
        }
        for &(group, entry, block) in &taken {
            table.groups[group].blocks[entry] = block;
        }
        Some(TakenBlocks { new: taken, state })
    }

    /// Releases a table that did not get all its blocks, and the new blocks.
    fn release_partial(&mut self, table: &mut BlockTable, taken: &[(usize, usize, BlockId)]) {
        for &(group, _, block) in taken {
            self.groups[group].unref(block);
        }
        for (group, own) in self.groups.iter_mut().zip(&mut table.groups) {
            for block in own.blocks.drain(..).rev() {
                if block != BlockId::RELEASED {
                    group.unref(block);
                }
            }
            own.released = 0;
        }
    }
}
