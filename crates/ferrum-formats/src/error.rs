//! What can be wrong with a model's files.
//!
//! A loader's error is read by a person who has a file and wants it to run, so every variant says
//! which file, which field or tensor, what was found and what was expected, and a `hint:` line
//! follows where there is a next step. Names that come out of a file are escaped and shortened
//! before they reach a message: they may be megabytes long or hold terminal escapes.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::Path;

/// What to do about a file that ends before what it says of itself.
pub(crate) const INCOMPLETE: &str = "the file is incomplete or damaged, fetch it again";

/// Result with [`FormatError`].
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

/// Everything a reader or writer of this crate can refuse.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system could not open, map or write the file.
    #[error("{}: could not {action}: {reason}", .path.display())]
    Io {
        /// File or folder.
        path: Box<Path>,
        /// What was tried (`open`, `map`, `read`, `write`).
        action: &'static str,
        /// Kind of the failure, for programs.
        kind: io::ErrorKind,
        /// The system's own words.
        reason: String,
    },
    /// The file ends before something it promised.
    #[error(
        "{}: file ends within {what}: {needed} bytes needed at offset {offset}, {remaining} left\nhint: the file is incomplete or damaged, fetch it again",
        .path.display()
    )]
    Truncated {
        /// File.
        path: Box<Path>,
        /// What was being read.
        what: String,
        /// Offset in the file at which it should lie.
        offset: usize,
        /// Bytes it needs (at least).
        needed: u64,
        /// Bytes there are from that offset.
        remaining: usize,
    },
    /// A fixed part of a header (magic, version, header length) has a wrong value.
    #[error("{}: {what}: found {found}, expected {expected}{}", .path.display(), hint_line(.hint))]
    Header {
        /// File.
        path: Box<Path>,
        /// Part of the header.
        what: &'static str,
        /// What was found.
        found: String,
        /// What is allowed.
        expected: Cow<'static, str>,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// A metadata key or JSON field has a value of the wrong kind or outside its range.
    #[error(
        "{}: field \"{field}\": found {found}, expected {expected}{}",
        .path.display(), hint_line(.hint)
    )]
    Field {
        /// File.
        path: Box<Path>,
        /// Full name of the field.
        field: String,
        /// What was found.
        found: String,
        /// What is allowed.
        expected: Cow<'static, str>,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// A metadata key or JSON field that is needed is not there.
    #[error("{}: field \"{field}\" is missing, expected {expected}{}", .path.display(), hint_line(.hint))]
    MissingField {
        /// File.
        path: Box<Path>,
        /// Full name of the field.
        field: String,
        /// What it should hold.
        expected: Cow<'static, str>,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// A tensor's entry contradicts itself or the file.
    #[error(
        "{}: tensor \"{tensor}\": found {found}, expected {expected}{}",
        .path.display(), hint_line(.hint)
    )]
    Tensor {
        /// File.
        path: Box<Path>,
        /// Name of the tensor.
        tensor: String,
        /// What was found.
        found: String,
        /// What is allowed.
        expected: Cow<'static, str>,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// A tensor that is needed is not there.
    #[error("{}: tensor \"{tensor}\" is missing{}", .path.display(), hint_line(.hint))]
    MissingTensor {
        /// File or folder.
        path: Box<Path>,
        /// Name of the tensor.
        tensor: String,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// A name that must be unique appears twice.
    #[error("{}: {what} \"{name}\" appears more than once", .path.display())]
    Duplicate {
        /// File.
        path: Box<Path>,
        /// What is named (`metadata key`, `tensor`).
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A text file (JSON) does not parse.
    #[error("{}: {reason}{}", .path.display(), hint_line(.hint))]
    Syntax {
        /// File.
        path: Box<Path>,
        /// The parser's words, with line and column.
        reason: String,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// Something is larger or deeper than this reader accepts from outside.
    #[error("{}: {what} is {found}, the limit is {limit}", .path.display())]
    Limit {
        /// File.
        path: Box<Path>,
        /// What is too large, with its unit.
        what: String,
        /// Size or depth found.
        found: u64,
        /// Largest allowed.
        limit: u64,
    },
    /// A model of a hub has no usable name, or is not what a command needs.
    #[error("{}: {reason}{}", Shown(.name), hint_line(.hint))]
    Hub {
        /// What was asked for.
        name: String,
        /// What is wrong with it.
        reason: String,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
    /// The path is no model, or not one that can be opened as it is.
    #[error("{}: {reason}{}", .path.display(), hint_line(.hint))]
    Source {
        /// The path that was given.
        path: Box<Path>,
        /// What is there instead.
        reason: String,
        /// Next step; empty when there is none.
        hint: Cow<'static, str>,
    },
}

fn hint_line(hint: &str) -> String {
    if hint.is_empty() {
        String::new()
    } else {
        format!("\nhint: {hint}")
    }
}

impl From<FormatError> for ferrum_types::Error {
    fn from(e: FormatError) -> Self {
        ferrum_types::Error::Model(e.to_string())
    }
}

impl FormatError {
    /// Wraps an I/O error with the file and what was tried.
    pub fn io(path: &Path, action: &'static str, e: &io::Error) -> Self {
        FormatError::Io {
            path: path.into(),
            action,
            kind: e.kind(),
            reason: e.to_string(),
        }
    }

    /// [`FormatError::Header`] with a hint (may be empty).
    pub fn header(
        path: &Path,
        what: &'static str,
        found: impl fmt::Display,
        expected: impl Into<Cow<'static, str>>,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        FormatError::Header {
            path: path.into(),
            what,
            found: found.to_string(),
            expected: expected.into(),
            hint: hint.into(),
        }
    }

    /// [`FormatError::Field`] without a hint; the field's name is escaped.
    pub fn field(
        path: &Path,
        field: &str,
        found: impl fmt::Display,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        FormatError::Field {
            path: path.into(),
            field: Shown(field).to_string(),
            found: found.to_string(),
            expected: expected.into(),
            hint: Cow::Borrowed(""),
        }
    }

    /// [`FormatError::MissingField`] without a hint.
    pub fn missing_field(path: &Path, field: &str, expected: impl Into<Cow<'static, str>>) -> Self {
        FormatError::MissingField {
            path: path.into(),
            field: Shown(field).to_string(),
            expected: expected.into(),
            hint: Cow::Borrowed(""),
        }
    }

    /// [`FormatError::Tensor`] without a hint; the tensor's name is escaped.
    pub fn tensor(
        path: &Path,
        tensor: &str,
        found: impl fmt::Display,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        FormatError::Tensor {
            path: path.into(),
            tensor: Shown(tensor).to_string(),
            found: found.to_string(),
            expected: expected.into(),
            hint: Cow::Borrowed(""),
        }
    }

    /// [`FormatError::Syntax`] without a hint.
    pub fn syntax(path: &Path, reason: impl fmt::Display) -> Self {
        FormatError::Syntax {
            path: path.into(),
            reason: reason.to_string(),
            hint: Cow::Borrowed(""),
        }
    }

    /// [`FormatError::Source`] with a hint (may be empty).
    pub fn source(
        path: &Path,
        reason: impl fmt::Display,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        FormatError::Source {
            path: path.into(),
            reason: reason.to_string(),
            hint: hint.into(),
        }
    }

    /// [`FormatError::Hub`] with a hint (may be empty).
    pub fn hub(name: &str, reason: impl fmt::Display, hint: impl Into<Cow<'static, str>>) -> Self {
        FormatError::Hub {
            name: name.to_owned(),
            reason: reason.to_string(),
            hint: hint.into(),
        }
    }

    pub(crate) fn duplicate(path: &Path, what: &'static str, name: &str) -> Self {
        FormatError::Duplicate {
            path: path.into(),
            what,
            name: Shown(name).to_string(),
        }
    }

    /// [`FormatError::Limit`].
    pub fn limit(path: &Path, what: impl fmt::Display, found: u64, limit: u64) -> Self {
        FormatError::Limit {
            path: path.into(),
            what: what.to_string(),
            found,
            limit,
        }
    }

    /// The same error with this hint, where the variant has room for one.
    pub fn with_hint(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        match &mut self {
            FormatError::Header { hint, .. }
            | FormatError::Field { hint, .. }
            | FormatError::MissingField { hint, .. }
            | FormatError::Tensor { hint, .. }
            | FormatError::MissingTensor { hint, .. }
            | FormatError::Syntax { hint, .. }
            | FormatError::Hub { hint, .. }
            | FormatError::Source { hint, .. } => *hint = text.into(),
            FormatError::Io { .. }
            | FormatError::Truncated { .. }
            | FormatError::Duplicate { .. }
            | FormatError::Limit { .. } => {}
        }
        self
    }
}

/// Text out of a file, made safe for a message: control characters escaped, cut to 96 characters.
#[derive(Debug)]
pub struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX: usize = 96;
        for (i, c) in self.0.chars().enumerate() {
            if i == MAX {
                return f.write_str("…");
            }
            if c.is_control() {
                write!(f, "{}", c.escape_unicode())?;
            } else {
                write!(f, "{c}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_file_field_found_and_expected() {
        let e = FormatError::field(
            Path::new("config.json"),
            "hidden_size",
            "string \"x\"",
            "a positive integer",
        );
        assert_eq!(
            e.to_string(),
            "config.json: field \"hidden_size\": found string \"x\", expected a positive integer"
        );
        assert!(
            e.clone()
                .with_hint("do this")
                .to_string()
                .ends_with("\nhint: do this")
        );
        assert_eq!(
            ferrum_types::Error::from(e.clone()),
            ferrum_types::Error::Model(e.to_string())
        );
    }

    #[test]
    fn names_from_files_cannot_flood_or_steer_a_terminal() {
        let long = "\u{1b}[2J".to_string() + &"x".repeat(10_000);
        let shown = Shown(&long).to_string();
        assert!(shown.starts_with("\\u{1b}[2J"));
        assert!(shown.chars().count() < 120);
    }
}
