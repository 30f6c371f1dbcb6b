//! Small tokenizers of every kind against what the `tokenizers` library and transformers make of
//! tricky texts; and the same vocabularies written as GGUF has them.

#![allow(clippy::unwrap_used)]

use ferrum_formats::tokenizer::{EncodeOptions, GgufVocab, Tokenizer, TokenizerKind};
use serde_json::Value;
use std::path::PathBuf;
use unicode_normalization_alignments::UnicodeNormalization;

const PARSED: EncodeOptions = EncodeOptions {
    add_special: false,
    parse_special: true,
};
const WHOLE: EncodeOptions = EncodeOptions {
    add_special: true,
    parse_special: true,
};

const NAMES: [&str; 10] = [
    "bpe-gpt2",
    "bpe-llama2",
    "bpe-llama3",
    "bpe-mistral",
    "bpe-prefix-space",
    "bpe-qwen2",
    "unigram",
    "unigram-charsmap",
    "wordpiece-cased",
    "wordpiece-uncased",
];

fn dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/tokenizers")
        .join(name)
}

fn read(name: &str, file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir(name).join(file)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// The text that a stream gives, token by token.
fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.decode_stream(skip_special);
    let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
    text.push_str(&stream.finish());
    text
}

fn report(what: &str, failures: &[String]) {
    assert!(
        failures.is_empty(),
        "{what}: {} differ\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn hugging_face_folders() {
    for name in NAMES {
        let tokenizer = Tokenizer::from_hf_dir(dir(name)).unwrap();
        let mut failures = Vec::new();
        for case in read(name, "expected.json")["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let whole = tokenizer.encode(text, WHOLE).unwrap();
            let bare = tokenizer.encode(text, PARSED).unwrap();
            let found = [
                (bare == ids(&case["ids"]), "ids"),
                (whole == ids(&case["ids_with_special"]), "ids_with_special"),
                (tokenizer.decode(&bare, false) == case["decoded"], "decoded"),
                (
                    tokenizer.decode(&bare, true) == case["decoded_without_special"],
                    "decoded_without_special",
                ),
                (
                    streamed(&tokenizer, &whole, false) == tokenizer.decode(&whole, false),
                    "stream",
                ),
                (
                    streamed(&tokenizer, &whole, true) == tokenizer.decode(&whole, true),
                    "stream_without_special",
                ),
            ];
            for (_, what) in found.iter().filter(|(good, _)| !good) {
                let stream = streamed(&tokenizer, &whole, false);
                failures.push(format!("{name} {what}: {whole:?} {stream:?} {case}"));
            }
        }
        report(name, &failures);
    }
}

#[test]
fn plain_text_never_becomes_a_special_token() {
    for name in NAMES {
        let tokenizer = Tokenizer::from_hf_dir(dir(name)).unwrap();
        for id in (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_special(id)) {
            let text = tokenizer.token_text(id).unwrap();
            let around = format!("a{text} b");
            assert!(
                tokenizer.encode(&around, PARSED).unwrap().contains(&id),
                "{name} {text}"
            );
            let plain = tokenizer.encode(&around, EncodeOptions::PLAIN).unwrap();
            let unknown = tokenizer.special().unk;
            let special = |&id: &u32| tokenizer.is_special(id) && Some(id) != unknown;
            assert!(!plain.iter().any(special), "{name} {text}: {plain:?}");
        }
    }
}

#[test]
fn kinds_and_special_tokens() {
    let cases = [
        (
            "bpe-gpt2",
            TokenizerKind::ByteLevelBpe,
            Some(700),
            &[700][..],
        ),
        ("bpe-llama2", TokenizerKind::TextBpe, Some(1), &[2]),
        ("unigram", TokenizerKind::Unigram, None, &[1]),
        ("wordpiece-cased", TokenizerKind::WordPiece, None, &[]),
    ];
    for (name, kind, bos, ends) in cases {
        let tokenizer = Tokenizer::from_hf_dir(dir(name)).unwrap();
        assert_eq!(tokenizer.kind(), kind, "{name}");
        assert_eq!(tokenizer.bos(), bos, "{name}");
        assert_eq!(tokenizer.eos_ids(), ends, "{name}");
    }
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut out = Vec::new();
    for chunk in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = chunk
            .iter()
            .fold(0u32, |bits, &c| bits << 6 | u32::from(digit(c)));
        let bits = bits << (6 * (4 - chunk.len()));
        out.extend(&bits.to_be_bytes()[1..chunk.len()]);
    }
    out
}

/// A `tokenizer.json` as a conversion to GGUF writes it.
fn converted(name: &str, model: &str, pre: Option<&str>) -> GgufVocab {
    let file = read(name, "tokenizer.json");
    let table = &file["model"]["vocab"];
    let mut tokens: Vec<(u32, String, f32)> = match table {
        Value::Object(table) => table
            .iter()
            .map(|(text, id)| (id.as_u64().unwrap() as u32, text.clone()))
            .map(|(id, text)| (id, text, -(id as f32)))
            .collect(),
        list => (0..)
            .zip(list.as_array().unwrap())
            .map(|(id, pair)| {
                (
                    id,
                    pair[0].as_str().unwrap().to_owned(),
                    pair[1].as_f64().unwrap() as f32,
                )
            })
            .collect(),
    };
    let added = file["added_tokens"].as_array().unwrap();
    for token in added {
        let id = token["id"].as_u64().unwrap() as u32;
        if tokens.iter().all(|&(known, ..)| known != id) {
            tokens.push((id, token["content"].as_str().unwrap().to_owned(), 0.0));
        }
    }
    tokens.sort_by_key(|&(id, ..)| id);
    let mut types: Vec<i32> = tokens
        .iter()
        .map(|(_, text, _)| {
            if text.starts_with("<0x") && text.len() == 6 {
                6
            } else {
                1
            }
        })
        .collect();
    for token in added {
        let kind = if token["special"] == true { 3 } else { 4 };
        types[token["id"].as_u64().unwrap() as usize] = kind;
    }
    let config = read(name, "tokenizer_config.json");
    let id = |key: &str| {
        let text = config[key].as_str()?;
        Some(tokens.iter().find(|(_, known, _)| known == text)?.0)
    };
    let merges = file["model"]["merges"].as_array().into_iter().flatten();
    let wordpiece = model == "bert";
    GgufVocab {
        model: model.into(),
        pre: pre.map(str::to_owned),
        bos: id("bos_token").or(id("cls_token")),
        eos: id("eos_token"),
        unk: id("unk_token"),
        sep: id("sep_token"),
        token_types: Some(types.clone()),
        scores: Some(tokens.iter().map(|&(.., score)| score).collect()),
        merges: merges
            .map(|pair| match pair {
                Value::String(pair) => pair.clone(),
                pair => format!(
                    "{} {}",
                    pair[0].as_str().unwrap(),
                    pair[1].as_str().unwrap()
                ),
            })
            .collect(),
        tokens: tokens
            .into_iter()
            .zip(types)
            .map(|((_, text, _), kind)| match text.strip_prefix("##") {
                Some(rest) if wordpiece => rest.to_owned(),
                None if wordpiece && kind == 1 => format!("▁{text}"),
                _ => text,
            })
            .collect(),
        ..GgufVocab::default()
    }
}

/// Ids of a converted vocabulary against the library's, where the two can agree.
fn compare(name: &str, vocab: &GgufVocab, comparable: impl Fn(&str) -> bool) {
    let tokenizer = Tokenizer::from_gguf_vocab(vocab).unwrap();
    assert!(
        tokenizer.warnings().is_empty(),
        "{:?}",
        tokenizer.warnings()
    );
    let mut failures = Vec::new();
    let mut compared = 0;
    for case in read(name, "expected.json")["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        // Whole-word tokens and tokens that swallow white space have no key in GGUF.
        let flagged = ["<mask>", "<trim>", "<both>", "<word>", "newword"];
        let lower = text.to_lowercase();
        if flagged.iter().any(|token| lower.contains(token)) || !comparable(text) {
            continue;
        }
        compared += 1;
        let found = tokenizer.encode(text, WHOLE).unwrap();
        if found != ids(&case["ids_with_special"]) {
            failures.push(format!("{text:?}\n  found    {found:?}\n  expected {case}"));
        }
    }
    assert!(compared > 150, "{name}: only {compared} texts");
    report(name, &failures);
}

#[test]
fn converted_byte_pairs() {
    let gpt2 = GgufVocab {
        add_bos: Some(false),
        ..converted("bpe-gpt2", "gpt2", Some("gpt-2"))
    };
    // Tokens that swallow white space have no key in GGUF.
    compare("bpe-gpt2", &gpt2, |text| {
        !text.contains("<mask>") && !text.contains("<trim>")
    });
    compare(
        "bpe-llama3",
        &converted("bpe-llama3", "gpt2", Some("llama-bpe")),
        |_| true,
    );
    // The file's NFC normaliser has no key in GGUF either.
    compare(
        "bpe-qwen2",
        &converted("bpe-qwen2", "gpt2", Some("qwen2")),
        |text| text.nfc().map(|(c, _)| c).eq(text.chars()),
    );
}

#[test]
fn converted_sentencepiece() {
    compare(
        "bpe-llama2",
        &converted("bpe-llama2", "llama", None),
        |_| true,
    );
}

#[test]
fn converted_unigram() {
    let file = read("unigram-charsmap", "tokenizer.json");
    let charsmap = file["normalizer"]["normalizers"][0]["precompiled_charsmap"]
        .as_str()
        .unwrap();
    let vocab = GgufVocab {
        add_bos: Some(true),
        add_eos: Some(true),
        add_space_prefix: Some(true),
        remove_extra_whitespaces: Some(true),
        precompiled_charsmap: Some(base64(charsmap)),
        ..converted("unigram-charsmap", "t5", None)
    };
    compare("unigram-charsmap", &vocab, |text| {
        // The library maps whole grapheme clusters, matches `<0x41>` in text, puts no prefix
        // before a `▁` of the text's own, and none after special tokens.
        !["▁", "<0x", "<s>", "</s>", "e\u{301}\u{302}", "\u{85}"]
            .iter()
            .any(|part| text.contains(part))
    });
}

#[test]
fn converted_wordpiece() {
    for (name, lowercase) in [("wordpiece-cased", false), ("wordpiece-uncased", true)] {
        let vocab = GgufVocab {
            lowercase: Some(lowercase),
            ..converted(name, "bert", None)
        };
        // Longer words are unknown to the library.
        compare(name, &vocab, |text| {
            text.split_whitespace()
                .all(|word| word.chars().count() <= 30)
        });
    }
}
