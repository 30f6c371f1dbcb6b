//! LoRA adapters: loaded and unloaded by request, chosen as models.

use super::{Running, load as load_model};
use ferrum_engine::EngineConfig;
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::read_model;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn server(lora_dir: Option<PathBuf>) -> Running {
    let folder = fixtures().join("models/llama3-tied");
    let model = read_model(ModelSource::open(&folder).unwrap()).unwrap();
    let tokenizer = Tokenizer::from_hf_dir(&folder).unwrap();
    let config = ServerConfig {
        lora_dir,
        max_adapters: 2,
        ..ServerConfig::default()
    };
    let engine = (EngineConfig::default(), 4);
    Running::with(model, (tokenizer, None), config, engine, |runner| runner)
}

/// With the adapter "given" from the start.
fn with_given(config: ServerConfig) -> Running {
    let loader = |_: &str| {
        let folder = fixtures().join("models/llama3-tied");
        let model = read_model(ModelSource::open(&folder).unwrap()).unwrap();
        let tokenizer = Tokenizer::from_hf_dir(&folder).unwrap();
        let engine = (EngineConfig::default(), 4);
        Ok(load_model(model, (tokenizer, None), engine, |runner| {
            runner
        }))
    };
    let given = [("given", fixtures().join("lora/llama-up"))];
    Running::adapted(&["demo"], Arc::new(loader), 1, &given, config)
}

fn complete(server: &Running, model: &str) -> Value {
    let body = json!({"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0,
                      "ignore_eos": true});
    server.ask("/v1/completions", &body)
}

fn load(name: &str, path: &str) -> Value {
    json!({"lora_name": name, "lora_path": path})
}

#[test]
fn adapters_are_chosen_as_models() {
    let server = server(Some(fixtures().join("lora")));
    let plain = complete(&server, "demo");
    assert_eq!(plain["model"], "demo");
    for (name, path) in [("one", "llama-all"), ("two", "./llama-up")] {
        let reply = server.post(LOAD, &load(name, path));
        assert_eq!(reply.status, 200);
        assert!(reply.text().contains(&format!("'{name}' added")));
    }
    let listed = server.get("/v1/models").json();
    let ids: Vec<_> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| &m["id"])
        .collect();
    assert_eq!(ids, ["demo", "one", "two"]);
    assert_eq!(listed["data"][1]["parent"], "demo");
    assert_eq!(server.get("/v1/models/two").json(), listed["data"][2]);
    let (one, two) = (complete(&server, "one"), complete(&server, "two"));
    assert_eq!(
        (&one["model"], &two["model"]),
        (&json!("one"), &json!("two"))
    );
    let text = |answer: &Value| answer["choices"][0]["text"].clone();
    assert!(text(&one) != text(&plain) && text(&two) != text(&plain) && text(&one) != text(&two));
    assert_eq!(text(&complete(&server, "demo")), text(&plain));

    assert_eq!(
        server.post(UNLOAD, &json!({"lora_name": "one"})).status,
        200
    );
    let reply = server.post("/v1/completions", &json!({"model": "one", "prompt": "a"}));
    assert_eq!(reply.status, 404);
    assert!(reply.text().contains("only demo, two"));
    // Its name and its place are free again.
    assert_eq!(server.post(LOAD, &load("one", "llama-up")).status, 200);
    assert_eq!(text(&complete(&server, "one")), text(&two));
}

#[test]
fn what_cannot_be_loaded_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(fixtures().join("lora/llama-up"), dir.path().join("link")).unwrap();
    let outside = server(Some(dir.path().to_owned()));
    let inside = server(Some(fixtures().join("lora")));
    let absolute = fixtures().join("lora/llama-up").display().to_string();
    let long = "x".repeat(300);
    let nowhere = "no such folder in the server's --lora-dir";
    let cases = [
        (
            &outside,
            load("a", "../lora/llama-up"),
            400,
            "lora_path",
            nowhere,
        ),
        (&outside, load("a", &absolute), 400, "lora_path", nowhere),
        (&outside, load("a", "link"), 400, "lora_path", nowhere),
        (&outside, load("a", "nothing"), 400, "lora_path", nowhere),
        (
            &inside,
            load("a", "."),
            400,
            "lora_path",
            "holds no adapter_config.json",
        ),
        (
            &inside,
            load("a", "qwen3-patterns"),
            400,
            "lora_path",
            "for another model",
        ),
        (
            &inside,
            load("", "llama-up"),
            400,
            "lora_name",
            "expected 1 to 256 bytes",
        ),
        (
            &inside,
            load(&long, "llama-up"),
            400,
            "lora_name",
            "expected 1 to 256 bytes",
        ),
        (
            &inside,
            load("demo", "llama-up"),
            400,
            "lora_name",
            "the model has this name",
        ),
        (
            &inside,
            json!({"lora_name": "a"}),
            400,
            "lora_path",
            "it is missing",
        ),
        (
            &inside,
            json!({"lora_name": 1, "lora_path": "a"}),
            400,
            "lora_name",
            "`1`, expected a string",
        ),
    ];
    for (server, body, status, param, words) in cases {
        let reply = server.post(LOAD, &body);
        assert_eq!(reply.status, status, "{body}");
        let error = &reply.json()["error"];
        assert_eq!(error["param"], param, "{body}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(words), "{body}: {message}");
    }
    // None of them has kept a place.
    for name in ["a", "b"] {
        assert_eq!(inside.post(LOAD, &load(name, "llama-up")).status, 200);
    }
    for (name, words) in [
        ("a", "already; unload it first"),
        ("c", "2 adapters already"),
    ] {
        let error = inside.post(LOAD, &load(name, "llama-up")).json();
        assert!(
            error["error"]["message"].as_str().unwrap().contains(words),
            "{error}"
        );
    }
    assert_eq!(inside.post(UNLOAD, &json!({"lora_name": "c"})).status, 404);

    let closed = server(None).post(LOAD, &load("a", "llama-up"));
    assert_eq!(closed.status, 400);
    assert!(closed.text().contains("--lora-dir"));
}

#[test]
fn adapters_of_the_start_stay_where_there_are_no_administrators() {
    let server = with_given(ServerConfig {
        lora_dir: Some(fixtures().join("lora")),
        ..ServerConfig::default()
    });
    let reply = server.post(UNLOAD, &json!({"lora_name": "given"}));
    assert_eq!(reply.status, 403);
    assert_eq!(reply.json()["error"]["type"], "permission_error");
    complete(&server, "given");
    // A request can unload an adapter that a request loaded.
    assert_eq!(server.post(LOAD, &load("new", "llama-all")).status, 200);
    let unload = json!({"lora_name": "new"});
    assert_eq!(server.post(UNLOAD, &unload).status, 200);
}

#[test]
fn where_there_are_administrators_only_they_change_adapters() {
    let server = with_given(ServerConfig {
        api_keys: vec!["user".into()],
        admin_keys: vec!["boss".into()],
        ..ServerConfig::default()
    });
    let unload = json!({"lora_name": "given"}).to_string();
    let json = ("Content-Type", "application/json");
    for (key, status) in [
        (None, 401),
        (Some("other"), 401),
        (Some("user"), 403),
        (Some("boss"), 200),
    ] {
        let key = key.map(|key| ("x-api-key", key));
        let headers: Vec<_> = [json].into_iter().chain(key).collect();
        let reply = server.send("POST", UNLOAD, &headers, unload.as_bytes());
        assert_eq!(reply.status, status, "{key:?}");
    }
    let listed = server
        .send("GET", "/v1/models", &[("x-api-key", "boss")], b"")
        .json();
    assert_eq!(listed["data"].as_array().unwrap().len(), 1);
}

#[test]
fn adapters_with_requests_are_among_the_figures() {
    let server = with_given(ServerConfig::default());
    let line = |running: &str| {
        format!(
            "vllm:lora_requests_info{{model_name=\"demo\",max_lora=\"16\",\
             running_lora_adapters=\"{running}\",waiting_lora_adapters=\"\"}} "
        )
    };
    let page = server.get("/metrics").text();
    assert!(page.contains(&line("")), "{page}");
    let body = json!({"model": "given", "prompt": [5, 6], "max_tokens": 400, "n": 128, "ignore_eos": true,
                      "stream": true});
    let mut stream = server.post("/v1/completions", &body);
    assert!(stream.chunk().is_some());
    let page = server.get("/metrics").text();
    assert!(page.contains(&line("given")), "{page}");
}
