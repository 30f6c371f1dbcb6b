//! How many draft tokens a step has, and whether drafting makes decoding faster: for all sources of drafts.
//!
//! Speculative decoding changes how long generation takes, never what is generated.

/// How many tokens to draft for a sequence: more while drafts are accepted, none for some steps after several drafts
/// without an accepted token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DraftLength {
    most: usize,
    length: usize,
    /// Consecutive drafts without an accepted token.
    misses: u32,
    /// Remaining steps without a draft.
    pause: u32,
}

/// Consecutive drafts without an accepted token before a pause.
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

    /// Records the outcome of the last draft: how many tokens it had, and how many were accepted.
    pub(super) fn record(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        self.length = match accepted == drafted {
            true => self.length * 2,
            false => accepted + 1,
        };
        self.length = self.length.min(self.most);
        self.misses = if accepted == 0 { self.misses + 1 } else { 0 };
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
    /// Steps since the last trial began.
    steps: u32,
    /// Remaining measurements of the slower mode in the current trial.
    trial: u32,
}

/// Steps between two trials of the slower mode, and measurements in each.
const PERIOD: u32 = 128;
const TRIAL: u32 = 4;

/// Steps after which a trial ends, measured or not: the draft model may never catch up.
const LONGEST_TRIAL: u32 = 32;

/// Weight of a new measurement in the mean.
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

    /// Records a step that generated `tokens` tokens for `sequences` sequences in `seconds`, its drafts included.
    pub(super) fn record(&mut self, drafted: bool, seconds: f64, tokens: usize, sequences: usize) {
        if tokens == 0 {
            return;
        }
        let tried = self.trial > 0 && drafted != self.drafting_is_best();
        // Measurements from before the trial are outdated.
        let old = self.seconds[usize::from(drafted)].filter(|_| !tried || self.trial < TRIAL);
        let found = seconds * sequences as f64 / tokens as f64;
        let mean = old.map_or(found, |old| old + FRESH * (found - old));
        self.trial -= u32::from(tried);
        self.seconds[usize::from(drafted)] = Some(mean);
        if tried && drafted == self.drafting_is_best() {
            // It is the faster mode now, so the trial is over.
            self.trial = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_grow_while_they_are_accepted() {
        let mut length = DraftLength::new(10);
        for (drafted, accepted, expected) in
            [(0, 0, 4), (4, 4, 8), (8, 8, 10), (10, 3, 4), (4, 0, 1)]
        {
            length.record(drafted, accepted);
            assert_eq!(length.next(), expected);
        }
    }

    #[test]
    fn drafting_pauses_after_rejected_drafts() {
        let mut length = DraftLength::new(8);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            length.record(1, 0);
            let pause = (0..).take_while(|_| length.next() == 0).count();
            pauses.push(pause);
        }
        assert_eq!(pauses, [0, 0, 0, 8, 16, 32, 64, 128, 256, 256, 256, 256]);
        length.record(1, 1);
        assert_eq!(length.next(), 2);
    }

    /// Steps of 1000 in which it drafts, when a plain step takes a second and one with drafts
    /// `seconds` for `tokens` tokens.
    fn drafted(seconds: f64, tokens: usize) -> usize {
        let mut speedup = DraftSpeedup::default();
        let steps = (0..1000).filter(|_| {
            let drafts = speedup.drafts();
            match drafts {
                true => speedup.record(true, seconds, tokens * 3, 3),
                false => speedup.record(false, 1.0, 3, 3),
            }
            drafts
        });
        steps.count()
    }

    #[test]
    fn slow_drafting_is_turned_off_and_tried_again() {
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
                speedup.record(drafts, if drafts { seconds } else { 1.0 }, 1, 1);
                drafts
            });
            drafted.count()
        };
        assert!(run(1000, 1.5) < 60);
        run(1000, 0.5);
        assert!(run(1000, 0.5) > 900);
    }
}
