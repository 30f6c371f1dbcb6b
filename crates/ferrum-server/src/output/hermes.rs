//! Hermes, Qwen and the demo model: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the
//! other.

use super::json::{self, Nesting};
use super::{OutputParser, Place, State};

pub(super) const CALL: &str = "<tool_call>";
pub(super) const CALL_END: &str = "</tool_call>";

impl OutputParser {
    pub(super) fn tagged_call(&mut self, end: bool) -> bool {
        if let Some((name, at)) = json::header(&self.held) {
            self.held.drain(..at);
            self.begin_call(name);
            self.begin(State::Arguments(Place::Tag, Nesting::default()));
            return true;
        }
        // The name may come last, or it is no call at all: only the whole tells.
        let (body, rest) = match self.held.find(CALL_END) {
            Some(at) => (&self.held[..at], Some(at + CALL_END.len())),
            None if end => (&*self.held, None),
            None => return false,
        };
        let rest = rest.unwrap_or(self.held.len());
        if let Some((name, arguments)) = json::whole_call(body) {
            self.begin_call(name);
            self.give_arguments(arguments.unwrap_or_else(|| json::NO_ARGUMENTS.into()));
            self.held.drain(..rest);
            return self.after_calls();
        }
        // The tags are content, too: what is between them is looked at no more.
        let rest = self.held.split_off(rest);
        let text = std::mem::replace(&mut self.held, rest);
        self.opener.push_str(&text);
        self.not_a_call()
    }
}
