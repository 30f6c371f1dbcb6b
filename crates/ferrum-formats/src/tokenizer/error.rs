//! What can be wrong with a vocabulary or with a text given to it.

use crate::FormatError;
use std::path::PathBuf;

/// Errors of loading and using a [`Tokenizer`](super::Tokenizer).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A folder holds no `tokenizer.json`.
    #[error(
        "no tokenizer.json in {}\nhint: save it with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
        path.display()
    )]
    NoTokenizerFile {
        /// The folder.
        path: PathBuf,
    },
    /// A file is there but does not hold what it should.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The GGUF file's metadata is wrong; see [`FormatError`].
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A GGUF vocabulary of a kind that is not known here.
    #[error(
        "tokenizer.ggml.model is `{found}`, expected one of gpt2, llama, bert, t5, gemma4{}",
        if .hint.is_empty() { String::new() } else { format!("\nhint: {}", .hint) }
    )]
    UnknownModel {
        /// The value found.
        found: String,
        /// What the user can do; empty when there is nothing.
        hint: String,
    },
    /// A GGUF vocabulary whose parts contradict each other.
    #[error("{field}: {reason}")]
    BadVocab {
        /// The metadata key at fault.
        field: &'static str,
        /// What was found and what was expected.
        reason: String,
    },
    /// A text longer than the tokenizer takes in one call.
    #[error("the text has {found} bytes, a call takes at most {limit}")]
    TextTooLong {
        /// Bytes given.
        found: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The tokenizer could not encode or decode; carries the reason.
    #[error("cannot tokenize: {0}")]
    Encode(String),
}
