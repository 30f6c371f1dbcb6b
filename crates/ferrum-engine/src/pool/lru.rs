//! Blocks in order of their last use, with every operation in constant time.

use ferrum_types::BlockId;

/// End of the list.
const NONE: u32 = u32::MAX;

/// A doubly linked list of block numbers over a fixed array.
#[derive(Debug)]
pub(super) struct LruList {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    listed: bool,
}

impl LruList {
    /// An empty list of blocks below `blocks`.
    pub(super) fn new(blocks: usize) -> Self {
        let link = Link {
            older: NONE,
            newer: NONE,
            listed: false,
        };
        Self {
            links: vec![link; blocks],
            oldest: NONE,
            newest: NONE,
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.links[block.0 as usize].listed
    }

    /// Adds a block that is not in the list.
    pub(super) fn push_newest(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block));
        let before = std::mem::replace(&mut self.newest, block.0);
        self.links[block.0 as usize] = Link {
            older: before,
            newer: NONE,
            listed: true,
        };
        match before {
            NONE => self.oldest = block.0,
            _ => self.links[before as usize].newer = block.0,
        }
        self.len += 1;
    }

    /// Takes the block out that was added longest ago.
    pub(super) fn pop_oldest(&mut self) -> Option<BlockId> {
        let block = (self.oldest != NONE).then_some(BlockId(self.oldest))?;
        self.remove(block);
        Some(block)
    }

    /// Takes a block out that is in the list.
    pub(super) fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        let Link { older, newer, .. } = self.links[block.0 as usize];
        self.links[block.0 as usize].listed = false;
        match older {
            NONE => self.oldest = newer,
            _ => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.links[newer as usize].older = older,
        }
        self.len -= 1;
    }

    /// Oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let first = (self.oldest != NONE).then_some(self.oldest);
        let next = |&at: &u32| Some(self.links[at as usize].newer).filter(|&n| n != NONE);
        // A broken list must not hang the check that looks for it.
        std::iter::successors(first, next)
            .take(self.links.len() + 1)
            .map(BlockId)
    }
}
