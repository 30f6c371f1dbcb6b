//! Files of models: extensions, listings of folders, and small text files.

use crate::{FormatError, Result};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Extensions of Python pickles, which can run code when loaded and are never read.
pub(crate) const PICKLES: &[&str] = &["bin", "pt", "pth", "ckpt", "pkl"];

pub(crate) const CONVERT_HINT: &str =
    "pickles can run code when loaded; convert the model to safetensors or GGUF first";

/// The extension of a path in lower case; empty if it has none.
pub(crate) fn extension_of(path: &Path) -> String {
    path.extension()
        .map(|e| e.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default()
}

/// The error for a Python pickle.
pub(crate) fn pickle_error(path: &Path) -> FormatError {
    FormatError::source(path, "is a Python pickle", CONVERT_HINT)
}

/// The files in `dir` with one of these extensions, sorted.
pub(crate) fn files_with_extension(dir: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let error = |e: std::io::Error| FormatError::io(dir, "read", &e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(error)? {
        let path = entry.map_err(error)?.path();
        if extensions.contains(&extension_of(&path).as_str()) && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads a text file of at most `limit` bytes.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let open = |e| FormatError::io(path, "open", &e);
    let meta = std::fs::metadata(path).map_err(open)?;
    if !meta.is_file() {
        return Err(FormatError::source(path, "is not a regular file", ""));
    }
    let file = std::fs::File::open(path).map_err(open)?;
    let mut text = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut text)
        .map_err(|e| FormatError::io(path, "read", &e))?;
    if text.len() as u64 > limit {
        let found = meta.len().max(limit + 1);
        return Err(FormatError::limit(path, "size in bytes", found, limit));
    }
    Ok(text)
}
