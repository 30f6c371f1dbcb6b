//! The blocks of one sequence.

use super::prefix::NodeId;
use ferrum_types::{BlockId, StateSlot};

/// The blocks of one sequence, by cache group and in order of position.
///
/// It refers to blocks of one pool and must be released with
/// [`BlockPool::release`](super::BlockPool::release).
#[derive(Debug, Default)]
pub struct BlockTable {
    /// One table for each group of the pool, once it has a block.
    pub(super) groups: Vec<GroupTable>,
    /// Number of leading blocks that are or were in the prefix cache.
    pub(super) registered: usize,
    /// The node of the last of them.
    pub(super) tip: Option<NodeId>,
    /// Whether no further block of it can be added to the prefix cache.
    pub(super) sealed: bool,
    /// The slot of its recurrent state, in a pool with states.
    pub(super) state: Option<StateSlot>,
    /// The slot of a copy of it from before a step with a draft, until it is known how much of the draft is accepted.
    pub(super) saved_state: Option<StateSlot>,
}

/// The blocks of a sequence in one group.
#[derive(Debug, Default)]
pub(super) struct GroupTable {
    pub(super) blocks: Vec<BlockId>,
    /// Number of leading blocks that were released because they are before the window.
    pub(super) released: usize,
}

impl BlockTable {
    /// The blocks in the first cache group.
    pub fn blocks(&self) -> &[BlockId] {
        self.group(0)
    }

    /// The blocks in a cache group; those before its window are [released](BlockId::RELEASED).
    pub fn group(&self, group: usize) -> &[BlockId] {
        self.groups.get(group).map_or(&[], |table| &table.blocks)
    }

    /// Number of blocks of a group that it refers to.
    pub fn held(&self, group: usize) -> usize {
        let table = self.groups.get(group);
        table.map_or(0, |table| table.blocks.len() - table.released)
    }

    /// Number of entries in every group, released ones included.
    pub fn len(&self) -> usize {
        let entries = self.groups.iter().map(|table| table.blocks.len());
        entries.min().unwrap_or(0)
    }

    /// Whether it refers to no block.
    pub fn is_empty(&self) -> bool {
        (0..self.groups.len()).all(|group| self.held(group) == 0)
    }

    /// The slot of its recurrent state.
    pub fn state(&self) -> Option<StateSlot> {
        self.state
    }

    /// The slot in which its state is saved before a step with a draft.
    pub(crate) fn saved_state(&self) -> Option<StateSlot> {
        self.saved_state
    }

    /// Number of groups in which it may have blocks.
    pub(crate) fn groups(&self) -> usize {
        self.groups.len()
    }
}
