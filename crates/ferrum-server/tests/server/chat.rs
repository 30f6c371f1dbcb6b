//! `/v1/chat/completions`.

use super::Running;
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn message(answer: &Value) -> &Value {
    &answer["choices"][0]["message"]
}

#[test]
fn the_demo_model_answers() {
    let server = Running::demo();
    let answer = server.ask(
        PATH,
        &json!({"model": "demo", "messages": user("What is 7 plus 5?")}),
    );
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(message(&answer)["role"], "assistant");
    assert_eq!(message(&answer)["content"], "7 plus 5 is 12.");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["prompt_tokens"], 16);
    // The token that ends the answer was generated, too.
    assert_eq!(answer["usage"]["completion_tokens"], 10);
    assert_eq!(answer["usage"]["total_tokens"], 26);
    let details = &answer["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], 0);

    // A conversation with parts, nulls, and what clients send back with an answer.
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "My name is Clara."}], "name": null},
        {"role": "assistant", "content": "Nice to meet you, Clara!", "refusal": null,
         "tool_calls": null, "annotations": []},
        {"role": "user", "content": "What is my name?"},
    ]);
    let answer = server.ask(
        PATH,
        &json!({"messages": messages, "max_completion_tokens": 40}),
    );
    assert_eq!(message(&answer)["content"], "Your name is Clara.");
}

#[test]
fn streams_come_to_the_whole_message() {
    let server = Running::demo();
    let mut body = json!({
        "messages": user("Tell me a story about a fox."),
        "max_tokens": 30,
        "n": 2,
        "logprobs": true,
        "top_logprobs": 2,
        "temperature": 1.0,
        "seed": 11,
    });
    let whole = server.ask(PATH, &body);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let chunks = server.stream(PATH, &body);
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(
        last["usage"]["completion_tokens"],
        whole["usage"]["completion_tokens"]
    );
    for (i, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let mine = || {
            chunks
                .iter()
                .map(|c| &c["choices"][0])
                .filter(|c| c["index"] == i)
        };
        assert_eq!(mine().next().unwrap()["delta"]["role"], "assistant");
        let content = |c: &Value| c["delta"]["content"].as_str().unwrap_or("").to_owned();
        assert_eq!(
            expected["message"]["content"],
            mine().map(content).collect::<String>()
        );
        let logprobs = |c: &Value| {
            c["logprobs"]["content"]
                .as_array()
                .cloned()
                .unwrap_or_default()
        };
        let logprobs: Vec<_> = mine().flat_map(logprobs).collect();
        assert_eq!(expected["logprobs"]["content"], json!(logprobs));
        assert_eq!(
            mine().next_back().unwrap()["finish_reason"],
            expected["finish_reason"]
        );
        for entry in &logprobs {
            let bytes: Vec<u8> = serde_json::from_value(entry["bytes"].clone()).unwrap();
            assert_eq!(entry["token"], *String::from_utf8_lossy(&bytes));
            assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        }
    }
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool =
        |name: &str| json!({"type": "function", "function": {"name": name, "parameters": schema}});
    json!([tool("get_weather"), tool("get_time")])
}

/// The calls of a streamed answer, put together.
fn streamed_calls(chunks: &[Value]) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in chunks.iter().map(|c| &c["choices"][0]["delta"]) {
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if call["id"].is_string() {
                assert_eq!(call["index"], calls.len());
                assert_eq!(call["type"], "function");
                let name = call["function"]["name"].as_str().unwrap();
                calls.push((name.into(), String::new()));
            }
            let arguments = call["function"]["arguments"].as_str().unwrap();
            calls.last_mut().unwrap().1 += arguments;
        }
    }
    calls
}

#[test]
fn the_demo_model_calls_a_tool_and_speaks_of_its_result() {
    let server = Running::demo();
    let question = json!({"role": "user", "content": "What is the weather in Paris?"});
    let mut body = json!({"messages": [question], "tools": tools()});
    let answer = server.ask(PATH, &body);
    assert_eq!(
        answer["choices"][0]["finish_reason"], "tool_calls",
        "{answer}"
    );
    let said = message(&answer).clone();
    assert_eq!(said["content"], Value::Null);
    let call = &said["tool_calls"][0]["function"];
    assert_eq!(call["name"], "get_weather");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Paris"}));

    for choice in [
        json!("auto"),
        json!("required"),
        json!({"type": "function", "function": {"name": "get_weather"}}),
    ] {
        body["tool_choice"] = choice;
        body["stream"] = true.into();
        let chunks = server.stream(PATH, &body);
        let calls = streamed_calls(&chunks);
        assert_eq!(calls.len(), 1, "{chunks:?}");
        assert_eq!(calls[0].0, "get_weather");
        let streamed: Value = serde_json::from_str(&calls[0].1).unwrap();
        assert_eq!(streamed, arguments);
        assert_eq!(
            chunks.last().unwrap()["choices"][0]["finish_reason"],
            "tool_calls"
        );
    }

    // What was called goes back with its result.
    let id = &said["tool_calls"][0]["id"];
    let result = json!({"role": "tool", "tool_call_id": id, "content": "{\"weather\": \"sunny\"}"});
    let body = json!({"messages": [question, said, result], "tools": tools()});
    let answer = server.ask(PATH, &body);
    assert!(
        !message(&answer)["content"].as_str().unwrap().is_empty(),
        "{answer}"
    );

    // Without tools, or with none to be called, tags are only text.
    let body = json!({"messages": [question], "tools": tools(), "tool_choice": "none"});
    let answer = server.ask(PATH, &body);
    assert_eq!(message(&answer)["tool_calls"], Value::Null);
}

/// Old clients know `functions` and `function_call` only.
#[test]
fn functions_are_called_in_the_older_form() {
    let server = Running::demo();
    let question = json!({"role": "user", "content": "What is the weather in Paris?"});
    let functions: Vec<_> = tools()
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["function"].clone())
        .collect();
    let newer = server.ask(PATH, &json!({"messages": [question], "tools": tools()}));
    let expected = &message(&newer)["tool_calls"][0]["function"];
    let mut body = json!({"messages": [question], "functions": functions});
    for choice in [Value::Null, json!("auto"), json!({"name": "get_weather"})] {
        body["function_call"] = choice;
        body["stream"] = false.into();
        let reply = server.post(PATH, &body);
        assert_eq!(reply.header("x-ferrum-ignored"), None);
        let answer = reply.json();
        let found = &answer["choices"][0];
        assert_eq!(found["finish_reason"], "function_call", "{answer}");
        let said = &found["message"];
        assert_eq!(said["content"], Value::Null);
        assert!(said.get("tool_calls").is_none(), "{said}");
        assert_eq!(said["function_call"]["name"], "get_weather");
        let arguments: Value =
            serde_json::from_str(said["function_call"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Paris"}));

        body["stream"] = true.into();
        let chunks = server.stream(PATH, &body);
        let calls = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0]["delta"]["function_call"]);
        let calls: Vec<_> = calls.filter(|call| call.is_object()).collect();
        assert_eq!(calls[0]["name"], "get_weather");
        assert!(calls[1..].iter().all(|call| call.get("name").is_none()));
        let text: String = calls
            .iter()
            .map(|call| call["arguments"].as_str().unwrap())
            .collect();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), arguments);
        let last = &chunks.last().unwrap()["choices"][0];
        assert_eq!(last["finish_reason"], "function_call");
    }
    body["stream"] = false.into();
    body["function_call"] = "none".into();
    let answer = server.ask(PATH, &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert!(message(&answer).get("function_call").is_none());

    // What was called goes back with its result, as the newer form has it.
    let call = |id: &str| json!({"id": id, "type": "function", "function": expected});
    let both = [
        json!([
            question,
            {"role": "assistant", "content": null, "function_call": expected},
            {"role": "function", "name": "get_weather", "content": "sunny"},
        ]),
        json!([
            question,
            {"role": "assistant", "content": null, "tool_calls": [call("1")]},
            {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "sunny"},
        ]),
    ];
    let prompts =
        both.map(|messages| server.ask("/apply-template", &json!({"messages": messages})));
    assert_eq!(prompts[0], prompts[1]);
    assert!(prompts[0]["prompt"].as_str().unwrap().contains("sunny"));
}

/// Templates that ask for ids of calls get some, by which results are of their calls.
#[test]
fn calls_of_the_older_form_have_ids() {
    let server = Running::with_template(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }}:{{ c.function.name }} {% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }} {% endif %}{% endfor %}",
    );
    let call = |name: &str| json!({"role": "assistant", "content": null, "function_call": {"name": name, "arguments": "{}"}});
    let result = |name: &str| json!({"role": "function", "name": name, "content": name});
    let messages = json!([call("f"), result("f"), call("g"), result("g")]);
    let prompt = server.ask("/apply-template", &json!({"messages": messages}))["prompt"].clone();
    assert_eq!(prompt, "000000000:f 000000000=f 000000002:g 000000002=g ");
}

/// A tool may return an image: agents keep it in the conversation, and the prompt says that there was one.
#[test]
fn what_tools_give_beside_text_is_noted() {
    let server = Running::demo();
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "view", "arguments": "{}"}});
    let image = json!({"type": "image_url", "image_url": {"url": "data:,"}});
    let mut messages = json!([
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.png"}, image]},
    ]);
    let reply = server.post("/apply-template", &json!({"messages": messages}));
    assert_eq!(
        reply.header("x-ferrum-ignored"),
        Some("messages[2].content[1]")
    );
    let prompt = reply.json()["prompt"].as_str().unwrap().to_owned();
    assert!(
        prompt.contains("a.png\n[image left out: this model reads only text]"),
        "{prompt}"
    );
    server.ask(PATH, &json!({"messages": messages, "max_tokens": 2}));
    // What a user shows is to be looked at.
    messages[2]["role"] = "user".into();
    assert_eq!(
        server.post(PATH, &json!({"messages": messages})).status,
        400
    );
}

#[test]
fn a_conversation_has_the_tokens_that_its_answer_counts() {
    let server = Running::demo();
    let messages = user("What color is a banana?");
    let tokens = server.ask("/tokenize", &json!({"messages": messages}));
    let answer = server.ask(PATH, &json!({"messages": messages}));
    assert_eq!(tokens["count"], answer["usage"]["prompt_tokens"]);
}

/// A user who spells a special token out does not end the message with it.
#[test]
fn special_tokens_in_messages_are_text() {
    let server = Running::demo();
    let count = |content: &str, parse: bool| {
        let body =
            json!({"messages": [{"role": "user", "content": content}], "parse_special": parse});
        server.ask("/tokenize", &body)["count"].as_u64().unwrap()
    };
    // The template's own way to end a message.
    let end = "<|im_end|>";
    assert_eq!(count(&format!("a{end}"), true), count("a", true) + 1);
    assert!(count(&format!("a{end}"), false) > count("a", false) + 1);
    assert_eq!(count("a cat", false), count("a cat", true));
}

/// What clients were told is no reason to refuse them when they send it back.
#[test]
fn what_was_said_can_be_sent_back() {
    let server = Running::demo();
    let function = json!({"name": "add", "arguments": "{\"a\": 7, \"b\":"});
    let messages = json!([
        {"role": "user", "content": "What is 7 plus 5?"},
        {"role": "assistant", "content": null, "reasoning": null, "reasoning_content": null,
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: bad arguments"},
    ]);
    server.ask(PATH, &json!({"messages": messages, "max_tokens": 4}));
    // More than there is room for is no error.
    server.ask(
        PATH,
        &json!({"messages": user("Hi"), "max_tokens": 2_147_483_647, "stop": "."}),
    );
}

#[test]
fn allowed_tools_may_have_to_be_called() {
    let server = Running::demo();
    let tool = json!({"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    }}});
    let only = json!([{"type": "function", "function": {"name": "add"}}]);
    let choice =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": only}});
    let body = json!({"messages": user("Hello."), "tools": [tool], "tool_choice": choice});
    let answer = server.ask(PATH, &body);
    assert_eq!(
        answer["choices"][0]["finish_reason"], "tool_calls",
        "{answer}"
    );
}
