//! Checks the pool's invariants against all block tables.

use super::prefix::Parent;
use super::{BlockPool, BlockTable, GroupPool};
use ferrum_types::BlockId;
use std::hash::BuildHasher;

/// A violated invariant of a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV pool: {0}")]
pub struct PoolFault(String);

impl PoolFault {
    pub(crate) fn new(what: String) -> Self {
        Self(what)
    }
}

impl<S: BuildHasher> BlockPool<S> {
    /// Checks that every block is in exactly one state, that reference counts match `tables` (all
    /// tables that exist), and that the prefix cache is a tree.
    ///
    /// # Errors
    /// The first violation.
    pub fn check<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), PoolFault> {
        let tables: Vec<_> = tables.into_iter().collect();
        for (index, group) in self.groups.iter().enumerate() {
            self.check_references(&tables, index)?;
            check_states(group)?;
            (0..group.refs.len() as u32).try_for_each(|b| self.check_block(BlockId(b), index))?;
        }
        self.check_nodes(&tables)?;
        self.check_slots(&tables)
    }

    /// Every state slot is in one list, and checkpoints belong to blocks that are in the cache.
    fn check_slots(&self, tables: &[&BlockTable]) -> Result<(), PoolFault> {
        let Some(states) = &self.states else {
            return Ok(());
        };
        let working = tables
            .iter()
            .flat_map(|table| [table.state, table.saved_state]);
        let working: Vec<_> = working.flatten().collect();
        let whole = self.groups.iter().position(|group| group.window.is_none());
        let has_block = |node| {
            let known = self.cache.node(node).is_some();
            known && whole.is_some_and(|group| self.cache.block(node, group).is_some())
        };
        states.check(&working, has_block).map_err(PoolFault::new)
    }

    fn check_references(&self, tables: &[&BlockTable], index: usize) -> Result<(), PoolFault> {
        let group = &self.groups[index];
        let mut counted = vec![0u32; group.refs.len()];
        for table in tables {
            let released = table.groups.get(index).map_or(0, |own| own.released);
            for (entry, &block) in table.group(index).iter().enumerate() {
                if (block == BlockId::RELEASED) != (entry < released) {
                    return fault(block, "is released and counted, or neither");
                }
                if entry < released {
                    continue;
                }
                match counted.get_mut(block.0 as usize) {
                    Some(count) => *count += 1,
                    None => return fault(block, "is in a table and not in the pool"),
                }
                let registered = entry < table.registered;
                if registered != group.nodes[block.0 as usize].is_some() {
                    return fault(block, "is cached for the table or the cache, not for both");
                }
            }
            self.check_path(table, index)?;
        }
        for (index, (&refs, counted)) in group.refs.iter().zip(counted).enumerate() {
            if refs != counted {
                let words = format!("has {refs} references, {counted} are in tables");
                return fault(BlockId(index as u32), &words);
            }
        }
        Ok(())
    }

    /// The registered blocks of a table are the blocks of the nodes up to its last node.
    fn check_path(&self, table: &BlockTable, index: usize) -> Result<(), PoolFault> {
        let mut at = table.tip;
        for &block in table.group(index)[..table.registered].iter().rev() {
            let Some(node) = at else {
                return fault(block, "is cached after fewer blocks than it continues");
            };
            let cached = self.cache.block(node, index) == Some(block);
            if block != BlockId::RELEASED && !cached {
                return fault(block, "is not cached after the block that it continues");
            }
            at = self.cache.node(node).and_then(|node| node.before());
        }
        match at {
            None => Ok(()),
            Some(_) => Err(PoolFault::new("a table ends with a longer prefix".into())),
        }
    }

    /// A block of the cache and its node refer to each other.
    fn check_block(&self, block: BlockId, index: usize) -> Result<(), PoolFault> {
        let group = &self.groups[index];
        let Some(id) = group.nodes[block.0 as usize] else {
            return Ok(());
        };
        if self.cache.block(id, index) != Some(block) || !self.cache.finds_itself(id) {
            return fault(block, "is cached and not found");
        }
        let before = self.cache.node(id).and_then(|node| node.before());
        let Some(parent) = before.filter(|_| group.window.is_none()) else {
            return Ok(());
        };
        let Some(parent) = self.cache.block(parent, index) else {
            return fault(block, "is cached and continues a block that is not");
        };
        let used = |b: BlockId| group.refs[b.0 as usize] > 0;
        if used(block) && !used(parent) {
            return fault(block, "is used and continues a block that is not");
        }
        Ok(())
    }

    /// Reference counts of nodes match their users, and every node has a block in groups without a window.
    fn check_nodes(&self, tables: &[&BlockTable]) -> Result<(), PoolFault> {
        let fail = |what: &str| Err(PoolFault::new(format!("a cached prefix {what}")));
        let ends = self.cache.ids().map(|(id, _)| id.index() + 1);
        let mut users = vec![0u32; ends.max().unwrap_or(0)];
        let mut count = |id: Option<super::NodeId>| match id {
            Some(id) => users.get_mut(id.index()).map(|users| *users += 1).is_some(),
            None => true,
        };
        for (id, node) in self.cache.ids() {
            let groups = 0..self.groups.len();
            let found = groups.filter_map(|group| Some((group, self.cache.block(id, group)?)));
            for (group, block) in found {
                count(Some(id));
                if self.groups[group].nodes[block.0 as usize] != Some(id) {
                    return fail("has a block that is not in the cache");
                }
            }
            if let Parent::Node(parent) = &node.parent
                && (self.cache.node(*parent).is_none() || !count(Some(*parent)))
            {
                return fail("continues one that is not there");
            }
        }
        if !tables.iter().all(|table| count(table.tip)) {
            return fail("is in a table and gone");
        }
        for (id, node) in self.cache.ids() {
            if !node.has_users(users[id.index()]) {
                return fail("has another number of users than it counts");
            }
            let whole = self.groups.iter().position(|group| group.window.is_none());
            if whole.is_some_and(|group| self.cache.block(id, group).is_none()) {
                return fail("has no block in a group that keeps all");
            }
        }
        Ok(())
    }
}

/// Every block is free, idle or used, and idle blocks are cached.
fn check_states(group: &GroupPool) -> Result<(), PoolFault> {
    let mut seen = vec![false; group.refs.len()];
    let free = group.free.iter().map(|&b| (b, false));
    let idle = group.idle.iter().map(|b| (BlockId(b), true));
    for (block, cached) in free.chain(idle) {
        if std::mem::replace(&mut seen[block.0 as usize], true) {
            return fault(block, "is listed twice");
        }
        if group.refs[block.0 as usize] != 0 {
            return fault(block, "is listed and used");
        }
        let known = group.nodes[block.0 as usize].is_some();
        if known != cached || group.idle.contains(block.0) != cached {
            return fault(block, "is in the wrong list");
        }
    }
    match (0..group.refs.len()).find(|&b| !seen[b] && group.refs[b] == 0) {
        Some(lost) => fault(BlockId(lost as u32), "is lost"),
        None => Ok(()),
    }
}

fn fault(block: BlockId, what: &str) -> Result<(), PoolFault> {
    Err(PoolFault(format!("block {} {what}", block.0)))
}
