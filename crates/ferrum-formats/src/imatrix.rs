//! Importance matrices: for each column of a weight matrix, how large the activations are that it is
//! multiplied with.
//!
//! Two formats are read. The older one is a plain list: a count of entries; of each its name, the
//! number of calls, the number of values and the values, all as 32-bit numbers; then possibly the
//! number of the last chunk and the name of the text. The newer one is a GGUF file of
//! `general.type = imatrix`, with the tensors `NAME.in_sum2` (sums of squares) and `NAME.counts`.
//! Both give means of squares here, by the GGUF name of the weight.

use crate::error::Shown;
use crate::files::read_limited;
use crate::gguf::Gguf;
use crate::tensor::{TensorDtype, TensorSource};
use crate::{FormatError, Result};
use ferrum_types::Dtype;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Largest file of the older format; those of the largest models have some hundred MB.
const MAX_SIZE: u64 = 2 << 30;
/// Longest name of a tensor or a text.
const MAX_NAME: usize = 1 << 12;

/// Mean squares of activations by weight.
#[derive(Debug)]
pub struct Imatrix {
    /// The file, for messages and metadata.
    pub path: PathBuf,
    /// Name of the text that was measured with, where the file says.
    pub dataset: Option<String>,
    /// Chunks of that text, where the file says.
    pub chunks: Option<u32>,
    entries: HashMap<String, Vec<f32>>,
}

impl Imatrix {
    /// Reads either format.
    ///
    /// # Errors
    /// [`FormatError`] saying what is wrong with the file and where.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let found = match Gguf::open(path) {
            Ok(gguf) => Self::from_gguf(&gguf),
            Err(FormatError::Header { what: "magic", .. }) => {
                Self::from_list(path, &read_limited(path, MAX_SIZE)?)
            }
            Err(error) => Err(error),
        }?;
        if found.entries.is_empty() {
            let hint = "measure it with `llama-imatrix`";
            return Err(FormatError::source(
                path,
                "holds no importance of any tensor",
                hint,
            ));
        }
        Ok(found)
    }

    /// The mean squares for the weight of this GGUF name: one for each column; for a stack of
    /// experts those of one after the other.
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.entries.get(name).map(Vec::as_slice)
    }

    /// Number of weights that it tells about.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it tells of none; [`open`](Self::open) refuses such files.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Reads the bytes of the older format; `path` is for messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_list(path: &Path, bytes: &[u8]) -> Result<Self> {
        let mut list = List {
            path,
            bytes,
            pos: 0,
        };
        // An entry takes at least three numbers and a letter.
        let count = list.count("the entries", 13)?;
        let mut entries = HashMap::with_capacity(count);
        for _ in 0..count {
            let name = list.name()?;
            let calls = list.number(&name)?;
            let count = list.count(&name, 4)?;
            let values = list.floats(&name, count)?;
            let values = means(path, &name, values, &[calls as f32])?;
            add(path, &mut entries, name, values)?;
        }
        let (mut chunks, mut dataset) = (None, None);
        if list.pos < bytes.len() {
            chunks = u32::try_from(list.number("the last chunk")?).ok();
            if list.pos < bytes.len() {
                dataset = Some(list.name()?);
            }
        }
        Ok(Imatrix {
            path: path.into(),
            dataset,
            chunks,
            entries,
        })
    }

    /// Reads an open file of the newer format.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let path = gguf.path();
        let kind = gguf.str("general.type")?.unwrap_or("model");
        if kind != "imatrix" {
            let found = format!("\"{}\"", Shown(kind));
            let error = FormatError::field(path, "general.type", found, "\"imatrix\"");
            return Err(error.with_hint("give the file that `llama-imatrix` wrote"));
        }
        let mut entries = HashMap::new();
        for info in gguf.infos() {
            let Some(name) = info.name.strip_suffix(".in_sum2") else {
                continue;
            };
            let sums = floats(gguf, &info.name)?;
            let counts = floats(gguf, &format!("{name}.counts"))?;
            let values = means(path, name, sums, &counts)?;
            add(path, &mut entries, name.to_owned(), values)?;
        }
        let dataset = gguf.strs("imatrix.datasets")?.unwrap_or_default();
        Ok(Imatrix {
            path: path.into(),
            dataset: dataset.first().map(|name| (*name).to_owned()),
            chunks: gguf.u32("imatrix.chunk_count")?,
            entries,
        })
    }
}

fn add(
    path: &Path,
    entries: &mut HashMap<String, Vec<f32>>,
    name: String,
    values: Vec<f32>,
) -> Result<()> {
    match entries.contains_key(&name) {
        true => Err(FormatError::duplicate(path, "tensor", &name)),
        false => {
            entries.insert(name, values);
            Ok(())
        }
    }
}

/// Sums divided by their counts, of which there is one for each equal part. Parts that were never
/// used (an expert that no token took) weigh the same everywhere.
fn means(path: &Path, name: &str, mut sums: Vec<f32>, counts: &[f32]) -> Result<Vec<f32>> {
    let bad = |found: String, expected: &'static str| {
        Err(FormatError::tensor(path, name, found, expected))
    };
    if sums.is_empty() || counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
        let found = format!("{} values and {} counts", sums.len(), counts.len());
        return bad(found, "as many values for each count");
    }
    if let Some(wrong) = sums
        .iter()
        .chain(counts)
        .find(|v| !(v.is_finite() && **v >= 0.0))
    {
        return bad(format!("{wrong}"), "finite numbers of at least 0");
    }
    let part = sums.len() / counts.len();
    for (sums, &count) in sums.chunks_exact_mut(part).zip(counts) {
        if count > 0.0 {
            sums.iter_mut().for_each(|sum| *sum /= count);
        } else {
            sums.fill(1.0);
        }
    }
    Ok(sums)
}

/// A tensor of f32.
fn floats(gguf: &Gguf, name: &str) -> Result<Vec<f32>> {
    let view = gguf.require(name)?;
    if view.dtype != TensorDtype::Plain(Dtype::F32) {
        let found = format!("type {}", view.dtype);
        return Err(FormatError::tensor(gguf.path(), name, found, "type f32"));
    }
    let (values, _) = view.bytes.as_chunks::<4>();
    Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// A reading position in the older format.
struct List<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> List<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8]> {
        let rest = self.bytes.get(self.pos..).unwrap_or_default();
        match rest.get(..len) {
            Some(taken) => {
                self.pos += len;
                Ok(taken)
            }
            None => Err(FormatError::Truncated {
                path: self.path.into(),
                what: Shown(what).to_string(),
                offset: self.pos,
                needed: len as u64,
                remaining: rest.len(),
            }),
        }
    }

    fn number(&mut self, what: &str) -> Result<i32> {
        let bytes = self.take(4, what)?;
        Ok(bytes.try_into().map_or(0, i32::from_le_bytes))
    }

    /// Reads a count of elements of at least `size` bytes, checked against the bytes that remain.
    fn count(&mut self, what: &str, size: usize) -> Result<usize> {
        let found = self.number(what)?;
        let most = (self.bytes.len() - self.pos) / size;
        match usize::try_from(found) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(FormatError::header(
                self.path,
                "a count of the importance matrix",
                format_args!("{found} in {}", Shown(what)),
                format!("0 to {most}, what the rest of the file can hold"),
                "give a file that `llama-imatrix` wrote",
            )),
        }
    }

    fn name(&mut self) -> Result<String> {
        let len = self.count("the length of a name", 1)?;
        let bytes = self.take(len.min(MAX_NAME + 1), "a name")?;
        match std::str::from_utf8(bytes) {
            Ok(name) if (1..=MAX_NAME).contains(&len) => Ok(name.to_owned()),
            _ => Err(FormatError::header(
                self.path,
                "a name of the importance matrix",
                format_args!("{len} bytes at offset {}", self.pos),
                format!("1 to {MAX_NAME} bytes of UTF-8"),
                "give a file that `llama-imatrix` wrote",
            )),
        }
    }

    fn floats(&mut self, what: &str, count: usize) -> Result<Vec<f32>> {
        // `count` has been checked against the bytes that remain.
        let (values, _) = self.take(4 * count, what)?.as_chunks::<4>();
        Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}
