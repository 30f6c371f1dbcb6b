//! Grammars in llama.cpp's form: any text becomes a constraint or is refused, and what a constraint accepts does not
//! depend on how tokens split it.
#![no_main]

use ferrum_engine::grammar::{Grammar, GrammarCompiler};
use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_types::TokenId;
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

static DEMO: &[u8] = include_bytes!("../../assets/demo/ferrum-demo.gguf");

struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    /// The token of each byte.
    bytes: Vec<TokenId>,
}

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| {
    let gguf = Gguf::from_static(DEMO).expect("the demo model opens");
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf).expect("it has a tokenizer"));
    let token = |byte: u8| {
        let mut ids = 0..tokenizer.vocab_size() as TokenId;
        let is_byte = |&id: &TokenId| {
            !tokenizer.is_special(id) && tokenizer.token_bytes(id).is_some_and(|b| b == [byte])
        };
        ids.find(is_byte).expect("a byte has a token")
    };
    Vocabulary {
        bytes: (0..=u8::MAX).map(token).collect(),
        compiler: GrammarCompiler::new(Arc::clone(&tokenizer), tokenizer.vocab_size()),
        tokenizer,
    }
});

// A grammar, and behind a null byte a text that is held against it.
fuzz_target!(|data: &[u8]| {
    let Ok(data) = std::str::from_utf8(data) else {
        return;
    };
    let (grammar, text) = data.split_once('\0').unwrap_or((data, ""));
    let constraint = match VOCABULARY
        .compiler
        .compile(&Grammar::Gbnf(grammar.to_owned()))
    {
        Ok(constraint) => constraint,
        Err(refused) => {
            assert!(!refused.to_string().is_empty());
            return;
        }
    };
    let tokens = VOCABULARY
        .tokenizer
        .encode(text, EncodeOptions::PLAIN)
        .expect("the text is short");
    let bytes: Vec<_> = text
        .bytes()
        .map(|byte| VOCABULARY.bytes[byte as usize])
        .collect();
    let started = Instant::now();
    let [whole, bytewise] = [&tokens, &bytes].map(|tokens| constraint.accepts(tokens));
    // What takes longer may have been refused by the time that an answer's masks may take, which starts with 2 s.
    if started.elapsed() < Duration::from_secs(2) {
        assert_eq!(whole, bytewise, "{text:?}");
    }
});
