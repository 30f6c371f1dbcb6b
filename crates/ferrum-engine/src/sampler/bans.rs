//! Tokens that may not come next, whatever the model thinks of them: everything outside a request's list,
//! the last token of a sequence that may not be completed, and what would end the answer too early.
//!
//! A banned token has a logit of minus infinity, which no later step of the chain can raise.

use super::SamplingParams;
use ferrum_types::TokenId;

/// Tokens that end an answer, and until when they may not.
#[derive(Clone, Debug, Default)]
pub(super) struct Bans {
    min_tokens: usize,
    stop_tokens: Vec<TokenId>,
    /// Logits of allowed tokens, kept to spare allocations.
    allowed: Vec<f32>,
}

impl Bans {
    pub(super) fn new(min_tokens: usize, stop_tokens: &[TokenId]) -> Self {
        let wanted = min_tokens > 0;
        Self {
            min_tokens,
            stop_tokens: if wanted { stop_tokens.to_vec() } else { vec![] },
            allowed: Vec::new(),
        }
    }

    /// Whether an answer of so many tokens may not end yet.
    pub(super) fn is_too_short(&self, generated: usize) -> bool {
        generated < self.min_tokens
    }

    /// `answer`: the tokens that were generated so far. The order is vLLM's, and makes no difference.
    pub(super) fn apply(
        &mut self,
        params: &SamplingParams,
        logits: &mut [f32],
        answer: &[TokenId],
    ) {
        if let Some(tokens) = &params.allowed_tokens {
            let kept = tokens.iter().map(|&token| logits.get(token as usize));
            self.allowed.clear();
            self.allowed
                .extend(kept.map(|x| x.copied().unwrap_or(f32::NEG_INFINITY)));
            logits.fill(f32::NEG_INFINITY);
            for (&token, &kept) in tokens.iter().zip(&self.allowed) {
                if let Some(x) = logits.get_mut(token as usize) {
                    *x = kept;
                }
            }
        }
        for word in &params.bad_words {
            if let Some((&last, before)) = word.split_last()
                && answer.ends_with(before)
            {
                ban(logits, last);
            }
        }
        for &token in self.too_early(answer.len()) {
            ban(logits, token);
        }
    }

    /// What may not come after an answer of so many tokens because it would end it.
    pub(super) fn too_early(&self, generated: usize) -> &[TokenId] {
        match self.is_too_short(generated) {
            true => &self.stop_tokens,
            false => &[],
        }
    }
}

fn ban(logits: &mut [f32], token: TokenId) {
    if let Some(x) = logits.get_mut(token as usize) {
        *x = f32::NEG_INFINITY;
    }
}
