//! Choosing tokens: a block for each row.

use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::CudaAct;
use crate::backend::{
    BackendSample, DeviceBuffer, DeviceSampling, SampleBatch, SampleShape, Sampled,
};
use ferrum_types::{Error, Result};

/// Threads of a block at most: `MAX_THREADS` of `sample.cu`.
const MAX_THREADS: usize = 1024;

impl<A: CudaAct> BackendSample for CudaBackend<A> {
    fn samples(&self) -> bool {
        true
    }

    fn sampling_words(&self, batch: &SampleBatch, words: &mut Vec<i32>) {
        batch.write_words(words);
    }

    fn sample_rows(
        ctx: &mut CudaContext<A>,
        logits: &mut CudaBuffer<f32>,
        shape: SampleShape,
        sampling: &mut DeviceSampling<Self>,
        previous: &CudaBuffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        const OP: &str = "sample_rows";
        let DeviceSampling { rows, words } = sampling;
        rows.check::<Self>(logits, shape, previous, out)?;
        Error::check_len(OP, "words", words.len(), rows.words_len())?;
        let args = [
            logits.into(),
            words.into(),
            previous.into(),
            (&mut out.tokens).into(),
            (&mut out.ranks).into(),
            (&mut out.logprobs).into(),
            Arg::Int(shape.vocab),
            Arg::Int(shape.first),
        ];
        // No more threads than tokens: each takes part in every sum.
        let threads = shape.vocab.min(MAX_THREADS).next_multiple_of(32) as u32;
        ctx.launch(
            OP,
            (KernelFile::Sample, "sample"),
            (rows.len(), threads, 0),
            args,
        )
    }
}
