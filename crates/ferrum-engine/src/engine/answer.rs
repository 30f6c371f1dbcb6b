//! One choice of a request: what it has been so far, and when it ends.

use super::lookup::PromptLookup;
use super::pooling::Pool;
use super::request::{EngineError, Request, RequestId, StopMatch};
use crate::grammar::{Guide, Mask};
use crate::sampler::{Logprobs, NoToken, Sampler, logprobs};
use crate::{FinishReason, StopMatcher};
use ferrum_formats::tokenizer::{DecodeStream, Tokenizer};
use ferrum_kernels::SampleBatch;
use ferrum_models::Readback;
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
    /// Drafts at its next tokens, if they are wanted.
    pub(super) lookup: Option<PromptLookup>,
    /// States of the prompt, if they are wanted instead of an answer.
    pub(super) pool: Option<Pool>,
    /// Whether it has been in a step.
    pub(super) admitted: bool,
}

/// Where a device is told how to choose the token of a row.
pub(super) struct OnDevice<'a> {
    pub(super) batch: &'a mut SampleBatch,
    /// Tokens to choose from.
    pub(super) vocab: usize,
    /// Whether it takes masks. They have to be there before the step; a device that computes while the host looks on
    /// loses that time, and the host can as well use them when the step is done.
    pub(super) masks: bool,
}

/// What came of choosing a token.
pub(super) enum Chosen {
    Token(TokenId, Option<Logprobs>),
    /// The grammar lets nothing follow, and the model need not say so.
    End,
    /// There is no token, and so no answer.
    Failed(EngineError),
}

/// The text of an answer in the making.
pub(super) struct AnswerText<'t> {
    tokenizer: &'t Tokenizer,
    stream: DecodeStream<'t>,
    /// Special tokens that are not left out.
    shown: Vec<TokenId>,
    /// Whether all special tokens are left out but those.
    skip_special: bool,
}

impl<'t> AnswerText<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, request: &Request) -> Self {
        let shown = request.shown_tokens.iter().copied();
        let skip_special = !request.generation.show_special_tokens;
        let stream = tokenizer.decode_stream(skip_special);
        Self {
            stream: match request.goes_on {
                true => stream.continued(),
                false => stream,
            },
            shown: shown.filter(|&t| tokenizer.is_special(t)).collect(),
            skip_special,
            tokenizer,
        }
    }

    fn push(&mut self, token: TokenId) -> String {
        if !self.skip_special || !self.shown.contains(&token) {
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

fn grammar_fault(reason: String) -> EngineError {
    let field = "grammar";
    EngineError::Invalid { field, reason }
}

impl Answer<'_> {
    /// What is read of the row that gives the token after `tokens`, or after one more, which row `last` of the step in
    /// flight chooses. Where a device samples, it is told how in `sampling`.
    pub(super) fn wanted(
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
    pub(super) fn choose(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> Chosen {
        let mask = match self.guide.as_mut().map(Guide::mask).transpose() {
            Ok(Some(mask)) if mask.is_empty() => return Chosen::End,
            Ok(mask) => mask,
            Err(reason) => return Chosen::Failed(grammar_fault(reason)),
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
        match self.sampler.sample(row, tokens) {
            Ok(token) => {
                Chosen::Token(token, self.logprobs.map(|top| logprobs(logits, token, top)))
            }
            Err(none) => self.no_token(none, mask.as_ref()),
        }
    }

    /// What comes of it when a device found no token.
    pub(super) fn no_token_on_device(&mut self, none: NoToken) -> Chosen {
        let mask = self.guide.as_mut().and_then(|guide| guide.mask().ok());
        self.no_token(none, mask.as_ref())
    }

    /// What comes of it when there is no token.
    fn no_token(&self, none: NoToken, mask: Option<&Mask>) -> Chosen {
        if none == NoToken::NotANumber {
            return Chosen::Failed(EngineError::NotANumber);
        }
        let Some(mask) = mask else {
            let reason = NoToken::Forbidden.to_string();
            let field = "sampling";
            return Chosen::Failed(EngineError::Invalid { field, reason });
        };
        // The grammar has come to its end, whatever the least number of tokens.
        let too_short = self.sampler.is_too_short(self.generated);
        if too_short && self.guide.as_ref().is_some_and(|g| g.only_ends(mask)) {
            return Chosen::End;
        }
        let reason = "the grammar and the logit bias together leave no token";
        Chosen::Failed(grammar_fault(reason.into()))
    }

    /// Takes a token that is part of the answer, and gives the text that is certain now.
    ///
    /// # Errors
    /// Why the grammar cannot go on.
    pub(super) fn push(&mut self, token: TokenId) -> Result<String, EngineError> {
        if let Some(guide) = &mut self.guide {
            self.whole = guide.accept(token).map_err(grammar_fault)?;
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
    use crate::Generation;
    use ferrum_formats::tokenizer::GgufVocab;

    #[test]
    fn a_space_where_a_text_goes_on_is_meant() {
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
        for (goes_on, text) in [(false, "Paris"), (true, " Paris")] {
            let request = Request {
                goes_on,
                ..Request::new(vec![1, 3], Generation::default())
            };
            assert_eq!(AnswerText::new(&tokenizer, &request).push(3), text);
        }
    }
}
