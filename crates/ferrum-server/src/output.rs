//! What a chat model writes, told apart: reasoning, content and tool calls.
//!
//! Models write all three into one text, with tags around what is not content: `<think>` for reasoning
//! (DeepSeek, Qwen 3), `<tool_call>` around `{"name": …, "arguments": {…}}` for calls (Hermes, Qwen, the
//! demo model). The text comes in pieces that end anywhere. What is given out, put together, does not
//! depend on where they end: text is held back for as long as it may be the beginning of a tag.

use serde_json::Value;

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
pub(crate) const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looks {
    /// Whether there may be reasoning at the beginning.
    pub(crate) reasoning: bool,
    /// Whether the prompt has opened the reasoning already.
    pub(crate) begins_thinking: bool,
    /// How many tool calls there may be; further ones are left out.
    pub(crate) max_calls: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the first text, where reasoning may begin.
    Start,
    Think,
    Text,
    /// After `<tool_call>`, before the arguments.
    Call,
    Arguments(Nesting),
    /// After the arguments, up to the closing tag.
    Tail,
}

/// Where in a JSON value a scan is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Nesting {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct OutputParser {
    looks: Looks,
    state: State,
    /// Text of which it is not certain yet what it is.
    held: String,
    /// Space at the beginning of what comes is not part of it.
    trims: bool,
    calls: usize,
    out: Vec<Delta>,
}

impl OutputParser {
    pub(crate) fn new(looks: Looks) -> Self {
        let state = match looks {
            Looks {
                begins_thinking: true,
                ..
            } => State::Think,
            Looks {
                reasoning: true, ..
            } => State::Start,
            _ => State::Text,
        };
        Self {
            looks,
            state,
            held: String::new(),
            trims: state == State::Think,
            calls: 0,
            out: Vec::new(),
        }
    }

    /// Takes the next piece.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Delta> {
        self.held.push_str(text);
        while self.advance(false) {}
        std::mem::take(&mut self.out)
    }

    /// No more will come.
    pub(crate) fn finish(&mut self) -> Vec<Delta> {
        while self.advance(true) {}
        std::mem::take(&mut self.out)
    }

    /// Whether the answer called a tool.
    pub(crate) fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Takes one stretch off what is held, and says whether there may be more to take.
    fn advance(&mut self, end: bool) -> bool {
        match self.state {
            State::Start => self.start(end),
            State::Think => self.stretch(THINK_END, State::Text, end),
            State::Text if self.looks.max_calls > 0 => self.stretch(CALL, State::Call, end),
            State::Text => {
                let text = std::mem::take(&mut self.held);
                self.give(text);
                false
            }
            State::Call => self.call(end),
            State::Arguments(nesting) => self.arguments(nesting),
            State::Tail => match self.held.find(CALL_END) {
                Some(at) => {
                    self.held.drain(..at + CALL_END.len());
                    self.after_call();
                    true
                }
                None => false,
            },
        }
    }

    fn start(&mut self, end: bool) -> bool {
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(THINK) {
            self.held = rest.to_owned();
            self.trims = true;
            self.state = State::Think;
        } else if end || !THINK.starts_with(text) {
            self.state = State::Text;
        } else {
            return false;
        }
        true
    }

    /// Text up to a tag, without the space before it.
    fn stretch(&mut self, tag: &str, then: State, end: bool) -> bool {
        if let Some(at) = self.held.find(tag) {
            let text = self.held[..at].trim_end().to_owned();
            self.held.drain(..at + tag.len());
            self.give(text);
            self.state = then;
            self.trims = then == State::Text;
            return true;
        }
        let keep = match end {
            // After a call, space at the end is the model's way to part it from nothing.
            true => 0,
            false => {
                let tail = overlap(&self.held, tag);
                let before = &self.held[..self.held.len() - tail];
                tail + before.len() - before.trim_end().len()
            }
        };
        let rest = self.held.split_off(self.held.len() - keep);
        let text = std::mem::replace(&mut self.held, rest);
        self.give(text);
        false
    }

    /// Gives text of the current kind out.
    fn give(&mut self, text: String) {
        let text = match self.trims {
            true => text.trim_start().to_owned(),
            false => text,
        };
        if text.is_empty() {
            return;
        }
        self.trims = false;
        self.out.push(match self.state {
            State::Think => Delta::Reasoning(text),
            _ => Delta::Content(text),
        });
    }

    fn after_call(&mut self) {
        self.state = State::Text;
        self.trims = true;
    }

    fn call(&mut self, end: bool) -> bool {
        if let Some((name, at)) = header(&self.held) {
            self.held.drain(..at);
            self.begin_call(name);
            self.state = State::Arguments(Nesting::default());
            return true;
        }
        // The name may come last, or it is no call at all: only the whole tells.
        let (body, rest) = match self.held.find(CALL_END) {
            Some(at) => (&self.held[..at], Some(at + CALL_END.len())),
            None if end => (&*self.held, None),
            None => return false,
        };
        match whole_call(body) {
            Some((name, arguments)) => {
                self.begin_call(name);
                self.give_arguments(arguments);
                self.held.drain(..rest.unwrap_or(self.held.len()));
                self.after_call();
            }
            None => {
                // But for space before it, nothing that the model said is lost.
                let rest = self.held.split_off(rest.unwrap_or(self.held.len()));
                let text = std::mem::replace(&mut self.held, rest);
                self.state = State::Text;
                self.trims = false;
                self.give(format!("{CALL}{text}"));
            }
        }
        !self.held.is_empty()
    }

    fn begin_call(&mut self, name: String) {
        if self.calls < self.looks.max_calls {
            self.out.push(Delta::CallBegins(self.calls, name));
        }
        self.calls += 1;
    }

    fn give_arguments(&mut self, text: String) {
        if !text.is_empty() && self.calls <= self.looks.max_calls {
            self.out.push(Delta::CallArguments(self.calls - 1, text));
        }
    }

    /// Arguments up to the brace that closes them.
    fn arguments(&mut self, mut nesting: Nesting) -> bool {
        for (at, byte) in self.held.bytes().enumerate() {
            // A `<` is in no JSON outside of strings: the call ends unfinished.
            if !nesting.in_string && byte == b'<' {
                return self.end_arguments(at);
            }
            if nesting.step(byte) {
                return self.end_arguments(at + 1);
            }
        }
        self.state = State::Arguments(nesting);
        let text = std::mem::take(&mut self.held);
        self.give_arguments(text);
        false
    }

    fn end_arguments(&mut self, at: usize) -> bool {
        let rest = self.held.split_off(at);
        let text = std::mem::replace(&mut self.held, rest);
        self.give_arguments(text);
        self.state = State::Tail;
        true
    }
}

impl Nesting {
    /// Moves on by a byte; whether the value ends with it.
    fn step(&mut self, byte: u8) -> bool {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// The name of a call that begins as calls do, and where its arguments' brace is.
fn header(text: &str) -> Option<(String, usize)> {
    let mut rest = text;
    for expected in ["{", "\"name\"", ":"] {
        rest = rest.trim_start().strip_prefix(expected)?;
    }
    rest = rest.trim_start();
    let mut names = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    // A tag inside of a name is told from the end of the call only when all of it is there.
    let name = names.next()?.ok().filter(|name| !name.contains('<'))?;
    rest = &rest[names.byte_offset()..];
    for expected in [",", "\"arguments\"", ":"] {
        rest = rest.trim_start().strip_prefix(expected)?;
    }
    rest = rest.trim_start();
    rest.starts_with('{')
        .then(|| (name, text.len() - rest.len()))
}

/// A whole call in whatever order, with its arguments as JSON text.
fn whole_call(text: &str) -> Option<(String, String)> {
    let call: Value = serde_json::from_str(text.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = call.get("arguments").or_else(|| call.get("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Some((name, arguments))
}

/// Bytes of the longest end of `text` that `tag` begins with.
fn overlap(text: &str, tag: &str) -> usize {
    let most = text.len().min(tag.len() - 1);
    let fits = |&n: &usize| text.as_bytes().ends_with(&tag.as_bytes()[..n]);
    (1..=most).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests;
