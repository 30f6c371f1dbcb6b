//! `ferrum serve` as a process: it says where it is, answers, and ends when it is asked to.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod serving;

use serving::{Serving, serve};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Output;
use std::sync::Arc;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

#[test]
#[cfg(unix)]
fn the_demo_model_is_served_until_the_process_is_asked_to_end() {
    let demo = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../assets/demo/ferrum-demo.gguf"
    );
    let mut command = serve(&["--port", "0", "--api-key", "secret", "--backend", "cpu"]);
    // Guesses change nothing.
    command.args(["--draft-model", demo, "--lookup-tokens", "4"]);
    let server = Serving::of(&mut command);
    let (address, said) = (server.address.as_str(), server.said.as_str());
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    // All that is said at the start: the port and the size of the cache differ from run to run.
    let (cache, rest) = said
        .split_once("KV cache ")
        .and_then(|(_, rest)| rest.split_once(' '))
        .unwrap();
    assert!(rest.starts_with("tokens\n"), "{said}");
    let said = said.replace(address, "ADDRESS").replace(cache, "N");
    insta::assert_snapshot!("serve_start", said);

    let answer = server.ask("GET /v1/models HTTP/1.1", "");
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Type: application/json";
    let body = r#"{"model": "ferrum-demo", "temperature": 0, "messages": [{"role": "user", "content": "What is 7 plus 5?"}]}"#;
    let answer = server.ask(head, body);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("7 plus 5 is 12."), "{answer}");

    // A line of the log for each request, and no more.
    let log = server.end();
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(
        lines
            .iter()
            .all(|line| line.contains(" INFO access: request ")),
        "{log}"
    );
    assert!(!log.contains("secret") && !log.contains("plus"), "{log}");
}

#[cfg(unix)]
#[test]
fn layers_on_two_stages_are_served_and_told() {
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fixtures/models/qwen3/model.gguf"
    );
    let ask = |flags: &[&str]| {
        let server = Serving::of(serve(&["--port", "0"]).args(flags));
        let body = r#"{"prompt": [5, 9, 2, 77], "max_tokens": 8, "temperature": 0}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
        let answer = server.ask(head, body);
        let (_, answer) = answer.split_once("\r\n\r\n").unwrap();
        let answer: serde_json::Value = serde_json::from_str(answer).unwrap();
        let said = server.said.clone();
        server.end();
        (answer["choices"][0]["text"].clone(), said)
    };
    let (expected, said) = ask(&[model, "--backend", "cpu"]);
    assert!(expected.is_string() && !said.contains("layers"), "{said}");
    // The draft model, of another number of layers or not, is on one device.
    let flags = [
        model,
        "--layers",
        "cpu:0-1,reference:2",
        "--draft-model",
        model,
    ];
    let (found, said) = ask(&flags);
    assert_eq!(found, expected);
    assert!(
        said.contains("layers      cpu:0-1, reference:2-2\n"),
        "{said}"
    );
}

/// Heads draft, and the text stays the same: a layer of the model itself, from a folder and a GGUF file, and a folder of EAGLE-3.
#[cfg(unix)]
#[test]
fn draft_heads_change_no_text() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
    let ask = |model: &str, flags: &[&str]| {
        let model = format!("{fixtures}/{model}");
        let mut command = serve(&["--port", "0", "--backend", "cpu"]);
        let server = Serving::of(command.arg(&model).args(flags));
        let body = r#"{"prompt": [5, 9, 2, 77], "max_tokens": 24, "temperature": 0, "seed": 3}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
        let answer = server.ask(head, body);
        let (_, answer) = answer.split_once("\r\n\r\n").unwrap();
        let answer: serde_json::Value = serde_json::from_str(answer).unwrap();
        let metrics = server.ask("GET /metrics HTTP/1.1", "");
        let drafted = metrics.lines().find(|line| {
            line.starts_with("vllm:spec_decode_num_draft_tokens_total") && !line.ends_with(" 0")
        });
        let drafts = drafted.is_some();
        server.end();
        (answer["choices"][0]["text"].clone(), drafts)
    };
    let eagle = format!("{fixtures}/drafts/qwen3-eagle3");
    for (model, flags) in [
        ("drafts/deepseek3-mtp", &["--draft-mtp"][..]),
        (
            "drafts/glm4-moe-mtp/model.gguf",
            &["--draft-mtp", "--draft-tokens", "2"],
        ),
        ("models/qwen3", &["--draft-model", &eagle]),
        ("models/qwen3/model.gguf", &["--draft-model", &eagle]),
    ] {
        let (expected, drafts) = ask(model, &[]);
        assert!(expected.is_string() && !drafts, "{model}: {expected}");
        let (found, drafts) = ask(model, flags);
        assert!(found == expected && drafts, "{model}: {found}, {drafts}");
    }
}

#[cfg(unix)]
#[test]
fn a_hangup_without_a_certificate_ends_nothing() {
    let server = Serving::of(&mut serve(&["--port", "0", "--backend", "cpu"]));
    server.signal("-HUP");
    let answer = server.ask("GET /v1/models HTTP/1.1", "");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let log = server.end();
    assert!(log.contains("hangup"), "{log}");
}

#[test]
#[cfg(unix)]
fn a_process_that_cannot_end_in_time_says_why_and_fails() {
    let server = Serving::start(&["--grace", "600", "--shutdown-timeout", "1"]);
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    // Far more than a second's work.
    let body =
        r#"{"prompt": "Once", "n": 128, "max_tokens": 1000, "ignore_eos": true, "stream": true}"#;
    let mut stream = server.send(head, body);
    let mut first = [0; 12];
    stream.read_exact(&mut first).unwrap();
    let said = server.end_badly();
    let error = "the server did not end within 1 s of being asked to";
    assert!(
        said.contains(error) && said.contains("ferrum-demo"),
        "{said}"
    );
}

#[test]
fn keys_of_files_have_their_rights() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let wrong = file("wrong", "one\ntwo everything\n");
    for flag in ["--api-key-file", "--admin-key-file"] {
        let output = serve(&["--port", "0", flag, &wrong]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{said}");
        assert!(
            said.contains("line 2: expected KEY or KEY priority"),
            "{said}"
        );
        assert!(!said.contains("everything"), "{said}");
    }
    let users = file("users", "plain\n\n fast priority\n");
    let admins = file("admins", "boss\n");
    let server = Serving::start(&["--api-key-file", &users, "--admin-key-file", &admins]);
    let status = |path: &str, key: &str, body: &str| {
        let head =
            format!("POST {path} HTTP/1.1\r\nx-api-key: {key}\r\nContent-Type: application/json");
        let answer = server.ask(&head, body);
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    let urgent = r#"{"prompt": "Once", "max_tokens": 1, "priority": 1}"#;
    let unload = r#"{"lora_name": "none"}"#;
    for (key, priority, admin) in [
        ("plain", "403", "403"),
        ("fast", "200", "403"),
        ("boss", "200", "404"),
    ] {
        assert_eq!(status("/v1/completions", key, urgent), priority, "{key}");
        assert_eq!(
            status("/v1/unload_lora_adapter", key, unload),
            admin,
            "{key}"
        );
    }
}

#[test]
#[cfg(unix)]
fn several_models_are_served_and_come_and_go() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut.gguf");
    let whole = std::fs::read(format!("{root}/assets/demo/ferrum-demo.gguf")).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let mut command = serve(&[
        "--port",
        "0",
        "--backend",
        "cpu",
        "--max-loaded-models",
        "1",
    ]);
    command.args(["--idle-unload", "3600", "--context", "256"]);
    command.arg(format!("{root}/assets/demo/ferrum-demo.gguf"));
    command.arg(format!("random={root}/fixtures/models/llama3-tied"));
    command.arg(cut.to_str().unwrap());
    let server = Serving::of(&mut command);
    let post = |model: &str| {
        let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
        let body = format!(
            r#"{{"model": "{model}", "prompt": "Once", "max_tokens": 2, "temperature": 0}}"#
        );
        server.ask(head, &body)
    };
    let demo = post("ferrum-demo");
    assert!(demo.starts_with("HTTP/1.1 200 "), "{demo}");
    let random = post("random");
    assert!(random.starts_with("HTTP/1.1 200 "), "{random}");
    let failed = post("cut");
    assert!(failed.starts_with("HTTP/1.1 503 "), "{failed}");
    assert!(failed.contains("model_not_loaded"), "{failed}");
    let listed = server.ask("GET /v1/models HTTP/1.1", "");
    let body = listed.split("\r\n\r\n").nth(1).unwrap();
    let listed: serde_json::Value = serde_json::from_str(body).unwrap();
    let shown = |i: usize| {
        let model = &listed["data"][i];
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        (text(&model["id"]), text(&model["status"]["value"]))
    };
    let (id, status) = shown(0);
    assert_eq!((id.as_str(), status.as_str()), ("ferrum-demo", "unloaded"));
    assert_eq!(shown(1).0, "random");
    let (id, status) = shown(2);
    assert_eq!((id.as_str(), status.as_str()), ("cut", "failed"));
    let answer = |reply: &str| reply.split("\"text\":").nth(1).map(str::to_owned);
    assert!(answer(&demo).is_some());
    assert_eq!(answer(&post("ferrum-demo")), answer(&demo));
    let rest = server.end();
    for said in [
        "INFO ferrum::commands::serve::models: model unloaded model=\"ferrum-demo\"",
        "INFO ferrum::commands::serve::models: loading model model=\"random\"",
        "WARN ferrum::commands::serve::models: model not loaded model=\"cut\" reason=",
        "INFO ferrum::commands::serve::models: loading model model=\"ferrum-demo\"",
    ] {
        assert!(
            rest.lines().any(|line| line.contains(said)),
            "{said}\n{rest}"
        );
    }
}

/// Takes what comes in one request over TLS, and says that it is well.
fn collector(listener: &TcpListener, config: ServerConfig) -> std::io::Result<String> {
    let (socket, _) = listener.accept()?;
    let connection = ServerConnection::new(Arc::new(config)).unwrap();
    let mut reader = BufReader::new(StreamOwned::new(connection, socket));
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line)?, 0, "{head}");
        if let Some(value) = line.to_lowercase().strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap();
        }
        head.push_str(&line);
    }
    assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
    reader.get_mut().write_all(answer)?;
    Ok(String::from_utf8(body).unwrap())
}

#[test]
fn traces_go_to_trusted_collectors_and_nothing_is_stored_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let fresh = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let file = dir.path().join("root.pem");
    std::fs::write(&file, fresh.cert.pem()).unwrap();
    let key = PrivateKeyDer::Pkcs8(fresh.signing_key.serialize_der().into());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![fresh.cert.der().clone()], key)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "https://localhost:{}",
        listener.local_addr().unwrap().port()
    );
    let told = std::thread::spawn(move || collector(&listener, config));

    let mut command = serve(&["--port", "0", "--backend", "cpu", "--otlp-endpoint", &url]);
    command.args(["--max-stored", "0"]);
    let server = Serving::of(command.env("SSL_CERT_FILE", file));
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    let answer = server.ask(head, r#"{"prompt": "One", "max_tokens": 1}"#);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let body = told.join().unwrap().unwrap();
    assert!(body.contains("\"POST /v1/completions\""), "{body}");

    let head = "POST /v1/responses HTTP/1.1\r\nContent-Type: application/json";
    let answer = server.ask(head, r#"{"input": "One", "store": true}"#);
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
}

#[test]
fn what_cannot_be_served_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "\n \n").unwrap();
    let settings = dir.path().join("ferrum.toml");
    std::fs::write(&settings, "port = 0\nprot = 1\n").unwrap();
    let settings = settings.to_str().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/qwen3");
    let eagle = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fixtures/drafts/qwen3-eagle3"
    );
    let cases: [(&[&str], &str); 21] = [
        (
            &["--api-key-file", keys.to_str().unwrap()],
            "there is no key in it",
        ),
        (&["--api-key", ""], "an API key is empty"),
        (&["--port", &port], "cannot listen on 127.0.0.1"),
        (
            &["--port", "0", "--backend", "cpu", "--draft-model", other],
            "fixtures/models/qwen3: token 0 is another than the model's",
        ),
        (
            &["--port", "0", "--backend", "cpu", "--lora", "a=/no/such"],
            "--lora a=/no/such: lora_path: /no/such: holds no adapter_config.json",
        ),
        (
            &["--model", "a=x.gguf", "--model", "y/a.gguf"],
            "two models are called \"a\"",
        ),
        (
            &["--model", "a", "--model", "b", "--draft-model", other],
            "--draft-model is about one model, and there are 2",
        ),
        (
            &["--model", "a", "--model", "b", "--draft-mtp"],
            "--draft-mtp is about one model, and there are 2",
        ),
        (
            &["--port", "0", "--backend", "cpu", "--draft-mtp"],
            "\"llama.nextn_predict_layers\": found 0 layers for multi-token prediction, expected at least 1",
        ),
        (
            &["--port", "0", "--backend", "cpu", "--draft-model", eagle],
            "field \"vocab_size\": found number 259, expected 1280, the vocabulary of the target",
        ),
        (
            &["--model", "a", "--model", "b", "--served-model-name", "c"],
            "--served-model-name is about one model, and there are 2",
        ),
        (
            &["--model", "a", "--model", "b", "--gpu-layers", "auto"],
            "--gpu-layers is about one model, and there are 2",
        ),
        (
            &["--model", "a", "--model", "b", "--layers", "cpu:0-3"],
            "--layers is about one model, and there are 2",
        ),
        (
            &["--port", "0", "--layers", "cpu:0-9999"],
            "found cpu:0-9999, and the model has",
        ),
        (
            &["--model", "a=b", "--served-model-name", "c"],
            "--served-model-name gives a name to a model that has one",
        ),
        (
            &[
                "--model",
                "a",
                "--model",
                "b",
                "--preload",
                "all",
                "--max-loaded-models",
                "1",
            ],
            "--preload all loads 2 models, and --max-loaded-models allows 1",
        ),
        (
            &["--port", "0", "--model", "a=/no/such.gguf", "--model", "b"],
            "a: /no/such.gguf: ",
        ),
        (
            &[
                "--port",
                "0",
                "--backend",
                "cpu",
                "--preload",
                "none",
                "--lora",
                "a=/no/such",
            ],
            "--lora a=/no/such: lora_path: /no/such: holds no adapter_config.json",
        ),
        (
            &["--config", settings],
            "ferrum.toml:2: prot: there is no such setting",
        ),
        (&["--config", "nowhere.toml"], "nowhere.toml: "),
        (
            &["--tls-cert", "nowhere.pem", "--tls-key", "nowhere.pem"],
            "nowhere.pem: expected a certificate in PEM",
        ),
    ];
    for (args, words) in cases {
        let output: Output = serve(args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(
            said.lines()
                .any(|line| line.starts_with("error: ") && line.contains(words)),
            "{args:?}: {said}"
        );
    }
}

#[test]
fn the_settings_that_hold_are_printed_as_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ferrum.toml");
    std::fs::write(
        &file,
        "port = 1\nmax-seqs = 2 # few\napi-key = [\"secret\"]\nallowed-media-domains = [\"A.example\", \"*\"]\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let output = serve(&["--port", "3", "--config", file, "--print-config"])
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    for line in [
        "port = 3",
        "max-seqs = 2",
        "host = \"127.0.0.1\"",
        "# model =",
        "allowed-media-domains = [\"A.example\", \"*\"]",
        "# api-key is set, and not shown",
    ] {
        assert!(
            printed.lines().any(|found| found == line),
            "{line}\n{printed}"
        );
    }
    assert!(!printed.contains("secret"), "{printed}");
}
