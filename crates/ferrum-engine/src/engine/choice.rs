//! State of one choice: sampler, grammar, stop strings and detokeniser.

use super::pooling::PoolingState;
use super::prompt_lookup::PromptLookup;
use super::request::{EngineError, Request, RequestId, StopMatch};
use crate::grammar::{Guide, Mask};
use crate::sampler::{Logprobs, NoToken, Sampler, logprobs};
use crate::{FinishReason, StopMatcher};
use ferrum_formats::tokenizer::{DecodeStream, Tokenizer};
use ferrum_kernels::SampleBatch;
use ferrum_models::Readback;
use ferrum_types::TokenId;

/// See the [module](self).
pub(super) struct ChoiceState<'t> {
    pub(super) request: RequestId,
    pub(super) index: usize,
    pub(super) sampler: Sampler,
    pub(super) text: Option<OutputText<'t>>,
    /// State of its grammar, if it has one.
    pub(super) guide: Option<Guide>,
    /// Whether the grammar allows no further token.
    pub(super) grammar_complete: bool,
    pub(super) stops: StopMatcher,
    /// Number of alternatives whose log-probabilities were requested.
    pub(super) logprobs: Option<usize>,
    pub(super) max_tokens: usize,
    pub(super) generated: usize,
    /// Drafts its next tokens, if the request wants drafts.
    pub(super) lookup: Option<PromptLookup>,
    /// Pools hidden states of the prompt, for an embedding instead of generated text.
    pub(super) pooling: Option<PoolingState>,
    /// Whether it has been in a step.
    pub(super) admitted: bool,
}

/// Sampling parameters of a row for the device.
pub(super) struct OnDevice<'a> {
    pub(super) batch: &'a mut SampleBatch,
    /// Tokens to choose from.
    pub(super) vocab: usize,
    /// Whether it takes masks. The step cannot start before they are computed, so only overlapping steps use them on the
    /// device; otherwise the host applies them after the step.
    pub(super) masks: bool,
}

/// Result of sampling.
pub(super) enum SampleOutcome {
    Token(TokenId, Option<Logprobs>),
    /// The grammar allows no further token; the model need not generate a stop token.
    End,
    /// No token could be chosen, so the request fails.
    Failed(EngineError),
}

/// Detokenises the tokens of a choice.
pub(super) struct OutputText<'t> {
    tokenizer: &'t Tokenizer,
    stream: DecodeStream<'t>,
    /// Special tokens whose text is part of the output.
    visible: Vec<TokenId>,
    /// Whether all other special tokens are left out.
    skip_special: bool,
}

impl<'t> OutputText<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, request: &Request) -> Self {
        let visible = request.visible_special_tokens.iter().copied();
        let skip_special = !request.generation.show_special_tokens;
        let stream = tokenizer.decode_stream(skip_special);
        Self {
            stream: match request.continues_prompt {
                true => stream.continued(),
                false => stream,
            },
            visible: visible.filter(|&t| tokenizer.is_special(t)).collect(),
            skip_special,
            tokenizer,
        }
    }

    fn push(&mut self, token: TokenId) -> String {
        if !self.skip_special || !self.visible.contains(&token) {
            return self.stream.push(token);
        }
        let after = self.tokenizer.decode_stream(true).continued();
        let mut text = std::mem::replace(&mut self.stream, after).finish();
        text.push_str(&self.tokenizer.token_text(token).unwrap_or_default());
        text
    }
}

/// Why a choice ended.
pub(super) struct ChoiceFinish {
    pub(super) reason: FinishReason,
    pub(super) stop: Option<StopMatch>,
    /// Of the stop token.
    pub(super) logprobs: Option<Logprobs>,
}

impl From<FinishReason> for ChoiceFinish {
    fn from(reason: FinishReason) -> Self {
        Self {
            reason,
            stop: None,
            logprobs: None,
        }
    }
}

fn grammar_fault(reason: String) -> EngineError {
    let field = "grammar";
    EngineError::Invalid { field, reason }
}

impl ChoiceState<'_> {
    /// What to read of the row that gives the token after `tokens`, or, with `last`, the token after the one that row
    /// `last` of the step in flight chooses. If the device samples, the parameters are added to `sampling`.
    pub(super) fn readback(
        &mut self,
        tokens: &[TokenId],
        last: Option<u32>,
        sampling: Option<OnDevice<'_>>,
    ) -> Readback {
        if self.max_tokens == 0 {
            return Readback::Nothing;
        }
        let due = usize::from(last.is_some());
        let greedy = self.logprobs.is_none() && self.sampler.is_plain_greedy(self.generated + due);
        if greedy && self.guide.is_none() {
            return Readback::GREEDY;
        }
        let fits = self.sampler.is_for_devices(self.logprobs);
        let Some(OnDevice {
            batch,
            vocab,
            masks,
        }) = sampling.filter(|_| fits)
        else {
            return Readback::Logits;
        };
        let mask = match &mut self.guide {
            None => &[][..],
            Some(guide) if masks => match guide.mask_for_device() {
                Some(mask) => mask.words(vocab),
                None => return Readback::Logits,
            },
            Some(_) => return Readback::Logits,
        };
        let sampler = &mut self.sampler;
        sampler.sample_on_device(tokens, last, self.logprobs, (vocab, mask), batch);
        Readback::SAMPLED
    }

    /// Chooses the token after `tokens` by a row of logits, which it may change.
    pub(super) fn choose(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> SampleOutcome {
        let mask = match self.guide.as_mut().map(Guide::mask).transpose() {
            Ok(Some(mask)) if mask.is_empty() => return SampleOutcome::End,
            Ok(mask) => mask,
            Err(reason) => return SampleOutcome::Failed(grammar_fault(reason)),
        };
        // Sampling changes the logits; log-probabilities are those of the model.
        let mut changed = Vec::new();
        let row = match self.logprobs {
            None => &mut *logits,
            Some(_) => {
                changed.extend_from_slice(logits);
                &mut changed
            }
        };
        if let Some(mask) = &mask {
            mask.apply(row);
        }
        match self.sampler.sample(row, tokens) {
            Ok(token) => {
                SampleOutcome::Token(token, self.logprobs.map(|top| logprobs(logits, token, top)))
            }
            Err(none) => self.no_token(none, mask.as_ref()),
        }
    }

    /// The outcome when the device found no token.
    pub(super) fn no_token_on_device(&mut self, none: NoToken) -> SampleOutcome {
        let mask = self.guide.as_mut().and_then(|guide| guide.mask().ok());
        self.no_token(none, mask.as_ref())
    }

    /// The outcome when no token can be chosen.
    fn no_token(&self, none: NoToken, mask: Option<&Mask>) -> SampleOutcome {
        if none == NoToken::NotANumber {
            return SampleOutcome::Failed(EngineError::NotANumber);
        }
        let Some(mask) = mask else {
            let reason = NoToken::Forbidden.to_string();
            let field = "sampling";
            return SampleOutcome::Failed(EngineError::Invalid { field, reason });
        };
        // The end of the grammar takes precedence over the minimum number of tokens.
        let too_short = self.sampler.is_too_short(self.generated);
        if too_short && self.guide.as_ref().is_some_and(|g| g.only_ends(mask)) {
            return SampleOutcome::End;
        }
        let reason = "the grammar and the logit bias together leave no token";
        SampleOutcome::Failed(grammar_fault(reason.into()))
    }

    /// Appends a token of the output and returns the text that is final now.
    ///
    /// # Errors
    /// Why the grammar cannot continue.
    pub(super) fn push(&mut self, token: TokenId) -> Result<String, EngineError> {
        if let Some(guide) = &mut self.guide {
            self.grammar_complete = guide.accept(token).map_err(grammar_fault)?;
        }
        let too_short = self.sampler.is_too_short(self.generated);
        self.generated += 1;
        let Some(piece) = self.text.as_mut().map(|text| text.push(token)) else {
            return Ok(String::new());
        };
        Ok(match too_short {
            true => self.stops.push_unstopped(&piece),
            false => self.stops.push(&piece),
        })
    }

    /// Whether and why the choice ends with the token that was pushed last.
    pub(super) fn finish(&self, has_room: bool) -> Option<ChoiceFinish> {
        if let Some(stop) = self.stops.matched() {
            return Some(ChoiceFinish {
                stop: Some(StopMatch::Text(stop.into())),
                ..FinishReason::Stop.into()
            });
        }
        if self.grammar_complete {
            return Some(FinishReason::Stop.into());
        }
        (self.generated >= self.max_tokens || !has_room).then(|| FinishReason::Length.into())
    }

    /// Returns the text that was held back: incomplete characters and beginnings of stop strings.
    pub(super) fn flush(&mut self) -> String {
        if self.stops.matched().is_some() {
            return String::new();
        }
        let last = self.text.take();
        let last = last.map_or(String::new(), |text| text.stream.finish());
        let mut rest = match self.sampler.is_too_short(self.generated) {
            true => self.stops.push_unstopped(&last),
            false => self.stops.push(&last),
        };
        rest.push_str(&self.stops.finish());
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GenerationParams;
    use ferrum_formats::tokenizer::GgufVocab;

    #[test]
    fn a_leading_space_is_kept_where_the_output_continues_the_prompt() {
        let vocab = GgufVocab {
            model: "llama".into(),
            tokens: ["<unk>", "<s>", "</s>", "▁Paris"].map(String::from).into(),
            token_types: Some(vec![2, 3, 3, 1]),
            scores: Some(vec![0.0, 0.0, 0.0, -1.0]),
            bos: Some(1),
            eos: Some(2),
            ..GgufVocab::default()
        };
        let tokenizer = Tokenizer::from_gguf_vocab(&vocab).unwrap();
        for (continues_prompt, text) in [(false, "Paris"), (true, " Paris")] {
            let request = Request {
                continues_prompt,
                ..Request::new(vec![1, 3], GenerationParams::default())
            };
            assert_eq!(OutputText::new(&tokenizer, &request).push(3), text);
        }
    }
}
