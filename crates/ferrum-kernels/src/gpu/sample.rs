//! Choosing tokens: a workgroup for each row.

use super::GpuBackend;
use super::buffer::GpuBuffer;
use super::context::{GpuContext, P};
use super::pipeline::Kernel;
use crate::backend::{
    BackendSample, DeviceBuffer, DeviceSampling, SampleBatch, SampleShape, Sampled,
};
use ferrum_types::{Error, Result};

pub(super) static SAMPLE: Kernel = Kernel {
    name: "sample",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/lane_sum.wgsl"),
        include_str!("shaders/float_key.wgsl"),
        include_str!("shaders/sample.wgsl"),
    ],
    access: "wwrwww",
    constants: &[],
};

impl BackendSample for GpuBackend {
    fn samples(&self) -> bool {
        true
    }

    fn sampling_words(&self, batch: &SampleBatch, words: &mut Vec<i32>) {
        batch.write_words(words);
    }

    fn sample_rows(
        ctx: &mut GpuContext,
        logits: &mut GpuBuffer<f32>,
        shape: SampleShape,
        sampling: &mut DeviceSampling<Self>,
        previous: &GpuBuffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        const OP: &str = "sample_rows";
        let DeviceSampling { rows, words } = sampling;
        rows.check::<Self>(logits, shape, previous, out)?;
        Error::check_len(OP, "words", words.len(), rows.words_len())?;
        if rows.is_empty() {
            return Ok(());
        }
        let sizes = [P::U(rows.len()), P::U(shape.vocab), P::U(shape.first)];
        let buffers = [
            logits.into(),
            words.into(),
            previous.into(),
            (&mut out.tokens).into(),
            (&mut out.ranks).into(),
            (&mut out.logprobs).into(),
        ];
        ctx.run(OP, (&SAMPLE, &[]), buffers, &sizes, rows.len())
    }
}
