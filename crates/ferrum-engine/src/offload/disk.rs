//! The disk tier: a thread writes entries to a folder from a bounded queue.

use crate::kv_entry::StoredEntry;
use crate::priority::set_nice;
use ferrum_formats::FormatError;
use ferrum_formats::kv_blocks::{KvBlockKey, KvFolder, KvWritten};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most entries that wait to be written.
const QUEUE: usize = 64;
/// Interval of polling the queue and the thread.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

pub(super) struct DiskTier {
    folder: Arc<KvFolder>,
    queued: Arc<Queued>,
    /// `None` once the tier is finished.
    writer: Mutex<Option<Writer>>,
    dropped: AtomicU64,
}

struct Writer {
    jobs: SyncSender<Arc<StoredEntry>>,
    thread: JoinHandle<()>,
}

/// Entries that wait to be written; lookups find them meanwhile.
#[derive(Default)]
struct Queued(Mutex<HashMap<KvBlockKey, Arc<StoredEntry>>>);

impl Queued {
    fn lock(&self) -> MutexGuard<'_, HashMap<KvBlockKey, Arc<StoredEntry>>> {
        // Nothing that can panic runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskTier {
    pub(super) fn start(folder: KvFolder) -> ferrum_formats::Result<Self> {
        let (folder, queued) = (Arc::new(folder), Arc::new(Queued::default()));
        let (jobs, inbox) = sync_channel(QUEUE);
        let (to, waiting) = (Arc::clone(&folder), Arc::clone(&queued));
        let thread = std::thread::Builder::new().name("kv-offload".into());
        let thread = thread.spawn(move || write(&to, &waiting, &inbox));
        let thread = thread.map_err(|e| {
            let reason = format!("no thread can write to it: {e}");
            FormatError::source(folder.root(), reason, "")
        })?;
        Ok(Self {
            folder,
            queued,
            writer: Mutex::new(Some(Writer { jobs, thread })),
            dropped: AtomicU64::new(0),
        })
    }

    pub(super) fn folder(&self) -> &Arc<KvFolder> {
        &self.folder
    }

    /// Number of entries that were dropped.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(super) fn has(&self, key: KvBlockKey) -> bool {
        self.queued.lock().contains_key(&key) || self.folder.contains(key)
    }

    /// An entry that is not written yet.
    pub(super) fn queued(&self, key: KvBlockKey) -> Option<Arc<StoredEntry>> {
        self.queued.lock().get(&key).cloned()
    }

    /// Queues an entry for writing, if the folder does not have it. Waits for room in the queue until the deadline, or
    /// not at all without one.
    pub(super) fn offer(&self, block: Arc<StoredEntry>, deadline: Option<Instant>) {
        if self.has(block.key) {
            return;
        }
        let jobs = self.lock().as_ref().map(|writer| writer.jobs.clone());
        let Some(jobs) = jobs else { return };
        let key = block.key;
        self.queued.lock().insert(key, Arc::clone(&block));
        let mut job = block;
        loop {
            match jobs.try_send(job) {
                Ok(()) => return,
                Err(TrySendError::Full(back)) if deadline.is_some_and(|d| Instant::now() < d) => {
                    job = back;
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(_) => break,
            }
        }
        self.queued.lock().remove(&key);
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until all entries are written and the thread has ended, or until the deadline.
    pub(super) fn finish(&self, deadline: Instant) {
        let Some(Writer { jobs, thread }) = self.lock().take() else {
            return;
        };
        drop(jobs);
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
        }
        match thread.is_finished() {
            // A panic of the thread was printed, and only files depend on it.
            true => drop(thread.join()),
            false => {
                let blocks = self.queued.lock().len();
                tracing::warn!(blocks, "KV blocks are not written in time");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Writer>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes entries until the sender is dropped.
fn write(folder: &KvFolder, queued: &Queued, inbox: &Receiver<Arc<StoredEntry>>) {
    set_nice(10);
    let mut complained = false;
    while let Ok(block) = inbox.recv() {
        let written = folder.write(block.key, &block.description, &block.bytes);
        queued.lock().remove(&block.key);
        let problem = match written {
            Ok(KvWritten::Written | KvWritten::AlreadyStored) => None,
            Ok(KvWritten::Refused(reason)) => Some(reason),
            Err(fault) => Some(fault.to_string()),
        };
        if let Some(reason) = problem.filter(|_| !complained) {
            complained = true;
            tell(folder.root(), &reason);
        }
    }
}

fn tell(root: &Path, reason: &str) {
    let dir = root.display();
    tracing::warn!(%dir, reason, "KV blocks are not kept on disk");
}
