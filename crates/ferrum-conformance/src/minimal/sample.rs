//! Choosing tokens: settings are read when the work runs, as a device does, so that graphs can be replayed over others.

use super::{Buffer, Ctx, Floats, Minimal, R};
use ferrum_kernels::{
    Backend, BackendSample, DeviceBuffer, DeviceSampling, SampleBatch, SampleShape, Sampled,
};
use ferrum_types::{Error, Result};

impl BackendSample for Minimal {
    fn samples(&self) -> bool {
        true
    }

    fn sampling_words(&self, batch: &SampleBatch, words: &mut Vec<i32>) {
        batch.write_words(words);
    }

    fn sample_rows(
        ctx: &mut Ctx,
        logits: &mut Floats,
        shape: SampleShape,
        sampling: &mut DeviceSampling<Self>,
        previous: &Buffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        let DeviceSampling { rows, words } = sampling;
        rows.check::<Self>(logits, shape, previous, out)?;
        Error::check_len("sample_rows", "words", words.len(), rows.words_len())?;
        let (rows, words) = (rows.len(), words.clone());
        let (logits, previous) = (logits.clone(), previous.clone());
        let (tokens, ranks, logprobs) =
            (out.tokens.clone(), out.ranks.clone(), out.logprobs.clone());
        ctx.queue.record(move |r| {
            let words = R::to_vec(r, &words.get())?;
            let mut sampling = DeviceSampling {
                rows: SampleBatch::of_words(rows, &words)?,
                words: R::new().alloc(0)?,
            };
            let mut out = Sampled {
                tokens: tokens.get().clone(),
                ranks: ranks.get().clone(),
                logprobs: logprobs.get().clone(),
            };
            let (mut logits, previous) = (logits.get_mut(), previous.get());
            R::sample_rows(r, &mut logits, shape, &mut sampling, &previous, &mut out)?;
            *tokens.get_mut() = out.tokens;
            *ranks.get_mut() = out.ranks;
            *logprobs.get_mut() = out.logprobs;
            Ok(())
        });
        Ok(())
    }
}
