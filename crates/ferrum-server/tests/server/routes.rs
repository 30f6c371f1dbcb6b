//! Routes that clients of llama.cpp and vLLM call beside OpenAI's.

use super::{Running, demo_model};
use serde_json::{Value, json};

#[test]
fn routes_without_a_version_are_the_same() {
    let server = Running::demo();
    let listed = server.get("/models").json();
    assert_eq!(listed, server.get("/v1/models").json());
    let say = json!({"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "temperature": 0,
        "max_tokens": 16});
    let text = |path: &str| server.ask(path, &say)["choices"][0]["message"]["content"].clone();
    assert_eq!(text("/chat/completions"), text("/v1/chat/completions"));
    let goes_on = json!({"prompt": "Once upon a time", "temperature": 0});
    let text = |path: &str| server.ask(path, &goes_on)["choices"][0]["text"].clone();
    assert_eq!(text("/completions"), text("/v1/completions"));
}

#[test]
fn a_slash_at_the_end_of_a_path_changes_nothing() {
    let server = Running::demo();
    let listed = server.get("/v1/models").json();
    assert_eq!(server.get("/v1/models/").json(), listed);
    assert_eq!(server.get("/v1/models/demo/").json(), listed["data"][0]);
    let say = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    assert_eq!(server.post("/v1/chat/completions/", &say).status, 200);
    let lines = server.get("/metrics/").text();
    assert!(lines.contains("handler=\"/v1/chat/completions\""));
    assert_eq!(server.get("/nowhere/").status, 404);
}

#[test]
fn a_server_says_what_it_is() {
    let server = Running::demo();
    let version = server.get("/version").json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    let props = server.get("/props").json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512);
    assert!(props["chat_template"].as_str().unwrap().contains("message"));
    assert_eq!(props["modalities"]["vision"], false);
    assert_eq!(props["total_slots"], 4);
    let (_, (tokenizer, _)) = demo_model();
    let text = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id));
        String::from_utf8(bytes.unwrap_or_default()).unwrap()
    };
    let end = text(tokenizer.eos_ids().first().copied());
    assert!(!end.is_empty());
    assert_eq!(props["eos_token"], end);
    assert_eq!(props["bos_token"], text(tokenizer.bos()));
}

#[test]
fn a_template_is_applied() {
    let server = Running::demo();
    let messages = json!([{"role": "user", "content": "a cat"}]);
    let prompt = server.ask("/apply-template", &json!({"messages": messages}))["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    assert!(prompt.contains("a cat"), "{prompt}");
    let open = json!({"messages": messages, "add_generation_prompt": false});
    let shorter = server.ask("/apply-template", &open)["prompt"].clone();
    assert!(prompt.starts_with(shorter.as_str().unwrap()) && shorter != prompt);
    // It is what a chat is answered to.
    let tokens = server.ask("/tokenize", &json!({"messages": messages}))["count"].clone();
    let whole = json!({"prompt": prompt, "add_special_tokens": false});
    assert_eq!(server.ask("/tokenize", &whole)["count"], tokens);
}

/// Scores and pooled vectors are those of `/v1/embeddings`.
#[test]
fn texts_are_scored_by_their_vectors() {
    let server = Running::demo();
    let texts = ["a cat", "a dog", "seven plus five"];
    let embedded = server.ask("/v1/embeddings", &json!({"input": texts}));
    let vector = |list: &Value, i: usize, field: &str| -> Vec<f64> {
        let numbers = list["data"][i][field].as_array().unwrap().iter();
        numbers.map(|x| x.as_f64().unwrap()).collect()
    };
    let pooled = server.ask("/pooling", &json!({"input": texts}));
    assert_eq!(pooled["data"][1]["object"], "pooling");
    assert_eq!(
        vector(&pooled, 1, "data"),
        vector(&embedded, 1, "embedding")
    );
    let cosine = |a: usize, b: usize| -> f64 {
        let pairs =
            vector(&embedded, a, "embedding")
                .into_iter()
                .zip(vector(&embedded, b, "embedding"));
        pairs.map(|(a, b)| a * b).sum()
    };
    let scored = server.ask("/v1/score", &json!({"text_1": texts[0], "text_2": texts}));
    for i in 0..3 {
        let score = scored["data"][i]["score"].as_f64().unwrap();
        assert!((score - cosine(0, i)).abs() < 1e-5, "{scored}");
    }
    assert!((scored["data"][0]["score"].as_f64().unwrap() - 1.0).abs() < 1e-5);
    let pairs = json!({"text_1": [texts[1], texts[2]], "text_2": [texts[2], texts[1]]});
    let scored = server.ask("/score", &pairs);
    assert_eq!(scored["data"][0]["score"], scored["data"][1]["score"]);
    let uneven = json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]});
    let reply = server.post("/v1/score", &uneven);
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["param"], "text_1");
}

#[test]
fn what_a_response_answers_is_listed() {
    let server = Running::demo();
    let first = server.ask(
        "/v1/responses",
        &json!({"input": "My name is Tom.", "max_output_tokens": 16, "temperature": 0}),
    );
    let next = json!({"previous_response_id": first["id"], "input": "What is my name?",
        "max_output_tokens": 16, "temperature": 0});
    let next = server.ask("/v1/responses", &next);
    let path = format!("/v1/responses/{}/input_items", next["id"].as_str().unwrap());
    let listed = server.get(&format!("{path}?order=asc")).json();
    let text = |i: usize| listed["data"][i]["content"][0]["text"].clone();
    assert_eq!(text(0), "My name is Tom.");
    assert_eq!(text(1), first["output"][0]["content"][0]["text"]);
    assert_eq!(text(2), "What is my name?");
    assert_eq!(listed["data"].as_array().unwrap().len(), 3);
    let newest = server.get(&format!("{path}?limit=1")).json();
    assert_eq!(newest["data"][0], listed["data"][2]);
    assert_eq!(newest["has_more"], true);
    let after = newest["last_id"].as_str().unwrap();
    let rest = server.get(&format!("{path}?after={after}")).json();
    assert_eq!(rest["data"].as_array().unwrap().len(), 2);
    for (query, status) in [("?limit=0", 400), ("?order=up", 400), ("?limit=x", 400)] {
        assert_eq!(server.get(&format!("{path}{query}")).status, status);
    }
    let reply = server.get("/v1/responses/resp_x/input_items");
    assert_eq!(reply.status, 404);
}
