//! What can go wrong with a chat template.

use std::path::PathBuf;

/// What a limit of this kind counts.
fn unit(what: &str) -> &'static str {
    match what {
        "time" => "steps",
        "recursion" => "levels",
        _ => "bytes",
    }
}

/// Errors of loading and rendering a [`ChatTemplate`](super::ChatTemplate).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A file could not be read.
    #[error("cannot read {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// A file is there but does not hold what it should.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// A template larger than any real one.
    #[error("the chat template has {found} bytes, expected at most {limit}")]
    TooLarge {
        /// Bytes found.
        found: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The template is not Jinja.
    #[error("chat template, line {line}: {reason}")]
    Syntax {
        /// Line of the template, from 1.
        line: u32,
        /// What was found and what was expected.
        reason: String,
    },
    /// The template refused the conversation with `raise_exception`; its own words.
    #[error("{0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("chat template, line {line}: {reason}")]
    Render {
        /// Line of the template, from 1.
        line: u32,
        /// What failed, in the words Python has for it.
        reason: String,
    },
    /// The template took more than a template may.
    #[error("the chat template takes too much {what}: it was stopped at {limit} {}", unit(.what))]
    Exhausted {
        /// `time`, `memory`, `output` or `recursion`.
        what: &'static str,
        /// The limit, in steps, bytes or levels.
        limit: u64,
    },
    /// There is no template by this name.
    #[error("no chat template named `{name}`, found {found}")]
    NoSuchTemplate {
        /// The name asked for.
        name: String,
        /// The names there are.
        found: String,
    },
}
