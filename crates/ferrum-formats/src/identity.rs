//! What tells a file from another, and from itself before a change.

use serde::{Deserialize, Serialize};
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A file at a moment: where it is, how long, and when it was changed. A file that is rewritten or
/// replaced has another identity, even under its old name with its old length and time of writing, because the
/// system alone sets the time of change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Its path without links.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
    /// Nanoseconds from 1970 to the last writing.
    modified: u64,
    /// Nanoseconds from 1970 to the last change of the file or of what is said about it; 0 where the system
    /// does not say.
    changed: u64,
    /// Its number on its disk; 0 where the system does not say.
    inode: u64,
}

impl FileIdentity {
    /// The identity of the file at `path`, of which the system says `meta`; `None` when the path cannot be kept
    /// as text, or leads nowhere.
    pub(crate) fn new(path: &Path, meta: &Metadata) -> Option<Self> {
        let path = path.canonicalize().ok()?;
        path.to_str()?;
        let since = |time: SystemTime| time.duration_since(UNIX_EPOCH).ok();
        let modified = meta.modified().ok().and_then(since)?;
        let (changed, inode) = change_of(meta);
        Some(Self {
            path,
            bytes: meta.len(),
            modified: u64::try_from(modified.as_nanos()).ok()?,
            changed,
            inode,
        })
    }

    /// The identity of the file that is at `path` now.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        meta.is_file().then(|| Self::new(path, &meta))?
    }

    /// Whether this very file is still at its path.
    pub fn is_current(&self) -> bool {
        Self::of(&self.path).as_ref() == Some(self)
    }
}

#[cfg(unix)]
fn change_of(meta: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let nanos = meta.ctime().wrapping_mul(1_000_000_000);
    (nanos.wrapping_add(meta.ctime_nsec()) as u64, meta.ino())
}

#[cfg(not(unix))]
fn change_of(_: &Metadata) -> (u64, u64) {
    (0, 0)
}
