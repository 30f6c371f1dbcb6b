//! Parts of the prefix cache on their way between the device and where it keeps what it has no room for.

use super::step_loop::StepLoop;
use super::{Command, EngineConfig};
use crate::StepRunner;
use crate::offload::{HostCache, PartLayouts};
use crate::pool::{CachePart, CachedPrefix};
use crate::scheduler::Restores;
use ferrum_types::{BlockId, Result};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Parts that are read from the device at once.
const READ_TOGETHER: usize = 16;
/// How long an engine that ends may take to keep what its prefix cache has.
const LAST_PARTS: Duration = Duration::from_secs(15);

/// The engine's way to what it keeps outside of the device, if that is wanted and the runner can do it.
pub(super) fn host_cache(
    runner: &dyn StepRunner,
    config: &EngineConfig,
    commands: &Sender<Command>,
) -> Option<Arc<HostCache>> {
    let offload = config.offload.as_ref().filter(|_| config.prefix_cache)?;
    let backend = runner.backend();
    let Some(layouts) = PartLayouts::of(runner) else {
        tracing::warn!(backend, "this runner's KV blocks cannot be offloaded");
        return None;
    };
    let commands = commands.clone();
    let wake = move || {
        // An engine that has ended waits for nothing.
        let _ = commands.send(Command::BlocksRead);
    };
    // Other devices may compute other bits.
    let placement = runner.placement();
    let identity = (&*offload.model, &*placement);
    match HostCache::start(offload.store.clone(), identity, &layouts, wake) {
        Ok(host) => Some(Arc::new(host)),
        Err(e) => {
            let reason = e.to_string();
            tracing::warn!(reason, "KV blocks are not offloaded");
            None
        }
    }
}

impl StepLoop<'_> {
    /// Moves the parts that a plan gave to others, and those that it takes back. To be called after each plan, and again
    /// when it has begun, before the step is submitted.
    pub(super) fn move_parts(&mut self) -> Result<()> {
        let Some(host) = self.host.clone() else {
            return Ok(());
        };
        // What has a new owner leaves before that one's parts come.
        let evicted = self.scheduler.take_evicted();
        self.offload(&host, evicted, None)?;
        let Restores {
            parts,
            tokens_from_ram,
            tokens_from_disk,
        } = self.scheduler.take_restores();
        for restore in &parts {
            let bytes = restore.from.stored.bytes();
            match restore.to {
                CachePart::Block { group, block } => {
                    self.runner.write_kv_blocks(group, &[block], bytes)?;
                }
                CachePart::State(slot) => self.runner.write_state(slot, bytes)?,
            }
        }
        if !parts.is_empty() {
            host.count(tokens_from_ram, tokens_from_disk);
            let parts = parts.len();
            tracing::debug!(parts, tokens_from_ram, tokens_from_disk, "taken back");
        }
        Ok(())
    }

    /// Keeps what the prefix cache has, when nothing more is computed.
    pub(super) fn keep_cached(&mut self) {
        let Some(host) = self.host.clone() else {
            return;
        };
        let cached = self.scheduler.pool().cached_prefixes();
        let deadline = Instant::now() + LAST_PARTS;
        if let Err(error) = self.offload(&host, cached, Some(deadline)) {
            let reason = error.to_string();
            tracing::warn!(reason, "KV blocks are not kept");
        }
    }

    fn offload(
        &mut self,
        host: &HostCache,
        mut prefixes: Vec<CachedPrefix>,
        deadline: Option<Instant>,
    ) -> Result<()> {
        prefixes.retain(|prefix| host.wants(prefix));
        // A read waits for the device, so those of a kind are read together.
        prefixes.sort_by_key(|prefix| prefix.part.kind());
        for some in prefixes.chunk_by(|a, b| a.part.kind() == b.part.kind()) {
            for some in some.chunks(READ_TOGETHER) {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    tracing::warn!("KV blocks are not kept: there was no more time");
                    return Ok(());
                }
                let size = host.part_bytes(some[0].part.kind());
                self.read_parts(some, size)?;
                for (i, prefix) in some.iter().enumerate() {
                    let bytes = &self.kv_bytes[i * size..(i + 1) * size];
                    host.keep(prefix, bytes, deadline);
                }
            }
        }
        Ok(())
    }

    /// Reads parts of one kind, each of so many bytes, to `kv_bytes`.
    fn read_parts(&mut self, parts: &[CachedPrefix], size: usize) -> Result<()> {
        self.kv_bytes.resize(size * parts.len(), 0);
        let (mut blocks, mut of_group) = (Vec::<BlockId>::new(), 0);
        for (i, prefix) in parts.iter().enumerate() {
            match prefix.part {
                CachePart::State(slot) => {
                    let bytes = &mut self.kv_bytes[i * size..(i + 1) * size];
                    self.runner.read_state(slot, bytes)?;
                }
                CachePart::Block { group, block } => {
                    of_group = group;
                    blocks.push(block);
                }
            }
        }
        match blocks.is_empty() {
            true => Ok(()),
            false => {
                let bytes = &mut self.kv_bytes;
                self.runner.read_kv_blocks(of_group, &blocks, bytes)
            }
        }
    }
}
