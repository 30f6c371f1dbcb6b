//! How many draft tokens a step has, and whether drafting makes decoding faster: for all sources of drafts.
//!
//! Speculative decoding never changes an answer, only the time that it takes.

/// How many tokens to draft for a sequence: more while drafts are right, none for a while after some that
/// were all wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DraftLength {
    most: usize,
    length: usize,
    /// Drafts in a row of which nothing was right.
    misses: u32,
    /// Steps to go without a draft.
    pause: u32,
}

/// Drafts in a row that may be all wrong.
const MISSES: u32 = 4;

impl DraftLength {
    /// At most `most` tokens at a time.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            length: most.min(4),
            misses: 0,
            pause: 0,
        }
    }

    /// Tokens to draft in the next step.
    pub(super) fn next(&mut self) -> usize {
        match self.pause.checked_sub(1) {
            Some(left) => {
                self.pause = left;
                0
            }
            None => self.length,
        }
    }

    /// How the last draft turned out: of `tried` tokens, `right` were right.
    pub(super) fn learn(&mut self, tried: usize, right: usize) {
        if tried == 0 {
            return;
        }
        self.length = match right == tried {
            true => self.length * 2,
            false => right + 1,
        };
        self.length = self.length.min(self.most);
        self.misses = if right == 0 { self.misses + 1 } else { 0 };
        if let Some(more) = self.misses.checked_sub(MISSES) {
            self.pause = 8 << more.min(5);
        }
    }
}

/// Whether a model's drafts make decoding faster: measured, since it depends on both models, the machine, the text and how
/// many sequences there are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DraftSpeedup {
    /// Seconds for a token of each sequence, in steps without drafts and with them.
    seconds: [Option<f64>; 2],
    /// Since the last trial began.
    steps: u32,
    /// Measurements of the way that looks worse that are still to come.
    trial: u32,
}

/// Steps after which the way that looks worse is tried again, and how many are measured then.
const PERIOD: u32 = 128;
const TRIAL: u32 = 4;

/// Steps after which a trial ends, measured or not: the small model may never catch up.
const LONGEST_TRIAL: u32 = 32;

/// How much a new measurement counts.
const FRESH: f64 = 0.2;

impl DraftSpeedup {
    /// Whether to draft in the next step.
    pub(super) fn drafts(&mut self) -> bool {
        self.steps = self.steps.saturating_add(1);
        let known = self.seconds.iter().all(Option::is_some);
        if self.trial > 0 && self.steps > LONGEST_TRIAL {
            self.trial = 0;
        } else if self.trial == 0 && known && self.steps > PERIOD {
            (self.trial, self.steps) = (TRIAL, 0);
        }
        self.drafting_is_best() != (self.trial > 0)
    }

    fn drafting_is_best(&self) -> bool {
        match self.seconds {
            [Some(plain), Some(drafted)] => drafted < plain,
            [None, _] => false,
            [_, None] => self.steps % PERIOD < LONGEST_TRIAL,
        }
    }

    /// A step gave `tokens` tokens to `sequences` sequences in `seconds`, its drafts included.
    pub(super) fn learn(&mut self, drafted: bool, seconds: f64, tokens: usize, sequences: usize) {
        if tokens == 0 {
            return;
        }
        let tried = self.trial > 0 && drafted != self.drafting_is_best();
        // What it was like long ago says little.
        let old = self.seconds[usize::from(drafted)].filter(|_| !tried || self.trial < TRIAL);
        let found = seconds * sequences as f64 / tokens as f64;
        let mean = old.map_or(found, |old| old + FRESH * (found - old));
        self.trial -= u32::from(tried);
        self.seconds[usize::from(drafted)] = Some(mean);
        if tried && drafted == self.drafting_is_best() {
            // It is the better way now, and what follows is no trial any more.
            self.trial = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_grow_while_they_are_right() {
        let mut length = DraftLength::new(10);
        for (tried, right, expected) in [(0, 0, 4), (4, 4, 8), (8, 8, 10), (10, 3, 4), (4, 0, 1)] {
            length.learn(tried, right);
            assert_eq!(length.next(), expected);
        }
    }

    #[test]
    fn after_nothing_but_wrong_guesses_there_is_a_pause() {
        let mut length = DraftLength::new(8);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            length.learn(1, 0);
            let pause = (0..).take_while(|_| length.next() == 0).count();
            pauses.push(pause);
        }
        assert_eq!(pauses, [0, 0, 0, 8, 16, 32, 64, 128, 256, 256, 256, 256]);
        length.learn(1, 1);
        assert_eq!(length.next(), 2);
    }

    /// Steps of 1000 in which it drafts, when a plain step takes a second and one with drafts
    /// `seconds` for `tokens` tokens.
    fn drafted(seconds: f64, tokens: usize) -> usize {
        let mut speedup = DraftSpeedup::default();
        let steps = (0..1000).filter(|_| {
            let drafts = speedup.drafts();
            match drafts {
                true => speedup.learn(true, seconds, tokens * 3, 3),
                false => speedup.learn(false, 1.0, 3, 3),
            }
            drafts
        });
        steps.count()
    }

    #[test]
    fn what_does_not_pay_is_turned_off_and_tried_again() {
        assert!(drafted(2.0, 3) > 950);
        assert!(drafted(1.1, 2) > 950);
        for (seconds, tokens) in [(2.0, 1), (3.1, 3), (5.0, 4)] {
            let steps = drafted(seconds, tokens);
            assert!((8..50).contains(&steps), "{seconds} {tokens}: {steps}");
        }
    }

    #[test]
    fn it_follows_a_change() {
        let mut speedup = DraftSpeedup::default();
        let mut run = |steps: usize, seconds: f64| {
            let drafted = (0..steps).filter(|_| {
                let drafts = speedup.drafts();
                speedup.learn(drafts, if drafts { seconds } else { 1.0 }, 1, 1);
                drafts
            });
            drafted.count()
        };
        assert!(run(1000, 1.5) < 60);
        run(1000, 0.5);
        assert!(run(1000, 0.5) > 900);
    }
}
