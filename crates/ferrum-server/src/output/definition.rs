//! What a format of tool calls has to define.
//!
//! The formats depend on this module and the table in [`format`](mod@super::format) depends on the formats.

use super::OutputFormat;
use super::grammar::{CallGrammar, Rules};
use super::reader::CallReader;

/// The definition of a format: how calls are recognised, read and constrained.
#[derive(Clone, Copy)]
pub(super) struct FormatDefinition {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// Texts of chat templates that speak of it: all of one list.
    pub(super) template: &'static [&'static [&'static str]],
    /// The markers that begin calls; a grammar has the first.
    pub(super) openers: &'static [&'static str],
    /// All markers, each of which may be a special token.
    pub(super) markers: &'static [&'static str],
    /// What calls begin with without a marker, at the beginning of an answer.
    pub(super) bare: Option<char>,
    /// A reader of what follows the given opener, or of the answer from its beginning (with calls that have no
    /// marker, and with messages in channels).
    pub(super) reader: fn(&OutputFormat, &'static str) -> Box<dyn CallReader>,
    /// The rules of its calls in a grammar.
    pub(super) rules: fn(&mut CallGrammar<'_>) -> Rules,
}
