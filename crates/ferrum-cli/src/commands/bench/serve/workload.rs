//! What is asked: random words, as many as it takes, the same for the same seed.

use crate::args::{BenchServeArgs, Lengths};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::time::Duration;

/// Short and frequent, so that most vocabularies have a token for each.
pub(super) const WORDS: [&str; 64] = [
    "the", "and", "time", "man", "day", "way", "water", "little", "house", "good", "old", "big",
    "red", "home", "new", "work", "part", "place", "year", "back", "hand", "high", "last", "long",
    "great", "same", "end", "name", "line", "own", "under", "world", "side", "head", "light",
    "night", "tree", "far", "sea", "left", "run", "few", "food", "sun", "city", "earth", "eye",
    "story", "life", "book", "letter", "girl", "boy", "river", "car", "feet", "second", "group",
    "music", "color", "paper", "mountain", "dog", "friend",
];

/// A linear estimate of the tokens of a prompt by its words, fitted to two prompts that a server has counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenEstimate {
    /// Tokens of a prompt without words: what a template adds.
    pub(super) overhead: f64,
    /// Tokens of a word.
    pub(super) per_word: f64,
}

impl Default for TokenEstimate {
    fn default() -> Self {
        Self {
            overhead: 0.0,
            per_word: 1.0,
        }
    }
}

impl TokenEstimate {
    /// From two prompts: numbers of words and of tokens.
    pub(super) fn of(few: (f64, f64), many: (f64, f64)) -> Self {
        let per_word = ((many.1 - few.1) / (many.0 - few.0)).clamp(0.25, 16.0);
        Self {
            overhead: (few.1 - few.0 * per_word).max(0.0),
            per_word,
        }
    }

    fn words(self, tokens: u32) -> usize {
        (((f64::from(tokens) - self.overhead) / self.per_word).round() as usize).max(1)
    }
}

/// A request.
#[derive(Debug, PartialEq)]
pub(super) struct BenchRequest {
    pub(super) prompt: String,
    pub(super) output_tokens: u32,
    pub(super) seed: u64,
}

/// All requests of a run.
pub(super) struct Plan {
    requests: u32,
    seed: u64,
    prompt: Lengths,
    output: Lengths,
    token_estimate: TokenEstimate,
}

impl Plan {
    pub(super) fn new(args: &BenchServeArgs, token_estimate: TokenEstimate) -> Self {
        Self {
            requests: args.requests,
            seed: args.seed,
            prompt: args.prompt_tokens,
            output: args.output_tokens,
            token_estimate,
        }
    }

    /// The `i`-th request; `None` after the last.
    pub(super) fn request(&self, i: u32) -> Option<BenchRequest> {
        if i >= self.requests {
            return None;
        }
        // Each has random numbers of its own, so that none depends on which is sent first.
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(u64::from(i) + 1);
        let mut length = |lengths: Lengths| lengths.draw(unit(&mut rng), unit(&mut rng));
        let (prompt, output_tokens) = (length(self.prompt), length(self.output));
        Some(BenchRequest {
            prompt: words(&mut rng, self.token_estimate.words(prompt)),
            output_tokens,
            seed: rng.next_u64() >> 11,
        })
    }

    /// When requests go out, after the start of the run: a Poisson process.
    pub(super) fn arrivals(&self, rate: f64) -> impl Iterator<Item = Duration> + use<> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut at = 0.0;
        std::iter::from_fn(move || {
            let now = Duration::try_from_secs_f64(at).ok();
            at -= (1.0 - unit(&mut rng)).ln() / rate;
            now
        })
    }
}

/// So many words, of a random sequence.
fn words(rng: &mut ChaCha8Rng, n: usize) -> String {
    let words: Vec<_> = (0..n)
        .map(|_| WORDS[rng.next_u64() as usize % WORDS.len()])
        .collect();
    words.join(" ")
}

/// Uniform, at least 0 and below 1.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(seed: u64) -> Plan {
        Plan {
            requests: 200,
            seed,
            prompt: Lengths::Uniform(20, 40),
            output: Lengths::Fixed(7),
            token_estimate: TokenEstimate::of((10.0, 25.0), (110.0, 175.0)),
        }
    }

    #[test]
    fn a_seed_is_a_run() {
        let all = |seed| {
            (0..200)
                .map(|i| plan(seed).request(i).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(all(1), all(1));
        assert_ne!(all(1), all(2));
        assert_eq!(plan(1).request(200), None);
        assert_ne!(
            plan(1).request(0).unwrap().prompt,
            plan(1).request(1).unwrap().prompt
        );
        // 1.5 tokens a word and 10 beside them.
        let words: Vec<_> = all(1)
            .iter()
            .map(|asked| asked.prompt.split(' ').count())
            .collect();
        assert!(words.iter().all(|n| (7..=20).contains(n)), "{words:?}");
    }

    #[test]
    fn arrivals_have_their_rate() {
        let times: Vec<_> = plan(3).arrivals(50.0).take(10_000).collect();
        assert!(times.is_sorted() && times[0] == Duration::ZERO);
        let seconds = times[9_999].as_secs_f64();
        assert!((190.0..210.0).contains(&seconds), "{seconds}");
        // Not at regular times: gaps spread as widely as their mean.
        let gaps: Vec<_> = times
            .windows(2)
            .map(|t| (t[1] - t[0]).as_secs_f64())
            .collect();
        let mean = seconds / 9_999.0;
        let spread = (gaps
            .iter()
            .map(|gap| (gap - mean) * (gap - mean))
            .sum::<f64>()
            / 9_999.0)
            .sqrt();
        assert!((0.9..1.1).contains(&(spread / mean)), "{spread} {mean}");
    }
}
