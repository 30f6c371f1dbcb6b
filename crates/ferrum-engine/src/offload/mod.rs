//! KV offload: prefix-cache entries evicted from the device go to RAM, then to disk. Disk writes use a bounded queue;
//! entries are dropped when it is full.
//!
//! A [`KvOffload`] has these two tiers for all engines of a process. RAM evicts its least recently used entries to a folder,
//! which a thread writes. An [`OffloadConnector`] connects one engine to both: it looks up the prefix of a sequence before
//! the sequence is admitted, and another thread reads files.
//!
//! An entry is a block of one cache group, or the recurrent state after a block. It is identified by the model, the layout of
//! its group, the tenant, and all tokens up to its end. A lookup compares all of them; hashes only locate entries.

mod connector;
mod disk;
mod ram;
#[cfg(test)]
mod tests;

pub(crate) use connector::OffloadConnector;

use crate::StepRunner;
use crate::image_embeddings::FIRST_CACHE_KEY;
use crate::kv_entry::StoredEntry;
use crate::pool::{CacheEntryKind, CacheSalt};
use disk::DiskTier;
use ferrum_formats::kv_blocks::{KvBlockKey, KvFolder};
use ferrum_models::{KvBlockLayout, StateLayout};
use ferrum_types::TokenId;
use ram::RamTier;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sizes and folder of the tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadConfig {
    /// Most bytes in RAM; 0: none.
    pub ram_bytes: u64,
    /// Folder of the disk tier; `None`: there is none.
    pub dir: Option<PathBuf>,
    /// Most bytes on disk, as for [`KvFolder::open`].
    pub dir_bytes: Option<u64>,
}

/// Statistics of an engine's KV offload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadStats {
    /// Prompt tokens that were restored from RAM.
    pub ram_hit_tokens: u64,
    /// Prompt tokens that were restored from disk.
    pub disk_hit_tokens: u64,
    /// Bytes in RAM.
    pub ram_bytes: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// Entries evicted from RAM.
    pub ram_evictions: u64,
    /// Entries evicted from disk.
    pub disk_evictions: u64,
    /// Entries that were dropped instead of written, because the disk was too slow.
    pub dropped: u64,
    /// Damaged files that were removed.
    pub damaged: u64,
}

/// Layouts of the bytes of a runner's blocks and states.
#[derive(Clone, Debug)]
pub(crate) struct EntryLayouts {
    /// By cache group.
    pub(crate) groups: Vec<KvBlockLayout>,
    pub(crate) state: Option<StateLayout>,
}

impl EntryLayouts {
    /// The layouts of a runner; `None` if its blocks or states cannot be read and written.
    pub(crate) fn of(runner: &dyn StepRunner) -> Option<Self> {
        let groups = 0..runner.cache_groups().len();
        let groups: Option<Vec<_>> = groups.map(|group| runner.kv_block_layout(group)).collect();
        let state = runner.state_layout();
        let all = runner.state_slots().is_some() == state.is_some();
        let groups = groups.filter(|_| all)?;
        Some(Self { groups, state })
    }

    /// The origins of entries that a runner of this model computes on this backend, by kind.
    pub(crate) fn origins(&self, model: &str, backend: &str) -> Vec<Origin> {
        let block_size = self.groups.first().map_or(1, |layout| layout.block_size);
        let origin = |kind, own: serde_json::Value, bytes| {
            // Results of other versions may differ in their bits.
            let text = serde_json::json!({
                "version": env!("CARGO_PKG_VERSION"),
                "model": model,
                "backend": backend,
                "block_size": block_size,
                "part": own,
            });
            Origin {
                kind,
                text: text.to_string(),
                block_size,
                bytes,
            }
        };
        let groups = self.groups.iter().enumerate().map(|(group, layout)| {
            let KvBlockLayout { dtype, window, .. } = layout;
            let layers = layout.layers.iter();
            let layers = layers.map(|part| [part.kv_heads, part.key_dim, part.value_dim]);
            let own = serde_json::json!({"kv": dtype, "window": window, "layers": runs(layers)});
            origin(CacheEntryKind::Block(group), own, layout.bytes)
        });
        let state = self.state.iter().map(|layout| {
            let layers = runs(layout.layers.iter().map(|&numbers| [numbers]));
            origin(
                CacheEntryKind::State,
                serde_json::json!({"state": layers}),
                layout.bytes,
            )
        });
        groups.chain(state).collect()
    }
}

/// Run-length encodes values: the length of each run, and its value.
fn runs<const N: usize>(values: impl Iterator<Item = [usize; N]>) -> Vec<(usize, Vec<usize>)> {
    let mut runs: Vec<(usize, Vec<usize>)> = Vec::new();
    for value in values {
        match runs.last_mut().filter(|(_, last)| *last == value) {
            Some((count, _)) => *count += 1,
            None => runs.push((1, value.to_vec())),
        }
    }
    runs
}

/// Identity of the runners that may share entries of one kind.
#[derive(Debug)]
pub(crate) struct Origin {
    kind: CacheEntryKind,
    pub(crate) text: String,
    block_size: usize,
    /// Bytes of an entry.
    bytes: usize,
}

/// The prefixes of a sequence that end with a block, for entries of one kind: their keys, and their descriptions, which
/// are the origin, the salt, and the tokens.
struct Prefix<'t> {
    head: Vec<u8>,
    tokens: &'t [TokenId],
    block_keys: Vec<KvBlockKey>,
    block_size: usize,
}

impl<'t> Prefix<'t> {
    /// The prefixes of the first `most` blocks. `None` for sequences that no later engine can share.
    fn new(origin: &Origin, salt: &CacheSalt, tokens: &'t [TokenId], most: usize) -> Option<Self> {
        let CacheSalt {
            tenant,
            prompt_len,
            adapter,
            private,
        } = salt;
        // Numbers of adapters are valid in one engine only.
        if adapter.is_some() || private.is_some() {
            return None;
        }
        // So are the keys of images: blocks after an image stay on the device.
        let image = tokens.iter().position(|&token| token >= FIRST_CACHE_KEY);
        let most = most.min(image.unwrap_or(usize::MAX) / origin.block_size);
        let salt = serde_json::json!({"tenant": tenant.as_deref(), "prompt_len": prompt_len});
        let salt = salt.to_string();
        let mut key = KvBlockKey::root(origin.text.as_bytes(), salt.as_bytes());
        let block_size = origin.block_size;
        let blocks = tokens.chunks_exact(block_size).take(most);
        let keys = blocks.map(|block| {
            key = key.followed_by(bytemuck::cast_slice(block));
            key
        });
        Some(Self {
            block_keys: keys.collect(),
            head: [origin.text.as_bytes(), salt.as_bytes()].concat(),
            tokens,
            block_size,
        })
    }

    fn tokens_to(&self, block: usize) -> &[u8] {
        bytemuck::cast_slice(&self.tokens[..(block + 1) * self.block_size])
    }

    /// The description of the prefix that ends with a block.
    fn description(&self, block: usize) -> Vec<u8> {
        [&self.head, self.tokens_to(block)].concat()
    }

    /// Whether an entry belongs to the prefix that ends with block number `block`.
    fn is_of(&self, block: usize, stored: &StoredEntry) -> bool {
        let tokens = stored.description.strip_prefix(&*self.head);
        tokens.is_some_and(|tokens| tokens == self.tokens_to(block))
    }
}

/// The offload tiers of all engines of a process, in RAM and on disk. Clones share them.
#[derive(Clone)]
pub struct KvOffload(Arc<Tiers>);

struct Tiers {
    ram: Mutex<RamTier>,
    disk: Option<DiskTier>,
}

impl fmt::Debug for KvOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("KvOffload");
        shown.field("disk", &self.0.disk.is_some());
        shown.finish_non_exhaustive()
    }
}

impl KvOffload {
    /// Opens the folder, if there is one, and starts the thread that writes to it.
    ///
    /// # Errors
    /// Those of [`KvFolder::open`]; when there can be no thread.
    pub fn open(config: &OffloadConfig) -> ferrum_formats::Result<Self> {
        let disk = match &config.dir {
            Some(dir) => Some(DiskTier::start(KvFolder::open(dir, config.dir_bytes)?)?),
            None => None,
        };
        if let Some(folder) = disk.as_ref().map(DiskTier::folder) {
            let dir = folder.root().display();
            let (blocks, limit) = (folder.len(), folder.limit());
            tracing::info!(%dir, blocks, limit, "KV blocks are kept on disk");
        }
        let ram = Mutex::new(RamTier::new(config.ram_bytes));
        Ok(Self(Arc::new(Tiers { ram, disk })))
    }

    /// Writes the entries in RAM to the disk, within at most `timeout`. Nothing is written afterwards.
    pub fn finish(&self, timeout: Duration) {
        let Some(disk) = &self.0.disk else { return };
        let deadline = Instant::now() + timeout;
        let blocks = self.ram().newest_first();
        for block in blocks {
            disk.offer(block, Some(deadline));
        }
        disk.finish(deadline);
    }

    fn ram(&self) -> MutexGuard<'_, RamTier> {
        // Nothing that can panic runs under the lock.
        self.0.ram.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an entry in RAM, or on disk if it is larger than the limit of RAM. With a deadline, this waits that long
    /// for the queue of the disk; without one, entries are dropped when the queue is full.
    fn store(&self, entry: StoredEntry, deadline: Option<Instant>) {
        let evicted = self.ram().insert(Arc::new(entry));
        if let Some(disk) = &self.0.disk {
            for entry in evicted {
                disk.offer(entry, deadline);
            }
        }
    }

    /// Whether a tier has an entry of this key, which counts as a use of it.
    fn touch(&self, key: KvBlockKey) -> bool {
        let disk = self.0.disk.as_ref();
        self.ram().get(key).is_some() || disk.is_some_and(|disk| disk.has(key))
    }

    /// An entry that need not be read from a file.
    fn in_memory(&self, key: KvBlockKey) -> Option<Arc<StoredEntry>> {
        let found = self.ram().get(key);
        found.or_else(|| self.0.disk.as_ref()?.queued(key))
    }

    fn folder(&self) -> Option<&Arc<KvFolder>> {
        self.0.disk.as_ref().map(DiskTier::folder)
    }
}
