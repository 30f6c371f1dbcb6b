//! The tensor table of a GGUF file: reading it and proving that it fits the file.

use super::cursor::Cursor;
use crate::error::Shown;
use crate::tensor::{TensorDtype, TensorInfo};
use crate::{FormatError, Result};
use ferrum_types::GgufQuantType;
use std::ops::Range;
use std::path::Path;

/// More dimensions than any known file has (ggml itself stops at 4).
const MAX_DIMS: u32 = 8;

/// Checked tensor entries.
#[derive(Debug)]
pub(super) struct TensorTable {
    entries: Vec<Entry>,
    /// Indices into `entries`, sorted by name.
    by_name: Vec<u32>,
}

#[derive(Debug)]
struct Entry {
    info: TensorInfo,
    /// Offset within the data section while reading, within the file afterwards.
    offset: u64,
}

impl TensorTable {
    /// Reads `count` entries; the data section begins at the next multiple of `alignment` after
    /// them and ends with the file.
    pub(super) fn read(
        cursor: &mut Cursor<'_>,
        file_len: usize,
        count: usize,
        alignment: usize,
    ) -> Result<Self> {
        let path = cursor.path;
        let mut entries = (0..count)
            .map(|_| read_entry(cursor))
            .collect::<Result<Vec<_>>>()?;
        let by_name = sort_names(path, &entries)?;
        place(path, &mut entries, cursor.pos(), file_len, alignment)?;
        Ok(TensorTable { entries, by_name })
    }

    pub(super) fn infos(&self) -> impl Iterator<Item = &TensorInfo> {
        self.entries.iter().map(|entry| &entry.info)
    }

    /// The entry named `name` and its place in the file.
    pub(super) fn find(&self, name: &str) -> Option<(&TensorInfo, Range<usize>)> {
        let entry = |&i: &u32| self.entries.get(i as usize);
        let at = self
            .by_name
            .binary_search_by(|i| entry(i).map(|e| e.info.name.as_str()).cmp(&Some(name)))
            .ok()?;
        let found = self.by_name.get(at).and_then(entry)?;
        let start = usize::try_from(found.offset).ok()?;
        Some((&found.info, start..start.checked_add(found.info.byte_len)?))
    }
}

fn read_entry(cursor: &mut Cursor<'_>) -> Result<Entry> {
    let path = cursor.path;
    let name = match cursor.string(format_args!("a tensor name"))? {
        Ok("") => {
            let at = format!("empty text before offset {}", cursor.pos());
            return Err(FormatError::header(path, "tensor name", at, "a name", ""));
        }
        Ok(name) => name,
        Err(e) => {
            return Err(FormatError::header(
                path,
                "tensor name",
                e,
                "UTF-8 text",
                "",
            ));
        }
    };
    let what = format_args!("the entry of tensor \"{}\"", Shown(name));
    let dims = cursor.u32(what)?;
    if dims > MAX_DIMS {
        let found = format!("{dims} dimensions");
        return Err(FormatError::tensor(
            path,
            name,
            found,
            format!("at most {MAX_DIMS}"),
        ));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    for _ in 0..dims {
        let dim = cursor.u64(what)?;
        match usize::try_from(dim) {
            Ok(dim) if dim > 0 => shape.push(dim),
            _ => {
                let found = format!("dimension {dim}");
                return Err(FormatError::tensor(path, name, found, "a positive number"));
            }
        }
    }
    // The file has the innermost dimension first.
    shape.reverse();
    let id = cursor.u32(what)?;
    let Some(kind) = GgufQuantType::from_id(id) else {
        return Err(unknown_type(path, name, id));
    };
    let offset = cursor.u64(what)?;
    let byte_len = byte_len(path, name, &shape, kind)?;
    let info = TensorInfo {
        name: name.to_owned(),
        shape,
        dtype: TensorDtype::from(kind),
        byte_len,
    };
    Ok(Entry { info, offset })
}

/// Bytes of a tensor whose rows are whole blocks.
pub(super) fn byte_len(
    path: &Path,
    name: &str,
    shape: &[usize],
    kind: GgufQuantType,
) -> Result<usize> {
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(kind.block_len()) {
        let found = format!("rows of {row} elements of type {kind}");
        let expected = format!("a multiple of {}", kind.block_len());
        return Err(FormatError::tensor(path, name, found, expected));
    }
    shape
        .iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| kind.bytes_for(elements))
        .ok_or_else(|| {
            let found = format!("shape {shape:?} of type {kind}");
            FormatError::tensor(path, name, found, "a size that fits in memory")
        })
}

fn unknown_type(path: &Path, name: &str, id: u32) -> FormatError {
    let (found, hint) = match removed_type(id) {
        Some(old) => (
            format!("ggml type {id} ({old}), which ggml has removed"),
            "quantise the model again with a current converter",
        ),
        None => (
            format!("unknown ggml type {id}"),
            "the file may be newer than this program, or damaged",
        ),
    };
    FormatError::tensor(path, name, found, "a known ggml type").with_hint(hint)
}

/// Names of the ids that ggml has given up.
fn removed_type(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "Q4_2",
        5 => "Q4_3",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        _ => return None,
    })
}

fn sort_names(path: &Path, entries: &[Entry]) -> Result<Vec<u32>> {
    let too_many = |_| {
        let (found, limit) = (entries.len() as u64, u64::from(u32::MAX));
        FormatError::limit(path, "number of tensors", found, limit)
    };
    let count = u32::try_from(entries.len()).map_err(too_many)?;
    let name = |&i: &u32| entries.get(i as usize).map(|e| e.info.name.as_str());
    let mut by_name: Vec<u32> = (0..count).collect();
    by_name.sort_unstable_by_key(name);
    let twice = by_name
        .windows(2)
        .find(|pair| name(&pair[0]) == name(&pair[1]));
    match twice.and_then(|pair| name(&pair[0])) {
        Some(name) => Err(FormatError::duplicate(path, "tensor", name)),
        None => Ok(by_name),
    }
}

/// Turns offsets into ranges of the file. Each must be aligned, inside the file, and overlap no other.
fn place(
    path: &Path,
    entries: &mut [Entry],
    header_end: usize,
    file_len: usize,
    alignment: usize,
) -> Result<()> {
    // A file without tensors may end with its header.
    let base = (header_end as u64).next_multiple_of(alignment as u64);
    for Entry { info, offset } in entries.iter_mut() {
        if !offset.is_multiple_of(alignment as u64) {
            let found = format!("offset {offset}");
            let expected = format!("a multiple of the alignment {alignment}");
            return Err(FormatError::tensor(path, &info.name, found, expected));
        }
        let len = info.byte_len as u64;
        let end = base
            .checked_add(*offset)
            .and_then(|start| start.checked_add(len));
        if end.is_none_or(|end| end > file_len as u64) {
            let room = (file_len as u64).saturating_sub(base);
            let found = format!("{len} bytes at offset {offset} of the data section");
            let expected = format!("a place inside its {room} bytes");
            return Err(FormatError::tensor(path, &info.name, found, expected)
                .with_hint(crate::error::INCOMPLETE));
        }
        *offset += base;
    }
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_unstable_by_key(|e| e.offset);
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if first.offset + first.info.byte_len as u64 > second.offset {
            let found = format!("bytes shared with tensor \"{}\"", Shown(&first.info.name));
            return Err(FormatError::tensor(
                path,
                &second.info.name,
                found,
                "bytes of its own",
            ));
        }
    }
    Ok(())
}
