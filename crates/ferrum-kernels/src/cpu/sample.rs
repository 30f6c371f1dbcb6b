//! Choosing tokens: rows go to threads, and each is chosen by what the host's samplers use, so that the bits are
//! theirs.

use super::core::{CpuBackend, CpuContext};
use crate::backend::{BackendSample, DeviceSampling, MAX_LOGPROBS, SampleShape, Sampled};
use ferrum_simd::memory::{CpuBuffer, SharedMut};
use ferrum_types::Result;
use std::sync::PoisonError;

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
