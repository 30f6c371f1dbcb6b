//! Writing a file of packed weights: under another name until it is whole, and removed if it never is.

use super::file::{ALIGN, CHUNK, EntryName, footer_of};
use crate::{FormatError, Result};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Write};
use std::path::PathBuf;
use twox_hash::xxhash3_64::Hasher;

/// Bytes that are written at once: several huge pages, so that the system keeps them in such, and begins each
/// where one begins.
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
    /// Batches that were written.
    batches: usize,
    sums: Sums,
    done: bool,
}

impl Writer {
    /// Into the file `file` at `path`, which is called `destination` when it is whole.
    pub(super) fn new(file: File, path: PathBuf, destination: PathBuf, key: Vec<u8>) -> Self {
        Self {
            file,
            path,
            destination,
            key,
            batches: 0,
            sums: Sums::default(),
            done: false,
        }
    }

    /// See [`WeightCache::write`](super::WeightCache::write).
    pub(super) fn write(
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
        let table = self.table(entries);
        let footer = footer_of(panels.bytes, &table);
        for part in [table, footer] {
            let written = self.file.write_all(&part);
            written.map_err(|e| FormatError::io(&self.path, "write", &e))?;
        }
        std::fs::rename(&self.path, &self.destination)
            .map_err(|e| FormatError::io(&self.destination, "rename", &e))?;
        self.done = true;
        Ok(true)
    }

    fn table(&mut self, entries: &[NewEntry<'_>]) -> Vec<u8> {
        let mut table = Vec::new();
        let put_text = |table: &mut Vec<u8>, bytes: &[u8]| {
            // Keys and descriptions are short; a longer one would not be found again.
            table.extend((bytes.len() as u32).to_le_bytes());
            table.extend(bytes);
        };
        put_text(&mut table, &self.key);
        let sums = std::mem::take(&mut self.sums).finish();
        table.extend(sums.into_iter().flat_map(u64::to_le_bytes));
        table.extend((entries.len() as u64).to_le_bytes());
        let mut start = 0;
        for entry in entries {
            let len = entry.bytes();
            table.extend(entry.name);
            table.extend(u64::to_le_bytes(start));
            table.extend(len.to_le_bytes());
            put_text(&mut table, entry.description);
            start += len;
        }
        table
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
