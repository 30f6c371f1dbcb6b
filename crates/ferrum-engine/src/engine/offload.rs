//! Blocks on their way between the device and where it keeps what it has no room for.

use super::step_loop::StepLoop;
use super::{Command, EngineConfig};
use crate::StepRunner;
use crate::offload::HostCache;
use crate::pool::CachedPrefix;
use ferrum_types::{BlockId, Result};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Blocks that are read from the device at once.
const READ_TOGETHER: usize = 16;
/// How long an engine that ends may take to keep what its prefix cache has.
const LAST_BLOCKS: Duration = Duration::from_secs(15);

/// The engine's way to what it keeps outside of the device, if that is wanted and the runner can do it.
pub(super) fn host_cache(
    runner: &dyn StepRunner,
    config: &EngineConfig,
    commands: &Sender<Command>,
) -> Option<Arc<HostCache>> {
    let offload = config.offload.as_ref().filter(|_| config.prefix_cache)?;
    let backend = runner.backend();
    let windows = runner.cache_groups().iter().any(|g| g.window.is_some());
    if runner.state_slots().is_some() {
        tracing::warn!(
            "KV blocks are not offloaded: the model has recurrent states, which no block has with it"
        );
        return None;
    }
    let layout = match runner.kv_block_layout() {
        Some(layout) if !windows => layout,
        _ if windows => {
            tracing::warn!(
                "KV blocks are not offloaded: layers with a window give theirs back while a sequence runs"
            );
            return None;
        }
        _ => {
            tracing::warn!(backend, "this runner's KV blocks cannot be offloaded");
            return None;
        }
    };
    let commands = commands.clone();
    let wake = move || {
        // An engine that has ended waits for nothing.
        let _ = commands.send(Command::BlocksRead);
    };
    // Other devices may compute other bits.
    let placement = runner.placement();
    let identity = (&*offload.model, &*placement);
    match HostCache::start(offload.store.clone(), identity, layout, wake) {
        Ok(host) => Some(Arc::new(host)),
        Err(e) => {
            let reason = e.to_string();
            tracing::warn!(reason, "KV blocks are not offloaded");
            None
        }
    }
}

impl StepLoop<'_> {
    /// Moves the blocks that a plan gave to others, and those that it takes back. To be called after each plan,
    /// before the next step is submitted.
    pub(super) fn move_blocks(&mut self) -> Result<()> {
        let Some(host) = self.host.clone() else {
            return Ok(());
        };
        // What has a new owner leaves before that one's blocks come.
        let evicted = self.scheduler.take_evicted();
        self.offload(&host, evicted, None)?;
        let restores = self.scheduler.take_restores();
        for restore in &restores {
            let bytes = restore.from.stored.bytes();
            self.runner.write_kv_blocks(&[restore.to], bytes)?;
        }
        let from_disk = restores.iter().filter(|restore| restore.from.from_disk);
        let from_disk = from_disk.count();
        host.count(from_disk, true);
        host.count(restores.len() - from_disk, false);
        if !restores.is_empty() {
            let blocks = restores.len();
            tracing::debug!(blocks, from_disk, "KV blocks taken back");
        }
        Ok(())
    }

    /// Keeps what the prefix cache has, when nothing more is computed.
    pub(super) fn keep_cached(&mut self) {
        let Some(host) = self.host.clone() else {
            return;
        };
        let cached = self.scheduler.pool().cached_prefixes();
        let deadline = Instant::now() + LAST_BLOCKS;
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
        let size = host.block_bytes();
        for group in prefixes.chunks(READ_TOGETHER) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                tracing::warn!("KV blocks are not kept: there was no more time");
                break;
            }
            let blocks: Vec<BlockId> = group.iter().map(|prefix| prefix.block).collect();
            self.kv_bytes.resize(size * blocks.len(), 0);
            self.runner.read_kv_blocks(&blocks, &mut self.kv_bytes)?;
            for (prefix, bytes) in group.iter().zip(self.kv_bytes.chunks_exact(size)) {
                host.keep(prefix, bytes, deadline);
            }
        }
        Ok(())
    }
}
