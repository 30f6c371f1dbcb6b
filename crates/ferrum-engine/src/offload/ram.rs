//! The RAM tier: entries up to a limit of bytes, evicted least recently used first.

use crate::kv_entry::StoredEntry;
use ferrum_formats::kv_blocks::KvBlockKey;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct RamTier {
    limit: u64,
    bytes: u64,
    blocks: HashMap<KvBlockKey, (Arc<StoredEntry>, u64)>,
    by_use: BTreeMap<u64, KvBlockKey>,
    uses: u64,
    /// By group: bytes, and number of blocks that were evicted.
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

    /// Bytes of a group's blocks, and how many of its blocks were evicted.
    pub(super) fn figures(&self, group: u64) -> (u64, u64) {
        self.groups.get(&group).copied().unwrap_or_default()
    }

    /// Adds a block and returns the evicted ones, least recently used first; or the block itself if it is larger than the
    /// limit.
    pub(super) fn insert(&mut self, block: Arc<StoredEntry>) -> Vec<Arc<StoredEntry>> {
        if block.size() > self.limit {
            return vec![block];
        }
        self.remove(block.key);
        let mut evicted = Vec::new();
        while self.bytes + block.size() > self.limit {
            let Some((_, &oldest)) = self.by_use.first_key_value() else {
                break;
            };
            if let Some(old) = self.remove(oldest) {
                self.groups.entry(oldest.group()).or_default().1 += 1;
                evicted.push(old);
            }
        }
        self.uses += 1;
        self.bytes += block.size();
        self.groups.entry(block.key.group()).or_default().0 += block.size();
        self.by_use.insert(self.uses, block.key);
        self.blocks.insert(block.key, (block, self.uses));
        evicted
    }

    /// The block of a key, which becomes the most recently used one.
    pub(super) fn get(&mut self, key: KvBlockKey) -> Option<Arc<StoredEntry>> {
        let (block, used) = self.blocks.get_mut(&key)?;
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, key);
        Some(Arc::clone(block))
    }

    pub(super) fn newest_first(&self) -> Vec<Arc<StoredEntry>> {
        let names = self.by_use.values().rev();
        let blocks = names.filter_map(|name| self.blocks.get(name));
        blocks.map(|(block, _)| Arc::clone(block)).collect()
    }

    fn remove(&mut self, key: KvBlockKey) -> Option<Arc<StoredEntry>> {
        let (block, used) = self.blocks.remove(&key)?;
        self.by_use.remove(&used);
        self.bytes -= block.size();
        let group = self.groups.entry(key.group()).or_default();
        group.0 = group.0.saturating_sub(block.size());
        Some(block)
    }
}
