//! Text that was generated and of which it is not yet known whether it is content or a part of a call.

/// Whether a text begins with a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefixMatch {
    Yes,
    No,
    /// It is the beginning of the marker so far.
    Maybe,
}

pub(super) fn begins(text: &str, marker: &str) -> PrefixMatch {
    if text.starts_with(marker) {
        PrefixMatch::Yes
    } else if marker.starts_with(text) {
        PrefixMatch::Maybe
    } else {
        PrefixMatch::No
    }
}

/// Text that a reader takes from the front of.
#[derive(Debug, Default)]
pub(super) struct PendingText {
    text: String,
    /// Consumed as a part of a call, kept in case it is none.
    uncommitted: String,
}

impl PendingText {
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Up to `bytes` bytes from the front, of whole characters, and whether more text follows. A header with a bound on its size is
    /// read in these alone: otherwise a long one would be a header or not by how the text is cut into chunks.
    pub(super) fn front(&self, bytes: usize) -> (&str, bool) {
        let end = self.text.floor_char_boundary(bytes);
        (&self.text[..end], end < self.text.len())
    }

    /// Consumes bytes that are part of a call, if it is one.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.uncommitted.extend(self.text.drain(..bytes));
    }

    /// Consumes bytes that are certain, and commits what was consumed before.
    pub(super) fn commit(&mut self, bytes: usize) {
        self.text.drain(..bytes);
        self.uncommitted.clear();
    }

    /// Puts a marker back that was consumed last.
    pub(super) fn put_back(&mut self, marker: &str) {
        if self.uncommitted.ends_with(marker) {
            self.uncommitted
                .truncate(self.uncommitted.len() - marker.len());
            self.text.insert_str(0, marker);
        }
    }

    /// Removes and returns what was consumed and not committed.
    pub(super) fn rollback(&mut self) -> String {
        std::mem::take(&mut self.uncommitted)
    }

    /// Consumes space; returns whether any text follows.
    pub(super) fn skip_space(&mut self) -> bool {
        self.consume(self.text.len() - self.text.trim_start().len());
        !self.text.is_empty()
    }

    /// Consumes a marker if it follows, maybe after space. `None`: more has to come to know; never at the end, where
    /// the beginning of a marker is one that was cut.
    pub(super) fn skip_marker(&mut self, marker: &str, end: bool) -> Option<bool> {
        if !self.skip_space() {
            return end.then_some(false);
        }
        match begins(&self.text, marker) {
            PrefixMatch::Yes => self.consume(marker.len()),
            PrefixMatch::No => return Some(false),
            PrefixMatch::Maybe if end => self.consume(self.text.len()),
            PrefixMatch::Maybe => return None,
        }
        Some(true)
    }

    /// Text up to the first of the markers and without the space before it, and the marker, which is consumed with the
    /// space. Without a marker, all that is certainly before one.
    pub(super) fn until(
        &mut self,
        markers: &[&'static str],
        end: bool,
    ) -> (String, Option<&'static str>) {
        let found = |&marker: &&'static str| Some((self.text.find(marker)?, marker));
        // Of two at one place the longer: one may begin with the other.
        let first = markers.iter().filter_map(found);
        let first = first.min_by_key(|&(at, marker)| (at, usize::MAX - marker.len()));
        if let Some((at, marker)) = first {
            let space = self.text[..at].trim_end().len();
            let text = self.text.drain(..space).collect();
            self.consume(at - space + marker.len());
            return (text, Some(marker));
        }
        let keep = match end {
            true => 0,
            false => {
                let tail = markers
                    .iter()
                    .map(|marker| overlap(&self.text, marker))
                    .max();
                let before = &self.text[..self.text.len() - tail.unwrap_or(0)];
                self.text.len() - before.trim_end().len()
            }
        };
        (self.text.drain(..self.text.len() - keep).collect(), None)
    }
}

/// Bytes of the longest end of `text` that `marker` begins with, and is not.
pub(super) fn overlap(text: &str, marker: &str) -> usize {
    let most = text.len().min(marker.len() - 1);
    let fits = |&n: &usize| text.as_bytes().ends_with(&marker.as_bytes()[..n]);
    (1..=most).rev().find(fits).unwrap_or(0)
}
