//! Vocabularies of every kind on texts made to hurt, and vocabularies made to hurt.

#![allow(clippy::unwrap_used)]

use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{
    EncodeOptions, GgufVocab, MAX_TEXT_BYTES, Tokenizer, TokenizerError, TokenizerKind,
};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::OnceLock;

mod texts;

/// Tokens of bytes and a few words, in the GPT-2 alphabet.
fn byte_level(pre: &str) -> GgufVocab {
    let alphabet = (0..=255u8).map(|byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0..=b' ' => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7F..=0xA0 => char::from_u32(0x121 + u32::from(byte - 0x7F)).unwrap(),
        0xAD => '\u{143}',
    });
    let mut tokens: Vec<String> = alphabet.map(String::from).collect();
    let merges = [
        "a a",
        "aa aa",
        "aaaa aaaa",
        "Ġ a",
        "h e",
        "l l",
        "he ll",
        "Ġ Ġ",
        "ĠĠ ĠĠ",
    ];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut types = vec![1; tokens.len()];
    for (token, kind) in [("<|im_end|>", 3), ("<tool>", 4), ("<|endoftext|>", 3)] {
        tokens.push(token.into());
        types.push(kind);
    }
    let eos = tokens.len() as u32 - 1;
    GgufVocab {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens,
        token_types: Some(types),
        merges: merges.map(str::to_owned).into(),
        bos: Some(eos),
        eos: Some(eos),
        ..GgufVocab::default()
    }
}

/// A small vocabulary with byte fallback and scores.
fn spaces(model: &str) -> GgufVocab {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    let mut types = vec![2, 3, 3];
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    types.extend([6; 256]);
    let words = [
        "▁", "a", "aa", "aaaa", "▁a", "b", "ab", "▁ab", "▁▁", "é", "s", ">", "<", "/",
    ];
    tokens.extend(words.map(str::to_owned));
    types.extend([1; 14]);
    GgufVocab {
        model: model.into(),
        scores: Some((0..tokens.len()).map(|id| -(id as f32)).collect()),
        tokens,
        token_types: Some(types),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        add_space_prefix: Some(true),
        ..GgufVocab::default()
    }
}

const PRE: [&str; 22] = [
    "default",
    "gpt-2",
    "llama-bpe",
    "qwen2",
    "qwen35",
    "starcoder",
    "falcon",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "afmoe",
    "spark2_5",
    "bloom",
    "viking",
    "tekken",
    "gpt-4o",
    "tiny_aya",
    "kimi-k2",
    "youtu",
    "exaone-moe",
    "jais-2",
    "superbpe",
];

fn all() -> &'static [(String, Tokenizer)] {
    static ALL: OnceLock<Vec<(String, Tokenizer)>> = OnceLock::new();
    ALL.get_or_init(|| {
        let byte_pairs = PRE.iter().map(|pre| (*pre, byte_level(pre)));
        let others = ["llama", "t5"].map(|model| (model, spaces(model)));
        byte_pairs
            .chain(others)
            .map(|(name, vocab)| (name.to_owned(), Tokenizer::from_gguf_vocab(&vocab).unwrap()))
            .collect()
    })
}

/// Would not come back in an hour if anything were quadratic.
#[test]
fn long_texts_without_structure() {
    let long = |part: &str| part.repeat((1 << 18) / part.len());
    let texts = [
        long("a"),
        long(" "),
        long("\n"),
        long(" \n"),
        long("\t") + "x",
        long("1"),
        long("'"),
        long("'s"),
        long("<"),
        long("<tool>"),
        long("中"),
        long("é"),
        long("\u{301}"),
        long("aB"),
        long("!"),
        long("\0"),
    ];
    for (name, tokenizer) in all() {
        for text in &texts {
            let ids = tokenizer.encode(text, EncodeOptions::PLAIN).unwrap();
            assert!(!ids.is_empty(), "{name}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// With a token for every byte, nothing is lost: not in one go and not in a stream.
    #[test]
    fn decoding_gives_the_text_back(seed in any::<u64>()) {
        let text = texts::Random(seed).text();
        for (name, tokenizer) in all().iter().filter(|(name, _)| name != "t5") {
            let ids = tokenizer.encode(&text, EncodeOptions::PLAIN).unwrap();
            // A `▁` is a space to a SentencePiece vocabulary.
            let expected = if name == "llama" { text.replace('▁', " ") } else { text.clone() };
            prop_assert_eq!(tokenizer.decode(&ids, true), expected.clone(), "{}", name);
            let mut stream = tokenizer.decode_stream(true);
            let mut streamed = String::new();
            for id in ids {
                let piece = stream.push(id);
                prop_assert!(expected[streamed.len()..].starts_with(&piece), "{}: {:?}", name, piece);
                streamed.push_str(&piece);
            }
            prop_assert_eq!(stream.finish(), "");
            prop_assert_eq!(streamed, expected, "{}", name);
        }
    }

    /// Any vocabulary either is refused or works.
    #[test]
    fn any_vocabulary_gives_a_result(
        model in proptest::sample::select(vec!["gpt2", "llama", "bert", "t5", "gemma4", "rwkv", ""]),
        pre in proptest::option::of(proptest::sample::select(PRE.to_vec())),
        tokens in proptest::collection::vec("[ab▁Ġ<>0x41#é]{0,4}", 0..20),
        types in proptest::option::of(proptest::collection::vec(-1..9i32, 0..25)),
        scores in proptest::option::of(proptest::collection::vec(any::<f32>(), 0..25)),
        merges in proptest::collection::vec("[ab Ġé]{0,4}", 0..6),
        ids in proptest::array::uniform4(proptest::option::of(0..30u32)),
        charsmap in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40)),
        text in "[ab <>0x41#é▁\n]{0,20}",
    ) {
        let [bos, eos, unk, sep] = ids;
        let vocab = GgufVocab {
            model: model.into(),
            pre: pre.map(str::to_owned),
            tokens,
            token_types: types,
            scores,
            merges,
            bos,
            eos,
            unk,
            sep,
            precompiled_charsmap: charsmap,
            ..GgufVocab::default()
        };
        if let Ok(tokenizer) = Tokenizer::from_gguf_vocab(&vocab) {
            let all = EncodeOptions { add_special: true, parse_special: true };
            for options in [EncodeOptions::PLAIN, EncodeOptions::TEXT, all] {
                let ids = tokenizer.encode(&text, options).unwrap();
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
                tokenizer.decode(&ids, false);
            }
            tokenizer.decode(&[0, 29, u32::MAX], true);
            tokenizer.summary();
        }
    }
}

#[test]
fn special_tokens_are_parsed_only_when_asked() {
    let tokenizer = Tokenizer::from_gguf_vocab(&byte_level("qwen2")).unwrap();
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    let tool = tokenizer.token_id("<tool>").unwrap();
    let text = "a<|im_end|>a<tool>a";
    let prompt = tokenizer.encode(text, EncodeOptions::PROMPT).unwrap();
    assert!(prompt.contains(&end) && prompt.contains(&tool));
    let plain = tokenizer.encode(text, EncodeOptions::PLAIN).unwrap();
    assert!(!plain.contains(&end) && plain.contains(&tool));
    for ids in [&prompt, &plain] {
        assert_eq!(tokenizer.decode(ids, false), text);
    }
    assert_eq!(tokenizer.decode(&prompt, true), "aa<tool>a");
    let eos = tokenizer.special().eos.unwrap();
    assert_eq!(tokenizer.eos_ids(), [eos, end]);
    assert!(tokenizer.is_special(end) && !tokenizer.is_special(tool));
}

#[test]
fn the_start_of_a_sentencepiece_text() {
    let tokenizer = Tokenizer::from_gguf_vocab(&spaces("llama")).unwrap();
    let id = |text: &str| tokenizer.token_id(text).unwrap();
    let text = |text| tokenizer.encode(text, EncodeOptions::TEXT).unwrap();
    assert_eq!(text(""), [1]);
    assert_eq!(text("a"), [1, id("▁a")]);
    assert_eq!(text(" a"), [1, id("▁"), id("▁a")]);
    let prompt = tokenizer.encode("a<s>a", EncodeOptions::PROMPT).unwrap();
    assert_eq!(prompt, [id("▁a"), 1, id("▁a")]);
    // The space is taken off at the start of a text, not where one goes on.
    assert_eq!(tokenizer.decode(&[1, id("▁a"), id("▁a")], true), "a a");
    assert_eq!(
        tokenizer.decode_stream(true).continued().push(id("▁a")),
        " a"
    );
    assert_eq!(tokenizer.token_bytes(id("<0x0A>")), Some(vec![b'\n']));
    assert_eq!(tokenizer.token_bytes(id("▁ab")), Some(b" ab".to_vec()));
    assert_eq!(tokenizer.token_bytes(9_999), None);
    // Text that spells a special token is not one, though its letters could be joined to it.
    assert!(
        !tokenizer
            .encode("</s>", EncodeOptions::PLAIN)
            .unwrap()
            .contains(&2)
    );
}

/// Scores rank tokens, not pairs: of two that score the same, the one on the left is made first.
#[test]
fn equal_scores_join_from_the_left() {
    let tokens = ["<unk>", "a", "b", "ab", "ba"].map(str::to_owned).to_vec();
    let vocab = GgufVocab {
        model: "llama".into(),
        scores: Some(vec![0.0, -2.0, -2.0, -1.0, -1.0]),
        token_types: Some(vec![2, 1, 1, 1, 1]),
        tokens,
        add_space_prefix: Some(false),
        ..GgufVocab::default()
    };
    let tokenizer = Tokenizer::from_gguf_vocab(&vocab).unwrap();
    let ids = |text: &str| tokenizer.encode(text, EncodeOptions::PLAIN).unwrap();
    assert_eq!((ids("aba"), ids("bab")), (vec![3, 1], vec![4, 2]));
}

#[test]
fn a_stream_waits_for_whole_characters() {
    let tokenizer = Tokenizer::from_gguf_vocab(&byte_level("gpt-2")).unwrap();
    let mut stream = tokenizer.decode_stream(false);
    let ids = "€".bytes().map(u32::from);
    let pieces: Vec<String> = ids.map(|id| stream.push(id)).collect();
    assert_eq!(pieces, ["", "", "€"]);
    // A byte that cannot begin a character, then one that cannot go on with it.
    assert_eq!(stream.push(0xFF), "\u{FFFD}");
    assert_eq!(stream.push(0xE2), "");
    assert_eq!(stream.push(u32::from(b'a')), "\u{FFFD}a");
    assert_eq!(stream.push(0xE2), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
}

#[test]
fn what_is_wrong_is_said() {
    let refused = |vocab: &GgufVocab| Tokenizer::from_gguf_vocab(vocab).unwrap_err().to_string();
    let rwkv = GgufVocab {
        model: "rwkv".into(),
        ..byte_level("gpt-2")
    };
    assert!(refused(&rwkv).starts_with("tokenizer.ggml.model is `rwkv`, expected one of"));
    let bare = GgufVocab {
        merges: Vec::new(),
        ..byte_level("gpt-2")
    };
    assert!(refused(&bare).contains("tokenizer.ggml.merges: missing"));
    let short = GgufVocab {
        scores: Some(vec![0.0]),
        ..spaces("llama")
    };
    assert!(refused(&short).contains("tokenizer.ggml.scores: found 1 scores, expected"));
    let unknown = Tokenizer::from_gguf_vocab(&byte_level("no-such-pre")).unwrap();
    assert!(unknown.warnings()[0].contains("`no-such-pre`, which is not known"));
    assert_eq!(unknown.kind(), TokenizerKind::ByteLevelBpe);
    let long = "a".repeat(MAX_TEXT_BYTES + 1);
    let result = unknown.encode(&long, EncodeOptions::PLAIN);
    assert!(matches!(result, Err(TokenizerError::TextTooLong { .. })));
    let missing = Tokenizer::from_hf_dir("/nonexistent-folder").unwrap_err();
    assert!(matches!(missing, TokenizerError::NoTokenizerFile { .. }));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{\"model\": 1}").unwrap();
    let broken = Tokenizer::from_hf_dir(dir.path()).unwrap_err();
    assert!(matches!(broken, TokenizerError::BadFile { .. }));
}

#[test]
fn fixture_models_tokenize_alike_from_both_files() {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let mut compared = 0;
    for entry in std::fs::read_dir(models).unwrap() {
        let dir = entry.unwrap().path();
        let gguf = dir.join("model.gguf");
        if !gguf.exists() {
            continue;
        }
        let gguf = Gguf::open(&gguf).unwrap();
        if !gguf.has("tokenizer.ggml.model") {
            continue;
        }
        let (a, b) = (
            Tokenizer::from_hf_dir(&dir).unwrap(),
            Tokenizer::from_gguf(&gguf).unwrap(),
        );
        compared += 1;
        for seed in 0..50 {
            let text = texts::Random(seed).text();
            let ids =
                |tokenizer: &Tokenizer| tokenizer.encode(&text, EncodeOptions::PLAIN).unwrap();
            assert_eq!(ids(&a), ids(&b), "{}: {text:?}", dir.display());
        }
        assert_eq!(a.eos_ids(), b.eos_ids(), "{}", dir.display());
        assert_eq!(a.bos(), b.bos(), "{}", dir.display());
    }
    assert!(compared > 0, "no fixture model has both files");
}

/// A `tokenizer.json` with this normalizer, in a folder of its own.
fn with_normalizer(dir: &std::path::Path, normalizer: serde_json::Value) -> std::path::PathBuf {
    let file = serde_json::json!({
        "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    });
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
    dir.into()
}

#[test]
fn normalizers_that_blow_texts_up_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let replace = |pattern: serde_json::Value, content: &str| serde_json::json!({"type": "Replace", "pattern": pattern, "content": content});
    let any = || serde_json::json!({"Regex": "."});
    let growing = replace(any(), &"x".repeat(10));
    let prefix = serde_json::json!({"type": "Prepend", "prepend": "x".repeat(2000)});
    let sequence = |steps: Vec<serde_json::Value>| serde_json::json!({"type": "Sequence", "normalizers": steps});
    let cases = [
        (
            replace(serde_json::json!({"String": ""}), "x"),
            "replaces the empty text",
        ),
        (
            sequence(vec![growing.clone(); 12]),
            "multiplies a text by up to 1000000000000",
        ),
        (prefix, "adds 2000 bytes"),
    ];
    for (normalizer, expected) in cases {
        let found = Tokenizer::from_hf_dir(with_normalizer(dir.path(), normalizer));
        let said = found.unwrap_err().to_string();
        assert!(said.contains("tokenizer.json: normalizer: "), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    let harmless = sequence(vec![
        growing,
        replace(serde_json::json!({"String": " "}), "▁"),
    ]);
    assert!(Tokenizer::from_hf_dir(with_normalizer(dir.path(), harmless)).is_ok());
}

/// The crate would free the tree of such a vocabulary until the stack is full.
#[test]
fn long_tokens_are_refused() {
    let write = |vocab: serde_json::Value, normalizer: serde_json::Value| {
        let dir = tempfile::tempdir().unwrap();
        let file = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": null,
            "post_processor": null, "decoder": null,
            "model": {"type": "Unigram", "vocab": vocab, "unk_id": 0},
        });
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::from_hf_dir(dir.path()).map_err(|error| error.to_string())
    };
    let null = serde_json::Value::Null;
    let token = |bytes: usize| serde_json::json!([["<unk>", 0.0], ["a".repeat(bytes), -1.0]]);
    assert!(write(token(8 << 10), null.clone()).is_ok());
    let quotes = serde_json::json!([["\\\"".repeat(2 << 10), 0.0]]);
    assert!(write(quotes, null.clone()).is_ok());
    let said = write(token(1 << 20), null).unwrap_err();
    assert!(
        said.contains("a text of 1048576 bytes, expected at most 8192"),
        "{said}"
    );
    // Nothing is wrong with the length of a character map, though this one is none.
    let map =
        serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "A".repeat(16 << 10)});
    let said = write(token(1), map).map_or_else(|said| said, |_| String::new());
    assert!(!said.contains("a text of"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_tokenizer_file_must_be_a_file() {
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let dir = tempfile::tempdir().unwrap();
        with_normalizer(dir.path(), serde_json::Value::Null);
        let _ = std::fs::remove_file(dir.path().join(name));
        std::os::unix::fs::symlink("/dev/zero", dir.path().join(name)).unwrap();
        let said = Tokenizer::from_hf_dir(dir.path()).unwrap_err().to_string();
        assert!(said.contains("is not a regular file"), "{said}");
    }
}
