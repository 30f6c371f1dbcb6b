//! Removing models from a cache, without touching what another revision uses.

use super::cache::{CachedRepo, is_absent};
use super::choose::is_named;
use super::names::{Commit, Etag, Revision};
use super::scan::names_in;
use crate::error::Shown;
use crate::{FormatError, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Fewest digits of a commit that name it.
const MIN_PREFIX: usize = 7;

/// A plan of what to remove, so that it can be confirmed first.
#[derive(Debug)]
pub struct Removal {
    repo: CachedRepo,
    /// The whole repository.
    pub whole: bool,
    /// Bytes that this gives back.
    pub bytes: u64,
    /// Files of snapshots that go, as `COMMIT/FILE`.
    pub files: Vec<String>,
    links: Vec<PathBuf>,
    /// Snapshots of which nothing stays.
    commits: Vec<Commit>,
    refs: Vec<PathBuf>,
    blobs: Vec<String>,
}

impl CachedRepo {
    /// Plans to remove the repository, or one revision of it (a branch, a tag, a commit or the beginning
    /// of one), or one file, named as in `ORG/NAME:FILE`.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when there is no such thing in the cache.
    pub fn removal(&self, revision: Option<&Revision>, file: Option<&str>) -> Result<Removal> {
        let missing = |what: String| {
            let hint = "`ferrum list` shows what is there";
            FormatError::hub(&self.id.to_string(), what, hint)
        };
        match fs::symlink_metadata(&self.dir) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => {
                let hint = "remove the link yourself; what it leads to is not the cache's";
                return Err(FormatError::source(&self.dir, "is not a folder", hint));
            }
            Err(e) if is_absent(&e) => return Err(missing("is not in the cache".into())),
            Err(e) => return Err(FormatError::io(&self.dir, "open", &e)),
        }
        let mut removal = Removal {
            repo: self.clone(),
            whole: revision.is_none() && file.is_none(),
            bytes: 0,
            files: Vec::new(),
            links: Vec::new(),
            commits: Vec::new(),
            refs: Vec::new(),
            blobs: Vec::new(),
        };
        if !removal.whole {
            removal.plan(self.only(revision)?, file)?;
            if removal.commits.is_empty() && removal.files.is_empty() {
                let what = file.map_or("files".into(), |file| format!("\"{}\"", Shown(file)));
                return Err(missing(format!("has no {what} in the cache")));
            }
        }
        if removal.whole {
            removal.blobs = names_in(&self.dir.join("blobs"))?;
        }
        removal.bytes += removal
            .blobs
            .iter()
            .map(|blob| self.own_bytes(blob))
            .sum::<u64>();
        Ok(removal)
    }

    /// The commit that a revision means here; `None`: all of them.
    fn only(&self, revision: Option<&Revision>) -> Result<Option<Commit>> {
        let Some(revision) = revision else {
            return Ok(None);
        };
        let commits = self.commits()?;
        let meant = match self.commit(revision) {
            Ok(Some(commit)) if commits.contains(&commit) => Some(commit),
            _ => {
                let text = revision.as_str();
                let begins = |commit: &&Commit| commit.as_str().starts_with(text);
                let mut found = commits.iter().filter(begins);
                match (found.next(), found.next()) {
                    (Some(one), None) if text.len() >= MIN_PREFIX => Some(one.clone()),
                    _ => None,
                }
            }
        };
        meant.map(Some).ok_or_else(|| {
            let what = format!("has no revision \"{revision}\" in the cache");
            FormatError::hub(
                &self.id.to_string(),
                what,
                "`ferrum list` shows what is there",
            )
        })
    }

    fn commits(&self) -> Result<Vec<Commit>> {
        let names = names_in(&self.dir.join("snapshots"))?;
        Ok(names
            .iter()
            .filter_map(|name| Commit::parse(name).ok())
            .collect())
    }

    /// Bytes that end with a blob: none where it is a link to what repositories share.
    fn own_bytes(&self, blob: &str) -> u64 {
        let meta = fs::symlink_metadata(self.dir.join("blobs").join(blob));
        meta.map_or(0, |meta| if meta.is_file() { meta.len() } else { 0 })
    }
}

impl Removal {
    /// Finds what goes, and what of it nothing else uses.
    fn plan(&mut self, only: Option<Commit>, file: Option<&str>) -> Result<()> {
        let repo = self.repo.clone();
        let (mut going, mut staying) = (BTreeSet::new(), BTreeSet::new());
        let mut snapshots = 0;
        for commit in repo.commits()? {
            snapshots += 1;
            let ours = only.as_ref().is_none_or(|only| *only == commit);
            let mut stays = false;
            for entry in repo.files(&commit)? {
                if ours && file.is_none_or(|wanted| is_named(&entry.name, wanted)) {
                    match entry.blob {
                        Some(blob) => _ = going.insert(blob),
                        None => self.bytes += entry.bytes,
                    }
                    self.links.push(repo.snapshot(&commit).join(&entry.name));
                    self.files.push(format!("{commit}/{}", entry.name));
                } else {
                    stays = true;
                    staying.extend(entry.blob);
                }
            }
            if ours && !stays {
                self.commits.push(commit);
            }
        }
        if self.commits.len() == snapshots {
            self.whole = true;
            return Ok(());
        }
        for (commit, refs) in repo.refs()? {
            if self.commits.contains(&commit) {
                let folder = repo.dir.join("refs");
                self.refs.extend(refs.iter().map(|name| folder.join(name)));
            }
        }
        let unused = going
            .difference(&staying)
            .filter(|blob| Etag::parse(blob).is_ok());
        self.blobs = unused.cloned().collect();
        Ok(())
    }

    /// Does it.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when something of it is being downloaded, [`FormatError::Io`] when the system
    /// refuses.
    pub fn execute(self) -> Result<()> {
        let repo = &self.repo;
        let locks: Vec<_> = if self.whole {
            let names = names_in(&repo.locks)?.into_iter();
            names
                .filter_map(|name| Some(name.strip_suffix(".lock")?.to_owned()))
                .collect()
        } else {
            self.blobs.clone()
        };
        // Held to the end, so that no process starts to use what is removed.
        let mut held = Vec::new();
        for etag in locks.iter().filter_map(|name| Etag::parse(name).ok()) {
            let Some(lock) = repo.try_lock(&etag)? else {
                let hint = "wait for the other program, or end it";
                let reason = "is being downloaded";
                return Err(FormatError::hub(&repo.id.to_string(), reason, hint));
            };
            held.push(lock);
        }
        if self.whole {
            remove(&repo.dir, |path| fs::remove_dir_all(path))?;
            return remove(&repo.locks, |path| fs::remove_dir_all(path));
        }
        // What leads to a blob goes before it, so that whatever stops this half way leaves no dead links.
        for path in &self.refs {
            remove(path, |path| fs::remove_file(path))?;
        }
        for path in &self.links {
            remove(path, |path| fs::remove_file(path))?;
            prune(path, &repo.dir.join("snapshots"));
        }
        for commit in &self.commits {
            remove(&repo.snapshot(commit), |path| fs::remove_dir_all(path))?;
        }
        for blob in &self.blobs {
            remove(&repo.dir.join("blobs").join(blob), |path| {
                fs::remove_file(path)
            })?;
        }
        Ok(())
    }
}

fn remove(path: &Path, how: impl Fn(&Path) -> std::io::Result<()>) -> Result<()> {
    match how(path) {
        Err(e) if !is_absent(&e) => Err(FormatError::io(path, "remove", &e)),
        _ => Ok(()),
    }
}

/// Removes the folders that `path` leaves empty, below `root`.
fn prune(path: &Path, root: &Path) {
    let mut folder = path.parent();
    while let Some(empty) = folder.filter(|folder| *folder != root && folder.starts_with(root)) {
        // It ends at the first one that is not empty.
        if fs::remove_dir(empty).is_err() {
            return;
        }
        folder = empty.parent();
    }
}
