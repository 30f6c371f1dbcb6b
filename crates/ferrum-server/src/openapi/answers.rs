//! What routes give.

use super::schema::*;
use serde_json::{Value, json};

/// What a status means, in words.
pub(super) fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A field is wrong, unknown or not supported, or the prompt does not fit.",
        401 => "There is no key, or a wrong one.",
        403 => "The key does not have this right.",
        404 => "There is no such thing.",
        408 => "The body did not come in time.",
        413 => "The body is too long.",
        415 => "The body is not said to be JSON.",
        429 => "The queue is full; `Retry-After` says when to come back.",
        503 => "The server is ending, its engine is not alive, or the model cannot be loaded.",
        504 => "The answer took too long.",
        _ => "An error.",
    }
}

fn string() -> Value {
    json!({"type": "string"})
}

fn natural() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn one(value: &str) -> Value {
    json!({"const": value})
}

fn many(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

/// Errors in both shapes.
pub(super) fn errors() -> Value {
    let error = vec![
        ("message", string()),
        ("type", string()),
        ("param", or_null(string())),
        ("code", or_null(string())),
    ];
    let plain = vec![("type", string()), ("message", string())];
    json!({
        "Error": open(vec![("error", open(error))]),
        "AnthropicError": open(vec![("type", one("error")), ("error", open(plain))]),
    })
}

pub(super) fn health() -> Value {
    let states = ["ok", "stalled", "failed", "stopped"].map(Value::from);
    let mut health = open(vec![("status", only(&states))]);
    // Whose engine it is, where one is not well.
    health["properties"]["model"] = string();
    health
}

pub(super) fn ready() -> Value {
    open(vec![("status", one("ready"))])
}

pub(super) fn model() -> Value {
    let states = ["unloaded", "loading", "loaded", "unloading", "failed"].map(Value::from);
    open(vec![
        ("id", string()),
        ("object", one("model")),
        ("created", natural()),
        ("owned_by", string()),
        // Null for a model that was never loaded.
        ("max_model_len", or_null(natural())),
        ("status", open(vec![("value", only(&states))])),
        // What this server says beyond OpenAI's fields; null likewise.
        ("ferrum", open(vec![("defaults", or_null(defaults()))])),
    ])
}

/// The samplers that hold where a request names none.
fn defaults() -> Value {
    open(vec![
        ("temperature", number(0.0, None)),
        ("top_p", number(0.0, Some(1.0))),
        ("top_k", natural()),
        ("min_p", number(0.0, Some(1.0))),
    ])
}

pub(super) fn models() -> Value {
    open(vec![("object", one("list")), ("data", many(model()))])
}

pub(super) fn tokens() -> Value {
    let bytes = many(natural());
    let piece = open(vec![
        ("id", natural()),
        ("piece", any(vec![string(), bytes])),
    ]);
    open(vec![
        ("count", natural()),
        ("max_model_len", natural()),
        ("tokens", many(any(vec![natural(), piece]))),
        (
            "token_strs",
            json!({"type": ["array", "null"], "items": string()}),
        ),
    ])
}

pub(super) fn version() -> Value {
    open(vec![("version", string())])
}

pub(super) fn items() -> Value {
    let flag = ("has_more", boolean());
    open(vec![
        ("object", one("list")),
        ("data", many(object())),
        flag,
    ])
}

/// A list of `data` with the tokens that it took.
fn counted(data: Value) -> Value {
    let usage = open(vec![
        ("prompt_tokens", natural()),
        ("total_tokens", natural()),
    ]);
    open(vec![
        ("object", one("list")),
        ("data", many(data)),
        ("usage", usage),
    ])
}

pub(super) fn scores() -> Value {
    counted(open(vec![
        ("index", natural()),
        ("object", one("score")),
        ("score", number(-1.0, None)),
    ]))
}

pub(super) fn pooled() -> Value {
    let numbers = many(json!({"type": "number"}));
    counted(open(vec![
        ("index", natural()),
        ("object", one("pooling")),
        ("data", any(vec![numbers, string()])),
    ]))
}

pub(super) fn template() -> Value {
    open(vec![("prompt", string())])
}

pub(super) fn text() -> Value {
    open(vec![("prompt", string()), ("content", string())])
}

fn usage() -> Value {
    open(vec![
        ("prompt_tokens", natural()),
        ("completion_tokens", natural()),
        ("total_tokens", natural()),
        (
            "prompt_tokens_details",
            open(vec![("cached_tokens", natural())]),
        ),
    ])
}

/// What answers of OpenAI's older routes have in common.
fn whole(object: &str, mut choice: Vec<Field>, reasons: &[&str]) -> Value {
    let reasons: Vec<_> = reasons.iter().map(|reason| json!(reason)).collect();
    choice.push(("index", natural()));
    choice.push(("finish_reason", only(&reasons)));
    open(vec![
        ("id", string()),
        ("object", one(object)),
        ("created", natural()),
        ("model", string()),
        ("choices", many(open(choice))),
        ("usage", usage()),
    ])
}

pub(super) fn completion() -> Value {
    let logprobs = open(vec![
        ("tokens", many(string())),
        ("token_logprobs", many(json!({"type": ["number", "null"]}))),
        ("top_logprobs", many(json!({"type": ["object", "null"]}))),
        ("text_offset", many(natural())),
    ]);
    let choice = vec![
        ("text", string()),
        ("logprobs", any(vec![logprobs, json!({"type": "null"})])),
    ];
    let mut whole = whole("text_completion", choice, &["stop", "length"]);
    whole["properties"]["choices"]["items"]["properties"]["prompt_logprobs"] = prompt_logprobs();
    whole
}

/// vLLM's, where they were asked for.
fn prompt_logprobs() -> Value {
    many(json!({"type": ["object", "null"]}))
}

/// An answer of llama.cpp's routes. With `response_fields` it has only those.
pub(super) fn native_answer() -> Value {
    let time = || number(0.0, None);
    let timings = ["prompt", "predicted"].into_iter().flat_map(|phase| {
        let name = |field: &str| format!("{phase}_{field}");
        [
            (name("n"), natural()),
            (name("ms"), time()),
            (name("per_token_ms"), time()),
            (name("per_second"), time()),
        ]
    });
    let timings: serde_json::Map<_, _> = timings.chain([("cache_n".into(), natural())]).collect();
    let probability = open(vec![
        ("id", natural()),
        ("token", string()),
        ("bytes", many(natural())),
        ("logprob", json!({"type": "number"})),
        ("top_logprobs", many(object())),
    ]);
    let types = ["eos", "limit", "word"].map(Value::from);
    let fields: [Field; 17] = [
        ("index", natural()),
        ("content", string()),
        ("tokens", many(natural())),
        ("id_slot", json!({"type": "integer"})),
        ("stop", boolean()),
        ("model", string()),
        ("tokens_predicted", natural()),
        ("tokens_evaluated", natural()),
        ("tokens_cached", natural()),
        ("generation_settings", object()),
        ("prompt", string()),
        ("has_new_line", boolean()),
        ("truncated", boolean()),
        ("stop_type", only(&types)),
        ("stopping_word", string()),
        ("timings", json!({"type": "object", "properties": timings})),
        ("completion_probabilities", many(probability)),
    ];
    let mut answer = open(fields.into());
    answer["required"] = json!([]);
    answer
}

/// One for one prompt, else a list.
pub(super) fn native() -> Value {
    any(vec![native_answer(), many(native_answer())])
}

pub(super) fn slots() -> Value {
    let mut slot = open(vec![
        ("id", natural()),
        ("n_ctx", natural()),
        ("speculative", boolean()),
        ("is_processing", boolean()),
    ]);
    for (name, schema) in [
        ("id_task", natural()),
        ("params", object()),
        ("next_token", object()),
    ] {
        slot["properties"][name] = schema;
    }
    many(slot)
}

fn called() -> Value {
    let function = open(vec![("name", string()), ("arguments", string())]);
    open(vec![
        ("id", string()),
        ("type", one("function")),
        ("function", function),
    ])
}

pub(super) fn chat() -> Value {
    let mut message = open(vec![
        ("role", one("assistant")),
        ("content", or_null(string())),
        ("refusal", json!({"type": "null"})),
    ]);
    message["properties"]["reasoning_content"] = string();
    message["properties"]["tool_calls"] = many(called());
    let bytes = json!({"type": "integer", "minimum": 0, "maximum": 255});
    let token = || {
        vec![
            ("token", string()),
            ("logprob", json!({"type": "number"})),
            ("bytes", many(bytes.clone())),
        ]
    };
    let mut entry = token();
    entry.push(("top_logprobs", many(open(token()))));
    let logprobs = open(vec![("content", many(open(entry)))]);
    let choice = vec![
        ("message", message),
        ("logprobs", any(vec![logprobs, json!({"type": "null"})])),
    ];
    let mut whole = whole("chat.completion", choice, &["stop", "length", "tool_calls"]);
    let details = open(vec![("reasoning_tokens", natural())]);
    whole["properties"]["usage"]["properties"]["completion_tokens_details"] = details;
    whole["properties"]["prompt_logprobs"] = prompt_logprobs();
    whole
}

pub(super) fn embeddings() -> Value {
    let vector = any(vec![many(json!({"type": "number"})), string()]);
    let entry = open(vec![
        ("object", one("embedding")),
        ("index", natural()),
        ("embedding", vector),
    ]);
    open(vec![
        ("object", one("list")),
        ("data", many(entry)),
        ("model", string()),
        (
            "usage",
            open(vec![
                ("prompt_tokens", natural()),
                ("total_tokens", natural()),
            ]),
        ),
    ])
}

pub(super) fn response() -> Value {
    let part = open(vec![
        (
            "type",
            only(&[json!("output_text"), json!("reasoning_text")]),
        ),
        ("text", string()),
    ]);
    let mut item = open(vec![
        ("id", string()),
        (
            "type",
            only(&["message", "reasoning", "function_call"].map(Value::from)),
        ),
        (
            "status",
            only(&["completed", "incomplete"].map(Value::from)),
        ),
    ]);
    let more: [Field; 4] = [
        ("content", many(part)),
        ("call_id", string()),
        ("name", string()),
        ("arguments", string()),
    ];
    for (name, schema) in more {
        item["properties"][name] = schema;
    }
    let usage = open(vec![
        ("input_tokens", natural()),
        (
            "input_tokens_details",
            open(vec![("cached_tokens", natural())]),
        ),
        ("output_tokens", natural()),
        (
            "output_tokens_details",
            open(vec![("reasoning_tokens", natural())]),
        ),
        ("total_tokens", natural()),
    ]);
    open(vec![
        ("id", string()),
        ("object", one("response")),
        ("created_at", natural()),
        (
            "status",
            only(&["completed", "incomplete"].map(Value::from)),
        ),
        ("error", json!({"type": "null"})),
        ("incomplete_details", json!({"type": ["object", "null"]})),
        ("instructions", or_null(string())),
        ("max_output_tokens", or_null(natural())),
        ("metadata", object()),
        ("model", string()),
        ("output", many(item)),
        ("parallel_tool_calls", boolean()),
        ("previous_response_id", or_null(string())),
        ("store", boolean()),
        ("temperature", json!({"type": "number"})),
        ("top_p", json!({"type": "number"})),
        ("usage", usage),
    ])
}

pub(super) fn deleted() -> Value {
    open(vec![
        ("id", string()),
        ("object", one("response")),
        ("deleted", json!({"const": true})),
    ])
}

pub(super) fn message() -> Value {
    let mut block = open(vec![(
        "type",
        only(&["text", "thinking", "tool_use"].map(Value::from)),
    )]);
    let more: [Field; 5] = [
        ("text", string()),
        ("thinking", string()),
        ("id", string()),
        ("name", string()),
        ("input", object()),
    ];
    for (name, schema) in more {
        block["properties"][name] = schema;
    }
    let reasons = ["end_turn", "stop_sequence", "max_tokens", "tool_use"].map(Value::from);
    let usage = open(vec![
        ("input_tokens", natural()),
        ("cache_creation_input_tokens", natural()),
        ("cache_read_input_tokens", natural()),
        ("output_tokens", natural()),
        (
            "output_tokens_details",
            open(vec![("thinking_tokens", natural())]),
        ),
    ]);
    open(vec![
        ("id", string()),
        ("type", one("message")),
        ("role", one("assistant")),
        ("model", string()),
        ("content", many(block)),
        ("stop_reason", only(&reasons)),
        ("stop_sequence", or_null(string())),
        ("usage", usage),
    ])
}

pub(super) fn response_tokens() -> Value {
    open(vec![
        ("object", one("response.input_tokens")),
        ("input_tokens", natural()),
    ])
}

pub(super) fn count() -> Value {
    open(vec![("input_tokens", natural())])
}
