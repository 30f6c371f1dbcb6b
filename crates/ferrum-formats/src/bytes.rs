//! Where a file's bytes come from: a memory map, the binary itself, or a buffer.
//!
//! Weights are read in place, so loading costs no copy and no memory of its own; the pages belong
//! to the system's cache.

use crate::identity::FileIdentity;
use crate::{FormatError, Result};
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;

/// Immutable bytes of a whole file.
#[derive(Debug)]
pub(crate) enum Bytes {
    /// A mapped file, with what it was when it was opened.
    Mapped(Mmap, Option<Box<FileIdentity>>),
    /// Part of the program.
    Static(&'static [u8]),
    /// A buffer.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps the file at `path` for reading.
    pub(crate) fn map(path: &Path) -> Result<Self> {
        let open_error = |e| FormatError::io(path, "open", &e);
        // Asked before opening: opening a pipe would wait for a writer.
        let meta = std::fs::metadata(path).map_err(open_error)?;
        if !meta.is_file() {
            return Err(FormatError::source(path, "is not a regular file", ""));
        }
        if meta.len() == 0 {
            // An empty file cannot be mapped; the parser above says what is wrong with it.
            return Ok(Bytes::Static(&[]));
        }
        let file = File::open(path).map_err(open_error)?;
        // SAFETY: the map is read-only and private to this value, and it is only handed out as
        // `&[u8]` that borrows it. The one obligation left is that the file is not shortened or
        // rewritten while it is mapped, which no program can enforce; as every other engine that maps
        // its weights, we document it (`Gguf::open`, `Safetensors::open`). No invariant of a Rust
        // type depends on the contents: readers re-check lengths whenever they decode.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| FormatError::io(path, "map", &e))?;
        // Of the file that was opened, whatever is at the path by now.
        let identity = file.metadata().ok();
        let identity = identity.and_then(|meta| FileIdentity::new(path, &meta));
        Ok(Bytes::Mapped(map, identity.map(Box::new)))
    }

    /// Maps a part of an open file whose name for messages is `path`.
    pub(crate) fn map_part(file: &File, path: &Path, part: Range<usize>) -> Result<Self> {
        if part.is_empty() {
            return Ok(Bytes::Static(&[]));
        }
        let mut options = MmapOptions::new();
        options.offset(part.start as u64).len(part.len());
        // SAFETY: as in `map`; files that are mapped in parts are our own and only grow.
        let map = unsafe { options.map(file) }.map_err(|e| FormatError::io(path, "map", &e))?;
        Ok(Bytes::Mapped(map, None))
    }

    /// What the mapped file was when it was opened; `None` for what is no file.
    pub(crate) fn identity(&self) -> Option<&FileIdentity> {
        match self {
            Bytes::Mapped(_, identity) => identity.as_deref(),
            Bytes::Static(_) | Bytes::Owned(_) => None,
        }
    }

    /// Asks for huge pages, and has the system read the file and map its pages before they are touched.
    pub(crate) fn populate(&self) {
        #[cfg(target_os = "linux")]
        if let Bytes::Mapped(map, _) = self {
            // Advice: whatever fails costs speed alone.
            let _ = map.advise(memmap2::Advice::HugePage);
            let _ = map.advise(memmap2::Advice::PopulateRead);
        }
    }

    /// Gives the pages of a mapped file back to the system. They are read again at the next access;
    /// until then they do not count as this process's memory.
    pub(crate) fn release(&self) {
        #[cfg(unix)]
        if let Bytes::Mapped(map, _) = self {
            // SAFETY: the map is of a file and read-only, so dropped pages come back with the
            // file's bytes: nothing that anybody wrote is lost, and no borrow sees a change.
            let advice = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
            // Only memory is at stake.
            drop(advice);
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map, _) => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }
}
