//! A model's packed weights on their way from and to a [`WeightCache`].
//!
//! Weights that are in the cache are mapped. Those that are not are packed as ever, and written by a thread of
//! its own with the lowest priority, from the memory that the model computes with: the first start is as fast as
//! without a cache. [`KeptWeights`] stands for that thread.

use ferrum_formats::weight_cache::{
    CacheKey, EntryName, Found, NewEntry, PackedFile, Room, WeightCache, entry_name,
};
use ferrum_kernels::cpu::{PackedEntry, PackedKey, PackedStore, SharedBytes};
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
    /// The weights were packed, and are being written; with what was wrong with those that were there.
    Written {
        /// Bytes that the file takes.
        bytes: u64,
        /// What was wrong.
        damaged: Option<String>,
    },
    /// The weights were packed, and are not kept; with the reason.
    Skipped(String),
}

/// What a cache did for a model, and the thread that may still be writing. Dropped, it waits for the thread.
#[derive(Debug)]
pub struct KeptWeights {
    outcome: CacheOutcome,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl KeptWeights {
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self::of(CacheOutcome::Skipped(reason.into()))
    }

    fn of(outcome: CacheOutcome) -> Self {
        Self {
            outcome,
            stop: Arc::default(),
            thread: None,
        }
    }

    /// What the cache did.
    pub fn outcome(&self) -> &CacheOutcome {
        &self.outcome
    }

    /// Whether weights are still being written.
    pub fn is_writing(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Waits until the weights are written.
    pub fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic there was printed, and nothing but the file depends on it.
            let _ = thread.join();
        }
    }

    /// Gives up writing, which leaves nothing.
    pub fn cancel(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wait();
    }
}

impl Drop for KeptWeights {
    fn drop(&mut self) {
        self.wait();
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
            Found::Ready(file) => (Some(populated(file)), None),
            Found::Absent => (None, None),
            Found::Damaged(fault) => (None, Some(fault.to_string())),
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
    pub(crate) fn finish(&self) -> KeptWeights {
        let loaded = std::mem::take(&mut *self.loaded());
        if !loaded.packed {
            return KeptWeights::of(CacheOutcome::Hit);
        }
        let all = |entries: &[NewEntry<'_>]| entries.iter().map(NewEntry::bytes).sum();
        let bytes = with_entries(&loaded.entries, all);
        let writer = match self.cache.room(&self.key, bytes) {
            Ok(Room::Granted(writer)) => writer,
            Ok(Room::Busy) => return KeptWeights::skipped("another process is writing them"),
            Ok(Room::Refused(reason)) => return KeptWeights::skipped(reason),
            Err(fault) => return KeptWeights::skipped(fault.to_string()),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (cache, stopped) = (self.cache.clone(), Arc::clone(&stop));
        let write = move || {
            yield_to_others();
            let go_on = || !stopped.load(Ordering::Relaxed);
            // What fails leaves no file, so that the next start packs and writes again.
            let _ = with_entries(&loaded.entries, |all| cache.write(writer, all, &go_on));
        };
        let thread = std::thread::Builder::new().name("weight-cache".into());
        match thread.spawn(write) {
            Ok(thread) => KeptWeights {
                outcome: CacheOutcome::Written {
                    bytes,
                    damaged: self.damaged.clone(),
                },
                stop,
                thread: Some(thread),
            },
            Err(fault) => KeptWeights::skipped(fault.to_string()),
        }
    }

    fn loaded(&self) -> std::sync::MutexGuard<'_, Loaded> {
        // Nothing that can panic runs under the lock.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, name: EntryName, entry: PackedEntry, packed: bool) {
        let mut loaded = self.loaded();
        loaded.packed |= packed;
        if loaded.names.insert(name) {
            loaded.entries.push((name, entry));
        }
    }
}

/// A file whose pages are read and mapped while its first weights are used.
fn populated(file: PackedFile) -> Arc<PackedFile> {
    let file = Arc::new(file);
    let mapped = Arc::clone(&file);
    let thread = std::thread::Builder::new().name("weight-cache".into());
    // Without it, pages are mapped one by one when they are touched.
    let _ = thread.spawn(move || mapped.populate());
    file
}

/// Has this thread run when no other wants to.
fn yield_to_others() {
    #[cfg(target_os = "linux")]
    {
        const LAST: i32 = 19;
        // A priority belongs to a thread here. Without it, tokens are computed a little more slowly meanwhile.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), LAST);
    }
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
