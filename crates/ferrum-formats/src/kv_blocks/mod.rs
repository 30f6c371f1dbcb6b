//! Keys and values of prompts that are kept on disk: blocks of a server in a folder, and the session of a
//! conversation in a file.
//!
//! A file says in its description what its payload was computed from: model, cache layout, tenant, and all tokens up
//! to its end. Whoever looks for a block has to have the same description, byte for byte; the name is only where
//! to look. A checksum covers both.
//!
//! The files are as confidential as the prompts that they were computed from, and write access allows changing the output
//! of a model: folders have mode 700, files 600, and a folder that others can write to is refused.

mod file;
#[cfg(test)]
mod tests;

pub use file::{KvFile, write as write_kv_file};

use crate::private_folder::{PrivateFolder, private, remove};
use crate::{FormatError, Result};
use file::file_bytes;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use twox_hash::XxHash3_128;

/// Default limit of the bytes of all files together.
const MAX_DEFAULT_LIMIT: u64 = 32 << 30;
/// Extension of a block.
const EXTENSION: &str = "kv";
/// What the process that uses the folder holds a lock on.
const LOCK: &str = "lock";

/// The key of a block: a group (a model with a cache layout) and a hash of the prefix that the block ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvBlockKey {
    group: u64,
    hash: u128,
}

impl KvBlockKey {
    /// The parent of the first block of a sequence, in the group that `group` describes, for sequences that share `salt`.
    pub fn root(group: &[u8], salt: &[u8]) -> Self {
        let hash = XxHash3_128::oneshot(group);
        let group = (hash >> 64) as u64;
        let before = Self { group, hash };
        before.followed_by(salt)
    }

    /// The key of the block that holds `content` after the block of this key.
    #[must_use]
    pub fn followed_by(self, content: &[u8]) -> Self {
        let bytes = [&self.hash.to_le_bytes(), content].concat();
        let hash = XxHash3_128::oneshot(&bytes);
        Self { hash, ..self }
    }

    /// Number of its group.
    pub fn group(self) -> u64 {
        self.group
    }

    fn file_name(self) -> String {
        format!("{:016x}-{:032x}.{EXTENSION}", self.group, self.hash)
    }

    fn parse(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let stem = name.strip_suffix(EXTENSION)?.strip_suffix('.')?;
        let (group, hash) = stem.split_once('-')?;
        let key = Self {
            group: u64::from_str_radix(group, 16).ok()?,
            hash: u128::from_str_radix(hash, 16).ok()?,
        };
        (path.file_name()? == key.file_name().as_str()).then_some(key)
    }
}

/// Result of writing a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvWritten {
    /// It is in the folder now.
    Written,
    /// It was there already.
    AlreadyStored,
    /// There is no room; with the reason.
    Refused(String),
}

/// Figures of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvGroupFigures {
    /// Bytes of its files.
    pub bytes: u64,
    /// Number of files that were evicted because the folder was full.
    pub evicted: u64,
}

/// A folder of blocks. One process at a time uses it; any thread may.
#[derive(Debug)]
pub struct KvFolder {
    folder: PrivateFolder,
    limit: u64,
    index: Mutex<Index>,
    /// Locked for as long as the folder is used.
    _lock: File,
}

#[derive(Debug, Default)]
struct Index {
    /// Length and time of last use of each file, counted in uses.
    files: HashMap<KvBlockKey, (u64, u64)>,
    by_use: BTreeMap<u64, KvBlockKey>,
    uses: u64,
    bytes: u64,
    groups: HashMap<u64, KvGroupFigures>,
}

impl Index {
    fn add(&mut self, key: KvBlockKey, bytes: u64) {
        self.remove(key);
        self.uses += 1;
        self.files.insert(key, (bytes, self.uses));
        self.by_use.insert(self.uses, key);
        self.bytes += bytes;
        self.groups.entry(key.group).or_default().bytes += bytes;
    }

    fn remove(&mut self, key: KvBlockKey) {
        if let Some((bytes, used)) = self.files.remove(&key) {
            self.by_use.remove(&used);
            self.bytes -= bytes;
            let group = self.groups.entry(key.group).or_default();
            group.bytes = group.bytes.saturating_sub(bytes);
        }
    }

    fn touch(&mut self, key: KvBlockKey) {
        if let Some(&(bytes, _)) = self.files.get(&key) {
            self.add(key, bytes);
        }
    }
}

impl KvFolder {
    /// Uses the folder `root`, which is made if it is not there, for files of at most `limit` bytes together; `None`:
    /// a fifth of the disk's free space (what the folder holds counts as free), at most 32 GiB.
    ///
    /// # Errors
    /// When the folder is not safe to use, or another process uses it.
    pub fn open(root: impl Into<PathBuf>, limit: Option<u64>) -> Result<Self> {
        let folder = PrivateFolder::new(root.into(), "--kv-offload-dir");
        folder.create()?;
        let path = folder.root().join(LOCK);
        let lock = private().truncate(false).open(&path);
        let lock = lock.map_err(|e| FormatError::io(&path, "open", &e))?;
        if lock.try_lock().is_err() {
            let hint = "give each server a folder of its own";
            let reason = "is used by another process";
            return Err(FormatError::source(folder.root(), reason, hint));
        }
        let index = scan(folder.root())?;
        let limit = limit.unwrap_or_else(|| {
            let free = folder.space().map_or(0, |space| space.free);
            (free.saturating_add(index.bytes) / 5).min(MAX_DEFAULT_LIMIT)
        });
        let index = Mutex::new(index);
        Ok(Self {
            folder,
            limit,
            index,
            _lock: lock,
        })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    /// Most bytes of all files together.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Blocks in the folder.
    pub fn len(&self) -> usize {
        self.index().files.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Figures of a group.
    pub fn figures(&self, group: u64) -> KvGroupFigures {
        let index = self.index();
        index.groups.get(&group).copied().unwrap_or_default()
    }

    /// Whether there is a file of this key.
    pub fn contains(&self, key: KvBlockKey) -> bool {
        self.index().files.contains_key(&key)
    }

    /// The payload of the block of `key`, which has to have this description and length; `None` when there is no
    /// such file.
    ///
    /// # Errors
    /// What is wrong with the file, which is gone then.
    pub fn read(
        &self,
        key: KvBlockKey,
        description: &[u8],
        payload: usize,
    ) -> Result<Option<Vec<u8>>> {
        if !self.contains(key) {
            return Ok(None);
        }
        let path = self.path(key);
        let opened = KvFile::open(&path, description.len());
        let bytes = opened.and_then(|file| {
            if file.description() != description || file.payload_len() != payload as u64 {
                let reason = "is not of the tokens that its key says";
                return Err(FormatError::source(&path, reason, ""));
            }
            file.into_payload()
        });
        let missing =
            matches!(&bytes, Err(FormatError::Io { kind, .. }) if *kind == ErrorKind::NotFound);
        if bytes.is_ok() {
            self.index().touch(key);
            return bytes.map(Some);
        }
        self.index().remove(key);
        if missing {
            return Ok(None);
        }
        remove(&path)?;
        bytes.map(Some)
    }

    /// Writes a block, and evicts the least recently used files if there is no room for it. One thread at a time may
    /// write.
    ///
    /// # Errors
    /// When a file cannot be written or removed.
    pub fn write(&self, key: KvBlockKey, description: &[u8], payload: &[u8]) -> Result<KvWritten> {
        let bytes = file_bytes(description.len(), payload.len());
        if self.contains(key) {
            self.index().touch(key);
            return Ok(KvWritten::AlreadyStored);
        }
        if bytes > self.limit {
            let limit = self.limit;
            let reason = format!("a block takes {bytes} bytes, and the folder may hold {limit}");
            return Ok(KvWritten::Refused(reason));
        }
        let Some(space) = self.folder.space() else {
            let reason = "this system does not say how much room the disk has";
            return Ok(KvWritten::Refused(reason.into()));
        };
        let (free, reserve) = (space.free, space.reserve());
        if free < bytes.saturating_add(reserve) {
            let reason = format!("the disk has {free} bytes, and {reserve} of them stay free");
            return Ok(KvWritten::Refused(reason));
        }
        while let Some(oldest) = self.to_evict(bytes) {
            remove(&self.path(oldest))?;
        }
        // A loss of power leaves a file that its checksum refuses.
        file::write(&self.path(key), description, payload, false)?;
        self.index().add(key, bytes);
        Ok(KvWritten::Written)
    }

    /// Removes the least recently used file from the index and returns it, if `bytes` more do not fit.
    fn to_evict(&self, bytes: u64) -> Option<KvBlockKey> {
        let mut index = self.index();
        if index.bytes.saturating_add(bytes) <= self.limit {
            return None;
        }
        let (_, &oldest) = index.by_use.first_key_value()?;
        index.remove(oldest);
        index.groups.entry(oldest.group).or_default().evicted += 1;
        Some(oldest)
    }

    fn path(&self, key: KvBlockKey) -> PathBuf {
        self.folder.root().join(key.file_name())
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // Nothing that can panic runs under the lock.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a folder holds, by the time of its last use. What was not written to its end is removed.
fn scan(root: &Path) -> Result<Index> {
    for path in crate::files::files_with_extension(root, &["partial"])? {
        remove(&path)?;
    }
    let mut found = Vec::new();
    for path in crate::files::files_with_extension(root, &[EXTENSION])? {
        let meta = fs::metadata(&path).ok().filter(fs::Metadata::is_file);
        if let (Some(key), Some(meta)) = (KvBlockKey::parse(&path), meta) {
            let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            found.push((used, key, meta.len()));
        }
    }
    found.sort_unstable();
    let mut index = Index::default();
    for (_, key, bytes) in found {
        index.add(key, bytes);
    }
    Ok(index)
}
