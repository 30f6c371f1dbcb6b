//! Vocabularies and texts: whatever vocabulary is accepted must encode any text to its own ids and
//! decode them, in one go and in a stream, without a panic.
#![no_main]

use ferrum_formats::tokenizer::{EncodeOptions, GgufVocab, Tokenizer};
use libfuzzer_sys::fuzz_target;

/// Takes a piece ending at a line feed.
fn line<'a>(data: &mut &'a [u8]) -> &'a [u8] {
    let end = data.iter().position(|&b| b == b'\n').unwrap_or(data.len());
    let (head, rest) = data.split_at(end);
    *data = rest.get(1..).unwrap_or(&[]);
    head
}

fn words(bytes: &[u8]) -> Vec<String> {
    bytes
        .split(|&b| b == b'\t')
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fuzz_target!(|data: &[u8]| {
    let mut data = data;
    let model = String::from_utf8_lossy(line(&mut data)).into_owned();
    let pre = String::from_utf8_lossy(line(&mut data)).into_owned();
    let (tokens, merges) = (words(line(&mut data)), words(line(&mut data)));
    let numbers = line(&mut data);
    let charsmap = line(&mut data).to_vec();
    let text = String::from_utf8_lossy(data);
    let number = |at: usize| numbers.get(at).map(|&b| u32::from(b));
    let vocab = GgufVocab {
        model,
        pre: Some(pre).filter(|pre| !pre.is_empty()),
        token_types: Some(numbers.iter().map(|&b| i32::from(b % 8)).collect())
            .filter(|types: &Vec<i32>| types.len() >= tokens.len()),
        scores: Some(numbers.iter().map(|&b| f32::from(b) - 128.0).collect())
            .filter(|scores: &Vec<f32>| scores.len() >= tokens.len()),
        tokens,
        merges,
        bos: number(0),
        eos: number(1),
        unk: number(2),
        sep: number(3),
        precompiled_charsmap: Some(charsmap).filter(|map| !map.is_empty()),
        ..GgufVocab::default()
    };
    let Ok(tokenizer) = Tokenizer::from_gguf_vocab(&vocab) else {
        return;
    };
    for add_special in [false, true] {
        for parse_special in [false, true] {
            let options = EncodeOptions {
                add_special,
                parse_special,
            };
            let ids = tokenizer.encode(&text, options).expect("the text is short");
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
            let mut stream = tokenizer.decode_stream(parse_special);
            let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
            streamed.push_str(&stream.finish());
            assert_eq!(streamed, tokenizer.decode(&ids, parse_special));
        }
    }
    tokenizer.summary();
});
