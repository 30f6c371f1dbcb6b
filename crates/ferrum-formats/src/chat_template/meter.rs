//! Limits on what a template may take, and the errors inside a rendering.
//!
//! A template comes with a model file, and its input from a request: both may be hostile. Every
//! step of evaluation costs fuel and every text or list made costs memory, counted and never given
//! back, so that no template can hold the process for long or make it run out.

use std::cell::Cell;

/// Steps of one rendering.
pub const MAX_STEPS: u64 = 20_000_000;
/// Bytes of all values that one rendering may make, alive or not.
pub const MAX_VALUE_BYTES: u64 = 1 << 29;
/// Bytes of a rendered prompt.
pub const MAX_OUTPUT_BYTES: u64 = 1 << 26;
/// Levels of evaluation within each other.
pub const MAX_DEPTH: u32 = 450;
/// Levels of lists and dictionaries within each other.
pub(super) const MAX_VALUE_DEPTH: u16 = 200;

/// Why evaluation stopped.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fault {
    /// An error as Python would have it.
    Error(String),
    /// `raise_exception`.
    Raised(String),
    /// A limit.
    Exhausted { what: &'static str, limit: u64 },
}

/// Result of evaluation.
pub(super) type Res<T> = Result<T, Fault>;

/// An error with a message.
pub(super) fn fail<T>(message: impl Into<String>) -> Res<T> {
    Err(Fault::Error(message.into()))
}

/// What is left of a rendering's budget.
#[derive(Debug)]
pub(super) struct Meter {
    steps: Cell<u64>,
    bytes: Cell<u64>,
    depth: Cell<u32>,
}

impl Meter {
    pub(super) fn new() -> Self {
        Meter {
            steps: Cell::new(MAX_STEPS),
            bytes: Cell::new(MAX_VALUE_BYTES),
            depth: Cell::new(0),
        }
    }

    /// Takes steps.
    #[inline]
    pub(super) fn step(&self, count: usize) -> Res<()> {
        match self.steps.get().checked_sub(count as u64) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => Err(Fault::Exhausted {
                what: "time",
                limit: MAX_STEPS,
            }),
        }
    }

    /// Takes memory, and the time to fill it.
    #[inline]
    pub(super) fn bytes(&self, count: usize) -> Res<()> {
        self.step(1 + count / 256)?;
        match self.bytes.get().checked_sub(count as u64) {
            Some(left) => {
                self.bytes.set(left);
                Ok(())
            }
            None => Err(Fault::Exhausted {
                what: "memory",
                limit: MAX_VALUE_BYTES,
            }),
        }
    }

    /// Goes a level deeper while `work` runs.
    #[inline]
    pub(super) fn nested<T>(&self, work: impl FnOnce() -> Res<T>) -> Res<T> {
        let depth = self.depth.get();
        if depth >= MAX_DEPTH {
            return Err(Fault::Exhausted {
                what: "recursion",
                limit: u64::from(MAX_DEPTH),
            });
        }
        self.depth.set(depth + 1);
        let result = work();
        self.depth.set(depth);
        result
    }
}
