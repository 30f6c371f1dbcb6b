//! The log of `ferrum serve`: a line for each request, and no prompts or answers by default.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod serving;

use serde_json::Value;
use serving::Serving;
use std::io::Read;

const KEY: &str = "key-that-is-right";

/// A request to a route with the key, in the form that `send` takes.
fn post(route: &str, id: &str) -> String {
    format!(
        "POST {route} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nX-Request-Id: {id}\r\nContent-Type: application/json"
    )
}

fn events(log: &str) -> Vec<Value> {
    let read = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    log.lines().map(read).collect()
}

/// The one event of a request.
fn access<'a>(events: &'a [Value], id: &str) -> &'a Value {
    let of_request = |event: &&Value| event["target"] == "access" && event["request_id"] == id;
    let found: Vec<_> = events.iter().filter(of_request).collect();
    assert_eq!(found.len(), 1, "{id}: {events:#?}");
    found[0]
}

/// The ids that answers carry.
fn header(answer: &str) -> Option<&str> {
    let mut lines = answer.lines().take_while(|line| !line.is_empty());
    lines.find_map(|line| line.strip_prefix("x-request-id: "))
}

#[test]
fn each_request_is_one_line_of_json() {
    let server = Serving::start(&["--log-format", "json", "--api-key", KEY]);
    let chat =
        r#"{"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "temperature": 0"#;
    let plain = server.ask(
        &post("/v1/chat/completions", "plain-1"),
        &format!("{chat}}}"),
    );
    assert!(plain.starts_with("HTTP/1.1 200 "), "{plain}");
    assert_eq!(header(&plain), Some("plain-1"));
    let streamed = server.ask(
        &post("/v1/chat/completions", "stream:1"),
        &format!("{chat}, \"stream\": true}}"),
    );
    assert_eq!(header(&streamed), Some("stream:1"));
    assert!(streamed.contains("[DONE]"), "{streamed}");
    let hostile = r#"{"model": "a\nb\u001b[31m\u202e\"", "prompt": "zebra"}"#;
    let refused = server.ask(&post("/v1/completions", "refused.1"), hostile);
    assert!(refused.starts_with("HTTP/1.1 404 "), "{refused}");
    assert_eq!(header(&refused), Some("refused.1"));
    let unknown = server.ask(
        "GET /v1/models HTTP/1.1\r\nAuthorization: Bearer key-that-is-wrong\r\nX-Request-Id: locked",
        "",
    );
    assert!(unknown.starts_with("HTTP/1.1 401 "), "{unknown}");
    let nowhere = server.ask("GET /zebra?zebra HTTP/1.1\r\nX-Request-Id: not sane", "");
    let fresh = header(&nowhere).unwrap();
    assert!(fresh.starts_with("req_"), "{nowhere}");
    // A client that disconnects early.
    let endless =
        r#"{"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": true, "stream": true}"#;
    let mut stream = server.send(&post("/v1/completions", "cancelled-1"), endless);
    let mut begin = [0; 400];
    stream.read_exact(&mut begin).unwrap();
    drop(stream);
    let looks = server.ask("GET /health HTTP/1.1\r\nX-Request-Id: probe", "");
    assert!(looks.starts_with("HTTP/1.1 200 "), "{looks}");
    let start = events(&server.said);
    assert_eq!(start[0]["message"], "serving");
    assert_eq!(start[0]["keys"], 1);
    let log = server.end();

    for text in ["key-that", "plus", "zebra", "Once upon", "not sane"] {
        assert!(!log.contains(text), "{text}\n{log}");
    }
    let events = events(&log);
    let is_model = |event: &&Value| event["message"] == "model to serve";
    let model = events.iter().find(is_model).unwrap();
    assert_eq!(model["model"], "ferrum-demo");
    assert_eq!(model["context"], 1024);
    assert!(model["kv_tokens"].as_u64().unwrap() >= 1024, "{model}");
    for id in ["plain-1", "stream:1"] {
        let event = access(&events, id);
        let expected = [
            ("level", "INFO".into()),
            ("message", "request".into()),
            ("method", "POST".into()),
            ("route", "/v1/chat/completions".into()),
            ("status", 200.into()),
            ("model", "ferrum-demo".into()),
            ("finish_reason", "stop".into()),
            ("cancelled", false.into()),
            ("error", Value::Null),
        ];
        for (name, value) in expected {
            assert_eq!(event[name], value, "{name}: {event}");
        }
        let number = |name: &str| {
            event[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{name}: {event}"))
        };
        assert!(number("prompt_tokens") > 5.0 && number("completion_tokens") > 2.0);
        assert!(number("queue_ms") <= number("first_token_ms"));
        assert!(number("first_token_ms") <= number("total_ms"));
        assert!(event["timestamp"].as_str().unwrap().ends_with('Z'));
    }
    let refused = access(&events, "refused.1");
    assert_eq!(refused["status"], 404);
    assert_eq!(refused["error"], "model_not_found");
    assert_eq!(refused["model"], "a\\nb\\u{1b}[31m\\u{202e}\"");
    assert!(refused.get("prompt_tokens").is_none(), "{refused}");
    assert_eq!(access(&events, "locked")["error"], "invalid_api_key");
    // Without a key, a client does not learn which routes there are.
    let nowhere = access(&events, fresh);
    assert_eq!(
        (&nowhere["route"], &nowhere["status"]),
        (&"none".into(), &401.into())
    );
    let cancelled = access(&events, "cancelled-1");
    assert_eq!(cancelled["cancelled"], true);
    assert_eq!(cancelled["finish_reason"], "unfinished");
    let tokens = cancelled["completion_tokens"].as_u64().unwrap();
    assert!((1..900).contains(&tokens), "{cancelled}");
    // Probes are not news.
    assert!(events.iter().all(|event| event["request_id"] != "probe"));
}

#[test]
fn prompts_are_logged_for_who_asks_for_it() {
    let server = Serving::start(&[
        "--log-format",
        "json",
        "--log-prompts",
        "--log-level",
        "info",
    ]);
    let body =
        r#"{"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "temperature": 0}"#;
    let answer = server.ask(&post("/v1/chat/completions", "one"), body);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let events = events(&server.end());
    let texts = events.iter().filter(|event| event["target"] == "prompts");
    let texts: Vec<_> = texts.collect();
    assert_eq!(texts.len(), 2, "{events:#?}");
    assert!(texts.iter().all(|event| event["request_id"] == "one"));
    assert!(
        texts[0]["prompt"]
            .as_str()
            .unwrap()
            .contains("What is 7 plus 5?")
    );
    assert!(texts[1]["answer"].as_str().unwrap().contains("12"));
}

#[test]
fn what_clients_send_stays_on_its_line_of_text() {
    let server = Serving::start(&[]);
    let hostile =
        r#"{"model": "a\n2026-01-01T00:00:00Z ERROR fake\u001b[31m\u009b", "prompt": "x"}"#;
    let refused = server.ask(&post("/v1/completions", "hostile"), hostile);
    assert!(refused.starts_with("HTTP/1.1 404 "), "{refused}");
    let log = server.end();
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(!log.trim_end().chars().any(char::is_control), "{log:?}");
    assert!(lines[0].contains("request_id=\"hostile\""), "{log}");
    assert!(lines[0].contains("status=404"), "{log}");
}

#[test]
fn the_level_says_what_is_worth_a_line() {
    let server = Serving::start(&["--log-level", "error"]);
    server.ask(&post("/v1/nothing", "one"), "{}");
    assert_eq!(server.end(), "");
    let server = Serving::start(&["--log-level", "debug"]);
    server.ask("GET /health HTTP/1.1\r\nX-Request-Id: probe", "");
    let log = server.end();
    let probes = log
        .lines()
        .filter(|line| line.contains("request_id=\"probe\""));
    assert_eq!(probes.count(), 1, "{log}");
}
