//! Where DRY's passages end: at texts, however the tokenizer cuts them.
//!
//! A text may lie within one token, or over several that begin before it and end after it. So each text is
//! looked for in the bytes of the sequence, by the Knuth-Morris-Pratt automaton. Most tokens
//! have nothing in common with any text and only set its states back, so the bytes of the others are all
//! that is kept of a vocabulary.

use ferrum_formats::tokenizer::Tokenizer;
use ferrum_types::TokenId;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Texts that break repeated passages, prepared for a vocabulary. Clones share what they hold.
#[derive(Clone, Default, PartialEq)]
pub struct DryBreakers(Arc<Prepared>);

#[derive(Default, PartialEq)]
struct Prepared {
    texts: Vec<Pattern>,
    /// Tokens that have something in common with a text: their bytes.
    pieces: HashMap<TokenId, Box<[u8]>>,
}

impl fmt::Debug for DryBreakers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = self.0.texts.iter();
        let texts = texts.map(|text| String::from_utf8_lossy(&text.bytes));
        f.debug_list().entries(texts).finish()
    }
}

impl DryBreakers {
    /// Prepares `texts`; empty ones are ignored. Looks at every token of the vocabulary: a result is worth
    /// keeping.
    pub fn find(tokenizer: &Tokenizer, texts: &[&str]) -> Self {
        let ids = 0..TokenId::try_from(tokenizer.vocab_size()).unwrap_or(TokenId::MAX);
        let tokens = ids.filter_map(|id| Some((id, tokenizer.token_bytes(id)?)));
        Self::of_tokens(tokens, texts)
    }

    pub(super) fn of_tokens(
        tokens: impl Iterator<Item = (TokenId, Vec<u8>)>,
        texts: &[&str],
    ) -> Self {
        let texts = texts.iter().filter(|text| !text.is_empty());
        let texts: Vec<_> = texts.map(|text| Pattern::new(text.as_bytes())).collect();
        let touches = |bytes: &[u8]| texts.iter().any(|text| text.touches(bytes));
        let pieces = tokens.filter(|(_, bytes)| touches(bytes));
        let pieces = pieces.map(|(id, bytes)| (id, bytes.into())).collect();
        Self(Arc::new(Prepared { texts, pieces }))
    }
}

/// A text, with what the automaton needs.
#[derive(PartialEq)]
struct Pattern {
    bytes: Box<[u8]>,
    /// By length of what has matched: the longest shorter beginning that is also its end.
    borders: Box<[usize]>,
    /// By byte: where in the text it stands, but for the first place.
    places: HashMap<u8, Vec<usize>>,
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut borders = vec![0; bytes.len() + 1];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[border] != bytes[at] {
                border = borders[border];
            }
            border += usize::from(bytes[border] == bytes[at]);
            borders[at + 1] = border;
        }
        let mut places: HashMap<u8, Vec<usize>> = HashMap::new();
        for (at, &byte) in bytes.iter().enumerate().skip(1) {
            places.entry(byte).or_default().push(at);
        }
        Self {
            bytes: bytes.into(),
            borders: borders.into(),
            places,
        }
    }

    /// Goes on from `state` bytes that have matched. Says how many have matched after `piece`, and whether
    /// the text was whole somewhere in it.
    fn advance(&self, mut state: usize, piece: &[u8]) -> (usize, bool) {
        let mut whole = false;
        for &byte in piece {
            while state > 0 && self.bytes[state] != byte {
                state = self.borders[state];
            }
            state += usize::from(self.bytes[state] == byte);
            if state == self.bytes.len() {
                whole = true;
                state = self.borders[state];
            }
        }
        (state, whole)
    }

    /// Whether `piece` can be a part of the text's place in a sequence: it holds the text, ends with the
    /// beginning of it, begins with the end of it, or lies in it.
    fn touches(&self, piece: &[u8]) -> bool {
        if let (0, false) = self.advance(0, piece) {
            let places = piece.first().and_then(|first| self.places.get(first));
            return places.into_iter().flatten().any(|&at| {
                let common = piece.len().min(self.bytes.len() - at);
                self.bytes[at..at + common] == piece[..common]
            });
        }
        true
    }
}

/// Where the last break of a sequence is. Goes on from step to step, so that a step costs what is new.
#[derive(Clone, Debug, Default)]
pub(super) struct BreakScan {
    scanned: usize,
    /// By text: how much of it has matched.
    states: Vec<usize>,
    /// Tokens up to and with the one that ended the last break.
    broken: usize,
}

impl BreakScan {
    /// Tokens at the end of `tokens` after the last break.
    pub(super) fn unbroken(&mut self, breakers: &DryBreakers, tokens: &[TokenId]) -> usize {
        let Prepared { texts, pieces } = &*breakers.0;
        if tokens.len() < self.scanned {
            // The sequence was cut: speculative tokens may be taken back.
            *self = Self::default();
        }
        self.states.resize(texts.len(), 0);
        for (at, token) in tokens.iter().enumerate().skip(self.scanned) {
            let Some(piece) = pieces.get(token) else {
                self.states.fill(0);
                continue;
            };
            for (text, state) in texts.iter().zip(&mut self.states) {
                let (after, whole) = text.advance(*state, piece);
                *state = after;
                if whole {
                    self.broken = at + 1;
                }
            }
        }
        self.scanned = tokens.len();
        tokens.len() - self.broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens that are the digits of their numbers, but for 10 and more, which are these texts.
    fn breakers_of(texts: &[&str], more: &[&str]) -> DryBreakers {
        let digits = (0..10).map(|i: TokenId| (i, i.to_string().into_bytes()));
        let more = more.iter().enumerate();
        let more = more.map(|(i, text)| (10 + i as TokenId, text.as_bytes().to_vec()));
        DryBreakers::of_tokens(digits.chain(more), texts)
    }

    #[test]
    fn breakers_are_texts_however_they_are_cut_into_tokens() {
        let more = ["12", "x1", "23y", "x123y", "1", "121"];
        let cases: &[(&[&str], &[TokenId], usize)] = &[
            (&["123"], &[1, 2, 3, 7, 8], 2),
            (&["123"], &[10, 3, 7, 8], 2),
            (&["123"], &[11, 12, 7], 1),
            (&["123"], &[13, 7], 1),
            (&["123"], &[14, 2, 3], 0),
            // Begun and not ended, and with something between.
            (&["123"], &[7, 1, 2], 3),
            (&["123"], &[1, 2, 7, 3], 4),
            // The beginning again, within itself.
            (&["1213"], &[1, 2, 1, 2, 1, 3, 5], 1),
            (&["1213"], &[15, 10, 1, 3, 5], 1),
            (&["999", "123"], &[1, 2, 3, 9, 9, 4], 3),
            (&[""], &[1, 2, 3], 3),
            (&[], &[1, 2, 3], 3),
        ];
        for (texts, tokens, expected) in cases {
            let breakers = breakers_of(texts, &more);
            let found = BreakScan::default().unbroken(&breakers, tokens);
            assert_eq!(found, *expected, "{texts:?} {tokens:?}");
            // Step by step, and after tokens were taken back.
            let mut scan = BreakScan::default();
            for len in (0..=tokens.len()).chain([1, tokens.len()]) {
                let found = scan.unbroken(&breakers, &tokens[..len]);
                let fresh = BreakScan::default().unbroken(&breakers, &tokens[..len]);
                assert_eq!(found, fresh, "{texts:?} {tokens:?} {len}");
            }
        }
    }
}
