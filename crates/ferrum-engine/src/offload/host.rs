//! One engine's way to the tiers.

use super::{KvOffload, OffloadStats, Origin, PartLayouts, Prefix, StoredPart};
use crate::pool::{CachedPrefix, PartKind};
use crate::scheduler::{HostAnswer, HostPart, HostParts, HostPrefix, HostQuery};
use crate::vision::FIRST_CACHE_KEY;
use ferrum_formats::kv_blocks::{KvBlockName, KvFolder};
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
    origins: Vec<Origin>,
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
    Read(HashMap<KvBlockName, Arc<StoredPart>>),
}

/// Files to read for a sequence, in the order of its tokens.
struct ReadJob {
    seq: SeqId,
    files: Vec<ReadFile>,
}

struct ReadFile {
    name: KvBlockName,
    description: Vec<u8>,
    /// Bytes of the part that is in it.
    bytes: usize,
}

/// Where a part is.
enum Found {
    Memory(HostPart),
    Disk(ReadFile),
    Nowhere,
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
        layouts: &PartLayouts,
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
            origins: layouts.origins(model, backend),
            state,
            reader,
        })
    }

    fn origin(&self, kind: PartKind) -> Option<&Origin> {
        self.origins.iter().find(|origin| origin.kind == kind)
    }

    /// Bytes of a part.
    pub(crate) fn part_bytes(&self, kind: PartKind) -> usize {
        self.origin(kind).map_or(0, |origin| origin.bytes)
    }

    /// Names and descriptions of what ends with the blocks of a prefix. `None` for what nobody can ask for again.
    fn named<'t>(&self, prefix: &'t CachedPrefix) -> Option<Prefix<'t>> {
        let origin = self.origin(prefix.part.kind())?;
        if prefix.tokens.iter().any(|&token| token >= FIRST_CACHE_KEY) {
            return None;
        }
        Prefix::new(origin, &prefix.salt, &prefix.tokens, usize::MAX)
    }

    /// Whether a part that leaves the device is worth reading: not what a tier has already, and what nobody can
    /// ask for again.
    pub(crate) fn wants(&self, prefix: &CachedPrefix) -> bool {
        let name = self.named(prefix);
        let name = name.and_then(|known| known.names.last().copied());
        name.is_some_and(|name| !self.offload.touch(name))
    }

    /// Takes a part that leaves the device; see [`KvOffload`] for the deadline.
    pub(crate) fn keep(&self, prefix: &CachedPrefix, bytes: &[u8], deadline: Option<Instant>) {
        let Some(known) = self.named(prefix) else {
            return;
        };
        let Some(&name) = known.names.last() else {
            return;
        };
        let part = StoredPart {
            name,
            description: known.description(known.names.len() - 1).into(),
            bytes: bytes.to_vec(),
        };
        self.offload.keep(part, deadline);
    }

    /// Counts tokens that came back to the device.
    pub(crate) fn count(&self, from_ram: usize, from_disk: usize) {
        let mut state = self.state();
        state.hits.ram_hit_tokens += from_ram as u64;
        state.hits.disk_hit_tokens += from_disk as u64;
    }

    pub(crate) fn stats(&self) -> OffloadStats {
        let mut stats = self.state().hits;
        let disk = self.offload.0.disk.as_ref();
        for origin in &self.origins {
            let group = KvBlockName::root(origin.text.as_bytes(), b"").group();
            let (bytes, evictions) = self.offload.ram().figures(group);
            stats.ram_bytes += bytes;
            stats.ram_evictions += evictions;
            let files = disk.map(|disk| disk.folder().figures(group));
            let files = files.unwrap_or_default();
            stats.disk_bytes += files.bytes;
            stats.disk_evictions += files.evicted;
        }
        stats.dropped = disk.map_or(0, |disk| disk.dropped());
        stats
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

/// What parts of a sequence's prefixes there are outside of the device, looked up once each.
struct Lookup<'a> {
    offload: &'a KvOffload,
    /// With the bytes of a part.
    prefixes: Vec<(PartKind, Prefix<'a>, usize)>,
    /// What was read from files for this sequence, once that is done.
    staged: Option<&'a HashMap<KvBlockName, Arc<StoredPart>>>,
    found: HashMap<(usize, PartKind), Found>,
    /// Bytes of those that are on disk.
    to_read: usize,
}

impl Lookup<'_> {
    /// Whether there is the part of a kind at the end of block number `index`.
    fn has(&mut self, index: usize, kind: PartKind) -> bool {
        if !self.found.contains_key(&(index, kind)) {
            let found = self.find(index, kind);
            if let Found::Disk(file) = &found {
                self.to_read += file.bytes;
            }
            self.found.insert((index, kind), found);
        }
        !matches!(self.found.get(&(index, kind)), None | Some(Found::Nowhere))
    }

    fn find(&self, index: usize, kind: PartKind) -> Found {
        let of_kind = self.prefixes.iter().find(|(known, ..)| *known == kind);
        let Some((_, prefix, bytes)) = of_kind else {
            return Found::Nowhere;
        };
        let Some(&name) = prefix.names.get(index) else {
            return Found::Nowhere;
        };
        let read = self.staged.and_then(|parts| parts.get(&name)).cloned();
        let from_disk = read.is_some();
        match read.or_else(|| self.offload.in_memory(name)) {
            Some(stored) if prefix.is_of(index, &stored) => {
                return Found::Memory(HostPart { stored, from_disk });
            }
            Some(_) => return Found::Nowhere,
            None => {}
        }
        let folder = self.offload.folder();
        let has_file = folder.is_some_and(|folder| folder.contains(name));
        // What could not be read is not asked for again.
        let room = self.to_read == 0 || self.to_read + bytes <= MOST_READ;
        if !has_file || self.staged.is_some() || !room {
            return Found::Nowhere;
        }
        Found::Disk(ReadFile {
            name,
            description: prefix.description(index),
            bytes: *bytes,
        })
    }
}

impl HostParts for Arc<HostCache> {
    fn find(&mut self, seq: SeqId, query: HostQuery<'_>) -> HostAnswer {
        let HostQuery {
            salt,
            tokens,
            device,
            found,
            most,
        } = query;
        let none = || HostAnswer::Ready(HostPrefix::default());
        if found >= most {
            return none();
        }
        let prefix = |origin: &Origin| {
            let prefix = Prefix::new(origin, salt, tokens, most)?;
            Some((origin.kind, prefix, origin.bytes))
        };
        let prefixes: Option<Vec<_>> = self.origins.iter().map(prefix).collect();
        let Some(prefixes) = prefixes else {
            return none();
        };
        let mut state = self.state();
        let staged = match state.staged.get(&seq) {
            Some(Staged::Reading) => return HostAnswer::Reading,
            Some(Staged::Read(parts)) => Some(parts),
            None => None,
        };
        let mut lookup = Lookup {
            offload: &self.offload,
            prefixes,
            staged,
            found: HashMap::new(),
            to_read: 0,
        };
        let end = device.longest(most, |index, kind| lookup.has(index, kind));
        if end <= found {
            return none();
        }
        let (mut parts, mut files) = (HashMap::new(), Vec::new());
        for part in device.missing(end) {
            match lookup.found.remove(&part) {
                Some(Found::Memory(found)) => {
                    parts.insert(part, found);
                }
                Some(Found::Disk(file)) => files.push(file),
                Some(Found::Nowhere) | None => return none(),
            }
        }
        let Some(reader) = self.reader.as_ref().filter(|_| !files.is_empty()) else {
            return HostAnswer::Ready(HostPrefix { end, parts });
        };
        let others = |file: &ReadFile| state.reading.contains_key(&file.name);
        if files.iter().any(others) || state.staged.len() >= MOST_STAGED {
            // They will be on the device soon, or there will be room.
            return HostAnswer::Reading;
        }
        let names: Vec<_> = files.iter().map(|file| (file.name, seq)).collect();
        if reader.jobs.send(ReadJob { seq, files }).is_err() {
            return none();
        }
        state.staged.insert(seq, Staged::Reading);
        state.reading.extend(names);
        HostAnswer::Reading
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
    while let Ok(ReadJob { seq, files }) = inbox.recv() {
        let mut parts = HashMap::with_capacity(files.len());
        let mut damaged = 0;
        for file in files {
            let ReadFile {
                name,
                description,
                bytes,
            } = file;
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
            let stored = StoredPart {
                name,
                description: description.into(),
                bytes: payload,
            };
            parts.insert(name, Arc::new(stored));
        }
        let mut state = lock(state);
        state.hits.damaged += damaged;
        if let Some(staged) = state.staged.get_mut(&seq) {
            *staged = Staged::Read(parts);
        }
        drop(state);
        wake();
    }
}
