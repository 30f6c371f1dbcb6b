//! A reading position in a file that cannot be trusted.

use super::value::{MAX_ARRAY_DEPTH, ValueType};
use crate::{FormatError, Result};
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Reads little-endian numbers and strings; every shortage is an error that says what was read.
pub(super) struct Cursor<'a> {
    pub(super) path: &'a Path,
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Cursor {
            path,
            bytes,
            pos: 0,
        }
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.pos
    }

    pub(super) fn truncated(&self, what: fmt::Arguments<'_>, needed: u64) -> FormatError {
        FormatError::Truncated {
            path: self.path.into(),
            what: what.to_string(),
            offset: self.pos,
            needed,
            remaining: self.remaining(),
        }
    }

    fn take(&mut self, n: u64, what: fmt::Arguments<'_>) -> Result<&'a [u8]> {
        let taken = usize::try_from(n)
            .ok()
            .and_then(|n| Some((n, self.bytes.get(self.pos..)?.get(..n)?)));
        match taken {
            Some((n, slice)) => {
                self.pos += n;
                Ok(slice)
            }
            None => Err(self.truncated(what, n)),
        }
    }

    fn array<const N: usize>(&mut self, what: fmt::Arguments<'_>) -> Result<[u8; N]> {
        let head = self
            .bytes
            .get(self.pos..)
            .and_then(<[u8]>::first_chunk::<N>);
        match head {
            Some(head) => {
                self.pos += N;
                Ok(*head)
            }
            None => Err(self.truncated(what, N as u64)),
        }
    }

    pub(super) fn u32(&mut self, what: fmt::Arguments<'_>) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: fmt::Arguments<'_>) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a count of elements of at least `min_size` bytes each, checked against the bytes that remain.
    pub(super) fn count(&mut self, min_size: usize, what: fmt::Arguments<'_>) -> Result<usize> {
        let n = self.u64(what)?;
        let needed = n.saturating_mul(min_size as u64);
        match usize::try_from(n) {
            Ok(count) if needed <= self.remaining() as u64 => Ok(count),
            _ => Err(self.truncated(format_args!("the {n} entries of {what}"), needed)),
        }
    }

    /// A string with its 64-bit length; `Err(bytes)` inside when it is not UTF-8.
    pub(super) fn string(
        &mut self,
        what: fmt::Arguments<'_>,
    ) -> Result<std::result::Result<&'a str, std::str::Utf8Error>> {
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?;
        Ok(std::str::from_utf8(bytes))
    }

    /// Steps over one value of type `ty` belonging to `key` and checks all of it.
    pub(super) fn value(&mut self, key: &str, ty: ValueType) -> Result<Range<usize>> {
        let start = self.pos;
        self.check_value(key, ty, MAX_ARRAY_DEPTH)?;
        Ok(start..self.pos)
    }

    fn check_value(&mut self, key: &str, ty: ValueType, depth: usize) -> Result<()> {
        let what = format_args!("metadata key \"{}\"", crate::error::Shown(key));
        match ty {
            ValueType::Bool => self.check_bools(key, 1),
            ValueType::String => self.check_string(key),
            ValueType::Array => {
                let id = self.u32(what)?;
                let elem = value_type(self.path, key, id)?;
                let len = self.count(elem.min_size(), what)?;
                self.check_elements(key, elem, len, depth)
            }
            _ => {
                let size = ty.fixed_size().unwrap_or_default();
                self.take(size as u64, what).map(|_| ())
            }
        }
    }

    fn check_elements(
        &mut self,
        key: &str,
        elem: ValueType,
        len: usize,
        depth: usize,
    ) -> Result<()> {
        match elem {
            ValueType::Bool => self.check_bools(key, len),
            ValueType::String => (0..len).try_for_each(|_| self.check_string(key)),
            ValueType::Array => {
                let Some(depth) = depth.checked_sub(1) else {
                    return Err(FormatError::limit(
                        self.path,
                        format_args!(
                            "array depth of metadata key \"{}\"",
                            crate::error::Shown(key)
                        ),
                        MAX_ARRAY_DEPTH as u64 + 2,
                        MAX_ARRAY_DEPTH as u64 + 1,
                    ));
                };
                (0..len).try_for_each(|_| self.check_value(key, ValueType::Array, depth))
            }
            _ => {
                // `count` has shown that the product fits in what remains.
                let size = elem.fixed_size().unwrap_or_default() as u64 * len as u64;
                let what = format_args!("metadata key \"{}\"", crate::error::Shown(key));
                self.take(size, what).map(|_| ())
            }
        }
    }

    fn check_string(&mut self, key: &str) -> Result<()> {
        let what = format_args!("metadata key \"{}\"", crate::error::Shown(key));
        self.string(what)?
            .map(|_| ())
            .map_err(|e| FormatError::field(self.path, key, e, "UTF-8 text"))
    }

    fn check_bools(&mut self, key: &str, len: usize) -> Result<()> {
        let what = format_args!("metadata key \"{}\"", crate::error::Shown(key));
        let bytes = self.take(len as u64, what)?;
        match bytes.iter().find(|&&b| b > 1) {
            Some(b) => Err(FormatError::field(
                self.path,
                key,
                format_args!("bool byte {b}"),
                "0 or 1",
            )),
            None => Ok(()),
        }
    }
}

/// The value type with this id, or an error that names the key.
pub(super) fn value_type(path: &Path, key: &str, id: u32) -> Result<ValueType> {
    ValueType::from_id(id).ok_or_else(|| {
        FormatError::field(
            path,
            key,
            format_args!("value type {id}"),
            "a value type from 0 to 12",
        )
    })
}
