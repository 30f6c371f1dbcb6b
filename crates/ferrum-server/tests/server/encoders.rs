//! Text encoders behind the server: vectors and scores as `transformers` has them, beside a model that generates.

use super::*;
use ferrum_engine::engine::Clock;
use ferrum_engine::{Encoder, TaskConfig, TaskEngine};
use ferrum_kernels::cpu::Isa;
use ferrum_models::EmbeddingPrompts;
use ferrum_models::encoder::read_encoder;
use ferrum_server::ServedEncoder;
use serde_json::json;
use std::path::Path;

fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/encoders");
    root.join(name)
}

fn expected(name: &str) -> Value {
    let file = fixture(name).join("expected.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|x| x.as_f64().unwrap()).collect()
}

fn load_encoder(name: &str) -> LoadedModel {
    let mut model = read_encoder(ModelSource::open(fixture(name)).unwrap()).unwrap();
    if name != BERT {
        model.prompts = prompts((name == RERANKER).then_some("query"));
    }
    let tokenizer = Tokenizer::from_hf_dir(fixture(name)).unwrap();
    let options = BackendOptions {
        threads: Some(1),
        ..BackendOptions::default()
    };
    let device = BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap();
    let encoder = Encoder::load(&device, &model, tokenizer, &mut |_, _| ()).unwrap();
    let (tokenizer, pooling) = (Arc::clone(encoder.tokenizer()), encoder.pooling());
    let (embedding_size, labels) = (encoder.dimensions(), encoder.labels());
    let prompts = encoder.prompts().clone();
    let config = TaskConfig {
        max_waiting: 16,
        stall_after: PATIENCE,
        clock: Clock::system(),
    };
    let engine = TaskEngine::start(encoder, config).unwrap();
    let model = ServedEncoder {
        engine: engine.handle(),
        tokenizer,
        pooling,
        prompts,
        embedding_size,
        labels,
    };
    LoadedModel::Encoder(engine, model)
}

/// As a folder has them.
fn prompts(default: Option<&str>) -> EmbeddingPrompts {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(CLASSIFIER).join(name), path(name)).unwrap();
    }
    let config = json!({"prompts": {"query": "query: "}, "default_prompt_name": default});
    std::fs::write(
        path("config_sentence_transformers.json"),
        config.to_string(),
    )
    .unwrap();
    EmbeddingPrompts::of(&ModelSource::open(dir.path()).unwrap()).unwrap()
}

const BERT: &str = "bert";
const RERANKER: &str = "xlm-roberta-reranker";
const CLASSIFIER: &str = "bert-labels";

/// All of them, and the demo model behind them.
fn server() -> Running {
    let loader = |name: &str| match name {
        "demo" => {
            let (model, text) = demo_model();
            Ok(load(model, text, (EngineConfig::default(), 2), |runner| {
                runner
            }))
        }
        name => Ok(load_encoder(name)),
    };
    let names = [BERT, RERANKER, CLASSIFIER, "demo"];
    Running::models(&names, Arc::new(loader), 1, ServerConfig::default())
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn vectors_of_texts_and_of_tokens_are_those_of_transformers() {
    let server = server();
    let expected = expected(BERT);
    let cases = expected["texts"].as_array().unwrap();
    let field = |name: &str| {
        cases
            .iter()
            .map(|case| case[name].clone())
            .collect::<Vec<_>>()
    };
    let count: usize = field("ids")
        .iter()
        .map(|ids| ids.as_array().unwrap().len())
        .sum();
    for input in [json!(field("text")), json!(field("ids"))] {
        let answer = server.ask("/v1/embeddings", &json!({"model": BERT, "input": input}));
        assert_eq!(answer["usage"]["prompt_tokens"], count);
        assert_eq!(answer["model"], BERT);
        for (i, case) in cases.iter().enumerate() {
            let entry = &answer["data"][i];
            assert_eq!(
                (entry["object"].as_str(), entry["index"].as_u64()),
                (Some("embedding"), Some(i as u64))
            );
            let like = cosine(&floats(&entry["embedding"]), &floats(&case["mean"]));
            assert!(like > 0.999_999, "{input} {i}: {like}");
        }
    }
    // One text alone, some of its numbers, and as bytes.
    let text = cases[0]["text"].clone();
    let ask = |more: Value| {
        let mut body = json!({"model": BERT, "input": text});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.ask("/embeddings", &body)["data"][0]["embedding"].clone()
    };
    let short = floats(&ask(json!({"dimensions": 5})));
    assert_eq!(short.len(), 5);
    assert!(cosine(&short, &floats(&cases[0]["mean"])[..5]) > 0.999_999);
    assert!((short.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    let base64 = ask(json!({"encoding_format": "base64"}));
    let bytes = super::embeddings::decode(base64.as_str().unwrap());
    let numbers: Vec<_> = bytes
        .chunks(4)
        .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
        .collect();
    assert_eq!(
        numbers,
        floats(&ask(json!({})))
            .iter()
            .map(|x| f64::from(*x as f32))
            .collect::<Vec<_>>()
    );
    let pooled = server.ask("/pooling", &json!({"model": BERT, "input": text}));
    assert_eq!(pooled["data"][0]["data"], ask(json!({})));
}

#[test]
fn a_prompt_is_put_before_texts() {
    let server = server();
    let vectors = |fields: Value| {
        let mut body = json!({"model": CLASSIFIER});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.ask("/v1/embeddings", &body)["data"].clone()
    };
    // A default is for texts, and an empty name takes none.
    let bare = vectors(json!({"model": RERANKER, "input": ["query: a"], "prompt_name": ""}));
    assert_eq!(vectors(json!({"model": RERANKER, "input": ["a"]})), bare);
    let tokens =
        |name: Value| vectors(json!({"model": RERANKER, "input": [0, 5, 2], "prompt_name": name}));
    assert_eq!(tokens(Value::Null), tokens(json!("")));
    let expected = vectors(json!({"input": ["query: a", "query: the cat"]}));
    let found = vectors(json!({"input": ["a", "the cat"], "prompt_name": "query"}));
    assert_eq!(found, expected);
    assert_ne!(vectors(json!({"input": ["a", "the cat"]})), expected);
    for (fields, words) in [
        (
            json!({"input": "a", "prompt_name": "q"}),
            "expected one of the model's prompts (query)",
        ),
        (
            json!({"input": [1, 2], "prompt_name": "query"}),
            "the input has tokens",
        ),
        (
            json!({"model": BERT, "input": "a", "prompt_name": "query"}),
            "the model has no prompts",
        ),
    ] {
        let mut body = json!({"model": CLASSIFIER});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post("/v1/embeddings", &body);
        assert_eq!(reply.status, 400, "{body}");
        let answer = reply.json();
        assert_eq!(answer["error"]["param"], "prompt_name", "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
    }
}

/// More texts than a task has: what is packed beside a text changes nothing.
#[test]
fn many_texts_have_the_vectors_that_each_has_alone() {
    let server = server();
    let texts: Vec<_> = (0..600)
        .map(|i| ["a cat", "the dog ran", "rain fell"][i % 3])
        .collect();
    let all = server.ask("/v1/embeddings", &json!({"model": BERT, "input": texts}));
    let each = server.ask(
        "/v1/embeddings",
        &json!({"model": BERT, "input": &texts[..3]}),
    );
    let data = all["data"].as_array().unwrap();
    assert_eq!(data.len(), 600);
    for (i, entry) in data.iter().enumerate() {
        assert_eq!(entry["embedding"], each["data"][i % 3]["embedding"], "{i}");
    }
}

#[test]
fn documents_are_ranked_as_transformers_scores_them() {
    let server = server();
    let expected = expected(RERANKER);
    for pair in expected["pairs"].as_array().unwrap() {
        let score = 1.0 / (1.0 + (-pair["logits"][0].as_f64().unwrap()).exp());
        let (query, document) = (&pair["query"], &pair["document"]);
        let ranked = server.ask(
            "/v1/rerank",
            &json!({"model": RERANKER, "query": query, "documents": [document]}),
        );
        let found = ranked["results"][0]["relevance_score"].as_f64().unwrap();
        // Where there are tiles, an encoder's numbers of f32 keep 17 bits.
        let limit = if Isa::best() == Isa::best().for_encoders() {
            1e-5
        } else {
            1e-4
        };
        assert!((found - score).abs() < limit, "{query}: {found}, {score}");
        let scored = server.ask(
            "/score",
            &json!({"model": RERANKER, "text_1": query, "text_2": document}),
        );
        assert_eq!(scored["data"][0]["score"], found);
    }
    let documents =
        json!(["a small cat sat", {"text": "the dog ran"}, "rain fell on the town", "mat"]);
    let body = json!({"model": RERANKER, "query": "rain", "documents": documents});
    let all = server.ask("/rerank", &body);
    let results = all["results"].as_array().unwrap();
    let mut seen: Vec<_> = results
        .iter()
        .map(|r| r["index"].as_u64().unwrap())
        .collect();
    let scores: Vec<_> = results
        .iter()
        .map(|r| r["relevance_score"].as_f64().unwrap())
        .collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{all}");
    assert!(
        results
            .iter()
            .all(|result| result.get("document").is_none())
    );
    let mut best = body.clone();
    best["top_n"] = 2.into();
    best["return_documents"] = true.into();
    let best = server.ask("/v2/rerank", &best);
    assert_eq!(best["results"].as_array().unwrap().len(), 2);
    for (found, whole) in best["results"].as_array().unwrap().iter().zip(results) {
        assert_eq!(found["index"], whole["index"]);
        let document = &documents[found["index"].as_u64().unwrap() as usize];
        let text = document.get("text").unwrap_or(document);
        assert_eq!(&found["document"]["text"], text);
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3]);
    assert_eq!(
        all["usage"]["prompt_tokens"],
        best["usage"]["prompt_tokens"]
    );
}

/// Without a classifier, by the cosine of the vectors, of a decoder's as well.
#[test]
fn models_without_scores_of_pairs_rank_by_cosine() {
    let server = server();
    for model in [BERT, "demo"] {
        let texts = ["the cat sat", "the dog ran", "the cat sat"];
        let vectors = server.ask("/v1/embeddings", &json!({"model": model, "input": texts}));
        let vector = |i: usize| floats(&vectors["data"][i]["embedding"]);
        let body = json!({"model": model, "query": texts[0], "documents": &texts[1..]});
        let ranked = server.ask("/v1/rerank", &body);
        assert_eq!(ranked["results"][0]["index"], 1, "{model}");
        let found = ranked["results"][1]["relevance_score"].as_f64().unwrap();
        let like = cosine(&vector(0), &vector(1));
        assert!((found - like).abs() < 1e-6, "{model}: {found}, {like}");
    }
}

#[test]
fn what_is_too_long_is_refused_or_cut_off_where_that_is_asked_for() {
    let server = server();
    // The folder says 24 tokens, the special ones among them.
    let long = "cat ".repeat(23);
    let body = json!({"model": BERT, "input": long});
    let reply = server.post("/v1/embeddings", &body);
    assert_eq!(reply.status, 400);
    let error = &reply.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["param"], "input");
    for (most, tokens) in [(json!(-1), 24), (json!(7), 7), (json!(99), 24)] {
        let body = json!({"model": BERT, "input": long, "truncate_prompt_tokens": most});
        let answer = server.ask("/v1/embeddings", &body);
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    }
    // As those have it who made this route.
    let body = json!({"model": RERANKER, "query": "cat", "documents": ["dog ".repeat(99)]});
    let tokens = server.ask("/v1/rerank", &body)["usage"]["prompt_tokens"].clone();
    let body = json!({"model": RERANKER, "text_1": "cat", "text_2": "dog ".repeat(99)});
    assert_eq!(server.post("/v1/score", &body).status, 400);
    let mut cut = body;
    cut["truncate_prompt_tokens"] = (-1).into();
    assert_eq!(
        server.ask("/v1/score", &cut)["usage"]["prompt_tokens"],
        tokens
    );
}

#[test]
fn what_is_wrong_is_named() {
    let server = server();
    let rerank = |more: Value| {
        let mut body = json!({"model": RERANKER, "query": "a", "documents": ["b"]});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        ("/v1/rerank", body)
    };
    let embed = |more: Value| {
        let mut body = json!({"model": BERT, "input": "a"});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        ("/v1/embeddings", body)
    };
    let chat = json!([{"role": "user", "content": "hi"}]);
    for ((path, body), param, words) in [
        (embed(json!({"input": []})), "input", "found 0 prompts"),
        (embed(json!({"input": [[]]})), "input[0]", "found no token"),
        (
            embed(json!({"input": ["a", [99999]]})),
            "input[1]",
            "found token 99999, expected 0 to",
        ),
        (
            embed(json!({"dimensions": 99})),
            "dimensions",
            "from 1 to 36",
        ),
        (
            embed(json!({"dimensions": 0})),
            "dimensions",
            "of at least 1",
        ),
        (
            embed(json!({"encoding_format": "int8"})),
            "encoding_format",
            "expected \"float\"",
        ),
        (
            embed(json!({"input": null, "messages": chat})),
            "messages",
            "takes texts",
        ),
        (
            embed(json!({"truncate_prompt_tokens": 0})),
            "truncate_prompt_tokens",
            "expected -1",
        ),
        (
            rerank(json!({"documents": []})),
            "documents",
            "found 0 documents",
        ),
        (rerank(json!({"documents": null})), "documents", "missing"),
        (
            rerank(json!({"documents": [3]})),
            "documents[0]",
            "a string or an object with a text",
        ),
        (
            rerank(json!({"documents": [{"txt": "a"}]})),
            "documents[0].text",
            "missing",
        ),
        (
            rerank(json!({"query": ["a"]})),
            "query",
            "expected a string",
        ),
        (rerank(json!({"top_n": 0})), "top_n", "at least 1"),
        (
            rerank(json!({"model": CLASSIFIER})),
            "model",
            "gives 3 scores",
        ),
        (
            (
                "/score",
                json!({"model": RERANKER, "text_1": [1], "text_2": "a"}),
            ),
            "text_1",
            "found tokens",
        ),
        (
            (
                "/v1/chat/completions",
                json!({"model": BERT, "messages": chat}),
            ),
            "model",
            "is a text encoder",
        ),
        (
            ("/v1/completions", json!({"model": BERT, "prompt": "a"})),
            "model",
            "/v1/embeddings, /v1/rerank",
        ),
        (
            ("/v1/responses", json!({"model": BERT, "input": "a"})),
            "model",
            "is a text encoder",
        ),
        (
            ("/tokenize", json!({"model": BERT, "prompt": "a"})),
            "model",
            "is a text encoder",
        ),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path} {body}");
        let error = reply.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert_eq!(error["param"], param, "{error}");
        assert!(message.contains(words), "{message}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let chat = json!({"model": BERT, "max_tokens": 1, "messages": chat});
    let reply = server.post("/v1/messages", &chat);
    assert_eq!(
        (reply.status, &reply.json()["type"]),
        (400, &json!("error"))
    );
    let loading = server.post(
        "/v1/load_lora_adapter",
        &json!({"lora_name": "a", "lora_path": "b"}),
    );
    assert_ne!(loading.status, 200);
}

#[test]
fn an_encoder_is_seen_as_any_model_is() {
    let server = server();
    server.ask("/v1/embeddings", &json!({"input": ["a cat", "a dog"]}));
    let answer = |path: &str| server.get(path).json();
    assert_eq!(answer("/health")["status"], "ok");
    assert_eq!(server.get("/ready").status, 200);
    let model = answer("/v1/models/bert");
    assert_eq!(model["max_model_len"], 24);
    assert_eq!(
        model["ferrum"],
        json!({"kind": "encoder", "defaults": null})
    );
    assert_eq!(answer("/v1/models/demo")["ferrum"]["kind"], Value::Null);
    assert_eq!(answer("/slots"), json!([]));
    let metrics = server.get("/metrics").text();
    for line in [
        "ferrum:model_loaded{model_name=\"bert\"} 1",
        "vllm:prompt_tokens_total{model_name=\"bert\"} 8",
        "vllm:num_requests_waiting{model_name=\"bert\"} 0",
        "vllm:request_prompt_tokens_count{model_name=\"bert\"} 2",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}
