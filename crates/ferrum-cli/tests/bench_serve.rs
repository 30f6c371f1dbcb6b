//! `ferrum bench serve` against our own server and against one of another maker.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod serving;

use serde_json::Value;
use serving::Serving;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Command;

fn bench(url: &str, flags: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
    command.args(["bench", "serve", "--url", url]).args(flags);
    for name in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn json(url: &str, flags: &[&str]) -> Value {
    let (ok, out, err) = bench(url, &[flags, &["--json"]].concat());
    assert!(ok && err.is_empty(), "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn our_server_is_measured_on_both_routes() {
    let server = Serving::start(&[]).unheard();
    for (flags, pace) in [
        (&["--concurrency", "3"][..], "concurrency"),
        (&["--rate", "50", "--endpoint", "completions"], "rate"),
    ] {
        let lengths = [
            "-n",
            "6",
            "--prompt-tokens",
            "30..50",
            "--output-tokens",
            "9",
        ];
        let report = json(&server.url(), &[flags, &lengths].concat());
        assert_eq!(report["model"], "ferrum-demo");
        assert_eq!(report["completed"], 6, "{report}");
        assert_eq!(report["errors"].as_array().unwrap().len(), 0, "{report}");
        assert_eq!(report["output_tokens"], 6 * 9, "{report}");
        assert!(report[pace].is_number());
        let prompts = report["prompt_tokens"].as_u64().unwrap();
        assert!((6 * 20..6 * 70).contains(&prompts), "{report}");
        for times in ["ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"] {
            let of = |name: &str| report[times][name].as_f64().unwrap();
            assert!(
                of("p50") > 0.0 && of("p50") <= of("p99") && of("p99") <= of("max"),
                "{report}"
            );
        }
        let first = report["ttft_ms"]["max"].as_f64().unwrap();
        assert!(
            first <= report["e2e_ms"]["max"].as_f64().unwrap(),
            "{report}"
        );
    }
    let (ok, out, err) = bench(&server.url(), &["-n", "2", "--output-tokens", "3"]);
    assert!(ok && err.is_empty(), "{err}");
    assert!(
        out.contains("answered         2 of 2 in ") && out.contains("time to first token"),
        "{out}"
    );
}

#[test]
fn refusals_are_counted_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "secret\n").unwrap();
    let keys = keys.to_str().unwrap();
    let server = Serving::start(&["--api-key-file", keys, "--max-tokens", "20"]).unheard();
    let (ok, out, err) = bench(&server.url(), &[]);
    assert!(!ok && out.is_empty() && err.contains("status 401"), "{err}");
    let flags = [
        "--api-key-file",
        keys,
        "-n",
        "4",
        "--output-tokens",
        "15..25",
        "--seed",
        "1",
    ];
    let report = json(&server.url(), &flags);
    let refused: u64 = report["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["count"].as_u64().unwrap())
        .sum();
    assert!(
        refused > 0 && report["completed"].as_u64().unwrap() + refused == 4,
        "{report}"
    );
    assert_eq!(report["errors"][0]["kind"], "status 400");
    let flags = ["--api-key-file", keys, "-n", "2", "--output-tokens", "21"];
    let (ok, out, err) = bench(&server.url(), &flags);
    assert!(
        !ok && out.contains("2 × status 400") && err.contains("no request was answered"),
        "{out}{err}"
    );
    let (ok, _, err) = bench("http://127.0.0.1:9", &[]);
    assert!(
        !ok && err.contains("http://127.0.0.1:9/v1/models: "),
        "{err}"
    );
}

/// A server that knows fewer fields, counts nothing and names no model.
fn foreign() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut out = stream.try_clone().unwrap();
            let mut stream = BufReader::new(stream);
            let (mut line, mut length) = (String::new(), 0);
            while stream.read_line(&mut line).unwrap() > 2 {
                if let Some(n) = line.to_lowercase().strip_prefix("content-length: ") {
                    length = n.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let body = String::from_utf8(body).unwrap();
            let (status, answer) = if body.contains("ignore_eos") || body.contains("stream_options")
            {
                (
                    "400 Bad Request",
                    r#"{"error": {"message": "what is this?"}}"#.to_owned(),
                )
            } else {
                let piece = r#"data: {"choices": [{"delta": {"content": "x"}}]}"#;
                (
                    "200 OK",
                    format!("{piece}\r\n\r\n: wait\n\n{piece}\n\ndata: [DONE]\n\n"),
                )
            };
            let head = format!(
                "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}",
                answer.len()
            );
            out.write_all(format!("{head}\r\n\r\n{answer}").as_bytes())
                .unwrap();
        }
    });
    url
}

#[test]
fn a_server_that_knows_less_is_measured_too() {
    let (ok, out, err) = bench(&foreign(), &["--model", "m", "-n", "3", "--json"]);
    assert!(ok, "{err}");
    assert!(
        err.contains("does not take ignore_eos") && err.contains("counts no tokens"),
        "{err}"
    );
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&report["completed"], &report["output_tokens"]),
        (&3.into(), &6.into())
    );
    let (ok, _, err) = bench(&foreign(), &["-n", "3"]);
    assert!(!ok && err.contains("hint: name it with --model"), "{err}");
}

#[test]
fn what_cannot_be_measured_is_said() {
    for (flags, words) in [
        (&["--rate", "0"][..], "expected requests per second"),
        (
            &["--rate", "1", "--concurrency", "2"],
            "cannot be used with",
        ),
        (&["--prompt-tokens", "9..3"], "expected N, A..B or MEAN,STD"),
        (&["--url", "localhost:8000"], "expected http:// or https://"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrum"))
            .args(["bench", "serve"])
            .args(flags)
            .output();
        let output = output.unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && err.contains(words),
            "{flags:?}: {err}"
        );
    }
}
