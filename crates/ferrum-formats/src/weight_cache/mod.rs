//! Cache of packed weights between runs: a folder of files that are mapped, not read.
//!
//! A file holds the packed weights of one model for one layout of panels. Its name is a hash of its key: the
//! identity of the model's files, and the layout. A model that was rewritten has another key, so a file under a key is
//! right, or damaged. The whole file is verified when it is opened for the first time since the system started or since
//! it was changed; after that a marker file (`.state`) records the verification, which saves reading all of it at every
//! start.
//!
//! Only the user may write to the folder: write access to packed weights allows changing the output of a model.

mod file;
mod folder;
#[cfg(test)]
mod tests;
mod writer;

pub use file::{EntryName, PackedFile};
pub use folder::{CachedWeights, WeightState};
pub use writer::{NewEntry, Writer, WrittenPanels};

use crate::identity::FileIdentity;
use crate::{FormatError, Result};
use folder::{EXTENSION, Folder};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_128;

/// Most bytes of all files together by default.
const MAX_DEFAULT_LIMIT: u64 = 32 << 30;
/// Default of the least bytes of a model: packing smaller ones takes no longer than a lookup.
const DEFAULT_MIN_MODEL_BYTES: u64 = 64 << 20;

/// A folder of packed weights. It need not exist.
#[derive(Debug, Clone)]
pub struct WeightCache {
    folder: Folder,
    limit: Option<u64>,
    least: u64,
}

/// Key of a file of packed weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheKey {
    text: Vec<u8>,
    content: KeyContent,
}

/// Content of a key, as it is written into the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KeyContent {
    /// The model's files.
    files: Vec<FileIdentity>,
    /// Layout of the panels.
    layout: String,
}

/// Result of looking up a key.
#[derive(Debug)]
pub enum CacheLookup {
    /// Checked, mapped weights.
    Ready(PackedFile),
    /// Nothing.
    Absent,
    /// A damaged file, which was removed; with the reason.
    Damaged(FormatError),
}

/// Result of reserving space.
#[derive(Debug)]
pub enum WriteReservation {
    /// The weights may be written.
    Granted(Box<Writer>),
    /// Another process is writing them.
    Busy,
    /// There is no room; with the reason.
    Refused(String),
}

/// The name of an entry that was packed from what `bytes` describe.
pub fn entry_name(bytes: &[u8]) -> EntryName {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}

impl CacheKey {
    /// The key of the packed weights of a model that lies in `files`, in panels of this layout.
    pub fn new(files: Vec<FileIdentity>, layout: String) -> Self {
        let content = KeyContent { files, layout };
        // Paths that are no text have no identity, so there is nothing to fail.
        let text = serde_json::to_vec(&content).unwrap_or_default();
        Self { text, content }
    }

    /// The key of a file.
    fn of(file: &PackedFile) -> Option<Self> {
        let text = file.key().to_vec();
        let content = serde_json::from_slice(&text).ok()?;
        Some(Self { text, content })
    }

    /// The name of its file, without extension.
    fn stem(&self) -> String {
        format!("{:032x}", XxHash3_128::oneshot(&self.text))
    }

    /// Whether both keys are of the same model at different times, so that only one of them can still be used.
    fn replaces(&self, other: &Self) -> bool {
        let paths = |key: &Self| -> Vec<PathBuf> {
            let files = key.content.files.iter();
            files.map(|file| file.path.clone()).collect()
        };
        self != other && self.content.layout == other.content.layout && paths(self) == paths(other)
    }
}

impl WeightCache {
    /// The cache in `root`, whose files have at most `limit` bytes together; `None`: a fifth of the disk's free
    /// space (what the cache holds counts as free), at most 32 GiB.
    pub fn new(root: impl Into<PathBuf>, limit: Option<u64>) -> Self {
        Self {
            folder: Folder::new(root.into()),
            limit,
            least: DEFAULT_MIN_MODEL_BYTES,
        }
    }

    /// Sets the least bytes of a model whose weights are cached; the default is 64 MiB.
    #[must_use]
    pub fn keep_from(self, bytes: u64) -> Self {
        Self {
            least: bytes,
            ..self
        }
    }

    /// Whether the weights of a model of `bytes` are cached.
    pub fn is_for(&self, bytes: u64) -> bool {
        bytes >= self.least
    }

    /// Whether the folder, or what is to hold it, lies in memory: what is written there takes as much of it.
    pub fn is_in_memory(&self) -> bool {
        self.folder.is_in_memory()
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    /// Looks up the weights under `key`. Verification uses `threads` threads.
    ///
    /// # Errors
    /// When the folder is not safe to use, or a damaged file cannot be removed.
    pub fn find(&self, key: &CacheKey, threads: usize) -> Result<CacheLookup> {
        let path = self.folder.file(&key.stem(), EXTENSION);
        if !path.exists() {
            return Ok(CacheLookup::Absent);
        }
        self.folder.check()?;
        match self.open(key, &path, threads) {
            Ok(file) => Ok(CacheLookup::Ready(file)),
            Err(fault) => {
                self.folder.remove(&key.stem())?;
                Ok(CacheLookup::Damaged(fault))
            }
        }
    }

    fn open(&self, key: &CacheKey, path: &Path, threads: usize) -> Result<PackedFile> {
        let file = PackedFile::open(path)?;
        if file.key() != key.text {
            return Err(FormatError::source(path, "is for another model", ""));
        }
        if !self.folder.is_verified(&file) {
            if !file.verify(threads) {
                return Err(FormatError::source(path, "has damaged weights", ""));
            }
            self.folder.set_verified(&file);
        }
        Ok(file)
    }

    /// Reserves space for `bytes` under `key`, by evicting the least recently used files.
    ///
    /// # Errors
    /// When the folder is not safe to use, or a file of it cannot be created or removed.
    pub fn reserve(&self, key: &CacheKey, bytes: u64) -> Result<WriteReservation> {
        self.folder.create()?;
        let _lock = self.folder.lock()?;
        let stem = key.stem();
        if self.folder.remove_abandoned(&stem)? {
            return Ok(WriteReservation::Busy);
        }
        let others: Vec<_> = self.entries()?;
        let others = others.into_iter().filter(|other| other.stem != stem);
        let mut others: Vec<_> = others.collect();
        let stale = |other: &CachedWeights| {
            let replaced = other.key.as_ref().is_none_or(|old| key.replaces(old));
            replaced || other.state == WeightState::Unreadable
        };
        // Stale files are evicted first, then by their last use.
        others.sort_by_key(|other| (!stale(other), other.used));
        let held = others.iter().map(|other| other.bytes).sum::<u64>();
        let Some(space) = self.folder.space() else {
            return Ok(WriteReservation::Refused(
                "this system does not say how much room the disk has".into(),
            ));
        };
        let own = self.folder.size(&stem);
        let free = space.free.saturating_add(own);
        let limit = self.limit.unwrap_or_else(|| {
            let all = free.saturating_add(held);
            (all / 5).min(MAX_DEFAULT_LIMIT)
        });
        if bytes > limit {
            let reason = format!("they take {bytes} bytes, and the cache may hold {limit}");
            return Ok(WriteReservation::Refused(reason));
        }
        let (mut removed, mut kept) = (0, held);
        let mut count = 0;
        while kept.saturating_add(bytes) > limit {
            let Some(next) = others.get(count) else { break };
            (removed, kept) = (removed + next.bytes, kept - next.bytes);
            count += 1;
        }
        let reserve = space.reserve();
        if free.saturating_add(removed) < bytes.saturating_add(reserve) {
            let left = free.saturating_add(removed);
            let reason = format!(
                "they take {bytes} bytes, the disk has {left}, and {reserve} of them stay free"
            );
            return Ok(WriteReservation::Refused(reason));
        }
        for other in &others[..count] {
            self.folder.remove(&other.stem)?;
        }
        let writer = self.folder.writer(&stem, key.text.clone(), bytes)?;
        Ok(WriteReservation::Granted(Box::new(writer)))
    }

    /// Writes `entries` to the file of `writer` while `go_on` returns true, and [finishes](Self::finish) it. Returns
    /// whether all are written. If not, another call with the same entries continues where this one stopped.
    ///
    /// # Errors
    /// [`FormatError::Io`]; the file is removed then.
    pub fn write(
        &self,
        writer: &mut Writer,
        entries: &[NewEntry<'_>],
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let whole = writer.add(entries, go_on)?;
        if whole {
            self.finish(writer)?;
        }
        Ok(whole)
    }

    /// Gives the file of `writer` its name. What was added to it is all that the file holds.
    ///
    /// # Errors
    /// [`FormatError::Io`] when it cannot be written, and is removed, or not be opened again.
    pub fn finish(&self, writer: &mut Writer) -> Result<()> {
        writer.finish()?;
        // The file was just written, so it needs no verification until the next start of the system.
        let file = PackedFile::open(&writer.destination)?;
        self.folder.set_verified(&file);
        Ok(())
    }

    /// All files in the folder, the most recently used first.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn entries(&self) -> Result<Vec<CachedWeights>> {
        self.folder.entries()
    }

    /// Removes the weights of the model whose files are at or below `model`, or of all models. Returns the number of files
    /// and bytes.
    ///
    /// # Errors
    /// When the folder is not safe to use, or a file cannot be removed.
    pub fn clear(&self, model: Option<&Path>) -> Result<(usize, u64)> {
        if !self.folder.root().exists() {
            return Ok((0, 0));
        }
        self.folder.check()?;
        let _lock = self.folder.lock()?;
        self.folder.remove_abandoned("")?;
        let (mut count, mut bytes) = (0, 0);
        for entry in self.entries()? {
            if model.is_none_or(|model| entry.is_of(model)) {
                self.folder.remove(&entry.stem)?;
                (count, bytes) = (count + 1, bytes + entry.bytes);
            }
        }
        Ok((count, bytes))
    }
}
