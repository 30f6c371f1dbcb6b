//! A file of keys and values.
//!
//! ```text
//! magic, version (u32), length of the description (u32), length of the payload (u64)
//! description: what the payload is, compared or parsed by the reader
//! payload: blocks in stored bytes
//! checksum (u64) of all before it
//! ```
//!
//! Numbers are little-endian. Nothing is allocated for a length that the file does not have.

use crate::private_folder::{private, remove};
use crate::{FormatError, Result};
use std::fs::File;
use std::hash::Hasher as _;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use twox_hash::xxhash3_64::Hasher;

const MAGIC: [u8; 8] = *b"ferrumkv";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const CHECKSUM: usize = 8;

/// Bytes of a file with a description and a payload of these lengths.
pub(super) fn file_bytes(description: usize, payload: usize) -> u64 {
    (HEADER + CHECKSUM) as u64 + description as u64 + payload as u64
}

/// An open file whose header is right and whose description was read. Whether it is damaged is known once the
/// payload was read.
pub struct KvFile {
    file: File,
    path: PathBuf,
    hasher: Hasher,
    description: Vec<u8>,
    payload: u64,
}

impl std::fmt::Debug for KvFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("KvFile");
        shown.field("path", &self.path).finish_non_exhaustive()
    }
}

impl KvFile {
    /// Opens the file at `path`, whose description has at most `most` bytes.
    ///
    /// # Errors
    /// [`FormatError`] saying what is wrong with it.
    pub fn open(path: &Path, most: usize) -> Result<Self> {
        let open = |e| FormatError::io(path, "open", &e);
        let wrong = |what: &'static str| FormatError::source(path, what, "");
        // What is no file may never open.
        if !std::fs::metadata(path).map_err(open)?.is_file() {
            return Err(wrong("is not a regular file"));
        }
        let mut file = File::open(path).map_err(open)?;
        let meta = file.metadata().map_err(open)?;
        let short = || wrong("is too short for stored keys and values");
        if meta.len() < file_bytes(0, 0) {
            return Err(short());
        }
        let mut header = [0; HEADER];
        read(&mut file, path, &mut header)?;
        let number = |at: usize| header.get(at..).and_then(|rest| rest.first_chunk::<4>());
        let number = |at: usize| number(at).map_or(0, |bytes| u32::from_le_bytes(*bytes));
        if header[..8] != MAGIC {
            return Err(wrong("is no file of stored keys and values"));
        }
        if number(8) != VERSION {
            return Err(wrong("is of another version of stored keys and values"));
        }
        let description = u64::from(number(12));
        let payload = u64::from(number(16)) | u64::from(number(20)) << 32;
        let expected = payload.checked_add(description + (HEADER + CHECKSUM) as u64);
        if expected != Some(meta.len()) {
            return Err(wrong("has another length than it says"));
        }
        if description > most as u64 {
            return Err(wrong("has a description that is too long"));
        }
        let mut text = vec![0; description as usize];
        read(&mut file, path, &mut text)?;
        let mut hasher = Hasher::default();
        hasher.write(&header);
        hasher.write(&text);
        Ok(Self {
            file,
            path: path.to_owned(),
            hasher,
            description: text,
            payload,
        })
    }

    /// The writer's description of the payload. It is verified only when the payload has been read.
    pub fn description(&self) -> &[u8] {
        &self.description
    }

    /// Bytes of the payload, which the file has.
    pub fn payload_len(&self) -> u64 {
        self.payload
    }

    /// Whether the file at `path` is what was written, description and payload, without taking memory for it.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`into_payload`](Self::into_payload).
    pub fn verify(path: &Path, most: usize) -> Result<()> {
        let mut open = Self::open(path, most)?;
        let mut piece = vec![0; 1 << 20];
        let mut left = open.payload;
        while left > 0 {
            let size = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            read(&mut open.file, path, &mut piece[..size])?;
            open.hasher.write(&piece[..size]);
            left -= size as u64;
        }
        open.check_sum()
    }

    /// Reads the checksum at the end of the file and compares it.
    fn check_sum(&mut self) -> Result<()> {
        let mut sum = [0; CHECKSUM];
        read(&mut self.file, &self.path, &mut sum)?;
        match self.hasher.finish() == u64::from_le_bytes(sum) {
            true => Ok(()),
            false => Err(FormatError::source(&self.path, "is damaged", "")),
        }
    }

    /// The payload. The caller has checked its length against what it expects.
    ///
    /// # Errors
    /// When the file cannot be read, or is not what was written.
    pub fn into_payload(mut self) -> Result<Vec<u8>> {
        let len = usize::try_from(self.payload);
        let len = len.map_err(|_| FormatError::source(&self.path, "is too large", ""))?;
        let mut payload = vec![0; len];
        read(&mut self.file, &self.path, &mut payload)?;
        self.hasher.write(&payload);
        self.check_sum()?;
        // Without it, the file is removed sooner.
        let _ = self.file.set_modified(std::time::SystemTime::now());
        Ok(payload)
    }
}

fn read(file: &mut File, path: &Path, out: &mut [u8]) -> Result<()> {
    let read = file.read_exact(out);
    read.map_err(|e| FormatError::io(path, "read", &e))
}

/// Writes a file that only its user can read, in place of one that was there: whole, or not at all. `sync`: whether
/// it has to outlive a loss of power.
///
/// # Errors
/// [`FormatError::Io`], after which what was there is still there.
pub fn write(path: &Path, description: &[u8], payload: &[u8], sync: bool) -> Result<()> {
    let too_long = |_| FormatError::source(path, "would have too long a description", "");
    let length = u32::try_from(description.len()).map_err(too_long)?;
    let mut header = MAGIC.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend(length.to_le_bytes());
    header.extend((payload.len() as u64).to_le_bytes());
    header.extend(description);
    let mut hasher = Hasher::default();
    hasher.write(&header);
    hasher.write(payload);
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = PathBuf::from(partial);
    // What a process of this number left.
    remove(&partial)?;
    let file = private().create_new(true).open(&partial);
    let mut file = file.map_err(|e| FormatError::io(&partial, "create", &e))?;
    let sum = hasher.finish().to_le_bytes();
    let parts = [&header[..], payload, &sum];
    let written = parts.iter().try_for_each(|part| file.write_all(part));
    let written = written.and_then(|()| if sync { file.sync_all() } else { Ok(()) });
    let written = written.and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|e| {
        // Opening the folder removes what is left.
        let _ = std::fs::remove_file(&partial);
        FormatError::io(path, "write", &e)
    })
}
