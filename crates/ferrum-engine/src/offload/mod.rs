//! Blocks of the prefix cache that the device had no room for: in RAM, then on disk, and back.
//!
//! A [`KvOffload`] has two tiers for all engines of a process. What an engine's prefix cache gives away goes to RAM;
//! what has been there unused for longest goes to a folder, written by a thread of its own behind a bounded queue: if
//! the disk cannot follow, blocks are dropped, and nobody waits. A [`HostCache`] is one engine's way to both: it
//! finds what a sequence can go on from before the sequence is admitted, and has files read by another thread.
//!
//! What is kept are the parts of prefixes: a block of one cache group, or the recurrent state behind a block. Each is known
//! by the model, the layout of its group, the tenant, and all tokens up to its end. All of that is compared when it is
//! found; a hash only says where to look.

mod disk;
mod host;
mod ram;
mod session;
#[cfg(test)]
mod tests;

pub(crate) use host::HostCache;

use crate::StepRunner;
use crate::pool::{CacheSalt, PartKind};
use crate::vision::FIRST_CACHE_KEY;
use disk::DiskTier;
use ferrum_formats::kv_blocks::{KvBlockName, KvFolder};
use ferrum_models::{KvBlockLayout, StateLayout};
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

/// A part of a prefix outside of the device.
pub(crate) struct StoredPart {
    name: KvBlockName,
    /// See [`Prefix`].
    description: Box<[u8]>,
    bytes: Vec<u8>,
}

impl fmt::Debug for StoredPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredPart({} bytes)", self.bytes.len())
    }
}

impl StoredPart {
    /// Its stored bytes, as [`StepRunner::read_kv_blocks`] or [`StepRunner::read_state`] gave them.
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

/// What the bytes of a runner's blocks and states are.
#[derive(Clone, Debug)]
pub(crate) struct PartLayouts {
    /// By cache group.
    pub(crate) groups: Vec<KvBlockLayout>,
    pub(crate) state: Option<StateLayout>,
}

impl PartLayouts {
    /// Those of a runner; `None` where its blocks or states cannot be read and written.
    pub(crate) fn of(runner: &dyn StepRunner) -> Option<Self> {
        let groups = 0..runner.cache_groups().len();
        let groups: Option<Vec<_>> = groups.map(|group| runner.kv_block_layout(group)).collect();
        let state = runner.state_layout();
        let all = runner.state_slots().is_some() == state.is_some();
        let groups = groups.filter(|_| all)?;
        Some(Self { groups, state })
    }

    /// What parts have in common that a runner of this model computed on this backend, by kind.
    pub(crate) fn origins(&self, model: &str, backend: &str) -> Vec<Origin> {
        let block_size = self.groups.first().map_or(1, |layout| layout.block_size);
        let origin = |kind, own: serde_json::Value, bytes| {
            // Other versions of the program may compute other bits.
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
            origin(PartKind::Block(group), own, layout.bytes)
        });
        let state = self.state.iter().map(|layout| {
            let layers = runs(layout.layers.iter().map(|&numbers| [numbers]));
            origin(
                PartKind::State,
                serde_json::json!({"state": layers}),
                layout.bytes,
            )
        });
        groups.chain(state).collect()
    }
}

/// Equal values in a row as one entry: how many there are, and what they are.
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

/// What parts of one kind have in common, of all runners that may use each other's.
#[derive(Debug)]
pub(crate) struct Origin {
    kind: PartKind,
    text: String,
    block_size: usize,
    /// Bytes of a part.
    bytes: usize,
}

/// The prefixes of a sequence that end with a block, for parts of one kind: their names, and their descriptions, which are
/// the origin, the salt, and the tokens.
struct Prefix<'t> {
    head: Vec<u8>,
    tokens: &'t [TokenId],
    names: Vec<KvBlockName>,
    block_size: usize,
}

impl<'t> Prefix<'t> {
    /// Of the first `most` blocks. `None` for sequences that share with nobody who comes later.
    fn new(origin: &Origin, salt: &CacheSalt, tokens: &'t [TokenId], most: usize) -> Option<Self> {
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
        // So are the keys of images: what comes behind one stays on the device.
        let image = tokens.iter().position(|&token| token >= FIRST_CACHE_KEY);
        let most = most.min(image.unwrap_or(usize::MAX) / origin.block_size);
        let salt = serde_json::json!({"tenant": tenant.as_deref(), "prompt_len": prompt_len});
        let salt = salt.to_string();
        let mut name = KvBlockName::root(origin.text.as_bytes(), salt.as_bytes());
        let block_size = origin.block_size;
        let blocks = tokens.chunks_exact(block_size).take(most);
        let names = blocks.map(|block| {
            name = name.followed_by(bytemuck::cast_slice(block));
            name
        });
        Some(Self {
            names: names.collect(),
            head: [origin.text.as_bytes(), salt.as_bytes()].concat(),
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

    /// Whether a part is that of the prefix which ends with block number `block`.
    fn is_of(&self, block: usize, stored: &StoredPart) -> bool {
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
    fn keep(&self, block: StoredPart, deadline: Option<Instant>) {
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
    fn in_memory(&self, name: KvBlockName) -> Option<Arc<StoredPart>> {
        let found = self.ram().get(name);
        found.or_else(|| self.0.disk.as_ref()?.queued(name))
    }

    fn folder(&self) -> Option<&Arc<KvFolder>> {
        self.0.disk.as_ref().map(DiskTier::folder)
    }
}
