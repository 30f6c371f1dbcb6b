//! Names that come from a command line, a server or a cache folder.
//!
//! Each becomes part of a path or of a URL, so each is a type of its own that only holds what is
//! harmless as both: no step upwards, no absolute path, nothing that a file system reads differently.

use crate::error::Shown;
use crate::{FormatError, Result};
use std::fmt;

/// Longest name of an organisation or of a model, as the hub has it.
const MAX_PART: usize = 96;

/// Longest name of a file inside a repository, and of a revision.
const MAX_NAME: usize = 1024;

/// Longest part of a path that file systems take.
const MAX_SEGMENT: usize = 255;

/// Longest name of a blob.
const MAX_ETAG: usize = 128;

/// A repository of a hub: `ORG/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepoId {
    org: String,
    name: String,
}

impl RepoId {
    /// Reads `ORG/NAME`.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when it is no such name.
    pub fn parse(text: &str) -> Result<Self> {
        let parts = text.split_once('/').filter(|(org, name)| {
            let parts = [org, name];
            parts.iter().all(|part| is_repo_part(part))
        });
        let Some((org, name)) = parts else {
            let expected = "is no model of a hub, expected ORG/NAME of letters, digits, -, _ and .";
            return Err(FormatError::hub(text, expected, ""));
        };
        Ok(Self {
            org: org.to_owned(),
            name: name.to_owned(),
        })
    }

    /// The folder of the repository inside a cache, as every library of this layout names it.
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.name)
    }

    /// The repository that a folder inside a cache belongs to; `None` for data sets and strangers.
    pub fn of_folder(folder: &str) -> Option<Self> {
        let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
        Self::parse(&format!("{org}/{name}")).ok()
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.org, self.name)
    }
}

fn is_repo_part(part: &str) -> bool {
    (1..=MAX_PART).contains(&part.len())
        && part
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !part.starts_with(['-', '.'])
        && !part.ends_with(['-', '.'])
        && !part.contains("--")
        && !part.contains("..")
}

/// A model of a hub: `ORG/NAME`, or `ORG/NAME:FILE` for one file of it. `FILE` is a path inside the
/// repository or the end of a GGUF file's name, such as `Q4_K_M`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    /// The repository.
    pub repo: RepoId,
    /// The file, or what its name ends with.
    pub file: Option<String>,
}

impl ModelName {
    /// Reads `ORG/NAME[:FILE]`.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when it is no such name.
    pub fn parse(text: &str) -> Result<Self> {
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        let repo = RepoId::parse(repo)?;
        if let Some(file) = file {
            check_file_name(file)
                .map_err(|reason| FormatError::hub(text, format!("the file {reason}"), ""))?;
        }
        Ok(Self {
            repo,
            file: file.map(str::to_owned),
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{}:{file}", self.repo),
            None => self.repo.fmt(f),
        }
    }
}

/// A branch, a tag or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revision(String);

impl Revision {
    /// Reads the name of a branch or tag (`main`, `refs/pr/1`) or a commit's hash.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when it could not be one.
    pub fn parse(text: &str) -> Result<Self> {
        let harmless = |b: u8| b.is_ascii_alphanumeric() || b"-_./+@=,".contains(&b);
        if !text.starts_with('-') && text.bytes().all(harmless) && check_file_name(text).is_ok() {
            return Ok(Self(text.to_owned()));
        }
        let expected = "is no revision, expected a branch, a tag or a commit";
        Err(FormatError::hub(text, expected, ""))
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The commit, where it is one.
    pub fn as_commit(&self) -> Option<Commit> {
        Commit::parse(&self.0).ok()
    }
}

impl From<Commit> for Revision {
    fn from(commit: Commit) -> Self {
        Self(commit.0)
    }
}

impl Default for Revision {
    fn default() -> Self {
        Self("main".into())
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The hash of a commit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Commit(String);

impl Commit {
    /// Reads 40 (SHA-1) or 64 (SHA-256) hexadecimal digits in lower case.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when it is anything else.
    pub fn parse(text: &str) -> Result<Self> {
        if is_hex(text, 40) || is_hex(text, 64) {
            return Ok(Self(text.to_owned()));
        }
        let expected = "is no commit, expected 40 hexadecimal digits";
        Err(FormatError::hub(text, expected, ""))
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a file's contents, which is what its blob is called: the SHA-256 of a large file, the
/// git hash of a small one. Mirrors may have others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Etag(String);

impl Etag {
    /// Reads the value of an `ETag` header, with or without quotes.
    ///
    /// # Errors
    /// [`FormatError::Hub`] when it could not be the name of a file.
    pub fn parse(header: &str) -> Result<Self> {
        let text = header.trim();
        let text = text.strip_prefix("W/").unwrap_or(text);
        let text = text.trim_matches('"');
        let harmless = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        let length = (1..=MAX_ETAG).contains(&text.len());
        if length && !text.starts_with('.') && text.bytes().all(harmless) {
            return Ok(Self(text.to_owned()));
        }
        Err(FormatError::hub(header, "is no usable ETag", ""))
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is a SHA-256 of the contents.
    pub fn is_sha256(&self) -> bool {
        is_hex(&self.0, 64)
    }

    /// Whether it is git's SHA-1 of the contents as a blob.
    pub fn is_git_sha1(&self) -> bool {
        is_hex(&self.0, 40)
    }
}

impl fmt::Display for Etag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    text.len() == digits && text.bytes().all(hex)
}

/// Whether a name from outside is a path that stays inside the folder that it is joined to, on any
/// system.
///
/// # Errors
/// What is wrong with it, for a sentence about it.
pub fn check_file_name(name: &str) -> std::result::Result<(), String> {
    let shown = Shown(name);
    if name.len() > MAX_NAME {
        return Err(format!(
            "\"{shown}\" has {} bytes, the limit is {MAX_NAME}",
            name.len()
        ));
    }
    if name.contains(['\\', ':', '\0']) || name.chars().any(char::is_control) {
        return Err(format!("\"{shown}\" holds characters that no file should"));
    }
    let inside = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= MAX_SEGMENT;
    match name.split('/').all(inside) {
        true => Ok(()),
        false => Err(format!("\"{shown}\" is no path inside a folder")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::{Component, Path};

    #[test]
    fn names_of_models_are_read_and_others_refused() {
        for (text, repo, file) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
            ("a/b", "a/b", None),
            ("01-ai/Yi_1.5:Q4_K_M", "01-ai/Yi_1.5", Some("Q4_K_M")),
            ("o/n:sub/dir/x.gguf", "o/n", Some("sub/dir/x.gguf")),
        ] {
            let name = ModelName::parse(text).unwrap();
            assert_eq!(name.repo.to_string(), repo);
            assert_eq!(name.file.as_deref(), file);
            assert_eq!(name.to_string(), text);
        }
        let long = format!("a/{}", "b".repeat(97));
        for text in [
            "",
            "a",
            "a/",
            "/a",
            "a/b/c",
            "../b",
            "a/..",
            "a/.b",
            "a/b.",
            "-a/b",
            "a/b--c",
            "a/b..c",
            "a\\b/c",
            "a b/c",
            "a/b\n",
            "a/é",
            "a/b:",
            "a/b:/etc/passwd",
            "a/b:../c",
            "a/b:c/../d",
            "a/b:c\\d",
            "a/b:c:d",
            "a/b:c//d",
            "a/b:c\u{1b}d",
            "~/b",
            &long,
        ] {
            assert!(ModelName::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn folders_name_their_repository() {
        let repo = RepoId::parse("Qwen/Qwen3-0.6B").unwrap();
        assert_eq!(repo.folder(), "models--Qwen--Qwen3-0.6B");
        assert_eq!(RepoId::of_folder(&repo.folder()), Some(repo));
        for folder in [
            "datasets--a--b",
            "models--a",
            "models--",
            "models--a--b--c",
            "models--..--b",
            "a",
            "",
        ] {
            assert_eq!(RepoId::of_folder(folder), None, "{folder:?}");
        }
    }

    #[test]
    fn revisions_commits_and_etags_cannot_be_paths_elsewhere() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        for text in ["main", "refs/pr/1", "v1.0+cpu", commit] {
            assert_eq!(Revision::parse(text).unwrap().as_str(), text);
        }
        for text in [
            "", "..", "a/../b", "/a", "a//b", "-x", "a b", "a\nb", "a?b", "a%2fb", "a#b",
        ] {
            assert!(Revision::parse(text).is_err(), "{text:?}");
        }
        assert!(Revision::parse(commit).unwrap().as_commit().is_some());
        assert!(Commit::parse(&commit.to_uppercase()).is_err());
        assert!(Commit::parse(&commit[..39]).is_err());
        for (header, etag) in [
            ("\"abc\"", "abc"),
            ("W/\"abc-1\"", "abc-1"),
            (commit, commit),
        ] {
            assert_eq!(Etag::parse(header).unwrap().as_str(), etag);
        }
        let long = "a".repeat(129);
        for header in ["", "\"\"", "\"../x\"", "\".lock\"", "a/b", "a b", &long] {
            assert!(Etag::parse(header).is_err(), "{header:?}");
        }
    }

    proptest! {
        /// Whatever is let through stays inside the folder that it is joined to.
        #[test]
        fn file_names_stay_inside(name in "[a./\\\\: \u{0}-\u{1f}é]{0,12}") {
            if check_file_name(&name).is_ok() {
                let mut parts = Path::new(&name).components();
                prop_assert!(parts.all(|part| matches!(part, Component::Normal(_))));
                prop_assert!(!name.is_empty());
            }
        }

        #[test]
        fn no_name_panics(text in ".{0,40}") {
            let _ = ModelName::parse(&text);
            let _ = Revision::parse(&text);
            let _ = Etag::parse(&text);
            let _ = RepoId::of_folder(&text);
        }
    }
}
