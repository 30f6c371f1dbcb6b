//! What a chat model writes, told apart: reasoning, content and tool calls.
//!
//! Models write all three into one text, with marks around what is not content: `<think>` for reasoning
//! (DeepSeek, Qwen 3), and for calls what their [`CallFormat`] says. The text comes in pieces that end
//! anywhere. What is given out, put together, does not depend on where they end: text is held back for
//! as long as it may be the beginning of a mark. Nothing that the model said is lost but space around
//! marks: what begins like a call and is none is content.

mod format;
mod hermes;
mod json;
mod llama;
mod mistral;

pub use format::CallFormat;
pub(crate) use format::{Function, Marks, mark_regex};

use json::Nesting;

pub(crate) const THINK: &str = "<think>";
pub(crate) const THINK_END: &str = "</think>";

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
    /// How tool calls are written.
    pub(crate) format: CallFormat,
    /// How many tool calls there may be; further ones are left out.
    pub(crate) max_calls: usize,
}

/// What a call is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// An object between tags (Hermes).
    Tag,
    /// An object by itself (Llama).
    Object,
    /// An object of an array (Mistral).
    List,
    /// A name and then the arguments (Mistral).
    Named,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the first text, where reasoning may begin.
    Start,
    Think,
    Text,
    /// After the mark that begins calls.
    Opened,
    /// In a call, before its arguments.
    Call(Place),
    Arguments(Place, Nesting),
    /// After the arguments, up to what closes the call.
    Tail(Place, Nesting),
    /// After a call, where another may follow.
    Between(Place),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct OutputParser {
    looks: Looks,
    state: State,
    /// Text of which it is not certain yet what it is.
    held: String,
    /// How much of what is held has been looked at, and where in a JSON value that is.
    scanned: (usize, Nesting),
    /// What began a call, in case it is none.
    opener: String,
    /// Whether nothing but space was content so far.
    at_start: bool,
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
            scanned: Default::default(),
            opener: String::new(),
            at_start: true,
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
            State::Text => self.text(end),
            State::Opened => self.opened(end),
            State::Call(Place::Tag) => self.tagged_call(end),
            State::Call(Place::Named) => self.named_call(end),
            State::Call(place) => self.object_call(place, end),
            State::Arguments(place, nesting) => self.arguments(place, nesting),
            State::Tail(place, nesting) => self.tail(place, nesting),
            State::Between(place) => self.between(place, end),
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

    fn text(&mut self, end: bool) -> bool {
        if self.looks.max_calls == 0 {
            let text = std::mem::take(&mut self.held);
            self.give(text);
            return false;
        }
        if self.looks.format == CallFormat::Llama && self.at_start {
            match self.held.trim_start().bytes().next() {
                None if !end => return false,
                Some(b'{') => {
                    self.held
                        .drain(..self.held.len() - self.held.trim_start().len());
                    self.opener.clear();
                    self.begin(State::Call(Place::Object));
                    return true;
                }
                _ => self.at_start = false,
            }
        }
        self.stretch(self.looks.format.opener(), State::Opened, end)
    }

    fn opened(&mut self, end: bool) -> bool {
        self.opener = self.looks.format.opener().to_owned();
        match self.looks.format {
            CallFormat::Hermes => {
                self.begin(State::Call(Place::Tag));
                true
            }
            CallFormat::Llama => self.opened_object(end),
            CallFormat::Mistral | CallFormat::MistralArgs => self.opened_calls(end),
        }
    }

    fn begin(&mut self, state: State) {
        self.state = state;
        self.scanned = Default::default();
    }

    /// Text up to a mark, without the space before it.
    fn stretch(&mut self, mark: &str, then: State, end: bool) -> bool {
        if let Some(at) = self.held.find(mark) {
            let text = self.held[..at].trim_end().to_owned();
            self.held.drain(..at + mark.len());
            self.give(text);
            self.begin(then);
            self.trims = then == State::Text;
            return true;
        }
        let keep = match end {
            // After a call, space at the end is the model's way to part it from nothing.
            true => 0,
            false => {
                let tail = overlap(&self.held, mark);
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

    /// What began like a call is none: its beginning is content, and so is what follows, as it comes.
    fn not_a_call(&mut self) -> bool {
        self.begin(State::Text);
        self.at_start = false;
        self.trims = false;
        let opener = std::mem::take(&mut self.opener);
        self.give(opener);
        !self.held.is_empty()
    }

    fn after_calls(&mut self) -> bool {
        self.begin(State::Text);
        self.at_start = false;
        self.trims = true;
        !self.held.is_empty()
    }

    fn begin_call(&mut self, name: String) {
        if self.calls < self.looks.max_calls {
            self.out.push(Delta::CallBegins(self.calls, name));
        }
        self.calls += 1;
        self.opener.clear();
    }

    fn give_arguments(&mut self, text: String) {
        if !text.is_empty() && self.calls <= self.looks.max_calls {
            self.out.push(Delta::CallArguments(self.calls - 1, text));
        }
    }

    /// A call that is an object, by itself or in an array.
    fn object_call(&mut self, place: Place, end: bool) -> bool {
        if let Some((name, at)) = json::header(&self.held) {
            self.held.drain(..at);
            self.begin_call(name);
            self.begin(State::Arguments(place, Nesting::default()));
            return true;
        }
        let (from, mut nesting) = self.scanned;
        for (at, byte) in self.held.bytes().enumerate().skip(from) {
            if !nesting.step(byte) {
                continue;
            }
            // Without a mark, only arguments tell a call from an answer in JSON.
            let bare = place == Place::Object && self.opener.is_empty();
            let call = json::whole_call(&self.held[..=at]);
            let Some((name, arguments)) = call.filter(|(_, args)| args.is_some() || !bare) else {
                return self.not_a_call();
            };
            self.held.drain(..=at);
            self.begin_call(name);
            self.give_arguments(arguments.unwrap_or_else(|| json::NO_ARGUMENTS.into()));
            self.begin(State::Between(place));
            return true;
        }
        self.scanned = (self.held.len(), nesting);
        end && self.not_a_call()
    }

    /// Arguments up to the brace that closes them.
    fn arguments(&mut self, place: Place, mut nesting: Nesting) -> bool {
        for (at, byte) in self.held.bytes().enumerate() {
            // A `<` is in no JSON outside of strings: the call ends unfinished.
            let broken = place == Place::Tag && nesting.is_outside_strings() && byte == b'<';
            if broken || nesting.step(byte) {
                let rest = self.held.split_off(at + usize::from(!broken));
                let text = std::mem::replace(&mut self.held, rest);
                self.give_arguments(text);
                self.begin(match place {
                    Place::Named => State::Between(place),
                    _ => State::Tail(place, Nesting::inside()),
                });
                return true;
            }
        }
        self.state = State::Arguments(place, nesting);
        let text = std::mem::take(&mut self.held);
        self.give_arguments(text);
        false
    }

    /// What is left of a call.
    fn tail(&mut self, place: Place, mut nesting: Nesting) -> bool {
        let end = match place {
            Place::Tag => {
                let tag = hermes::CALL_END;
                self.held.find(tag).map(|at| at + tag.len())
            }
            _ => {
                let mut bytes = self.held.bytes();
                let end = bytes.position(|byte| nesting.step(byte));
                end.map(|at| at + 1)
            }
        };
        match end {
            Some(end) => {
                self.held.drain(..end);
                self.begin(State::Between(place));
                true
            }
            None if place == Place::Tag => false,
            None => {
                self.held.clear();
                self.state = State::Tail(place, nesting);
                false
            }
        }
    }

    fn between(&mut self, place: Place, end: bool) -> bool {
        match place {
            Place::Tag | Place::Named => self.after_calls(),
            Place::Object => self.between_objects(end),
            Place::List => self.between_items(end),
        }
    }

    /// Leaves out space, and says whether anything is there.
    fn skip_space(&mut self) -> bool {
        self.held
            .drain(..self.held.len() - self.held.trim_start().len());
        !self.held.is_empty()
    }
}

/// Bytes of the longest end of `text` that `mark` begins with.
fn overlap(text: &str, mark: &str) -> usize {
    let most = text.len().min(mark.len() - 1);
    let fits = |&n: &usize| text.as_bytes().ends_with(&mark.as_bytes()[..n]);
    (1..=most).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests;
