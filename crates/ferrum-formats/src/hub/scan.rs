//! What a cache holds.

use super::cache::{CachedRepo, HubCache, SnapshotFile, is_absent};
use super::names::{Commit, RepoId, Revision};
use crate::{FormatError, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Folders within folders of `refs`.
const MAX_DEPTH: usize = 8;

/// Refs and snapshots of one repository.
const MAX_ENTRIES: usize = 10_000;

/// A repository of which a cache holds something.
#[derive(Debug, Clone)]
pub struct CachedModel {
    /// Which.
    pub repo: RepoId,
    /// Bytes that it takes: its blobs, those of other downloads' beginnings included.
    pub bytes: u64,
    /// Its commits, sorted.
    pub snapshots: Vec<CachedSnapshot>,
}

/// A commit of which a cache holds something.
#[derive(Debug, Clone)]
pub struct CachedSnapshot {
    /// Which.
    pub commit: Commit,
    /// Branches and tags that mean it.
    pub refs: Vec<String>,
    /// Its files.
    pub files: Vec<SnapshotFile>,
}

impl HubCache {
    /// The models in the cache, sorted by name, and what is wrong with those that cannot be read.
    ///
    /// # Errors
    /// [`FormatError::Io`] when the folder itself cannot be read. A cache that is not there is empty.
    pub fn models(&self) -> Result<(Vec<CachedModel>, Vec<FormatError>)> {
        let (mut models, mut problems) = (Vec::new(), Vec::new());
        for name in names_in(self.root())? {
            let Some(repo) = RepoId::of_folder(&name) else {
                continue;
            };
            match self.repo(&repo).scan() {
                Ok(model) => models.push(model),
                Err(problem) => problems.push(problem),
            }
        }
        models.sort_by(|a, b| a.repo.cmp(&b.repo));
        Ok((models, problems))
    }
}

impl CachedRepo {
    /// Everything that is there of this repository.
    ///
    /// # Errors
    /// What cannot be read, and links that lead out of the cache.
    pub fn scan(&self) -> Result<CachedModel> {
        let mut refs = self.refs()?;
        let mut snapshots = Vec::new();
        for name in names_in(&self.dir.join("snapshots"))? {
            let Ok(commit) = Commit::parse(&name) else {
                continue;
            };
            snapshots.push(CachedSnapshot {
                files: self.files(&commit)?,
                refs: refs.remove(&commit).unwrap_or_default(),
                commit,
            });
        }
        snapshots.sort_by(|a, b| a.commit.cmp(&b.commit));
        let mut bytes = 0;
        for name in names_in(&self.dir.join("blobs"))? {
            // Of a link to what repositories share, the link is what is here.
            if let Ok(meta) = fs::symlink_metadata(self.dir.join("blobs").join(name)) {
                bytes += meta.len();
            }
        }
        let copies = snapshots.iter().flat_map(|snapshot| &snapshot.files);
        let copies = copies.filter(|file| file.blob.is_none());
        bytes += copies.map(|file| file.bytes).sum::<u64>();
        Ok(CachedModel {
            repo: self.id.clone(),
            bytes,
            snapshots,
        })
    }

    /// The branches and tags of each commit. Refs that cannot be read are left out.
    pub(super) fn refs(&self) -> Result<BTreeMap<Commit, Vec<String>>> {
        let mut found: BTreeMap<Commit, Vec<String>> = BTreeMap::new();
        let root = self.dir.join("refs");
        let mut folders = vec![(String::new(), 0)];
        let mut seen = 0;
        while let Some((prefix, depth)) = folders.pop() {
            for name in names_in(&root.join(&prefix))? {
                seen += 1;
                let name = format!("{prefix}{name}");
                let path = root.join(&name);
                let Ok(kind) = fs::symlink_metadata(&path).map(|meta| meta.file_type()) else {
                    continue;
                };
                if kind.is_dir() && depth < MAX_DEPTH && seen < MAX_ENTRIES {
                    folders.push((format!("{name}/"), depth + 1));
                }
                let Ok(revision) = Revision::parse(&name) else {
                    continue;
                };
                if let (true, Ok(Some(commit))) = (kind.is_file(), self.commit(&revision)) {
                    found.entry(commit).or_default().push(name);
                }
            }
        }
        found.values_mut().for_each(|names| names.sort());
        Ok(found)
    }
}

/// The names in a folder; none if there is no such folder.
pub(super) fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if is_absent(&e) => return Ok(Vec::new()),
        Err(e) => return Err(FormatError::io(folder, "read", &e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| FormatError::io(folder, "read", &e))?;
        names.extend(entry.file_name().into_string().ok());
    }
    Ok(names)
}
