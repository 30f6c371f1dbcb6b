//! Token ids of real vocabularies against the vectors that come with llama.cpp.

use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_test_support::skip;
use std::path::PathBuf;

#[test]
fn ids_equal_the_vectors() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/tokenizers");
    let Ok(entries) = std::fs::read_dir(&dir) else {
        skip(format_args!("{} is not there", dir.display()));
        return;
    };
    let mut failures = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let side = |ext: &str| std::fs::read_to_string(dir.join(format!("{name}.{ext}"))).unwrap();
        let (texts, ids) = (side("inp"), side("out"));
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        let ids: Vec<&str> = ids.lines().collect();
        assert_eq!(texts.len(), ids.len() + 1, "{name}");
        for (text, expected) in texts.iter().zip(&ids) {
            let found = tokenizer.encode(text, EncodeOptions::PLAIN).unwrap();
            let expected: Vec<u32> = expected
                .split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect();
            if found != expected {
                failures.push(format!(
                    "{name} {text:?}\n  found    {found:?}\n  expected {expected:?}"
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
