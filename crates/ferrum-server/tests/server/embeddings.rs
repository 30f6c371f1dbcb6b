//! `/v1/embeddings` and `/openapi.json`.

use super::{Running, demo_model, load};
use ferrum_engine::EngineConfig;
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::read_model;
use ferrum_server::{LoadedModel, ServerConfig};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const PATH: &str = "/v1/embeddings";

fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    let data = answer["data"].as_array().unwrap().iter().enumerate();
    let vector = |(i, entry): (usize, &Value)| {
        assert_eq!(entry["object"], "embedding");
        assert_eq!(entry["index"], i);
        serde_json::from_value(entry["embedding"].clone()).unwrap()
    };
    data.map(vector).collect()
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[test]
fn texts_and_tokens_give_the_same_vectors() {
    let server = Running::demo();
    let texts = [
        "Once upon a time",
        "there was a fox",
        "",
        "Once upon a time",
    ];
    let ids = |text: &str| server.ask("/tokenize", &json!({"prompt": text}))["tokens"].clone();
    let all = server.ask(PATH, &json!({"model": "demo", "input": &texts[..2]}));
    assert_eq!(all["object"], "list");
    assert_eq!(all["model"], "demo");
    let expected = vectors(&all);
    assert_eq!(expected.len(), 2);
    assert_ne!(expected[0], expected[1]);
    for vector in &expected {
        assert!((length(vector) - 1.0).abs() < 1e-5);
    }
    let tokens: usize = texts[..2]
        .iter()
        .map(|t| ids(t).as_array().unwrap().len())
        .sum();
    assert_eq!(
        all["usage"],
        json!({"prompt_tokens": tokens, "total_tokens": tokens})
    );
    for (input, which) in [
        (json!(texts[0]), 0..1),
        (ids(texts[1]), 1..2),
        (json!([ids(texts[0]), ids(texts[1])]), 0..2),
    ] {
        let answer = server.ask(PATH, &json!({"input": input, "encoding_format": "float"}));
        assert_eq!(vectors(&answer), expected[which], "{input}");
    }
}

#[test]
fn vectors_can_be_shorter_and_bytes() {
    let server = Running::demo();
    let ask = |more: Value| {
        let mut body = json!({"input": "Once upon a time"});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.ask(PATH, &body)
    };
    let whole = vectors(&ask(json!({}))).remove(0);
    let short = vectors(&ask(json!({"dimensions": 8}))).remove(0);
    assert_eq!(short.len(), 8);
    assert!((length(&short) - 1.0).abs() < 1e-5);
    let scale = length(&whole[..8]);
    for (short, whole) in short.iter().zip(&whole) {
        assert!((short * scale - whole).abs() < 1e-6);
    }
    let answer = ask(json!({"encoding_format": "base64"}));
    let text = answer["data"][0]["embedding"].as_str().unwrap();
    let bytes = decode(text);
    let floats = bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    assert_eq!(floats.collect::<Vec<_>>(), whole);
}

/// Base64 by its definition.
pub(super) fn decode(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter(|&c| c != b'=');
    let digits = digits.map(|c| ALPHABET.iter().position(|&other| other == c).unwrap());
    let (mut out, mut held, mut bits) = (Vec::new(), 0_usize, 0);
    for digit in digits {
        held = (held << 6) | digit;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push((held >> bits) as u8);
            held &= (1 << bits) - 1;
        }
    }
    out
}

/// As vLLM has it: a conversation is one text, as its template writes it.
#[test]
fn a_conversation_has_a_vector() {
    let server = Running::demo();
    let messages = json!([{"role": "user", "content": "What color is a <|im_end|>?"}]);
    for (path, field) in [(PATH, "embedding"), ("/pooling", "data")] {
        for begin in [false, true] {
            let mut body = json!({"messages": messages, "add_generation_prompt": begin});
            let tokens = server.ask("/tokenize", &body)["tokens"].clone();
            if !begin {
                // Where nothing is said, none begins.
                body["add_generation_prompt"] = Value::Null;
            }
            let reply = server.post(path, &body);
            assert_eq!(reply.header("x-ferrum-ignored"), None);
            let found = reply.json();
            let expected = server.ask(path, &json!({"input": tokens}));
            assert_eq!(found["data"][0][field], expected["data"][0][field]);
            assert_eq!(found["usage"], expected["usage"]);
            assert_eq!(found["data"].as_array().map(Vec::len), Some(1));
        }
    }
    let cut = json!({"messages": messages, "truncate_prompt_tokens": 3});
    assert_eq!(server.ask(PATH, &cut)["usage"]["prompt_tokens"], 3);
}

/// A checkpoint of the layers alone gives vectors, and no text.
#[test]
fn a_model_without_a_head_generates_nothing() {
    let loader = |_: &str| {
        let (model, text) = demo_model();
        let mut loaded = load(model, text, (EngineConfig::default(), 4), |runner| runner);
        if let LoadedModel::Decoder(_, served) = &mut loaded {
            served.generates = false;
        }
        Ok(loaded)
    };
    let server = Running::models(&["demo"], Arc::new(loader), 1, ServerConfig::default());
    let messages = json!([{"role": "user", "content": "Hello"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Once"})),
        ("/v1/chat/completions", json!({"messages": messages})),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "stream": true}),
        ),
        (
            "/v1/messages",
            json!({"model": "demo", "max_tokens": 4, "messages": messages}),
        ),
        ("/v1/responses", json!({"input": "Hello"})),
        ("/completion", json!({"prompt": "Once"})),
    ] {
        let reply = server.post(path, &body);
        let status = reply.status;
        let text = reply.text();
        assert_eq!(status, 400, "{path}: {text}");
        assert!(text.contains("use /v1/embeddings"), "{path}: {text}");
    }
    let answer = server.ask(PATH, &json!({"input": "Once"}));
    assert_eq!(vectors(&answer).len(), 1);
}

/// EmbeddingGemma: each text is computed in one step, and two maps are behind pooling.
#[test]
fn a_model_whose_tokens_see_those_behind_them_makes_embeddings_alone() {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/encoders/gemma-embedding");
    let expected = std::fs::read(folder.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let loader = move |_: &str| {
        let model = read_model(ModelSource::open(&folder).unwrap()).unwrap();
        let tokenizer = Tokenizer::from_hf_dir(&folder).unwrap();
        let config = EngineConfig::default();
        Ok(load(model, (tokenizer, None), (config, 4), |runner| runner))
    };
    let server = Running::models(&["gemma"], Arc::new(loader), 1, ServerConfig::default());
    let cases = expected["texts"].as_array().unwrap();
    let texts: Vec<_> = cases.iter().map(|case| case["text"].clone()).collect();
    // Twice, so that prefixes are known, and more tokens than a step takes.
    for _ in 0..2 {
        let twice = [&texts[..], &texts].concat();
        let found = vectors(&server.ask(PATH, &json!({"input": twice})));
        assert_eq!(found.len(), 2 * cases.len());
        for (found, case) in found.iter().zip(cases.iter().chain(cases)) {
            let wanted: Vec<f32> = serde_json::from_value(case["embedding"].clone()).unwrap();
            assert_eq!(found.len(), wanted.len());
            let like: f32 = found.iter().zip(&wanted).map(|(a, b)| a * b).sum();
            let like = like / length(&wanted);
            assert!((like - 1.0).abs() < 1e-5, "{}: {like}", case["text"]);
        }
    }
    for (path, body, expected) in [
        (PATH, json!({"input": "the cat ".repeat(60)}), "tokens"),
        (PATH, json!({"input": "a", "dimensions": 21}), "dimensions"),
        (
            "/v1/completions",
            json!({"prompt": "a"}),
            "use /v1/embeddings",
        ),
    ] {
        let reply = server.post(path, &body);
        let status = reply.status;
        let text = reply.text();
        assert!(status == 400 && text.contains(expected), "{status}: {text}");
    }
}

#[test]
fn many_texts_do_not_fill_the_queue() {
    let engine = EngineConfig {
        max_waiting: 64,
        ..EngineConfig::default()
    };
    let server = Running::start(ServerConfig::default(), engine, 4);
    let texts: Vec<_> = (0..150).map(|i| format!("Number {i}")).collect();
    let all = vectors(&server.ask(PATH, &json!({"input": texts})));
    let last = vectors(&server.ask(PATH, &json!({"input": texts[149]})));
    assert_eq!(all.len(), 150);
    assert_eq!(all[149], last[0]);
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::demo();
    let cases = [
        (json!({"input": null}), "input", "missing"),
        (
            json!({"messages": [{"role": "user", "content": "a"}]}),
            "messages",
            "there is an input, too",
        ),
        (
            json!({"input": null, "messages": []}),
            "messages",
            "found no message",
        ),
        (json!({"input": []}), "input", "found 0 prompts"),
        (json!({"input": [[]]}), "input[0]", "no token"),
        (json!({"input": 5}), "input", "expected a string"),
        (json!({"input": [1, 99999]}), "input[1]", "from 0 to 1279"),
        (json!({"input": vec!["a"; 2049]}), "input", "1 to 2048"),
        (json!({"dimensions": 0}), "dimensions", "at least 1"),
        (json!({"dimensions": 100_000}), "dimensions", "from 1 to"),
        (
            json!({"encoding_format": "int8"}),
            "encoding_format",
            "\"int8\"",
        ),
        (
            json!({"prompt_name": "query"}),
            "prompt_name",
            "the model has no prompts",
        ),
        (
            json!({"input": null, "messages": [{"role": "user", "content": "a"}], "prompt_name": "query"}),
            "prompt_name",
            "there are messages",
        ),
        (
            json!({"input": vec![7; 600]}),
            "input",
            "maximum context length is 512",
        ),
    ];
    for (fields, param, words) in cases {
        let mut body = json!({"input": "a"});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post(PATH, &body);
        assert_eq!(reply.status, 400, "{body}");
        let answer = reply.json();
        assert_eq!(answer["error"]["param"], param, "{body}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{body}: {message}");
    }
}

#[test]
fn the_document_of_all_routes_is_there() {
    let server = Running::demo();
    let document = server.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let schema = &document["components"]["schemas"]["Embeddings"];
    assert!(schema["properties"]["input"].is_object(), "{schema}");
}
