use super::*;
use crate::config::ServerConfig;
use crate::fields::{Fields, note};
use crate::models::{Lease, demo};
use crate::routes;
use std::collections::BTreeMap;

/// An app with the demo model loaded, and kept so.
fn app() -> (Lease, App) {
    let config = ServerConfig {
        lora_dir: Some(env!("CARGO_MANIFEST_DIR").into()),
        ..ServerConfig::default()
    };
    let app = App::new(
        vec!["demo".into()],
        Arc::new(|_: &str| Ok(demo())),
        config,
        None,
    );
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let lease = runtime.block_on(app.models.lease(None)).unwrap();
    (lease, app)
}

/// The fields of a schema and what it says of each; of arrays those of their items.
fn fields(schema: &Value, path: &str, out: &mut BTreeMap<String, String>) {
    for one in schema["anyOf"].as_array().into_iter().flatten() {
        fields(one, path, out);
    }
    if let Some(items) = schema.get("items") {
        fields(items, &format!("{path}[]"), out);
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = match path {
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        fields(field, &path, out);
        let kind = field["type"].as_array().and_then(|kinds| kinds[0].as_str());
        let kind = kind.or(field["type"].as_str());
        let low = field
            .get("minimum")
            .or_else(|| field.get("exclusiveMinimum"));
        let high = field.get("maximum").and_then(Value::as_f64);
        let said = match (kind, low.and_then(Value::as_f64)) {
            (Some(kind @ ("integer" | "number")), Some(low)) => note::bounds(kind, low, high),
            (Some(kind @ ("string" | "boolean")), _) => kind.into(),
            _ => "any".into(),
        };
        out.insert(path, said);
    }
}

fn sampling() -> Value {
    json!({
        "model": "demo", "temperature": 1, "top_k": 5, "top_p": 1, "min_p": 0, "typical_p": 1,
        "repetition_penalty": 1, "repeat_last_n": 5, "presence_penalty": 0, "frequency_penalty": 0,
        "dry_multiplier": 0, "dry_base": 2, "dry_allowed_length": 2, "dry_penalty_last_n": 5,
        "dry_sequence_breakers": ["a"], "xtc_probability": 0, "xtc_threshold": 0, "mirostat": 0,
        "mirostat_tau": 5, "mirostat_eta": 0.1, "logit_bias": {"5": 1}, "seed": 1, "priority": 1,
        "cache_salt": "a", "stop_token_ids": [5], "ignore_eos": true, "stream": true,
    })
}

/// Requests that have, taken together, all fields of a route, with all that may be in them.
fn requests() -> Vec<(&'static str, Value)> {
    let function = json!({"name": "f", "description": "a", "parameters": {}, "strict": false});
    let tool = json!({"type": "function", "function": function});
    let mut flat = function.clone();
    flat["type"] = "function".into();
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
        {"role": "assistant", "reasoning_content": "a", "annotations": [], "tool_calls": [
            {"type": "function", "id": "1", "index": 0, "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
    ]);
    let extra = json!({"a": 1});
    let cache = json!({"type": "ephemeral", "ttl": "5m"});
    let text = json!({"type": "text", "text": "a", "cache_control": cache, "citations": []});
    let turns = json!({
        "model": "demo",
        "system": [text],
        "messages": [
            {"role": "user", "content": [text, {"type": "tool_result", "tool_use_id": "1", "content": [text],
                "is_error": true, "cache_control": cache}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "a", "signature": ""}, text,
                {"type": "tool_use", "id": "1", "name": "f", "input": {}, "cache_control": cache}]},
        ],
        "tools": [{"type": "custom", "name": "f", "description": "a", "input_schema": {}, "strict": false,
            "cache_control": cache}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
        "thinking": {"type": "enabled", "budget_tokens": 5, "display": "summarized"},
        "cache_control": cache,
        "output_config": {"effort": "max"},
    });
    let part = json!({"type": "input_text", "text": "a", "annotations": [], "logprobs": []});
    let refusal = json!({"type": "refusal", "refusal": "a"});
    let items = json!([
        {"type": "message", "id": "1", "status": "completed", "role": "user", "content": [part, refusal]},
        {"type": "reasoning", "summary": [], "content": [part, refusal]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [part, refusal]},
    ]);
    let with = |base: Value, more: Value| {
        let mut base = base;
        for (name, value) in more.as_object().unwrap() {
            base[name] = value.clone();
        }
        base
    };
    let options = json!({"include_usage": true, "include_obfuscation": false, "continuous_usage_stats": false});
    let older = with(
        sampling(),
        json!({"n": 1, "stop": ["a"], "stream_options": options}),
    );
    let mut single = turns.clone();
    single["max_tokens"] = 5.into();
    single["stop_sequences"] = json!(["a"]);
    single["metadata"] = json!({"user_id": "a"});
    let choice = json!({"type": "function", "function": {"name": "f"}});
    let schema_format = json!({"type": "json_schema", "json_schema": {"name": "n", "description": "a",
        "strict": true, "schema": {"type": "object"}}});
    vec![
        (
            "/v1/completions",
            with(older.clone(), json!({"prompt": "a"})),
        ),
        (
            "/v1/chat/completions",
            with(
                older,
                json!({"messages": messages, "tools": [tool],
            "chat_template_kwargs": extra, "tool_choice": choice, "response_format": {"type": "text"}}),
            ),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a"}], "response_format": schema_format}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a"}],
            "structured_outputs": {"choice": ["a", "b"]}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "response_format": schema_format}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "structured_outputs": {"regex": "a+"}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "response_format": {"type": "json_object"}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}),
        ),
        (
            "/v1/responses",
            json!({"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "description": "a",
            "strict": true, "schema": {"type": "object"}}}}),
        ),
        (
            "/v1/responses",
            json!({"input": "a", "text": {"format": {"type": "json_object"}}}),
        ),
        ("/tokenize", json!({"prompt": "a"})),
        (
            "/tokenize",
            json!({"messages": messages, "tools": [tool], "chat_template_kwargs": extra}),
        ),
        ("/detokenize", json!({"tokens": [5]})),
        ("/v1/embeddings", json!({"input": "a"})),
        (
            "/v1/responses",
            with(
                sampling(),
                json!({"input": items, "tools": [flat],
            "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "stream_options": {"include_obfuscation": false}}),
            ),
        ),
        ("/v1/messages", with(sampling(), single)),
        (
            "/v1/load_lora_adapter",
            json!({"lora_name": "a", "lora_path": "src"}),
        ),
        ("/v1/unload_lora_adapter", json!({"lora_name": "a"})),
        ("/v1/messages/count_tokens", turns),
    ]
}

#[test]
fn it_names_the_fields_that_routes_take() {
    let (lease, app) = app();
    let document = document(&app);
    let mut taken: BTreeMap<&str, BTreeMap<String, String>> = BTreeMap::new();
    for (path, request) in requests() {
        let bytes = request.to_string();
        let read = || {
            let fields = Fields::of_body(bytes.as_bytes()).unwrap();
            let read = routes::read(path, &app, &lease, fields);
            read.unwrap_or_else(|e| panic!("{path}: {e}"));
        };
        taken.entry(path).or_default().extend(note::during(read));
    }
    let mut wrong = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(body) = methods.get("post") else {
            continue;
        };
        let schema = &body["requestBody"]["content"]["application/json"]["schema"];
        let (mut said, none) = (BTreeMap::new(), BTreeMap::new());
        fields(schema, "", &mut said);
        let taken = taken.get(path.as_str()).unwrap_or(&none);
        for (name, expected) in taken {
            match said.remove(name) {
                None => wrong.push(format!("{path}: {name} is not described")),
                Some(said) if said != *expected && said != "any" && expected != "any" => {
                    wrong.push(format!("{path}: {name} is {expected}, described as {said}"));
                }
                // Only enumerations say more than the code that takes numbers and truths.
                Some(_) => {}
            }
        }
        wrong.extend(
            said.keys()
                .map(|name| format!("{path}: {name} is not taken")),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn it_names_all_routes() {
    let (_lease, app) = app();
    let document = document(&app);
    let mut described: Vec<_> = document["paths"].as_object().unwrap().keys().collect();
    let table = routes::table().into_iter();
    let mut routes: Vec<_> = table.map(|(path, _)| path.replace("{*", "{")).collect();
    described.sort();
    routes.sort();
    assert_eq!(described, routes.iter().collect::<Vec<_>>());
}
