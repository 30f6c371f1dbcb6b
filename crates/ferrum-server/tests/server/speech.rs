//! `/v1/audio/transcriptions` and `/v1/audio/translations`: the tokens of `transformers`, every format, bad forms.

use super::*;
use ferrum_engine::engine::Clock;
use ferrum_engine::transcribe::Transcriber;
use ferrum_engine::{TaskConfig, TaskEngine};
use ferrum_models::whisper::read_whisper;
use ferrum_server::ServedTranscriber;
use serde_json::json;
use std::path::Path;

const PATH: &str = "/v1/audio/transcriptions";

fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/speech");
    root.join(name)
}

fn load_speech() -> LoadedModel {
    let folder = fixture("whisper");
    let model = read_whisper(ModelSource::open(&folder).unwrap()).unwrap();
    let tokenizer = Tokenizer::from_hf_dir(&folder).unwrap();
    let options = BackendOptions {
        threads: Some(1),
        ..BackendOptions::default()
    };
    let device = BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap();
    let transcriber = Transcriber::load(&device, &model, tokenizer, &mut |_, _| ()).unwrap();
    let languages = transcriber.languages().map(str::to_owned).collect();
    let config = TaskConfig {
        max_waiting: 4,
        stall_after: PATIENCE,
        clock: Clock::system(),
    };
    let engine = TaskEngine::start(transcriber, config).unwrap();
    let model = ServedTranscriber {
        engine: engine.handle(),
        languages,
    };
    LoadedModel::Transcriber(engine, model)
}

fn server() -> Running {
    let loader = |_: &str| Ok(load_speech());
    let config = ServerConfig {
        max_body_bytes: 1 << 20,
        ..ServerConfig::default()
    };
    Running::models(&["whisper"], Arc::new(loader), 1, config)
}

/// A form with a file and fields.
fn form(file: Option<&[u8]>, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        let part =
            format!("--xyz\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend(part.into_bytes());
    }
    if let Some(file) = file {
        body.extend(
            b"--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n",
        );
        body.extend(file);
        body.extend(b"\r\n");
    }
    body.extend(b"--xyz--\r\n");
    body
}

fn send(server: &Running, path: &str, body: &[u8]) -> Reply {
    let kind = [("Content-Type", "multipart/form-data; boundary=xyz")];
    server.send("POST", path, &kind, body)
}

#[test]
fn what_is_said_is_what_transformers_writes() {
    let server = server();
    let expected: Value =
        serde_json::from_slice(&std::fs::read(fixture("expected.json")).unwrap()).unwrap();
    let wav = std::fs::read(fixture("sentence.wav")).unwrap();
    let ask = |path: &str, fields: &[(&str, &str)]| {
        let reply = send(&server, path, &form(Some(&wav), fields));
        assert_eq!(reply.status, 200);
        reply
    };
    // Texts of random weights are unlikely, and at temperature 0 they would be sampled again: just above it they are greedy.
    let greedy = ("temperature", "0.000001");
    let english = [("model", "whisper"), ("language", "en"), greedy];
    let with = |more: &[(&'static str, &'static str)]| [&english[..], more].concat();
    let verbose = with(&[
        ("response_format", "verbose_json"),
        ("timestamp_granularities[]", "segment"),
    ]);
    let whole = ask(PATH, &verbose).json();
    let tokens = |all: &Value| {
        let all = all.as_array().unwrap().iter();
        all.map(|one| one["tokens"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&whole["segments"]), tokens(&expected["timed"]));
    assert_eq!(
        (&whole["task"], &whole["language"]),
        (&json!("transcribe"), &json!("en"))
    );
    let translated = ask("/v1/audio/translations", &verbose).json();
    assert_eq!(translated["task"], "translate");
    assert_eq!(ask(PATH, &english).json(), json!({"text": whole["text"]}));
    let text = ask(PATH, &with(&[("response_format", "text")])).text();
    assert_eq!(text.trim(), whole["text"].as_str().unwrap());
    let vtt = ask(PATH, &with(&[("response_format", "vtt")])).text();
    assert!(vtt.starts_with("WEBVTT\n\n00:00:00."), "{vtt}");
    let srt = ask(PATH, &with(&[("response_format", "srt")])).text();
    assert!(srt.starts_with("1\n00:00:00,"), "{srt}");
    let prompt = expected["prompt"]["text"].as_str().unwrap();
    let prompted = [&verbose[..], &[("prompt", prompt)]].concat();
    assert_ne!(
        tokens(&ask(PATH, &prompted).json()["segments"]),
        tokens(&expected["timed"])
    );
    let sampled = ask(
        PATH,
        &[("response_format", "verbose_json"), ("temperature", "0")],
    );
    assert_eq!(sampled.json()["segments"][0]["temperature"], 1.0);
    // Without a language it is heard, and hints that are not followed are told.
    let heard = ask(
        PATH,
        &[
            ("response_format", "verbose_json"),
            ("vad_filter", "x"),
            greedy,
        ],
    );
    assert_eq!(heard.header("x-ferrum-ignored"), Some("vad_filter"));
    let language = heard.json()["language"].as_str().unwrap().to_owned();
    assert_eq!(
        format!("<|{language}|>"),
        expected["language"].as_str().unwrap()
    );
    let model = server.get("/v1/models/whisper").json();
    assert_eq!(model["ferrum"]["kind"], "speech");
    assert_eq!(server.get("/health").json()["status"], "ok");
}

#[test]
fn bad_forms_and_files_are_refused() {
    let server = server();
    let wav = std::fs::read(fixture("sentence.wav")).unwrap();
    for (body, param, words) in [
        (
            form(None, &[("model", "whisper")]),
            json!("file"),
            "missing",
        ),
        (form(Some(b"no sound"), &[]), json!("file"), "not audio"),
        (form(Some(b""), &[]), json!("file"), "no audio"),
        (form(Some(&wav[..44]), &[]), json!("file"), "no audio"),
        (
            form(Some(&wav), &[("language", "xx")]),
            json!("language"),
            "expected one of en, de, fr",
        ),
        (
            form(Some(&wav), &[("response_format", "pdf")]),
            json!("response_format"),
            "verbose_json",
        ),
        (
            form(Some(&wav), &[("temperature", "1.7")]),
            json!("temperature"),
            "from 0 to 1",
        ),
        (
            form(Some(&wav), &[("temperature", "hot")]),
            json!("temperature"),
            "a number",
        ),
        (
            form(Some(&wav), &[("stream", "true")]),
            json!("stream"),
            "as a whole",
        ),
        (
            form(Some(&wav), &[("timestamp_granularities[]", "word")]),
            json!("timestamp_granularities[]"),
            "expected segment",
        ),
        (b"--xyz\r\nnothing".to_vec(), Value::Null, "multipart form"),
    ] {
        let reply = send(&server, PATH, &body);
        assert_eq!(reply.status, 400, "{words}");
        let error = reply.json()["error"].clone();
        assert_eq!(error["param"], param, "{error}");
        assert!(
            error["message"].as_str().unwrap().contains(words),
            "{error}"
        );
    }
    let unknown = send(&server, PATH, &form(Some(&wav), &[("model", "other")]));
    assert_eq!(unknown.status, 404);
    let long = send(&server, PATH, &form(Some(&vec![0; 2 << 20]), &[]));
    assert_eq!(long.status, 413);
    assert_eq!(server.post(PATH, &json!({"file": "a"})).status, 415);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let reply = server.post("/v1/chat/completions", &chat);
    assert_eq!(
        (reply.status, &reply.json()["error"]["code"]),
        (400, &json!("unsupported_model"))
    );
    let vectors = server.post("/v1/embeddings", &json!({"input": "a"}));
    assert!(
        vectors.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("/v1/audio/transcriptions")
    );
    // A page of another site may not use a server that it cannot ask.
    let kind = [
        ("Content-Type", "multipart/form-data; boundary=xyz"),
        ("Sec-Fetch-Site", "cross-site"),
    ];
    assert_eq!(
        server
            .send("POST", PATH, &kind, &form(Some(&wav), &[]))
            .status,
        403
    );
}
