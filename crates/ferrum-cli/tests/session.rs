//! `ferrum run --session`: a conversation that goes on without being computed again, and files that are not one.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, root, stderr, stdout};
use std::path::Path;

const GREEDY: [&str; 7] = [
    "run",
    "-v",
    "--backend",
    "cpu",
    "--temperature",
    "0",
    "--max-tokens=24",
];

/// What is said, on stdout and on stderr.
fn run(flags: &[&str], session: &Path, prompt: &str) -> (String, String) {
    let session = ["--session", session.to_str().unwrap(), prompt];
    let output = ferrum(&[&GREEDY, flags, &session].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    (stdout(&output), stderr(&output))
}

/// How many tokens came from the file, as far as words tell.
fn restored(said: &str) -> Option<usize> {
    let line = said
        .lines()
        .find(|line| line.contains(" tokens come from "))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn a_conversation_goes_on_and_says_what_it_would_have_said() {
    for flags in [&[][..], &["--raw"], &["--kv-dtype", "int8"]] {
        let dir = tempfile::tempdir().unwrap();
        let (file, copy) = (dir.path().join("talk.kv"), dir.path().join("copy.kv"));
        let (_, said) = run(flags, &file, "Tell me a story about a fox.");
        assert_eq!(restored(&said), None, "{said}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        std::fs::copy(&file, &copy).unwrap();
        let (answer, said) = run(flags, &file, "Who did the fox meet?");
        let first = restored(&said);
        assert!(first.is_some_and(|tokens| tokens > 6), "{said}");
        // The same weights under another identity: the conversation is computed again.
        let demo = root().join("assets/demo/ferrum-demo.gguf");
        let model = ["--model", demo.to_str().unwrap()];
        let (again, said) = run(&[flags, &model].concat(), &copy, "Who did the fox meet?");
        assert!(said.contains("another model"), "{said}");
        assert_eq!(restored(&said), None, "{said}");
        if flags != ["--raw"] {
            // Without a template, what another model reads is the text, whose tokens may be cut elsewhere.
            assert_eq!(again, answer, "{flags:?}");
        }
        // What was written then is for that model.
        let (_, said) = run(&[flags, &model].concat(), &copy, "And then?");
        assert!(restored(&said) > first, "{said}");
    }
}

#[test]
fn another_cache_is_told_and_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.kv");
    run(&[], &file, "Tell me a story about a fox.");
    let (_, said) = run(&["--kv-dtype", "bf16"], &file, "And then?");
    assert!(said.contains("another model, KV cache"), "{said}");
    let (_, said) = run(&["--kv-dtype", "bf16"], &file, "And then?");
    assert!(restored(&said).is_some(), "{said}");
}

#[test]
fn damaged_and_other_files_are_refused_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.kv");
    run(&[], &file, "Tell me a story about a fox.");
    let whole = std::fs::read(&file).unwrap();
    let mut turned = whole.clone();
    turned[whole.len() / 2] ^= 1;
    let mut endless = whole.clone();
    endless[16..24].fill(0xff);
    let cases = [
        (turned, "is damaged"),
        (whole[..whole.len() - 1].to_vec(), "has another length"),
        (endless, "has another length"),
        (
            b"my notes, which are longer than a header is".to_vec(),
            "is no file of stored keys",
        ),
        (Vec::new(), "is too short"),
    ];
    for (bytes, words) in cases {
        std::fs::write(&file, &bytes).unwrap();
        let session = ["--session", file.to_str().unwrap(), "And then?"];
        let said = fails(&[&GREEDY[..], &session].concat(), b"");
        assert!(said.contains(words), "{words}: {said}");
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
    }
}
