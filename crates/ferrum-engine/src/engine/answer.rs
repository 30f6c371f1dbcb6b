//! One choice of a request: what it has been so far, and when it ends.

use super::lookup::PromptLookup;
use super::pooling::Pool;
use super::request::{RequestId, StopMatch};
use crate::grammar::Guide;
use crate::sampler::{Logprobs, Sampler, logprobs};
use crate::{FinishReason, StopMatcher};
use ferrum_formats::tokenizer::{DecodeStream, Tokenizer};
use ferrum_types::TokenId;

/// See the [module](self).
pub(super) struct Answer<'t> {
    pub(super) request: RequestId,
    pub(super) choice: usize,
    pub(super) sampler: Sampler,
    pub(super) text: Option<AnswerText<'t>>,
    /// Where it is in its grammar, if it has one.
    pub(super) guide: Option<Guide>,
    /// Whether the grammar lets nothing follow.
    pub(super) whole: bool,
    pub(super) stops: StopMatcher,
    /// Alternatives whose log-probabilities are wanted.
    pub(super) logprobs: Option<usize>,
    pub(super) max_tokens: usize,
    pub(super) generated: usize,
    /// Guesses at its next tokens, if they are wanted.
    pub(super) lookup: Option<PromptLookup>,
    /// States of the prompt, if they are wanted instead of an answer.
    pub(super) pool: Option<Pool>,
    /// Whether it has been in a step.
    pub(super) admitted: bool,
}

/// What came of choosing a token.
pub(super) enum Chosen {
    Token(TokenId, Option<Logprobs>),
    /// The grammar lets nothing follow, and the model need not say so.
    End,
    /// The grammar cannot be kept to.
    Failed(String),
}

/// The text of an answer in the making.
pub(super) struct AnswerText<'t> {
    tokenizer: &'t Tokenizer,
    stream: DecodeStream<'t>,
    /// Special tokens that are not left out.
    shown: Vec<TokenId>,
}

impl<'t> AnswerText<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, shown: &[TokenId]) -> Self {
        let special = shown.iter().copied().filter(|&t| tokenizer.is_special(t));
        Self {
            stream: tokenizer.decode_stream(true),
            shown: special.collect(),
            tokenizer,
        }
    }

    fn push(&mut self, token: TokenId) -> String {
        if !self.shown.contains(&token) {
            return self.stream.push(token);
        }
        let after = self.tokenizer.decode_stream(true).continued();
        let mut text = std::mem::replace(&mut self.stream, after).finish();
        text.push_str(&self.tokenizer.token_text(token).unwrap_or_default());
        text
    }
}

/// The end of an answer.
pub(super) struct Ending {
    pub(super) reason: FinishReason,
    pub(super) stop: Option<StopMatch>,
    /// Of the stop token.
    pub(super) logprobs: Option<Logprobs>,
}

impl From<FinishReason> for Ending {
    fn from(reason: FinishReason) -> Self {
        Self {
            reason,
            stop: None,
            logprobs: None,
        }
    }
}

impl Answer<'_> {
    /// Whether the token can be picked on the device.
    pub(super) fn is_plain_greedy(&self) -> bool {
        self.guide.is_none() && self.logprobs.is_none() && self.sampler.params().is_plain_greedy()
    }

    /// Chooses the token after `tokens` by a row of logits, which it may change.
    pub(super) fn choose(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> Chosen {
        let mask = match self.guide.as_mut().map(Guide::mask).transpose() {
            Ok(Some(mask)) if mask.is_empty() => return Chosen::End,
            Ok(mask) => mask,
            Err(reason) => return Chosen::Failed(reason),
        };
        // Sampling bends the logits; what is told is what the model said.
        let mut bent = Vec::new();
        let row = match self.logprobs {
            None => &mut *logits,
            Some(_) => {
                bent.extend_from_slice(logits);
                &mut bent
            }
        };
        if let Some(mask) = &mask {
            mask.apply(row);
        }
        let token = self.sampler.sample(row, tokens);
        if mask.is_some_and(|mask| !mask.allows(token)) {
            let reason = "the grammar and the logit bias together leave no token";
            return Chosen::Failed(reason.into());
        }
        Chosen::Token(token, self.logprobs.map(|top| logprobs(logits, token, top)))
    }

    /// Takes a token that is part of the answer, and gives the text that is certain now.
    ///
    /// # Errors
    /// Why the grammar cannot go on.
    pub(super) fn push(&mut self, token: TokenId) -> Result<String, String> {
        if let Some(guide) = &mut self.guide {
            self.whole = guide.accept(token)?;
        }
        self.generated += 1;
        let piece = self.text.as_mut().map(|text| text.push(token));
        Ok(piece.map_or(String::new(), |piece| self.stops.push(&piece)))
    }

    /// Why the answer ends with the token that was pushed last, if it does.
    pub(super) fn ending(&self, has_room: bool) -> Option<Ending> {
        if let Some(stop) = self.stops.matched() {
            return Some(Ending {
                stop: Some(StopMatch::Text(stop.into())),
                ..FinishReason::Stop.into()
            });
        }
        if self.whole {
            return Some(FinishReason::Stop.into());
        }
        (self.generated >= self.max_tokens || !has_room).then(|| FinishReason::Length.into())
    }

    /// What was held back: half characters, and what began like a stop string.
    pub(super) fn rest(&mut self) -> String {
        if self.stops.matched().is_some() {
            return String::new();
        }
        let last = self.text.take();
        let last = last.map_or(String::new(), |text| text.stream.finish());
        let mut rest = self.stops.push(&last);
        rest.push_str(&self.stops.finish());
        rest
    }
}
