//! Packed weights that are kept between runs, in a folder of files that are mapped and not read.
//!
//! A file holds the packed weights of one model for one layout of panels. Its name is a hash of its key: the
//! identity of the model's files, and the layout. A model that was written anew has another key, so what is
//! found under a key is right, or damaged. Whether it is damaged is checked in full when the file is opened for
//! the first time since the system started or since it was changed; after that a note beside it (`.state`) says
//! that it was checked, which saves reading all of it at every start.
//!
//! The folder is the user's own, and nobody else may write to it: whoever can change packed weights can change
//! what a model says.

mod file;
mod folder;
#[cfg(test)]
mod tests;
mod writer;

pub use file::{EntryName, PackedFile};
pub use folder::{CachedWeights, WeightState};
pub use writer::{NewEntry, Writer};

use crate::identity::FileIdentity;
use crate::{FormatError, Result};
use folder::{EXTENSION, Folder};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_128;

/// Most bytes of all files together, when nobody says.
const MOST: u64 = 32 << 30;
/// Bytes of a model below which packing takes no longer than looking for what was kept.
const WORTH_KEEPING: u64 = 64 << 20;

/// A folder of packed weights. It need not exist.
#[derive(Debug, Clone)]
pub struct WeightCache {
    folder: Folder,
    limit: Option<u64>,
    least: u64,
}

/// What a file of packed weights is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheKey {
    text: Vec<u8>,
    content: KeyContent,
}

/// What a key says, as it is written into the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KeyContent {
    /// Of the model.
    files: Vec<FileIdentity>,
    /// Of the panels.
    layout: String,
}

/// What a cache has for a key.
#[derive(Debug)]
pub enum CacheLookup {
    /// Checked, mapped weights.
    Ready(PackedFile),
    /// Nothing.
    Absent,
    /// A file that was damaged, and is gone now; with what was wrong.
    Damaged(FormatError),
}

/// What became of weights that were to be kept.
#[derive(Debug)]
pub enum WriteReservation {
    /// They may be written.
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

    /// The key that a file says it is for.
    fn of(file: &PackedFile) -> Option<Self> {
        let text = file.key().to_vec();
        let content = serde_json::from_slice(&text).ok()?;
        Some(Self { text, content })
    }

    /// The name of its file, without extension.
    fn stem(&self) -> String {
        format!("{:032x}", XxHash3_128::oneshot(&self.text))
    }

    /// Whether the model is the same in another state, so that only one of both can still be used.
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
            least: WORTH_KEEPING,
        }
    }

    /// Keeps models of at least `bytes`; as long as nobody says, 64 MiB.
    #[must_use]
    pub fn keep_from(self, bytes: u64) -> Self {
        Self {
            least: bytes,
            ..self
        }
    }

    /// Whether the weights of a model of `bytes` are worth keeping.
    pub fn is_for(&self, bytes: u64) -> bool {
        bytes >= self.least
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    /// The weights under `key`. What has to be checked is checked by `threads` threads.
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

    /// Makes room for `bytes` under `key`, by removing what was used least recently.
    ///
    /// # Errors
    /// When the folder is not safe to use, or a file of it cannot be made or removed.
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
        // Those that go first come first.
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
            (all / 5).min(MOST)
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
        let writer = self.folder.writer(&stem, key.text.clone())?;
        Ok(WriteReservation::Granted(Box::new(writer)))
    }

    /// Writes `entries` as the file of `writer`, for as long as `go_on` says so; whether it came to the end. If
    /// not, it goes on where it was when it is called again with the same entries.
    ///
    /// # Errors
    /// [`FormatError::Io`], after which nothing is left of it.
    pub fn write(
        &self,
        writer: &mut Writer,
        entries: &[NewEntry<'_>],
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let whole = writer.write(entries, go_on)?;
        if whole {
            // What was written is what was given, as far as this start of the system is concerned.
            let file = PackedFile::open(&writer.destination)?;
            self.folder.set_verified(&file);
        }
        Ok(whole)
    }

    /// Everything in the folder, the most recently used first.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn entries(&self) -> Result<Vec<CachedWeights>> {
        self.folder.entries()
    }

    /// Removes the weights of the model whose files lie at or below `model`, or of all; how many bytes that were.
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
