//! The tokenizer of a folder as a GGUF vocabulary: the same tokens for the same texts.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_formats::Gguf;
use ferrum_formats::gguf::Writer;
use ferrum_formats::tokenizer::{EncodeOptions, GgufVocab, Tokenizer};
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
