//! SentencePiece's precompiled character map: a double array of byte sequences to be replaced,
//! followed by the replacements.
//!
//! Layout: u32 bytes of the array; the array as u32 units; zero-terminated UTF-8 strings. A unit
//! holds an offset (bits 10–30, shifted by 8 more if bit 9 is set), whether it has a value (bit 8)
//! and its label (bits 0–7); a unit with bit 31 holds an offset into the strings.

use super::error::TokenizerError;

/// A parsed map; every string it can give has been checked.
#[derive(Debug)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    strings: String,
}

impl Charsmap {
    pub(super) fn new(blob: &[u8]) -> Result<Self, TokenizerError> {
        let bad = |reason: String| TokenizerError::BadVocab {
            field: "tokenizer.ggml.precompiled_charsmap",
            reason,
        };
        let (head, rest) = blob
            .split_first_chunk::<4>()
            .ok_or_else(|| bad(format!("{} bytes, expected at least 4", blob.len())))?;
        let size = u32::from_le_bytes(*head) as usize;
        let (units, strings) = rest.split_at_checked(size).ok_or_else(|| {
            bad(format!(
                "the array has {size} bytes, {} bytes remain",
                rest.len()
            ))
        })?;
        let (units, odd) = units.as_chunks::<4>();
        if !odd.is_empty() {
            return Err(bad(format!(
                "the array has {size} bytes, expected a multiple of 4"
            )));
        }
        let strings = std::str::from_utf8(strings)
            .map_err(|error| bad(format!("replacements are not UTF-8: {error}")))?;
        Ok(Charsmap {
            units: units.iter().map(|&unit| u32::from_le_bytes(unit)).collect(),
            strings: strings.to_owned(),
        })
    }

    /// The longest prefix of `text` that is replaced, and its replacement.
    pub(super) fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let offset = |unit: u32| (unit >> 10) << ((unit & 1 << 9) >> 6);
        let mut found = None;
        let mut node = offset(*self.units.first()?);
        for (at, byte) in text.bytes().enumerate() {
            node ^= u32::from(byte);
            let Some(&unit) = self.units.get(node as usize) else {
                break;
            };
            if byte == 0 || unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            node ^= offset(unit);
            if unit & 1 << 8 != 0 {
                let value = self.units.get(node as usize).map(|unit| unit & !(1 << 31));
                // A replacement must not be cut out of the middle of a character.
                let string = value.and_then(|value| self.strings.get(value as usize..));
                if let Some(string) = string.filter(|_| text.is_char_boundary(at + 1)) {
                    found = Some((at + 1, string.split('\0').next().unwrap_or("")));
                }
            }
        }
        found
    }
}
