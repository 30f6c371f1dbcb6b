//! Runs the command as a user would.
#![allow(dead_code, reason = "no test file needs all of it")]

use ferrum_test_support::skip;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn fixture(name: &str) -> String {
    root()
        .join("fixtures/models")
        .join(name)
        .display()
        .to_string()
}

pub(crate) fn ferrum_with_input(args: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrum"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that needs no input may have closed it already.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

pub(crate) fn ferrum(args: &[&str]) -> Output {
    ferrum_with_input(args, b"")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub(crate) fn ok(args: &[&str]) -> String {
    let output = ferrum(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

pub(crate) fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

/// Fails with one sentence and no panic; gives the sentence.
pub(crate) fn fails(args: &[&str], input: &[u8]) -> String {
    let output = ferrum_with_input(args, input);
    let (out, err) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(1), "{args:?}: {out}{err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    let sentence = err
        .lines()
        .filter(|line| line.starts_with("error: "))
        .count();
    assert_eq!(sentence, 1, "{args:?}: {err}");
    err
}

/// `mpirun` with so many processes; `None`, with a word why, where there is none.
pub(crate) fn mpirun(processes: usize) -> Option<Command> {
    if Command::new("mpirun").arg("--version").output().is_err() {
        skip("there is no mpirun");
        return None;
    }
    let mut command = Command::new("mpirun");
    let flags = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
    ];
    command.args(flags).args(["-n", &processes.to_string()]);
    Some(command)
}
