//! GGUF vocabularies against the `tokenizers` crate, on random text: the same vocabulary, merges
//! and regular expression must give the same ids.

#![allow(clippy::unwrap_used)]

use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, GgufVocab, Tokenizer};
use serde_json::{Value, json};
use std::path::PathBuf;

const STRINGS: usize = 100_000;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A small generator (splitmix64): the same texts on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % bound
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len() as u64) as usize]
    }

    fn char_in(&mut self, first: u32, last: u32) -> char {
        char::from_u32(first + self.below(u64::from(last - first + 1)) as u32).unwrap_or('?')
    }

    /// A string of a few parts, each of another kind of text.
    fn text(&mut self) -> String {
        let mut text = String::new();
        for _ in 0..1 + self.below(8) {
            self.part(&mut text);
        }
        text
    }

    fn part(&mut self, text: &mut String) {
        let count = 1 + self.below(6);
        match self.below(16) {
            0 => {
                text.push_str(self.pick(&["'s", "'T", "'re", "'VE", "'lL", "'d", "'m", "'ſ", "'x"]))
            }
            1 => text.push_str(self.pick(&[
                " ",
                "  ",
                "\n",
                "\r\n",
                "\t",
                "\u{a0}",
                "\u{3000} ",
                " \n ",
                "\u{85}",
                "\u{2028}",
            ])),
            2 => text.extend((0..count).map(|_| self.char_in('0'.into(), '9'.into()))),
            3 => text.push_str(self.pick(&[
                "hello", " world", "The", " of", "ing", "HTTP", " für", "naïve", "…", "don't",
                " I'll",
            ])),
            4 => text.extend((0..count).map(|_| self.char_in('!'.into(), '~'.into()))),
            5 => text.extend((0..count).map(|_| self.char_in(0x400, 0x4FF))),
            6 => text.extend((0..count).map(|_| self.char_in(0x4E00, 0x9FFF))),
            7 => text.extend((0..count).map(|_| self.char_in(0x600, 0x6FF))),
            8 => text.extend((0..count).map(|_| self.char_in(0x900, 0x97F))),
            9 => text.extend((0..count).map(|_| self.char_in(0x1F300, 0x1FAFF))),
            10 => text.push_str(self.pick(&[
                "👩‍👩‍👧",
                "🇪🇺",
                "é",
                "e\u{301}",
                "a\u{308}\u{323}",
                "¼",
                "Ⅷ",
                "²",
                "٣",
                "\u{feff}",
                "\0",
                "\u{7f}",
            ])),
            11 => text.extend((0..count).map(|_| self.char_in(0xA0, 0x24F))),
            12 => text.extend((0..count).map(|_| self.char_in(0, 0x10FFFF))),
            13 => text.extend((0..count).map(|_| self.char_in(0xAC00, 0xD7A3))),
            14 => text.extend((0..count).map(|_| self.char_in('a'.into(), 'z'.into()))),
            _ => text.extend((0..count * 3).map(|_| ' ')),
        }
    }
}

fn vocab(name: &str) -> Option<GgufVocab> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/tokenizers")
        .join(format!("ggml-vocab-{name}.gguf"));
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(GgufVocab::from_gguf(&Gguf::open(&path).unwrap()).unwrap())
}

/// A `tokenizer.json` over the same tokens.
fn theirs(vocab: &GgufVocab, merges: Value, options: Value, steps: Value) -> tokenizers::Tokenizer {
    let ids: Value = vocab
        .tokens
        .iter()
        .cloned()
        .zip((0..).map(Value::from))
        .collect();
    let mut model = json!({ "type": "BPE", "vocab": ids, "merges": merges });
    let mut file = json!({ "version": "1.0", "added_tokens": [] });
    model
        .as_object_mut()
        .unwrap()
        .extend(options.as_object().unwrap().clone());
    file.as_object_mut()
        .unwrap()
        .extend(steps.as_object().unwrap().clone());
    file["model"] = model;
    tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap()
}

fn compare(name: &str, seed: u64, ours: &Tokenizer, theirs: &tokenizers::Tokenizer) {
    let mut random = Random(seed);
    let mut failures = Vec::new();
    for _ in 0..STRINGS {
        let text = random.text();
        let found = ours.encode(&text, EncodeOptions::PLAIN).unwrap();
        let expected = theirs.encode_fast(text.as_str(), false).unwrap();
        if found != expected.get_ids() {
            failures.push(format!(
                "{text:?}\n  found    {found:?}\n  expected {:?}",
                expected.get_ids()
            ));
        }
    }
    let shown = &failures[..failures.len().min(10)];
    assert!(
        failures.is_empty(),
        "{name}: {} differ\n{}",
        failures.len(),
        shown.join("\n")
    );
}

fn compare_byte_level(name: &str, seed: u64, pattern: Option<&str>, ignore_merges: bool) {
    let Some(vocab) = vocab(name) else { return };
    let byte_level = |use_regex| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": use_regex
        })
    };
    let pre = match pattern {
        None => byte_level(true),
        Some(pattern) => json!({
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated",
                    "invert": false
                },
                byte_level(false)
            ]
        }),
    };
    let pairs = vocab.merges.iter().map(|m| m.split_once(' ').unwrap());
    let theirs = theirs(
        &vocab,
        pairs.map(|(a, b)| json!([a, b])).collect(),
        json!({ "ignore_merges": ignore_merges }),
        json!({ "pre_tokenizer": pre }),
    );
    compare(
        name,
        seed,
        &Tokenizer::from_gguf_vocab(&vocab).unwrap(),
        &theirs,
    );
}

#[test]
fn gpt2() {
    compare_byte_level("gpt-2", 1, None, false);
}

#[test]
fn llama3() {
    compare_byte_level("llama-bpe", 2, Some(LLAMA3), true);
}

#[test]
fn qwen2() {
    compare_byte_level("qwen2", 3, Some(QWEN2), false);
}

/// Scores say which of two merges comes first; written as ranks they are ordinary merges.
#[test]
fn sentencepiece() {
    let Some(vocab) = vocab("llama-spm") else {
        return;
    };
    let (tokens, types) = (&vocab.tokens, vocab.token_types.as_ref().unwrap());
    let scores = vocab.scores.as_ref().unwrap();
    let plain = |id: usize| types[id] == 1 || types[id] == 4;
    let known: std::collections::HashSet<&str> = (0..tokens.len())
        .filter(|&id| plain(id))
        .map(|id| tokens[id].as_str())
        .collect();
    let mut merges = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|&(id, _)| plain(id)) {
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if known.contains(left) && known.contains(right) {
                merges.push((scores[id], left.to_owned(), right.to_owned()));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    let merges = merges
        .into_iter()
        .map(|(_, left, right)| json!([left, right]))
        .collect();
    let theirs = theirs(
        &vocab,
        merges,
        json!({ "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true }),
        json!({
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    { "type": "Prepend", "prepend": "▁" },
                    { "type": "Replace", "pattern": { "String": " " }, "content": "▁" }
                ]
            }
        }),
    );
    compare(
        "llama-spm",
        4,
        &Tokenizer::from_gguf_vocab(&vocab).unwrap(),
        &theirs,
    );
}
