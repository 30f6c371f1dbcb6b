//! One engine's way to the tiers.

use super::{Group, KvOffload, OffloadStats, Prefix, StoredBlock};
use crate::pool::CachedPrefix;
use crate::scheduler::{HostBlock, HostBlocks, HostPrefix, HostQuery};
use ferrum_formats::kv_blocks::{KvBlockName, KvFolder};
use ferrum_models::KvBlockLayout;
use ferrum_types::SeqId;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Most bytes that are read from files for one sequence; what its prompt has beyond them is computed.
const MOST_READ: usize = 1 << 30;
/// Most sequences that have files read, or were read and wait for a place: what was read takes memory.
const MOST_STAGED: usize = 4;

/// See the [module](self).
pub(crate) struct HostCache {
    offload: KvOffload,
    group: Group,
    state: Arc<Mutex<State>>,
    /// Reads files, where there is a folder.
    reader: Option<Reader>,
}

struct Reader {
    jobs: Sender<ReadJob>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    /// By sequences that are not admitted: what of theirs was on disk.
    staged: HashMap<SeqId, Staged>,
    /// Who has a file read.
    reading: HashMap<KvBlockName, SeqId>,
    hits: OffloadStats,
}

enum Staged {
    Reading,
    Read(HashMap<KvBlockName, Arc<StoredBlock>>),
}

/// Files to read for a sequence, in the order of its tokens.
struct ReadJob {
    seq: SeqId,
    files: Vec<(KvBlockName, Vec<u8>)>,
    bytes: usize,
}

impl std::fmt::Debug for HostCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostCache").finish_non_exhaustive()
    }
}

impl HostCache {
    /// For an engine with a model of this identity; `wake` is called when files were read.
    ///
    /// # Errors
    /// When there can be no thread.
    pub(crate) fn start(
        offload: KvOffload,
        (model, backend): (&str, &str),
        layout: KvBlockLayout,
        wake: impl Fn() + Send + 'static,
    ) -> std::io::Result<Self> {
        let state = Arc::<Mutex<State>>::default();
        let reader = match offload.folder() {
            None => None,
            Some(folder) => {
                let (jobs, inbox) = channel();
                let (folder, state) = (Arc::clone(folder), Arc::clone(&state));
                let thread = std::thread::Builder::new().name("kv-offload-read".into());
                let thread = thread.spawn(move || read(&folder, &inbox, &state, &wake))?;
                Some(Reader { jobs, thread })
            }
        };
        Ok(Self {
            offload,
            group: Group::new(model, backend, layout),
            state,
            reader,
        })
    }

    /// Bytes of a block.
    pub(crate) fn block_bytes(&self) -> usize {
        self.group.layout.bytes
    }

    /// Whether a block that leaves the device is worth reading: not what a tier has already, and what nobody can
    /// ask for again.
    pub(crate) fn wants(&self, prefix: &CachedPrefix) -> bool {
        let known = Prefix::new(&self.group, &prefix.salt, &prefix.tokens, usize::MAX);
        let name = known.and_then(|known| known.names.last().copied());
        name.is_some_and(|name| !self.offload.touch(name))
    }

    /// Takes a block that leaves the device; see [`KvOffload`] for the deadline.
    pub(crate) fn keep(&self, prefix: &CachedPrefix, bytes: &[u8], deadline: Option<Instant>) {
        let known = Prefix::new(&self.group, &prefix.salt, &prefix.tokens, usize::MAX);
        let Some(known) = known else { return };
        let Some(&name) = known.names.last() else {
            return;
        };
        let block = StoredBlock {
            name,
            description: known.description(known.names.len() - 1).into(),
            bytes: bytes.to_vec(),
        };
        self.offload.keep(block, deadline);
    }

    /// Counts blocks that came back to the device.
    pub(crate) fn count(&self, blocks: usize, from_disk: bool) {
        let tokens = (blocks * self.group.layout.block_size) as u64;
        let mut state = self.state();
        match from_disk {
            true => state.hits.disk_hit_tokens += tokens,
            false => state.hits.ram_hit_tokens += tokens,
        }
    }

    pub(crate) fn stats(&self) -> OffloadStats {
        let hits = self.state().hits;
        let group = KvBlockName::root(self.group.text.as_bytes(), b"");
        let group = group.group();
        let (ram_bytes, ram_evictions) = self.offload.ram().figures(group);
        let disk = self.offload.0.disk.as_ref();
        let files = disk.map(|disk| disk.folder().figures(group));
        let files = files.unwrap_or_default();
        OffloadStats {
            ram_bytes,
            ram_evictions,
            disk_bytes: files.bytes,
            disk_evictions: files.evicted,
            dropped: disk.map_or(0, |disk| disk.dropped()),
            ..hits
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for HostCache {
    fn drop(&mut self) {
        // What is being read is for nobody.
        self.state().staged.clear();
        if let Some(Reader { jobs, thread }) = self.reader.take() {
            drop(jobs);
            // A panic there was printed. The folder is free for others afterwards.
            let _ = thread.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Nothing that can panic runs under the lock.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HostBlocks for Arc<HostCache> {
    fn find(&mut self, seq: SeqId, query: HostQuery<'_>) -> HostPrefix {
        let HostQuery {
            salt,
            tokens,
            from,
            most,
        } = query;
        let none = HostPrefix::Ready(Vec::new());
        if from >= most {
            return none;
        }
        let Some(prefix) = Prefix::new(&self.group, salt, tokens, most) else {
            return none;
        };
        let mut state = self.state();
        let staged = match state.staged.get(&seq) {
            Some(Staged::Reading) => return HostPrefix::Reading,
            Some(Staged::Read(blocks)) => Some(blocks),
            None => None,
        };
        let (mut found, mut on_disk) = (Vec::new(), Vec::new());
        for (block, &name) in prefix.names.iter().enumerate().skip(from) {
            let read = staged.and_then(|blocks| blocks.get(&name)).cloned();
            let memory = || self.offload.in_memory(name);
            let from_disk = read.is_some();
            match read.or_else(memory) {
                Some(stored) if prefix.is_of(block, &stored) => {
                    if on_disk.is_empty() {
                        found.push(HostBlock { stored, from_disk });
                    }
                }
                Some(_) => break,
                // What could not be read is not asked for again.
                None if staged.is_some() => break,
                None => {
                    let folder = self.offload.folder();
                    if !folder.is_some_and(|folder| folder.contains(name)) {
                        break;
                    }
                    on_disk.push((name, block));
                }
            }
        }
        on_disk.truncate((MOST_READ / self.block_bytes().max(1)).max(1));
        let Some(reader) = self.reader.as_ref().filter(|_| !on_disk.is_empty()) else {
            return HostPrefix::Ready(found);
        };
        let others = |(name, _): &(KvBlockName, usize)| state.reading.contains_key(name);
        if on_disk.iter().any(others) || state.staged.len() >= MOST_STAGED {
            // They will be on the device soon, or there will be room.
            return HostPrefix::Reading;
        }
        let files = on_disk.iter();
        let files = files.map(|&(name, block)| (name, prefix.description(block)));
        let job = ReadJob {
            seq,
            files: files.collect(),
            bytes: self.block_bytes(),
        };
        if reader.jobs.send(job).is_err() {
            return HostPrefix::Ready(found);
        }
        state.staged.insert(seq, Staged::Reading);
        let names = on_disk.into_iter().map(|(name, _)| (name, seq));
        state.reading.extend(names);
        HostPrefix::Reading
    }

    fn forget(&mut self, seq: SeqId) {
        let mut state = self.state();
        if state.staged.remove(&seq).is_some() {
            state.reading.retain(|_, reader| *reader != seq);
        }
    }
}

/// Reads files until nobody wants more.
fn read(folder: &KvFolder, inbox: &Receiver<ReadJob>, state: &Mutex<State>, wake: &dyn Fn()) {
    while let Ok(ReadJob { seq, files, bytes }) = inbox.recv() {
        let mut blocks = HashMap::with_capacity(files.len());
        let mut damaged = 0;
        for (name, description) in files {
            // Whoever wanted it may have gone.
            if !lock(state).staged.contains_key(&seq) {
                break;
            }
            let payload = match folder.read(name, &description, bytes) {
                Ok(Some(payload)) => payload,
                Ok(None) => break,
                Err(fault) => {
                    damaged += 1;
                    let reason = fault.to_string();
                    tracing::warn!(reason, "KV block removed, its tokens are computed again");
                    break;
                }
            };
            let stored = StoredBlock {
                name,
                description: description.into(),
                bytes: payload,
            };
            blocks.insert(name, Arc::new(stored));
        }
        let mut state = lock(state);
        state.hits.damaged += damaged;
        if let Some(staged) = state.staged.get_mut(&seq) {
            *staged = Staged::Read(blocks);
        }
        drop(state);
        wake();
    }
}
