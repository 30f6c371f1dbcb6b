//! Parses model output into reasoning, content and tool calls.
//!
//! Models write all three into one text, with markers around what is not content: those of [`thinking`] around
//! reasoning, and for calls those of their [`CallFormat`]. The text comes in chunks. Results do not depend on chunk
//! borders. Text that may be the start of a marker is held back, at most [`MAX_HELD_BYTES`]. Text that looks like a call
//! and is not one is content. Only markers, space around them and unknown members of calls are dropped.
//!
//! Each format is a file with a [`reader`] of its calls and the rules of its grammar, and a row in the table of
//! [`format`](mod@format). The arguments of a call are the text of a JSON object whatever the model wrote ([`json`]), unless
//! the answer was cut off in them.

mod deepseek;
mod definition;
mod deltas;
mod format;
mod function;
mod glm;
mod grammar;
mod granite;
mod harmony;
mod hermes;
mod json;
mod kimi;
mod llama;
mod mistral;
mod mistral_args;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(test, allow(unreachable_pub, reason = "fuzz targets reach it"))]
mod parsed;
mod pending_text;
mod phi;
mod pythonic;
mod qwen_coder;
mod reader;
mod section;
mod thinking;
mod values;

pub use format::CallFormat;
pub(crate) use function::Function;
pub(crate) use grammar::{Markers, marker_regex};
pub(crate) use kimi::name_calls;
#[cfg(test)]
use parsed::ParsedOutput;
#[cfg(feature = "fuzzing")]
pub use parsed::ParsedOutput;
pub(crate) use thinking::Thinking;

use deltas::Deltas;
use pending_text::{PendingText, PrefixMatch, begins};
use reader::{CallReader, Step};
use std::sync::Arc;

/// Most bytes of a call that are held back until it is certain that it is one.
const MAX_HELD_BYTES: usize = 256 << 10;

/// Most bytes that are looked at together.
const MAX_STEP_BYTES: usize = 4 << 10;

/// A part of an answer of which it is certain what it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delta {
    Content(String),
    Reasoning(String),
    /// A call of this function begins; calls count from 0.
    CallBegins(usize, String),
    /// More of a call's arguments, as JSON text.
    CallArguments(usize, String),
}

/// What to look for in an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OutputFormat {
    /// Whether there may be reasoning at the beginning.
    pub(crate) reasoning: bool,
    /// Whether the prompt has opened the reasoning already.
    pub(crate) begins_thinking: bool,
    /// The markers around reasoning.
    pub(crate) thinking: Thinking,
    /// How tool calls are written.
    pub(crate) format: CallFormat,
    /// How many tool calls there may be; further ones are left out.
    pub(crate) max_calls: usize,
    /// The functions that may be called, whose schemas say what arguments are.
    pub(crate) functions: Arc<[Function]>,
}

impl OutputFormat {
    /// The markers that have to be seen if the vocabulary has them as special tokens.
    pub(crate) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let thinking = [self.thinking.open, self.thinking.close].into_iter();
        let calls = self.format.markers().iter().copied();
        let shows_calls = self.max_calls > 0 || self.format.has_channels();
        let reasoning = self.reasoning;
        let thinking = thinking.filter(move |_| reasoning);
        thinking.chain(calls.filter(move |_| shows_calls))
    }
}

#[derive(Debug)]
enum State {
    /// Before the first text, where reasoning may begin.
    Start,
    Think,
    Text,
    /// In calls, or in an answer that is all messages.
    Calls(Box<dyn CallReader>),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct OutputParser {
    output_format: OutputFormat,
    state: State,
    held: PendingText,
    /// Whether nothing but space was content so far.
    at_start: bool,
    deltas: Deltas,
}

impl OutputParser {
    pub(crate) fn new(output_format: OutputFormat) -> Self {
        let state = match &output_format {
            output_format if output_format.format.has_channels() => {
                let definition = output_format.format.definition();
                State::Calls((definition.reader)(output_format, ""))
            }
            output_format if output_format.begins_thinking => State::Think,
            output_format if output_format.reasoning => State::Start,
            _ => State::Text,
        };
        let mut deltas = Deltas::new(output_format.max_calls);
        deltas.trim(matches!(state, State::Think));
        Self {
            output_format,
            state,
            held: PendingText::default(),
            at_start: true,
            deltas,
        }
    }

    /// Takes the next piece.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Delta> {
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.ceil_char_boundary(MAX_STEP_BYTES));
            self.held.push(piece);
            while self.advance(false) {}
            rest = after;
        }
        self.deltas.take()
    }

    /// No more will come. Arguments that have not ended are completed, unless the answer was `cut`: then a client
    /// has to see that something is missing.
    pub(crate) fn finish(&mut self, cut: bool) -> Vec<Delta> {
        while self.advance(true) {}
        if !cut {
            self.deltas.end_call();
        }
        self.deltas.take()
    }

    /// Whether the answer called a tool.
    pub(crate) fn has_calls(&self) -> bool {
        self.deltas.calls() > 0
    }

    /// Consumes one section of the held text, and returns whether there may be more.
    fn advance(&mut self, end: bool) -> bool {
        match &mut self.state {
            State::Start => self.start(end),
            State::Think => self.think(end),
            State::Text => self.text(end),
            State::Calls(reader) => match reader.read(&mut self.held, &mut self.deltas, end) {
                Step::Again => true,
                Step::Wait if !end && self.held.text().len() <= MAX_HELD_BYTES => false,
                Step::Wait | Step::NotACall => {
                    if !end {
                        self.deltas.end_call();
                    }
                    self.deltas.trim(false);
                    self.deltas.content(&self.held.rollback());
                    self.back_to_text()
                }
                Step::Over => {
                    self.held.commit(0);
                    self.deltas.trim(true);
                    self.back_to_text()
                }
            },
        }
    }

    fn start(&mut self, end: bool) -> bool {
        let open = self.output_format.thinking.open;
        let text = self.held.text().trim_start();
        let space = self.held.text().len() - text.len();
        self.state = match begins(text, open) {
            PrefixMatch::Yes => {
                self.held.commit(space + open.len());
                self.deltas.trim(true);
                State::Think
            }
            PrefixMatch::Maybe if !end => return false,
            _ => State::Text,
        };
        true
    }

    fn think(&mut self, end: bool) -> bool {
        let (text, marker) = self.held.until(&[self.output_format.thinking.close], end);
        self.deltas.reasoning(&text);
        if marker.is_some() {
            self.held.commit(0);
            self.deltas.trim(true);
            self.state = State::Text;
        }
        marker.is_some()
    }

    fn text(&mut self, end: bool) -> bool {
        if self.output_format.max_calls == 0 {
            self.deltas.content(self.held.text());
            self.held.commit(self.held.text().len());
            return false;
        }
        let definition = self.output_format.format.definition();
        if let Some(bare) = definition.bare.filter(|_| self.at_start) {
            let text = self.held.text().trim_start();
            let space = self.held.text().len() - text.len();
            match text.chars().next() {
                None if !end => return false,
                Some(first) if first == bare => {
                    self.held.consume(space);
                    self.state = State::Calls((definition.reader)(&self.output_format, ""));
                    return true;
                }
                _ => self.at_start = false,
            }
        }
        let (text, marker) = self.held.until(definition.openers, end);
        self.deltas.content(&text);
        if let Some(marker) = marker {
            self.state = State::Calls((definition.reader)(&self.output_format, marker));
        }
        marker.is_some()
    }

    fn back_to_text(&mut self) -> bool {
        self.state = State::Text;
        self.at_start = false;
        !self.held.text().is_empty()
    }
}

#[cfg(test)]
mod tests;
