//! The tokenizer of a folder as a GGUF vocabulary: the same tokens for the same texts.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_formats::Gguf;
use ferrum_formats::gguf::Writer;
use ferrum_formats::tokenizer::{EncodeOptions, FimIds, GgufVocab, Tokenizer};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/tokenizers")
        .join(name)
}

const TEXTS: [&str; 7] = [
    "a",
    "Hello, World's end! 123 4567",
    "x  two  spaces é ß İ",
    "日本語 한국어 😀👩‍👩‍👧",
    "camelCase HTTPServer\n\n  y\t z ",
    "don't WE'LL 1,234.5 ½ ²",
    "<s> [INST] <|endoftext|> <unk>",
];

#[test]
fn vocabularies_make_the_same_tokens() {
    for (name, model, pre) in [
        ("bpe-gpt2", "gpt2", "gpt-2"),
        ("bpe-llama2", "llama", "default"),
        ("bpe-llama3", "gpt2", "llama-bpe"),
        ("bpe-mistral", "llama", "default"),
        ("bpe-qwen2", "gpt2", "qwen2"),
    ] {
        let ours = Tokenizer::from_hf_dir(fixture(name)).unwrap();
        let rows = ours.vocab_size() + 5;
        let vocab = GgufVocab::from_hf_dir(fixture(name), rows).unwrap();
        assert_eq!(
            (&*vocab.model, vocab.pre.as_deref()),
            (model, Some(pre)),
            "{name}"
        );
        assert_eq!(vocab.tokens.len(), rows, "{name}");
        assert_eq!(
            vocab.tokens.last(),
            Some(&format!("[PAD{}]", rows - 1)),
            "{name}"
        );
        // By way of a file, as a reader has it.
        let mut w = Writer::new("vocab.gguf");
        vocab.write(&mut w).unwrap();
        let bytes = w.start(Vec::new()).unwrap().finish().unwrap();
        let file = Gguf::from_vec("vocab.gguf", bytes).unwrap();
        assert_eq!(GgufVocab::from_gguf(&file).unwrap(), vocab, "{name}");
        let theirs = Tokenizer::from_gguf(&file).unwrap();
        for text in TEXTS {
            for options in [EncodeOptions::TEXT, EncodeOptions::PLAIN] {
                let (a, b) = (
                    ours.encode(text, options).unwrap(),
                    theirs.encode(text, options).unwrap(),
                );
                assert_eq!(a, b, "{name}: {text:?} {options:?}");
            }
        }
    }
}

#[test]
fn what_the_format_cannot_say_is_refused() {
    let cases = [
        ("bpe-prefix-space", 5000, "add_prefix_space"),
        ("unigram", 50_000, "byte-pair"),
        ("wordpiece-cased", 50_000, "byte-pair"),
        ("bpe-gpt2", 10, "10 rows"),
    ];
    for (name, rows, part) in cases {
        let error = GgufVocab::from_hf_dir(fixture(name), rows)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{name}: {error}");
    }
}

/// A file of a vocabulary, to which `more` adds keys.
fn written(vocab: &GgufVocab, more: impl FnOnce(&mut Writer)) -> Gguf {
    let mut w = Writer::new("vocab.gguf");
    vocab.write(&mut w).unwrap();
    more(&mut w);
    let bytes = w.start(Vec::new()).unwrap().finish().unwrap();
    Gguf::from_vec("vocab.gguf", bytes).unwrap()
}

#[test]
fn the_tokens_that_fill_in_the_middle_are_found() {
    let plain = fixture("bpe-qwen2");
    let ours = Tokenizer::from_hf_dir(&plain).unwrap();
    assert_eq!(ours.fim(), None);
    let first = ours.vocab_size() as u32;
    // As some makers have it, these are added tokens and not special.
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(&plain).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    for (id, mark) in (first..).zip(marks) {
        let token = serde_json::json!({
            "id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        });
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    std::fs::write(&path, json.to_string()).unwrap();
    let coder = Tokenizer::from_hf_dir(dir.path()).unwrap();
    let found = coder.fim().unwrap();
    let ids = (found.prefix, found.suffix, found.middle);
    assert_eq!(ids, (first, first + 1, Some(first + 2)));
    // The same by way of a file, where they are found by their spellings, too.
    let vocab = GgufVocab::from_hf_dir(dir.path(), first as usize + 3).unwrap();
    let theirs = Tokenizer::from_gguf(&written(&vocab, |_| ())).unwrap();
    assert_eq!(theirs.fim(), Some(found));
}

#[test]
fn a_file_names_the_tokens_that_fill_in_the_middle() {
    let ours = Tokenizer::from_hf_dir(fixture("bpe-qwen2")).unwrap();
    let plain = GgufVocab::from_hf_dir(fixture("bpe-qwen2"), ours.vocab_size()).unwrap();
    let named = GgufVocab {
        fim: FimIds {
            prefix: Some(5),
            suffix: Some(6),
            middle: Some(7),
            pad: Some(8),
            repo: Some(9),
            file: Some(10),
        },
        ..plain.clone()
    };
    let file = written(&named, |_| ());
    assert_eq!(GgufVocab::from_gguf(&file).unwrap(), named);
    let found = Tokenizer::from_gguf(&file).unwrap().fim().unwrap();
    assert_eq!((found.repo, found.file), (Some(9), Some(10)));
    assert_eq!(found.ends, [5, 6, 7, 8, 9, 10]);
    // Older files have other names; ids that are not in the vocabulary are none.
    let older = written(&plain, |w| {
        for (name, id) in [("prefix", 5u32), ("suffix", 6), ("middle", 1 << 30)] {
            let key = format!("tokenizer.ggml.{name}_token_id");
            w.set(&key, id).unwrap();
        }
    });
    let found = Tokenizer::from_gguf(&older).unwrap().fim().unwrap();
    assert_eq!((found.prefix, found.suffix, found.middle), (5, 6, None));
}
