//! Moves entries of the prefix cache between the device and the offload tiers.

use super::state::StepLoop;
use super::{Command, EngineConfig};
use crate::StepRunner;
use crate::offload::{EntryLayouts, OffloadConnector};
use crate::pool::{CacheEntry, CachedPrefix};
use crate::scheduler::Restores;
use crate::sync::mpsc::Sender;
use ferrum_types::{BlockId, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most entries that are read from the device at once.
const READ_BATCH: usize = 16;
/// How long an engine that ends may take to offload its prefix cache.
const FINAL_OFFLOAD_TIMEOUT: Duration = Duration::from_secs(15);

/// Connects the engine to the offload tiers, if they are configured and the runner supports them.
pub(super) fn offload_connector(
    runner: &dyn StepRunner,
    config: &EngineConfig,
    commands: &Sender<Command>,
) -> Option<Arc<OffloadConnector>> {
    let offload = config.offload.as_ref().filter(|_| config.prefix_cache)?;
    let backend = runner.backend();
    let Some(layouts) = EntryLayouts::of(runner) else {
        tracing::warn!(backend, "this runner's KV blocks cannot be offloaded");
        return None;
    };
    let commands = commands.clone();
    let wake = move || {
        // An engine that has ended needs no wake-up.
        let _ = commands.send(Command::BlocksRead);
    };
    // Results of other devices may differ in their bits.
    let placement = runner.placement();
    let identity = (&*offload.model, &*placement);
    match OffloadConnector::start(offload.store.clone(), identity, &layouts, wake) {
        Ok(connector) => Some(Arc::new(connector)),
        Err(e) => {
            let reason = e.to_string();
            tracing::warn!(reason, "KV blocks are not offloaded");
            None
        }
    }
}

impl StepLoop<'_> {
    /// Offloads the entries that a plan evicted and restores those that it needs. Must be called after each plan, and again
    /// after [`Scheduler::begin`](crate::scheduler::Scheduler::begin), before the step is submitted.
    pub(super) fn move_entries(&mut self) -> Result<()> {
        let Some(connector) = self.offload.clone() else {
            return Ok(());
        };
        // Evicted entries are read before restored ones overwrite their memory.
        let evicted = self.scheduler.take_evicted();
        self.offload_prefixes(&connector, evicted, None)?;
        let Restores {
            entries,
            tokens_from_ram,
            tokens_from_disk,
        } = self.scheduler.take_restores();
        for restore in &entries {
            let bytes = restore.from.stored.bytes();
            match restore.to {
                CacheEntry::Block { group, block } => {
                    self.runner.write_kv_blocks(group, &[block], bytes)?;
                }
                CacheEntry::State(slot) => self.runner.write_state(slot, bytes)?,
            }
        }
        if !entries.is_empty() {
            connector.count(tokens_from_ram, tokens_from_disk);
            let parts = entries.len();
            tracing::debug!(parts, tokens_from_ram, tokens_from_disk, "taken back");
        }
        Ok(())
    }

    /// Offloads the whole prefix cache when the engine ends.
    pub(super) fn offload_cached(&mut self) {
        let Some(connector) = self.offload.clone() else {
            return;
        };
        let cached = self.scheduler.pool().cached_prefixes();
        let deadline = Instant::now() + FINAL_OFFLOAD_TIMEOUT;
        if let Err(error) = self.offload_prefixes(&connector, cached, Some(deadline)) {
            let reason = error.to_string();
            tracing::warn!(reason, "KV blocks are not kept");
        }
    }

    fn offload_prefixes(
        &mut self,
        connector: &OffloadConnector,
        mut prefixes: Vec<CachedPrefix>,
        deadline: Option<Instant>,
    ) -> Result<()> {
        prefixes.retain(|prefix| connector.wants(prefix));
        // A read waits for the device, so entries of one kind are read together.
        prefixes.sort_by_key(|prefix| prefix.entry.kind());
        for some in prefixes.chunk_by(|a, b| a.entry.kind() == b.entry.kind()) {
            for some in some.chunks(READ_BATCH) {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    tracing::warn!("KV blocks are not kept: there was no more time");
                    return Ok(());
                }
                let size = connector.entry_bytes(some[0].entry.kind());
                self.read_entries(some, size)?;
                for (i, prefix) in some.iter().enumerate() {
                    let bytes = &self.kv_bytes[i * size..(i + 1) * size];
                    connector.store(prefix, bytes, deadline);
                }
            }
        }
        Ok(())
    }

    /// Reads entries of one kind, each of `size` bytes, to `kv_bytes`.
    fn read_entries(&mut self, entries: &[CachedPrefix], size: usize) -> Result<()> {
        self.kv_bytes.resize(size * entries.len(), 0);
        let (mut blocks, mut of_group) = (Vec::<BlockId>::new(), 0);
        for (i, prefix) in entries.iter().enumerate() {
            match prefix.entry {
                CacheEntry::State(slot) => {
                    let bytes = &mut self.kv_bytes[i * size..(i + 1) * size];
                    self.runner.read_state(slot, bytes)?;
                }
                CacheEntry::Block { group, block } => {
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
