//! Blocks of the prefix cache that the device had no room for: in RAM, then on disk, and back.
//!
//! A [`KvOffload`] has two tiers for all engines of a process. What an engine's prefix cache gives away goes to RAM;
//! what has been there unused for longest goes to a folder, written by a thread of its own behind a bounded queue: if
//! the disk cannot follow, blocks are dropped, and nobody waits. A [`HostCache`] is one engine's way to both: it
//! finds what a sequence can go on from before the sequence is admitted, and has files read by another thread.
//!
//! A block is known by the model, the cache's layout, the tenant, and all tokens up to its end. All of that is compared
//! when it is found; a hash only says where to look.

mod disk;
mod host;
mod ram;
mod session;
#[cfg(test)]
mod tests;

pub(crate) use host::HostCache;

use crate::pool::CacheSalt;
use disk::DiskTier;
use ferrum_formats::kv_blocks::{KvBlockName, KvFolder};
use ferrum_models::KvBlockLayout;
use ferrum_types::TokenId;
use ram::RamTier;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sizes and places of the tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadConfig {
    /// Most bytes in RAM; 0: none.
    pub ram_bytes: u64,
    /// Folder of the disk's tier; `None`: there is none.
    pub dir: Option<PathBuf>,
    /// Most bytes on disk, as [`KvFolder::open`] has it.
    pub dir_bytes: Option<u64>,
}

/// Figures of an engine's blocks outside of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadStats {
    /// Prompt tokens that came back from RAM.
    pub ram_hit_tokens: u64,
    /// Prompt tokens that came back from disk.
    pub disk_hit_tokens: u64,
    /// Bytes in RAM.
    pub ram_bytes: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// Blocks that left RAM because it was full.
    pub ram_evictions: u64,
    /// Blocks that left the disk because it was full.
    pub disk_evictions: u64,
    /// Blocks that were to be written and were not, because the disk was too slow or too full.
    pub dropped: u64,
    /// Files that were damaged, and are gone.
    pub damaged: u64,
}

/// A block outside of the device.
pub(crate) struct StoredBlock {
    name: KvBlockName,
    /// See [`Prefix`].
    description: Box<[u8]>,
    bytes: Vec<u8>,
}

impl fmt::Debug for StoredBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredBlock({} bytes)", self.bytes.len())
    }
}

impl StoredBlock {
    /// Its stored bytes, as [`ModelRunner::read_kv_blocks`](ferrum_models::ModelRunner::read_kv_blocks) gave them.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Some bytes, of nothing in particular.
    #[cfg(test)]
    pub(crate) fn of_bytes(bytes: Vec<u8>) -> Self {
        Self {
            name: KvBlockName::root(b"", b""),
            description: Box::default(),
            bytes,
        }
    }

    fn size(&self) -> u64 {
        (self.description.len() + self.bytes.len()) as u64
    }
}

/// What blocks of an engine have in common.
#[derive(Debug)]
struct Group {
    text: String,
    layout: KvBlockLayout,
}

impl Group {
    fn new(model: &str, backend: &str, layout: KvBlockLayout) -> Self {
        let KvBlockLayout {
            dtype, block_size, ..
        } = layout;
        // Layers that are alike as one entry: how many there are, and what they have.
        let mut layers: Vec<[usize; 4]> = Vec::new();
        for part in &layout.layers {
            let heads = [part.kv_heads, part.key_dim, part.value_dim];
            match layers.last_mut().filter(|last| last[1..] == heads) {
                Some(last) => last[0] += 1,
                None => layers.push([1, heads[0], heads[1], heads[2]]),
            }
        }
        // Other versions of the program may compute other bits.
        let text = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": model,
            "backend": backend,
            "kv": dtype,
            "layers": layers,
            "block_size": block_size,
        });
        Self {
            text: text.to_string(),
            layout,
        }
    }
}

/// The prefixes of a sequence that end with a block: their names, and their descriptions, which are the group, the
/// salt, and the tokens.
struct Prefix<'t> {
    head: Vec<u8>,
    tokens: &'t [TokenId],
    names: Vec<KvBlockName>,
    block_size: usize,
}

impl<'t> Prefix<'t> {
    /// Of the first `most` blocks. `None` for sequences that share with nobody who comes later.
    fn new(group: &Group, salt: &CacheSalt, tokens: &'t [TokenId], most: usize) -> Option<Self> {
        let CacheSalt {
            tenant,
            prompt_len,
            adapter,
            private,
        } = salt;
        // The numbers of adapters are those of one engine.
        if adapter.is_some() || private.is_some() {
            return None;
        }
        let salt = serde_json::json!({"tenant": tenant.as_deref(), "prompt_len": prompt_len});
        let salt = salt.to_string();
        let mut name = KvBlockName::root(group.text.as_bytes(), salt.as_bytes());
        let block_size = group.layout.block_size;
        let blocks = tokens.chunks_exact(block_size).take(most);
        let names = blocks.map(|block| {
            name = name.followed_by(bytemuck::cast_slice(block));
            name
        });
        Some(Self {
            names: names.collect(),
            head: [group.text.as_bytes(), salt.as_bytes()].concat(),
            tokens,
            block_size,
        })
    }

    fn tokens_to(&self, block: usize) -> &[u8] {
        bytemuck::cast_slice(&self.tokens[..(block + 1) * self.block_size])
    }

    /// What the prefix that ends with a block is.
    fn description(&self, block: usize) -> Vec<u8> {
        [&self.head, self.tokens_to(block)].concat()
    }

    /// Whether a block holds the keys and values of the prefix that ends with block number `block`.
    fn is_of(&self, block: usize, stored: &StoredBlock) -> bool {
        let tokens = stored.description.strip_prefix(&*self.head);
        tokens.is_some_and(|tokens| tokens == self.tokens_to(block))
    }
}

/// Blocks of the prefix caches of all engines of a process, in RAM and on disk. Clones are the same.
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

    /// Writes what is in RAM to the disk, as far as that is done within `patience`. Nothing is written afterwards.
    pub fn finish(&self, patience: Duration) {
        let Some(disk) = &self.0.disk else { return };
        let deadline = Instant::now() + patience;
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

    /// Takes a block: into RAM, or onto the disk where it is larger than RAM may be. With a deadline, it waits that
    /// long for the disk; without one, what the disk cannot take is dropped.
    fn keep(&self, block: StoredBlock, deadline: Option<Instant>) {
        let out = self.ram().insert(Arc::new(block));
        if let Some(disk) = &self.0.disk {
            for block in out {
                disk.offer(block, deadline);
            }
        }
    }

    /// Whether a tier has a block of this name, which counts as a use of it.
    fn touch(&self, name: KvBlockName) -> bool {
        let disk = self.0.disk.as_ref();
        self.ram().get(name).is_some() || disk.is_some_and(|disk| disk.has(name))
    }

    /// A block that need not be read from a file.
    fn in_memory(&self, name: KvBlockName) -> Option<Arc<StoredBlock>> {
        let found = self.ram().get(name);
        found.or_else(|| self.0.disk.as_ref()?.queued(name))
    }

    fn folder(&self) -> Option<&Arc<KvFolder>> {
        self.0.disk.as_ref().map(DiskTier::folder)
    }
}
