//! Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and of newer models
//! `[TOOL_CALLS]name[ARGS]{…}`, again for each call, with `[CALL_ID]id` before `[ARGS]` from some.

use super::json::Nesting;
use super::{OutputParser, Place, State};

pub(super) const CALL: &str = "[TOOL_CALLS]";
pub(super) const ARGS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";

impl OutputParser {
    pub(super) fn opened_calls(&mut self, end: bool) -> bool {
        if !self.skip_space() {
            return end && self.not_a_call();
        }
        if !self.held.starts_with('[') {
            self.begin(State::Call(Place::Named));
            return true;
        }
        let rest = self.held[1..].trim_start();
        if rest.is_empty() {
            return end && self.not_a_call();
        }
        if !rest.starts_with('{') {
            return self.not_a_call();
        }
        self.opener.push('[');
        self.held.drain(..self.held.len() - rest.len());
        self.begin(State::Call(Place::List));
        true
    }

    /// A name, and where its arguments begin.
    pub(super) fn named_call(&mut self, end: bool) -> bool {
        let part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let length = |text: &str| text.bytes().take_while(|&byte| part(byte)).count();
        let name = length(&self.held);
        let mut rest = &self.held[name..];
        if name == 0 {
            return self.not_a_call();
        }
        if let Some(after) = rest.strip_prefix(CALL_ID) {
            rest = &after[length(after)..];
        } else if CALL_ID.starts_with(rest) {
            return end && self.not_a_call();
        }
        let Some(arguments) = rest.strip_prefix(ARGS) else {
            return (end || !ARGS.starts_with(rest)) && self.not_a_call();
        };
        let arguments = arguments.trim_start();
        match arguments.bytes().next() {
            None => return end && self.not_a_call(),
            Some(b'{') => {}
            Some(_) => return self.not_a_call(),
        }
        let rest = arguments.to_owned();
        self.held.truncate(name);
        let name = std::mem::replace(&mut self.held, rest);
        self.begin_call(name);
        self.begin(State::Arguments(Place::Named, Nesting::default()));
        true
    }

    pub(super) fn between_items(&mut self, end: bool) -> bool {
        if !self.skip_space() {
            return false;
        }
        let rest = self.held.strip_prefix(',').map(str::trim_start);
        match rest {
            Some("") if !end => false,
            Some(rest) if rest.starts_with('{') => {
                self.held.drain(..self.held.len() - rest.len());
                self.opener.clear();
                self.begin(State::Call(Place::List));
                true
            }
            Some(_) => self.after_calls(),
            None => {
                if self.held.starts_with(']') {
                    self.held.drain(..1);
                }
                self.after_calls()
            }
        }
    }
}
