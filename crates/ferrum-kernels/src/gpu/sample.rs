//! Choosing tokens: a workgroup for each row. What the rows want goes up in one piece.

use super::GpuBackend;
use super::buffer::GpuBuffer;
use super::context::{GpuContext, P};
use super::pipeline::Kernel;
use crate::backend::{BackendSample, SampleBatch, SampleShape, Sampled};
use ferrum_types::Result;

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

/// Words of a row's settings, as the shader reads them.
const SETTINGS: usize = 16;
/// Words of a change.
const CHANGE: usize = 4;
/// Flags among the settings: whether top-p and min-p leave anything out.
const CUTS_TO_P: u32 = 1;
const CUTS_TO_MIN_P: u32 = 2;

impl BackendSample for GpuBackend {
    fn samples(&self) -> bool {
        true
    }

    fn sample_rows(
        ctx: &mut GpuContext,
        logits: &mut GpuBuffer<f32>,
        shape: SampleShape,
        batch: &SampleBatch,
        previous: &GpuBuffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        const OP: &str = "sample_rows";
        batch.check::<Self>(logits, shape, previous, out)?;
        if batch.is_empty() {
            return Ok(());
        }
        let words = words(batch);
        let work = ctx.take_scratch(words.len())?;
        let sizes = [P::U(batch.len()), P::U(shape.vocab), P::U(shape.first)];
        let done = ctx
            .upload(bytemuck::cast_slice(&words), (&work.raw, 0))
            .and_then(|()| {
                let buffers = [
                    logits.into(),
                    (&work).into(),
                    previous.into(),
                    (&mut out.tokens).into(),
                    (&mut out.ranks).into(),
                    (&mut out.logprobs).into(),
                ];
                ctx.run(OP, (&SAMPLE, &[]), buffers, &sizes, batch.len())
            });
        ctx.put_scratch(work);
        done
    }
}

/// Settings of all rows, then changes, then masks.
fn words(batch: &SampleBatch) -> Vec<u32> {
    let first_change = batch.len() * SETTINGS;
    let first_mask = first_change + batch.changes().len() * CHANGE;
    let mut words = Vec::with_capacity(first_mask + batch.masks().len());
    let (mut change, mut mask) = (first_change, first_mask);
    for index in 0..batch.len() {
        let (row, changes, bits) = batch.row(index);
        let starts = (change, mask);
        change += changes.len() * CHANGE;
        mask += bits.len();
        let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
        let flags = flag(row.top_p < 1.0, CUTS_TO_P) | flag(row.min_p > 0.0, CUTS_TO_MIN_P);
        let settings: [u32; SETTINGS] = [
            // The two zeros are one.
            (row.temperature + 0.0).to_bits(),
            row.top_k,
            row.top_p.to_bits(),
            row.min_p.ln().to_bits(),
            row.repeat_penalty.to_bits(),
            row.presence_penalty.to_bits(),
            row.frequency_penalty.to_bits(),
            (row.unit as f32).to_bits(),
            row.last.map_or(0, |last| last + 1),
            row.logprobs.map_or(0, |n| n + 1),
            starts.0 as u32,
            change as u32,
            starts.1 as u32,
            mask as u32,
            flags,
            0,
        ];
        words.extend(settings);
    }
    for change in batch.changes() {
        let seen = u32::from(change.recent) | change.generated << 1;
        words.extend([change.token, change.bias.to_bits(), seen, 0]);
    }
    words.extend_from_slice(batch.masks());
    words
}
