//! Writing GGUF version 3.
//!
//! Metadata and tensor entries are declared first, because the header holds every offset; then the
//! tensors' bytes are streamed in the same order, so a file larger than memory can be written.

use super::tensors::byte_len;
use super::value::Value;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC};
use crate::{FormatError, Result};
use ferrum_types::GgufQuantType;
use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Collects the header of a new GGUF file.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    alignment: u32,
    keys: HashSet<String>,
    pairs: Vec<u8>,
    names: HashSet<String>,
    entries: Vec<u8>,
    layout: Vec<Pending>,
    /// Length of the data section so far, aligned.
    data_len: u64,
}

/// A declared tensor whose bytes are not written yet.
#[derive(Debug)]
struct Pending {
    name: String,
    /// Bytes that are still to come.
    left: u64,
    /// Zeros after the last byte.
    padding: usize,
}

impl Writer {
    /// A file without metadata or tensors; `path` is only used in messages.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Writer {
            path: path.into(),
            alignment: DEFAULT_ALIGNMENT,
            keys: HashSet::new(),
            pairs: Vec::new(),
            names: HashSet::new(),
            entries: Vec::new(),
            layout: Vec::new(),
            data_len: 0,
        }
    }

    /// Adds a metadata pair. `general.alignment` also sets the alignment of the tensors and must
    /// come before the first of them.
    ///
    /// # Errors
    /// [`FormatError::Duplicate`] for a key that is set already, [`FormatError::Field`] for an
    /// empty key, or an alignment that is no power of two or comes too late.
    pub fn set<'v>(&mut self, key: &str, value: impl Into<Value<'v>>) -> Result<()> {
        let value = value.into();
        if key.is_empty() {
            return Err(FormatError::field(
                &self.path,
                key,
                "an empty key",
                "a name",
            ));
        }
        if key == ALIGNMENT_KEY {
            self.alignment = match value.as_integer().and_then(|x| u32::try_from(x).ok()) {
                Some(n) if n.is_power_of_two() && self.layout.is_empty() => n,
                _ => {
                    let expected = "a power of two, before the first tensor";
                    return Err(FormatError::field(&self.path, key, value, expected));
                }
            };
        }
        if !self.keys.insert(key.to_owned()) {
            return Err(FormatError::duplicate(&self.path, "metadata key", key));
        }
        Value::Str(key).encode(&mut self.pairs);
        self.pairs.extend(value.value_type().id().to_le_bytes());
        value.encode(&mut self.pairs);
        Ok(())
    }

    /// Declares a tensor of `shape` (outermost first, `[rows, cols]`) stored as `kind`.
    ///
    /// # Errors
    /// [`FormatError::Duplicate`], or [`FormatError::Tensor`] for a shape that a reader would
    /// refuse.
    pub fn declare(&mut self, name: &str, shape: &[usize], kind: GgufQuantType) -> Result<()> {
        let refuse = |found: String, expected: &'static str| {
            Err(FormatError::tensor(&self.path, name, found, expected))
        };
        if name.is_empty() {
            return refuse("an empty name".into(), "a name");
        }
        if shape.len() > 4 {
            return refuse(format!("{} dimensions", shape.len()), "at most 4");
        }
        if shape.contains(&0) {
            return refuse(format!("shape {shape:?}"), "positive dimensions");
        }
        let len = byte_len(&self.path, name, shape, kind)? as u64;
        let end = self.data_len.checked_add(len);
        let Some(end) = end.and_then(|end| end.checked_next_multiple_of(self.alignment.into()))
        else {
            return refuse(format!("{len} bytes"), "a file below 2^64 bytes");
        };
        if !self.names.insert(name.to_owned()) {
            return Err(FormatError::duplicate(&self.path, "tensor", name));
        }
        Value::Str(name).encode(&mut self.entries);
        self.entries.extend((shape.len() as u32).to_le_bytes());
        for dim in shape.iter().rev() {
            self.entries.extend((*dim as u64).to_le_bytes());
        }
        self.entries.extend(kind.id().to_le_bytes());
        self.entries.extend(self.data_len.to_le_bytes());
        self.layout.push(Pending {
            name: name.to_owned(),
            left: len,
            padding: (end - self.data_len - len) as usize,
        });
        self.data_len = end;
        Ok(())
    }

    /// Writes the header to `out`; the tensors' bytes follow through the value returned.
    ///
    /// # Errors
    /// [`FormatError::Io`].
    pub fn start<W: Write>(self, out: W) -> Result<TensorWriter<W>> {
        let mut head = Vec::with_capacity(24 + self.pairs.len() + self.entries.len());
        head.extend(MAGIC);
        head.extend(3u32.to_le_bytes());
        head.extend((self.layout.len() as u64).to_le_bytes());
        head.extend((self.keys.len() as u64).to_le_bytes());
        head.extend(&self.pairs);
        head.extend(&self.entries);
        if !self.layout.is_empty() {
            head.resize(head.len().next_multiple_of(self.alignment as usize), 0);
        }
        let mut body = TensorWriter {
            path: self.path,
            out,
            layout: self.layout.into_iter(),
            current: None,
        };
        body.put(&head)?;
        body.current = body.layout.next();
        Ok(body)
    }
}

/// Streams the tensors' bytes of a file whose header is written.
#[derive(Debug)]
pub struct TensorWriter<W> {
    path: PathBuf,
    out: W,
    layout: std::vec::IntoIter<Pending>,
    /// The tensor being written, with the bytes that it still needs.
    current: Option<Pending>,
}

impl<W: Write> TensorWriter<W> {
    /// Appends bytes of tensor `name`, all at once or in pieces. Tensors come in the order in
    /// which they were declared.
    ///
    /// # Errors
    /// [`FormatError::Tensor`] for the wrong tensor or more bytes than its shape holds,
    /// [`FormatError::Io`].
    pub fn push(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let Some(current) = self.current.as_mut().filter(|t| t.name == name) else {
            let expected = match &self.current {
                Some(tensor) => format!("bytes of \"{}\"", tensor.name),
                None => "no more tensors".to_owned(),
            };
            return Err(FormatError::tensor(&self.path, name, "its bytes", expected));
        };
        let Some(left) = current.left.checked_sub(bytes.len() as u64) else {
            let found = format!("{} bytes", bytes.len());
            let expected = format!("at most {} more", current.left);
            return Err(FormatError::tensor(&self.path, name, found, expected));
        };
        current.left = left;
        let padding = if left == 0 { current.padding } else { 0 };
        self.put(bytes)?;
        if left == 0 {
            self.put(&vec![0; padding])?;
            self.current = self.layout.next();
        }
        Ok(())
    }

    /// Checks that every tensor was written whole, flushes, and gives `out` back.
    ///
    /// # Errors
    /// [`FormatError::Tensor`] naming the first unfinished tensor, [`FormatError::Io`].
    pub fn finish(mut self) -> Result<W> {
        if let Some(tensor) = &self.current {
            let found = format!("{} bytes missing", tensor.left);
            let expected = "all bytes of all tensors";
            return Err(FormatError::tensor(
                &self.path,
                &tensor.name,
                found,
                expected,
            ));
        }
        self.out.flush().map_err(|e| write_error(&self.path, &e))?;
        Ok(self.out)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .map_err(|e| write_error(&self.path, &e))
    }
}

fn write_error(path: &Path, e: &std::io::Error) -> FormatError {
    FormatError::io(path, "write", e)
}
