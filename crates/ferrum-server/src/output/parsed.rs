//! A generated text parsed to its end, for tests and fuzz targets: the server sends deltas as they come.

use super::{Delta, OutputFormat, OutputParser};

/// The parts of a generated text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedOutput {
    /// The text that is neither reasoning nor a call.
    pub content: String,
    /// The reasoning.
    pub reasoning: String,
    /// Names and arguments of tool calls.
    pub calls: Vec<(String, String)>,
}

impl ParsedOutput {
    /// Parses a text that comes in `chunks`. `cut`: generation stopped at its limit.
    ///
    /// # Panics
    /// If calls are not numbered one by one, or arguments belong to a call that is not the last.
    pub(crate) fn of<'a>(
        format: &OutputFormat,
        chunks: impl IntoIterator<Item = &'a str>,
        cut: bool,
    ) -> Self {
        let mut parser = OutputParser::new(format.clone());
        let mut deltas = Vec::new();
        for chunk in chunks {
            deltas.extend(parser.push(chunk));
        }
        deltas.extend(parser.finish(cut));
        let mut all = Self::default();
        for delta in deltas {
            match delta {
                Delta::Content(text) => all.content += &text,
                Delta::Reasoning(text) => all.reasoning += &text,
                Delta::CallBegins(index, name) => {
                    assert_eq!(index, all.calls.len(), "calls are numbered one by one");
                    all.calls.push((name, String::new()));
                }
                Delta::CallArguments(index, text) => {
                    assert_eq!(index + 1, all.calls.len(), "arguments of the last call");
                    all.calls[index].1 += &text;
                }
            }
        }
        all
    }
}
