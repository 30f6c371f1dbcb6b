//! `/v1/messages` and `/v1/messages/count_tokens`.

use super::{Running, THINKING};
use ferrum_engine::EngineConfig;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::time::Duration;

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"name": "get_weather", "description": "Tells the weather.", "input_schema": schema}])
}

/// A message put together from its events, which have to come in Anthropic's order.
fn put_together(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events[1]["type"], "ping");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let mut blocks: Vec<Value> = Vec::new();
    let mut json_text = String::new();
    let mut open = false;
    for event in &events[2..events.len() - 1] {
        let kind = event["type"].as_str().unwrap();
        match kind {
            "message_delta" => {
                assert!(!open);
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = event["delta"][field].clone();
                }
                message["usage"] = event["usage"].clone();
                continue;
            }
            "content_block_start" => {
                assert!(!open);
                open = true;
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(open);
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                let (field, text) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "input_json_delta" => {
                        json_text += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let longer = block[field].as_str().unwrap().to_owned() + text.as_str().unwrap();
                block[field] = longer.into();
            }
            "content_block_stop" => {
                open = false;
                let block = blocks.last_mut().unwrap();
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&json_text).unwrap();
                    json_text.clear();
                }
            }
            other => panic!("{other}"),
        }
        assert_eq!(event["index"], blocks.len() - 1);
    }
    message["content"] = blocks.into();
    message
}

/// What does not differ between two answers to one request.
fn comparable(mut message: Value) -> Value {
    message["id"] = "".into();
    message["usage"] = message["usage"]["output_tokens"].clone();
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(block["id"].as_str().unwrap().starts_with("toolu_"));
            block["id"] = "".into();
        }
    }
    message
}

#[test]
fn whole_and_streamed_messages_are_equal() {
    let server = Running::demo();
    let clara = json!([
        user("My name is Clara."),
        {"role": "assistant", "content": [{"type": "text", "text": "Nice to meet you, Clara!"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "What is my name?", "cache_control": {"type": "ephemeral"}}]},
    ]);
    let cases = [
        (
            json!({"messages": [user("What is 7 plus 5?")]}),
            "7 plus 5 is 12.",
            "end_turn",
        ),
        (
            json!({"messages": clara}),
            "Your name is Clara.",
            "end_turn",
        ),
        (
            json!({"messages": [user("What color is a banana?")], "system": [
                {"type": "text", "text": "You are a helpful assistant."}]}),
            "A banana is yellow.",
            "end_turn",
        ),
        (
            json!({"messages": [user("What is 7 plus 5?")], "stop_sequences": ["x", " 12"]}),
            "7 plus 5 is",
            "stop_sequence",
        ),
        (
            json!({"messages": [user("What is 7 plus 5?")], "max_tokens": 3}),
            "7 plus ",
            "max_tokens",
        ),
        (
            json!({"messages": [
                {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]},
                user("What color is a banana?")]}),
            "A banana is yellow.",
            "end_turn",
        ),
        // It goes on with what was said for it.
        (
            json!({"messages": [user("What is 7 plus 5?"),
                {"role": "assistant", "content": "7 plus 5"}]}),
            " is 12.",
            "end_turn",
        ),
    ];
    for (mut body, text, reason) in cases {
        if body["max_tokens"].is_null() {
            body["max_tokens"] = 64.into();
        }
        let whole = server.ask(PATH, &body);
        assert_eq!(whole["type"], "message");
        assert_eq!(whole["role"], "assistant");
        assert_eq!(whole["model"], "demo");
        assert_eq!(whole["content"][0]["text"], text, "{whole}");
        assert_eq!(whole["stop_reason"], reason, "{whole}");
        let sequence = if reason == "stop_sequence" {
            json!(" 12")
        } else {
            Value::Null
        };
        assert_eq!(whole["stop_sequence"], sequence);
        let mut counted = body.clone();
        for field in ["max_tokens", "stop_sequences"] {
            counted.as_object_mut().unwrap().remove(field);
        }
        let count = server.ask(COUNT, &counted);
        let usage = &whole["usage"];
        let total = usage["input_tokens"].as_u64().unwrap()
            + usage["cache_read_input_tokens"].as_u64().unwrap();
        assert_eq!(count["input_tokens"], total);
        body["stream"] = true.into();
        let streamed = put_together(&server.events(PATH, &body));
        assert_eq!(comparable(streamed), comparable(whole));
    }
}

#[test]
fn the_demo_model_calls_a_tool_and_speaks_of_its_result() {
    let server = Running::demo();
    let question = user("What is the weather in Paris?");
    for choice in [
        Value::Null,
        json!({"type": "auto"}),
        json!({"type": "any", "disable_parallel_tool_use": true}),
        json!({"type": "tool", "name": "get_weather"}),
    ] {
        let mut body = json!({
            "messages": [question], "tools": tools(), "tool_choice": choice, "max_tokens": 64,
        });
        let whole = server.ask(PATH, &body);
        assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
        let call = &whole["content"][0];
        assert_eq!(call["type"], "tool_use");
        assert_eq!(call["name"], "get_weather");
        assert_eq!(call["input"], json!({"city": "Paris"}));
        body["stream"] = true.into();
        let streamed = put_together(&server.events(PATH, &body));
        assert_eq!(comparable(streamed), comparable(whole.clone()));

        for (content, is_error) in [
            (json!("{\"weather\": \"sunny\"}"), false),
            (json!([{"type": "text", "text": "no such city"}]), true),
        ] {
            let result = json!({"type": "tool_result", "tool_use_id": call["id"],
                "content": content, "is_error": is_error});
            let messages = json!([
                question,
                {"role": "assistant", "content": whole["content"]},
                {"role": "user", "content": [result]},
            ]);
            let body = json!({"messages": messages, "tools": tools(), "max_tokens": 64});
            let answer = server.ask(PATH, &body);
            assert_eq!(answer["content"][0]["type"], "text", "{answer}");
            assert_ne!(answer["content"][0]["text"], "");
        }
    }
    let body = json!({"messages": [question], "tools": tools(),
        "tool_choice": {"type": "none"}, "max_tokens": 8});
    assert_eq!(server.ask(PATH, &body)["content"][0]["type"], "text");
}

#[test]
fn thoughts_are_blocks_of_their_own() {
    let server = Running::with_template(THINKING);
    let mut body = json!({"messages": [user("What is 7 plus 5?")], "max_tokens": 64});
    for thinking in [
        Value::Null,
        json!({"type": "enabled", "budget_tokens": 1024}),
        json!({"type": "adaptive"}),
    ] {
        body["thinking"] = thinking;
        body["stream"] = false.into();
        let whole = server.ask(PATH, &body);
        assert_eq!(whole["content"][0]["type"], "thinking", "{whole}");
        assert_eq!(whole["content"][0]["signature"], "");
        let usage = &whole["usage"];
        let thought = &usage["output_tokens_details"]["thinking_tokens"];
        // It ended in its thoughts, with a token that is none of them.
        let thought = thought.as_u64().unwrap();
        assert_eq!(usage["output_tokens"], thought + 1);
        body["stream"] = true.into();
        let streamed = put_together(&server.events(PATH, &body));
        assert_eq!(comparable(streamed), comparable(whole));
    }
    let body = json!({"messages": [
        user("What is 7 plus 5?"),
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Well.", "signature": ""},
            {"type": "text", "text": "12."}]},
        user("What is 7 plus 5?"),
    ], "max_tokens": 64, "thinking": {"type": "disabled"}});
    let whole = server.ask(PATH, &body);
    assert_eq!(whole["content"][0]["type"], "text", "{whole}");
    let thoughtless = server.ask(
        COUNT,
        &json!({"messages": [
        user("What is 7 plus 5?"),
        {"role": "assistant", "content": "12."},
        user("What is 7 plus 5?"),
    ], "thinking": {"type": "disabled"}}),
    );
    let tokens = |usage: &Value, field: &str| usage[field].as_u64().unwrap();
    let all = tokens(&whole["usage"], "input_tokens")
        + tokens(&whole["usage"], "cache_read_input_tokens");
    assert!(tokens(&thoughtless, "input_tokens") < all);
}

/// Documents and search results are text as far as they are, wherever a block may be.
#[test]
fn documents_are_read_as_text() {
    let server = Running::demo();
    let count = |blocks: Value| {
        let body = json!({"messages": [{"role": "user", "content": blocks}]});
        server.ask(COUNT, &body)["input_tokens"].as_u64().unwrap()
    };
    let plain = count(json!([{"type": "text", "text": "Notes\nA cat."}]));
    let document = json!({"type": "document", "title": "Notes", "citations": {"enabled": true},
        "source": {"type": "text", "media_type": "text/plain", "data": "A cat."}});
    assert_eq!(count(json!([document])), plain);
    let content = json!({"type": "document", "title": "Notes",
        "source": {"type": "content", "content": [{"type": "text", "text": "A cat."}]}});
    assert_eq!(count(json!([content])), plain);
    let found =
        json!({"type": "search_result", "title": "Notes", "source": "A cat.", "content": []});
    assert!(count(json!([found])) >= plain);
    let result = |block: Value| {
        count(json!([{"type": "tool_result", "tool_use_id": "1", "content": [block]}]))
    };
    assert_eq!(
        result(document),
        result(json!({"type": "text", "text": "Notes\nA cat."}))
    );
}

/// The form of an answer that newer clients ask for, in both of its places.
#[test]
fn answers_keep_to_a_schema() {
    let server = Running::demo();
    let schema = json!({"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    for fields in [
        json!({"output_config": {"format": format}}),
        json!({"output_format": format}),
    ] {
        let mut body = json!({"messages": [user("What is 7 plus 5?")], "max_tokens": 64});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let whole = server.ask(PATH, &body);
        let text = whole["content"][0]["text"].as_str().unwrap();
        let answer: Value = serde_json::from_str(text).unwrap();
        assert_eq!(answer, json!({"a": 7}));
        // Clients check the fields of blocks, and `citations` is none of an answer without.
        assert!(whole["content"][0].get("citations").is_none());
    }
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::demo();
    let block = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let cases = [
        (json!({"max_tokens": null}), "max_tokens: it is missing"),
        (json!({"max_tokens": 0}), "max_tokens: found 0"),
        (json!({"messages": null}), "messages: it is missing"),
        (json!({"messages": []}), "messages: found no message"),
        (
            json!({"messages": [{"role": "boss", "content": "a"}]}),
            "messages[0].role: unknown variant `boss`",
        ),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            "messages[0].content: invalid type: integer `5`, expected a string or an array",
        ),
        (
            json!({"messages": [{"role": "user", "content": []}]}),
            "messages[0].content: found no block",
        ),
        (
            block(json!({"type": "image", "source": {}})),
            "messages[0].content[0].type: found \"image\"",
        ),
        (
            block(json!({"type": "text"})),
            "messages[0].content[0].text: it is missing",
        ),
        (
            block(json!({"type": "tool_result", "content": "a"})),
            "messages[0].content[0].tool_use_id: it is missing",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a b", "input": {}}]}]}),
            "messages[0].content[0].name: invalid value: string \"a b\"",
        ),
        (json!({"system": 5}), "system: invalid type: integer `5`"),
        (
            json!({"stop_sequences": "a"}),
            "stop_sequences: invalid type: string \"a\", expected an array",
        ),
        (
            json!({"temperature": -1}),
            "temperature: invalid value: integer `-1`, expected a number from 0 to 2",
        ),
        (
            json!({"tools": [{"name": "f", "input_schema": 5}]}),
            "tools[0].input_schema: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"tool_choice": {"type": "any"}}),
            "tool_choice: there are no tools",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "tool", "name": "g"}}),
            "tool_choice.name: there is no tool \"g\"",
        ),
        (
            json!({"output_config": {"format": {}}}),
            "output_config.format.type: it is missing",
        ),
        (
            json!({"output_config": {"format": {"type": "json_schema"}}}),
            "output_config.format.schema: it is missing",
        ),
        (
            block(json!({"type": "document", "source": {"type": "base64", "data": "JVBERi0="}})),
            "messages[0].content[0].type: found a document of \"base64\", expected text",
        ),
        (
            json!({"tool_choice": {"type": "some"}}),
            "tool_choice.type: unknown variant `some`",
        ),
        (
            json!({"thinking": {"type": "sometimes"}}),
            "thinking.type: unknown variant `sometimes`",
        ),
    ];
    for (fields, words) in cases {
        let mut body = json!({"messages": [user("a")], "max_tokens": 4});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post(PATH, &body);
        assert_eq!(reply.status, 400, "{body}");
        let answer = reply.json();
        assert_eq!(answer["type"], "error");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(words), "{body}: {message}");
    }
}

#[test]
fn errors_have_anthropics_shape() {
    let config = ServerConfig {
        api_keys: vec!["one".into()],
        max_body_bytes: 1000,
        request_timeout: Duration::from_nanos(1),
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 2);
    let json_type = ("Content-Type", "application/json");
    let key = ("x-api-key", "one");
    let good = json!({"messages": [user("a")], "max_tokens": 4});
    let mut other = good.clone();
    other["model"] = "claude".into();
    let long = json!({"messages": [user(&"a".repeat(2000))], "max_tokens": 4});
    let cases = [
        (
            PATH,
            "POST",
            vec![json_type],
            &good,
            401,
            "authentication_error",
        ),
        (
            COUNT,
            "POST",
            vec![json_type, ("x-api-key", "two")],
            &good,
            401,
            "authentication_error",
        ),
        (
            PATH,
            "POST",
            vec![json_type, key],
            &other,
            404,
            "not_found_error",
        ),
        (
            PATH,
            "POST",
            vec![json_type, key],
            &long,
            413,
            "request_too_large",
        ),
        (PATH, "POST", vec![key], &good, 415, "invalid_request_error"),
        (PATH, "PUT", vec![key], &good, 405, "invalid_request_error"),
        (COUNT, "GET", vec![key], &good, 405, "invalid_request_error"),
        (
            "/v1/messages/batches",
            "POST",
            vec![json_type, key],
            &good,
            404,
            "not_found_error",
        ),
        (
            PATH,
            "POST",
            vec![json_type, key],
            &good,
            504,
            "timeout_error",
        ),
    ];
    for (path, method, headers, body, status, kind) in cases {
        let reply = server.send(method, path, &headers, body.to_string().as_bytes());
        assert_eq!(reply.status, status, "{path} {method} {body}");
        let answer = reply.json();
        assert_eq!(answer["type"], "error", "{answer}");
        assert_eq!(answer["error"]["type"], kind);
    }
    let mut stream = good.clone();
    stream["stream"] = true.into();
    let reply = server.send(
        "POST",
        PATH,
        &[json_type, key],
        stream.to_string().as_bytes(),
    );
    let text = reply.text();
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(
        last.starts_with("event: error\ndata: {\"type\":\"error\""),
        "{text}"
    );
}

/// Anthropic's TypeScript client sends the whole conversation after an error with these words.
#[test]
fn a_thread_is_not_gone_on_with() {
    let server = Running::demo();
    let with = |thread: Value| {
        let body =
            json!({"max_tokens": 20, "messages": [user("What is 7 plus 5?")], "thread": thread});
        server.post(PATH, &body)
    };
    let refused = with(json!({"type": "continue", "previous_message_id": "msg_1"}));
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].take();
    assert_eq!(error["details"]["error_code"], "thread_unsupported_request");
    assert_eq!(error["details"]["unsupported"], json!(["thread"]));
    for thread in [json!({"type": "new"}), Value::Null] {
        assert_eq!(with(thread).status, 200);
    }
}
