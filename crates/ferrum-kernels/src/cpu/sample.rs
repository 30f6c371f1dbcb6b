//! Choosing tokens: rows go to threads, and each is chosen by what the host's samplers use, so that the bits are
//! theirs.

use super::core::{CpuBackend, CpuContext};
use super::logits::{Candidates, logprobs, possible};
use crate::backend::{
    BackendSample, DeviceSampling, LogitAdjustment, MAX_LOGPROBS, RowSampling, SampleBatch,
    SampleShape, Sampled,
};
use ferrum_simd::memory::{CpuBuffer, SharedMut};
use ferrum_types::{Result, TokenId};
use std::sync::PoisonError;

/// What one thread needs to choose.
#[derive(Default)]
pub(crate) struct Chooser {
    candidates: Candidates,
    /// A row as the model made it, where that is asked for.
    raw: Vec<f32>,
}

/// Numbers beside each token.
const BESIDE: usize = 1 + MAX_LOGPROBS;

impl BackendSample for CpuBackend {
    fn samples(&self) -> bool {
        true
    }

    fn sample_rows(
        ctx: &mut CpuContext,
        logits: &mut CpuBuffer<f32>,
        shape: SampleShape,
        sampling: &mut DeviceSampling<Self>,
        previous: &CpuBuffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        let batch = &sampling.rows;
        batch.check::<Self>(logits, shape, previous, out)?;
        let SampleShape { vocab, first } = shape;
        let (exec, choosers) = ctx.choosers();
        let logits = SharedMut::new(logits.as_mut_slice());
        let tokens = SharedMut::new(out.tokens.as_mut_slice());
        let ranks = SharedMut::new(out.ranks.as_mut_slice());
        let logprobs = SharedMut::new(out.logprobs.as_mut_slice());
        let previous = previous.as_slice();
        exec.parallel_for_dynamic(batch.len(), batch.len() * vocab, |index, thread| {
            let at = first + index;
            // SAFETY: each row belongs to one task, in all four buffers.
            let (logits, token, ranks, logprobs) = unsafe {
                let beside = (
                    ranks.part(at * BESIDE, BESIDE),
                    logprobs.part(at * BESIDE, BESIDE),
                );
                (
                    logits.part(at * vocab, vocab),
                    tokens.part(at, 1),
                    beside.0,
                    beside.1,
                )
            };
            // A panic in the middle leaves nothing that the next row would not make anew.
            let chooser = choosers[thread].lock();
            let mut chooser = chooser.unwrap_or_else(PoisonError::into_inner);
            token[0] = chooser.choose(logits, batch, index, previous, (ranks, logprobs));
        });
        Ok(())
    }
}

impl Chooser {
    /// The token of a row of the batch, or the code of why there is none.
    fn choose(
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
            change = change.once_more();
            last = None;
        }
        let x = &mut logits[change.token as usize];
        *x = row.changed(*x, &change);
    }
    if let Some(last) = last {
        let x = &mut logits[last as usize];
        *x = row.changed(*x, &LogitAdjustment::none(last).once_more());
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
