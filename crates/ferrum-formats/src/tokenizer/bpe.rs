//! Byte-pair encoding by merge ranks (`gpt2` and its kin).

use super::bytes;
use super::error::TokenizerError;
use super::pretokenize::{self, Rule};
use super::pretokenizers::PreTokenizer;
use super::symbols::{self, NONE, Symbol};
use super::vocab::Vocab;
use ferrum_types::TokenId;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Words longer than this are not worth remembering.
const CACHED_WORD_BYTES: usize = 48;
/// Words remembered before the memory starts over.
const CACHED_WORDS: usize = 1 << 15;

/// Words with their tokens.
type Words = HashMap<Box<str>, Box<[TokenId]>>;

/// A byte-pair tokenizer.
#[derive(Debug)]
pub(super) struct Bpe {
    rules: Vec<Rule>,
    ignore_merges: bool,
    byte_level: bool,
    /// Rank and result of joining two symbols. Symbols below the size of the vocabulary are
    /// tokens; others are texts that only merges speak of.
    merges: HashMap<(u32, u32), (u32, u32), RandomState>,
    /// The symbol each byte starts as, in a byte-level vocabulary.
    byte_symbols: Vec<u32>,
    /// Symbols that are not tokens.
    extra: HashMap<Box<str>, u32>,
    tokens: u32,
    cache: Mutex<Words>,
}

/// A line of merges: where the space between its halves is, and what of left, right and both joined the
/// vocabulary has.
struct Merge {
    cut: usize,
    ids: [Option<TokenId>; 3],
}

/// Most threads that look merges up.
const MAX_THREADS: usize = 8;
/// Merges that are worth a thread.
const MERGES_PER_THREAD: usize = 16 << 10;

/// Looks all merges up, on several threads: a large vocabulary has some hundred thousand, and each takes three
/// visits of a table that no cache holds. `None` for a line that is no merge.
fn known_merges(vocab: &Vocab, merges: &[String]) -> Vec<Option<Merge>> {
    let find = |lines: &[String]| -> Vec<Option<Merge>> {
        let mut joined = String::new();
        let merge = |line: &String| {
            // The first half is never empty, and may itself be a space.
            let (cut, _) = line.char_indices().skip(1).find(|&(_, c)| c == ' ')?;
            let (left, right) = (&line[..cut], &line[cut + 1..]);
            joined.clear();
            joined.extend([left, right]);
            let ids = [left, right, &joined].map(|text| vocab.id(text));
            Some(Merge { cut, ids })
        };
        lines.iter().map(merge).collect()
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = merges.len().div_ceil(threads.min(MAX_THREADS));
    std::thread::scope(|scope| {
        let lines = merges.chunks(each.max(MERGES_PER_THREAD));
        let parts: Vec<_> = lines
            .map(|lines| scope.spawn(move || find(lines)))
            .collect();
        let parts = parts.into_iter().map(|part| part.join());
        let parts = parts.map(|part| part.unwrap_or_else(|panic| resume_unwind(panic)));
        parts.flatten().collect()
    })
}

impl Bpe {
    pub(super) fn new(
        vocab: &Vocab,
        merges: &[String],
        pre: PreTokenizer,
    ) -> Result<Self, TokenizerError> {
        let tokens = vocab.len() as u32;
        let mut extra: HashMap<Box<str>, u32> = HashMap::new();
        let mut symbol = |text: &str| {
            vocab.id(text).unwrap_or_else(|| {
                let next = tokens.saturating_add(extra.len() as u32);
                *extra.entry(text.into()).or_insert(next)
            })
        };
        let byte_symbols = bytes::alphabet()
            .iter()
            .map(|c| {
                if pre.byte_level {
                    symbol(c.encode_utf8(&mut [0; 4]))
                } else {
                    NONE
                }
            })
            .collect();
        let mut ranks = HashMap::with_capacity_and_hasher(merges.len(), RandomState::default());
        for (rank, (line, known)) in merges.iter().zip(known_merges(vocab, merges)).enumerate() {
            let Some(Merge { cut, ids }) = known else {
                return Err(TokenizerError::BadVocab {
                    field: "tokenizer.ggml.merges",
                    reason: format!("merge {rank} is `{line}`, expected two parts and a space"),
                });
            };
            let (left, right) = (&line[..cut], &line[cut + 1..]);
            let joined = ids[2].unwrap_or_else(|| symbol(&[left, right].concat()));
            let left = ids[0].unwrap_or_else(|| symbol(left));
            let right = ids[1].unwrap_or_else(|| symbol(right));
            ranks.entry((left, right)).or_insert((rank as u32, joined));
        }
        Ok(Bpe {
            rules: pre.rules,
            ignore_merges: pre.ignore_merges,
            byte_level: pre.byte_level,
            merges: ranks,
            byte_symbols,
            extra,
            tokens,
            cache: Mutex::new(HashMap::new()),
        })
    }

    pub(super) fn byte_level(&self) -> bool {
        self.byte_level
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<TokenId>) {
        // Where spaces are written `▁`, merges see them so.
        let escaped = (!self.byte_level).then(|| text.replace(' ', "▁"));
        let text = escaped.as_deref().unwrap_or(text);
        for piece in pretokenize::split(&self.rules, text) {
            let word = &text[piece];
            if self.recall(word, out) {
                continue;
            }
            let start = out.len();
            self.encode_word(vocab, word, out);
            self.remember(word, &out[start..]);
        }
    }

    /// Appends the tokens of a word if they are remembered.
    fn recall(&self, word: &str, out: &mut Vec<TokenId>) -> bool {
        let cache = self.cache();
        let known = cache.as_ref().and_then(|cache| cache.get(word));
        out.extend_from_slice(known.map_or(&[][..], |tokens| tokens));
        known.is_some()
    }

    fn remember(&self, word: &str, tokens: &[TokenId]) {
        if word.len() > CACHED_WORD_BYTES {
            return;
        }
        if let Some(mut cache) = self.cache() {
            if cache.len() >= CACHED_WORDS {
                cache.clear();
            }
            cache.insert(word.into(), tokens.into());
        }
    }

    /// The words that are remembered, unless another thread is at them: to wait for one of a lower priority would
    /// take longer than to encode a word again.
    fn cache(&self) -> Option<MutexGuard<'_, Words>> {
        match self.cache.try_lock() {
            Ok(cache) => Some(cache),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn encode_word(&self, vocab: &Vocab, word: &str, out: &mut Vec<TokenId>) {
        // Runs of line breaks are whole tokens where spaces are escaped.
        let whole = self.ignore_merges || (!self.byte_level && word.starts_with('\n'));
        if whole {
            let token = match self.byte_level {
                true => vocab.plain_id(&bytes::to_alphabet(word.as_bytes())),
                false => vocab.plain_id(word),
            };
            if let Some(token) = token {
                out.push(token);
                return;
            }
        }
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        if self.byte_level {
            for (at, byte) in word.bytes().enumerate() {
                symbols::push(&mut symbols, at, 1, self.byte_symbols[byte as usize]);
            }
        } else {
            for (at, c) in word.char_indices() {
                let text = &word[at..at + c.len_utf8()];
                let id = vocab.id(text).or_else(|| self.extra.get(text).copied());
                symbols::push(&mut symbols, at, text.len(), id.unwrap_or(NONE));
            }
        }
        symbols::merge(&mut symbols, |left, right| {
            let &(rank, id) = self.merges.get(&(left.id, right.id))?;
            Some((symbols::by_rank(rank), id))
        });
        for symbol in symbols::left_over(&symbols) {
            if symbol.id < self.tokens {
                out.push(symbol.id);
                continue;
            }
            let (start, len) = (symbol.start as usize, symbol.len as usize);
            for &byte in &word.as_bytes()[start..start + len] {
                if self.byte_level {
                    let id = self.byte_symbols[byte as usize];
                    out.extend(if id < self.tokens {
                        Some(id)
                    } else {
                        vocab.special.unk
                    });
                } else {
                    out.extend(vocab.byte_id(byte));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::GgufVocab;
    use super::*;
    use crate::tokenizer::SpecialIds;
    use crate::tokenizer::pretokenizers;
    use std::sync::mpsc;
    use std::time::Duration;

    fn small() -> (Vocab, Bpe) {
        let tokens = ["a", "b", "ab"].map(str::to_owned).to_vec();
        let file = GgufVocab {
            model: "gpt2".into(),
            tokens,
            ..GgufVocab::default()
        };
        let vocab = Vocab::new(&file, SpecialIds::default()).unwrap();
        let merges = ["a b".to_owned()];
        let bpe = Bpe::new(&vocab, &merges, pretokenizers::fallback()).unwrap();
        (vocab, bpe)
    }

    /// A long text of somebody else's is encoded for seconds, maybe on a thread of a low priority.
    #[test]
    fn nobody_waits_for_the_words_of_others() {
        let (vocab, bpe) = small();
        let encode = |text: &str| {
            let mut out = Vec::new();
            bpe.encode(&vocab, text, &mut out);
            out
        };
        assert_eq!(encode("ab"), [2]);
        assert_eq!(encode("ab"), [2]);
        std::thread::scope(|scope| {
            let held = bpe.cache.lock().unwrap();
            let (done, encoded) = mpsc::channel();
            scope.spawn(move || done.send([encode("ab"), encode("ba")]));
            let encoded = encoded.recv_timeout(Duration::from_secs(60));
            drop(held);
            assert_eq!(encoded, Ok([vec![2], vec![1, 0]]));
        });
    }
}
