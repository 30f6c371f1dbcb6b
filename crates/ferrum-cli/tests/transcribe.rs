//! `ferrum transcribe`: from files of sound to the tokens of `transformers`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, ok, root, stderr};
use serde_json::Value;

fn speech(name: &str) -> String {
    root()
        .join("fixtures/speech")
        .join(name)
        .display()
        .to_string()
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(speech("expected.json")).unwrap()).unwrap()
}

fn transcribe(file: &str, flags: &[&str]) -> Value {
    let (model, file) = (speech("whisper"), speech(file));
    // Texts of random weights are unlikely: with a fallback they would be sampled.
    let args = [
        "transcribe",
        "--backend",
        "cpu",
        "--json",
        "--no-fallback",
        &model,
        &file,
    ];
    serde_json::from_str(&ok(&[&args, flags].concat())).unwrap()
}

#[test]
fn tokens_are_those_of_transformers() {
    let expected = expected();
    for (name, tokens) in expected["texts"].as_object().unwrap() {
        let (language, task) = name.split_once(' ').unwrap();
        let mut flags = vec!["--no-timestamps", "--language", language];
        flags.extend((task == "translate").then_some("--translate"));
        let found = transcribe("sentence.wav", &flags);
        assert_eq!(&found["segments"][0]["tokens"], tokens, "{name}");
        assert_eq!(found["language"], language);
    }
    // The language that the model hears.
    let heard = expected["language"].as_str().unwrap();
    let code = heard
        .strip_prefix("<|")
        .unwrap()
        .strip_suffix("|>")
        .unwrap();
    let found = transcribe("sentence.wav", &["--no-timestamps"]);
    assert_eq!(found["language"], code);
    assert_eq!(
        found["segments"][0]["tokens"],
        expected["texts"][format!("{code} transcribe")]
    );
    assert!(
        (found["duration"].as_f64().unwrap() - expected["seconds"].as_f64().unwrap()).abs() < 1e-3
    );
}

fn same_segments(found: &Value, expected: &Value) {
    let (found, expected) = (found.as_array().unwrap(), expected.as_array().unwrap());
    let tokens = |all: &[Value]| {
        all.iter()
            .map(|one| one["tokens"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(tokens(found), tokens(expected));
    for (found, expected) in found.iter().zip(expected) {
        for key in ["start", "end"] {
            let off = found[key].as_f64().unwrap() - expected[key].as_f64().unwrap();
            assert!(off.abs() < 1e-6, "{key}: {found} {expected}");
        }
    }
}

#[test]
fn segments_of_a_window_have_the_times_of_transformers() {
    let expected = expected();
    let found = transcribe("sentence.wav", &["--language", "en"]);
    same_segments(&found["segments"], &expected["timed"]);
}

#[test]
fn a_prompt_stands_before_a_text() {
    let prompt = &expected()["prompt"];
    let text = prompt["text"].as_str().unwrap();
    let flags = ["--no-timestamps", "--language", "en", "--prompt", text];
    let found = transcribe("sentence.wav", &flags);
    assert_eq!(found["segments"][0]["tokens"], prompt["tokens"]);
    assert_eq!(found["language"], "en");
    // Of a prompt that is too long, the end counts.
    let long = format!("{} {text}", "word ".repeat(40));
    let flags = ["--no-timestamps", "--language", "en", "--prompt", &long];
    let of_long = transcribe("sentence.wav", &flags);
    assert_ne!(of_long["segments"][0]["tokens"], prompt["tokens"]);
}

#[test]
fn an_unlikely_text_is_sampled_at_higher_temperatures() {
    let expected = expected();
    let greedy = transcribe("sentence.wav", &["--no-timestamps", "--language", "en"]);
    let figure = |of: &Value, name: &str| of["segments"][0][name].as_f64().unwrap();
    for (name, key) in [
        ("avg_logprob", "average_logprob"),
        ("no_speech_prob", "no_speech"),
    ] {
        let off = figure(&greedy, name) - expected[key].as_f64().unwrap();
        assert!(off.abs() < 1e-4, "{name}: {off}");
    }
    assert_eq!(figure(&greedy, "temperature"), 0.0);
    assert!(figure(&greedy, "compression_ratio") > 0.0);
    let (model, file) = (speech("whisper"), speech("sentence.wav"));
    let sampled = || {
        let flags = ["--json", "--no-timestamps", "--language", "en"];
        ok(&[
            &["transcribe", "--backend", "cpu", &model, &file],
            &flags[..],
        ]
        .concat())
    };
    let text = sampled();
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(figure(&found, "temperature"), 1.0);
    assert_ne!(
        found["segments"][0]["tokens"],
        greedy["segments"][0]["tokens"]
    );
    assert_eq!(sampled(), text, "the same recording gives the same text");
}

/// The samples of a WAV file with 16 bits each.
fn repeated(times: u64) -> Vec<u8> {
    let wav = std::fs::read(speech("sentence.wav")).unwrap();
    let data = wav.windows(4).position(|w| w == b"data").unwrap();
    let (head, samples) = wav.split_at(data + 8);
    let samples = samples.repeat(times as usize);
    let mut head = head.to_vec();
    let size = samples.len() as u32;
    head[data + 4..].copy_from_slice(&size.to_le_bytes());
    head[4..8].copy_from_slice(&(size + data as u32).to_le_bytes());
    [head, samples].concat()
}

#[test]
fn a_long_recording_is_read_window_by_window() {
    let expected = expected();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("long.wav").display().to_string();
    std::fs::write(&file, repeated(expected["repeats"].as_u64().unwrap())).unwrap();
    let model = speech("whisper");
    let found = ok(&[
        "transcribe",
        "--backend",
        "cpu",
        "--json",
        "--no-fallback",
        "--language",
        "en",
        &model,
        &file,
    ]);
    let found: Value = serde_json::from_str(&found).unwrap();
    same_segments(&found["segments"], &expected["long"]);
}

#[test]
fn every_format_of_sound_is_heard_and_every_format_of_text_is_written() {
    let wav = transcribe("sentence.wav", &["--language", "en"]);
    for name in ["sentence.flac", "sentence.mp3", "sentence.ogg"] {
        let found = transcribe(name, &["--language", "en"]);
        let [found, expected] = [&found, &wav].map(|one| one["duration"].as_f64().unwrap());
        // MP3 has silence around it.
        assert!(
            (found - expected).abs() < 0.15,
            "{name}: {found} {expected}"
        );
    }
    let (model, file) = (speech("whisper"), speech("sentence.wav"));
    let print = |format: &str| {
        ok(&[
            "transcribe",
            &model,
            &file,
            "--no-fallback",
            "--language",
            "en",
            "--format",
            format,
        ])
    };
    insta::assert_snapshot!("transcribe_srt", print("srt"));
    insta::assert_snapshot!("transcribe_vtt", print("vtt"));
    assert_eq!(print("text").trim(), wav["text"].as_str().unwrap());
    assert_eq!(serde_json::from_str::<Value>(&print("json")).unwrap(), wav);
}

#[test]
fn what_cannot_be_transcribed_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let (model, wav) = (speech("whisper"), speech("sentence.wav"));
    let bert = root().join("fixtures/encoders/bert").display().to_string();
    let (text, empty) = (write("a.wav", b"no sound at all"), write("b.mp3", b""));
    let silent = write("c.wav", &repeated(0));
    let half = std::fs::read(speech("sentence.flac")).unwrap();
    let half = write("half.flac", &half[..half.len() / 2]);
    let output = ferrum(&["transcribe", &model, &half]);
    assert!(output.status.success());
    let told = stderr(&output);
    assert!(told.contains("of its 1.25 seconds can be read"), "{told}");
    for (args, words) in [
        (
            &["transcribe", &model, &text][..],
            "supported are WAV, MP3, FLAC and Ogg Vorbis",
        ),
        (&["transcribe", &model, &empty], "the file has no audio"),
        (&["transcribe", &model, &silent], "the file has no audio"),
        (&["transcribe", &model, "/nowhere.wav"], "/nowhere.wav"),
        (
            &["transcribe", &bert, &wav],
            "ferrum embed and ferrum rerank run it",
        ),
        (
            &["transcribe", &model, &wav, "--language", "xx"],
            "the model knows en, de, fr",
        ),
        (
            &["transcribe", &model, &wav, "--temperature", "1.5"],
            "a number from 0 to 1",
        ),
        (&["run", &model, "hi"], "ferrum transcribe runs it"),
    ] {
        let sentence = fails(args, b"");
        assert!(sentence.contains(words), "{args:?}: {sentence}");
    }
}
