//! Text that has come and of which it is not certain yet what it is.

/// Whether a text begins with a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefixMatch {
    Yes,
    No,
    /// It is the beginning of the mark so far.
    Maybe,
}

pub(super) fn begins(text: &str, mark: &str) -> PrefixMatch {
    if text.starts_with(mark) {
        PrefixMatch::Yes
    } else if mark.starts_with(text) {
        PrefixMatch::Maybe
    } else {
        PrefixMatch::No
    }
}

/// Text that a reader takes from the front of.
#[derive(Debug, Default)]
pub(super) struct PendingText {
    text: String,
    /// What was taken off the text as a part of a call, in case it is none.
    taken: String,
}

impl PendingText {
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Takes bytes that are parts of a call if it is one.
    pub(super) fn take(&mut self, bytes: usize) {
        self.taken.extend(self.text.drain(..bytes));
    }

    /// Takes bytes that are certain, and with them what was taken before.
    pub(super) fn settle(&mut self, bytes: usize) {
        self.text.drain(..bytes);
        self.taken.clear();
    }

    /// Puts a mark back that was taken last.
    pub(super) fn put_back(&mut self, mark: &str) {
        if self.taken.ends_with(mark) {
            self.taken.truncate(self.taken.len() - mark.len());
            self.text.insert_str(0, mark);
        }
    }

    /// What was taken and is not certain.
    pub(super) fn give_back(&mut self) -> String {
        std::mem::take(&mut self.taken)
    }

    /// Takes space, and says whether anything is behind it.
    pub(super) fn skip_space(&mut self) -> bool {
        self.take(self.text.len() - self.text.trim_start().len());
        !self.text.is_empty()
    }

    /// Takes a mark if it follows, maybe after space. `None`: more has to come to know; never at the end, where
    /// the beginning of a mark is one that was cut.
    pub(super) fn skip_mark(&mut self, mark: &str, end: bool) -> Option<bool> {
        if !self.skip_space() {
            return end.then_some(false);
        }
        match begins(&self.text, mark) {
            PrefixMatch::Yes => self.take(mark.len()),
            PrefixMatch::No => return Some(false),
            PrefixMatch::Maybe if end => self.take(self.text.len()),
            PrefixMatch::Maybe => return None,
        }
        Some(true)
    }

    /// Text up to the first of the marks and without the space before it, and the mark, which is taken with the
    /// space. Without a mark, all that is certainly before one.
    pub(super) fn until(
        &mut self,
        marks: &[&'static str],
        end: bool,
    ) -> (String, Option<&'static str>) {
        let found = |&mark: &&'static str| Some((self.text.find(mark)?, mark));
        // Of two at one place the longer: one may begin with the other.
        let first = marks.iter().filter_map(found);
        let first = first.min_by_key(|&(at, mark)| (at, usize::MAX - mark.len()));
        if let Some((at, mark)) = first {
            let space = self.text[..at].trim_end().len();
            let text = self.text.drain(..space).collect();
            self.take(at - space + mark.len());
            return (text, Some(mark));
        }
        let keep = match end {
            true => 0,
            false => {
                let tail = marks.iter().map(|mark| overlap(&self.text, mark)).max();
                let before = &self.text[..self.text.len() - tail.unwrap_or(0)];
                self.text.len() - before.trim_end().len()
            }
        };
        (self.text.drain(..self.text.len() - keep).collect(), None)
    }
}

/// Bytes of the longest end of `text` that `mark` begins with, and is not.
pub(super) fn overlap(text: &str, mark: &str) -> usize {
    let most = text.len().min(mark.len() - 1);
    let fits = |&n: &usize| text.as_bytes().ends_with(&mark.as_bytes()[..n]);
    (1..=most).rev().find(fits).unwrap_or(0)
}
