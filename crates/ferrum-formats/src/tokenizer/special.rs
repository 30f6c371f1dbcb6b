//! Setting special tokens apart from the text between them.

use super::error::TokenizerError;
use super::vocab::{Strip, TokenKind, Vocab};
use aho_corasick::AhoCorasick;
use ferrum_types::TokenId;
use std::ops::Range;

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    /// Text to be tokenized: bytes of the input.
    Text(Range<usize>),
    /// A special token.
    Token(TokenId),
}

/// Finds special tokens in text: longer ones first, each from the left.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// Longest first.
    tokens: Vec<Special>,
    /// Tells which of them occur at all, so that few are searched for one by one.
    finder: Option<AhoCorasick>,
}

#[derive(Debug)]
struct Special {
    id: TokenId,
    text: String,
    /// Only when special tokens in the text are to be parsed.
    control: bool,
    strip: Strip,
}

impl SpecialTokens {
    pub(super) fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let mut tokens: Vec<Special> = (0..vocab.len() as TokenId)
            .filter(|&id| vocab.is_special(id))
            .map(|id| Special {
                id,
                text: vocab.texts[id as usize].to_string(),
                control: vocab.kind(id) != Some(TokenKind::UserDefined),
                strip: vocab.strips.get(&id).copied().unwrap_or_default(),
            })
            .collect();
        tokens.sort_by_key(|token| std::cmp::Reverse(token.text.len()));
        let finder = if tokens.is_empty() {
            None
        } else {
            let finder = AhoCorasick::new(tokens.iter().map(|token| &token.text));
            Some(finder.map_err(|error| TokenizerError::BadVocab {
                field: "tokenizer.ggml.tokens",
                reason: format!("special tokens cannot be searched for: {error}"),
            })?)
        };
        Ok(SpecialTokens { tokens, finder })
    }

    /// Cuts `text` into special tokens and the text between.
    pub(super) fn split(&self, text: &str, parse_special: bool) -> Vec<Fragment> {
        let mut fragments = Vec::new();
        if text.is_empty() {
            return fragments;
        }
        fragments.push(Fragment::Text(0..text.len()));
        for token in self.present(text, parse_special) {
            let mut finer = Vec::with_capacity(fragments.len() + 2);
            for fragment in fragments {
                match fragment {
                    Fragment::Text(range) => token.cut(text, range, &mut finer),
                    token => finer.push(token),
                }
            }
            fragments = finer;
        }
        fragments
    }

    fn present(&self, text: &str, parse_special: bool) -> impl Iterator<Item = &Special> {
        let mut seen = vec![false; self.tokens.len()];
        let mut missing = self.tokens.len();
        for found in self
            .finder
            .iter()
            .flat_map(|f| f.find_overlapping_iter(text))
        {
            let slot = &mut seen[found.pattern().as_usize()];
            if !*slot {
                *slot = true;
                missing -= 1;
                if missing == 0 {
                    break;
                }
            }
        }
        self.tokens
            .iter()
            .zip(seen)
            .filter(move |(token, seen)| *seen && (parse_special || !token.control))
            .map(|(token, _)| token)
    }
}

impl Special {
    fn cut(&self, text: &str, range: Range<usize>, out: &mut Vec<Fragment>) {
        let mut start = range.start;
        while let Some(found) = text[start..range.end].find(&self.text) {
            let mut before = &text[start..start + found];
            if self.strip.left {
                before = before.trim_end_matches(is_c_space);
            }
            if !before.is_empty() {
                out.push(Fragment::Text(start..start + before.len()));
            }
            out.push(Fragment::Token(self.id));
            start += found + self.text.len();
            if self.strip.right {
                let rest = &text[start..range.end];
                start += rest.len() - rest.trim_start_matches(is_c_space).len();
            }
        }
        if start < range.end {
            out.push(Fragment::Text(start..range.end));
        }
    }
}

/// White space as C's `isspace` has it.
fn is_c_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '\u{b}' | '\u{c}')
}
