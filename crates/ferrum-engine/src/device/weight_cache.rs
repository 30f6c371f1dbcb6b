//! Loads a model's packed weights from a [`WeightCache`] and stores them in it.
//!
//! Weights that are in the cache are mapped. Those that are not are packed as ever, and written by a thread of
//! its own with the lowest priority, from the memory that the model computes with: the first start is as fast as
//! without a cache. [`CacheWriter`] stands for that thread.
//!
//! A model that memory has no room for computes with the mapped file from the first start: each weight is written as soon
//! as it is packed, and pages are read when they are used. Of a layer with experts, those that no token is sent to stay on
//! the disk.

use crate::priority::set_nice;
use ferrum_formats::weight_cache::{
    CacheKey, CacheLookup, EntryName, NewEntry, PackedFile, WeightCache, WriteReservation, Writer,
    entry_name,
};
use ferrum_kernels::cpu::{CpuBackend, PackedEntry, PackedKey, PackedStore, SharedBytes};
use ferrum_models::Model;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a cache did for a model that was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheOutcome {
    /// The weights were mapped.
    Hit,
    /// The weights were packed, and are being written.
    Written {
        /// Bytes that the file takes.
        bytes: u64,
    },
    /// The weights were packed into the file, as memory has no room for them; they are read when they are used.
    Streamed {
        /// Bytes that the file takes.
        bytes: u64,
    },
    /// The weights were packed, and are not kept; with the reason.
    Skipped(String),
}

/// What a cache did for a model, and what of it is still to be written. Dropped, it is written first.
#[derive(Debug)]
pub struct CacheWriter {
    outcome: CacheOutcome,
    damaged: Option<String>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<Write>>>,
}

impl CacheWriter {
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self::of(CacheOutcome::Skipped(reason.into()))
    }

    fn of(outcome: CacheOutcome) -> Self {
        Self {
            outcome,
            damaged: None,
            stop: Arc::default(),
            thread: None,
        }
    }

    /// What the cache did.
    pub fn outcome(&self) -> &CacheOutcome {
        &self.outcome
    }

    /// What was wrong with the weights that the cache had, and has no longer.
    pub fn damaged(&self) -> Option<&str> {
        self.damaged.as_deref()
    }

    /// Why the weights are not kept, if they are not.
    pub fn why_skipped(&self) -> Option<&str> {
        match &self.outcome {
            CacheOutcome::Skipped(reason) => Some(reason),
            CacheOutcome::Hit | CacheOutcome::Written { .. } | CacheOutcome::Streamed { .. } => {
                None
            }
        }
    }

    /// Whether weights are still being written.
    pub fn is_writing(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Writes what is left, on this thread: the other one only runs when the cores are idle.
    pub fn finish(&mut self) {
        if let Some(write) = self.take() {
            write.run(&|| true);
        }
    }

    /// Gives up what is not written, which leaves nothing.
    pub fn cancel(&mut self) {
        drop(self.take());
    }

    /// Ends the thread; what it has not written.
    fn take(&mut self) -> Option<Write> {
        self.stop.store(true, Ordering::Relaxed);
        // A panic there was printed, and nothing but the file depends on it.
        self.thread.take()?.join().ok()?
    }
}

impl Drop for CacheWriter {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Packed weights that are being written to a file.
#[derive(Debug)]
struct Write {
    cache: WeightCache,
    writer: Box<Writer>,
    entries: Vec<(EntryName, PackedEntry)>,
}

impl Write {
    /// Writes for as long as `go_on` says so; what is left then.
    fn run(mut self, go_on: &dyn Fn() -> bool) -> Option<Self> {
        let Self {
            cache,
            writer,
            entries,
        } = &mut self;
        let whole = with_entries(entries, |all| cache.write(writer, all, go_on));
        // What fails leaves no file, so that the next start packs and writes again.
        let stopped = matches!(whole, Ok(false));
        stopped.then_some(self)
    }
}

/// The [`PackedStore`] of one load.
pub(crate) struct LoadStore {
    cache: WeightCache,
    key: CacheKey,
    file: Option<Arc<PackedFile>>,
    damaged: Option<String>,
    stream: Mutex<Stream>,
    /// All weights of the model, in the order of their loading.
    loaded: Mutex<Loaded>,
}

/// What becomes of weights while they are packed.
enum Stream {
    /// They stay in memory.
    InMemory,
    /// They are written, and computed with as they lie in the file.
    ToFile(Box<Writer>),
    /// They should be written, and stay in memory; with the reason.
    Failed(String),
}

#[derive(Default)]
struct Loaded {
    names: HashSet<EntryName>,
    entries: Vec<(EntryName, PackedEntry)>,
    /// Whether one had to be packed.
    packed: bool,
}

impl LoadStore {
    /// The store of a model for a layout of panels; else why there is none. With `streamed`, memory has no room for the weights,
    /// which take that many bytes.
    pub(crate) fn open(
        cache: &WeightCache,
        model: &Model,
        (layout, threads): (String, usize),
        streamed: Option<u64>,
    ) -> Result<Self, String> {
        if !cache.is_for(model.tensors().total_bytes()) {
            return Err("the model is small".into());
        }
        let files = model.source.identities();
        let files = files.ok_or("the model does not lie in files that can be told apart")?;
        // Other versions of the program may load other matrices as one.
        let layout = format!("{}/{layout}", env!("CARGO_PKG_VERSION"));
        let key = CacheKey::new(files, layout);
        let (found, stream) = match streamed {
            None => (find(cache, &key, threads)?, Stream::InMemory),
            Some(bytes) => find_or_reserve(cache, &key, threads, bytes)?,
        };
        let (file, damaged) = match found {
            CacheLookup::Ready(file) => (Some(mark_used(file, streamed.is_none())), None),
            CacheLookup::Absent => (None, None),
            CacheLookup::Damaged(fault) => (None, Some(fault.to_string())),
        };
        Ok(Self {
            cache: cache.clone(),
            key,
            file,
            damaged,
            stream: Mutex::new(stream),
            loaded: Mutex::default(),
        })
    }

    /// Why weights stay in memory that has no room for them.
    pub(crate) fn why_not_streamed(&self) -> Option<String> {
        match &*self.stream() {
            Stream::Failed(reason) => Some(reason.clone()),
            Stream::InMemory | Stream::ToFile(_) => None,
        }
    }

    /// To be called when all weights are loaded: has what was packed be written.
    ///
    /// # Errors
    /// When weights that the model computes with could not be written.
    pub(crate) fn finish(&self) -> ferrum_types::Result<CacheWriter> {
        let mut kept = self.keep()?;
        kept.damaged.clone_from(&self.damaged);
        Ok(kept)
    }

    fn keep(&self) -> ferrum_types::Result<CacheWriter> {
        let loaded = std::mem::take(&mut *self.loaded());
        if !loaded.packed {
            return Ok(CacheWriter::of(CacheOutcome::Hit));
        }
        let all = |entries: &[NewEntry<'_>]| entries.iter().map(NewEntry::bytes).sum();
        let bytes = with_entries(&loaded.entries, all);
        match std::mem::replace(&mut *self.stream(), Stream::InMemory) {
            Stream::InMemory => {}
            Stream::ToFile(mut writer) => {
                writer.sync()?;
                return Ok(match self.cache.finish(&mut writer) {
                    Ok(()) => CacheWriter::of(CacheOutcome::Streamed { bytes }),
                    Err(fault) => CacheWriter::skipped(fault.to_string()),
                });
            }
            Stream::Failed(reason) => return Ok(CacheWriter::skipped(reason)),
        }
        Ok(self.write_behind(loaded.entries, bytes))
    }

    /// Has entries be written by a thread, from the memory that the model computes with.
    fn write_behind(&self, entries: Vec<(EntryName, PackedEntry)>, bytes: u64) -> CacheWriter {
        let writer = match reserve(&self.cache, &self.key, bytes) {
            Ok(writer) => writer,
            Err(reason) => return CacheWriter::skipped(reason),
        };
        let write = Write {
            cache: self.cache.clone(),
            writer,
            entries,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let run = move || {
            set_nice(19);
            CpuBackend::interleave_thread();
            write.run(&|| !stopped.load(Ordering::Relaxed))
        };
        let thread = std::thread::Builder::new().name("weight-cache".into());
        match thread.spawn(run) {
            Ok(thread) => {
                let mut kept = CacheWriter::of(CacheOutcome::Written { bytes });
                (kept.stop, kept.thread) = (stop, Some(thread));
                kept
            }
            Err(fault) => CacheWriter::skipped(fault.to_string()),
        }
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        // Nothing that can panic runs under the lock.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&self) -> MutexGuard<'_, Stream> {
        // Nothing that can panic runs under the lock.
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry as it lies in the file that is written while weights are packed, if there is one.
    fn streamed(&self, name: EntryName, entry: &PackedEntry) -> Option<PackedEntry> {
        let mut stream = self.stream();
        let Stream::ToFile(writer) = &mut *stream else {
            return None;
        };
        let panels: Vec<_> = entry.panels.iter().map(SharedBytes::as_slice).collect();
        let new = NewEntry {
            name,
            description: &entry.description,
            panels: &panels,
        };
        match writer.add_mapped(&new) {
            Ok(written) => {
                let whole = 0..written.as_ref().len();
                Some(PackedEntry {
                    description: entry.description.clone(),
                    panels: vec![SharedBytes::of_owner(Arc::new(written), whole)?],
                })
            }
            Err(fault) => {
                tracing::warn!(%fault, "the packed weights that are left stay in memory, which has no room for them");
                *stream = Stream::Failed(fault.to_string());
                None
            }
        }
    }

    /// What was streamed under a name: tied weights are loaded twice.
    fn streamed_before(&self, name: &EntryName) -> Option<PackedEntry> {
        matches!(*self.stream(), Stream::ToFile(_)).then_some(())?;
        let loaded = self.loaded();
        let found = loaded.entries.iter().find(|(other, _)| other == name)?;
        Some(found.1.clone())
    }

    fn add(&self, name: EntryName, entry: PackedEntry, packed: bool) {
        self.loaded().add(name, entry, packed);
    }
}

impl Loaded {
    /// Adds an entry, or where it was packed puts it in the place of one of the same name: that could not be used.
    fn add(&mut self, name: EntryName, entry: PackedEntry, packed: bool) {
        self.packed |= packed;
        if self.names.insert(name) {
            self.entries.push((name, entry));
        } else if packed && let Some(old) = self.entries.iter_mut().find(|old| old.0 == name) {
            old.1 = entry;
        }
    }
}

fn find(cache: &WeightCache, key: &CacheKey, threads: usize) -> Result<CacheLookup, String> {
    cache.find(key, threads).map_err(|e| e.to_string())
}

/// What the cache has, or else where weights of `bytes` are written while they are packed. Waits for a process that writes the
/// same: memory that has no room for the weights once would have to hold them twice.
fn find_or_reserve(
    cache: &WeightCache,
    key: &CacheKey,
    threads: usize,
    bytes: u64,
) -> Result<(CacheLookup, Stream), String> {
    const LOOK_AGAIN: Duration = Duration::from_millis(200);
    if cache.is_in_memory() {
        return Err(format!("{} is a folder in memory", cache.root().display()));
    }
    // Panels are padded, and some packed forms take a little more.
    let bytes = bytes + bytes / 8 + (1 << 20);
    let mut waits = false;
    loop {
        let found = find(cache, key, threads)?;
        if matches!(found, CacheLookup::Ready(_)) {
            return Ok((found, Stream::InMemory));
        }
        match cache.reserve(key, bytes).map_err(|e| e.to_string())? {
            WriteReservation::Granted(writer) => return Ok((found, Stream::ToFile(writer))),
            WriteReservation::Refused(reason) => return Ok((found, Stream::Failed(reason))),
            WriteReservation::Busy if waits => {}
            WriteReservation::Busy => {
                waits = true;
                tracing::warn!(
                    "another process writes the packed weights of this model; waiting for it"
                );
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Room in the cache, or why there is none.
fn reserve(cache: &WeightCache, key: &CacheKey, bytes: u64) -> Result<Box<Writer>, String> {
    match cache.reserve(key, bytes).map_err(|e| e.to_string())? {
        WriteReservation::Granted(writer) => Ok(writer),
        WriteReservation::Busy => Err("another process is writing them".into()),
        WriteReservation::Refused(reason) => Err(reason),
    }
}

/// A file that is used from now on; with `populate` its pages are read and mapped while its first weights are used.
fn mark_used(file: PackedFile, populate: bool) -> Arc<PackedFile> {
    let file = Arc::new(file);
    let mapped = Arc::clone(&file);
    let thread = std::thread::Builder::new().name("weight-cache".into());
    // Without it, pages are mapped one by one when they are touched.
    let _ = thread.spawn(move || {
        if populate {
            CpuBackend::interleave_thread();
            mapped.populate();
        }
        mapped.set_used();
    });
    file
}

/// Runs `work` with what was loaded, as a file takes it.
fn with_entries<T>(
    loaded: &[(EntryName, PackedEntry)],
    work: impl FnOnce(&[NewEntry<'_>]) -> T,
) -> T {
    let mut panels: Vec<Vec<&[u8]>> = Vec::with_capacity(loaded.len());
    for (_, entry) in loaded {
        panels.push(entry.panels.iter().map(SharedBytes::as_slice).collect());
    }
    let entries: Vec<_> = loaded
        .iter()
        .zip(&panels)
        .map(|((name, entry), panels)| NewEntry {
            name: *name,
            description: &entry.description,
            panels,
        })
        .collect();
    work(&entries)
}

impl PackedStore for LoadStore {
    fn get(&self, key: &PackedKey) -> Option<PackedEntry> {
        let name = entry_name(key.as_bytes());
        let Some(file) = &self.file else {
            return self.streamed_before(&name);
        };
        let (description, panels) = file.entry(&name)?;
        let entry = PackedEntry {
            description: description.to_vec(),
            panels: vec![SharedBytes::of_owner(Arc::clone(file), panels)?],
        };
        self.add(name, entry.clone(), false);
        Some(entry)
    }

    fn put(&self, key: PackedKey, entry: PackedEntry) -> Option<PackedEntry> {
        let name = entry_name(key.as_bytes());
        let moved = self.streamed(name, &entry);
        self.add(name, moved.clone().unwrap_or(entry), true);
        moved
    }
}

#[cfg(test)]
mod tests;
