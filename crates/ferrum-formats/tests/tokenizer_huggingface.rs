//! GGUF vocabularies against the `tokenizers` crate, on random text: the same vocabulary, merges
//! and regular expression must give the same ids.

#![allow(clippy::unwrap_used)]

use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, GgufVocab, Tokenizer};
use ferrum_test_support::skip;
use serde_json::{Value, json};
use std::path::PathBuf;

mod texts;

use texts::Random;

const STRINGS: usize = 100_000;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn vocab(name: &str) -> Option<GgufVocab> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/tokenizers")
        .join(format!("ggml-vocab-{name}.gguf"));
    if !path.exists() {
        skip(format_args!("{} is not there", path.display()));
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
