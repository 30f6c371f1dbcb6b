//! What routes take.

use super::schema::*;
use crate::app::App;
use crate::routes::{MAX_MESSAGES, MAX_PARTS, MAX_TOOLS};
use ferrum_engine::engine::{MAX_LOGPROBS, MAX_STOP_BYTES, MAX_STOP_TOKENS, MAX_STOPS};
use ferrum_engine::grammar::MAX_GRAMMAR_PARTS;
use ferrum_engine::sampler::MAX_LOGIT_BIAS;
use serde_json::{Value, json};

const I32: i64 = i32::MAX as i64;

fn name(app: &App) -> Field {
    let names = app.models.names().into_iter();
    ("model", only(&names.map(Value::from).collect::<Vec<_>>()))
}

pub(super) fn load_adapter() -> Value {
    let fields = vec![
        ("lora_name", text()),
        ("lora_path", text()),
        ("load_inplace", only(&[json!(false)])),
        ("base_model_name", text()),
    ];
    closed(&["lora_name", "lora_path"], fields)
}

pub(super) fn unload_adapter() -> Value {
    let fields = vec![("lora_name", text()), ("lora_int_id", int(0..=i64::MAX))];
    closed(&["lora_name"], fields)
}

fn token(app: &App) -> Value {
    let bounds = app.models.bounds();
    count(0..=bounds.map_or(usize::MAX, |facts| facts.vocab_size.saturating_sub(1)))
}

/// Where a request stands among others.
fn place() -> Vec<Field> {
    vec![
        ("priority", int(i64::from(i8::MIN)..=i64::from(i8::MAX))),
        ("cache_salt", text()),
    ]
}

/// How tokens are chosen: the same on all routes that generate.
fn generation(app: &App) -> Vec<Field> {
    let share = || number(0.0, Some(1.0));
    let free = || number(0.0, None);
    let penalty = || number(-2.0, Some(2.0));
    let bias = json!({
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": number(-100.0, Some(100.0)),
        "maxProperties": MAX_LOGIT_BIAS,
    });
    let mut fields = vec![
        name(app),
        ("stream", boolean()),
        ("temperature", number(0.0, Some(2.0))),
        ("top_k", int(-1..=I32)),
        ("top_p", positive(Some(1.0))),
        ("min_p", share()),
        ("typical_p", share()),
        ("repetition_penalty", positive(None)),
        ("repeat_last_n", int(-1..=I32)),
        ("presence_penalty", penalty()),
        ("frequency_penalty", penalty()),
        ("dry_multiplier", free()),
        ("dry_base", number(1.0, None)),
        ("dry_allowed_length", count(0..=1 << 20)),
        ("dry_penalty_last_n", int(-1..=I32)),
        ("dry_sequence_breakers", list(string_of(0), MAX_STOPS)),
        ("xtc_probability", share()),
        ("xtc_threshold", share()),
        ("mirostat", only(&[json!(0), json!(2)])),
        ("mirostat_tau", free()),
        ("mirostat_eta", free()),
        ("logit_bias", bias),
        ("seed", int(i64::MIN..=i64::MAX)),
        ("stop_token_ids", list(token(app), MAX_STOP_TOKENS / 2)),
        ("ignore_eos", boolean()),
    ];
    fields.extend(place());
    fields
}

/// A string that is at most as long as a stop string may be. Characters are counted here, bytes there.
fn string_of(least: usize) -> Value {
    json!({"type": "string", "minLength": least, "maxLength": MAX_STOP_BYTES / 4})
}

/// Fields of OpenAI's and vLLM's that change nothing.
fn ignored() -> Vec<Field> {
    vec![
        ("user", text()),
        ("safety_identifier", text()),
        ("prompt_cache_key", text()),
        ("metadata", object()),
        ("service_tier", only(&[json!("auto"), json!("default")])),
        ("skip_special_tokens", only(&[json!(true)])),
        ("spaces_between_special_tokens", only(&[json!(true)])),
        ("include_stop_str_in_output", only(&[json!(false)])),
        ("use_beam_search", only(&[json!(false)])),
        ("min_tokens", only(&[json!(0)])),
    ]
}

/// What both of OpenAI's older routes have beside that.
fn older(app: &App) -> Vec<Field> {
    let options = closed(
        &[],
        vec![
            ("include_usage", boolean()),
            ("include_obfuscation", only(&[json!(false)])),
            ("continuous_usage_stats", only(&[json!(false)])),
        ],
    );
    let stops = any(vec![string_of(1), list(string_of(1), MAX_STOPS)]);
    let mut fields = generation(app);
    fields.extend(ignored());
    fields.extend([
        ("n", count(1..=app.config.max_choices)),
        ("stream_options", options),
        ("stop", stops),
        ("store", only(&[json!(false)])),
    ]);
    fields.extend(forms());
    fields
}

/// A schema that is JSON Schema's to describe.
fn anything() -> Value {
    json!({})
}

/// `type` and the rest of the form of an answer, whose schema is in an object of its own or not.
fn format(flat: bool) -> Value {
    let kinds = [json!("text"), json!("json_object"), json!("json_schema")];
    let schema = || {
        vec![
            ("name", text()),
            ("description", text()),
            ("strict", boolean()),
            ("schema", anything()),
        ]
    };
    let mut fields = vec![("type", only(&kinds))];
    match flat {
        true => fields.extend(schema()),
        false => {
            fields.push(("schema", anything()));
            fields.push(("json_schema", closed(&["schema"], schema())));
        }
    }
    closed(&["type"], fields)
}

/// What an answer has to be, in OpenAI's, vLLM's and llama.cpp's fields; one of them at a time.
fn forms() -> Vec<Field> {
    let choice = || list(text(), MAX_GRAMMAR_PARTS);
    let outputs = vec![
        ("json", anything()),
        ("json_object", boolean()),
        ("regex", text()),
        ("choice", choice()),
        ("grammar", text()),
    ];
    vec![
        ("response_format", format(false)),
        ("structured_outputs", closed(&[], outputs)),
        ("guided_json", anything()),
        ("guided_json_object", boolean()),
        ("guided_regex", text()),
        ("guided_choice", choice()),
        ("guided_grammar", text()),
        ("grammar", text()),
    ]
}

/// A text, texts, tokens, or lists of tokens.
fn prompts(app: &App, most: usize) -> Value {
    let tokens = || {
        let mut tokens = json!({"type": "array", "items": token(app), "minItems": 1});
        if let Some(facts) = app.models.bounds() {
            tokens["maxItems"] = facts.context.into();
        }
        tokens
    };
    let several =
        |items: Value| json!({"type": "array", "items": items, "minItems": 1, "maxItems": most});
    any(vec![text(), tokens(), several(any(vec![text(), tokens()]))])
}

pub(super) fn completions(app: &App) -> Value {
    let mut fields = older(app);
    fields.extend([
        ("prompt", prompts(app, app.config.max_prompts)),
        ("echo", boolean()),
        ("logprobs", count(0..=MAX_LOGPROBS)),
        ("max_tokens", count(0..=app.config.max_tokens)),
        ("best_of", count(1..=app.config.max_choices)),
        ("suffix", only(&[json!("")])),
    ]);
    closed(&["prompt"], fields)
}

/// A string, or parts of text.
fn content() -> Value {
    let fields = vec![("type", only(&[json!("text")])), ("text", text())];
    let part = closed(&["type", "text"], fields);
    any(vec![text(), list(part, MAX_PARTS)])
}

fn function_name() -> Value {
    json!({"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"})
}

/// The arguments of a call: an object, or an object as JSON text.
fn arguments() -> Value {
    any(vec![text(), object()])
}

fn empty_list() -> Value {
    json!({"type": "array", "maxItems": 0})
}

/// The fields of a function that may be called.
fn function(schema: &'static str) -> Vec<Field> {
    vec![
        ("name", function_name()),
        ("description", text()),
        (schema, object()),
        ("strict", boolean()),
    ]
}

fn kind_of_tool() -> Field {
    ("type", only(&[json!("function")]))
}

/// Messages, tools and variables, as chat completions have them.
fn conversation() -> Vec<Field> {
    let called = vec![("name", function_name()), ("arguments", arguments())];
    let call = closed(
        &["function"],
        vec![
            kind_of_tool(),
            ("id", text()),
            ("index", count(0..=usize::MAX)),
            ("function", closed(&["name"], called)),
        ],
    );
    let common = || vec![("content", content()), ("name", text())];
    let message = |roles: &[&str], required: &[&str], more: Vec<Field>| {
        let roles: Vec<_> = roles.iter().map(|role| json!(role)).collect();
        let mut fields = vec![("role", only(&roles))];
        fields.extend(common());
        fields.extend(more);
        closed(required, fields)
    };
    let said = vec![
        ("reasoning_content", text()),
        ("annotations", empty_list()),
        ("tool_calls", list(call, MAX_TOOLS)),
    ];
    let mut messages = list(
        any(vec![
            message(
                &["system", "developer", "user"],
                &["role", "content"],
                Vec::new(),
            ),
            message(&["assistant"], &["role"], said),
            message(
                &["tool"],
                &["role", "content"],
                vec![("tool_call_id", text())],
            ),
        ]),
        MAX_MESSAGES,
    );
    messages["minItems"] = 1.into();
    let function = closed(&["name"], function("parameters"));
    let tool = closed(&["function"], vec![kind_of_tool(), ("function", function)]);
    vec![
        ("messages", messages),
        ("tools", list(tool, MAX_TOOLS)),
        ("chat_template_kwargs", object()),
    ]
}

pub(super) fn chat(app: &App) -> Value {
    let chosen = closed(&["name"], vec![("name", function_name())]);
    let choice = any(vec![
        only(&[json!("none"), json!("auto"), json!("required")]),
        closed(&["function"], vec![kind_of_tool(), ("function", chosen)]),
    ]);
    let mut fields = older(app);
    fields.extend(conversation());
    fields.extend([
        ("max_completion_tokens", count(1..=app.config.max_tokens)),
        ("max_tokens", count(1..=app.config.max_tokens)),
        ("logprobs", boolean()),
        ("top_logprobs", count(0..=MAX_LOGPROBS)),
        ("modalities", only(&[json!(["text"])])),
        ("tool_choice", choice),
        ("parallel_tool_calls", boolean()),
    ]);
    closed(&["messages"], fields)
}

pub(super) fn tokenize(app: &App) -> Value {
    let common = || {
        vec![
            name(app),
            ("add_special_tokens", boolean()),
            ("return_token_strs", boolean()),
        ]
    };
    let mut plain = common();
    plain.push(("prompt", text()));
    let mut chat = common();
    chat.extend(conversation());
    chat.push(("add_generation_prompt", boolean()));
    any(vec![
        closed(&["prompt"], plain),
        closed(&["messages"], chat),
    ])
}

pub(super) fn detokenize(app: &App) -> Value {
    let tokens = json!({"type": "array", "items": token(app)});
    closed(&["tokens"], vec![name(app), ("tokens", tokens)])
}

pub(super) fn embeddings(app: &App) -> Value {
    let bounds = app.models.bounds();
    let dimensions = bounds.map_or(usize::MAX, |facts| facts.hidden_size);
    let mut fields = vec![
        name(app),
        ("input", prompts(app, app.config.max_inputs)),
        ("dimensions", count(1..=dimensions)),
        ("encoding_format", only(&[json!("float"), json!("base64")])),
        ("user", text()),
    ];
    fields.extend(place());
    closed(&["input"], fields)
}

/// An item of a response's input.
fn item() -> Value {
    let item = |kinds: &[Value], required: &[&str], more: Vec<Field>| {
        let mut fields = vec![("type", only(kinds)), ("id", text()), ("status", text())];
        fields.extend(more);
        closed(required, fields)
    };
    let texts = || {
        let part = |kinds: &[Value], field: &'static str| {
            let fields = vec![
                ("type", only(kinds)),
                (field, text()),
                ("annotations", empty_list()),
                ("logprobs", empty_list()),
            ];
            closed(&["type", field], fields)
        };
        let kinds = ["input_text", "output_text", "reasoning_text", "text"].map(Value::from);
        let parts = any(vec![
            part(&kinds, "text"),
            part(&[json!("refusal")], "refusal"),
        ]);
        any(vec![text(), list(parts, MAX_PARTS)])
    };
    let roles = [
        json!("user"),
        json!("assistant"),
        json!("system"),
        json!("developer"),
    ];
    let call = vec![
        ("call_id", text()),
        ("name", function_name()),
        ("arguments", arguments()),
    ];
    any(vec![
        item(
            &[json!("message")],
            &["role", "content"],
            vec![("role", only(&roles)), ("content", texts())],
        ),
        item(
            &[json!("reasoning")],
            &["type"],
            vec![("summary", empty_list()), ("content", texts())],
        ),
        item(
            &[json!("function_call")],
            &["type", "call_id", "name"],
            call,
        ),
        item(
            &[json!("function_call_output")],
            &["type", "call_id", "output"],
            vec![("call_id", text()), ("output", texts())],
        ),
    ])
}

pub(super) fn responses(app: &App) -> Value {
    let mut items = list(item(), MAX_MESSAGES);
    items["minItems"] = 1.into();
    let mut tool = vec![kind_of_tool()];
    tool.extend(function("parameters"));
    let choice = any(vec![
        only(&[json!("none"), json!("auto"), json!("required")]),
        closed(&["name"], vec![kind_of_tool(), ("name", function_name())]),
    ]);
    let reasoning = closed(
        &[],
        vec![("effort", text()), ("summary", only(&[json!("auto")]))],
    );
    let form = closed(
        &[],
        vec![
            ("format", format(true)),
            ("verbosity", only(&[json!("medium")])),
        ],
    );
    let options = closed(&[], vec![("include_obfuscation", only(&[json!(false)]))]);
    let include = list(only(&[json!("reasoning.encrypted_content")]), 1024);
    let mut fields = generation(app);
    fields.extend(ignored());
    fields.extend([
        ("input", any(vec![text(), items])),
        ("instructions", text()),
        ("max_output_tokens", count(1..=app.config.max_tokens)),
        ("previous_response_id", text()),
        ("store", boolean()),
        ("tools", list(closed(&["name"], tool), MAX_TOOLS)),
        ("tool_choice", choice),
        ("parallel_tool_calls", boolean()),
        ("reasoning", reasoning),
        ("text", form),
        ("include", include),
        ("stream_options", options),
        ("background", only(&[json!(false)])),
        ("truncation", only(&[json!("disabled")])),
        ("top_logprobs", only(&[json!(0)])),
    ]);
    closed(&["input"], fields)
}

fn cache_control() -> Field {
    let fields = vec![
        ("type", only(&[json!("ephemeral")])),
        ("ttl", only(&[json!("5m"), json!("1h")])),
    ];
    ("cache_control", closed(&[], fields))
}

fn tool_choice() -> Value {
    let choices = [json!("auto"), json!("any"), json!("tool"), json!("none")];
    closed(
        &["type"],
        vec![
            ("type", only(&choices)),
            ("name", function_name()),
            ("disable_parallel_tool_use", boolean()),
        ],
    )
}

fn thinking() -> Value {
    closed(
        &["type"],
        vec![
            (
                "type",
                only(&[json!("enabled"), json!("disabled"), json!("adaptive")]),
            ),
            ("budget_tokens", count(1..=usize::MAX)),
            ("display", only(&[json!("summarized")])),
        ],
    )
}

/// What makes the prompt of a message.
fn turns() -> Vec<Field> {
    let kind = |name: &str| ("type", only(&[json!(name)]));
    let block = || {
        let fields = vec![
            kind("text"),
            ("text", text()),
            cache_control(),
            ("citations", empty_list()),
        ];
        closed(&["type", "text"], fields)
    };
    let blocks = || any(vec![text(), list(block(), MAX_PARTS)]);
    let result = closed(
        &["type", "tool_use_id"],
        vec![
            kind("tool_result"),
            ("tool_use_id", text()),
            ("content", blocks()),
            ("is_error", boolean()),
            cache_control(),
        ],
    );
    let thought = closed(
        &["type", "thinking"],
        vec![
            kind("thinking"),
            ("thinking", text()),
            ("signature", text()),
        ],
    );
    let call = closed(
        &["type", "id", "name"],
        vec![
            kind("tool_use"),
            ("id", text()),
            ("name", function_name()),
            ("input", object()),
            cache_control(),
        ],
    );
    let mut asked = list(any(vec![block(), result]), MAX_PARTS);
    asked["minItems"] = 1.into();
    let said = list(any(vec![block(), thought, call]), MAX_PARTS);
    let turn = |role: &str, content: Value| {
        let fields = vec![
            ("role", only(&[json!(role)])),
            ("content", any(vec![text(), content])),
        ];
        closed(&["role", "content"], fields)
    };
    let mut messages = list(
        any(vec![
            turn("user", asked),
            turn("assistant", said),
            turn("system", list(block(), MAX_PARTS)),
        ]),
        MAX_MESSAGES,
    );
    messages["minItems"] = 1.into();
    let mut tool = vec![kind("custom"), cache_control()];
    tool.extend(function("input_schema"));
    vec![
        ("messages", messages),
        ("system", blocks()),
        ("output_config", closed(&[], vec![("effort", text())])),
        ("tools", list(closed(&["name"], tool), MAX_TOOLS)),
        ("tool_choice", tool_choice()),
        ("thinking", thinking()),
        cache_control(),
    ]
}

pub(super) fn messages(app: &App) -> Value {
    let mut fields = generation(app);
    fields.extend(turns());
    fields.extend([
        ("max_tokens", count(1..=app.config.max_tokens)),
        ("stop_sequences", list(string_of(1), MAX_STOPS)),
        ("metadata", closed(&[], vec![("user_id", text())])),
        (
            "service_tier",
            only(&[json!("auto"), json!("standard_only")]),
        ),
    ]);
    closed(&["messages", "max_tokens"], fields)
}

pub(super) fn count_tokens(app: &App) -> Value {
    let mut fields = vec![name(app)];
    fields.extend(turns());
    closed(&["messages"], fields)
}
