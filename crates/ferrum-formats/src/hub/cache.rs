//! One repository inside a cache: finding its files, and adding to them.

use super::choose::{DownloadScope, SelectedFiles, Weights, select_files};
use super::names::{Commit, Etag, ModelName, RepoId, Revision};
use crate::error::Shown;
use crate::safetensors::Safetensors;
use crate::{FormatError, Result};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Folders within folders of a snapshot.
const MAX_DEPTH: usize = 16;

/// Files of a snapshot.
const MAX_FILES: usize = 100_000;

/// Longest content of a ref that is read; a commit has 40 bytes.
const MAX_REF: u64 = 256;

/// A cache folder. It need not exist.
#[derive(Debug, Clone)]
pub struct HubCache {
    root: PathBuf,
}

impl HubCache {
    /// The cache in `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The place of a repository, whether there is anything or not.
    pub fn repo(&self, id: &RepoId) -> CachedRepo {
        let folder = id.folder();
        CachedRepo {
            id: id.clone(),
            root: self.root.clone(),
            dir: self.root.join(&folder),
            locks: self.root.join(".locks").join(folder),
        }
    }
}

/// A repository's part of a cache.
#[derive(Debug, Clone)]
pub struct CachedRepo {
    pub(super) id: RepoId,
    pub(super) root: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) locks: PathBuf,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Its path inside the repository, with `/` between folders.
    pub name: String,
    /// Bytes of its contents.
    pub bytes: u64,
    /// Name of its blob; `None` for a file that is no link, as on systems without links.
    pub blob: Option<String>,
    /// When its contents were written, where the file system says so.
    pub modified: Option<std::time::SystemTime>,
}

impl CachedRepo {
    /// Which repository.
    pub fn id(&self) -> &RepoId {
        &self.id
    }

    /// The folder of the repository.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.dir.join("snapshots").join(commit.as_str())
    }

    /// The commit that a revision meant when it was last asked for; `None` when it was not.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when the ref holds no commit, or cannot be read.
    pub fn commit(&self, revision: &Revision) -> Result<Option<Commit>> {
        if let Some(commit) = revision.as_commit() {
            return Ok(Some(commit));
        }
        let path = self.dir.join("refs").join(revision.as_str());
        let text = match File::open(&path) {
            Ok(file) => {
                let mut text = String::new();
                let read = file.take(MAX_REF).read_to_string(&mut text);
                read.map_err(|e| FormatError::io(&path, "read", &e))?;
                text
            }
            Err(e) if is_absent(&e) => return Ok(None),
            Err(e) => return Err(FormatError::io(&path, "open", &e)),
        };
        match Commit::parse(text.trim()) {
            Ok(commit) => Ok(Some(commit)),
            Err(_) => {
                let reason = format!("holds \"{}\", expected a commit", Shown(text.trim()));
                let hint = format!("`ferrum pull {}` writes it anew", self.id);
                Err(FormatError::source(&path, reason, hint))
            }
        }
    }

    /// The files that are there of a commit, sorted by name. What is no file any more (a link whose blob
    /// is gone) is left out.
    ///
    /// # Errors
    /// [`FormatError::Source`] when a link leads out of the cache, [`FormatError::Limit`] for more files
    /// than any model has.
    pub fn files(&self, commit: &Commit) -> Result<Vec<SnapshotFile>> {
        let root = self.snapshot(commit);
        let homes = self.homes();
        let mut found = Vec::new();
        let mut folders = vec![(root.clone(), String::new(), 0)];
        while let Some((folder, prefix, depth)) = folders.pop() {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(e) if is_absent(&e) => continue,
                Err(e) => return Err(FormatError::io(&folder, "read", &e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| FormatError::io(&folder, "read", &e))?;
                let kind = entry.file_type();
                let kind = kind.map_err(|e| FormatError::io(&entry.path(), "read", &e))?;
                // A name that is no UTF-8 is none that a hub has.
                let Ok(name) = entry.file_name().into_string() else {
                    continue;
                };
                let name = format!("{prefix}{name}");
                if kind.is_dir() {
                    if depth == MAX_DEPTH {
                        let found = depth as u64 + 1;
                        let limit = MAX_DEPTH as u64;
                        return Err(FormatError::limit(&root, "depth of folders", found, limit));
                    }
                    folders.push((entry.path(), format!("{name}/"), depth + 1));
                } else if let Some(file) = snapshot_file(&entry.path(), name, &homes)? {
                    found.push(file);
                }
                if found.len() + folders.len() > MAX_FILES {
                    let limit = MAX_FILES as u64;
                    return Err(FormatError::limit(
                        &root,
                        "number of files",
                        limit + 1,
                        limit,
                    ));
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Whether a file of a commit is there.
    ///
    /// # Errors
    /// As [`Self::files`].
    pub fn has(&self, commit: &Commit, file: &str) -> Result<bool> {
        let path = self.snapshot(commit).join(file);
        Ok(snapshot_file(&path, file.to_owned(), &self.homes())?.is_some())
    }

    /// Links may lead into this repository, or into what repositories of a cache share.
    fn homes(&self) -> Vec<PathBuf> {
        let homes = [&self.dir, &self.root].into_iter();
        homes.filter_map(|home| home.canonicalize().ok()).collect()
    }

    /// Where `model` lies, if all of its files are there: what [`crate::ModelSource::open`] takes.
    ///
    /// # Errors
    /// What is wrong with the cache. A model that is not there, or not completely, is `None`.
    pub fn find(
        &self,
        model: &ModelName,
        revision: &Revision,
        scope: DownloadScope,
    ) -> Result<Option<PathBuf>> {
        let Some(commit) = self.commit(revision)? else {
            return Ok(None);
        };
        let files: Vec<_> = self
            .files(&commit)?
            .into_iter()
            .map(|file| file.name)
            .collect();
        // What the files that are there cannot be chosen from may well be complete at the hub.
        let Ok(selected) = select_files(model, &files, scope) else {
            return Ok(None);
        };
        let snapshot = self.snapshot(&commit);
        if let Weights::Index(index) = &selected.weights {
            let shards = Safetensors::shards(snapshot.join(index))?;
            if !shards.iter().all(|shard| files.contains(shard)) {
                return Ok(None);
            }
        }
        Ok(Some(entry_path(&snapshot, &selected)))
    }

    /// Where a chosen model lies in the snapshot of a commit.
    pub fn entry(&self, commit: &Commit, selected: &SelectedFiles) -> PathBuf {
        entry_path(&self.snapshot(commit), selected)
    }

    /// Where a blob lies, or will lie.
    pub fn blob(&self, etag: &Etag) -> PathBuf {
        self.dir.join("blobs").join(etag.as_str())
    }

    /// Locks a blob for writing, if it is not locked. Other libraries use the same lock.
    ///
    /// # Errors
    /// [`FormatError::Io`] when the folders cannot be made, or the file system has no locks.
    pub fn try_lock(&self, etag: &Etag) -> Result<Option<BlobLock>> {
        make_dir(&self.dir.join("blobs"))?;
        make_dir(&self.locks)?;
        let path = self.locks.join(format!("{etag}.lock"));
        let options = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = options.map_err(|e| FormatError::io(&path, "open", &e))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(BlobLock {
                incomplete: self.blob(etag).with_file_name(format!("{etag}.incomplete")),
                blob: self.blob(etag),
                _file: file,
            })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(FormatError::io(&path, "lock", &e)),
        }
    }

    /// Makes `file` of a commit a link to a blob.
    ///
    /// # Errors
    /// [`FormatError::Io`] when the link cannot be made. `file` has to have passed
    /// [`super::check_file_name`]; else it is refused with [`FormatError::Hub`].
    pub fn link(&self, commit: &Commit, file: &str, etag: &Etag) -> Result<()> {
        super::check_file_name(file)
            .map_err(|reason| FormatError::hub(&self.id.to_string(), reason, ""))?;
        let path = self.snapshot(commit).join(file);
        if let Some(folder) = path.parent() {
            make_dir(folder)?;
            // A folder that was there already may be a link to anywhere.
            self.check_inside(folder)?;
        }
        let up = "../".repeat(2 + file.matches('/').count());
        let target = format!("{up}blobs/{etag}");
        // The link is made under another name first, so that the file is never missing.
        let draft = path.with_file_name(format!(".{etag}.{}.link", std::process::id()));
        let made = make_link(Path::new(&target), &self.blob(etag), &draft)
            .and_then(|()| fs::rename(&draft, &path));
        made.map_err(|e| {
            drop(fs::remove_file(&draft));
            FormatError::io(&path, "link", &e)
        })
    }

    fn check_inside(&self, folder: &Path) -> Result<()> {
        let real = |path: &Path| {
            let real = path.canonicalize();
            real.map_err(|e| FormatError::io(path, "open", &e))
        };
        match real(folder)?.starts_with(real(&self.dir)?) {
            true => Ok(()),
            false => Err(leads_out(folder)),
        }
    }

    /// Remembers which commit a branch or tag means.
    ///
    /// # Errors
    /// [`FormatError::Io`] when it cannot be written.
    pub fn set_commit(&self, revision: &Revision, commit: &Commit) -> Result<()> {
        if revision.as_commit().is_some()
            || self.commit(revision).ok().flatten().as_ref() == Some(commit)
        {
            return Ok(());
        }
        let path = self.dir.join("refs").join(revision.as_str());
        if let Some(folder) = path.parent() {
            make_dir(folder)?;
            self.check_inside(folder)?;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let draft = path.with_file_name(format!("{name}.{}.tmp", std::process::id()));
        let written = File::create(&draft)
            .and_then(|mut file| file.write_all(commit.as_str().as_bytes()))
            .and_then(|()| fs::rename(&draft, &path));
        written.map_err(|e| {
            drop(fs::remove_file(&draft));
            FormatError::io(&path, "write", &e)
        })
    }
}

/// The right to write a blob, until it is dropped.
#[derive(Debug)]
pub struct BlobLock {
    /// Where the blob belongs.
    pub blob: PathBuf,
    /// Where it grows. What is there is the beginning of the blob, left by an earlier download.
    pub incomplete: PathBuf,
    _file: File,
}

impl BlobLock {
    /// Gives a complete blob its name.
    ///
    /// # Errors
    /// [`FormatError::Io`] when that cannot be done.
    pub fn finish(&self) -> Result<()> {
        fs::rename(&self.incomplete, &self.blob)
            .map_err(|e| FormatError::io(&self.blob, "write", &e))
    }
}

fn entry_path(snapshot: &Path, selected: &SelectedFiles) -> PathBuf {
    match selected.entry() {
        Some(file) => snapshot.join(file),
        None => snapshot.to_owned(),
    }
}

fn snapshot_file(path: &Path, name: String, homes: &[PathBuf]) -> Result<Option<SnapshotFile>> {
    let real = match path.canonicalize() {
        Ok(real) => real,
        Err(e) if is_absent(&e) => return Ok(None),
        Err(e) => return Err(FormatError::io(path, "open", &e)),
    };
    if !homes.iter().any(|home| real.starts_with(home)) {
        return Err(leads_out(path));
    }
    let meta = fs::metadata(&real).map_err(|e| FormatError::io(path, "open", &e))?;
    if !meta.is_file() {
        return Err(FormatError::source(path, "is not a regular file", ""));
    }
    let link = fs::read_link(path).ok();
    let blob = link.and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
    Ok(Some(SnapshotFile {
        name,
        bytes: meta.len(),
        blob,
        modified: meta.modified().ok(),
    }))
}

fn leads_out(path: &Path) -> FormatError {
    let hint = "somebody else made this link; remove it, or the whole model with `ferrum rm`";
    FormatError::source(path, "is a link that leads out of the cache", hint)
}

/// Whether an error means that there is no such file.
pub(super) fn is_absent(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn make_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|e| FormatError::io(path, "make", &e))
}

/// Creates a link at `path` to `target`, relative to it. On systems without symbolic links for all users, this is a hard
/// link to the blob, or a copy.
fn make_link(target: &Path, blob: &Path, path: &Path) -> std::io::Result<()> {
    drop(fs::remove_file(path));
    #[cfg(unix)]
    {
        let _ = blob;
        std::os::unix::fs::symlink(target, path)
    }
    #[cfg(not(unix))]
    {
        let _ = target;
        fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(drop))
    }
}

#[cfg(all(test, unix))]
mod tests;
