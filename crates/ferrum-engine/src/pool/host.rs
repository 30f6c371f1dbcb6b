//! What leaves the prefix cache, and what comes back to it: the pool's side of blocks and states that are kept outside of
//! the device.
//!
//! What a prefix consists of is looked at part by part: the blocks of each cache group, and the recurrent states behind
//! some of them. A sequence can go on after a prefix when every part that is needed then is on the device or outside
//! of it ([`DevicePrefix`]). It gets new blocks for those that are not on the device, which are written before the
//! next step.

use super::prefix::{CacheSalt, NodeId, Parent};
use super::{BlockPool, BlockTable};
use ferrum_types::{BlockId, StateSlot, TokenId};
use std::collections::HashSet;
use std::hash::BuildHasher;

/// What the device has of a prefix, at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePart {
    /// The block of its last tokens in a cache group.
    Block {
        /// The group.
        group: usize,
        /// The block.
        block: BlockId,
    },
    /// The recurrent state behind it.
    State(StateSlot),
}

/// What a part is, wherever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PartKind {
    /// A block of a cache group.
    Block(usize),
    /// A recurrent state.
    State,
}

impl CachePart {
    /// What it is.
    pub fn kind(self) -> PartKind {
        match self {
            CachePart::Block { group, .. } => PartKind::Block(group),
            CachePart::State(_) => PartKind::State,
        }
    }
}

/// A part of the prefix cache, and what it is the end of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPrefix {
    /// The part.
    pub part: CachePart,
    /// Who may share it.
    pub salt: CacheSalt,
    /// All tokens of its sequence up to its end.
    pub tokens: Vec<TokenId>,
}

/// Which parts of the prefixes of a sequence are on the device, and which are needed.
#[derive(Clone, Debug)]
pub(crate) struct DevicePrefix {
    block_size: usize,
    /// By cache group.
    windows: Vec<Option<usize>>,
    has_states: bool,
    /// By number of the block at the end of the prefix.
    parts: HashSet<(usize, PartKind)>,
}

impl DevicePrefix {
    /// The parts that the device lacks and without which no sequence goes on after `end` blocks: those of groups that keep
    /// all blocks first, in order.
    pub(crate) fn missing(&self, end: usize) -> impl Iterator<Item = (usize, PartKind)> {
        let whole = (0..end).flat_map(|index| self.whole().map(move |kind| (index, kind)));
        let needed = whole.chain(self.near_end(end));
        needed.filter(|part| !self.parts.contains(part))
    }

    /// The most blocks, up to `most`, after which a sequence goes on with what the device has and what there `is`
    /// elsewhere.
    pub(crate) fn longest(
        &self,
        most: usize,
        mut is: impl FnMut(usize, PartKind) -> bool,
    ) -> usize {
        let mut has = |part: (usize, PartKind)| self.parts.contains(&part) || is(part.0, part.1);
        let in_row = |index: &usize| self.whole().all(|kind| has((*index, kind)));
        let whole = (0..most).take_while(in_row).count();
        let mut ends = (1..=whole).rev();
        ends.find(|&end| self.near_end(end).all(&mut has))
            .unwrap_or(0)
    }

    /// Groups that keep all blocks.
    fn whole(&self) -> impl Iterator<Item = PartKind> {
        let groups = self.windows.iter().enumerate();
        groups.filter_map(|(group, window)| window.is_none().then_some(PartKind::Block(group)))
    }

    /// What is needed near the end only: the state, and the blocks of windows.
    fn near_end(&self, end: usize) -> impl Iterator<Item = (usize, PartKind)> {
        let state = (self.has_states && end > 0).then(|| (end - 1, PartKind::State));
        let windows = self.windows.iter().enumerate();
        let windows = windows.filter_map(|(group, window)| Some((group, (*window)?)));
        let blocks = windows.flat_map(move |(group, window)| {
            let first = (end * self.block_size + 1).saturating_sub(window) / self.block_size;
            let kind = PartKind::Block(group);
            (first.min(end)..end).rev().map(move |index| (index, kind))
        });
        state.into_iter().chain(blocks)
    }
}

/// What a table got that is not all on the device.
#[derive(Debug)]
pub(crate) struct TakenBlocks {
    /// New blocks: their group, and their number in the sequence.
    pub(crate) new: Vec<(usize, usize, BlockId)>,
    /// The state behind them, where one is kept on the device.
    pub(crate) state: Option<StateSlot>,
}

impl<S: BuildHasher> BlockPool<S> {
    /// Remembers from now on what the cache gives away, for [`take_evicted`](Self::take_evicted).
    pub fn record_evictions(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// Parts that the cache gave away since the last call, in order. Their memory is as it was until their new owner
    /// writes to it.
    pub fn take_evicted(&mut self) -> Vec<CachedPrefix> {
        self.evicted
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Remembers a part that leaves the cache, if that is wanted.
    pub(super) fn record(&mut self, part: CachePart, node: NodeId) {
        if self.evicted.is_some() {
            let left = self.prefix(part, node);
            self.evicted.get_or_insert_default().push(left);
        }
    }

    /// The same for the states that were forgotten.
    pub(super) fn record_states(&mut self) {
        let forgotten = self.states.as_mut().map(|states| states.take_forgotten());
        for (node, slot) in forgotten.unwrap_or_default() {
            self.record(CachePart::State(slot), node);
        }
    }

    /// All that is in the cache: states, then the blocks of each group, a block before those that continue it, and the
    /// idle ones that were used last first.
    pub fn cached_prefixes(&self) -> Vec<CachedPrefix> {
        let states = self.states.iter().flat_map(|states| states.by_last_use());
        let states = states.map(|(node, slot)| self.prefix(CachePart::State(slot), node));
        let mut all: Vec<_> = states.collect();
        for (index, group) in self.groups.iter().enumerate() {
            let cached = |block: BlockId| {
                let node = group.nodes[block.0 as usize]?;
                let part = CachePart::Block {
                    group: index,
                    block,
                };
                Some(self.prefix(part, node))
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

    fn prefix(&self, part: CachePart, node: NodeId) -> CachedPrefix {
        let (salt, tokens) = self.cache.prefix(node);
        CachedPrefix { part, salt, tokens }
    }

    /// The nodes of the first blocks of `tokens`, up to the first that is not in the cache.
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

    /// What the device has of the first `most` blocks of `tokens`.
    pub(crate) fn device_prefix(
        &self,
        salt: &CacheSalt,
        tokens: &[TokenId],
        most: usize,
    ) -> DevicePrefix {
        let mut parts = HashSet::new();
        for (index, &node) in self.path(salt, tokens, most).iter().enumerate() {
            let groups = 0..self.groups.len();
            let groups = groups.filter(|&group| self.cache.block(node, group).is_some());
            parts.extend(groups.map(|group| (index, PartKind::Block(group))));
            let states = self.states.as_ref();
            if states.is_some_and(|states| states.of_node(node).is_some()) {
                parts.insert((index, PartKind::State));
            }
        }
        DevicePrefix {
            block_size: self.block_size,
            windows: self.groups.iter().map(|group| group.window).collect(),
            has_states: self.has_states(),
            parts,
        }
    }

    /// Gives an empty table the first `end` blocks of `tokens`, as far as they are needed behind them: those that the
    /// cache has, and new ones for the others. `None`, and the table stays empty, when there are not enough.
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
        // What is there first, so that nothing of it is given away for what is not.
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

    /// Gives back a table that did not get all its blocks, and those that it was to get.
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
