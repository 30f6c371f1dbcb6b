//! safetensors: one file, or shards named by `model.safetensors.index.json`.
//!
//! Layout, from the format's description: a 64-bit little-endian header length; a JSON object of
//! that length mapping each name to `dtype`, `shape` and `data_offsets`, beside an optional
//! `__metadata__` of strings; then the tensors' bytes, which must cover the rest of the file
//! without holes or overlaps.
//!
//! The header is parsed here rather than by the `safetensors` crate because that one takes the
//! last of two tensors with the same name, and its errors do not say which tensor is wrong.

use crate::bytes::Bytes;
use crate::error::Shown;
use crate::hf::HfConfig;
use crate::identity::FileIdentity;
use crate::tensor::{TensorDtype, TensorInfo, TensorSource, TensorView};
use crate::{FormatError, Result};
use ferrum_types::Dtype;
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// Largest header, as the format's own implementation has it.
const MAX_HEADER: u64 = 100_000_000;
/// Largest `model.safetensors.index.json`.
const MAX_INDEX: u64 = 64 << 20;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One or more open safetensors files that together hold a model.
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    files: Vec<Bytes>,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Entry {
    info: TensorInfo,
    file: usize,
    place: Range<usize>,
}

impl Safetensors {
    /// Maps and checks one file.
    ///
    /// The file must not be rewritten or shortened while the value lives.
    ///
    /// # Errors
    /// [`FormatError`] saying what is wrong with the file and where.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut set = Self::empty(path);
        set.add(path, Bytes::map(path)?)?;
        Ok(set)
    }

    /// Reads one file that is part of the program (`include_bytes!`).
    ///
    /// # Errors
    /// As [`Safetensors::open`]; messages call the file `<embedded>`.
    pub fn from_static(bytes: &'static [u8]) -> Result<Self> {
        let path = Path::new("<embedded>");
        let mut set = Self::empty(path);
        set.add(path, Bytes::Static(bytes))?;
        Ok(set)
    }

    /// Reads one file that lies in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// As [`Safetensors::open`].
    pub fn from_vec(name: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self> {
        let mut set = Self::empty(name.as_ref());
        set.add(name.as_ref(), Bytes::Owned(bytes))?;
        Ok(set)
    }

    /// Opens every shard that an index file names.
    ///
    /// # Errors
    /// As [`Safetensors::open`], and when a shard's name leaves the folder, a shard is missing,
    /// two shards hold the same tensor, or a shard lacks a tensor that the index promises.
    pub fn open_index(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let map = read_index(path)?;
        let dir = path.parent().unwrap_or(Path::new(""));
        let mut set = Self::empty(path);
        let shards: BTreeSet<&str> = map.iter().map(|(_, shard)| shard.as_str()).collect();
        let mut numbers = HashMap::new();
        for shard in shards {
            check_shard_name(path, shard)?;
            let file = dir.join(shard);
            if !file.exists() {
                let reason = format!("names shard \"{}\", which is not there", Shown(shard));
                let hint = "the download is incomplete, fetch the missing file";
                return Err(FormatError::source(path, reason, hint));
            }
            numbers.insert(shard, set.files.len());
            set.add(&file, Bytes::map(&file)?)?;
        }
        for (name, shard) in &map {
            let held = set.by_name.get(name).and_then(|&i| set.entries.get(i));
            if held.map(|entry| entry.file) != numbers.get(shard.as_str()).copied() {
                return Err(FormatError::MissingTensor {
                    path: dir.join(shard).into(),
                    tensor: Shown(name).to_string(),
                    hint: format!("{} says that it is there", path.display()).into(),
                });
            }
        }
        Ok(set)
    }

    /// The files that an index names, each inside its folder. None of them is opened.
    ///
    /// # Errors
    /// What is wrong with the index.
    pub fn shards(index: impl AsRef<Path>) -> Result<BTreeSet<String>> {
        let path = index.as_ref();
        let shards: BTreeSet<_> = read_index(path)?
            .into_iter()
            .map(|(_, shard)| shard)
            .collect();
        for shard in &shards {
            check_shard_name(path, shard)?;
        }
        Ok(shards)
    }

    /// Opens the weights of a Hugging Face folder: `model.safetensors`, else the shards of
    /// `model.safetensors.index.json`, else the only `.safetensors` file there.
    ///
    /// # Errors
    /// As [`Safetensors::open_index`], and [`FormatError::Source`] when there is none or no way
    /// to choose.
    pub fn open_folder(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if dir.join(SINGLE).exists() {
            return Self::open(dir.join(SINGLE));
        }
        if dir.join(INDEX).exists() {
            return Self::open_index(dir.join(INDEX));
        }
        let found = crate::files::files_with_extension(dir, &["safetensors"])?;
        if let [only] = found.as_slice() {
            return Self::open(only);
        }
        if !found.is_empty() {
            let reason = format!("holds {} .safetensors files but no {INDEX}", found.len());
            return Err(FormatError::source(dir, reason, "name one of the files"));
        }
        let pickles = crate::files::files_with_extension(dir, crate::files::PICKLES)?;
        Err(match pickles.first() {
            Some(pickle) => crate::files::pickle_error(pickle),
            None => FormatError::source(dir, "holds no .safetensors file", ""),
        })
    }

    /// The `__metadata__` of the files.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// What the files were when they were opened; `None` when one is no file.
    pub(crate) fn identities(&self) -> Option<Vec<FileIdentity>> {
        let files = self.files.iter();
        files.map(|file| file.identity().cloned()).collect()
    }

    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    fn empty(path: &Path) -> Self {
        Safetensors {
            path: path.to_owned(),
            files: Vec::new(),
            entries: Vec::new(),
            by_name: HashMap::new(),
            metadata: BTreeMap::new(),
        }
    }

    fn add(&mut self, path: &Path, bytes: Bytes) -> Result<()> {
        let (header, data_start) = read_header(path, &bytes)?;
        let data_len = (bytes.len() - data_start) as u64;
        let file = self.files.len();
        let mut added = Vec::with_capacity(header.tensors.len());
        for (name, raw) in header.tensors {
            let (info, start) = check_entry(path, name, raw, data_len)?;
            let start = data_start + start;
            let place = start..start + info.byte_len;
            added.push(Entry { info, file, place });
        }
        added.sort_by_key(|e| (e.place.start, e.place.end));
        check_cover(path, &added, data_start, bytes.len())?;
        for entry in added {
            let name = entry.info.name.clone();
            if self.by_name.insert(name, self.entries.len()).is_some() {
                return Err(FormatError::duplicate(path, "tensor", &entry.info.name));
            }
            self.entries.push(entry);
        }
        self.metadata.extend(header.metadata);
        self.files.push(bytes);
        Ok(())
    }
}

impl TensorSource for Safetensors {
    fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = self.entries.get(*self.by_name.get(name)?)?;
        Some(TensorView {
            name: &entry.info.name,
            shape: &entry.info.shape,
            dtype: entry.info.dtype,
            bytes: self.files.get(entry.file)?.get(entry.place.clone())?,
        })
    }

    fn infos(&self) -> Box<dyn Iterator<Item = &TensorInfo> + '_> {
        Box::new(self.entries.iter().map(|entry| &entry.info))
    }

    fn path_hint(&self) -> &Path {
        &self.path
    }

    fn release(&self) {
        self.files.iter().for_each(Bytes::release);
    }
}

/// Whether the index file beside `file` counts it among its shards.
pub(crate) fn index_naming(file: &Path) -> Result<Option<PathBuf>> {
    let index = file.with_file_name(INDEX);
    if !index.exists() {
        return Ok(None);
    }
    let name = file.file_name().and_then(|n| n.to_str());
    let named = read_index(&index)?
        .iter()
        .any(|(_, shard)| Some(shard.as_str()) == name);
    Ok(named.then_some(index))
}

/// The `weight_map` of an index file: tensor name and shard.
fn read_index(path: &Path) -> Result<Vec<(String, String)>> {
    let text = crate::files::read_limited(path, MAX_INDEX)?;
    let index = HfConfig::from_slice(path, &text)?;
    let Some(map) = index.value("weight_map") else {
        return Err(FormatError::missing_field(path, "weight_map", "an object"));
    };
    let Some(map) = map.as_object() else {
        let found = crate::hf::describe(map);
        return Err(FormatError::field(path, "weight_map", found, "an object"));
    };
    map.iter()
        .map(|(name, shard)| match shard.as_str() {
            Some(shard) => Ok((name.clone(), shard.to_owned())),
            None => {
                let field = format!("weight_map.{name}");
                let found = crate::hf::describe(shard);
                Err(FormatError::field(
                    path,
                    &field,
                    found,
                    "the name of a file",
                ))
            }
        })
        .collect()
}

/// A shard's name must stay inside the folder of its index.
fn check_shard_name(index: &Path, shard: &str) -> Result<()> {
    let mut parts = Path::new(shard).components().peekable();
    let inside = parts.peek().is_some()
        && !shard.contains(['\\', ':', '\0'])
        && parts.all(|part| matches!(part, Component::Normal(_)));
    if inside {
        return Ok(());
    }
    let found = format!("\"{}\"", Shown(shard));
    let expected = "the name of a file inside the folder";
    Err(FormatError::field(index, "weight_map", found, expected))
}

/// The parsed header and the offset at which the data begin.
fn read_header(path: &Path, bytes: &[u8]) -> Result<(RawHeader, usize)> {
    let truncated = |what: &str, offset: usize, needed: u64| FormatError::Truncated {
        path: path.into(),
        what: what.to_owned(),
        offset,
        needed,
        remaining: bytes.len().saturating_sub(offset),
    };
    let Some((len, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(truncated("the header length", 0, 8));
    };
    let len = u64::from_le_bytes(*len);
    let hint = "this is no safetensors file";
    if len > MAX_HEADER {
        let expected = format!("at most {MAX_HEADER} bytes");
        return Err(FormatError::header(
            path,
            "header length",
            len,
            expected,
            hint,
        ));
    }
    // Before the length, which any other kind of file gets wrong too.
    if let Some(byte) = rest.first().filter(|&&byte| byte != b'{') {
        let found = format!("byte {byte:#04x}");
        return Err(FormatError::header(
            path,
            "start of the header",
            found,
            "\"{\"",
            hint,
        ));
    }
    let Some(json) = usize::try_from(len).ok().and_then(|n| rest.get(..n)) else {
        return Err(truncated("the header", 8, len));
    };
    let header: RawHeader = serde_json::from_slice(json)
        .map_err(|e| FormatError::syntax(path, format_args!("safetensors header: {e}")))?;
    Ok((header, 8 + json.len()))
}

/// The entry as checked info, and its start within the data section.
fn check_entry(
    path: &Path,
    name: String,
    raw: RawTensor,
    data_len: u64,
) -> Result<(TensorInfo, usize)> {
    let Some(dtype) = dtype_from_name(&raw.dtype) else {
        let found = format!("dtype \"{}\"", Shown(&raw.dtype));
        return Err(FormatError::tensor(
            path,
            &name,
            found,
            "a safetensors dtype",
        ));
    };
    let (start, end) = raw.data_offsets;
    if start > end || end > data_len {
        let found = format!("data offsets {start} to {end}");
        let expected = format!("a range inside the file's {data_len} data bytes");
        let error = FormatError::tensor(path, &name, found, expected);
        return Err(error.with_hint(crate::error::INCOMPLETE));
    }
    let shape = raw.shape.iter().map(|&d| usize::try_from(d).ok());
    let shape: Option<Vec<usize>> = shape.collect();
    // Zero dimensions are allowed, but must not hide an overflow of the others.
    let wanted = shape.as_ref().and_then(|shape| {
        let product = |acc: usize, dim: &usize| acc.checked_mul((*dim).max(1));
        shape.iter().try_fold(1, product)?;
        dtype.bytes_for(shape.iter().product())
    });
    let (Some(shape), Some(wanted)) = (shape, wanted) else {
        let found = format!("shape {:?} of dtype {dtype}", raw.shape);
        return Err(FormatError::tensor(
            path,
            &name,
            found,
            "a size of whole bytes that fits",
        ));
    };
    if wanted as u64 != end - start {
        let found = format!("{} bytes", end - start);
        let expected = format!("{wanted} bytes for shape {shape:?} of dtype {dtype}");
        return Err(FormatError::tensor(path, &name, found, expected));
    }
    let info = TensorInfo {
        name,
        shape,
        dtype,
        byte_len: wanted,
    };
    // `start` is within the file, so it fits.
    Ok((info, start as usize))
}

/// Sorted entries must cover `start..end` without holes or overlaps.
fn check_cover(path: &Path, entries: &[Entry], start: usize, end: usize) -> Result<()> {
    let mut at = start;
    for entry in entries {
        if entry.place.start != at {
            let found = format!("data at offset {}", entry.place.start - start);
            let expected = format!("offset {}, without holes or overlaps", at - start);
            return Err(FormatError::tensor(path, &entry.info.name, found, expected));
        }
        at = entry.place.end;
    }
    if at == end {
        return Ok(());
    }
    let found = format!("{} bytes", end - start);
    let expected = format!("the {} bytes of its tensors", at - start);
    Err(FormatError::header(
        path,
        "data section",
        found,
        expected,
        "",
    ))
}

/// Every dtype of the format.
fn dtype_from_name(name: &str) -> Option<TensorDtype> {
    const fn opaque(name: &'static str, bits: u8) -> TensorDtype {
        TensorDtype::Opaque { name, bits }
    }
    Some(match name {
        "F64" => TensorDtype::Plain(Dtype::F64),
        "F32" => TensorDtype::Plain(Dtype::F32),
        "F16" => TensorDtype::Plain(Dtype::F16),
        "BF16" => TensorDtype::Plain(Dtype::BF16),
        "F8_E4M3" => TensorDtype::Plain(Dtype::F8E4M3),
        "F8_E5M2" => TensorDtype::Plain(Dtype::F8E5M2),
        "I64" => TensorDtype::Plain(Dtype::I64),
        "U64" => TensorDtype::Plain(Dtype::U64),
        "I32" => TensorDtype::Plain(Dtype::I32),
        "U32" => TensorDtype::Plain(Dtype::U32),
        "I16" => TensorDtype::Plain(Dtype::I16),
        "U16" => TensorDtype::Plain(Dtype::U16),
        "I8" => TensorDtype::Plain(Dtype::I8),
        "U8" => TensorDtype::Plain(Dtype::U8),
        "BOOL" => TensorDtype::Plain(Dtype::Bool),
        "C64" => opaque("C64", 64),
        "F8_E8M0" => opaque("F8_E8M0", 8),
        "F8_E4M3FNUZ" => opaque("F8_E4M3FNUZ", 8),
        "F8_E5M2FNUZ" => opaque("F8_E5M2FNUZ", 8),
        "F6_E2M3" => opaque("F6_E2M3", 6),
        "F6_E3M2" => opaque("F6_E3M2", 6),
        "F4" => opaque("F4", 4),
        _ => return None,
    })
}

/// The header as its JSON has it, but with every name once.
#[derive(Debug)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

#[derive(Debug, Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut metadata = None;
                let mut tensors = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    let shown = Shown(&name);
                    if !seen.insert(name.clone()) {
                        let twice = format_args!("\"{shown}\" appears more than once");
                        return Err(de::Error::custom(twice));
                    }
                    if name == "__metadata__" {
                        metadata = map.next_value::<Option<BTreeMap<String, String>>>()?;
                        continue;
                    }
                    let tensor = map
                        .next_value::<RawTensor>()
                        .map_err(|e| de::Error::custom(format_args!("tensor \"{shown}\": {e}")))?;
                    tensors.push((name, tensor));
                }
                Ok(RawHeader {
                    metadata: metadata.unwrap_or_default(),
                    tensors,
                })
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}
