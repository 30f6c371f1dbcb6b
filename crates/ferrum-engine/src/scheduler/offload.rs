//! Looks up prefixes in the offload tiers before a sequence is admitted.

use crate::kv_entry::StoredEntry;
use crate::pool::{CacheEntry, CacheEntryKind, CacheSalt, DevicePrefix};
use ferrum_types::{SeqId, TokenId};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Finds entries of prefixes in the offload tiers.
pub(crate) trait OffloadLookup: Send + fmt::Debug {
    /// Looks up a prefix for a waiting sequence.
    fn find(&mut self, seq: SeqId, query: OffloadQuery<'_>) -> OffloadLookupResult;

    /// Drops the state of a sequence that was admitted or has ended.
    fn forget(&mut self, seq: SeqId);
}

/// A prefix that a sequence could use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OffloadQuery<'a> {
    pub(crate) salt: &'a CacheSalt,
    pub(crate) tokens: &'a [TokenId],
    /// Its entries on the device.
    pub(crate) device: &'a DevicePrefix,
    /// Number of blocks after which the sequence can continue with these entries alone.
    pub(crate) found: usize,
    /// Most blocks that may come from caches.
    pub(crate) most: usize,
}

/// Result of an [`OffloadQuery`].
#[derive(Debug)]
pub(crate) enum OffloadLookupResult {
    /// The entries; none where `end` is 0.
    Ready(OffloadedPrefix),
    /// Files are being read. The sequence waits, and others are admitted before it.
    Reading,
}

/// All entries of a prefix that the device lacks.
#[derive(Clone, Debug, Default)]
pub(crate) struct OffloadedPrefix {
    /// Number of blocks of the prefix.
    pub(crate) end: usize,
    /// The entries by the index of the block at their end.
    pub(crate) entries: HashMap<(usize, CacheEntryKind), OffloadedEntry>,
}

/// An entry in an offload tier.
#[derive(Clone, Debug)]
pub(crate) struct OffloadedEntry {
    pub(crate) stored: Arc<StoredEntry>,
    /// Whether it had to be read from a file.
    pub(crate) from_disk: bool,
}

/// An entry to be written to the device before the next step.
#[derive(Debug)]
pub(crate) struct Restore {
    pub(crate) to: CacheEntry,
    pub(crate) from: OffloadedEntry,
}

/// Entries to be written before the next step, and how many tokens they save.
#[derive(Debug, Default)]
pub(crate) struct Restores {
    pub(crate) entries: Vec<Restore>,
    pub(crate) tokens_from_ram: usize,
    pub(crate) tokens_from_disk: usize,
}
