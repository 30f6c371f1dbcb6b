//! Writing a file of packed weights: under another name until it is whole, and removed if it never is.

use super::file::{ALIGN, CHUNK, EntryName, footer_of};
use crate::bytes::Bytes;
use crate::{FormatError, Result};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Write};
use std::path::PathBuf;
use twox_hash::xxhash3_64::Hasher;

/// Bytes that are written at once: several huge pages, so that the system keeps what is written in one go in such, and
/// begins each where one begins.
const AT_ONCE: usize = 8 << 20;

const ZEROS: [u8; ALIGN] = [0; ALIGN];

/// A packed weight to be written to a file.
#[derive(Clone, Copy, Debug)]
pub struct NewEntry<'a> {
    /// What it is called.
    pub name: EntryName,
    /// What it is.
    pub description: &'a [u8],
    /// Its panels, which come to lie one after the other, each at a multiple of 64.
    pub panels: &'a [&'a [u8]],
}

impl NewEntry<'_> {
    /// Bytes of its panels in a file.
    pub fn bytes(&self) -> u64 {
        let padded = self.panels.iter().map(|part| padded(part.len()) as u64);
        padded.sum()
    }
}

/// A length with what follows it up to the next place for panels. Slices are at most half of the address space.
fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// A file that is being written. Dropped before its end, it is gone.
pub struct Writer {
    file: File,
    path: PathBuf,
    /// Its name when it is whole.
    pub(super) destination: PathBuf,
    key: Vec<u8>,
    /// Bytes that were reserved for entries.
    room: u64,
    /// Bytes of the entries that were added.
    bytes: usize,
    /// Their number, and what the table says of them.
    entries: u64,
    rows: Vec<u8>,
    /// Batches that were written of what is being added.
    batches: usize,
    sums: Sums,
    done: bool,
}

impl Writer {
    /// Into the file `file` at `path`, which is called `destination` when it is whole. It has `room` for bytes of entries.
    pub(super) fn new(
        file: File,
        (path, destination): (PathBuf, PathBuf),
        key: Vec<u8>,
        room: u64,
    ) -> Self {
        Self {
            room,
            file,
            path,
            destination,
            key,
            bytes: 0,
            entries: 0,
            rows: Vec::new(),
            batches: 0,
            sums: Sums::default(),
            done: false,
        }
    }

    /// Appends `entries` while `go_on` returns true. Returns whether all are written. If not, another call with the
    /// same entries continues where this one stopped.
    ///
    /// # Errors
    /// [`FormatError::Io`]; the file is of no use then.
    pub(super) fn add(
        &mut self,
        entries: &[NewEntry<'_>],
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let mut panels = Panels::default();
        let parts = entries.iter().flat_map(|entry| entry.panels);
        parts.for_each(|part| panels.push(part));
        for batch in panels.batches().skip(self.batches) {
            if !go_on() {
                return Ok(false);
            }
            batch.iter().for_each(|slice| self.sums.add(slice));
            write_all(&mut self.file, &batch)
                .map_err(|e| FormatError::io(&self.path, "write", &e))?;
            self.batches += 1;
        }
        for entry in entries {
            self.add_row(entry);
        }
        self.batches = 0;
        Ok(true)
    }

    /// Appends an entry, and maps its panels as they came to lie in the file.
    ///
    /// # Errors
    /// [`FormatError::Source`] when that is more than was reserved, [`FormatError::Io`]; the file is of no use then.
    pub fn add_mapped(&mut self, entry: &NewEntry<'_>) -> Result<WrittenPanels> {
        let start = self.bytes;
        if (start as u64).saturating_add(entry.bytes()) > self.room {
            let what = "would be larger than the room that was reserved for it";
            return Err(FormatError::source(&self.path, what, ""));
        }
        self.add(std::slice::from_ref(entry), &|| true)?;
        Bytes::map_part(&self.file, &self.path, start..self.bytes).map(WrittenPanels)
    }

    /// Waits until what was added is on the disk: a model that computes with it must not lose it.
    ///
    /// # Errors
    /// [`FormatError::Io`]; the file is of no use then.
    pub fn sync(&mut self) -> Result<()> {
        let done = self.file.sync_data();
        done.map_err(|e| FormatError::io(&self.path, "write", &e))
    }

    /// Writes the table of what was added, and gives the file its name.
    pub(super) fn finish(&mut self) -> Result<()> {
        let table = self.table();
        let footer = footer_of(self.bytes, &table);
        for part in [table, footer] {
            let written = self.file.write_all(&part);
            written.map_err(|e| FormatError::io(&self.path, "write", &e))?;
        }
        std::fs::rename(&self.path, &self.destination)
            .map_err(|e| FormatError::io(&self.destination, "rename", &e))?;
        self.done = true;
        Ok(())
    }

    fn add_row(&mut self, entry: &NewEntry<'_>) {
        let len: usize = entry.panels.iter().map(|part| padded(part.len())).sum();
        self.rows.extend(entry.name);
        for number in [self.bytes, len] {
            self.rows.extend((number as u64).to_le_bytes());
        }
        put_text(&mut self.rows, entry.description);
        self.entries += 1;
        self.bytes += len;
    }

    fn table(&mut self) -> Vec<u8> {
        let mut table = Vec::new();
        put_text(&mut table, &self.key);
        let sums = std::mem::take(&mut self.sums).finish();
        table.extend(sums.into_iter().flat_map(u64::to_le_bytes));
        table.extend(self.entries.to_le_bytes());
        table.append(&mut self.rows);
        table
    }
}

/// Bytes after their length.
fn put_text(table: &mut Vec<u8>, bytes: &[u8]) {
    // Keys and descriptions are short; a longer one would not be found again.
    table.extend((bytes.len() as u32).to_le_bytes());
    table.extend(bytes);
}

/// Panels of an entry in a file that may still grow.
#[derive(Debug)]
pub struct WrittenPanels(Bytes);

impl AsRef<[u8]> for WrittenPanels {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Writer");
        shown.field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.done {
            // If this fails, a later reservation removes the file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Panels and the padding between them.
#[derive(Default)]
struct Panels<'a> {
    slices: Vec<&'a [u8]>,
    bytes: usize,
}

impl<'a> Panels<'a> {
    fn push(&mut self, panels: &'a [u8]) {
        let all = padded(panels.len());
        self.slices.push(panels);
        self.slices.push(&ZEROS[..all - panels.len()]);
        self.bytes += all;
    }

    /// All slices in batches of [`AT_ONCE`] bytes.
    fn batches(&self) -> impl Iterator<Item = Vec<&'a [u8]>> {
        let mut slices = self.slices.iter().copied();
        let mut rest: &[u8] = &[];
        std::iter::from_fn(move || {
            let (mut batch, mut room) = (Vec::new(), AT_ONCE);
            while room > 0 {
                if rest.is_empty() {
                    match slices.next() {
                        Some(next) => rest = next,
                        None => break,
                    }
                }
                let (now, later) = rest.split_at(room.min(rest.len()));
                if !now.is_empty() {
                    batch.push(now);
                }
                (rest, room) = (later, room - now.len());
            }
            (!batch.is_empty()).then_some(batch)
        })
    }
}

/// Checksums of chunks of what is added.
#[derive(Default)]
struct Sums {
    done: Vec<u64>,
    hasher: Hasher,
    in_chunk: usize,
}

impl Sums {
    fn add(&mut self, mut bytes: &[u8]) {
        use std::hash::Hasher as _;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.in_chunk));
            self.hasher.write(now);
            self.in_chunk += now.len();
            if self.in_chunk == CHUNK {
                self.end_chunk();
            }
            bytes = later;
        }
    }

    fn end_chunk(&mut self) {
        use std::hash::Hasher as _;
        let hasher = std::mem::take(&mut self.hasher);
        self.done.push(hasher.finish());
        self.in_chunk = 0;
    }

    fn finish(mut self) -> Vec<u64> {
        if self.in_chunk > 0 {
            self.end_chunk();
        }
        self.done
    }
}

/// Writes all slices, in as few calls as the system takes.
fn write_all(file: &mut File, slices: &[&[u8]]) -> std::io::Result<()> {
    let mut slices: Vec<_> = slices.iter().map(|slice| IoSlice::new(slice)).collect();
    let mut left = &mut slices[..];
    while !left.is_empty() {
        match file.write_vectored(left) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut left, n),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
