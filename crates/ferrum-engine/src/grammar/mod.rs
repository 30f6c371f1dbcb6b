//! Answers that keep to a grammar: JSON, a JSON schema, a regular expression, a choice, Lark or GBNF.
//!
//! A [`GrammarCompiler`] belongs to a vocabulary and compiles a [`Grammar`] to a [`Constraint`], on the
//! thread of the caller. A request carries the constraint; each of its choices has a guide, which
//! determines for every next token whether the grammar allows it. Separate threads compute the masks while the
//! step runs whose logits they are for, so sampling rarely waits for them.
//!
//! A compiler keeps the grammars that it compiled last. What the masks of an answer take is charged to a
//! budget of that answer, and one that takes too much fails: others wait for its masks.
//!
//! Parsing and masks are `llguidance`'s. What is here: the vocabulary in its form, limits on what comes
//! from outside, and the languages that it lacks.
//!
//! A mask has the bits of the tokens after which the text may still become one of the grammar. Tokens
//! that are no text (special ones) are never part of a string; they are allowed where a grammar names
//! them. Tokens that end an answer are allowed exactly where the grammar may end. Which token is chosen
//! of those allowed is the model's business, so a text need not be split as the tokenizer would.

mod cache;
mod compile;
mod constraint;
mod error_text;
mod gbnf;
mod masks;
#[cfg(test)]
mod tests;
mod threads;

pub use compile::GrammarCompiler;
pub use constraint::Constraint;
pub(crate) use constraint::Guide;
pub(crate) use masks::{Mask, MaskThreads};

use serde_json::Value;

/// Most bytes of a grammar, all its parts together, schemas as compact JSON.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Deepest nesting of a schema or of parentheses.
pub const MAX_GRAMMAR_DEPTH: usize = 64;
/// Most that a schema or a grammar may count to: items, characters, repetitions.
pub const MAX_REPETITIONS: u64 = 10_000;
/// Memory for grammars that were compiled lately, by estimate.
pub const GRAMMAR_CACHE_BYTES: usize = 64 << 20;
/// Most parts of a grammar, and most strings of a choice.
pub const MAX_GRAMMAR_PARTS: usize = 1024;

/// What an answer has to be, whole.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON of a schema (2020-12 without references to elsewhere). Properties come in the order of the
    /// schema; between tokens of the JSON there is at most a space, or a line's end and an indent.
    JsonSchema {
        /// An object or a boolean.
        schema: Value,
        /// Whether keywords that cannot be enforced are passed over instead of refused.
        lenient: bool,
    },
    /// A regular expression for the whole text, in Rust's syntax without look-around.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// A grammar in `llguidance`'s form of Lark, whose `@name` stands for one of the parts.
    Lark {
        /// The rules, beginning with `start`.
        text: String,
        /// Further grammars, by name.
        parts: Vec<(String, Grammar)>,
    },
    /// A grammar in llama.cpp's form, beginning with `root`. What does not refer to itself becomes one
    /// regular expression, which takes as much text as it can.
    Gbnf(String),
}

impl Grammar {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Grammar::JsonSchema {
            schema: serde_json::json!({"type": "object"}),
            lenient: false,
        }
    }
}

/// Why there is no constraint, or why it ended an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// A limit is passed.
    #[error("{what}: found {found}, expected at most {limit}")]
    TooLarge {
        /// Of what there is too much.
        what: String,
        /// How much.
        found: u64,
        /// How much there may be.
        limit: u64,
    },
    /// It is not a grammar, or says what cannot be enforced.
    #[error("{0}")]
    Invalid(String),
    /// The tokenizer's vocabulary cannot be put into the form that masks need.
    #[error("this model's vocabulary cannot be held to a grammar: {0}")]
    Vocabulary(String),
    /// It is within the limits, but compiling it takes too long.
    #[error("it takes too much time to compile")]
    TooSlow,
    /// Others like that are being compiled.
    #[error("grammars of other requests take all the time that there is for compiling")]
    Busy,
}

/// A text as a Lark string.
pub fn lark_string(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    // Lark's strings have no raw DEL, JSON's do.
    quoted.replace('\u{7f}', "\\u007f")
}

/// A special token in Lark.
pub fn lark_token(token: ferrum_types::TokenId) -> String {
    format!("<[{token}]>")
}

fn check_size(what: &str, found: u64, limit: u64) -> Result<(), GrammarError> {
    if found <= limit {
        return Ok(());
    }
    Err(GrammarError::TooLarge {
        what: what.into(),
        found,
        limit,
    })
}
