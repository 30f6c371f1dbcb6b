//! What is changed of single tokens' logits: biases, and penalties on tokens that were there already.
//!
//! The repetition penalty counts the prompt too (Keskar et al., 2019; as in `transformers` and vLLM);
//! presence and frequency penalties count what was generated (as in OpenAI's API). Counts are kept from
//! step to step, so that a step costs what is new and not what is there.

use super::SamplingParams;
use ferrum_kernels::LogitAdjustment;
use ferrum_types::TokenId;
use std::collections::HashMap;
use std::ops::Range;

#[derive(Clone, Debug)]
pub(super) struct Penalties {
    prompt_len: usize,
    tokens: HashMap<TokenId, Tally>,
    /// Tokens that the repetition penalty looks at.
    recent: Range<usize>,
    /// Tokens that were generated.
    generated: Range<usize>,
}

/// What there is of a token; nothing: it is not in the map.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    bias: f32,
    recent: u32,
    generated: u32,
}

impl Tally {
    fn is_nothing(&self) -> bool {
        self.bias == 0.0 && self.recent == 0 && self.generated == 0
    }
}

impl Penalties {
    pub(super) fn new(prompt_len: usize, logit_bias: &[(TokenId, f32)]) -> Self {
        let mut tokens: HashMap<_, Tally> = HashMap::new();
        for &(token, bias) in logit_bias {
            tokens.entry(token).or_default().bias += bias;
        }
        Self {
            prompt_len,
            tokens,
            recent: 0..0,
            generated: 0..0,
        }
    }

    /// What is changed for the token after `tokens` and `due` more, which are not known and not counted.
    pub(super) fn changes(
        &mut self,
        params: &SamplingParams,
        tokens: &[TokenId],
        due: usize,
    ) -> impl Iterator<Item = LogitAdjustment> {
        let end = tokens.len();
        if params.repeat_penalty != 1.0 {
            let first = (end + due).saturating_sub(params.repeat_last_n).min(end);
            let counted = std::mem::replace(&mut self.recent, first..end);
            self.count(|tally| &mut tally.recent, tokens, counted, first..end);
        }
        if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
            let first = self.prompt_len.min(end);
            let counted = std::mem::replace(&mut self.generated, first..end);
            self.count(|tally| &mut tally.generated, tokens, counted, first..end);
        }
        self.tokens.iter().map(|(&token, tally)| LogitAdjustment {
            token,
            bias: tally.bias,
            recent: tally.recent > 0,
            generated: tally.generated,
        })
    }

    /// Counts `range` of `tokens`, going on from the range that was counted before.
    fn count(
        &mut self,
        of: fn(&mut Tally) -> &mut u32,
        tokens: &[TokenId],
        mut counted: Range<usize>,
        range: Range<usize>,
    ) {
        if range.start < counted.start || range.end < counted.end {
            // The sequence was cut: speculative tokens may be taken back.
            self.tokens.retain(|_, tally| {
                *of(tally) = 0;
                !tally.is_nothing()
            });
            counted = range.start..range.start;
        }
        for token in &tokens[counted.end.max(range.start)..range.end] {
            *of(self.tokens.entry(*token).or_default()) += 1;
        }
        for token in &tokens[counted.start..range.start.min(counted.end)] {
            if let Some(tally) = self.tokens.get_mut(token) {
                *of(tally) -= 1;
                if tally.is_nothing() {
                    self.tokens.remove(token);
                }
            }
        }
    }
}
