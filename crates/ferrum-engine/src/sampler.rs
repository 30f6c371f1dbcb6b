//! From logits to a token.
//!
//! Order: repetition penalty, temperature, top-k, top-p, min-p, then a draw. A temperature of 0 is
//! greedy: the most likely token after the penalty, lowest id of equals.

use ferrum_types::{Error, Result, TokenId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the most likely `top_k` tokens; 0: all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1: all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the most likely one; 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1: none.
    pub repeat_penalty: f32,
    /// How many recent tokens the penalty looks at.
    pub repeat_last_n: usize,
    /// Start of the random sequence.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Checks ranges.
    ///
    /// # Errors
    /// `InvalidArgument` names the setting.
    pub fn validate(&self) -> Result<()> {
        let checks = [
            ("temperature", self.temperature, 0.0, f32::MAX),
            ("top-p", self.top_p, 0.0, 1.0),
            ("min-p", self.min_p, 0.0, 1.0),
            (
                "repeat-penalty",
                self.repeat_penalty,
                f32::MIN_POSITIVE,
                f32::MAX,
            ),
        ];
        for (name, value, low, high) in checks {
            if !(value >= low && value <= high) {
                let range = if high < f32::MAX {
                    format!("{low} to {high}")
                } else if low == 0.0 {
                    "a number of at least 0".into()
                } else {
                    "a number above 0".into()
                };
                let reason = format!("{name}: found {value}, expected {range}");
                return Err(Error::invalid("sampling", reason));
            }
        }
        Ok(())
    }

    /// Whether the choice is the plain most likely token, which a device can pick by itself.
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0 && self.repeat_penalty == 1.0
    }
}

/// Chooses tokens for one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    /// Candidates of the current step, kept to spare allocations.
    candidates: Vec<(f32, TokenId)>,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    ///
    /// # Errors
    /// Those of [`SamplingParams::validate`].
    pub fn new(params: SamplingParams) -> Result<Self> {
        params.validate()?;
        let rng = ChaCha8Rng::seed_from_u64(params.seed);
        Ok(Self {
            params,
            rng,
            candidates: Vec::new(),
        })
    }

    /// The settings.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses a token. `recent` is the sequence so far; `logits` is changed by the penalty.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[TokenId]) -> TokenId {
        self.penalise(logits, recent);
        if self.params.temperature == 0.0 {
            return greedy(logits);
        }
        self.collect(logits);
        self.cut();
        self.draw()
    }

    fn penalise(&self, logits: &mut [f32], recent: &[TokenId]) {
        let penalty = self.params.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        let tail = &recent[recent.len().saturating_sub(self.params.repeat_last_n)..];
        for (i, &token) in tail.iter().enumerate() {
            if tail[..i].contains(&token) {
                continue;
            }
            if let Some(x) = logits.get_mut(token as usize) {
                *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
            }
        }
    }

    /// The `top_k` most likely tokens, best first, with their scaled logits.
    fn collect(&mut self, logits: &[f32]) {
        let scale = 1.0 / self.params.temperature;
        let all = logits.iter().enumerate().filter(|(_, x)| !x.is_nan());
        self.candidates.clear();
        self.candidates
            .extend(all.map(|(i, &x)| (x * scale, i as TokenId)));
        let best_first =
            |a: &(f32, TokenId), b: &(f32, TokenId)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let k = self.params.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, best_first);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(best_first);
        let top = self.candidates.first().map_or(0.0, |c| c.0);
        let mut sum = 0.0;
        for (x, _) in &mut self.candidates {
            // A logit of infinity is a certainty, not a NaN.
            *x = if *x == top { 1.0 } else { (*x - top).exp() };
            sum += *x;
        }
        for (p, _) in &mut self.candidates {
            *p /= sum;
        }
    }

    /// Applies top-p and min-p; at least one candidate stays.
    fn cut(&mut self) {
        if self.params.top_p < 1.0 {
            let mut sum = 0.0;
            let reached = |&(p, _): &(f32, TokenId)| {
                sum += p;
                sum >= self.params.top_p
            };
            if let Some(last) = self.candidates.iter().position(reached) {
                self.candidates.truncate(last + 1);
            }
        }
        if let Some(&(top, _)) = self.candidates.first() {
            let least = top * self.params.min_p;
            let stay = self.candidates.partition_point(|c| c.0 >= least).max(1);
            self.candidates.truncate(stay);
        }
    }

    fn draw(&mut self) -> TokenId {
        let total: f32 = self.candidates.iter().map(|c| c.0).sum();
        // 24 random bits: every value is exact in f32, and below 1.
        let unit = (self.rng.next_u32() >> 8) as f32 / (1u32 << 24) as f32;
        let mut left = unit * total;
        for &(p, token) in &self.candidates {
            left -= p;
            if left < 0.0 {
                return token;
            }
        }
        self.candidates.last().map_or(0, |c| c.1)
    }
}

fn greedy(logits: &[f32]) -> TokenId {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, &x) in logits.iter().enumerate() {
        if x > best.0 {
            best = (x, i);
        }
    }
    best.1 as TokenId
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(params: SamplingParams, logits: &[f32], draws: usize) -> Vec<f64> {
        let mut sampler = Sampler::new(params).unwrap();
        let mut counts = vec![0usize; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(&mut logits.to_vec(), &[]) as usize] += 1;
        }
        counts.iter().map(|&c| c as f64 / draws as f64).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_never_nan() {
        let mut sampler = Sampler::new(SamplingParams::default()).unwrap();
        assert_eq!(sampler.sample(&mut [f32::NAN, 1.0, 3.0, 3.0], &[]), 2);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0, 2f32.ln(), 4f32.ln(), f32::NEG_INFINITY];
        let params = SamplingParams {
            temperature: 1.0,
            seed: 7,
            ..Default::default()
        };
        let found = shares(params, &logits, 20_000);
        for (share, expected) in found.iter().zip([1.0 / 7.0, 2.0 / 7.0, 4.0 / 7.0, 0.0]) {
            assert!((share - expected).abs() < 0.015, "{found:?}");
        }
    }

    #[test]
    fn filters_keep_the_most_likely() {
        let logits = [0.0, 1.0, 2.0, 3.0];
        let base = SamplingParams {
            temperature: 1.0,
            seed: 1,
            ..Default::default()
        };
        let cases = [
            (SamplingParams { top_k: 2, ..base }, vec![2, 3]),
            (SamplingParams { top_p: 0.7, ..base }, vec![2, 3]),
            (SamplingParams { top_p: 0.0, ..base }, vec![3]),
            (SamplingParams { min_p: 0.3, ..base }, vec![2, 3]),
            (SamplingParams { min_p: 1.0, ..base }, vec![3]),
        ];
        for (params, expected) in cases {
            let found = shares(params, &logits, 400);
            let drawn: Vec<_> = (0..4).filter(|&i| found[i] > 0.0).collect();
            assert_eq!(drawn, expected, "{params:?}");
        }
    }

    #[test]
    fn one_seed_one_sequence() {
        let params = SamplingParams {
            temperature: 1.0,
            seed: 3,
            ..Default::default()
        };
        let run = |params| {
            let mut sampler = Sampler::new(params).unwrap();
            (0..32)
                .map(|_| sampler.sample(&mut [0.0; 50], &[]))
                .collect::<Vec<_>>()
        };
        assert_eq!(run(params), run(params));
        assert_ne!(run(params), run(SamplingParams { seed: 4, ..params }));
    }

    #[test]
    fn the_penalty_counts_a_token_once() {
        let params = SamplingParams {
            repeat_penalty: 2.0,
            ..Default::default()
        };
        let mut logits = [4.0, -1.0, 1.5];
        let chosen = Sampler::new(params)
            .unwrap()
            .sample(&mut logits, &[0, 0, 1, 99]);
        assert_eq!((chosen, logits), (0, [2.0, -2.0, 1.5]));
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = SamplingParams {
            top_p: 1.5,
            ..Default::default()
        };
        assert!(
            bad.validate()
                .unwrap_err()
                .to_string()
                .contains("top-p: found 1.5")
        );
        let nan = SamplingParams {
            temperature: f32::NAN,
            ..Default::default()
        };
        assert!(nan.validate().is_err());
    }
}
