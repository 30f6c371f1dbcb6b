//! The tokens that are still in question, and the ways to make them fewer.
//!
//! A vocabulary is long, and much of it is unlikely. So what looks at all of it is vector code without
//! branches, and nothing is sorted before it must be, and then only as much as is looked at.

use super::{greedy, max, softmax_weights};
use crate::backend::RowSampling;
use ferrum_types::TokenId;
use std::cmp::Ordering;

/// Logits whose weights are computed at once: few enough to stay in the nearest cache.
const CHUNK: usize = 512;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    token: TokenId,
}

/// More likely first, lower ids first among equals.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The tokens of a row that are still in question. Probabilities are in proportion to `exp(logit / temperature)`, in every filter.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    /// Tokens, and beside them their logits.
    tokens: Vec<TokenId>,
    logits: Vec<f32>,
    /// The greatest logit.
    top: f32,
    temperature: f32,
    /// How many at the front are the best ones in order.
    sorted: usize,
    /// Space for orders.
    order: Vec<Candidate>,
    keyed: Vec<(f64, Candidate)>,
    /// Space for weights.
    weights: Vec<f32>,
}

impl Candidates {
    /// Chooses a token as `row` says, of logits that masks, biases and penalties have been applied to. Token 0
    /// where nothing has a probability.
    pub fn choose(&mut self, logits: &[f32], row: &RowSampling) -> TokenId {
        let temperature = row.temperature;
        if temperature == 0.0 {
            return greedy(logits);
        }
        if row.top_k == 0 && row.top_p >= 1.0 && row.min_p <= 0.0 {
            return self.draw_of(logits, temperature, row.uniform);
        }
        self.load(logits, row.top_k as usize, temperature);
        self.top_p(row.top_p);
        self.min_p(row.min_p);
        self.draw(row.uniform).0
    }

    /// Begins anew with the `k` most likely of the logits that are numbers; 0: with all. `temperature`
    /// is above 0 and holds for all that follows.
    pub fn load(&mut self, logits: &[f32], k: usize, temperature: f32) {
        self.temperature = temperature;
        self.order.clear();
        let cut = k > 0 && k < logits.len();
        if cut {
            self.find_best(logits, k);
        } else {
            let all = logits.iter().enumerate().filter(|(_, x)| !x.is_nan());
            self.order.extend(all.map(|(i, &logit)| Candidate {
                logit,
                token: i as TokenId,
            }));
        }
        self.take_order(0);
        self.sorted = if cut { self.tokens.len() } else { 0 };
        self.top = max(&self.logits);
    }

    /// Puts the `k` best in order. Most ranges of a row have nothing that is better than what was
    /// found before them.
    fn find_best(&mut self, logits: &[f32], k: usize) {
        let keep = |order: &mut Vec<Candidate>| {
            // Also for just `k`: the last of them is asked for.
            if k <= order.len() {
                order.select_nth_unstable_by(k - 1, best_first);
                order.truncate(k);
            }
        };
        let room = k.max(CHUNK);
        // Later ones of equals are never better, and need not be looked at.
        let mut least = f32::NEG_INFINITY;
        for (i, chunk) in logits.chunks(CHUNK).enumerate() {
            let full = self.order.len() >= k;
            if full && max(chunk) <= least {
                continue;
            }
            for (j, &logit) in chunk.iter().enumerate() {
                if logit > least || !full && !logit.is_nan() {
                    let token = (i * CHUNK + j) as TokenId;
                    self.order.push(Candidate { logit, token });
                }
            }
            if self.order.len() >= room {
                keep(&mut self.order);
                least = self.order[k - 1].logit;
            }
        }
        keep(&mut self.order);
        self.order.sort_unstable_by(best_first);
    }

    /// Keeps the most likely ones that together have probability `p`.
    pub fn top_p(&mut self, p: f32) {
        if p >= 1.0 {
            return;
        }
        let enough = f64::from(p) * self.total();
        let (mut sum, mut kept) = (0.0, 0);
        while kept < self.logits.len() && (kept == 0 || sum < enough) {
            // Mostly a few are enough; if not, many more are.
            if kept == self.sorted {
                self.sort_first((self.sorted * 8).max(64));
            }
            let end = self.sorted.min(kept + CHUNK);
            self.weights.resize(end - kept, 0.0);
            let (logits, weights) = (&self.logits[kept..end], &mut self.weights);
            softmax_weights(logits, self.top, self.temperature, weights);
            for &weight in &self.weights {
                sum += f64::from(weight);
                kept += 1;
                if sum >= enough {
                    break;
                }
            }
        }
        self.truncate(kept);
        self.sorted = self.sorted.min(kept);
    }

    /// Keeps those at least `p` times as probable as the best.
    pub fn min_p(&mut self, p: f32) {
        if p > 0.0 {
            let (top, least) = (self.top, self.top + self.temperature * p.ln());
            self.retain(|c| c.logit >= least || c.logit == top);
        }
    }

    /// Keeps those whose surprise is nearest to the expected one, until they together have more
    /// probability than `p`.
    pub fn typical(&mut self, p: f32) {
        if p >= 1.0 || self.logits.is_empty() {
            return;
        }
        let total = self.weigh_all();
        let surprise = |p: f64| if p > 0.0 { -p.ln() } else { f64::INFINITY };
        let shares = self.weights.iter().map(|&w| f64::from(w) / total);
        let expected: f64 = shares
            .clone()
            .filter(|&p| p > 0.0)
            .map(|p| p * surprise(p))
            .sum();
        let candidates = self.tokens.iter().zip(&self.logits);
        self.keyed.clear();
        self.keyed
            .extend(shares.zip(candidates).map(|(share, (&token, &logit))| {
                let key = (surprise(share) - expected).abs();
                (key, Candidate { logit, token })
            }));
        self.keyed
            .sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(best_first(&a.1, &b.1)));
        self.order.clear();
        self.order.extend(self.keyed.iter().map(|(_, c)| *c));
        self.take_order(0);
        self.weigh_all();
        let mut sum = 0.0;
        let passed = self.weights.iter().position(|&weight| {
            sum += f64::from(weight) / total;
            sum > f64::from(p)
        });
        self.truncate(passed.map_or(self.tokens.len(), |last| last + 1));
        self.sorted = 0;
        self.top = max(&self.logits);
    }

    /// Of those with a probability of at least `threshold`, keeps only the last.
    pub fn exclude_top(&mut self, threshold: f32) {
        let least = f64::from(threshold) * self.weigh_all();
        let candidates = self.tokens.iter().zip(&self.logits).zip(&self.weights);
        let last = candidates
            .filter(|&(_, &weight)| f64::from(weight) >= least)
            .map(|((&token, &logit), _)| Candidate { logit, token })
            .max_by(best_first);
        let Some(last) = last else {
            return;
        };
        self.retain(|c| best_first(c, &last) != Ordering::Less);
        self.sorted = 0;
        self.top = max(&self.logits);
    }

    /// Keeps those whose surprise is at most `bits`, and the best in any case.
    pub fn limit_surprise(&mut self, bits: f64) {
        let least = (self.total() * (-bits).exp2()).ln() * f64::from(self.temperature);
        let top = self.top;
        self.retain(|c| c.logit == top || f64::from(c.logit - top) >= least);
    }

    /// The token at which the cumulative probability passes `unit`, with its probability. An empty
    /// list gives token 0.
    pub fn draw(&mut self, unit: f64) -> (TokenId, f64) {
        let drawn = draw(&self.logits, self.temperature, unit, &mut self.weights);
        drawn.map_or((0, 1.0), |(at, probability)| (self.tokens[at], probability))
    }

    /// As [`load`](Self::load) and [`draw`](Self::draw) of all logits, without making a list of them.
    fn draw_of(&mut self, logits: &[f32], temperature: f32, unit: f64) -> TokenId {
        let drawn = draw(logits, temperature, unit, &mut self.weights);
        drawn.map_or(0, |(at, _)| at as TokenId)
    }

    /// Those that are left.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    fn total(&mut self) -> f64 {
        chunk_sums(&self.logits, self.temperature, &mut self.weights);
        self.weights.iter().copied().map(f64::from).sum()
    }

    /// Fills `weights`, and gives their sum.
    fn weigh_all(&mut self) -> f64 {
        let (top, temperature) = (self.top, self.temperature);
        self.weights.resize(self.logits.len(), 0.0);
        let chunks = self
            .logits
            .chunks(CHUNK)
            .zip(self.weights.chunks_mut(CHUNK));
        chunks
            .map(|(logits, weights)| f64::from(softmax_weights(logits, top, temperature, weights)))
            .sum()
    }

    /// Brings the best `n` to the front, in order.
    fn sort_first(&mut self, n: usize) {
        let n = n.min(self.tokens.len());
        if n <= self.sorted {
            return;
        }
        let rest = self.tokens[self.sorted..]
            .iter()
            .zip(&self.logits[self.sorted..]);
        self.order.clear();
        self.order
            .extend(rest.map(|(&token, &logit)| Candidate { logit, token }));
        let wanted = n - self.sorted;
        if wanted < self.order.len() {
            self.order.select_nth_unstable_by(wanted - 1, best_first);
        }
        self.order[..wanted].sort_unstable_by(best_first);
        self.take_order(self.sorted);
        self.sorted = n;
    }

    /// Replaces what comes after the first `from`.
    fn take_order(&mut self, from: usize) {
        self.truncate(from);
        self.tokens.extend(self.order.iter().map(|c| c.token));
        self.logits.extend(self.order.iter().map(|c| c.logit));
    }

    fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.logits.truncate(len);
    }

    /// What is in order stays so.
    fn retain(&mut self, keep: impl Fn(&Candidate) -> bool) {
        let (mut kept, mut sorted) = (0, 0);
        for i in 0..self.tokens.len() {
            let (logit, token) = (self.logits[i], self.tokens[i]);
            if keep(&Candidate { logit, token }) {
                (self.logits[kept], self.tokens[kept]) = (logit, token);
                kept += 1;
                sorted += usize::from(i < self.sorted);
            }
        }
        self.truncate(kept);
        self.sorted = sorted;
    }
}

/// The place in a row at which the cumulative probability passes `unit`, with its probability; `None`
/// where nothing has a probability. Logits that are no numbers have none.
fn draw(logits: &[f32], temperature: f32, unit: f64, sums: &mut Vec<f32>) -> Option<(usize, f64)> {
    let top = chunk_sums(logits, temperature, sums);
    let total: f64 = sums.iter().copied().map(f64::from).sum();
    let mut left = unit * total;
    // What rounding leaves over falls to the last chunk that has anything.
    let mut chosen = None;
    for (i, sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        chosen = Some((i * CHUNK, left));
        left -= f64::from(*sum);
        if left < 0.0 {
            break;
        }
    }
    let (start, mut left) = chosen?;
    let chunk = &logits[start..logits.len().min(start + CHUNK)];
    let mut buffer = [0.0; CHUNK];
    let weights = &mut buffer[..chunk.len()];
    softmax_weights(chunk, top, temperature, weights);
    let mut last = None;
    for (i, &weight) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
        left -= f64::from(weight);
        last = Some((start + i, f64::from(weight) / total));
        if left < 0.0 {
            break;
        }
    }
    last
}

/// Sums up the weights of each chunk; gives the greatest logit, which has weight 1. Reads a row once:
/// when a greater one turns up, the sums that are there are made to fit.
pub(super) fn chunk_sums(logits: &[f32], temperature: f32, sums: &mut Vec<f32>) -> f32 {
    let mut buffer = [0.0; CHUNK];
    let mut top = f32::NEG_INFINITY;
    sums.clear();
    for chunk in logits.chunks(CHUNK) {
        let best = max(chunk);
        if best > top {
            let less = ((top - best) / temperature).exp();
            sums.iter_mut().for_each(|sum| *sum *= less);
            top = best;
        }
        let weights = &mut buffer[..chunk.len()];
        sums.push(softmax_weights(chunk, top, temperature, weights));
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_vocabularies_are_cut_as_small_ones() {
        // Far more tokens than are sorted at first.
        let logits: Vec<f32> = (0..5000)
            .map(|i| -(((i * 37) % 5000) as f32) / 800.0)
            .collect();
        let mut order: Vec<_> = (0..5000).collect();
        order.sort_by(|&a: &usize, &b| logits[b].total_cmp(&logits[a]));
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for top_p in [0.05, 0.5, 0.9, 0.99] {
            let mut candidates = Candidates::default();
            candidates.load(&logits, 0, 1.0);
            candidates.top_p(top_p);
            let mut kept = candidates.tokens().to_vec();
            kept.sort_unstable();
            let mut sum = 0.0;
            let least = order.iter().position(|&i| {
                sum += f64::from(logits[i]).exp() / total;
                sum >= f64::from(top_p)
            });
            let mut expected: Vec<_> = order[..=least.unwrap()]
                .iter()
                .map(|&i| i as TokenId)
                .collect();
            expected.sort_unstable();
            assert_eq!(kept, expected, "{top_p}");
        }
    }

    #[test]
    fn sums_of_weights_fit_the_greatest_wherever_it_is() {
        let mixed: Vec<f32> = (0..5000).map(|i| ((i * 37) % 997) as f32 / 90.0).collect();
        let mut rising = mixed.clone();
        rising.sort_by(f32::total_cmp);
        let falling: Vec<f32> = rising.iter().rev().copied().collect();
        let mut holed = rising.clone();
        holed[..600].fill(f32::NEG_INFINITY);
        holed.iter_mut().step_by(5).for_each(|x| *x = f32::NAN);
        let mut sums = Vec::new();
        for logits in [&mixed, &rising, &falling, &holed] {
            for temperature in [0.05, 1.0, 8.0] {
                let top = chunk_sums(logits, temperature, &mut sums);
                let numbers = logits.iter().filter(|x| !x.is_nan());
                assert_eq!(Some(&top), numbers.clone().max_by(|a, b| a.total_cmp(b)));
                let weight = |x: &f32| (f64::from(x - top) / f64::from(temperature)).exp();
                let expected: f64 = numbers.map(weight).sum();
                let found: f64 = sums.iter().copied().map(f64::from).sum();
                assert!((found / expected - 1.0).abs() < 1e-5, "{found} {expected}");
            }
        }
        rising[4000] = f32::INFINITY;
        assert_eq!(chunk_sums(&rising, 1.0, &mut sums), f32::INFINITY);
        assert_eq!(sums.iter().sum::<f32>(), 1.0);
        assert_eq!(chunk_sums(&[], 1.0, &mut sums), f32::NEG_INFINITY);
        assert!(sums.is_empty());
    }

    #[test]
    fn the_best_of_a_large_vocabulary_are_found_in_one_pass() {
        let whole: Vec<f32> = (0..5000).map(|i| ((i * 37) % 101) as f32).collect();
        let mut holed = whole.clone();
        holed.iter_mut().step_by(77).for_each(|x| *x = f32::NAN);
        holed[4321] = f32::INFINITY;
        holed[17] = f32::NEG_INFINITY;
        // In rising order, every range has better ones than those before it.
        let rising: Vec<f32> = (0..5000).map(|i| i as f32).collect();
        let mixed: Vec<f32> = (0..5000).map(|i| ((i * 2741) % 5000) as f32).collect();
        for logits in [whole, holed, rising, mixed] {
            let mut order: Vec<usize> = (0..5000).filter(|&i| !logits[i].is_nan()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            for k in [1, 2, 40, 511, 512, 513, 1024, 1536, 2048, 3072, 4096, 4999] {
                let mut candidates = Candidates::default();
                candidates.load(&logits, k, 1.0);
                let expected: Vec<_> = order.iter().take(k).map(|&i| i as TokenId).collect();
                assert_eq!(candidates.tokens(), expected, "{k}");
            }
        }
    }
}
