//! The folder of a cache: its access mode, its files, and which of them were verified.

use super::file::{PackedFile, STATE};
use super::writer::Writer;
use super::{CacheKey, KeyContent};
use crate::identity::FileIdentity;
use crate::private_folder::{PrivateFolder, Space, private, remove};
use crate::{FormatError, Result};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Extension of packed weights.
pub(super) const EXTENSION: &str = "weights";
/// Extension of files that are being written. The writer holds a lock on its file, so a file without a lock is abandoned.
const PARTIAL: &str = "partial";
/// File that is locked while files are added or removed.
const LOCK: &str = "lock";
/// Longest verification record that is read, in bytes.
const MAX_STATE: u64 = 64 << 10;
/// The folder of a weight cache: packed weights, their verification records, and the lock that writers hold.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    folder: PrivateFolder,
}

/// A file of packed weights in a cache.
#[derive(Debug, Clone)]
pub struct CachedWeights {
    pub(super) stem: String,
    pub(super) key: Option<CacheKey>,
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// When it was used last.
    pub used: SystemTime,
    /// Whether it can still be used.
    pub state: WeightState,
}

/// Whether packed weights can still be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightState {
    /// The model is as it was.
    Current,
    /// A file of the model is gone or was changed.
    Outdated,
    /// The file is damaged, or of another version.
    Unreadable,
}

/// The verification record of a file: that it was checked.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Verified {
    /// Since this start of the system: what was read from the disk since then may be read again.
    boot: String,
    file: FileIdentity,
}

impl CachedWeights {
    /// The files of the model.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let content = self.key.iter().map(|key| &key.content);
        content.flat_map(|content| content.files.iter().map(|file| &*file.path))
    }

    /// The layout of the panels.
    pub fn layout(&self) -> Option<&str> {
        self.key.as_ref().map(|key| &*key.content.layout)
    }

    /// Whether a file of the model is `model` or lies in it.
    pub(super) fn is_of(&self, model: &Path) -> bool {
        let model = model.canonicalize().unwrap_or_else(|_| model.to_owned());
        self.files().any(|file| file.starts_with(&model))
    }
}

impl Folder {
    pub(super) fn new(root: PathBuf) -> Self {
        let folder = PrivateFolder::new(root, "--weight-cache-dir");
        Self { folder }
    }

    pub(super) fn root(&self) -> &Path {
        self.folder.root()
    }

    pub(super) fn file(&self, stem: &str, extension: &str) -> PathBuf {
        self.root().join(format!("{stem}.{extension}"))
    }

    /// Bytes of the weights called `stem`; 0 when there are none.
    pub(super) fn size(&self, stem: &str) -> u64 {
        fs::metadata(self.file(stem, EXTENSION)).map_or(0, |meta| meta.len())
    }

    /// Makes the folder, for its user alone.
    pub(super) fn create(&self) -> Result<()> {
        self.folder.create()
    }

    /// Refuses a folder that others could have written to.
    pub(super) fn check(&self) -> Result<()> {
        self.folder.check()
    }

    /// Room on the folder's disk.
    pub(super) fn space(&self) -> Option<Space> {
        self.folder.space()
    }

    /// Whether its files lie in memory.
    pub(super) fn is_in_memory(&self) -> bool {
        self.folder.is_in_memory()
    }

    /// Waits for the lock for adding and removing files.
    pub(super) fn lock(&self) -> Result<File> {
        let path = self.root().join(LOCK);
        let file = private().truncate(false).open(&path);
        let file = file.map_err(|e| FormatError::io(&path, "open", &e))?;
        file.lock()
            .map_err(|e| FormatError::io(&path, "lock", &e))?;
        Ok(file)
    }

    /// Begins a file. To be called under the lock.
    pub(super) fn writer(&self, stem: &str, key: Vec<u8>, room: u64) -> Result<Writer> {
        let path = self.file(&format!("{stem}.{}", std::process::id()), PARTIAL);
        // Read as well: what was written may be mapped before the file is whole.
        let file = private().read(true).create_new(true).open(&path);
        let file = file.map_err(|e| FormatError::io(&path, "create", &e))?;
        if let Err(TryLockError::Error(e)) = file.try_lock() {
            return Err(FormatError::io(&path, "lock", &e));
        }
        let destination = self.file(stem, EXTENSION);
        Ok(Writer::new(file, (path, destination), key, room))
    }

    /// Removes abandoned partial files. Returns whether a process is writing the weights called `stem`.
    pub(super) fn remove_abandoned(&self, stem: &str) -> Result<bool> {
        let mut busy = false;
        for path in self.files_with(PARTIAL)? {
            let Ok(file) = File::open(&path) else {
                continue;
            };
            if file.try_lock().is_ok() {
                remove(&path)?;
            } else {
                let name = path.file_name().and_then(OsStr::to_str);
                busy |= name.is_some_and(|name| name.split('.').next() == Some(stem));
            }
        }
        Ok(busy)
    }

    /// Removes weights and their note. Processes that have them mapped keep them until they end.
    pub(super) fn remove(&self, stem: &str) -> Result<()> {
        remove(&self.file(stem, EXTENSION))?;
        remove(&self.file(stem, STATE))
    }

    /// Everything in the folder, the most recently used first.
    pub(super) fn entries(&self) -> Result<Vec<CachedWeights>> {
        let mut all: Vec<_> = self.files_with(EXTENSION)?;
        all.retain(|path| path.is_file());
        let mut all: Vec<_> = all
            .into_iter()
            .filter_map(|path| self.entry(path))
            .collect();
        all.sort_by_key(|entry| std::cmp::Reverse(entry.used));
        Ok(all)
    }

    fn entry(&self, path: PathBuf) -> Option<CachedWeights> {
        let stem = path.file_stem()?.to_str()?.to_owned();
        let meta = fs::metadata(&path).ok()?;
        let used = fs::metadata(self.file(&stem, STATE)).unwrap_or_else(|_| meta.clone());
        let key = PackedFile::open(&path).ok();
        let key = key.and_then(|file| CacheKey::of(&file));
        let state = match &key {
            None => WeightState::Unreadable,
            Some(CacheKey {
                content: KeyContent { files, .. },
                ..
            }) => match files.iter().all(FileIdentity::is_current) {
                true => WeightState::Current,
                false => WeightState::Outdated,
            },
        };
        Some(CachedWeights {
            stem,
            key,
            path,
            bytes: meta.len(),
            used: used.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            state,
        })
    }

    /// Files with this extension; none when there is no folder.
    fn files_with(&self, extension: &str) -> Result<Vec<PathBuf>> {
        match self.root().exists() {
            true => crate::files::files_with_extension(self.root(), &[extension]),
            false => Ok(Vec::new()),
        }
    }

    /// Whether the panels of an open file were checked since the system started.
    pub(super) fn is_verified(&self, file: &PackedFile) -> bool {
        let Some(now) = Verified::now(file) else {
            return false;
        };
        let note = file.path().with_extension(STATE);
        let note = crate::files::read_limited(&note, MAX_STATE);
        note.is_ok_and(|note| serde_json::from_slice(&note).is_ok_and(|then: Verified| then == now))
    }

    /// Notes that the panels of an open file are as they were written.
    pub(super) fn set_verified(&self, file: &PackedFile) {
        let note = Verified::now(file).and_then(|now| serde_json::to_vec(&now).ok());
        let path = file.path().with_extension(STATE);
        // Without a note, they are checked again at the next start.
        let state = private().truncate(true).open(path);
        let _ = state.and_then(|mut state| state.write_all(&note.unwrap_or_default()));
    }
}

impl Verified {
    /// `None` if the system does not identify files or its starts.
    fn now(file: &PackedFile) -> Option<Self> {
        Some(Self {
            boot: boot_id()?,
            file: file.identity()?.clone(),
        })
    }
}

/// Identifies this start of the system.
fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}
