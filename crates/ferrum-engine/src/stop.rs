//! Stop strings in streamed text.

/// Holds back text that may be the beginning of a stop string, and ends at the first whole one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text not yet released.
    held: String,
    /// Index of the stop string that was met.
    met: Option<usize>,
    /// Whether it stays in the text.
    included: bool,
}

impl StopMatcher {
    /// Stops at the first occurrence of any of `stops`; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self {
            stops,
            held: String::new(),
            met: None,
            included: false,
        }
    }

    /// Whether the text that is given ends with the stop string that was met, instead of before it.
    #[must_use]
    pub fn including_stop(mut self, included: bool) -> Self {
        self.included = included;
        self
    }

    /// Takes a piece of text in which no stop string counts, and gives what may be shown. A stop string that
    /// begins in it and is completed by a later [`push`](Self::push) counts.
    pub fn push_unstopped(&mut self, piece: &str) -> String {
        if self.stopped() {
            return String::new();
        }
        self.held.push_str(piece);
        self.release()
    }

    /// Takes the next piece of text and gives what may be shown. After a stop: nothing more.
    pub fn push(&mut self, piece: &str) -> String {
        if self.stopped() {
            return String::new();
        }
        self.held.push_str(piece);
        let at = |stop: &String| self.held.find(stop.as_str());
        let found = self.stops.iter().enumerate();
        let first = found.filter_map(|(i, stop)| Some((at(stop)?, i))).min();
        if let Some((at, index)) = first {
            self.met = Some(index);
            let stop = self.stops[index].len();
            self.held
                .truncate(if self.included { at + stop } else { at });
            return std::mem::take(&mut self.held);
        }
        self.release()
    }

    /// What no stop string can begin in.
    fn release(&mut self) -> String {
        let keep = self
            .stops
            .iter()
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let shown = self.held.len() - keep;
        let rest = self.held.split_off(shown);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back, when no more text will come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was met.
    pub fn stopped(&self) -> bool {
        self.met.is_some()
    }

    /// The stop string that was met: the first in the text, and of several at one place the first of
    /// the list.
    pub fn matched(&self) -> Option<&str> {
        self.met.map(|index| self.stops[index].as_str())
    }
}

/// Bytes of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len().saturating_sub(1));
    (1..=most)
        .rev()
        .find(|&n| {
            text.is_char_boundary(text.len() - n)
                && stop
                    .as_bytes()
                    .starts_with(&text.as_bytes()[text.len() - n..])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_stop_across_pieces_is_cut() {
        let mut m = StopMatcher::new(&["END".into(), "".into()]);
        let shown: String = ["a", "bE", "N", "Dc"].iter().map(|p| m.push(p)).collect();
        assert_eq!(shown, "ab");
        assert_eq!(m.matched(), Some("END"));
        assert_eq!(m.push("x") + &m.finish(), "");
    }

    #[test]
    fn a_near_miss_is_released() {
        let mut m = StopMatcher::new(&["END".into()]);
        let mut shown: String = ["xEN", "Ex", "EN"].iter().map(|p| m.push(p)).collect();
        shown += &m.finish();
        assert_eq!(shown, "xENExEN");
        assert!(!m.stopped());
    }

    #[test]
    fn a_stop_may_stay() {
        let mut m = StopMatcher::new(&["END".into()]).including_stop(true);
        let shown: String = ["a", "bE", "N", "Dc"].iter().map(|p| m.push(p)).collect();
        assert_eq!(shown, "abEND");
        assert_eq!(m.push("x") + &m.finish(), "");
    }

    #[test]
    fn a_stop_before_its_time_is_text() {
        let mut m = StopMatcher::new(&["END".into()]);
        let mut shown = m.push_unstopped("a END b") + &m.push_unstopped("EN");
        assert_eq!(shown, "a END b");
        // Completed in time.
        shown += &m.push("D and");
        assert_eq!((&*shown, m.matched()), ("a END b", Some("END")));
        let mut m = StopMatcher::new(&["END".into()]);
        let shown = m.push_unstopped("END") + &m.push("EN") + &m.finish();
        assert_eq!((&*shown, m.stopped()), ("ENDEN", false));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "[abé]{0,24}", stop in "[abé]{1,3}", cuts in prop::collection::vec(0usize..24, 0..6)) {
            let expected = text.find(&stop).map_or(text.as_str(), |at| &text[..at]);
            let mut m = StopMatcher::new(std::slice::from_ref(&stop));
            let mut cuts: Vec<_> = cuts.into_iter().filter(|&c| c <= text.len() && text.is_char_boundary(c)).collect();
            cuts.sort_unstable();
            let (mut from, mut shown) = (0, String::new());
            for cut in cuts.into_iter().chain([text.len()]) {
                shown += &m.push(&text[from..cut]);
                from = cut;
            }
            shown += &m.finish();
            prop_assert_eq!(shown, expected);
        }
    }
}
