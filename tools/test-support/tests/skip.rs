//! That skips are visible although the test passes.

use ferrum_test_support::{available, skip};
use std::process::{Command, Output};

/// Runs one of the ignored tests below in a process of its own, as `cargo test` would.
fn run(test: &str, options: &[&str]) -> Output {
    let program = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new(program);
    // Whoever sees the output of all tests has these for the child, too.
    command.env_remove("RUST_TEST_NOCAPTURE");
    command.args(["--exact", test, "--ignored"]).args(options);
    let output = command.output().expect("this program runs");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        stdout.contains("test result: ok. 1 passed"),
        "{test}: {stdout}"
    );
    output
}

#[test]
#[ignore = "run by a_skip_is_written_to_stderr_once"]
fn skips() {
    for _ in 0..2 {
        skip("no device\nhint: there are drivers");
    }
    eprintln!("captured");
    std::thread::spawn(|| skip("no name"))
        .join()
        .expect("no panic");
}

#[test]
fn a_skip_is_written_to_stderr_once() {
    let expected = "skipped: skips: no device hint: there are drivers\nskipped: no name\n";
    for options in [&[][..], &["--test-threads=1"]] {
        let output = run("skips", options);
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
    }
}

#[test]
#[ignore = "run by what_is_not_available_is_named"]
fn skips_some() {
    assert_eq!(available([1, 2, 3, 4], |x| x % 2 == 0), [2, 4]);
    assert_eq!(available([5], |_| true), [5]);
}

#[test]
fn what_is_not_available_is_named() {
    let output = run("skips_some", &[]);
    let expected = "skipped: skips_some: this machine has no 1, 3\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
}
