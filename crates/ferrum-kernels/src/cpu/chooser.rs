//! Chooses a token of one row of logits.

use super::logits::{Candidates, logprobs, possible};
use crate::backend::{LogitAdjustment, RowSampling, SampleBatch};
use ferrum_types::TokenId;

/// What one thread needs to choose.
#[derive(Default)]
pub(crate) struct Chooser {
    candidates: Candidates,
    /// A row as the model made it, where that is asked for.
    raw: Vec<f32>,
}

impl Chooser {
    /// The token of a row of the batch, or the code of why there is none.
    pub(super) fn choose(
        &mut self,
        logits: &mut [f32],
        batch: &SampleBatch,
        index: usize,
        previous: &[i32],
        beside: (&mut [i32], &mut [f32]),
    ) -> i32 {
        let (row, changes, mask) = batch.row(index);
        self.raw.clear();
        if row.logprobs.is_some() {
            self.raw.extend_from_slice(logits);
        }
        if !mask.is_empty() {
            forbid(logits, mask);
        }
        let last = row
            .pending_row
            .and_then(|last| TokenId::try_from(previous[last as usize]).ok());
        change(logits, row, changes, last);
        match possible(logits, self.candidates.choose(logits, row)) {
            Ok(token) => {
                if let Some(top) = row.logprobs {
                    tell(&self.raw, token, top as usize, beside);
                }
                token as i32
            }
            Err(none) => none.code(),
        }
    }
}

/// −∞ for each token whose bit is not set.
fn forbid(logits: &mut [f32], mask: &[u32]) {
    let words = mask.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        if word == u32::MAX {
            continue;
        }
        for (bit, x) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *x = f32::NEG_INFINITY;
            }
        }
    }
}

/// Biases and penalties; `last` is one more token of the answer.
fn change(
    logits: &mut [f32],
    row: &RowSampling,
    changes: &[LogitAdjustment],
    last: Option<TokenId>,
) {
    let mut last = last.filter(|&last| (last as usize) < logits.len());
    for change in changes {
        let mut change = *change;
        if last == Some(change.token) {
            change = change.with_occurrence();
            last = None;
        }
        let x = &mut logits[change.token as usize];
        *x = row.adjusted(*x, &change);
    }
    if let Some(last) = last {
        let x = &mut logits[last as usize];
        *x = row.adjusted(*x, &LogitAdjustment::none(last).with_occurrence());
    }
}

/// Rank and log-probabilities.
fn tell(raw: &[f32], token: TokenId, top: usize, (ranks, told): (&mut [i32], &mut [f32])) {
    let found = logprobs(raw, token, top);
    ranks[0] = found.rank as i32;
    told[0] = found.chosen.logprob;
    ranks[1..].fill(-1);
    for (i, best) in found.top.iter().enumerate() {
        ranks[1 + i] = best.token as i32;
        told[1 + i] = best.logprob;
    }
}
