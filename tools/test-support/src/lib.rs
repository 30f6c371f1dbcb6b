//! How a test of any crate says that it was skipped, or a part of it. This crate has no dependencies, so that each of the others
//! can have it as a dev-dependency.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

/// Lines that were written.
static WRITTEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Writes `skipped: TEST: REASON` to stderr, in one line. To be called by a test that does not run, or not in full, because
/// the machine lacks something. `reason` says what is missing. A line is written once per process, also where a test
/// calls this in a loop.
pub fn skip(reason: impl Display) {
    let reason = reason.to_string();
    // Errors may have lines with hints.
    let reason: Vec<_> = reason.split('\n').map(str::trim).collect();
    let reason = reason.join(" ");
    // libtest runs each test in a thread that has the test's name. Other threads may have none.
    let thread = std::thread::current();
    let line = match thread.name() {
        Some(test) => format!("skipped: {test}: {reason}\n"),
        None => format!("skipped: {reason}\n"),
    };
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if written.contains(&line) {
        return;
    }
    // Not `eprintln!`: libtest captures what the macros print, and drops it when the test passes. One write, so that
    // lines of other threads stay apart.
    let _ = std::io::stderr().write_all(line.as_bytes());
    written.insert(line);
}

/// Returns those of `all` that the machine has, and [`skip`]s the others in one line.
pub fn available<T: Copy + Display>(
    all: impl IntoIterator<Item = T>,
    is_available: impl Fn(T) -> bool,
) -> Vec<T> {
    let (available, missing): (Vec<T>, Vec<T>) = all.into_iter().partition(|&x| is_available(x));
    if !missing.is_empty() {
        let names: Vec<_> = missing.iter().map(T::to_string).collect();
        skip(format_args!("this machine has no {}", names.join(", ")));
    }
    available
}
