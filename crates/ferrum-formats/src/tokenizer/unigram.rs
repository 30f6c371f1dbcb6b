//! SentencePiece unigram: the most probable way to cut a text into tokens (`t5`).

use super::charsmap::Charsmap;
use super::error::TokenizerError;
use super::prefix::PrefixIndex;
use super::vocab::{GgufVocab, TokenKind, Vocab};
use ferrum_types::TokenId;

/// How much worse than the worst token an unknown character is.
const UNKNOWN_PENALTY: f32 = 10.0;

/// A unigram tokenizer.
#[derive(Debug)]
pub(super) struct Unigram {
    tokens: PrefixIndex,
    /// Texts that the normaliser must leave alone.
    user_defined: PrefixIndex,
    charsmap: Option<Charsmap>,
    unknown_score: f64,
    unknown: TokenId,
    /// The vocabulary has a token for every byte.
    byte_fallback: bool,
    add_space_prefix: bool,
    merge_spaces: bool,
}

/// The best way found to reach a position.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    token: TokenId,
    from: u32,
}

impl Unigram {
    pub(super) fn new(vocab: &Vocab, file: &GgufVocab) -> Result<Self, TokenizerError> {
        use TokenKind::{Normal, Unused, UserDefined};
        let Some(unknown) = vocab.special.unk else {
            return Err(TokenizerError::BadVocab {
                field: "tokenizer.ggml.unknown_token_id",
                reason: "missing, a unigram vocabulary needs an unknown token".into(),
            });
        };
        let worst = (0..vocab.len())
            .filter(|&id| vocab.kinds[id] == Normal)
            .map(|id| vocab.scores[id])
            .fold(f32::MAX, f32::min);
        Ok(Unigram {
            tokens: PrefixIndex::new(vocab, |id| {
                matches!(vocab.kind(id), Some(Normal | UserDefined | Unused))
            }),
            user_defined: PrefixIndex::new(vocab, |id| vocab.kind(id) == Some(UserDefined)),
            charsmap: file
                .precompiled_charsmap
                .as_deref()
                .map(Charsmap::new)
                .transpose()?,
            unknown_score: f64::from(worst - UNKNOWN_PENALTY),
            unknown,
            byte_fallback: vocab.bytes.iter().all(Option::is_some),
            add_space_prefix: file.add_space_prefix.unwrap_or(false),
            merge_spaces: file.remove_extra_whitespaces.unwrap_or(false),
        })
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<TokenId>) {
        let text = self.normalize(vocab, text);
        let unreached = Best {
            score: f64::NEG_INFINITY,
            token: self.unknown,
            from: 0,
        };
        let mut best = vec![unreached; text.len() + 1];
        best[0].score = 0.0;
        for (at, c) in text.char_indices() {
            let here = best[at].score;
            let mut offer = |end: usize, token, score: f64| {
                if here + score > best[end].score {
                    best[end] = Best {
                        score: here + score,
                        token,
                        from: at as u32,
                    };
                }
            };
            let mut whole_char = false;
            self.tokens
                .prefixes(vocab, &text.as_bytes()[at..], |len, token| {
                    whole_char |= len == c.len_utf8();
                    let score = match vocab.kind(token) {
                        Some(TokenKind::UserDefined) => 0.0,
                        _ => f64::from(vocab.scores[token as usize]),
                    };
                    offer(at + len, token, score);
                });
            if !whole_char {
                offer(at + c.len_utf8(), self.unknown, self.unknown_score);
            }
        }
        let start = out.len();
        let mut at = text.len();
        while at > 0 {
            let Best { token, from, .. } = best[at];
            let unknown = token == self.unknown;
            if unknown && self.byte_fallback {
                let bytes = text.as_bytes()[from as usize..at].iter().rev();
                out.extend(bytes.filter_map(|&byte| vocab.byte_id(byte)));
            } else if !unknown || out.len() == start || out.last() != Some(&token) {
                // Neighbouring unknown characters are one unknown token.
                out.push(token);
            }
            at = from as usize;
        }
        out[start..].reverse();
    }

    fn normalize(&self, vocab: &Vocab, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + text.len() / 2);
        let mut rest = text;
        let (mut prefixed, mut in_word) = (false, false);
        while !rest.is_empty() {
            let (taken, normal) = self.normal_prefix(vocab, rest);
            rest = &rest[taken..];
            for c in normal.chars() {
                if c == ' ' {
                    in_word = false;
                    if !self.merge_spaces {
                        out.push('▁');
                    }
                    continue;
                }
                if !in_word {
                    in_word = true;
                    if (self.add_space_prefix && !prefixed) || self.merge_spaces {
                        out.push('▁');
                        prefixed = true;
                    }
                }
                out.push(c);
            }
        }
        out
    }

    /// Bytes of `text` taken, and what they become.
    fn normal_prefix<'a>(&'a self, vocab: &Vocab, text: &'a str) -> (usize, &'a str) {
        let mut longest = 0;
        self.user_defined
            .prefixes(vocab, text.as_bytes(), |len, _| longest = len);
        if longest > 0 {
            return (longest, &text[..longest]);
        }
        if let Some((taken, normal)) = self.charsmap.as_ref().and_then(|map| map.longest(text)) {
            return (taken, normal);
        }
        let width = text.chars().next().map_or(0, char::len_utf8);
        (width, &text[..width])
    }
}
