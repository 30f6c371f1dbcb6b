//! Limits on what a rendering may take.
//!
//! A template comes with a model file and its input from a request: both may be hostile. The template
//! engine counts its instructions and the text that it copies as fuel; [`charge`] adds the memory of every value that is
//! made, so fuel bounds time and memory together.

use minijinja::{Error, ErrorKind, State};
use std::fmt;

/// Steps of one rendering: an instruction is one, and so are 64 bytes of memory.
pub const MAX_STEPS: u64 = 1 << 23;
/// Bytes of all values that one rendering may make, alive or not.
pub const MAX_VALUE_BYTES: u64 = MAX_STEPS * BYTES_PER_STEP;
/// Bytes of a rendered prompt, and of the output of macros and blocks that it consists of.
pub const MAX_OUTPUT_BYTES: u64 = 1 << 26;
/// Levels of scopes and calls within each other; a call of a macro counts as four or more.
pub const MAX_DEPTH: u32 = 450;
/// Levels of lists and dictionaries within each other.
pub(super) const MAX_VALUE_DEPTH: u16 = 200;

/// As the engine counts text.
const BYTES_PER_STEP: u64 = 64;

/// Why a rendering ended before its end; travels as the source of the engine's error.
#[derive(Clone, Debug)]
pub(super) enum Stop {
    /// `raise_exception`.
    Raised(String),
    /// A limit.
    Exhausted { what: &'static str, limit: u64 },
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Raised(message) => f.write_str(message),
            Stop::Exhausted { what, .. } => write!(f, "too much {what}"),
        }
    }
}

impl std::error::Error for Stop {}

impl From<Stop> for Error {
    fn from(stop: Stop) -> Self {
        Error::new(ErrorKind::InvalidOperation, stop.to_string()).with_source(stop)
    }
}

/// The error of a limit.
pub(super) fn exhausted(what: &'static str, limit: u64) -> Error {
    Stop::Exhausted { what, limit }.into()
}

/// An error with a message.
pub(super) fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.into()))
}

/// Takes memory, or the time to walk through as much.
pub(super) fn charge(state: &State, bytes: u64) -> Result<(), Error> {
    if bytes > MAX_VALUE_BYTES {
        return Err(exhausted("memory", MAX_VALUE_BYTES));
    }
    state.consume_fuel(1 + bytes / BYTES_PER_STEP)
}
