//! Traces, with a collector that the test plays.

use super::{CONTEXT, PATIENCE, Running};
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

const TEXT: &str = "/v1/completions";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// Takes bodies of requests, and answers each with 200.
pub(super) fn collector() -> (String, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (tell, told) = channel();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let Some((body, mut stream)) = take(stream) else {
                return;
            };
            // Told before it is answered: nothing is under way when the server has ended.
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
            if tell.send(body).is_err() || stream.write_all(answer).is_err() {
                return;
            }
        }
    });
    (url, told)
}

fn take(stream: TcpStream) -> Option<(Value, TcpStream)> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut line, mut length) = (String::new(), String::new(), 0);
    reader.read_line(&mut first).ok()?;
    assert_eq!(first, "POST /v1/traces HTTP/1.1\r\n");
    while reader.read_line(&mut line).ok()? > 2 {
        if let Some(value) = line.to_lowercase().strip_prefix("content-length: ") {
            length = value.trim().parse().ok()?;
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let body = serde_json::from_slice(&body).ok()?;
    Some((body, reader.into_inner()))
}

fn traced(url: &str) -> Running {
    Running::configured(ServerConfig {
        otlp: Some(url.parse().unwrap()),
        ..ServerConfig::default()
    })
}

/// All spans that a server sent until its end.
pub(super) fn spans(mut server: Running, told: &Receiver<Value>) -> Vec<Value> {
    server.stop();
    server.wait();
    let batches = told.try_iter();
    let scopes =
        batches.map(|mut batch| batch["resourceSpans"][0]["scopeSpans"][0]["spans"].take());
    scopes
        .flat_map(|spans| spans.as_array().unwrap().clone())
        .collect()
}

pub(super) fn attribute<'a>(span: &'a Value, name: &str) -> &'a Value {
    let found = span["attributes"].as_array().unwrap().iter();
    let mut found = found.filter(|attribute| attribute["key"] == name);
    found
        .next()
        .map_or(&Value::Null, |attribute| &attribute["value"])
}

fn time(span: &Value, which: &str) -> u64 {
    span[which].as_str().unwrap().parse().unwrap()
}

fn post(server: &Running, body: &Value, traceparent: &str) -> super::Reply {
    let headers = [
        ("Content-Type", "application/json"),
        ("traceparent", traceparent),
        ("X-Request-Id", "from-client"),
    ];
    server.send("POST", TEXT, &headers, body.to_string().as_bytes())
}

#[test]
fn a_request_is_a_span_with_its_phases() {
    let (url, told) = collector();
    let server = traced(&url);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 5, "n": 2, "ignore_eos": true, "stream": true});
    let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
    assert!(post(&server, &body, &parent).text().ends_with("[DONE]\n\n"));
    // What the client does not want, what is refused, and who only looks.
    let unwanted = format!("00-{TRACE}-b7ad6b7169203331-00");
    assert_eq!(post(&server, &body, &unwanted).status, 200);
    assert_eq!(post(&server, &json!({"prompt": 5}), "nonsense").status, 400);
    assert_eq!(server.get("/health").status, 200);
    server.until(|stats| stats.running == 0);
    let spans = spans(server, &told);

    let whole: Vec<_> = spans.iter().filter(|span| span["kind"] == 2).collect();
    assert_eq!(whole.len(), 2, "{spans:#?}");
    let request = whole.iter().find(|span| span["traceId"] == TRACE).unwrap();
    assert_eq!(request["parentSpanId"], "b7ad6b7169203331");
    assert_eq!(request["name"], "POST /v1/completions");
    for (name, value) in [
        ("http.route", json!({"stringValue": TEXT})),
        ("http.response.status_code", json!({"intValue": "200"})),
        ("gen_ai.request.model", json!({"stringValue": "demo"})),
        ("ferrum.request_id", json!({"stringValue": "from-client"})),
        ("gen_ai.usage.output_tokens", json!({"intValue": "10"})),
        ("ferrum.cancelled", Value::Null),
    ] {
        assert_eq!(*attribute(request, name), value, "{name}");
    }
    let phases =
        |name: &str| -> Vec<_> { spans.iter().filter(|span| span["name"] == name).collect() };
    assert_eq!((phases("queue").len(), phases("prefill").len()), (1, 1));
    assert_eq!(phases("decode").len(), 2);
    for phase in spans.iter().filter(|span| span["kind"] == 1) {
        assert_eq!(phase["traceId"], TRACE);
        assert_eq!(phase["parentSpanId"], request["spanId"]);
        assert!(time(phase, "startTimeUnixNano") >= time(request, "startTimeUnixNano"));
        assert!(time(phase, "startTimeUnixNano") <= time(phase, "endTimeUnixNano"));
        assert!(time(phase, "endTimeUnixNano") <= time(request, "endTimeUnixNano"));
    }
    let (queue, prefill) = (phases("queue")[0], phases("prefill")[0]);
    assert_eq!(queue["endTimeUnixNano"], prefill["startTimeUnixNano"]);
    let reason = attribute(phases("decode")[0], "gen_ai.response.finish_reason");
    assert_eq!(*reason, json!({"stringValue": "length"}));

    let refused = whole.iter().find(|span| span["traceId"] != TRACE).unwrap();
    assert_eq!(refused["parentSpanId"], "");
    assert_eq!(
        *attribute(refused, "http.response.status_code"),
        json!({"intValue": "400"})
    );
}

#[test]
fn who_goes_away_is_told_of() {
    let (url, told) = collector();
    let server = traced(&url);
    let body = json!({"prompt": "Once upon a time", "max_tokens": CONTEXT, "ignore_eos": true, "stream": true});
    let mut stream = server.post(TEXT, &body);
    assert!(stream.chunk().is_some());
    drop(stream);
    server.until(|stats| stats.finished_requests == 1);
    let spans = spans(server, &told);
    let request = spans.iter().find(|span| span["kind"] == 2).unwrap();
    assert_eq!(
        *attribute(request, "ferrum.cancelled"),
        json!({"boolValue": true})
    );
    let decode = spans.iter().find(|span| span["name"] == "decode").unwrap();
    let reason = attribute(decode, "gen_ai.response.finish_reason");
    assert_eq!(*reason, json!({"stringValue": "unfinished"}));
    // What was computed in vain is counted.
    assert_ne!(
        *attribute(request, "gen_ai.usage.output_tokens"),
        Value::Null
    );
}

#[test]
fn a_collector_that_is_gone_harms_nothing() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let server = traced(&url);
    let started = std::time::Instant::now();
    loop {
        server.ask(TEXT, &json!({"prompt": "Once", "max_tokens": 1}));
        let page = server.get("/metrics").text();
        let mut lines = page.lines();
        let lost = lines.find(|line| line.starts_with("ferrum:spans_dropped_total"));
        if lost.is_some_and(|line| !line.ends_with(" 0")) {
            break;
        }
        assert!(started.elapsed() < PATIENCE, "{page}");
    }
}

#[test]
fn a_collector_that_says_nothing_holds_nobody_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut server = traced(&format!("http://{}", silent.local_addr().unwrap()));
    for _ in 0..20 {
        server.ask(TEXT, &json!({"prompt": "Once", "max_tokens": 1}));
    }
    // It ends, though its last spans are not taken.
    server.stop();
    server.wait();
}
