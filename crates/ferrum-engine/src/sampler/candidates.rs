//! The tokens that are still in question, and the ways to make them fewer.
//!
//! A vocabulary is long, and much of it is unlikely. So what looks at all of it is vector code without
//! branches, and nothing is sorted before it must be, and then only as much as is looked at.

use ferrum_kernels::cpu::logits::{max, weigh};
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

/// See the [module](self). Probabilities are in proportion to `exp(logit / temperature)`, in every filter.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
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
    /// Begins anew with the `k` most likely of the logits that are numbers; 0: with all. `temperature`
    /// is above 0 and holds for all that follows.
    pub(super) fn load(&mut self, logits: &[f32], k: usize, temperature: f32) {
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

    /// Puts the `k` best in order. Most stretches of a row have nothing that is better than what was
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
    pub(super) fn top_p(&mut self, p: f32) {
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
            weigh(logits, self.top, self.temperature, weights);
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
    pub(super) fn min_p(&mut self, p: f32) {
        if p > 0.0 {
            let (top, least) = (self.top, self.top + self.temperature * p.ln());
            self.retain(|c| c.logit >= least || c.logit == top);
        }
    }

    /// Keeps those whose surprise is nearest to the expected one, until they together have more
    /// probability than `p`.
    pub(super) fn typical(&mut self, p: f32) {
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
    pub(super) fn exclude_top(&mut self, threshold: f32) {
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
    pub(super) fn limit_surprise(&mut self, bits: f64) {
        let least = (self.total() * (-bits).exp2()).ln() * f64::from(self.temperature);
        let top = self.top;
        self.retain(|c| c.logit == top || f64::from(c.logit - top) >= least);
    }

    /// The token at which the cumulative probability passes `unit`, with its probability. An empty
    /// list gives token 0.
    pub(super) fn draw(&mut self, unit: f64) -> (TokenId, f64) {
        let drawn = draw(&self.logits, self.temperature, unit, &mut self.weights);
        drawn.map_or((0, 1.0), |(at, probability)| (self.tokens[at], probability))
    }

    /// As [`load`](Self::load) and [`draw`](Self::draw) of all logits, without making a list of them.
    pub(super) fn draw_of(&mut self, logits: &[f32], temperature: f32, unit: f64) -> TokenId {
        let drawn = draw(logits, temperature, unit, &mut self.weights);
        drawn.map_or(0, |(at, _)| at as TokenId)
    }

    #[cfg(test)]
    pub(super) fn tokens(&self) -> Vec<TokenId> {
        self.tokens.clone()
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
            .map(|(logits, weights)| f64::from(weigh(logits, top, temperature, weights)))
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
    weigh(chunk, top, temperature, weights);
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
        sums.push(weigh(chunk, top, temperature, weights));
    }
    top
}
