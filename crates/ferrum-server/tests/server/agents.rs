//! Whole tasks of coding agents, in the shapes that Claude Code 2.1 and Codex CLI 0.169 send, against a model that says
//! what a script has it say. `tools/clients/claude_code.py` and `codex.py` run the programs themselves.

use super::scripted::{self, Script};
use super::{Reply, Running, handle_of};
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const CONTEXT: usize = 32_768;

/// What the prompts of the task have in them.
const TASK: &str = "Count the colours in colours.txt";

/// Takes one system message, and turns that alternate, as the templates of Mistral's models.
const STRICT: &str = "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ messages[0].content }}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";

const MESSAGES: &str = "/v1/messages?beta=true";
const RESPONSES: &str = "/v1/responses";

/// A server whose model answers the task with these turns.
fn server(turns: &[&str]) -> Running {
    let script = Script {
        task: TASK.to_owned(),
        turns: turns.iter().map(|turn| (*turn).to_owned()).collect(),
        otherwise: r#"{"title": "Count colours"}"#.to_owned(),
    };
    let loaded = scripted::load(script, CONTEXT).unwrap();
    let handle = handle_of(&loaded);
    let once = Mutex::new(Some(loaded));
    let loader = move |_: &str| once.lock().unwrap().take().ok_or_else(String::new);
    let mut running = Running::models(&["scripted"], Arc::new(loader), 1, ServerConfig::default());
    running.engine = Some(handle);
    running
}

/// A call as the model writes it.
fn call(name: &str, arguments: &Value) -> String {
    let object = json!({"name": name, "arguments": arguments});
    format!("<tool_call>\n{object}\n</tool_call>")
}

/// The names of fields that were not followed.
fn ignored(reply: &Reply) -> Vec<String> {
    let names = reply.header("x-ferrum-ignored").unwrap_or_default();
    names
        .split(", ")
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Instructions of about 10 thousand tokens: more than a step takes.
fn instructions() -> String {
    "You are an agent that works on files with the tools that it has.\n".repeat(700)
}

/// What Claude Code sends, with these turns after its first message.
fn claude_code(turns: &[Value]) -> Value {
    let tool = |name: &str, field: &str| {
        json!({"name": name, "description": "A tool.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {field: {"type": "string"}, "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9_007_199_254_740_991_u64}},
            "required": [field],
            "additionalProperties": false,
        }})
    };
    let mut messages = vec![
        json!({"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-23.\n</system-reminder>\n"},
            {"type": "text", "text": TASK, "cache_control": {"type": "ephemeral"}},
        ]}),
        // Its instructions go on after the user's first message.
        json!({"role": "system", "content": "Available agent types: none."}),
    ];
    messages.extend_from_slice(turns);
    json!({
        "model": "scripted",
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.7d5; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": instructions(), "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [tool("Read", "file_path"), tool("Bash", "command")],
        "metadata": {"user_id": "{\"device_id\":\"a\",\"account_uuid\":\"\",\"session_id\":\"b\"}"},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": true,
    })
}

/// The blocks of a streamed message, as a client keeps and sends them back, and why it ended.
fn message(events: &[Value]) -> (Vec<Value>, Value) {
    let mut blocks: Vec<Value> = Vec::new();
    let mut arguments = String::new();
    let mut reason = Value::Null;
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => blocks.push(event["content_block"].clone()),
            "content_block_delta" => {
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                for field in ["text", "thinking"] {
                    if let Some(more) = delta[field].as_str() {
                        block[field] = (block[field].as_str().unwrap().to_owned() + more).into();
                    }
                }
                arguments += delta["partial_json"].as_str().unwrap_or_default();
            }
            "content_block_stop" if !arguments.is_empty() => {
                let input = std::mem::take(&mut arguments);
                blocks.last_mut().unwrap()["input"] = serde_json::from_str(&input).unwrap();
            }
            "message_delta" => reason = event["delta"]["stop_reason"].clone(),
            _ => {}
        }
    }
    (blocks, reason)
}

#[test]
fn claude_code_does_a_task() {
    let (read, count) = (
        json!({"file_path": "colours.txt"}),
        json!({"command": "wc -l"}),
    );
    let running = server(&[
        &format!(
            "<think>The file first.</think>I look.{}",
            call("Read", &read)
        ),
        &format!(
            "I read: {{last_result}}{}\n{}",
            call("Bash", &count),
            call("Read", &read)
        ),
        "There are {last_result} colours.",
    ]);

    let (first, reason) = message(&running.events(MESSAGES, &claude_code(&[])));
    assert_eq!(reason, "tool_use");
    let kinds: Vec<_> = first
        .iter()
        .map(|block| block["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!(first[2]["input"], read);

    let result = |block: &Value, text: &str| json!({"type": "tool_result", "tool_use_id": block["id"], "content": text});
    let mut turns = vec![
        json!({"role": "assistant", "content": first}),
        json!({"role": "user", "content": [result(&first[2], "1\tblue\n2\tgreen")]}),
    ];
    let (second, _) = message(&running.events(MESSAGES, &claude_code(&turns)));
    assert_eq!(second[0]["text"], "I read: 1\tblue\n2\tgreen");
    assert_eq!((&second[1]["input"], &second[2]["input"]), (&count, &read));

    // Results of both calls in one message.
    let mut last = result(&second[2], "2");
    last["is_error"] = false.into();
    last["cache_control"] = json!({"type": "ephemeral"});
    turns.push(json!({"role": "assistant", "content": second}));
    turns.push(json!({"role": "user", "content": [result(&second[1], "two"), last]}));
    let (third, reason) = message(&running.events(MESSAGES, &claude_code(&turns)));
    assert_eq!(third[0]["text"], "There are 2 colours.");
    assert_eq!(reason, "end_turn");

    // The same tokens are counted as are computed; all but the last block comes from the cache.
    let body = claude_code(&turns);
    let mut count = json!({});
    for field in ["model", "messages", "system", "tools"] {
        count[field] = body[field].clone();
    }
    let counted =
        running.ask("/v1/messages/count_tokens?beta=true", &count)["input_tokens"].as_u64();
    let events = running.events(MESSAGES, &body);
    let usage = &events[events.len() - 2]["usage"];
    let (new, cached) = (
        usage["input_tokens"].as_u64().unwrap(),
        usage["cache_read_input_tokens"].as_u64().unwrap(),
    );
    assert_eq!(counted, Some(new + cached));
    assert!(cached > 8192, "{usage}");
}

#[test]
fn side_requests_do_not_shift_the_script() {
    let running = server(&["The task's first turn."]);
    // Titles are asked for with the text of the task, without tools, and with a schema.
    let title = json!({
        "model": "scripted",
        "messages": [{"role": "user", "content": [{"type": "text", "text": format!("<session>\n{TASK}\n</session>")}]}],
        "system": [{"type": "text", "text": "Return JSON with a single \"title\" field."}],
        "tools": [],
        "max_tokens": 32_000,
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "required": ["title"],
            "additionalProperties": false,
        }}},
        "stream": true,
    });
    let (blocks, _) = message(&running.events(MESSAGES, &title));
    assert_eq!(blocks[0]["text"], r#"{"title": "Count colours"}"#);
    let quota = json!({"model": "scripted", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]});
    assert_eq!(running.ask(MESSAGES, &quota)["stop_reason"], "max_tokens");
    let (blocks, _) = message(&running.events(MESSAGES, &claude_code(&[])));
    assert_eq!(blocks[0]["text"], "The task's first turn.");
}

/// What Codex sends, with these items after its first ones.
fn codex(items: &[Value]) -> Value {
    let text = |role: &str, text: &str| json!({"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]});
    let tool = |name: &str, field: &str| {
        let parameters = json!({"type": "object", "properties": {field: {"type": "string"}}, "required": [field], "additionalProperties": false});
        json!({"type": "function", "name": name, "description": "A tool.", "strict": false, "parameters": parameters})
    };
    let mut input = vec![
        text("developer", &instructions()),
        text(
            "user",
            "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>",
        ),
        text("user", TASK),
    ];
    input.extend_from_slice(items);
    json!({
        "model": "scripted",
        "stream": true,
        "input": input,
        "tools": [
            tool("exec_command", "cmd"),
            tool("view_image", "path"),
            {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [tool("close_agent", "id")]},
            {"type": "web_search", "external_web_access": true},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": true,
        "reasoning": {"summary": "auto"},
        "store": false,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a205d3",
        "client_metadata": {"x-codex-turn-metadata": "{}", "session_id": "01a205d3"},
    })
}

/// The items of a streamed response. Codex reads them from the events of their ends, and the end of the response.
fn items(events: &[Value]) -> Vec<Value> {
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    let done = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done");
    done.map(|event| event["item"].clone()).collect()
}

#[test]
fn codex_does_a_task() {
    let (read, count) = (
        json!({"cmd": "cat colours.txt"}),
        json!({"cmd": "wc -l colours.txt"}),
    );
    let running = server(&[
        &format!(
            "<think>The file first.</think>I look.{}",
            call("exec_command", &read)
        ),
        &format!("I read: {{last_result}}{}", call("exec_command", &count)),
        "There are {last_result} colours.",
    ]);

    let first = items(&running.events(RESPONSES, &codex(&[])));
    let kinds: Vec<_> = first
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    let arguments: Value = serde_json::from_str(first[2]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, read);

    let result = |item: &Value, text: &str| json!({"type": "function_call_output", "id": "fco_1", "call_id": item["call_id"], "output": text});
    let mut sent = first.clone();
    sent[0]["encrypted_content"] = Value::Null;
    sent.push(result(&first[2], "Output:\nblue\ngreen\n"));
    let second = items(&running.events(RESPONSES, &codex(&sent)));
    assert_eq!(
        second[0]["content"][0]["text"],
        "I read: Output:\nblue\ngreen"
    );

    sent.extend_from_slice(&second);
    sent.push(result(&second[1], "2\n"));
    let third = items(&running.events(RESPONSES, &codex(&sent)));
    assert_eq!(third[0]["content"][0]["text"], "There are 2 colours.");
}

/// An agent whose tool reads an image has it in the conversation from then on.
#[test]
fn what_tools_give_beside_text_is_noted() {
    let running = server(&["<tool_call>", "Seen: {last_result}"]);
    let result = |content: Value| {
        let call = json!({"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a"}});
        let mut blocks =
            vec![json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": content[0]})];
        blocks.extend(content.as_array().unwrap().iter().skip(1).cloned());
        [
            json!({"role": "assistant", "content": [call]}),
            json!({"role": "user", "content": blocks}),
        ]
    };
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}});
    let document = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}});
    let text = json!({"type": "text", "text": "a.png:"});
    let cases = [
        (
            json!([[text, image]]),
            "messages[3].content[0].content[1]",
            "Seen: a.png:\n[image left out: this model reads only text]",
        ),
        // A document is beside the result.
        (
            json!(["Read a.pdf.", document]),
            "messages[3].content[1]",
            "Seen: Read a.pdf.",
        ),
    ];
    for (content, field, said) in cases {
        let mut body = claude_code(&result(content));
        body["stream"] = false.into();
        let reply = running.post(MESSAGES, &body);
        assert!(
            ignored(&reply).contains(&field.to_owned()),
            "{field}: {}",
            reply.head
        );
        assert_eq!(reply.json()["content"][0]["text"], said);
    }

    let output = json!([{"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "high"}]);
    let mut body = codex(&[
        json!({"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{\"path\": \"a\"}"}),
        json!({"type": "function_call_output", "call_id": "1", "output": output}),
    ]);
    body["stream"] = false.into();
    let reply = running.post(RESPONSES, &body);
    assert_eq!(ignored(&reply), ["input[4].output[0]", "tools[3]"]);
    let said = "Seen: [image left out: this model reads only text]";
    assert_eq!(reply.json()["output"][0]["content"][0]["text"], said);
}

/// What does not fit is refused in the words, and with the code, by which the agents know it.
#[test]
fn a_full_context_is_refused_in_the_agents_words() {
    let running = server(&["Never said."]);
    let long = "blue green ".repeat(20_000);
    let reply = running.post(
        MESSAGES,
        &claude_code(&[json!({"role": "user", "content": long})]),
    );
    assert_eq!(reply.status, 400);
    let message = reply.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    let tokens = message.strip_prefix("prompt is too long: ");
    let tokens = tokens.and_then(|rest| rest.strip_suffix(" tokens > 32768 maximum"));
    assert!(
        tokens.is_some_and(|tokens| tokens.parse::<u64>().is_ok()),
        "{message}"
    );

    let reply = running.post(
        RESPONSES,
        &codex(&[json!({"role": "user", "content": long})]),
    );
    assert_eq!(reply.status, 400);
    let error = reply.json()["error"].clone();
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("This model's maximum context length is 32768 tokens."),
        "{message}"
    );
}

/// Mistral's templates take one system message and turns that alternate; both agents begin otherwise.
#[test]
fn strict_templates_take_what_agents_send() {
    let running = Running::with_template(STRICT);
    let system = json!({"role": "system", "content": "Be brief."});
    let body = json!({
        "model": "demo",
        "max_tokens": 4,
        "system": "You count.",
        "messages": [{"role": "user", "content": "What is 7 plus 5?"}, system],
    });
    assert_eq!(running.ask(MESSAGES, &body)["role"], "assistant");
    let said = |role: &str, text: &str| json!({"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]});
    let input = [
        said("developer", "You count."),
        said("developer", "Be brief."),
        said("user", "<cwd>/work</cwd>"),
        said("user", "What is 7 plus 5?"),
    ];
    let body = json!({"model": "demo", "max_output_tokens": 4, "input": input});
    assert_eq!(running.ask(RESPONSES, &body)["object"], "response");
}

/// What is gathered for a request has a bound, wherever the context has room for more.
#[test]
fn log_probabilities_have_a_bound() {
    let running = server(&["Yes."]);
    let ask = |n: usize| {
        let body = json!({
            "model": "scripted",
            "messages": [{"role": "user", "content": TASK}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "n": n,
            "logprobs": true,
            "top_logprobs": 20,
            "max_tokens": 30_000,
        });
        running.post("/v1/chat/completions", &body)
    };
    let refused = ask(8);
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"]["message"].to_string();
    assert!(
        message.contains("log-probabilities, expected at most"),
        "{message}"
    );
    assert_eq!(ask(1).status, 200);
}
