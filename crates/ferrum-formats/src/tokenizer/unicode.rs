//! Character classes for pre-tokenizers, from the same Unicode tables that the `regex` crates use.
//!
//! A pre-tokenizer asks for the class of every character of a text, so the classes that matter are
//! packed as bits in a two-stage table, built once per process.

use regex_syntax::hir::{Class, HirKind};
use std::sync::OnceLock;

/// `\p{L}`.
pub(super) const LETTER: u16 = 1;
/// `\p{N}`.
pub(super) const NUMBER: u16 = 1 << 1;
/// `\p{P}`.
pub(super) const PUNCT: u16 = 1 << 2;
/// `\p{S}`.
pub(super) const SYMBOL: u16 = 1 << 3;
/// `\p{M}`.
pub(super) const MARK: u16 = 1 << 4;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`: what may begin a word.
pub(super) const UPPERISH: u16 = 1 << 5;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`: what may go on with a word.
pub(super) const LOWERISH: u16 = 1 << 6;
/// `\s`.
pub(super) const SPACE: u16 = 1 << 7;
/// `\p{Han}`.
pub(super) const HAN: u16 = 1 << 8;
/// `\d`.
pub(super) const DIGIT: u16 = 1 << 9;
/// `\w`.
pub(super) const WORD: u16 = 1 << 10;
/// `\p{Mn}`: accents that BERT strips.
pub(super) const NONSPACING: u16 = 1 << 11;
/// `[\p{Cc}\p{Cf}\p{Co}]`: what BERT removes.
pub(super) const CONTROL: u16 = 1 << 12;

const CLASSES: [(u16, &str); 13] = [
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (PUNCT, r"\p{P}"),
    (SYMBOL, r"\p{S}"),
    (MARK, r"\p{M}"),
    (UPPERISH, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
    (LOWERISH, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
    (SPACE, r"\s"),
    (HAN, r"\p{Han}"),
    (DIGIT, r"\d"),
    (WORD, r"\w"),
    (NONSPACING, r"\p{Mn}"),
    (CONTROL, r"[\p{Cc}\p{Cf}\p{Co}]"),
];

const BLOCK: usize = 256;

struct Table {
    /// Block number of each 256 code points.
    index: Vec<u16>,
    /// The distinct blocks, one after the other.
    bits: Vec<u16>,
}

/// The characters of a class; `None`: not a class, or one that holds nothing.
fn ranges(pattern: &str) -> Option<Vec<(char, char)>> {
    let hir = regex_syntax::parse(pattern).ok()?;
    match hir.kind() {
        HirKind::Class(Class::Unicode(class)) => {
            Some(class.iter().map(|r| (r.start(), r.end())).collect())
        }
        // A class of one character.
        HirKind::Literal(text) => {
            let text = std::str::from_utf8(&text.0).ok()?;
            Some(text.chars().map(|c| (c, c)).collect())
        }
        _ => None,
    }
}

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut flat = vec![0u16; 0x11_0000];
        for (bit, pattern) in CLASSES {
            let ranges = ranges(pattern).expect("a class written in this crate parses");
            for (start, end) in ranges {
                for slot in &mut flat[start as usize..=end as usize] {
                    *slot |= bit;
                }
            }
        }
        let mut seen = std::collections::HashMap::new();
        let mut table = Table {
            index: Vec::new(),
            bits: Vec::new(),
        };
        for block in flat.chunks(BLOCK) {
            let number = *seen.entry(block).or_insert_with(|| {
                table.bits.extend_from_slice(block);
                table.bits.len() / BLOCK - 1
            });
            table.index.push(number as u16);
        }
        table
    })
}

/// The class bits of characters; hold one to look many up.
#[derive(Clone, Copy)]
pub(super) struct Classes(&'static Table);

impl Classes {
    pub(super) fn get() -> Self {
        Classes(table())
    }

    /// The bits of `c`.
    #[inline]
    pub(super) fn of(self, c: char) -> u16 {
        let c = c as usize;
        self.0.bits[self.0.index[c / BLOCK] as usize * BLOCK + c % BLOCK]
    }
}

/// A set of characters written as a regex class, such as `[一-龥]`.
#[derive(Debug)]
pub(super) struct CharSet {
    ranges: Vec<(char, char)>,
    ascii: u128,
}

impl CharSet {
    /// The set that `pattern` says; `None`: not a class.
    pub(super) fn new(pattern: &str) -> Option<Self> {
        let ranges = ranges(pattern)?;
        let ascii = (0..128u8)
            .filter(|&b| ranges.iter().any(|r| (r.0..=r.1).contains(&char::from(b))))
            .fold(0, |bits, b| bits | 1 << b);
        Some(CharSet { ranges, ascii })
    }

    #[inline]
    pub(super) fn contains(&self, c: char) -> bool {
        if c.is_ascii() {
            return self.ascii >> (c as u32) & 1 == 1;
        }
        let after = self.ranges.partition_point(|r| r.0 <= c);
        after > 0 && c <= self.ranges[after - 1].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_agree_with_the_standard_library() {
        let classes = Classes::get();
        for c in '\0'..=char::MAX {
            let bits = classes.of(c);
            // Characters that only one of the two Unicode versions knows have no category.
            if bits != 0 {
                assert_eq!(bits & NUMBER != 0, c.is_numeric(), "{c:?}");
            }
            assert_eq!(bits & SPACE != 0, c.is_whitespace(), "{c:?}");
            let categories = [LETTER, NUMBER, PUNCT, SYMBOL, MARK];
            assert!(
                categories.iter().filter(|&&k| bits & k != 0).count() <= 1,
                "{c:?}"
            );
        }
        assert_eq!(classes.of('ª') & LETTER, LETTER);
        assert_eq!(classes.of('Ⅷ') & (LETTER | NUMBER), NUMBER);
    }

    #[test]
    fn a_set_holds_what_its_class_says() {
        let set = CharSet::new("[!-/一-龥。]").unwrap();
        for (c, held) in [
            ('!', true),
            ('0', false),
            ('中', true),
            ('。', true),
            ('a', false),
        ] {
            assert_eq!(set.contains(c), held, "{c}");
        }
    }
}
