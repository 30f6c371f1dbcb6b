//! Blocks in RAM, up to a limit, by their last use.

use super::StoredPart;
use ferrum_formats::kv_blocks::KvBlockName;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct RamTier {
    limit: u64,
    bytes: u64,
    blocks: HashMap<KvBlockName, (Arc<StoredPart>, u64)>,
    by_use: BTreeMap<u64, KvBlockName>,
    uses: u64,
    /// By group: bytes, and blocks that had to go.
    groups: HashMap<u64, (u64, u64)>,
}

impl RamTier {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            bytes: 0,
            blocks: HashMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
            groups: HashMap::new(),
        }
    }

    /// Bytes of a group's blocks, and how many of its blocks had to go.
    pub(super) fn figures(&self, group: u64) -> (u64, u64) {
        self.groups.get(&group).copied().unwrap_or_default()
    }

    /// Adds a block. Gives what has to go for it, the least recently used first; that is the block itself where it
    /// does not fit at all.
    pub(super) fn insert(&mut self, block: Arc<StoredPart>) -> Vec<Arc<StoredPart>> {
        if block.size() > self.limit {
            return vec![block];
        }
        self.remove(block.name);
        let mut out = Vec::new();
        while self.bytes + block.size() > self.limit {
            let Some((_, &oldest)) = self.by_use.first_key_value() else {
                break;
            };
            if let Some(old) = self.remove(oldest) {
                self.groups.entry(oldest.group()).or_default().1 += 1;
                out.push(old);
            }
        }
        self.uses += 1;
        self.bytes += block.size();
        self.groups.entry(block.name.group()).or_default().0 += block.size();
        self.by_use.insert(self.uses, block.name);
        self.blocks.insert(block.name, (block, self.uses));
        out
    }

    /// The block of a name, which is used now.
    pub(super) fn get(&mut self, name: KvBlockName) -> Option<Arc<StoredPart>> {
        let (block, used) = self.blocks.get_mut(&name)?;
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, name);
        Some(Arc::clone(block))
    }

    pub(super) fn newest_first(&self) -> Vec<Arc<StoredPart>> {
        let names = self.by_use.values().rev();
        let blocks = names.filter_map(|name| self.blocks.get(name));
        blocks.map(|(block, _)| Arc::clone(block)).collect()
    }

    fn remove(&mut self, name: KvBlockName) -> Option<Arc<StoredPart>> {
        let (block, used) = self.blocks.remove(&name)?;
        self.by_use.remove(&used);
        self.bytes -= block.size();
        let group = self.groups.entry(name.group()).or_default();
        group.0 = group.0.saturating_sub(block.size());
        Some(block)
    }
}
