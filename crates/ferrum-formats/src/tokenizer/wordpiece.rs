//! BERT's WordPiece: words cut into the longest tokens from the left (`bert`).

use super::prefix::PrefixIndex;
use super::unicode::{CONTROL, Classes, NONSPACING, PUNCT, SPACE, SYMBOL};
use super::vocab::{GgufVocab, Vocab};
use ferrum_types::TokenId;
use unicode_normalization_alignments::UnicodeNormalization;

/// A WordPiece tokenizer. In a GGUF file, tokens that begin a word begin with `▁` and others do
/// not, the reverse of BERT's own `##`.
#[derive(Debug)]
pub(super) struct WordPiece {
    tokens: PrefixIndex,
    lowercase: bool,
    strip_accents: bool,
}

impl WordPiece {
    pub(super) fn new(vocab: &Vocab, file: &GgufVocab) -> Self {
        let lowercase = file.lowercase.unwrap_or(true);
        WordPiece {
            tokens: PrefixIndex::new(vocab, |id| !vocab.is_special(id)),
            lowercase,
            strip_accents: file.strip_accents.unwrap_or(lowercase),
        }
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<TokenId>) {
        for word in self.words(text) {
            let start = out.len();
            let mut rest = word.as_str();
            while !rest.is_empty() {
                let mut longest = None;
                // A `▁` of the text's own does not begin a word again.
                let inside = rest.len() < word.len() && rest.starts_with('▁');
                if !inside {
                    self.tokens.prefixes(vocab, rest.as_bytes(), |len, id| {
                        longest = Some((len, id));
                    });
                }
                let Some((len, id)) = longest else {
                    // A word with a part that is no token is unknown as a whole.
                    out.truncate(start);
                    out.extend(vocab.special.unk);
                    break;
                };
                out.push(id);
                rest = &rest[len..];
            }
        }
    }

    /// Words, each behind a `▁`; punctuation and ideographs are words of their own.
    fn words(&self, text: &str) -> Vec<String> {
        let classes = Classes::get();
        let mut words = Vec::new();
        let mut open = false;
        let mut take = |c: char| {
            let class = classes.of(c);
            if class & SPACE != 0 {
                open = false;
                return;
            }
            if matches!(c, '\0' | '\u{FFFD}') || class & CONTROL != 0 {
                return;
            }
            if self.strip_accents && class & NONSPACING != 0 {
                return;
            }
            let alone = class & PUNCT != 0 || (c.is_ascii() && class & SYMBOL != 0) || is_cjk(c);
            if alone || !open {
                words.push(String::from('▁'));
            }
            open = !alone;
            if let Some(word) = words.last_mut() {
                match self.lowercase {
                    true => word.extend(c.to_lowercase()),
                    false => word.push(c),
                }
            }
        };
        match self.strip_accents {
            true => text.nfd().for_each(|(c, _)| take(c)),
            false => text.chars().for_each(take),
        }
        words
    }
}

/// The ideographs that BERT sets apart.
fn is_cjk(c: char) -> bool {
    matches!(u32::from(c),
        0x4E00..=0x9FFF
            | 0x3400..=0x4DBF
            | 0x2_0000..=0x2_A6DF
            | 0x2_A700..=0x2_B73F
            | 0x2_B740..=0x2_B81F
            | 0x2_B920..=0x2_CEAF
            | 0xF900..=0xFAFF
            | 0x2_F800..=0x2_FA1F)
}
