//! Temperature fallback: a window whose text looks wrong is decoded again at a higher temperature (Radford et al., 2022,
//! section 4.5).
//!
//! Greedy decoding of speech sometimes repeats itself until the window is full, or generates text without speech. Both are
//! detected by statistics of the text: how well it compresses, how likely its tokens are, and how likely silence is.

use super::rules::likeliest;
use ferrum_types::{Error, Result, TokenId};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::io::Write;

/// How much the temperature rises from one attempt to the next.
const INCREMENT: f32 = 0.2;
/// The highest temperature.
const HIGHEST: f32 = 1.0;

/// Thresholds of the fallback. The defaults are those of OpenAI's Whisper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fallback {
    /// A text that compresses further than this repeats itself.
    pub compression_ratio: f32,
    /// A text whose tokens have a lower mean log-probability is decoded again.
    pub logprob: f32,
    /// Above this probability of silence, a text below `logprob` is dropped.
    pub no_speech: f32,
}

impl Default for Fallback {
    fn default() -> Self {
        Self {
            compression_ratio: 2.4,
            logprob: -1.0,
            no_speech: 0.6,
        }
    }
}

/// Figures of a decoded window, as OpenAI's verbose transcripts have them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WindowFigures {
    /// The temperature that its tokens were sampled at; 0 is greedy.
    pub temperature: f32,
    /// Mean log-probability of its tokens, the one that ends the text included.
    pub average_logprob: f32,
    /// Bytes of its text by those of the text compressed with zlib.
    pub compression_ratio: f32,
    /// Probability that the window has no speech; 0 for a vocabulary without a token for it.
    pub no_speech: f32,
}

impl Fallback {
    /// The temperature of the next attempt, if there is to be one.
    pub(super) fn next(&self, figures: &WindowFigures) -> Option<f32> {
        let repeats = figures.compression_ratio > self.compression_ratio;
        let unlikely = figures.average_logprob < self.logprob;
        if self.is_silence(figures) || !(repeats || unlikely) || figures.temperature >= HIGHEST {
            return None;
        }
        // Steps of a float drift: the last one is not to end just below the highest.
        let next = figures.temperature + INCREMENT;
        Some(if next > HIGHEST - INCREMENT / 2.0 {
            HIGHEST
        } else {
            next
        })
    }

    /// Whether the window has no speech, so that its text is made up.
    pub(super) fn is_silence(&self, figures: &WindowFigures) -> bool {
        figures.no_speech > self.no_speech && figures.average_logprob < self.logprob
    }
}

/// How many times smaller a text becomes by zlib.
pub(super) fn compression_ratio(text: &str) -> f32 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing to a vector does not fail; without a length the ratio is that of an empty text.
    let packed = encoder
        .write_all(text.as_bytes())
        .and_then(|()| encoder.finish());
    match packed {
        Ok(packed) if !packed.is_empty() => text.len() as f32 / packed.len() as f32,
        _ => 0.0,
    }
}

/// Probability of a token by logits.
pub(super) fn probability(logits: &[f32], token: TokenId) -> f32 {
    match logits.get(token as usize) {
        Some(&logit) => (f64::from(logit) - log_sum_exp(logits)).exp() as f32,
        None => 0.0,
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    most + sum.ln()
}

/// Chooses the tokens of one attempt and keeps what their log-probabilities sum to.
pub(super) struct Attempt {
    temperature: f32,
    rng: ChaCha8Rng,
    sum: f64,
    tokens: usize,
}

impl Attempt {
    /// The same recording gives the same text: the seed is that of the window.
    pub(super) fn new(temperature: f32, seed: u64) -> Self {
        Self {
            temperature,
            rng: ChaCha8Rng::seed_from_u64(seed),
            sum: 0.0,
            tokens: 0,
        }
    }

    /// The next token.
    ///
    /// # Errors
    /// `InvalidArgument` where no logit is a number.
    pub(super) fn choose(&mut self, logits: &[f32]) -> Result<TokenId> {
        let best = likeliest(logits);
        let best = best
            .ok_or_else(|| Error::invalid("transcribe", "the model computed no numbers (NaN)"))?;
        let token = if self.temperature > 0.0 {
            self.sample(logits, best)
        } else {
            best
        };
        self.sum += f64::from(logits[token as usize]) - log_sum_exp(logits);
        self.tokens += 1;
        Ok(token)
    }

    fn sample(&mut self, logits: &[f32], best: TokenId) -> TokenId {
        let most = logits[best as usize];
        let weight = |x: f32| match x.is_nan() {
            true => 0.0,
            false => (f64::from(x - most) / f64::from(self.temperature)).exp(),
        };
        let sum: f64 = logits.iter().map(|&x| weight(x)).sum();
        let unit = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = unit * sum;
        for (token, &x) in logits.iter().enumerate() {
            left -= weight(x);
            if left < 0.0 {
                return token as TokenId;
            }
        }
        best
    }

    /// Mean log-probability of the tokens that were chosen.
    pub(super) fn average_logprob(&self) -> f32 {
        (self.sum / self.tokens.max(1) as f64) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_go_on_until_a_text_is_fine_or_the_temperature_is_highest() {
        let fallback = Fallback::default();
        let figures = |temperature, average_logprob, compression_ratio, no_speech| WindowFigures {
            temperature,
            average_logprob,
            compression_ratio,
            no_speech,
        };
        for (case, next) in [
            (figures(0.0, -0.3, 1.4, 0.1), None),
            (figures(0.0, -0.3, 2.5, 0.1), Some(0.2)),
            (figures(0.0, -1.2, 1.4, 0.1), Some(0.2)),
            (figures(0.2, -1.2, 1.4, 0.1), Some(0.4)),
            (figures(0.8, -1.2, 1.4, 0.1), Some(1.0)),
            (figures(1.0, -1.2, 1.4, 0.1), None),
            (figures(0.95, -1.2, 1.4, 0.1), Some(1.0)),
            // Silence is dropped, not decoded again; a likely text is kept however likely silence is.
            (figures(0.0, -1.2, 1.4, 0.7), None),
            (figures(0.0, -0.3, 1.4, 0.7), None),
        ] {
            assert_eq!(fallback.next(&case), next, "{case:?}");
        }
        assert!(fallback.is_silence(&figures(0.0, -1.2, 1.4, 0.7)));
        assert!(!fallback.is_silence(&figures(0.0, -0.3, 1.4, 0.7)));
    }

    #[test]
    fn a_text_that_repeats_itself_compresses() {
        let threshold = Fallback::default().compression_ratio;
        assert!(compression_ratio(&" and then".repeat(30)) > threshold);
        assert!(compression_ratio("The quick brown fox jumps over the lazy dog.") < 1.2);
        assert_eq!(compression_ratio(""), 0.0);
    }

    #[test]
    fn tokens_are_sampled_by_their_probabilities_and_the_seed() {
        let logits = [1.0, f32::NEG_INFINITY, 2.0, f32::NAN, 0.0];
        let counts = |temperature, seed| {
            let mut attempt = Attempt::new(temperature, seed);
            let mut counts = [0; 5];
            for _ in 0..4000 {
                counts[attempt.choose(&logits).unwrap() as usize] += 1;
            }
            counts
        };
        assert_eq!(counts(0.0, 1), [0, 0, 4000, 0, 0]);
        let found = counts(1.0, 1);
        let sum = 1f64.exp() + 2f64.exp() + 1.0;
        for (token, logit) in [(0, 1.0f64), (2, 2.0), (4, 0.0)] {
            let expected = 4000.0 * logit.exp() / sum;
            let off = (f64::from(found[token]) - expected).abs();
            assert!(off < 4.0 * expected.sqrt(), "{token}: {found:?}");
        }
        assert_eq!((found[1], found[3]), (0, 0));
        assert_eq!(found, counts(1.0, 1));
        assert_ne!(found, counts(1.0, 2));
        assert!(Attempt::new(0.0, 0).choose(&[f32::NAN]).is_err());
    }

    #[test]
    fn log_probabilities_are_those_of_a_softmax() {
        let logits = [0.0, 1.0, f32::NEG_INFINITY];
        let mut attempt = Attempt::new(0.0, 0);
        assert_eq!(attempt.choose(&logits).unwrap(), 1);
        let expected = 1.0 - (1.0 + 1f32.exp()).ln();
        assert!((attempt.average_logprob() - expected).abs() < 1e-6);
        assert!((probability(&logits, 1) - expected.exp()).abs() < 1e-6);
        assert_eq!(probability(&logits, 2), 0.0);
        assert_eq!(probability(&logits, 9), 0.0);
    }
}
