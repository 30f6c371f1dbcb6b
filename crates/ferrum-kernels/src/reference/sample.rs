//! Choosing tokens, as `backend/sample.rs` says it.

use super::buffer::RefBuffer;
use super::core::{RefContext, Reference};
use super::precision::Precision;
use crate::backend::{
    BackendSample, DeviceSampling, LogitAdjustment, MAX_LOGPROBS, NoToken, RowSampling,
    SampleShape, Sampled,
};
use ferrum_types::{FloatElement, Result};
use std::cmp::Ordering;

/// A token and its logit.
type Candidate = (usize, f32);

/// More likely first, lower ids first among equals.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The logits that are numbers.
fn numbers(row: &[f32]) -> Vec<Candidate> {
    let all = row.iter().copied().enumerate();
    // The two zeros are equal.
    all.filter(|(_, x)| !x.is_nan())
        .map(|(token, x)| (token, x + 0.0))
        .collect()
}

impl<P: Precision> BackendSample for Reference<P> {
    fn samples(&self) -> bool {
        true
    }

    fn sample_rows(
        _: &mut RefContext<P>,
        logits: &mut RefBuffer<P::Logit>,
        shape: SampleShape,
        sampling: &mut DeviceSampling<Self>,
        previous: &RefBuffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        let batch = &sampling.rows;
        batch.check::<Self>(logits, shape, previous, out)?;
        for index in 0..batch.len() {
            let (row, changes, mask) = batch.row(index);
            let at = shape.first + index;
            let logits = &logits.0[at * shape.vocab..][..shape.vocab];
            let logits: &Vec<f32> = &logits.iter().map(|x| x.to_f32()).collect();
            let last = row.pending_row.map(|last| previous.0[last as usize]);
            let bent = bend(logits, row, changes, mask, last);
            let token = choose(&bent, row);
            out.tokens.0[at] = token.map_or_else(NoToken::code, |token| token as i32);
            if let (Ok(token), Some(top)) = (token, row.logprobs) {
                let beside = at * (1 + MAX_LOGPROBS)..(at + 1) * (1 + MAX_LOGPROBS);
                let ranks = &mut out.ranks.0[beside.clone()];
                tell(
                    logits,
                    token,
                    top as usize,
                    ranks,
                    &mut out.logprobs.0[beside],
                );
            }
        }
        Ok(())
    }
}

/// Mask, biases and penalties.
fn bend(
    logits: &[f32],
    row: &RowSampling,
    changes: &[LogitAdjustment],
    mask: &[u32],
    last: Option<i32>,
) -> Vec<f32> {
    let allowed = |token: usize| {
        let word = mask.get(token / 32).copied().unwrap_or(0);
        mask.is_empty() || word >> (token % 32) & 1 == 1
    };
    let changed = |(token, &x): (usize, &f32)| {
        if !allowed(token) {
            return f32::NEG_INFINITY;
        }
        let change = changes.iter().find(|change| change.token as usize == token);
        let is_last = last.is_some_and(|last| last == token as i32);
        let mut change = match (change, is_last) {
            (None, false) => return x,
            (found, _) => found
                .copied()
                .unwrap_or(LogitAdjustment::none(token as u32)),
        };
        if is_last {
            change = change.with_occurrence();
        }
        row.adjusted(x, &change)
    };
    logits.iter().enumerate().map(changed).collect()
}

fn choose(logits: &[f32], row: &RowSampling) -> std::result::Result<usize, NoToken> {
    let mut candidates = numbers(logits);
    let mut ranked = candidates.clone();
    ranked.sort_by(best_first);
    let top = match ranked.first() {
        Some(&(token, top)) if top > f32::NEG_INFINITY => (token, top),
        _ if logits.iter().any(|x| x.is_nan()) => return Err(NoToken::NotANumber),
        _ => return Err(NoToken::Forbidden),
    };
    if row.temperature == 0.0 {
        return Ok(top.0);
    }
    let weight = |&(_, x): &Candidate| match x == top.1 {
        true => 1.0,
        false => ((f64::from(x) - f64::from(top.1)) / f64::from(row.temperature)).exp(),
    };
    if row.draws_by_rank(logits.len()) {
        candidates = ranked;
    }
    if row.cuts_to_k(logits.len()) {
        candidates.truncate(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let enough = f64::from(row.top_p) * candidates.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = |candidate: &Candidate| {
            sum += weight(candidate);
            sum >= enough
        };
        let last = candidates.iter().position(reached);
        candidates.truncate(last.map_or(candidates.len(), |last| last + 1));
    }
    if row.min_p > 0.0 {
        let least = f64::from(row.min_p);
        candidates.retain(|candidate| candidate.1 == top.1 || weight(candidate) >= least);
    }
    let mut left = row.uniform * candidates.iter().map(weight).sum::<f64>();
    candidates.retain(|candidate| weight(candidate) > 0.0);
    let passed = |candidate: &&Candidate| {
        left -= weight(candidate);
        left < 0.0
    };
    // What rounding leaves over falls to the last.
    let drawn = candidates.iter().find(passed).or(candidates.last());
    Ok(drawn.map_or(top.0, |drawn| drawn.0))
}

/// Rank of the token and log-probabilities of it and of the `top` most likely.
fn tell(logits: &[f32], token: usize, top: usize, ranks: &mut [i32], told: &mut [f32]) {
    let mut candidates = numbers(logits);
    candidates.sort_by(best_first);
    let best = candidates.first().map_or(f32::NEG_INFINITY, |best| best.1);
    let above = |x: f32| match x == best {
        true => 0.0,
        false => f64::from(x) - f64::from(best),
    };
    let sum: f64 = candidates.iter().map(|&(_, x)| above(x).exp()).sum();
    let logprob = |x: f32| (above(x) - sum.ln()) as f32;
    let rank = candidates.iter().position(|candidate| candidate.0 == token);
    ranks[0] = rank.unwrap_or(candidates.len()) as i32 + 1;
    let own = Some(logits[token]).filter(|x| !x.is_nan());
    told[0] = logprob(own.unwrap_or(f32::NEG_INFINITY));
    ranks[1..].fill(-1);
    for (i, &(token, x)) in candidates.iter().take(top).enumerate() {
        ranks[1 + i] = token as i32;
        told[1 + i] = logprob(x);
    }
}
