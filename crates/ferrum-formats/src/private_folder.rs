//! Folders of a cache that only their user may write to, and what stays free of their disk.
//!
//! Write access to a cache allows changing the output of a model, and read access may reveal prompts. So folders have
//! mode 700 and files 600, and a folder that others can write to is refused.

use crate::{FormatError, Result};
use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// What stays free of a disk at least, and at most has to: between them a tenth of it.
const RESERVE: RangeInclusive<u64> = 2 << 30..=8 << 30;

/// Room on a disk.
pub(crate) struct Space {
    pub(crate) free: u64,
    total: u64,
}

impl Space {
    /// What stays free.
    pub(crate) fn reserve(&self) -> u64 {
        (self.total / 10).clamp(*RESERVE.start(), *RESERVE.end())
    }
}

/// The folder of a cache.
#[derive(Debug, Clone)]
pub(crate) struct PrivateFolder {
    root: PathBuf,
    /// The flag that names another folder.
    flag: &'static str,
}

impl PrivateFolder {
    pub(crate) fn new(root: PathBuf, flag: &'static str) -> Self {
        Self { root, flag }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the folder, for its user alone.
    pub(crate) fn create(&self) -> Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let made = builder.create(&self.root);
        made.map_err(|e| FormatError::io(&self.root, "create", &e))?;
        self.check()
    }

    /// Refuses a folder that others could have written to.
    pub(crate) fn check(&self) -> Result<()> {
        let meta = fs::metadata(&self.root);
        let meta = meta.map_err(|e| FormatError::io(&self.root, "open", &e))?;
        if !meta.is_dir() {
            return Err(FormatError::source(&self.root, "is no folder", ""));
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let own = rustix::process::geteuid().as_raw();
            if meta.uid() != own && meta.uid() != 0 {
                let hint = format!("give another folder with {}", self.flag);
                let reason = "belongs to another user";
                return Err(FormatError::source(&self.root, reason, hint));
            }
            if meta.mode() & 0o022 != 0 {
                let reason = format!(
                    "has mode {:03o}, expected a folder that only its owner can write to",
                    meta.mode() & 0o777
                );
                let hint = "`chmod 700` makes it one";
                return Err(FormatError::source(&self.root, reason, hint));
            }
        }
        Ok(())
    }

    /// Room on the folder's disk, where the system says.
    pub(crate) fn space(&self) -> Option<Space> {
        #[cfg(unix)]
        {
            let stat = rustix::fs::statvfs(&self.root).ok()?;
            Some(Space {
                free: stat.f_bavail.saturating_mul(stat.f_frsize),
                total: stat.f_blocks.saturating_mul(stat.f_frsize),
            })
        }
        #[cfg(not(unix))]
        None
    }

    /// Whether files of the folder, or of the nearest one above it that is there, lie in memory (Linux: tmpfs).
    pub(crate) fn is_in_memory(&self) -> bool {
        #[cfg(target_os = "linux")]
        {
            const TMPFS: u32 = 0x0102_1994;
            let mut above = self.root.ancestors();
            let found = above.find_map(|folder| rustix::fs::statfs(folder).ok());
            found.is_some_and(|found| u32::try_from(found.f_type) == Ok(TMPFS))
        }
        #[cfg(not(target_os = "linux"))]
        false
    }
}

/// Options to write a file that only its user can read.
pub(crate) fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Removes a file that need not be there.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(FormatError::io(path, "remove", &e)),
        _ => Ok(()),
    }
}
