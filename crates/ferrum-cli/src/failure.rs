//! What ends a command: a sentence for a person.

use std::fmt;

/// Why a command ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A sentence, possibly with a `hint:` line.
    Message(String),
    /// stdout was closed.
    BrokenPipe,
}

/// Result of a command.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Failure::Message(message.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Message(message) => f.write_str(message),
            Failure::BrokenPipe => f.write_str("standard output is closed"),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        match e.kind() {
            std::io::ErrorKind::BrokenPipe => Failure::BrokenPipe,
            _ => Failure::new(e.to_string()),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(e: serde_json::Error) -> Self {
        match e.io_error_kind() {
            Some(std::io::ErrorKind::BrokenPipe) => Failure::BrokenPipe,
            _ => Failure::new(e.to_string()),
        }
    }
}

macro_rules! message {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Failure {
            fn from(e: $error) -> Self {
                Failure::new(e.to_string())
            }
        }
    )*};
}
message!(
    ferrum_types::Error,
    ferrum_client::ClientError,
    ferrum_formats::FormatError,
    ferrum_formats::tokenizer::TokenizerError,
    ferrum_formats::chat_template::TemplateError,
);
