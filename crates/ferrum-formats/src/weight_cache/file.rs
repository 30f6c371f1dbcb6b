//! A file of packed weights.
//!
//! ```text
//! panels of all entries, each at a multiple of 64     mapped as they are, so they come first
//! table: the key, checksums of the panels, entries
//! footer: where the table lies, its checksum, its own
//! ```
//!
//! Numbers are little-endian. Every byte is under a checksum: panels in chunks of 4 MiB, so that several threads
//! can check them.

use crate::bytes::Bytes;
use crate::identity::FileIdentity;
use crate::{FormatError, Result};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use twox_hash::XxHash3_64;

/// Extension of the marker file beside a file, whose modification time is that of the last use.
pub(super) const STATE: &str = "state";
/// First bytes of a footer.
pub(super) const MAGIC: [u8; 8] = *b"ferrumpw";
/// Version of this layout.
pub(super) const VERSION: u64 = 1;
/// Bytes of the footer: magic, version, start and length of the table, its checksum, and that of the footer.
pub(super) const FOOTER: usize = 48;
/// Bytes of panels under one checksum.
pub(super) const CHUNK: usize = 4 << 20;
/// What panels are aligned to.
pub(super) const ALIGN: usize = 64;
/// Bytes of an entry in the table without its description.
const ENTRY: usize = 16 + 8 + 8 + 4;

/// The name of an entry: a hash of what its weight was packed from.
pub type EntryName = [u8; 16];

/// An open file of packed weights.
#[derive(Debug)]
pub struct PackedFile {
    bytes: Bytes,
    path: PathBuf,
    key: Range<usize>,
    checksums: Range<usize>,
    /// Descriptions and panels.
    entries: HashMap<EntryName, (Range<usize>, Range<usize>)>,
}

impl PackedFile {
    /// Maps the file at `path` and checks all of it but the panels.
    ///
    /// The file must not be rewritten or shortened while the value lives.
    ///
    /// # Errors
    /// [`FormatError`] saying what is wrong with it.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(path, Bytes::map(path)?)
    }

    /// Reads a file that lies in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_vec(name: &Path, bytes: Vec<u8>) -> Result<Self> {
        Self::parse(name, Bytes::Owned(bytes))
    }

    /// A file of these panels and this table with the checksums that it needs, for tests of what they keep out.
    #[doc(hidden)]
    pub fn sealed(panels: &[u8], table: &[u8]) -> Vec<u8> {
        [panels, table, &footer_of(panels.len(), table)].concat()
    }

    fn parse(path: &Path, bytes: Bytes) -> Result<Self> {
        let wrong = |what| FormatError::source(path, what, "");
        let table = footer(&bytes).map_err(wrong)?;
        let mut cursor = Cursor {
            bytes: &bytes[..table.end],
            at: table.start,
        };
        let short = || wrong("has a table that ends early");
        let key = cursor.text().ok_or_else(short)?;
        let chunks = table.start.div_ceil(CHUNK);
        let checksums = chunks.checked_mul(8).and_then(|len| cursor.take(len));
        let checksums = checksums.ok_or_else(short)?;
        let count = cursor.number().ok_or_else(short)?;
        if count > (table.end - cursor.at) / ENTRY {
            return Err(short());
        }
        let mut entries = HashMap::with_capacity(count);
        for _ in 0..count {
            let name = cursor.take(16).ok_or_else(short)?;
            let name = *bytes[name].as_array().ok_or_else(short)?;
            let (start, len) = (cursor.number(), cursor.number());
            let description = cursor.text().ok_or_else(short)?;
            let (start, len) = start.zip(len).ok_or_else(short)?;
            let end = start.checked_add(len).filter(|&end| end <= table.start);
            let end = end.filter(|_| start.is_multiple_of(ALIGN));
            let end = end.ok_or_else(|| wrong("has an entry outside of its panels"))?;
            entries.insert(name, (description, start..end));
        }
        if cursor.at != table.end {
            return Err(wrong("has a table that is longer than its entries"));
        }
        Ok(Self {
            path: path.to_owned(),
            bytes,
            key,
            checksums,
            entries,
        })
    }

    /// What the weights were packed from, as [`CacheKey`](super::CacheKey) wrote it.
    pub(super) fn key(&self) -> &[u8] {
        &self.bytes[self.key.clone()]
    }

    /// What the file was when it was opened.
    pub(super) fn identity(&self) -> Option<&FileIdentity> {
        self.bytes.identity()
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The description of an entry, and where in [the file](AsRef::as_ref) its panels are.
    pub fn entry(&self, name: &EntryName) -> Option<(&[u8], Range<usize>)> {
        let (description, panels) = self.entries.get(name)?;
        Some((&self.bytes[description.clone()], panels.clone()))
    }

    /// The names of all entries.
    pub fn names(&self) -> impl Iterator<Item = EntryName> {
        self.entries.keys().copied()
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the panels are those that were written, by `threads` threads.
    pub fn verify(&self, threads: usize) -> bool {
        let sums = self.bytes[self.checksums.clone()].as_chunks().0;
        // All before the table, which follows the panels.
        let panels = &self.bytes[..self.panel_bytes()];
        let chunks: Vec<_> = panels.chunks(CHUNK).zip(sums).collect();
        let right = |(chunk, sum): &(&[u8], &[u8; 8])| {
            XxHash3_64::oneshot(chunk) == u64::from_le_bytes(**sum)
        };
        let each = chunks.len().div_ceil(threads.max(1)).max(1);
        std::thread::scope(|scope| {
            let check = |part| scope.spawn(move || <[_]>::iter(part).all(right));
            let parts: Vec<_> = chunks.chunks(each).map(check).collect();
            let mut done = parts.into_iter().map(|part| part.join().unwrap_or(false));
            done.all(|part| part)
        })
    }

    /// Bytes of all panels.
    fn panel_bytes(&self) -> usize {
        self.table_start()
    }

    fn table_start(&self) -> usize {
        // The table begins with the length of the key, then the key.
        self.key.start - 4
    }

    /// Asks for huge pages, and has the file read and mapped before it is touched. That waits for the disk, so it is for a
    /// thread beside the one that computes.
    pub fn populate(&self) {
        self.bytes.populate();
    }

    /// Notes that the file is used. Without it, the file is removed sooner.
    pub fn set_used(&self) {
        let state = File::options()
            .write(true)
            .open(self.path.with_extension(STATE));
        let _ = state.and_then(|state| state.set_modified(SystemTime::now()));
    }
}

impl AsRef<[u8]> for PackedFile {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The table of a file, which its footer names.
fn footer(bytes: &[u8]) -> Result<Range<usize>, &'static str> {
    let end = bytes.len().checked_sub(FOOTER);
    let end = end.ok_or("is too short for packed weights")?;
    let words = bytes[end..].as_chunks::<8>().0;
    let number = |i: usize| words.get(i).map_or(0, |word| u64::from_le_bytes(*word));
    if words.first() != Some(&MAGIC) {
        return Err("is no file of packed weights");
    }
    if XxHash3_64::oneshot(&bytes[end..end + FOOTER - 8]) != number(5) {
        return Err("has a damaged footer");
    }
    if number(1) != VERSION {
        return Err("is of another version of packed weights");
    }
    let start = usize::try_from(number(2)).unwrap_or(usize::MAX);
    let len = usize::try_from(number(3)).unwrap_or(usize::MAX);
    if start.checked_add(len) != Some(end) {
        return Err("has a table at another place than before its footer");
    }
    if XxHash3_64::oneshot(&bytes[start..end]) != number(4) {
        return Err("has a damaged table");
    }
    Ok(start..end)
}

/// The footer of a file whose table begins at `start`.
pub(super) fn footer_of(start: usize, table: &[u8]) -> Vec<u8> {
    let mut footer = MAGIC.to_vec();
    let sum = XxHash3_64::oneshot(table);
    for number in [VERSION, start as u64, table.len() as u64, sum] {
        footer.extend(number.to_le_bytes());
    }
    let own = XxHash3_64::oneshot(&footer);
    footer.extend(own.to_le_bytes());
    footer
}

/// What is read of a table.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let end = self.at.checked_add(len)?;
        self.bytes.get(self.at..end)?;
        let range = self.at..end;
        self.at = end;
        Some(range)
    }

    fn number(&mut self) -> Option<usize> {
        let range = self.take(8)?;
        let bytes = *self.bytes[range].as_array()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    }

    /// Bytes that follow their length.
    fn text(&mut self) -> Option<Range<usize>> {
        let range = self.take(4)?;
        let len = u32::from_le_bytes(*self.bytes[range].as_array()?);
        self.take(usize::try_from(len).ok()?)
    }
}
