//! Connects one engine to the offload tiers.

use super::{EntryLayouts, KvOffload, OffloadStats, Origin, Prefix};
use crate::image_embeddings::FIRST_CACHE_KEY;
use crate::kv_entry::StoredEntry;
use crate::pool::{CacheEntryKind, CachedPrefix};
use crate::scheduler::{
    OffloadLookup, OffloadLookupResult, OffloadQuery, OffloadedEntry, OffloadedPrefix,
};
use ferrum_formats::kv_blocks::{KvBlockKey, KvFolder};
use ferrum_types::SeqId;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Most bytes that are read from files for one sequence; the rest of its prompt is computed.
const MAX_READ_BYTES: usize = 1 << 30;
/// Most sequences whose files are being read, or were read before their admission: read files take memory.
const MAX_STAGED: usize = 4;

/// See the [module](self).
pub(crate) struct OffloadConnector {
    offload: KvOffload,
    origins: Vec<Origin>,
    state: Arc<Mutex<State>>,
    /// Reads files, if there is a folder.
    reader: Option<Reader>,
}

struct Reader {
    jobs: Sender<ReadJob>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    /// Entries read from disk, by sequences that are not admitted yet.
    staged: HashMap<SeqId, Staged>,
    /// The sequence for which each file is being read.
    reading: HashMap<KvBlockKey, SeqId>,
    hits: OffloadStats,
}

enum Staged {
    Reading,
    Read(HashMap<KvBlockKey, Arc<StoredEntry>>),
}

/// Files to read for a sequence, in the order of its tokens.
struct ReadJob {
    seq: SeqId,
    files: Vec<ReadFile>,
}

struct ReadFile {
    key: KvBlockKey,
    description: Vec<u8>,
    /// Bytes of the entry in it.
    bytes: usize,
}

/// Location of an entry.
enum EntryLocation {
    Memory(OffloadedEntry),
    Disk(ReadFile),
    Absent,
}

impl std::fmt::Debug for OffloadConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OffloadConnector").finish_non_exhaustive()
    }
}

impl OffloadConnector {
    /// A connector for an engine with a model of this identity; `wake` is called when files were read.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(
        offload: KvOffload,
        (model, backend): (&str, &str),
        layouts: &EntryLayouts,
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

    fn origin(&self, kind: CacheEntryKind) -> Option<&Origin> {
        self.origins.iter().find(|origin| origin.kind == kind)
    }

    /// Bytes of an entry.
    pub(crate) fn entry_bytes(&self, kind: CacheEntryKind) -> usize {
        self.origin(kind).map_or(0, |origin| origin.bytes)
    }

    /// Names and descriptions of the entries of a prefix. `None` for entries that no later sequence can use.
    fn named<'t>(&self, prefix: &'t CachedPrefix) -> Option<Prefix<'t>> {
        let origin = self.origin(prefix.entry.kind())?;
        if prefix.tokens.iter().any(|&token| token >= FIRST_CACHE_KEY) {
            return None;
        }
        Prefix::new(origin, &prefix.salt, &prefix.tokens, usize::MAX)
    }

    /// Whether an entry that leaves the device should be read: not if a tier has it already, or no later sequence can
    /// use it.
    pub(crate) fn wants(&self, prefix: &CachedPrefix) -> bool {
        let key = self.named(prefix);
        let key = key.and_then(|known| known.block_keys.last().copied());
        key.is_some_and(|key| !self.offload.touch(key))
    }

    /// Stores an entry that leaves the device; see [`KvOffload`] for the deadline.
    pub(crate) fn store(&self, prefix: &CachedPrefix, bytes: &[u8], deadline: Option<Instant>) {
        let Some(known) = self.named(prefix) else {
            return;
        };
        let Some(&key) = known.block_keys.last() else {
            return;
        };
        let entry = StoredEntry {
            key,
            description: known.description(known.block_keys.len() - 1).into(),
            bytes: bytes.to_vec(),
        };
        self.offload.store(entry, deadline);
    }

    /// Counts tokens that were restored to the device.
    pub(crate) fn count(&self, from_ram: usize, from_disk: usize) {
        let mut state = self.state();
        state.hits.ram_hit_tokens += from_ram as u64;
        state.hits.disk_hit_tokens += from_disk as u64;
    }

    pub(crate) fn stats(&self) -> OffloadStats {
        let mut stats = self.state().hits;
        let disk = self.offload.0.disk.as_ref();
        for origin in &self.origins {
            let group = KvBlockKey::root(origin.text.as_bytes(), b"").group();
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

impl Drop for OffloadConnector {
    fn drop(&mut self) {
        // Makes the reader skip pending files.
        self.state().staged.clear();
        if let Some(Reader { jobs, thread }) = self.reader.take() {
            drop(jobs);
            // A panic of the thread was printed. The folder is free for other engines afterwards.
            let _ = thread.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Nothing that can panic runs under the lock.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Entries of a sequence's prefixes in the offload tiers, each looked up once.
struct Lookup<'a> {
    offload: &'a KvOffload,
    /// With the bytes of an entry.
    prefixes: Vec<(CacheEntryKind, Prefix<'a>, usize)>,
    /// Entries that were read from files for this sequence, once that is done.
    staged: Option<&'a HashMap<KvBlockKey, Arc<StoredEntry>>>,
    found: HashMap<(usize, CacheEntryKind), EntryLocation>,
    /// Bytes of the entries on disk.
    to_read: usize,
}

impl Lookup<'_> {
    /// Whether there is an entry of a kind at the end of block number `index`.
    fn has(&mut self, index: usize, kind: CacheEntryKind) -> bool {
        if !self.found.contains_key(&(index, kind)) {
            let found = self.find(index, kind);
            if let EntryLocation::Disk(file) = &found {
                self.to_read += file.bytes;
            }
            self.found.insert((index, kind), found);
        }
        !matches!(
            self.found.get(&(index, kind)),
            None | Some(EntryLocation::Absent)
        )
    }

    fn find(&self, index: usize, kind: CacheEntryKind) -> EntryLocation {
        let of_kind = self.prefixes.iter().find(|(known, ..)| *known == kind);
        let Some((_, prefix, bytes)) = of_kind else {
            return EntryLocation::Absent;
        };
        let Some(&key) = prefix.block_keys.get(index) else {
            return EntryLocation::Absent;
        };
        let read = self.staged.and_then(|entries| entries.get(&key)).cloned();
        let from_disk = read.is_some();
        match read.or_else(|| self.offload.in_memory(key)) {
            Some(stored) if prefix.is_of(index, &stored) => {
                return EntryLocation::Memory(OffloadedEntry { stored, from_disk });
            }
            Some(_) => return EntryLocation::Absent,
            None => {}
        }
        let folder = self.offload.folder();
        let has_file = folder.is_some_and(|folder| folder.contains(key));
        // Files that could not be read are not requested again.
        let room = self.to_read == 0 || self.to_read + bytes <= MAX_READ_BYTES;
        if !has_file || self.staged.is_some() || !room {
            return EntryLocation::Absent;
        }
        EntryLocation::Disk(ReadFile {
            key,
            description: prefix.description(index),
            bytes: *bytes,
        })
    }
}

impl OffloadLookup for Arc<OffloadConnector> {
    fn find(&mut self, seq: SeqId, query: OffloadQuery<'_>) -> OffloadLookupResult {
        let OffloadQuery {
            salt,
            tokens,
            device,
            found,
            most,
        } = query;
        let none = || OffloadLookupResult::Ready(OffloadedPrefix::default());
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
            Some(Staged::Reading) => return OffloadLookupResult::Reading,
            Some(Staged::Read(entries)) => Some(entries),
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
        let (mut entries, mut files) = (HashMap::new(), Vec::new());
        for entry in device.missing(end) {
            match lookup.found.remove(&entry) {
                Some(EntryLocation::Memory(found)) => {
                    entries.insert(entry, found);
                }
                Some(EntryLocation::Disk(file)) => files.push(file),
                Some(EntryLocation::Absent) | None => return none(),
            }
        }
        let Some(reader) = self.reader.as_ref().filter(|_| !files.is_empty()) else {
            return OffloadLookupResult::Ready(OffloadedPrefix { end, entries });
        };
        let others = |file: &ReadFile| state.reading.contains_key(&file.key);
        if files.iter().any(others) || state.staged.len() >= MAX_STAGED {
            // Another sequence is reading them, or there is no room for now.
            return OffloadLookupResult::Reading;
        }
        let keys: Vec<_> = files.iter().map(|file| (file.key, seq)).collect();
        if reader.jobs.send(ReadJob { seq, files }).is_err() {
            return none();
        }
        state.staged.insert(seq, Staged::Reading);
        state.reading.extend(keys);
        OffloadLookupResult::Reading
    }

    fn forget(&mut self, seq: SeqId) {
        let mut state = self.state();
        if state.staged.remove(&seq).is_some() {
            state.reading.retain(|_, reader| *reader != seq);
        }
    }
}

/// Reads files until the connector is dropped.
fn read(folder: &KvFolder, inbox: &Receiver<ReadJob>, state: &Mutex<State>, wake: &dyn Fn()) {
    while let Ok(ReadJob { seq, files }) = inbox.recv() {
        let mut entries = HashMap::with_capacity(files.len());
        let mut damaged = 0;
        for file in files {
            let ReadFile {
                key,
                description,
                bytes,
            } = file;
            // The sequence may have ended meanwhile.
            if !lock(state).staged.contains_key(&seq) {
                break;
            }
            let payload = match folder.read(key, &description, bytes) {
                Ok(Some(payload)) => payload,
                Ok(None) => break,
                Err(fault) => {
                    damaged += 1;
                    let reason = fault.to_string();
                    tracing::warn!(reason, "KV block removed, its tokens are computed again");
                    break;
                }
            };
            let stored = StoredEntry {
                key,
                description: description.into(),
                bytes: payload,
            };
            entries.insert(key, Arc::new(stored));
        }
        let mut state = lock(state);
        state.hits.damaged += damaged;
        if let Some(staged) = state.staged.get_mut(&seq) {
            *staged = Staged::Read(entries);
        }
        drop(state);
        wake();
    }
}
