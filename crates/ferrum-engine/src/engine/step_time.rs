//! Expected duration of steps, and how many prompt tokens join a step with decoding sequences, estimated from earlier
//! steps with this model on this machine.
//!
//! The model of a step is a fixed time, that of a step in which all sequences decode, plus a constant time for each
//! prompt token. The estimates affect when tokens are generated, never which.

use crate::scheduler::ScheduledSequence;
use std::time::Duration;

/// Fewest prompt tokens of a step that has room for them: fewer do not justify reading all weights.
pub(super) const MIN_PROMPT_TOKENS: usize = 32;
/// Without a setting, a step with prompts may take this many times as long as one without.
const DEFAULT_FACTOR: f64 = 8.0;
/// Without a setting, it may take at least this long: shorter gaps between two tokens are hardly noticeable.
const DEFAULT_LEAST: f64 = 0.1;
/// Weight of the last step in a mean.
const NEWEST: f64 = 0.2;

/// See the [module](self). Times are in seconds.
#[derive(Debug, Default)]
pub(super) struct StepTimeModel {
    target: Option<f64>,
    /// Mean time of steps in which all decode.
    decode: Option<f64>,
    /// Mean time beyond that of each prompt token.
    prompt_token: Option<f64>,
}

/// Number of prompt tokens in a step.
pub(super) fn prompt_tokens(sequences: &[ScheduledSequence]) -> usize {
    let prompts = sequences.iter().filter(|seq| !seq.is_decode());
    prompts.map(|seq| seq.len).sum()
}

impl StepTimeModel {
    /// A model with a target duration of steps; `None`: derived from the first steps.
    pub(super) fn new(target: Option<Duration>) -> Self {
        Self {
            target: target.map(|target| target.as_secs_f64()),
            ..Self::default()
        }
    }

    /// Records the duration of a step with this many prompt tokens.
    pub(super) fn record(&mut self, prompt_tokens: usize, time: Duration) {
        let time = time.as_secs_f64();
        if prompt_tokens == 0 {
            mean(&mut self.decode, time);
            return;
        }
        // Steps with few prompt tokens are too noisy for an estimate.
        if prompt_tokens >= MIN_PROMPT_TOKENS / 2 {
            let more = (time - self.decode.unwrap_or(0.0)).max(0.0);
            mean(&mut self.prompt_token, more / prompt_tokens as f64);
        }
    }

    /// Most prompt tokens of the next step with decoding sequences.
    pub(super) fn max_prompt_tokens(&self) -> usize {
        let Some(each) = self.prompt_token.filter(|&each| each > 0.0) else {
            return usize::MAX;
        };
        let decode = self.decode.unwrap_or(0.0);
        let derived = || (DEFAULT_FACTOR * decode).max(DEFAULT_LEAST);
        let left = self.target.unwrap_or_else(derived) - decode;
        // The conversion saturates: too large values become the maximum, negative ones zero.
        ((left / each) as usize).max(MIN_PROMPT_TOKENS)
    }

    /// Expected duration of a step with this many prompt tokens; zero if unknown.
    pub(super) fn expected(&self, prompt_tokens: usize) -> Duration {
        let prompts = self.prompt_token.unwrap_or(0.0) * prompt_tokens as f64;
        let seconds = self.decode.unwrap_or(0.0) + prompts;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

fn mean(mean: &mut Option<f64>, new: f64) {
    *mean = Some(mean.map_or(new, |old| old + NEWEST * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn prompts_get_what_the_target_leaves() {
        // Target, time of a decode, of a step of 100 prompt tokens, and the share of the next.
        let cases = [
            (Some(500), 100, 300, 200),
            (Some(500), 100, 1100, 40),
            // Eight times the decode, and at least 100 ms.
            (None, 100, 300, 350),
            (None, 5, 105, 95),
            // Never too few.
            (Some(500), 100, 5100, 32),
            (Some(50), 100, 300, 32),
            (None, 2000, 90_000, 32),
        ];
        for (target, decode, step, expected) in cases {
            let mut model = StepTimeModel::new(target.map(ms));
            assert_eq!(model.max_prompt_tokens(), usize::MAX, "nothing is known");
            assert_eq!(model.expected(512), Duration::ZERO);
            model.record(0, ms(decode));
            model.record(100, ms(step));
            let found = model.max_prompt_tokens();
            assert!(
                found.abs_diff(expected) <= 1,
                "{found} {target:?} {decode} {step}"
            );
            let expected = ms(decode + 2 * (step - decode));
            assert!(model.expected(200).abs_diff(expected) < ms(1));
        }
    }

    #[test]
    fn the_share_follows_the_machine_and_ignores_small_steps() {
        let mut model = StepTimeModel::new(Some(ms(500)));
        model.record(0, ms(100));
        model.record(100, ms(300));
        model.record(3, ms(900));
        assert!(model.max_prompt_tokens().abs_diff(200) <= 1);
        // Four times as slow from now on.
        (0..50).for_each(|_| model.record(100, ms(900)));
        assert!(model.max_prompt_tokens().abs_diff(50) <= 1);
        // A clock that does not advance leaves the limit unchanged.
        let mut still = StepTimeModel::new(None);
        still.record(64, Duration::ZERO);
        assert_eq!(still.max_prompt_tokens(), usize::MAX);
    }
}
