//! The tokens that are still in question, and the ways to make them fewer.
//!
//! Sorting a vocabulary takes longer than all else here, so nothing is sorted before it must be, and
//! then only as much as is looked at.

use ferrum_types::TokenId;
use std::cmp::Ordering;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    token: TokenId,
}

/// More likely first, lower ids first among equals.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// See the [module](self). Probabilities are in proportion to `exp(logit / temperature)`.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    list: Vec<Candidate>,
    /// The greatest logit.
    top: f32,
    /// How many at the front of the list are the best ones in order.
    sorted: usize,
    /// Space for orders other than by logit.
    keyed: Vec<(f64, Candidate)>,
}

impl Candidates {
    /// Begins anew with all logits that are numbers.
    pub(super) fn load(&mut self, logits: &[f32]) {
        let all = logits.iter().enumerate().filter(|(_, x)| !x.is_nan());
        self.list.clear();
        self.list.extend(all.map(|(i, &logit)| Candidate {
            logit,
            token: i as TokenId,
        }));
        self.sorted = 0;
        self.find_top();
    }

    /// Keeps the `k` most likely; 0: all.
    pub(super) fn top_k(&mut self, k: usize) {
        if k > 0 && k < self.list.len() {
            self.sort_first(k);
            self.list.truncate(k);
        }
    }

    /// Keeps the most likely ones that together have probability `p`.
    pub(super) fn top_p(&mut self, p: f32) {
        if p >= 1.0 {
            return;
        }
        let enough = f64::from(p) * self.total(1.0);
        let (mut sum, mut kept) = (0.0, 0);
        while kept < self.list.len() {
            // Mostly a few are enough; if not, many more are.
            if kept == self.sorted {
                self.sort_first((self.sorted * 8).max(64));
            }
            sum += self.weight(self.list[kept].logit, 1.0);
            kept += 1;
            if sum >= enough {
                break;
            }
        }
        self.list.truncate(kept);
        self.sorted = self.sorted.min(kept);
    }

    /// Keeps those at least `p` times as probable as the best.
    pub(super) fn min_p(&mut self, p: f32) {
        if p > 0.0 {
            let least = self.top + p.ln();
            let top = self.top;
            self.retain(|logit| logit >= least || logit == top);
        }
    }

    /// Keeps those whose surprise is nearest to the expected one, until they together have more
    /// probability than `p`.
    pub(super) fn typical(&mut self, p: f32) {
        if p >= 1.0 || self.list.is_empty() {
            return;
        }
        let mut keyed = std::mem::take(&mut self.keyed);
        keyed.clear();
        let total = self.total(1.0);
        let share = |c: &Candidate| self.weight(c.logit, 1.0) / total;
        let surprise = |p: f64| if p > 0.0 { -p.ln() } else { f64::INFINITY };
        let expected: f64 = self
            .list
            .iter()
            .map(share)
            .filter(|&p| p > 0.0)
            .map(|p| p * surprise(p))
            .sum();
        let key = |c: &Candidate| (surprise(share(c)) - expected).abs();
        keyed.extend(self.list.iter().map(|c| (key(c), *c)));
        keyed.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(best_first(&a.1, &b.1)));
        let mut sum = 0.0;
        let passed = keyed.iter().position(|(_, c)| {
            sum += share(c);
            sum > f64::from(p)
        });
        keyed.truncate(passed.map_or(keyed.len(), |last| last + 1));
        self.list.clear();
        self.list.extend(keyed.iter().map(|(_, c)| *c));
        self.keyed = keyed;
        self.sorted = 0;
        self.find_top();
    }

    /// Of those with a probability of at least `threshold`, keeps only the last.
    pub(super) fn exclude_top(&mut self, threshold: f32) {
        let least = f64::from(threshold) * self.total(1.0);
        let chosen = |c: &&Candidate| self.weight(c.logit, 1.0) >= least;
        let choices = self.list.iter().filter(chosen);
        let Some(last) = choices.max_by(|a, b| best_first(a, b)).copied() else {
            return;
        };
        self.list.retain(|c| best_first(c, &last) != Ordering::Less);
        self.sorted = 0;
        self.find_top();
    }

    /// Keeps those whose surprise at `temperature` is at most `bits`, and the best in any case.
    pub(super) fn limit_surprise(&mut self, temperature: f32, bits: f64) {
        let least = self.total(temperature) * (-bits).exp2();
        let top = self.top;
        let mut list = std::mem::take(&mut self.list);
        list.retain(|c| c.logit == top || self.weight(c.logit, temperature) >= least);
        self.list = list;
        self.sorted = 0;
    }

    /// The token at which the cumulative probability passes `unit`, with its probability. An empty
    /// list gives token 0.
    pub(super) fn draw(&self, temperature: f32, unit: f64) -> (TokenId, f64) {
        let total = self.total(temperature);
        let mut left = unit * total;
        let mut last = (0, 1.0);
        for c in &self.list {
            let weight = self.weight(c.logit, temperature);
            left -= weight;
            if weight > 0.0 {
                last = (c.token, weight / total);
            }
            if left < 0.0 {
                break;
            }
        }
        last
    }

    #[cfg(test)]
    pub(super) fn tokens(&self) -> Vec<TokenId> {
        self.list.iter().map(|c| c.token).collect()
    }

    /// Probability beside that of the best.
    fn weight(&self, logit: f32, temperature: f32) -> f64 {
        // A logit of infinity is a certainty, not a NaN.
        if logit == self.top {
            1.0
        } else {
            f64::from(((logit - self.top) / temperature).exp())
        }
    }

    fn total(&self, temperature: f32) -> f64 {
        let weights = self.list.iter().map(|c| self.weight(c.logit, temperature));
        weights.sum()
    }

    /// Brings the best `n` to the front, in order.
    fn sort_first(&mut self, n: usize) {
        let n = n.min(self.list.len());
        if n <= self.sorted {
            return;
        }
        let rest = &mut self.list[self.sorted..];
        let wanted = n - self.sorted;
        if wanted < rest.len() {
            rest.select_nth_unstable_by(wanted - 1, best_first);
        }
        rest[..wanted].sort_unstable_by(best_first);
        self.sorted = n;
    }

    fn retain(&mut self, keep: impl Fn(f32) -> bool) {
        let sorted = self.list[..self.sorted].iter();
        self.sorted = sorted.filter(|c| keep(c.logit)).count();
        self.list.retain(|c| keep(c.logit));
    }

    fn find_top(&mut self) {
        let logits = self.list.iter().map(|c| c.logit);
        self.top = logits.fold(f32::NEG_INFINITY, f32::max);
    }
}
