//! Log-probabilities of tokens, as the model gave them: of the raw logits, before bias, penalties,
//! temperature and all else, so that they mean the same whatever was asked of the sampler.

use super::candidates::chunk_sums;
use crate::backend::{Logprobs, TokenLogprob};
use ferrum_types::TokenId;

/// Log-probabilities of `token` and of the `top` most likely tokens in a row of raw logits. A token
/// outside the row has `-inf`.
pub fn logprobs(logits: &[f32], token: TokenId, top: usize) -> Logprobs {
    // Sums have one fixed order: the same row gives the same bits.
    let mut sums = Vec::new();
    let max = chunk_sums(logits, 1.0, &mut sums);
    let log_sum = sums.into_iter().map(f64::from).sum::<f64>().ln();
    let logprob = |x: f32| match x == max {
        true => -log_sum as f32,
        false => (f64::from(x) - f64::from(max) - log_sum) as f32,
    };
    let own = logits.get(token as usize).copied();
    let own = own.filter(|x| !x.is_nan()).unwrap_or(f32::NEG_INFINITY);
    let above = |(i, x): (usize, &f32)| *x > own || *x == own && i < token as usize;
    Logprobs {
        chosen: TokenLogprob {
            token,
            logprob: logprob(own),
        },
        rank: 1 + logits.iter().enumerate().filter(|&c| above(c)).count(),
        top: best(logits, top)
            .into_iter()
            .map(|(x, token)| TokenLogprob {
                token,
                logprob: logprob(x),
            })
            .collect(),
    }
}

/// The `n` greatest, in one pass: `n` is small.
fn best(logits: &[f32], n: usize) -> Vec<(f32, TokenId)> {
    let mut best: Vec<(f32, TokenId)> = Vec::with_capacity(n.min(logits.len()) + 1);
    for (i, &x) in logits.iter().enumerate().filter(|(_, x)| !x.is_nan()) {
        if n == 0 || best.len() == n && best.last().is_some_and(|last| x <= last.0) {
            continue;
        }
        let at = best.partition_point(|b| b.0 >= x);
        best.insert(at, (x, i as TokenId));
        best.truncate(n);
    }
    best
}
