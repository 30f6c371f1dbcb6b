//! `/v1/responses`.

use super::{Running, THINKING};
use ferrum_engine::EngineConfig;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::time::Duration;

const PATH: &str = "/v1/responses";

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "name": "get_weather", "parameters": schema, "strict": false}])
}

fn text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap().iter();
    let messages = items.filter(|item| item["type"] == "message");
    let text = |item: &Value| item["content"][0]["text"].as_str().unwrap().to_owned();
    messages.map(text).collect()
}

/// What does not differ between two answers to one request.
fn comparable(mut response: Value) -> Value {
    for field in ["id", "created_at", "completed_at"] {
        response[field] = Value::Null;
    }
    response["usage"]["input_tokens_details"] = Value::Null;
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        item["call_id"] = Value::Null;
    }
    response
}

/// The response of the last event, after holding the events before it against it.
fn check(events: &[Value]) -> Value {
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
    }
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events[1]["type"], "response.in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
    let response = events.last().unwrap()["response"].clone();
    assert_eq!(
        events.last().unwrap()["type"],
        format!("response.{}", response["status"].as_str().unwrap())
    );
    for (at, item) in response["output"].as_array().unwrap().iter().enumerate() {
        let mine: Vec<_> = events.iter().filter(|e| e["output_index"] == at).collect();
        let kinds: Vec<_> = mine.iter().map(|e| e["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[0], "response.output_item.added");
        assert_eq!(mine[0]["item"]["status"], "in_progress");
        assert_eq!(*kinds.last().unwrap(), "response.output_item.done");
        assert_eq!(mine.last().unwrap()["item"], *item);
        let (name, field, whole) = match item["type"].as_str().unwrap() {
            "message" => ("output_text", "text", &item["content"][0]["text"]),
            "reasoning" => ("reasoning_text", "text", &item["content"][0]["text"]),
            _ => ("function_call_arguments", "arguments", &item["arguments"]),
        };
        let is = |e: &&&Value, end: &str| e["type"] == format!("response.{name}.{end}");
        let deltas = mine.iter().filter(|e| is(e, "delta"));
        let joined: String = deltas.map(|e| e["delta"].as_str().unwrap()).collect();
        assert_eq!(*whole, joined);
        let done = mine.iter().find(|e| is(e, "done")).unwrap();
        assert_eq!(done[field], joined);
        if name != "function_call_arguments" {
            assert_eq!(kinds[1], "response.content_part.added");
            assert_eq!(kinds[kinds.len() - 2], "response.content_part.done");
            assert_eq!(mine[kinds.len() - 2]["part"], item["content"][0]);
        }
        for event in &mine[1..mine.len() - 1] {
            assert_eq!(event["item_id"], item["id"]);
        }
    }
    response
}

#[test]
fn whole_and_streamed_responses_are_equal() {
    let server = Running::demo();
    let conversation = json!([
        {"role": "user", "content": "My name is Clara."},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Nice to meet you, Clara!", "annotations": [], "logprobs": []}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]},
    ]);
    let cases = [
        (
            json!({"input": "What is 7 plus 5?"}),
            "7 plus 5 is 12.",
            "completed",
        ),
        (
            json!({"input": conversation}),
            "Your name is Clara.",
            "completed",
        ),
        (
            json!({"input": "What color is a banana?", "instructions": "You are a helpful assistant.",
                "temperature": 0.0, "metadata": {"a": "b"}, "text": {"format": {"type": "text"}},
                "truncation": "disabled", "include": ["reasoning.encrypted_content"],
                "tool_choice": "auto", "tools": [], "store": false}),
            "A banana is yellow.",
            "completed",
        ),
        (
            json!({"input": "What is 7 plus 5?", "max_output_tokens": 3}),
            "7 plus ",
            "incomplete",
        ),
    ];
    for (mut body, expected, status) in cases {
        let whole = server.ask(PATH, &body);
        assert_eq!(whole["object"], "response");
        assert_eq!(whole["model"], "demo");
        assert_eq!(whole["status"], status);
        assert_eq!(text(&whole), expected);
        let usage = &whole["usage"];
        assert_eq!(
            usage["total_tokens"].as_u64().unwrap(),
            usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap()
        );
        for (field, value) in body.as_object().unwrap() {
            if !["input", "include"].contains(&field.as_str()) {
                assert_eq!(whole[field]["format"], value["format"], "{field}");
            }
        }
        let reason = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        assert_eq!(whole["incomplete_details"], reason);
        body["stream"] = true.into();
        let streamed = check(&server.events(PATH, &body));
        assert_eq!(comparable(streamed), comparable(whole));
    }
}

#[test]
fn the_demo_model_calls_a_tool_and_speaks_of_its_result() {
    let server = Running::demo();
    let question = json!({"role": "user", "content": "What is the weather in Paris?"});
    for choice in [
        json!("auto"),
        json!("required"),
        json!({"type": "function", "name": "get_weather"}),
    ] {
        let mut body = json!({"input": [question], "tools": tools(), "tool_choice": choice});
        let whole = server.ask(PATH, &body);
        let call = &whole["output"][0];
        assert_eq!(call["type"], "function_call", "{whole}");
        assert_eq!(call["name"], "get_weather");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Paris"}));
        body["stream"] = true.into();
        let streamed = check(&server.events(PATH, &body));
        assert_eq!(comparable(streamed), comparable(whole.clone()));

        let result = json!({"type": "function_call_output", "call_id": call["call_id"],
            "output": "{\"weather\": \"sunny\"}"});
        let all = json!({"input": [question, call, result], "tools": tools()});
        let by_hand = server.ask(PATH, &all);
        assert_ne!(text(&by_hand), "");
        let kept =
            json!({"input": [result], "previous_response_id": whole["id"], "tools": tools()});
        let by_name = server.ask(PATH, &kept);
        assert_eq!(text(&by_name), text(&by_hand));
        assert_eq!(
            by_name["usage"]["input_tokens"],
            by_hand["usage"]["input_tokens"]
        );
    }
}

#[test]
fn a_response_goes_on_from_one_that_was_kept() {
    let server = Running::demo();
    let first = server.ask(
        PATH,
        &json!({"input": "My name is Clara.", "instructions": "Be kind."}),
    );
    let id = first["id"].as_str().unwrap();
    let path = format!("{PATH}/{id}");
    assert_eq!(server.get(&path).json(), first);
    let body = json!({"input": "What is my name?", "previous_response_id": id, "stream": true});
    let second = check(&server.events(PATH, &body));
    assert_eq!(text(&second), "Your name is Clara.");
    assert_eq!(second["previous_response_id"], id);
    // The second stands on its own feet.
    assert_eq!(
        server.send("DELETE", &path, &[], b"").json()["deleted"],
        true
    );
    for method in ["GET", "DELETE"] {
        let reply = server.send(method, &path, &[], b"");
        assert_eq!(reply.status, 404);
        assert_eq!(reply.json()["error"]["code"], "not_found");
    }
    let body = json!({"input": "What is my name?", "previous_response_id": second["id"]});
    assert_eq!(text(&server.ask(PATH, &body)), "Your name is Clara.");

    let passing = server.ask(PATH, &json!({"input": "Hello.", "store": false}));
    let path = format!("{PATH}/{}", passing["id"].as_str().unwrap());
    assert_eq!(server.get(&path).status, 404);
}

#[test]
fn whether_a_model_thinks_is_said_in_the_words_of_its_template() {
    for variable in ["enable_thinking", "thinking"] {
        let template = THINKING.replace("enable_thinking", variable);
        let server = Running::with_template(&template);
        for (effort, kind) in [("none", "message"), ("high", "reasoning")] {
            let body = json!({"input": "What is 7 plus 5?", "reasoning": {"effort": effort}});
            let answer = server.ask(PATH, &body);
            assert_eq!(answer["output"][0]["type"], kind, "{variable} {effort}");
        }
    }
}

#[test]
fn thoughts_are_items_of_their_own() {
    let server = Running::with_template(THINKING);
    let mut body = json!({"input": "What is 7 plus 5?", "reasoning": {"summary": "auto"}});
    let whole = server.ask(PATH, &body);
    let thought = &whole["output"][0];
    assert_eq!(thought["type"], "reasoning", "{whole}");
    assert_eq!(thought["content"][0]["type"], "reasoning_text");
    let details = &whole["usage"]["output_tokens_details"];
    let reasoning = details["reasoning_tokens"].as_u64().unwrap();
    // It ended in its thoughts, with a token that is none of them.
    assert_eq!(whole["usage"]["output_tokens"], reasoning + 1);
    let messages = json!([{"role": "user", "content": "What is 7 plus 5?"}]);
    let chat = server.ask("/v1/chat/completions", &json!({"messages": messages}));
    let details = &chat["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], reasoning);
    body["stream"] = true.into();
    let streamed = check(&server.events(PATH, &body));
    assert_eq!(comparable(streamed), comparable(whole.clone()));

    let input = json!([{"role": "user", "content": "What is 7 plus 5?"}, thought,
        {"role": "assistant", "content": "12."}, {"role": "user", "content": "What is 7 plus 5?"}]);
    let body = json!({"input": input, "reasoning": {"effort": "none"}});
    let answer = server.ask(PATH, &body);
    assert_eq!(answer["output"][0]["type"], "message", "{answer}");
}

/// A client may name an item of an answer instead of sending it back.
#[test]
fn items_that_were_kept_can_be_referred_to() {
    let server = Running::demo();
    let question = json!({"role": "user", "content": "My name is Tom."});
    let first = server.ask(
        PATH,
        &json!({"input": [question], "max_output_tokens": 16, "temperature": 0}),
    );
    let item = first["output"][0].clone();
    let next = json!({"role": "user", "content": "What is my name?"});
    let ask = |item: Value| {
        let body =
            json!({"input": [question, item, next], "max_output_tokens": 16, "temperature": 0});
        server.ask(PATH, &body)["output"][0]["content"].clone()
    };
    let referred = ask(json!({"type": "item_reference", "id": item["id"]}));
    assert_eq!(referred, ask(item));
}

/// Functions of a namespace are called by their own names, and the call says whose it is.
#[test]
fn namespaces_are_flattened() {
    let server = Running::demo();
    let function = |name: &str| {
        json!({"type": "function", "name": name,
            "parameters": {"type": "object", "properties": {}, "additionalProperties": false}})
    };
    let mut body = json!({"input": "a", "max_output_tokens": 64, "tool_choice": {"type": "function", "name": "g"},
        "tools": [{"type": "namespace", "name": "files", "tools": [function("f"), function("g")]}, function("h")]});
    let answer = server.ask(PATH, &body);
    let call = &answer["output"][0];
    assert_eq!(
        (&call["name"], &call["namespace"]),
        (&json!("g"), &json!("files")),
        "{answer}"
    );
    body["tool_choice"]["name"] = "h".into();
    let answer = server.ask(PATH, &body);
    assert_eq!(answer["output"][0]["name"], "h");
    assert!(answer["output"][0].get("namespace").is_none());
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::demo();
    let item = |item: Value| json!({"input": [item]});
    let cases = [
        (json!({"input": null}), "input", "missing"),
        (json!({"input": []}), "input", "no item"),
        (json!({"input": 5}), "input", "`5`, expected a string"),
        (
            item(json!({"role": "boss", "content": "a"})),
            "input[0].role",
            "`boss`",
        ),
        (item(json!({"role": "user"})), "input[0].content", "missing"),
        (
            item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "input[0].content[0].type",
            "only text",
        ),
        (
            item(json!({"type": "item_reference", "id": "a"})),
            "input[0].id",
            "no item \"a\"",
        ),
        (
            item(json!({"type": "image", "id": "a"})),
            "input[0].type",
            "\"image\"",
        ),
        (
            item(json!({"type": "function_call", "name": "f", "arguments": "{}"})),
            "input[0].call_id",
            "missing",
        ),
        (
            item(json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": 5})),
            "input[0].arguments",
            "an object as JSON text",
        ),
        (
            item(json!({"type": "function_call_output", "call_id": "1"})),
            "input[0].output",
            "missing",
        ),
        (
            json!({"max_output_tokens": 0}),
            "max_output_tokens",
            "from 1",
        ),
        (
            json!({"tools": [{"type": "function"}]}),
            "tools[0].name",
            "missing",
        ),
        (
            json!({"tool_choice": "required"}),
            "tool_choice",
            "no tools",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "name": "g"}}),
            "tool_choice.name",
            "no tool \"g\"",
        ),
        (
            json!({"text": {"format": {"type": "yaml"}}}),
            "text.format.type",
            "found \"yaml\"",
        ),
        (json!({"background": true}), "background", "not supported"),
        (
            json!({"previous_response_id": "resp_x"}),
            "previous_response_id",
            "no response",
        ),
        (
            json!({"conversation": "a"}),
            "conversation",
            "previous_response_id",
        ),
        (
            json!({"stream_options": {}}),
            "stream_options",
            "only for requests",
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
fn a_server_that_keeps_nothing_says_so() {
    let config = ServerConfig {
        max_stored_bytes: 0,
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 2);
    let answer = server.ask(PATH, &json!({"input": "What is 7 plus 5?"}));
    assert_eq!(answer["store"], false);
    let reply = server.post(PATH, &json!({"input": "a", "store": true}));
    assert_eq!(reply.json()["error"]["param"], "store");
}

#[test]
fn a_response_that_fails_says_so() {
    let config = ServerConfig {
        request_timeout: Duration::from_nanos(1),
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 1);
    assert_eq!(server.post(PATH, &json!({"input": "a"})).status, 504);
    let events = server.events(PATH, &json!({"input": "a", "stream": true}));
    let response = check(&events);
    assert_eq!(response["error"]["code"], "timeout");
}

#[test]
fn text_is_held_to_its_format() {
    let server = Running::demo();
    // The demo model never ends a number by itself.
    let number = json!({"type": "integer", "minimum": 0, "maximum": 99});
    let schema = json!({"type": "object", "properties": {"sum": number},
        "required": ["sum"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "sum", "strict": true, "schema": schema});
    let body =
        json!({"input": "What is 7 plus 5?", "max_output_tokens": 40, "text": {"format": format}});
    let response = server.ask(PATH, &body);
    assert_eq!(response["status"], "completed");
    assert_eq!(response["text"]["format"], format);
    let answer: Value = serde_json::from_str(&text(&response)).unwrap();
    assert!(
        answer["sum"].is_i64() && answer.as_object().unwrap().len() == 1,
        "{answer}"
    );
    let mut wrong = body;
    wrong["text"]["format"]["schema"] = json!({"type": "nothing"});
    let reply = server.post(PATH, &wrong);
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["param"], "text.format.schema");
}

#[test]
fn the_tokens_of_a_request_are_counted() {
    let server = Running::demo();
    let body = json!({"input": "What is 7 plus 5?"});
    let counted = server.ask("/v1/responses/input_tokens", &body);
    assert_eq!(counted["object"], "response.input_tokens");
    let usage = server.ask(PATH, &body)["usage"].take();
    assert_eq!(counted["input_tokens"], usage["input_tokens"]);
}

#[test]
fn tokens_of_a_text_come_with_their_log_probabilities() {
    let server = Running::with_template(THINKING);
    let mut body = json!({"input": "What is 7 plus 5?", "temperature": 0, "max_output_tokens": 40,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "reasoning": {"effort": "none"}});
    let reply = server.post(PATH, &body);
    assert_eq!(reply.header("x-ferrum-ignored"), None);
    let whole = reply.json();
    assert_eq!(whole["top_logprobs"], 2);
    let items = whole["output"].as_array().unwrap();
    let message = items.iter().find(|item| item["type"] == "message").unwrap();
    let listed = message["content"][0]["logprobs"].as_array().unwrap();
    // All of the text, and nothing beside it.
    let bytes =
        |entry: &Value| -> Vec<u8> { serde_json::from_value(entry["bytes"].clone()).unwrap() };
    let said: Vec<u8> = listed.iter().flat_map(bytes).collect();
    assert_eq!(String::from_utf8(said).unwrap().trim(), text(&whole));
    for entry in listed {
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["token"], entry["token"]);
    }
    body["stream"] = true.into();
    let events = server.events(PATH, &body);
    let response = check(&events);
    assert_eq!(comparable(response), comparable(whole.clone()));
    let of = |kind: &str| -> Vec<Value> {
        let events = events.iter().filter(|event| event["type"] == kind);
        let lists = events.map(|event| event["logprobs"].as_array().unwrap().clone());
        lists.flatten().collect()
    };
    let told = of("response.output_text.delta");
    assert_eq!(told, of("response.output_text.done"));
    assert_eq!(told.len(), listed.len());
    for (told, listed) in told.iter().zip(listed) {
        for field in ["token", "logprob"] {
            assert_eq!(told[field], listed[field]);
            let second = |entry: &Value| entry["top_logprobs"][1][field].clone();
            assert_eq!(second(told), second(listed));
        }
    }
    // They are asked for by name only.
    let reply = server.post(
        PATH,
        &json!({"input": "Hi", "max_output_tokens": 1, "top_logprobs": 2}),
    );
    assert_eq!(reply.header("x-ferrum-ignored"), Some("top_logprobs"));
    assert_eq!(reply.json()["top_logprobs"], 0);
}
