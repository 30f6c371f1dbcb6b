//! What an answer was told apart into so far.

use super::Delta;
use super::json::{Ended, ObjectScan};
use super::pending_text::PendingText;

/// Takes what readers find, in the order in which it was said.
#[derive(Debug, Default)]
pub(super) struct Deltas {
    out: Vec<Delta>,
    /// Space at the beginning of what comes is not part of it.
    trims: bool,
    max_calls: usize,
    calls: usize,
    /// Where in the arguments of the last call it is, until they have ended.
    scan: Option<ObjectScan>,
}

impl Deltas {
    pub(super) fn new(max_calls: usize) -> Self {
        Self {
            max_calls,
            ..Self::default()
        }
    }

    /// Takes what was added since the last time.
    pub(super) fn take(&mut self) -> Vec<Delta> {
        std::mem::take(&mut self.out)
    }

    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    pub(super) fn may_call(&self) -> bool {
        self.max_calls > 0
    }

    /// Leaves out space before the next text, or not.
    pub(super) fn trim(&mut self, trims: bool) {
        self.trims = trims;
    }

    pub(super) fn content(&mut self, text: &str) {
        self.text(text, Delta::Content);
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        self.text(text, Delta::Reasoning);
    }

    fn text(&mut self, text: &str, delta: fn(String) -> Delta) {
        let text = if self.trims { text.trim_start() } else { text };
        if !text.is_empty() {
            self.trims = false;
            self.out.push(delta(text.to_owned()));
        }
    }

    /// A call of this function begins.
    pub(super) fn begin_call(&mut self, name: String) {
        self.end_call();
        if self.calls < self.max_calls {
            self.out.push(Delta::CallBegins(self.calls, name));
        }
        self.calls += 1;
        self.scan = Some(ObjectScan::default());
    }

    /// More of the arguments, which may be the text of no object: then what cannot be a part of one is left.
    /// Gives how many bytes were of the object, and how it ended.
    pub(super) fn arguments(&mut self, text: &str) -> (usize, Option<Ended>) {
        let Some(scan) = &mut self.scan else {
            return (0, Some(Ended::Broken));
        };
        let scanned = scan.feed(text);
        self.give(scanned.text);
        if scanned.ended.is_some() {
            self.end_call();
        }
        (scanned.used, scanned.ended)
    }

    /// Arguments at the front of what is held.
    pub(super) fn take_arguments(&mut self, held: &mut PendingText) -> Option<Ended> {
        let (used, ended) = self.arguments(held.text());
        held.commit(used);
        ended
    }

    /// Completes the arguments of the last call.
    pub(super) fn end_call(&mut self) {
        if let Some(scan) = self.scan.take() {
            self.give(scan.closing());
        }
    }

    fn give(&mut self, text: String) {
        if !text.is_empty() && self.calls <= self.max_calls {
            self.out.push(Delta::CallArguments(self.calls - 1, text));
        }
    }
}
