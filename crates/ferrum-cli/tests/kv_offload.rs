//! `ferrum serve --kv-offload-dir`: what one process computed, the next one has.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod serving;

use serde_json::Value;
use serving::{Serving, serve};
use std::path::Path;

fn answer(server: &Serving) -> (String, u64) {
    let story = "Once upon a time there was a little fox who lived in the forest. ".repeat(8);
    let body = serde_json::json!({"prompt": story, "max_tokens": 12, "temperature": 0});
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    let answer = server.ask(head, &body.to_string());
    let json = answer.split("\r\n\r\n").nth(1).unwrap();
    let json: Value = serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {answer}"));
    let cached = &json["usage"]["prompt_tokens_details"]["cached_tokens"];
    let text = json["choices"][0]["text"].as_str().unwrap();
    (text.to_owned(), cached.as_u64().unwrap_or(0))
}

fn start(dir: &Path) -> Serving {
    let dir = dir.to_str().unwrap();
    Serving::start(&["--kv-offload-dir", dir, "--kv-offload-ram", "64MiB"])
}

#[test]
fn a_restart_finds_what_was_computed() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("kv");
    let server = start(&dir);
    let (text, cached) = answer(&server);
    assert_eq!(cached, 0);
    server.end();
    let server = start(&dir);
    assert!(server.metric("ferrum:kv_offload_disk_bytes{") > 0.0);
    let (again, cached) = answer(&server);
    assert_eq!(again, text);
    assert!(cached >= 64, "{cached}");
    let hits = server.metric("ferrum:kv_offload_disk_hit_tokens_total{");
    assert_eq!(hits, cached as f64);
    // One process at a time.
    let args = ["--port", "0", "--kv-offload-dir", dir.to_str().unwrap()];
    let second = serve(&args).output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains("is used by another process"), "{said}");
    server.end();
}

#[test]
fn sizes_that_are_none_are_refused() {
    for args in [
        &["--kv-offload-ram", "4GB"][..],
        &["--kv-offload-dir-limit", "1GiB"],
    ] {
        let output = serve(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}
