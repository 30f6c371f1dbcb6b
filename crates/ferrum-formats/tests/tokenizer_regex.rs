//! The regular expressions of `tokenizer.json`: the ids of the `tokenizers` crate, on long texts
//! too, where that crate stops matching without a word.

#![allow(clippy::unwrap_used)]

use ferrum_formats::tokenizer::{EncodeOptions, GgufVocab, Tokenizer, TokenizerError};
use serde_json::{Value, json};
use std::path::PathBuf;
use tempfile::TempDir;

mod texts;

use texts::Random;

const PATTERN: &str = "/pre_tokenizer/pretokenizers/0/pattern/Regex";

fn dir(name: &str) -> PathBuf {
    let fixtures = "../../fixtures/tokenizers";
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(fixtures)
        .join(name)
}

fn json_of(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir(name).join("tokenizer.json")).unwrap()).unwrap()
}

fn theirs(file: &Value) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap()
}

fn ours(file: &Value) -> Tokenizer {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::from_hf_dir(dir.path()).unwrap()
}

fn compare(name: &str, file: &Value, strings: usize) {
    let (ours, theirs) = (ours(file), theirs(file));
    let mut random = Random(strings as u64);
    for _ in 0..strings {
        let text = random.text();
        let found = ours.encode(&text, EncodeOptions::PROMPT).unwrap();
        let expected = theirs.encode_fast(text.as_str(), false).unwrap();
        assert_eq!(found, expected.get_ids(), "{name}: {text:?}");
    }
}

#[test]
fn ids_are_the_crates() {
    for entry in std::fs::read_dir(dir("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        compare(&name, &json_of(&name), 10_000);
    }
}

/// What a split makes of its matches is left to the crate, whatever finds them.
#[test]
fn every_way_to_split() {
    for behavior in [
        "Removed",
        "Isolated",
        "MergedWithPrevious",
        "MergedWithNext",
        "Contiguous",
    ] {
        for invert in [false, true] {
            for pattern in [r"\p{N}{1,3}", r" ?\p{L}+(?! )"] {
                let mut file = json_of("bpe-llama3");
                file["pre_tokenizer"]["pretokenizers"][0] = json!({
                    "type": "Split", "pattern": { "Regex": pattern }, "behavior": behavior,
                    "invert": invert,
                });
                compare(&format!("{pattern} {behavior} {invert}"), &file, 500);
            }
        }
    }
}

/// A text with `part` again and again.
fn long(part: &str, bytes: usize) -> String {
    let middle = part.repeat(bytes / part.len());
    format!("It's 12345 {middle}x And the rest, of\n\n it's 12345!!\n")
}

/// More white space than `fancy-regex` goes back over in search of a line break.
fn spaces() -> String {
    long(" ", 9 << 17)
}

/// The merging of GGUF vocabularies shares nothing with the crate.
#[test]
fn long_texts_get_the_ids_of_the_same_vocabulary_as_gguf() {
    let parts = ["\t", "\u{3000}", "\n ", "\n", "a", "1", "!", "'s"];
    let texts: Vec<_> = parts.map(|part| long(part, 1 << 16)).into();
    for (name, stops) in [
        ("bpe-gpt2", false),
        ("bpe-llama3", true),
        ("bpe-qwen2", true),
    ] {
        let ours = Tokenizer::from_hf_dir(dir(name)).unwrap();
        let vocab = GgufVocab::from_hf_dir(dir(name), ours.vocab_size()).unwrap();
        let gguf = Tokenizer::from_gguf_vocab(&vocab).unwrap();
        let ids = |text: &str| {
            let found = ours.encode(text, EncodeOptions::PROMPT).unwrap();
            let expected = gguf.encode(text, EncodeOptions::PROMPT).unwrap();
            assert!(found == expected, "{name}: {:?}", &text[10..20]);
            found
        };
        for text in &texts {
            ids(text);
        }
        let (found, text) = (ids(&spaces()), spaces());
        let theirs = theirs(&json_of(name)).encode_fast(text, false).unwrap();
        // Once this fails, `regex_steps.rs` has one reason less.
        assert_eq!(theirs.get_ids() != found, stops, "{name}");
    }
}

#[test]
fn an_expression_that_is_not_known_says_that_it_gave_up() {
    let mut file = json_of("bpe-llama3");
    let pattern = file.pointer_mut(PATTERN).unwrap();
    *pattern = pattern.as_str().unwrap().replace("{1,3}", "{1,4}").into();
    compare("four digits", &file, 2_000);
    let tokenizer = ours(&file);
    let said = |text: &str| match tokenizer.encode(text, EncodeOptions::TEXT) {
        Err(TokenizerError::Encode(said)) => said,
        other => panic!("{:?}", other.map(|ids| ids.len())),
    };
    let error = said(&spaces());
    assert!(error.contains("the expression `(?i:'s|"), "{error}");
    assert!(error.contains("backtracking"), "{error}");
    // The next text is none the worse for it.
    assert!(tokenizer.encode("x y", EncodeOptions::TEXT).is_ok());
}

#[test]
fn a_normalizer_says_so_too() {
    let mut file = json_of("bpe-llama3");
    file["normalizer"] = json!({
        "type": "Sequence",
        "normalizers": [
            { "type": "Replace", "pattern": { "Regex": r"\s+(?!\S)" }, "content": " " },
            { "type": "Replace", "pattern": { "String": "x" }, "content": "y" },
        ],
    });
    compare("white space at the end", &file, 2_000);
    file["normalizer"]["normalizers"][0]["pattern"]["Regex"] = json!(r"\s*(?<!\S)[\r\n]");
    compare("white space before breaks", &file, 2_000);
    let error = ours(&file)
        .encode(&spaces(), EncodeOptions::TEXT)
        .unwrap_err();
    let error = error.to_string();
    assert!(error.contains("backtracking"), "{error}");
}
