//! From logits to a token.
//!
//! A fixed chain; what is not asked for does nothing:
//!
//! 1. logit bias
//! 2. repetition penalty (prompt and answer), then frequency and presence penalties (answer only)
//! 3. DRY
//! 4. a temperature of 0 ends here: the most likely token, lowest id of equals
//! 5. top-k
//! 6. typical
//! 7. top-p
//! 8. min-p
//! 9. XTC
//! 10. temperature, and a draw
//!
//! The order is llama.cpp's: 5 to 9 look at the probabilities that the model gave, before temperature
//! flattens them, and each looks at what the ones before it left. Mirostat, where asked for, replaces
//! 5 to 9 and comes after temperature.
//!
//! A grammar's mask ([`grammar`](crate::grammar)) comes before 1, on the same logits: a masked token is one of
//! `-inf`.

mod candidates;
mod dry;
mod logprobs;
mod params;
mod penalties;
#[cfg(test)]
mod tests;

pub use dry::Dry;
pub use logprobs::{Logprobs, TokenLogprob, logprobs};
pub use params::{MAX_LOGIT_BIAS, Mirostat, SamplingParams, Xtc};

use candidates::Candidates;
use dry::DryScratch;
use ferrum_kernels::cpu::logits::max;
use ferrum_types::{Result, TokenId};
use penalties::Penalties;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Chooses tokens for one sequence.
///
/// What it chooses depends on its settings, the logits, the sequence so far and its own random
/// sequence, which the seed and the number of the choice determine.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
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
    pub fn new(params: SamplingParams, prompt_len: usize, choice: u64) -> Result<Self> {
        params.validate()?;
        let mut rng = ChaCha8Rng::seed_from_u64(params.seed);
        rng.set_stream(choice);
        Ok(Self {
            penalties: Penalties::new(prompt_len),
            dry: DryScratch::new(&params.dry),
            mu: params.mirostat.map_or(0.0, |m| 2.0 * f64::from(m.tau)),
            candidates: Candidates::default(),
            rng,
            params,
        })
    }

    /// The settings.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses a token. `tokens` is the sequence so far, prompt included; `logits` is changed by bias
    /// and penalties.
    pub fn sample(&mut self, logits: &mut [f32], tokens: &[TokenId]) -> TokenId {
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
            self.candidates.load(logits, 0);
            return self.draw_by_surprise(mirostat);
        }
        self.candidates.load(logits, self.params.top_k);
        self.cut();
        let unit = unit(&mut self.rng);
        self.candidates.draw(temperature, unit).0
    }

    /// Steps 6 to 9; at least one candidate stays.
    fn cut(&mut self) {
        let (params, candidates) = (&self.params, &mut self.candidates);
        candidates.typical(params.typical_p);
        candidates.top_p(params.top_p);
        candidates.min_p(params.min_p);
        // No random number is spent on what cannot happen.
        if params.xtc.can_act() && unit(&mut self.rng) < f64::from(params.xtc.probability) {
            candidates.exclude_top(params.xtc.threshold);
        }
    }

    /// Mirostat v2 (Basu et al., 2021): keeps the surprise of the text near `tau` bits.
    fn draw_by_surprise(&mut self, mirostat: Mirostat) -> TokenId {
        let temperature = self.params.temperature;
        self.candidates.limit_surprise(temperature, self.mu);
        let unit = unit(&mut self.rng);
        let (token, probability) = self.candidates.draw(temperature, unit);
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
