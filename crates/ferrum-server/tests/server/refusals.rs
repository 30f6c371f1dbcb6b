//! Requests that are not answered: each says which field is wrong.

use super::Running;
use ferrum_engine::EngineConfig;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Route, fields beside those that make it valid, what is named, and a part of the message.
type Case = (&'static str, Value, &'static str, &'static str);

/// Method, route, headers, body, and the status and a part of the message that come back.
type Sent<'a> = (
    &'a str,
    &'a str,
    &'a [(&'a str, &'a str)],
    &'a str,
    u16,
    &'a str,
);

fn cases() -> Vec<Case> {
    vec![
        (TEXT, json!({"prompt": null}), "prompt", "missing"),
        (TEXT, json!({"prompt": 1}), "prompt", "expected a string or"),
        (TEXT, json!({"prompt": []}), "prompt", "found 0 prompts"),
        (TEXT, json!({"prompt": [[]]}), "prompt[0]", "no token"),
        (
            TEXT,
            json!({"prompt": [1, 2, 99999]}),
            "prompt[2]",
            "from 0 to 1279",
        ),
        (
            TEXT,
            json!({"prompt": [1, "a"]}),
            "prompt[1]",
            "expected an integer",
        ),
        (
            TEXT,
            json!({"prompt": vec![7; 600]}),
            "prompt",
            "maximum context length is 512",
        ),
        (TEXT, json!({"n": 0}), "n", "at least 1"),
        (TEXT, json!({"n": 129}), "n", "from 1 to 128"),
        (
            TEXT,
            json!({"n": 65, "prompt": ["a", "b"]}),
            "n",
            "found 130 answers",
        ),
        (TEXT, json!({"max_tokens": -2}), "max_tokens", "at least -1"),
        (TEXT, json!({"max_tokens": 1.5}), "max_tokens", "an integer"),
        (
            TEXT,
            json!({"temperature": "hot"}),
            "temperature",
            "\"hot\"",
        ),
        (
            TEXT,
            json!({"temperature": 3}),
            "temperature",
            "from 0 to 2",
        ),
        (TEXT, json!({"top_p": 1.5}), "top_p", "from 0 to 1"),
        (TEXT, json!({"top_k": -2}), "top_k", "from -1 to"),
        (TEXT, json!({"min_p": 2}), "min_p", "from 0 to 1"),
        (
            TEXT,
            json!({"presence_penalty": 2.5}),
            "presence_penalty",
            "from -2 to 2",
        ),
        (
            TEXT,
            json!({"frequency_penalty": -3}),
            "frequency_penalty",
            "from -2 to 2",
        ),
        (
            TEXT,
            json!({"repetition_penalty": 0}),
            "repetition_penalty",
            "above 0",
        ),
        (TEXT, json!({"mirostat": 1}), "mirostat", "0 or 2"),
        (TEXT, json!({"seed": "x"}), "seed", "an integer"),
        (
            TEXT,
            json!({"logit_bias": {"5000": 1}}),
            "logit_bias.5000",
            "below 1280",
        ),
        (
            TEXT,
            json!({"logit_bias": {"5": 101}}),
            "logit_bias.5",
            "from -100 to 100",
        ),
        (TEXT, json!({"stop": vec!["a"; 17]}), "stop", "at most 16"),
        (
            TEXT,
            json!({"stop": "a".repeat(2000)}),
            "stop",
            "2000 bytes",
        ),
        (TEXT, json!({"stop": 5}), "stop", "a string or an array"),
        (
            TEXT,
            json!({"stop_token_ids": [1280]}),
            "stop_token_ids",
            "from 0 to 1279",
        ),
        (TEXT, json!({"logprobs": 21}), "logprobs", "from 0 to 20"),
        (TEXT, json!({"logprobs": true}), "logprobs", "`true`"),
        (TEXT, json!({"best_of": 3}), "best_of", "not supported"),
        (TEXT, json!({"suffix": "end"}), "suffix", "cannot fill in"),
        (TEXT, json!({"stream": 1}), "stream", "a boolean"),
        (
            TEXT,
            json!({"stream_options": {}}),
            "stream_options",
            "only for requests",
        ),
        (
            TEXT,
            json!({"response_format": {"type": "yaml"}}),
            "response_format.type",
            "found \"yaml\"",
        ),
        (
            TEXT,
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
            "missing",
        ),
        (
            CHAT,
            json!({"response_format": {"type": "json_schema", "json_schema":
                {"name": "n", "strict": true, "schema": {"not": {}}}}}),
            "response_format.json_schema.schema",
            "\"not\"",
        ),
        (
            CHAT,
            json!({"guided_json": {"type": "array", "maxItems": 99999}}),
            "guided_json",
            "maxItems: found 99999, expected at most 10000",
        ),
        (TEXT, json!({"guided_json": "{"}), "guided_json", "not JSON"),
        (
            TEXT,
            json!({"guided_json": {"enum": ["x".repeat(300_000)]}}),
            "guided_json",
            "expected at most 262144",
        ),
        (
            TEXT,
            json!({"guided_regex": "a("}),
            "guided_regex",
            "unclosed group",
        ),
        (
            TEXT,
            json!({"guided_choice": ["a", ""]}),
            "guided_choice",
            "not empty",
        ),
        (
            TEXT,
            json!({"guided_grammar": "start: x"}),
            "guided_grammar",
            "\"x\"",
        ),
        (
            CHAT,
            json!({"grammar": "root ::= <[7]>"}),
            "grammar",
            "tokens as symbols are not supported",
        ),
        (
            CHAT,
            json!({"structured_outputs": {}}),
            "structured_outputs",
            "expected one of",
        ),
        (
            CHAT,
            json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
            "guided_regex",
            "contradicts response_format",
        ),
        (
            CHAT,
            json!({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [
                {"function": {"name": "f"}},
                {"function": {"name": "g", "strict": true, "parameters": {"if": {}}}}]}),
            "tools[1].function.parameters",
            "\"if\"",
        ),
        (
            CHAT,
            json!({"tools": [{"function": {"name": "f", "strict": true,
                "parameters": {"type": "object", "properties": {"a": {"$ref": "#/b"}}}}}]}),
            "tools[0].function.parameters",
            "'b'",
        ),
        (CHAT, json!({"messages": null}), "messages", "missing"),
        (
            CHAT,
            json!({"messages": "hi"}),
            "messages",
            "expected an array",
        ),
        (CHAT, json!({"messages": []}), "messages", "no message"),
        (
            CHAT,
            json!({"messages": [1]}),
            "messages[0]",
            "expected an object",
        ),
        (
            CHAT,
            json!({"messages": [{"content": "a"}]}),
            "messages[0].role",
            "missing",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "boss", "content": "a"}]}),
            "messages[0].role",
            "`boss`",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user"}]}),
            "messages[0].content",
            "missing",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
            "only text",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": 5}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
            "an object as JSON text",
        ),
        (CHAT, json!({"max_tokens": 0}), "max_tokens", "from 1 to"),
        (
            CHAT,
            json!({"max_tokens": 1, "max_completion_tokens": 2}),
            "max_tokens",
            "contradicts",
        ),
        (CHAT, json!({"logprobs": 3}), "logprobs", "a boolean"),
        (
            CHAT,
            json!({"top_logprobs": 3}),
            "top_logprobs",
            "only for requests",
        ),
        (
            CHAT,
            json!({"tools": [{"type": "function"}]}),
            "tools[0].function",
            "missing",
        ),
        (
            CHAT,
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function.name",
            "letters",
        ),
        (
            CHAT,
            json!({"tool_choice": "required"}),
            "tool_choice",
            "no tools",
        ),
        (
            CHAT,
            json!({"tool_choice": "sometimes"}),
            "tool_choice",
            "\"sometimes\"",
        ),
        (
            CHAT,
            json!({"tools": [{"function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}}}),
            "tool_choice.function.name",
            "no tool \"g\"",
        ),
        (
            CHAT,
            json!({"functions": [{"description": "d"}]}),
            "functions[0].name",
            "missing",
        ),
        (
            CHAT,
            json!({"functions": [{"name": "f"}], "function_call": {"name": "g"}}),
            "function_call.name",
            "no tool \"g\"",
        ),
        (
            CHAT,
            json!({"function_call": {"name": "g"}}),
            "function_call",
            "no functions",
        ),
        (
            CHAT,
            json!({"functions": [{"name": "f"}], "tools": [{"function": {"name": "g"}}]}),
            "functions",
            "there are tools, too",
        ),
        (
            CHAT,
            json!({"modalities": ["audio"]}),
            "modalities",
            "not supported",
        ),
        (
            CHAT,
            json!({"chat_template_kwargs": {"messages": []}}),
            "chat_template_kwargs.messages",
            "field of the request",
        ),
        ("/tokenize", json!({}), "prompt", "missing"),
        ("/detokenize", json!({}), "tokens", "missing"),
        (
            "/detokenize",
            json!({"tokens": [1280]}),
            "tokens",
            "from 0 to 1279",
        ),
    ]
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::demo();
    for (path, fields, param, words) in cases() {
        let mut body = match path {
            TEXT => json!({"prompt": "a"}),
            CHAT => json!({"messages": [{"role": "user", "content": "a"}]}),
            _ => json!({}),
        };
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post(path, &body);
        let status = reply.status;
        let answer = reply.json();
        assert_eq!(status, 400, "{body}: {answer}");
        let error = &answer["error"];
        assert_eq!(error["param"], param, "{body}: {answer}");
        assert_eq!(error["type"], "invalid_request_error");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(words), "{body}: {message}");
    }
}

/// Unknown fields, and hints that are not followed, are reported, or refused in strict mode.
#[test]
fn what_is_not_followed_is_told() {
    let config = ServerConfig {
        strict: true,
        ..ServerConfig::default()
    };
    let (server, strict) = (
        Running::demo(),
        Running::start(config, EngineConfig::default(), 2),
    );
    let say = json!([{"role": "user", "content": "a"}]);
    let cases = [
        (TEXT, json!({"prompt": "a", "frobnicate": 1}), "frobnicate"),
        (TEXT, json!({"prompt": "a", "messages": []}), "messages"),
        (
            TEXT,
            json!({"prompt": "a", "stream": true, "stream_options": {"x": 1}}),
            "stream_options.x",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "a", "mood": "good"}], "max_tokens": 2}),
            "messages[0].mood",
        ),
        (
            CHAT,
            json!({"messages": say, "max_tokens": 2, "reasoning_effort": "high"}),
            "reasoning_effort",
        ),
        (
            "/v1/messages",
            json!({"messages": say, "max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 9},
                "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
            "thinking.type, tools[0]",
        ),
        (
            "/v1/responses",
            json!({"input": "a", "max_output_tokens": 2, "truncation": "auto", "tools": [{"type": "local_shell"}]}),
            "truncation, tools[0]",
        ),
        ("/tokenize", json!({"prompt": "a", "x": 1}), "x"),
    ];
    for (path, body, names) in cases {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 200, "{body}");
        assert_eq!(reply.header("x-ferrum-ignored"), Some(names), "{body}");
        let reply = strict.post(path, &body);
        assert_eq!(reply.status, 400, "{body}");
        let error = reply.json()["error"].clone();
        let message = error["message"].as_str().unwrap().to_owned();
        let first = names.split(", ").next().unwrap();
        assert!(message.starts_with(first), "{message}");
    }
    // Nothing is said where all is followed.
    let reply = server.post(TEXT, &json!({"prompt": "a", "user": "me"}));
    assert_eq!(reply.header("x-ferrum-ignored"), None);
}

#[test]
fn other_refusals_have_their_status() {
    let config = ServerConfig {
        max_body_bytes: 1000,
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 2);
    let json = [("Content-Type", "application/json")];
    let long = json!({"prompt": "a".repeat(2000)}).to_string();
    let other = json!({"prompt": "a", "model": "gpt-5"}).to_string();
    let deep = format!("{{\"prompt\": {}", "[".repeat(500));
    let cases: [Sent; 9] = [
        ("POST", TEXT, &json, "{", 400, "not JSON"),
        ("POST", TEXT, &json, "[]", 400, "expected an object"),
        ("POST", TEXT, &json, &deep, 400, "not JSON"),
        (
            "POST",
            TEXT,
            &[("Content-Type", "text/plain")],
            "{}",
            415,
            "application/json",
        ),
        ("POST", TEXT, &json, &long, 413, "1000 bytes"),
        ("POST", TEXT, &json, &other, 404, "no model \"gpt-5\""),
        ("GET", TEXT, &[], "", 405, "does not answer to GET"),
        (
            "GET",
            "/v1/nothing",
            &[],
            "",
            404,
            "nothing at GET /v1/nothing",
        ),
        (
            "GET",
            "/v1/models/other",
            &[],
            "",
            404,
            "no model \"other\"",
        ),
    ];
    for (method, path, headers, body, status, words) in cases {
        let reply = server.send(method, path, headers, body.as_bytes());
        assert_eq!(reply.status, status, "{method} {path} {body}");
        let answer = reply.json();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
    }
    let many = vec![("X", "y"); 200];
    assert_eq!(server.send("GET", "/health", &many, b"").status, 431);
    // The server is as well as before.
    assert_eq!(server.get("/health").status, 200);
}

/// Clients look for these words, and shorten the conversation.
#[test]
fn a_prompt_that_is_too_long_is_refused_in_words_that_clients_know() {
    let server = Running::demo();
    let long = "cat ".repeat(1500);
    let messages = json!([{"role": "user", "content": long}]);
    for (path, body, expected) in [
        (
            CHAT,
            json!({"messages": messages}),
            "This model's maximum context length is 512 tokens.",
        ),
        (
            TEXT,
            json!({"prompt": vec![7; 1500]}),
            "This model's maximum context length is 512 tokens. However, your prompt has 1500 tokens.",
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 5, "messages": messages}),
            "prompt is too long: ",
        ),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path}");
        let answer = reply.json();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(expected), "{path}: {message}");
        if path == "/v1/messages" {
            assert!(message.ends_with(" tokens > 512 maximum"), "{message}");
        } else {
            assert_eq!(answer["error"]["code"], "context_length_exceeded");
        }
    }
}

#[test]
fn invented_methods_are_counted_together() {
    let server = Running::demo();
    for method in ["A1", "A2", "A3"] {
        assert_eq!(server.send(method, "/health", &[], b"").status, 405);
    }
    let page = server.get("/metrics").text();
    let line = "http_requests_total{handler=\"/health\",method=\"other\",status=\"405\"} 3";
    assert!(page.lines().any(|found| found == line), "{page}");
    assert!(!page.contains("\"A1\""));
}
