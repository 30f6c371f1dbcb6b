//! Keys, limits, health, figures, disconnects and the end.

use super::{CONTEXT, Running};
use ferrum_engine::EngineConfig;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::time::Duration;

/// A stream that goes on until the context is full.
fn endless() -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": CONTEXT, "ignore_eos": true, "stream": true})
}

const TEXT: &str = "/v1/completions";

#[test]
fn models_health_and_figures_are_there() {
    let server = Running::demo();
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "demo");
    assert_eq!(models["data"][0]["max_model_len"], CONTEXT);
    assert_eq!(models["data"][0]["status"], json!({"value": "loaded"}));
    let defaults = json!({"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0});
    assert_eq!(models["data"][0]["ferrum"]["defaults"], defaults);
    assert_eq!(server.get("/v1/models/demo").json(), models["data"][0]);
    assert_eq!(server.get("/health").json()["status"], "ok");
    assert_eq!(server.get("/ready").json()["status"], "ready");

    server.ask(
        TEXT,
        &json!({"prompt": "Once upon a time", "max_tokens": 5}),
    );
    // Its last figures are written after its last event.
    server.until(|stats| stats.running == 0 && stats.generated_tokens == 5);
    let page = server.get("/metrics").text();
    for line in [
        "vllm:num_requests_running{model_name=\"demo\"} 0",
        "vllm:num_requests_waiting{model_name=\"demo\"} 0",
        "vllm:generation_tokens_total{model_name=\"demo\"} 5",
        "vllm:time_to_first_token_seconds_count{model_name=\"demo\"} 1",
        "vllm:inter_token_latency_seconds_count{model_name=\"demo\"} 4",
        "vllm:request_queue_time_seconds_count{model_name=\"demo\"} 1",
        "vllm:request_prefill_time_seconds_count{model_name=\"demo\"} 1",
        "vllm:request_decode_time_seconds_count{model_name=\"demo\"} 1",
        "ferrum:model_loaded{model_name=\"demo\"} 1",
        "vllm:request_success_total{model_name=\"demo\",finished_reason=\"length\"} 1",
        "http_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"200\"} 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}\n{page}");
    }
    assert!(page.contains("# TYPE vllm:kv_cache_usage_perc gauge"));
    assert!(page.contains("vllm:prompt_tokens_total{"));
}

#[test]
fn every_answer_carries_the_id_of_its_request() {
    let config = ServerConfig {
        cors_origins: vec!["https://chat.example".parse().unwrap()],
        max_body_bytes: 100,
        ..ServerConfig::default()
    };
    let server = Running::configured(config);
    let json = ("Content-Type", "application/json");
    let origin = ("Origin", "https://chat.example");
    let asks = ("Access-Control-Request-Method", "POST");
    let long = vec![b' '; 101];
    // Method, path, headers, body, status.
    type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a [u8], u16);
    let cases: [Case<'_>; 8] = [
        ("GET", "/v1/models", &[], b"", 200),
        ("GET", "/", &[], b"", 200),
        ("POST", TEXT, &[json], b"{\"prompt\": 5}", 400),
        ("POST", "/v1/messages", &[json], b"{}", 400),
        ("POST", TEXT, &[json], &long, 413),
        ("GET", TEXT, &[], b"", 405),
        ("GET", "/nowhere", &[], b"", 404),
        ("OPTIONS", TEXT, &[origin, asks], b"", 200),
    ];
    for (method, path, headers, body, status) in cases {
        let named = [headers, &[("x-request-id", "mine")]].concat();
        let reply = server.send(method, path, &named, body);
        let found = (reply.status, reply.header("x-request-id"));
        assert_eq!(found, (status, Some("mine")), "{method} {path}");
        let reply = server.send(method, path, headers, body);
        let fresh = reply.header("x-request-id").unwrap();
        assert!(fresh.starts_with("req_"), "{method} {path}: {fresh}");
    }
    let reply = server.send("GET", "/v1/models", &[origin], b"");
    let exposed = reply.header("access-control-expose-headers").unwrap();
    assert!(exposed.contains("x-request-id"), "{exposed}");
}

#[test]
fn keys_open_every_route_but_health() {
    let config = ServerConfig {
        api_keys: vec!["one".into(), "two".into()],
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 2);
    for path in [
        "/ready",
        "/metrics",
        "/v1/models",
        "/nothing",
        TEXT,
        "/tokenize",
    ] {
        for headers in [&[][..], &[("Authorization", "Bearer three")][..]] {
            let reply = server.send("GET", path, headers, b"");
            assert_eq!(reply.status, 401, "{path}");
            assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
        }
    }
    assert_eq!(server.get("/health").status, 200);
    for header in [("Authorization", "Bearer two"), ("x-api-key", "one")] {
        assert_eq!(server.send("GET", "/v1/models", &[header], b"").status, 200);
    }
}

#[test]
fn whoever_goes_away_frees_its_blocks() {
    let server = Running::demo();
    let mut stream = server.post(TEXT, &endless());
    assert!(stream.chunk().unwrap().starts_with("data: {"));
    server.until(|stats| stats.kv_blocks_used > 0);
    drop(stream);
    server.until(|stats| stats.running == 0 && stats.kv_blocks_used == 0);
    let cut = server.engine.as_ref().unwrap().stats().generated_tokens;
    assert!((cut as usize) < CONTEXT - 10, "{cut}");
}

#[test]
fn a_full_queue_is_told_with_when_to_come_back() {
    let engine = EngineConfig {
        max_waiting: 1,
        ..EngineConfig::default()
    };
    let server = Running::start(ServerConfig::default(), engine, 1);
    let running = server.post(TEXT, &endless());
    server.until(|stats| stats.running == 1);
    let waiting = server.post(TEXT, &endless());
    server.until(|stats| stats.waiting == 1);
    let refused = server.post(TEXT, &endless());
    assert_eq!(refused.status, 429);
    assert!(refused.head.to_lowercase().contains("retry-after: 1"));
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    drop((running, waiting));
    server.until(|stats| stats.running == 0 && stats.waiting == 0);
}

#[test]
fn an_answer_that_takes_too_long_is_an_error() {
    let config = ServerConfig {
        request_timeout: Duration::from_nanos(1),
        ..ServerConfig::default()
    };
    let server = Running::start(config, EngineConfig::default(), 1);
    let reply = server.post(TEXT, &json!({"prompt": "Once upon a time"}));
    assert_eq!(reply.status, 504);
    assert_eq!(reply.json()["error"]["code"], "timeout");
    let chunks = server.stream(TEXT, &endless());
    assert_eq!(chunks.last().unwrap()["error"]["code"], "timeout");
}

#[test]
fn answers_that_have_begun_end_before_the_server_does() {
    let config = ServerConfig {
        // However slow this machine is today.
        grace: Duration::from_secs(600),
        ..ServerConfig::default()
    };
    let mut server = Running::start(config, EngineConfig::default(), 4);
    // Enough to do that there is time to look while it ends.
    let mut body = endless();
    body["n"] = 16.into();
    let mut stream = server.post(TEXT, &body);
    assert!(stream.chunk().is_some());
    server.stop();
    while server.get("/ready").status == 200 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.post(TEXT, &json!({"prompt": "a"})).status, 503);
    let text = stream.text();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(text.matches("\"finish_reason\":\"length\"").count(), 16);
    server.wait();
    assert!(std::net::TcpStream::connect(server.address).is_err());
}

#[test]
fn a_priority_above_0_is_a_right_where_there_are_keys() {
    let config = ServerConfig {
        api_keys: vec!["plain".into(), "fast priority".parse().unwrap()],
        ..ServerConfig::default()
    };
    let server = Running::configured(config);
    let json = ("Content-Type", "application/json");
    let cases = [
        ("plain", json!(1), 403),
        ("plain", json!(0), 200),
        ("plain", json!(-1), 200),
        ("plain", Value::Null, 200),
        ("fast", json!(1), 200),
    ];
    for (key, priority, status) in cases {
        let body = json!({"prompt": "a", "max_tokens": 1, "priority": priority}).to_string();
        let headers = [json, ("x-api-key", key)];
        let reply = server.send("POST", TEXT, &headers, body.as_bytes());
        assert_eq!(reply.status, status, "{key} {priority}");
    }
    let open = Running::demo();
    open.ask(
        TEXT,
        &json!({"prompt": "a", "max_tokens": 1, "priority": 1}),
    );
}

/// The value of a figure, over all its labels.
fn figure(page: &str, name: &str) -> f64 {
    let lines = page.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
    });
    let values = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    values.sum()
}

#[test]
fn who_had_to_make_room_is_told() {
    // There is room for one.
    let server = Running::start(ServerConfig::default(), EngineConfig::default(), 1);
    let long = json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true});
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.ask(TEXT, &long));
        server.until(|stats| stats.generated_tokens > 2);
        let urgent = json!({"prompt": "Hello", "max_tokens": 2, "priority": 100});
        server.ask(TEXT, &urgent);
        let answer = answer.join().unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 400);
    });
    let page = server.get("/metrics").text();
    assert_eq!(figure(&page, "vllm:num_preemptions_total"), 1.0, "{page}");
    assert_eq!(figure(&page, "vllm:request_num_preemptions_count"), 2.0);
    assert_eq!(figure(&page, "vllm:request_num_preemptions_sum"), 1.0);
}

#[test]
fn requests_and_steps_are_told_by_size() {
    let server = Running::demo();
    let body = json!({"prompt": "Once upon a time", "max_tokens": 5, "n": 2, "ignore_eos": true,
                      "temperature": 0});
    let answer = server.ask(TEXT, &body);
    let prompt = answer["usage"]["prompt_tokens"].as_f64().unwrap();
    server.until(|stats| stats.running == 0 && stats.generated_tokens == 10);
    let page = server.get("/metrics").text();
    for (name, expected) in [
        ("vllm:request_prompt_tokens_count", 1.0),
        ("vllm:request_prompt_tokens_sum", prompt),
        ("vllm:request_generation_tokens_count", 2.0),
        ("vllm:request_generation_tokens_sum", 10.0),
        ("vllm:request_max_num_generation_tokens_sum", 5.0),
        ("vllm:request_params_max_tokens_sum", 5.0),
        ("vllm:request_params_n_sum", 2.0),
        ("vllm:request_inference_time_seconds_count", 1.0),
        ("vllm:request_num_preemptions_count", 1.0),
        ("vllm:request_num_preemptions_sum", 0.0),
        ("vllm:num_requests_waiting_by_reason", 0.0),
        ("vllm:spec_decode_num_drafts_total", 0.0),
    ] {
        assert!(page.contains(&format!("{name}{{")), "{name}\n{page}");
        assert_eq!(figure(&page, name), expected, "{name}\n{page}");
    }
    let stats = server.engine.as_ref().unwrap().stats();
    assert_eq!(
        figure(&page, "vllm:iteration_tokens_total_count"),
        stats.steps as f64
    );
    assert_eq!(
        figure(&page, "vllm:iteration_tokens_total_sum"),
        stats.computed_tokens as f64
    );
    let blocks = 4 * CONTEXT / 16;
    let cache = format!(
        "vllm:cache_config_info{{model_name=\"demo\",block_size=\"16\",num_gpu_blocks=\"{blocks}\",\
         enable_prefix_caching=\"True\"}} 1"
    );
    assert!(page.lines().any(|line| line == cache), "{cache}\n{page}");
}

#[test]
fn drafts_are_told_by_position() {
    let config = ServerConfig {
        lookup_tokens: 4,
        ..ServerConfig::default()
    };
    let server = Running::configured(config);
    let prompt: Vec<u32> = (0..60).map(|i| 300 + i % 5).collect();
    let body = json!({"prompt": prompt, "max_tokens": 64, "ignore_eos": true, "temperature": 0});
    server.ask(TEXT, &body);
    server.until(|stats| stats.running == 0);
    let page = server.get("/metrics").text();
    let total = |name: &str| figure(&page, &format!("vllm:spec_decode_num_{name}_total"));
    assert!(
        total("drafts") > 0.0 && total("drafts") <= total("draft_tokens"),
        "{page}"
    );
    assert_eq!(
        total("accepted_tokens_per_pos"),
        total("accepted_tokens"),
        "{page}"
    );
    assert!(page.contains(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"demo\",position=\"0\"}"
    ));
}
