//! Sections of calls in which a marker stands before the name, another before the arguments, and a third behind
//! them: the forms of DeepSeek and Kimi.

use super::deltas::Deltas;
use super::json::Ended;
use super::pending_text::PendingText;
use super::reader::{CallReader, Step};

/// Most bytes before a call's arguments.
const MAX_HEADER_BYTES: usize = 512;

/// What stands between a call's marker and its arguments.
pub(super) enum Header {
    /// The name, and where the arguments' brace is.
    Of(String, usize),
    /// More has to come to know.
    Begun,
    NoCall,
}

/// The markers of a form.
#[derive(Clone, Copy, Debug)]
pub(super) struct SectionMarkers {
    pub(super) call: &'static str,
    /// What may stand behind the arguments, before `call_end`.
    pub(super) fence: Option<&'static str>,
    pub(super) call_end: &'static str,
    pub(super) end: &'static str,
    pub(super) header: fn(&str) -> Header,
}

#[derive(Debug)]
enum State {
    /// Where a call begins or the section ends; whether there was one.
    Between(bool),
    Header,
    Arguments,
    Fence,
    CallEnd,
}

#[derive(Debug)]
pub(super) struct SectionReader {
    markers: SectionMarkers,
    state: State,
}

impl SectionReader {
    /// `called`: after the marker of a call, without one that begins the section.
    pub(super) fn new(markers: SectionMarkers, called: bool) -> Self {
        let state = match called {
            true => State::Header,
            false => State::Between(false),
        };
        Self { markers, state }
    }

    fn between(&mut self, any: bool, held: &mut PendingText, end: bool) -> Step {
        match held.skip_marker(self.markers.call, end) {
            None => return Step::Wait,
            Some(true) => {
                self.state = State::Header;
                return Step::Again;
            }
            Some(false) if !any => {
                // Nothing at all, at the end of the text or in a section that is empty.
                return Step::NotACall;
            }
            Some(false) => {}
        }
        match held.skip_marker(self.markers.end, end) {
            None => Step::Wait,
            Some(_) => Step::Over,
        }
    }
}

impl CallReader for SectionReader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        self.state = match self.state {
            State::Between(any) => {
                // Both markers may begin alike.
                let text = held.text().trim_start();
                let begun = |marker: &str| marker.len() > text.len() && marker.starts_with(text);
                if !end && (begun(self.markers.call) || any && begun(self.markers.end)) {
                    return Step::Wait;
                }
                return self.between(any, held, end);
            }
            State::Header => {
                let (text, is_cut) = held.front(MAX_HEADER_BYTES);
                match (self.markers.header)(text) {
                    Header::Of(name, at) => {
                        held.commit(at);
                        deltas.begin_call(name);
                        State::Arguments
                    }
                    Header::Begun if !is_cut => return Step::Wait,
                    Header::Begun | Header::NoCall => return Step::NotACall,
                }
            }
            State::Arguments => match deltas.take_arguments(held) {
                None => return Step::Wait,
                Some(Ended::Whole) if self.markers.fence.is_some() => State::Fence,
                Some(_) => State::CallEnd,
            },
            State::Fence => {
                let fence = self.markers.fence.unwrap_or_default();
                match held.skip_marker(fence, end) {
                    None => return Step::Wait,
                    Some(_) => State::CallEnd,
                }
            }
            State::CallEnd => match held.skip_marker(self.markers.call_end, end) {
                None => return Step::Wait,
                Some(_) => State::Between(true),
            },
        };
        Step::Again
    }
}
