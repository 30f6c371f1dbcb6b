//! One choice of a request: what it has been so far, and when it ends.

use super::lookup::PromptLookup;
use super::request::{RequestId, StopMatch};
use crate::sampler::{Logprobs, Sampler, logprobs};
use crate::{FinishReason, StopMatcher};
use ferrum_formats::tokenizer::DecodeStream;
use ferrum_types::TokenId;

/// See the [module](self).
pub(super) struct Answer<'t> {
    pub(super) request: RequestId,
    pub(super) choice: usize,
    pub(super) sampler: Sampler,
    pub(super) text: Option<DecodeStream<'t>>,
    pub(super) stops: StopMatcher,
    /// Alternatives whose log-probabilities are wanted.
    pub(super) logprobs: Option<usize>,
    pub(super) max_tokens: usize,
    pub(super) generated: usize,
    /// Guesses at its next tokens, if they are wanted.
    pub(super) lookup: Option<PromptLookup>,
    /// Whether it has been in a step.
    pub(super) admitted: bool,
}

/// The end of an answer.
pub(super) struct Ending {
    pub(super) reason: FinishReason,
    pub(super) stop: Option<StopMatch>,
}

impl From<FinishReason> for Ending {
    fn from(reason: FinishReason) -> Self {
        Self { reason, stop: None }
    }
}

impl Answer<'_> {
    /// Whether the token can be picked on the device.
    pub(super) fn is_plain_greedy(&self) -> bool {
        self.logprobs.is_none() && self.sampler.params().is_plain_greedy()
    }

    /// Chooses the token after `tokens` by a row of logits, which it may change.
    pub(super) fn choose(
        &mut self,
        logits: &mut [f32],
        tokens: &[TokenId],
    ) -> (TokenId, Option<Logprobs>) {
        match self.logprobs {
            None => (self.sampler.sample(logits, tokens), None),
            Some(top) => {
                // The sampler bends the logits; what is told is what the model said.
                let token = self.sampler.sample(&mut logits.to_vec(), tokens);
                (token, Some(logprobs(logits, token, top)))
            }
        }
    }

    /// Takes a token that is part of the answer, and gives the text that is certain now.
    pub(super) fn push(&mut self, token: TokenId) -> String {
        self.generated += 1;
        let piece = self.text.as_mut().map(|text| text.push(token));
        piece.map_or(String::new(), |piece| self.stops.push(&piece))
    }

    /// Why the answer ends with the token that was pushed last, if it does.
    pub(super) fn ending(&self, has_room: bool) -> Option<Ending> {
        if let Some(stop) = self.stops.matched() {
            return Some(Ending {
                reason: FinishReason::Stop,
                stop: Some(StopMatch::Text(stop.into())),
            });
        }
        (self.generated >= self.max_tokens || !has_room).then(|| FinishReason::Length.into())
    }

    /// What was held back: half characters, and what began like a stop string.
    pub(super) fn rest(&mut self) -> String {
        if self.stops.matched().is_some() {
            return String::new();
        }
        let last = self.text.take().map_or(String::new(), DecodeStream::finish);
        let mut rest = self.stops.push(&last);
        rest.push_str(&self.stops.finish());
        rest
    }
}
