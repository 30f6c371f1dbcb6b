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
//! Devices do 2, 3 and 5 to 9 and 12 by themselves where nothing else is asked for (`ferrum_kernels::BackendSample`, with
//! the least number of tokens as biases): [`Sampler::sample_on_device`] says how, chance included, so that the same seed
//! gives the same text.
//!
//! A grammar's mask ([`grammar`](crate::grammar)) comes before 1, on the same logits: a masked token is one of
//! `-inf`. Devices take it, too.

mod bans;
mod breakers;
mod dry;
mod params;
mod penalties;
#[cfg(test)]
mod tests;

pub use breakers::DryBreakers;
pub use dry::Dry;
pub use ferrum_kernels::cpu::logits::logprobs;
pub use ferrum_kernels::{Logprobs, NoToken, TokenLogprob};
pub use params::{
    MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, Mirostat, SamplingParams, Xtc,
};

use bans::Bans;
use dry::DryScratch;
use ferrum_kernels::cpu::logits::{Candidates, greedy, max, possible};
use ferrum_kernels::{LogitAdjustment, MAX_LOGPROBS, RowSampling, SampleBatch};
use ferrum_types::TokenId;
use penalties::Penalties;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

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
            penalties: Penalties::new(prompt_len, &params.logit_bias),
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

    /// Tokens of the prompt.
    pub(crate) fn prompt_len(&self) -> usize {
        self.prompt_len
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

    /// Whether a device that samples can choose its tokens, with so many alternatives beside each. Else the host has
    /// to [`sample`](Self::sample).
    pub fn is_for_devices(&self, logprobs: Option<usize>) -> bool {
        self.params.is_for_devices() && logprobs.is_none_or(|n| n <= MAX_LOGPROBS)
    }

    /// Adds to `batch` the parameters with which a device samples the token after `tokens`, for settings that
    /// [`are for devices`](Self::is_for_devices). Where the step before this one is in flight, there is one more token
    /// in between, which row `last` of that step chooses. `logprobs`: the number of alternatives. Of `vocab` tokens, those
    /// whose bit in `mask` is not set are forbidden; an empty one forbids none.
    pub fn sample_on_device(
        &mut self,
        tokens: &[TokenId],
        last: Option<u32>,
        logprobs: Option<usize>,
        (vocab, mask): (usize, &[u32]),
        batch: &mut SampleBatch,
    ) {
        let params = &self.params;
        let due = usize::from(last.is_some());
        let generated = tokens.len().saturating_sub(self.prompt_len) + due;
        let banned = self.bans.too_early(generated);
        let row = RowSampling {
            uniform: match params.temperature == 0.0 {
                true => 0.0,
                false => unit(&mut self.rng),
            },
            pending_row: last,
            logprobs: logprobs.map(|n| n as u32),
            ..params.row()
        };
        let changes = self.penalties.changes(params, tokens, due);
        let changes = changes.filter(|change| !banned.contains(&change.token));
        let ban = |&token: &TokenId| LogitAdjustment {
            bias: f32::NEG_INFINITY,
            ..LogitAdjustment::none(token)
        };
        let changes = changes.chain(banned.iter().map(ban));
        let inside = |change: &LogitAdjustment| (change.token as usize) < vocab;
        let mask = (!mask.is_empty()).then_some(mask);
        batch.push(row, changes.filter(inside), mask);
    }

    /// Chooses a token. `tokens` is the sequence so far, prompt included; `logits` is changed by bans, bias
    /// and penalties.
    ///
    /// # Errors
    /// Why there is none: nothing is a number, or all is forbidden.
    pub fn sample(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> Result<TokenId, NoToken> {
        let token = self.choose(logits, tokens);
        possible(logits, token)
    }

    fn choose(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> TokenId {
        let answer = &tokens[self.prompt_len.min(tokens.len())..];
        self.bans.apply(&self.params, logits, answer);
        let row = self.params.row();
        for change in self.penalties.changes(&self.params, tokens, 0) {
            if let Some(x) = logits.get_mut(change.token as usize) {
                *x = row.adjusted(*x, &change);
            }
        }
        self.dry.apply(&self.params.dry, logits, tokens);
        let temperature = self.params.temperature;
        if temperature == 0.0 {
            return greedy(logits);
        }
        if let Some(mirostat) = self.params.mirostat {
            self.candidates.load(logits, 0, temperature);
            return self.draw_by_surprise(mirostat);
        }
        if !self.params.has_host_filters() {
            let unit = unit(&mut self.rng);
            return self.candidates.choose(
                logits,
                &RowSampling {
                    uniform: unit,
                    ..row
                },
            );
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
