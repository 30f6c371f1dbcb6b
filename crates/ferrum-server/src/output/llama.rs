//! Llama 3: `{"name": …, "parameters": {…}}` and nothing before it but maybe `<|python_tag|>`; several of
//! them with `;` or space in between.

use super::{OutputParser, Place, State};

pub(super) const CALL: &str = "<|python_tag|>";

impl OutputParser {
    /// After the mark: a call, or code for an interpreter that is not there.
    pub(super) fn opened_object(&mut self, end: bool) -> bool {
        if !self.skip_space() {
            return end && self.not_a_call();
        }
        if !self.held.starts_with('{') {
            return self.not_a_call();
        }
        self.begin(State::Call(Place::Object));
        true
    }

    pub(super) fn between_objects(&mut self, end: bool) -> bool {
        let rest = self
            .held
            .trim_start_matches([' ', '\t', '\r', '\n', ';', ',']);
        self.held.drain(..self.held.len() - rest.len());
        if self.held.starts_with('{') {
            self.opener.clear();
            self.begin(State::Call(Place::Object));
            return true;
        }
        if self.held.starts_with(CALL) {
            self.held.drain(..CALL.len());
            self.begin(State::Opened);
            return true;
        }
        if CALL.starts_with(&*self.held) && !end {
            return false;
        }
        self.after_calls()
    }
}
