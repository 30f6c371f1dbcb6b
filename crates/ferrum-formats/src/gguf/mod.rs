//! GGUF: one file with typed metadata and tensors, versions 2 and 3, little-endian.
//!
//! Layout, from the GGUF specification: `"GGUF"`, version, tensor count, metadata count; the
//! metadata pairs; the tensor entries (name, dimensions innermost first, ggml type, offset); padding
//! to `general.alignment`; then the tensors' bytes, each at its aligned offset.
//!
//! The whole header is checked when the file is opened, so that later reads cannot fail: every
//! count against the bytes that remain before anything is allocated for it, every string for
//! UTF-8, every tensor for a size that fits its type and for a place of its own inside the file.
//! The room knows nothing of what the keys mean; families and tokenizers do.

mod cursor;
mod parts;
mod tensors;
mod value;
mod writer;

pub use value::{Array, ArrayBuf, Number, Value, ValueType};
pub use writer::{TensorWriter, Writer};

use crate::bytes::Bytes;
use crate::error::Shown;
use crate::identity::FileIdentity;
use crate::tensor::{TensorInfo, TensorSource, TensorView};
use crate::{FormatError, Result};
use cursor::Cursor;
use std::ops::Range;
use std::path::{Path, PathBuf};
use value::{FromValue, MAX_ARRAY_DEPTH};

const MAGIC: [u8; 4] = *b"GGUF";
/// Where tensors lie when `general.alignment` does not say.
const DEFAULT_ALIGNMENT: u32 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

/// An open GGUF file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    bytes: Bytes,
    version: u32,
    alignment: usize,
    metadata: Vec<MetaEntry>,
    /// Indices into `metadata`, sorted by key.
    by_key: Vec<u32>,
    tensors: tensors::TensorTable,
    /// Further files of the same model.
    parts: Vec<Gguf>,
}

/// Where a metadata pair lies in the file.
#[derive(Debug)]
struct MetaEntry {
    key: Range<usize>,
    ty: ValueType,
    value: Range<usize>,
}

/// A value that a model may give once or once per layer.
#[derive(Clone, Debug, PartialEq)]
pub enum PerLayer<T> {
    /// One value for all layers.
    All(T),
    /// One value for each layer.
    Each(Vec<T>),
}

impl<T: Copy> PerLayer<T> {
    /// The value of layer `i`, `None` when the list is too short.
    pub fn get(&self, i: usize) -> Option<T> {
        match self {
            PerLayer::All(x) => Some(*x),
            PerLayer::Each(list) => list.get(i).copied(),
        }
    }
}

impl Gguf {
    /// Maps and checks the file at `path`. Nothing is copied but the header's tables.
    ///
    /// The file must not be rewritten or shortened while the value lives.
    ///
    /// # Errors
    /// [`FormatError`] saying what is wrong with the file and where.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path.to_owned(), Bytes::map(path)?)
    }

    /// Reads a file that is part of the program (`include_bytes!`).
    ///
    /// # Errors
    /// As [`Gguf::open`]; messages call the file `<embedded>`.
    pub fn from_static(bytes: &'static [u8]) -> Result<Self> {
        Self::parse("<embedded>".into(), Bytes::Static(bytes))
    }

    /// Reads a file that lies in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn from_vec(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self> {
        Self::parse(name.into(), Bytes::Owned(bytes))
    }

    fn parse(path: PathBuf, bytes: Bytes) -> Result<Self> {
        let mut cursor = Cursor::new(&path, &bytes);
        let version = read_version(&mut cursor)?;
        // Smallest entries: an empty name, no dimensions; a one-letter key, a one-byte value.
        let tensor_count = cursor.count(24, format_args!("the tensor table"))?;
        let pair_count = cursor.count(14, format_args!("the metadata"))?;
        let metadata = (0..pair_count)
            .map(|_| read_pair(&mut cursor, &bytes))
            .collect::<Result<Vec<_>>>()?;
        let by_key = sort_keys(&path, &bytes, &metadata)?;
        let alignment = read_alignment(&path, &bytes, &metadata, &by_key)?;
        let tensors =
            tensors::TensorTable::read(&mut cursor, bytes.len(), tensor_count, alignment)?;
        Ok(Gguf {
            alignment,
            version,
            metadata,
            by_key,
            tensors,
            path,
            bytes,
            parts: Vec::new(),
        })
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the files of the model were when they were opened; `None` when one is no file.
    pub(crate) fn identities(&self) -> Option<Vec<FileIdentity>> {
        let own = self.bytes.identity().cloned();
        let parts = self.parts.iter().map(|part| part.bytes.identity().cloned());
        std::iter::once(own).chain(parts).collect()
    }

    /// Version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data in bytes.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Size of the whole file in bytes.
    pub fn file_len(&self) -> usize {
        self.bytes.len()
    }

    /// Every metadata pair in the order of the file.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.metadata
            .iter()
            .filter_map(|entry| Some((key_of(&self.bytes, entry), self.decode(entry)?)))
    }

    /// The value of `key`.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        let entry = find(&self.bytes, &self.metadata, &self.by_key, key)?;
        self.decode(entry)
    }

    /// Whether `key` is there, whatever its type.
    pub fn has(&self, key: &str) -> bool {
        find(&self.bytes, &self.metadata, &self.by_key, key).is_some()
    }

    fn decode(&self, entry: &MetaEntry) -> Option<Value<'_>> {
        let bytes = self.bytes.get(entry.value.clone())?;
        Value::split(entry.ty, bytes, MAX_ARRAY_DEPTH).map(|(value, _)| value)
    }

    fn read<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match T::from_value(value) {
                Some(x) => Ok(Some(x)),
                None => Err(FormatError::field(&self.path, key, value, T::EXPECTED)),
            },
        }
    }

    fn require_as<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.read(key)?
            .ok_or_else(|| FormatError::missing_field(&self.path, key, T::EXPECTED))
    }

    fn read_list<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<Vec<T>>> {
        let array = match self.value(key) {
            None => return Ok(None),
            Some(Value::Array(array)) => array,
            Some(other) => {
                let expected = format!("an array, each element {}", T::EXPECTED);
                return Err(FormatError::field(&self.path, key, other, expected));
            }
        };
        let wrong = |i: usize, found: &dyn std::fmt::Display| {
            let expected = format!("{} in each element", T::EXPECTED);
            let found = format_args!("{found} at index {i}").to_string();
            Err(FormatError::field(&self.path, key, found, expected))
        };
        // The length was checked against the file; an element takes at least a byte there.
        let mut list = Vec::with_capacity(array.len());
        for (i, value) in array.iter().enumerate() {
            match T::from_value(value) {
                Some(x) => list.push(x),
                None => return wrong(i, &value),
            }
        }
        if list.len() != array.len() {
            return wrong(list.len(), &"changed bytes");
        }
        Ok(Some(list))
    }

    fn require_list<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Vec<T>> {
        self.read_list(key)?.ok_or_else(|| {
            let expected = format!("an array, each element {}", T::EXPECTED);
            FormatError::missing_field(&self.path, key, expected)
        })
    }

    /// A `u32` per layer: an array of integers, or one integer for all.
    ///
    /// # Errors
    /// [`FormatError::Field`] for any other type.
    pub fn u32_per_layer(&self, key: &str) -> Result<Option<PerLayer<u32>>> {
        match self.value(key) {
            Some(Value::Array(_)) => Ok(self.read_list(key)?.map(PerLayer::Each)),
            _ => Ok(self.read(key)?.map(PerLayer::All)),
        }
    }

    /// A truth value per layer: an array of bools, or one bool for all.
    ///
    /// # Errors
    /// [`FormatError::Field`] for any other type.
    pub fn bool_per_layer(&self, key: &str) -> Result<Option<PerLayer<bool>>> {
        match self.value(key) {
            Some(Value::Array(_)) => Ok(self.read_list(key)?.map(PerLayer::Each)),
            _ => Ok(self.read(key)?.map(PerLayer::All)),
        }
    }

    /// `general.architecture` (`llama`, `qwen3`, …), the prefix of the model's own keys.
    ///
    /// # Errors
    /// [`FormatError`] when it is missing or no string.
    pub fn architecture(&self) -> Result<&str> {
        self.require_str("general.architecture")
    }
}

macro_rules! getters {
    ($($what:literal $t:ty: $get:ident $require:ident, $gets:ident $requires:ident;)*) => {
        impl Gguf {$(
            #[doc = concat!("The value of `key` as ", $what, "; `None` when there is no such key.")]
            ///
            /// # Errors
            /// [`FormatError::Field`] when the value has another type or does not fit.
            pub fn $get(&self, key: &str) -> Result<Option<$t>> {
                self.read(key)
            }

            #[doc = concat!("The value of `key` as ", $what, ".")]
            ///
            /// # Errors
            /// [`FormatError::MissingField`], or [`FormatError::Field`] when the value has another
            /// type or does not fit.
            pub fn $require(&self, key: &str) -> Result<$t> {
                self.require_as(key)
            }

            #[doc = concat!("The array at `key`, each element as ", $what, "; `None` when there is no such key.")]
            ///
            /// # Errors
            /// [`FormatError::Field`] when it is no array or an element does not fit.
            pub fn $gets(&self, key: &str) -> Result<Option<Vec<$t>>> {
                self.read_list(key)
            }

            #[doc = concat!("The array at `key`, each element as ", $what, ".")]
            ///
            /// # Errors
            /// [`FormatError::MissingField`], or [`FormatError::Field`] when it is no array or an
            /// element does not fit.
            pub fn $requires(&self, key: &str) -> Result<Vec<$t>> {
                self.require_list(key)
            }
        )*}
    };
}
getters! {
    "a `u32` (any integer type that fits)" u32: u32 require_u32, u32s require_u32s;
    "a `u64` (any integer type that fits)" u64: u64 require_u64, u64s require_u64s;
    "a `usize` (any integer type that fits)" usize: usize require_usize, usizes require_usizes;
    "an `i32` (any integer type that fits)" i32: i32 require_i32, i32s require_i32s;
    "an `f32` (either float type)" f32: f32 require_f32, f32s require_f32s;
    "a truth value" bool: bool require_bool, bools require_bools;
    "text" &str: str require_str, strs require_strs;
}

impl TensorSource for Gguf {
    fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let Some((info, place)) = self.tensors.find(name) else {
            return self.parts.iter().find_map(|part| part.get(name));
        };
        Some(TensorView {
            name: &info.name,
            shape: &info.shape,
            dtype: info.dtype,
            bytes: self.bytes.get(place)?,
        })
    }

    fn infos(&self) -> Box<dyn Iterator<Item = &TensorInfo> + '_> {
        let parts = self.parts.iter().flat_map(|part| part.infos());
        Box::new(self.tensors.infos().chain(parts))
    }

    fn path_hint(&self) -> &Path {
        &self.path
    }

    fn release(&self) {
        self.bytes.release();
        self.parts.iter().for_each(Gguf::release);
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32> {
    let path = cursor.path;
    let magic = cursor.u32(format_args!("the GGUF magic"))?.to_le_bytes();
    if magic != MAGIC {
        let found = format!("{:?}", magic.escape_ascii().to_string());
        return Err(FormatError::header(
            path,
            "magic",
            found,
            "\"GGUF\"",
            "this is no GGUF file",
        ));
    }
    let version = cursor.u32(format_args!("the GGUF version"))?;
    match version {
        2 | 3 => Ok(version),
        1 => Err(FormatError::header(
            path,
            "GGUF version",
            version,
            "2 or 3",
            "version 1 is no longer written; convert the model again with a current converter",
        )),
        v if v & 0xffff == 0 => Err(FormatError::header(
            path,
            "byte order",
            format_args!("big-endian GGUF version {}", v.swap_bytes()),
            "little-endian",
            "convert it with gguf-py's gguf_convert_endian.py",
        )),
        v => Err(FormatError::header(path, "GGUF version", v, "2 or 3", "")),
    }
}

fn read_pair(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Result<MetaEntry> {
    let path = cursor.path;
    let what = format_args!("a metadata key");
    let key = match cursor.string(what)? {
        Ok("") => {
            let at = format!("empty text before offset {}", cursor.pos());
            return Err(FormatError::header(path, "metadata key", at, "a name", ""));
        }
        Ok(key) => key,
        Err(e) => {
            return Err(FormatError::header(
                path,
                "metadata key",
                e,
                "UTF-8 text",
                "",
            ));
        }
    };
    let end = cursor.pos();
    debug_assert_eq!(bytes.get(end - key.len()..end), Some(key.as_bytes()));
    let id = cursor.u32(format_args!("the type of metadata key \"{}\"", Shown(key)))?;
    let ty = cursor::value_type(path, key, id)?;
    let value = cursor.value(key, ty)?;
    Ok(MetaEntry {
        key: end - key.len()..end,
        ty,
        value,
    })
}

fn key_of<'a>(bytes: &'a [u8], entry: &MetaEntry) -> &'a str {
    let key = bytes.get(entry.key.clone()).unwrap_or_default();
    std::str::from_utf8(key).unwrap_or_default()
}

fn sort_keys(path: &Path, bytes: &[u8], metadata: &[MetaEntry]) -> Result<Vec<u32>> {
    let too_many = |_| {
        let (found, limit) = (metadata.len() as u64, u64::from(u32::MAX));
        FormatError::limit(path, "number of metadata keys", found, limit)
    };
    let count = u32::try_from(metadata.len()).map_err(too_many)?;
    let key = |&i: &u32| metadata.get(i as usize).map(|entry| key_of(bytes, entry));
    let mut by_key: Vec<u32> = (0..count).collect();
    by_key.sort_unstable_by_key(key);
    let twice = by_key
        .windows(2)
        .find(|pair| key(&pair[0]) == key(&pair[1]));
    match twice.and_then(|pair| key(&pair[0])) {
        Some(name) => Err(FormatError::duplicate(path, "metadata key", name)),
        None => Ok(by_key),
    }
}

fn find<'m>(
    bytes: &[u8],
    metadata: &'m [MetaEntry],
    by_key: &[u32],
    key: &str,
) -> Option<&'m MetaEntry> {
    let entry = |&i: &u32| metadata.get(i as usize);
    let at = by_key
        .binary_search_by(|i| entry(i).map(|e| key_of(bytes, e)).cmp(&Some(key)))
        .ok()?;
    by_key.get(at).and_then(entry)
}

fn read_alignment(
    path: &Path,
    bytes: &[u8],
    metadata: &[MetaEntry],
    by_key: &[u32],
) -> Result<usize> {
    let Some(entry) = find(bytes, metadata, by_key, ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT as usize);
    };
    let value = bytes
        .get(entry.value.clone())
        .and_then(|b| Value::split(entry.ty, b, MAX_ARRAY_DEPTH))
        .map(|(value, _)| value);
    match value.and_then(u32::from_value) {
        Some(n) if n.is_power_of_two() => Ok(n as usize),
        _ => {
            let found = value.map_or_else(|| "nothing".to_owned(), |v| v.to_string());
            Err(FormatError::field(
                path,
                ALIGNMENT_KEY,
                found,
                "a power of two",
            ))
        }
    }
}
