//! From logits to a token.
//!
//! A fixed chain; what is not asked for does nothing:
//!
//! 1. bans: allowed tokens, bad words, the least number of tokens
//! 2. logit bias
//! 3. repetition penalty (prompt and answer), then frequency and presence penalties (answer only)
//! 4. DRY
//! 5. a temperature of 0 ends here: the most likely token, lowest id of equals
//! 6. temperature
//! 7. top-k
//! 8. top-p
//! 9. min-p
//! 10. typical
//! 11. XTC
//! 12. a draw
//!
//! The order is that of vLLM and `transformers`: 8 to 11 look at the probabilities after temperature, and
//! each looks at what the ones before it left. (llama.cpp applies temperature last.) Mirostat, where asked
//! for, replaces 7 to 11.
//!
//! A grammar's mask ([`grammar`](crate::grammar)) comes before 1, on the same logits: a masked token is one of
//! `-inf`.

mod bans;
mod breakers;
mod candidates;
mod dry;
mod logprobs;
mod params;
mod penalties;
#[cfg(test)]
mod tests;

pub use breakers::DryBreakers;
pub use dry::Dry;
pub use logprobs::{Logprobs, TokenLogprob, logprobs};
pub use params::{
    MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, Mirostat, SamplingParams, Xtc,
};

use bans::Bans;
use candidates::Candidates;
use dry::DryScratch;
use ferrum_kernels::cpu::logits::max;
use ferrum_types::TokenId;
use penalties::Penalties;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoToken {
    /// No logit of those in question is a number.
    #[error("the model gave no numbers for the next token: its logits are NaN")]
    NotANumber,
    /// Everything is forbidden.
    #[error("the request leaves no token that may come next")]
    Forbidden,
}

/// Whether a row of logits says anything: a model that has gone wrong gives nothing but NaN.
pub fn has_number(logits: &[f32]) -> bool {
    max(logits) > f32::NEG_INFINITY
}

/// Chooses tokens for one sequence.
///
/// What it chooses depends on its settings, the logits, the sequence so far and its own random
/// sequence, which the seed and the number of the choice determine.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    prompt_len: usize,
    rng: ChaCha8Rng,
    bans: Bans,
    penalties: Penalties,
    dry: DryScratch,
    /// Candidates of the current step, kept to spare allocations.
    candidates: Candidates,
    /// Mirostat's bound on surprise, in bits.
    mu: f64,
}

impl Sampler {
    /// A sampler at the start of its random sequence, for a prompt of `prompt_len` tokens. `choice`
    /// tells several answers to one prompt apart: each has a random sequence of its own.
    ///
    /// # Errors
    /// Those of [`SamplingParams::validate`].
    pub fn new(
        params: SamplingParams,
        prompt_len: usize,
        choice: u64,
    ) -> ferrum_types::Result<Self> {
        params.validate()?;
        let mut rng = ChaCha8Rng::seed_from_u64(params.seed);
        rng.set_stream(choice);
        Ok(Self {
            prompt_len,
            bans: Bans::default(),
            penalties: Penalties::new(prompt_len),
            dry: DryScratch::default(),
            mu: params.mirostat.map_or(0.0, |m| 2.0 * f64::from(m.tau)),
            candidates: Candidates::default(),
            rng,
            params,
        })
    }

    /// Chooses none of `stop_tokens` before the answer has `min_tokens` tokens.
    #[must_use]
    pub fn with_min_tokens(mut self, min_tokens: usize, stop_tokens: &[TokenId]) -> Self {
        self.bans = Bans::new(min_tokens, stop_tokens);
        self
    }

    /// The settings.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether the answer has fewer tokens than it needs to end.
    pub(crate) fn is_too_short(&self, generated: usize) -> bool {
        self.bans.is_too_short(generated)
    }

    /// Whether the choice after `generated` tokens is the plain most likely one, which a device can pick by
    /// itself.
    pub fn is_plain_greedy(&self, generated: usize) -> bool {
        self.params.is_plain_greedy() && !self.bans.is_too_short(generated)
    }

    /// Chooses a token. `tokens` is the sequence so far, prompt included; `logits` is changed by bans, bias
    /// and penalties.
    ///
    /// # Errors
    /// Why there is none: nothing is a number, or all is forbidden.
    pub fn sample(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> Result<TokenId, NoToken> {
        let token = self.choose(logits, tokens);
        let chosen = logits.get(token as usize);
        // Without candidates the lowest id is what is left of all choosing.
        if chosen.is_some_and(|&x| x > f32::NEG_INFINITY) {
            return Ok(token);
        }
        match logits.iter().any(|x| x.is_nan()) {
            true => Err(NoToken::NotANumber),
            false => Err(NoToken::Forbidden),
        }
    }

    fn choose(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> TokenId {
        let answer = &tokens[self.prompt_len.min(tokens.len())..];
        self.bans.apply(&self.params, logits, answer);
        for &(token, bias) in &self.params.logit_bias {
            if let Some(x) = logits.get_mut(token as usize) {
                *x += bias;
            }
        }
        self.penalties.apply(&self.params, logits, tokens);
        self.dry.apply(&self.params.dry, logits, tokens);
        if self.params.temperature == 0.0 {
            return greedy(logits);
        }
        let temperature = self.params.temperature;
        if self.params.cuts_nothing() {
            let unit = unit(&mut self.rng);
            return self.candidates.draw_of(logits, temperature, unit);
        }
        if let Some(mirostat) = self.params.mirostat {
            self.candidates.load(logits, 0, temperature);
            return self.draw_by_surprise(mirostat);
        }
        self.candidates.load(logits, self.params.top_k, temperature);
        self.cut();
        let unit = unit(&mut self.rng);
        self.candidates.draw(unit).0
    }

    /// Steps 8 to 11; at least one candidate stays.
    fn cut(&mut self) {
        let (params, candidates) = (&self.params, &mut self.candidates);
        candidates.top_p(params.top_p);
        candidates.min_p(params.min_p);
        candidates.typical(params.typical_p);
        // No random number is spent on what cannot happen.
        if params.xtc.can_act() && unit(&mut self.rng) < f64::from(params.xtc.probability) {
            candidates.exclude_top(params.xtc.threshold);
        }
    }

    /// Mirostat v2 (Basu et al., 2021): keeps the surprise of the text near `tau` bits.
    fn draw_by_surprise(&mut self, mirostat: Mirostat) -> TokenId {
        self.candidates.limit_surprise(self.mu);
        let unit = unit(&mut self.rng);
        let (token, probability) = self.candidates.draw(unit);
        let error = -probability.log2() - f64::from(mirostat.tau);
        self.mu -= f64::from(mirostat.eta) * error;
        token
    }
}

/// A number from 0 to below 1, of 53 random bits.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn greedy(logits: &[f32]) -> TokenId {
    let best = max(logits);
    let at = logits.iter().position(|&x| x == best);
    at.unwrap_or(0) as TokenId
}
