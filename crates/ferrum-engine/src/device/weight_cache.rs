//! Loads a model's packed weights from a [`WeightCache`] and stores them in it.
//!
//! Weights that are in the cache are mapped. Those that are not are packed as ever, and written by a thread of
//! its own with the lowest priority, from the memory that the model computes with: the first start is as fast as
//! without a cache. [`CacheWriter`] stands for that thread.

use crate::priority::set_nice;
use ferrum_formats::weight_cache::{
    CacheKey, CacheLookup, EntryName, NewEntry, PackedFile, WeightCache, WriteReservation, Writer,
    entry_name,
};
use ferrum_kernels::cpu::{CpuBackend, PackedEntry, PackedKey, PackedStore, SharedBytes};
use ferrum_models::Model;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

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
    /// All weights of the model, in the order of their loading.
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    names: HashSet<EntryName>,
    entries: Vec<(EntryName, PackedEntry)>,
    /// Whether one had to be packed.
    packed: bool,
}

impl LoadStore {
    /// The store of a model for a layout of panels; else why there is none.
    pub(crate) fn open(
        cache: &WeightCache,
        model: &Model,
        layout: String,
        threads: usize,
    ) -> Result<Self, String> {
        if !cache.is_for(model.tensors().total_bytes()) {
            return Err("the model is small".into());
        }
        let files = model.source.identities();
        let files = files.ok_or("the model does not lie in files that can be told apart")?;
        // Other versions of the program may load other matrices as one.
        let layout = format!("{}/{layout}", env!("CARGO_PKG_VERSION"));
        let key = CacheKey::new(files, layout);
        let found = cache.find(&key, threads).map_err(|e| e.to_string())?;
        let (file, damaged) = match found {
            CacheLookup::Ready(file) => (Some(populated(file)), None),
            CacheLookup::Absent => (None, None),
            CacheLookup::Damaged(fault) => (None, Some(fault.to_string())),
        };
        Ok(Self {
            cache: cache.clone(),
            key,
            file,
            damaged,
            loaded: Mutex::default(),
        })
    }

    /// To be called when all weights are loaded: has what was packed be written.
    pub(crate) fn finish(&self) -> CacheWriter {
        let mut kept = self.keep();
        kept.damaged.clone_from(&self.damaged);
        kept
    }

    fn keep(&self) -> CacheWriter {
        let loaded = std::mem::take(&mut *self.loaded());
        if !loaded.packed {
            return CacheWriter::of(CacheOutcome::Hit);
        }
        let all = |entries: &[NewEntry<'_>]| entries.iter().map(NewEntry::bytes).sum();
        let bytes = with_entries(&loaded.entries, all);
        let writer = match self.cache.reserve(&self.key, bytes) {
            Ok(WriteReservation::Granted(writer)) => writer,
            Ok(WriteReservation::Busy) => {
                return CacheWriter::skipped("another process is writing them");
            }
            Ok(WriteReservation::Refused(reason)) => return CacheWriter::skipped(reason),
            Err(fault) => return CacheWriter::skipped(fault.to_string()),
        };
        let write = Write {
            cache: self.cache.clone(),
            writer,
            entries: loaded.entries,
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

    fn loaded(&self) -> std::sync::MutexGuard<'_, Loaded> {
        // Nothing that can panic runs under the lock.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
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

/// A file whose pages are read and mapped while its first weights are used.
fn populated(file: PackedFile) -> Arc<PackedFile> {
    let file = Arc::new(file);
    let mapped = Arc::clone(&file);
    let thread = std::thread::Builder::new().name("weight-cache".into());
    // Without it, pages are mapped one by one when they are touched.
    let _ = thread.spawn(move || {
        CpuBackend::interleave_thread();
        mapped.use_all();
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
        let file = self.file.as_ref()?;
        let (description, panels) = file.entry(&name)?;
        let entry = PackedEntry {
            description: description.to_vec(),
            panels: vec![SharedBytes::of_owner(Arc::clone(file), panels)?],
        };
        self.add(name, entry.clone(), false);
        Some(entry)
    }

    fn put(&self, key: PackedKey, entry: PackedEntry) {
        self.add(entry_name(key.as_bytes()), entry, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(description: u8) -> PackedEntry {
        PackedEntry {
            description: vec![description],
            panels: Vec::new(),
        }
    }

    /// Else the file would be written with it, and the weight packed, at each start.
    #[test]
    fn an_entry_that_could_not_be_used_is_replaced() {
        let names = [b"a", b"b"].map(|name| entry_name(name));
        let mut loaded = Loaded::default();
        // Both were found; one was refused, and packed.
        loaded.add(names[0], entry(1), false);
        loaded.add(names[1], entry(2), false);
        assert!(!loaded.packed);
        loaded.add(names[0], entry(3), true);
        // Tied weights are found twice.
        loaded.add(names[1], entry(2), false);
        assert!(loaded.packed);
        let kept: Vec<_> = loaded
            .entries
            .iter()
            .map(|(_, entry)| entry.description[0])
            .collect();
        assert_eq!(kept, [3, 2]);
    }
}
