//! Penalties on tokens that were there already.
//!
//! The repetition penalty counts the prompt too (Keskar et al., 2019; as in `transformers` and vLLM);
//! presence and frequency penalties count what was generated (as in OpenAI's API). Counts are kept from
//! step to step, so that a step costs what is new and not what is there.

use super::SamplingParams;
use ferrum_types::TokenId;
use std::collections::HashMap;
use std::ops::Range;

#[derive(Clone, Debug)]
pub(super) struct Penalties {
    prompt_len: usize,
    /// Tokens that the repetition penalty looks at.
    recent: Counts,
    /// Tokens that were generated.
    generated: Counts,
}

impl Penalties {
    pub(super) fn new(prompt_len: usize) -> Self {
        Self {
            prompt_len,
            recent: Counts::default(),
            generated: Counts::default(),
        }
    }

    pub(super) fn apply(
        &mut self,
        params: &SamplingParams,
        logits: &mut [f32],
        tokens: &[TokenId],
    ) {
        let penalty = params.repeat_penalty;
        if penalty != 1.0 {
            let first = tokens.len().saturating_sub(params.repeat_last_n);
            self.recent.move_to(tokens, first..tokens.len());
            for &token in self.recent.counts.keys() {
                if let Some(x) = logits.get_mut(token as usize) {
                    *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
                }
            }
        }
        let (presence, frequency) = (params.presence_penalty, params.frequency_penalty);
        if presence != 0.0 || frequency != 0.0 {
            let first = self.prompt_len.min(tokens.len());
            self.generated.move_to(tokens, first..tokens.len());
            for (&token, &count) in &self.generated.counts {
                if let Some(x) = logits.get_mut(token as usize) {
                    *x -= presence + frequency * count as f32;
                }
            }
        }
    }
}

/// How often each token is in a range of a sequence that grows.
#[derive(Clone, Debug, Default)]
struct Counts {
    counts: HashMap<TokenId, u32>,
    counted: Range<usize>,
}

impl Counts {
    /// Counts `range` of `tokens`, going on from the range before.
    fn move_to(&mut self, tokens: &[TokenId], range: Range<usize>) {
        if range.start < self.counted.start || range.end < self.counted.end {
            // The sequence was cut: speculative tokens may be taken back.
            self.counts.clear();
            self.counted = range.start..range.start;
        }
        for token in &tokens[self.counted.end.max(range.start)..range.end] {
            *self.counts.entry(*token).or_insert(0) += 1;
        }
        for token in &tokens[self.counted.start..range.start.min(self.counted.end)] {
            if let Some(count) = self.counts.get_mut(token) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(token);
                }
            }
        }
        self.counted = range;
    }
}
