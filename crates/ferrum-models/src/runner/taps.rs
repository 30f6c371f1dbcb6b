//! Hidden states that a step gives beside logits: at which places of the forward path, of which rows, and their way to the
//! host. A step that wants none has none of it.

use super::floats::{begin_floats, finish_floats, read_floats};
use super::upload::PackedStep;
use crate::batch::{StepBatch, TapPoint};
use crate::profile::Profiler;
use crate::readback::StepOutput;
use ferrum_kernels::{
    Act, Backend, DeviceBuffer, HostBuffer, LlmBackend, PendingRead, Residual, RowShape,
};
use ferrum_types::Result;

/// What is tapped at one place.
struct Tap<B: Backend> {
    point: TapPoint,
    /// The rows, `[count]`.
    rows: B::Buffer<i32>,
    count: usize,
    /// `[count, hidden]`.
    out: TapBuffer<B>,
}

enum TapBuffer<B: Backend> {
    Stream(Residual<B>),
    Normed(Act<B>),
}

impl<B: Backend> Tap<B> {
    fn alloc(device: &B, point: TapPoint, rows: usize, dim: usize) -> Result<Self> {
        Ok(Self {
            point,
            rows: device.alloc(rows)?,
            count: 0,
            out: match point {
                TapPoint::Layer(_) => TapBuffer::Stream(device.alloc(rows * dim)?),
                TapPoint::FinalNorm => TapBuffer::Normed(device.alloc(rows * dim)?),
            },
        })
    }
}

/// All that is tapped of a stage. Memory for a place is allocated when it is first wanted.
pub(super) struct Taps<B: Backend> {
    all: Vec<Tap<B>>,
    /// Elements of a row.
    dim: usize,
    /// Rows of a step, for which there is room at first.
    most: usize,
    /// Those of one place on the host.
    values: Vec<f32>,
}

/// Host memory on the way.
pub(super) type TapStaging<'a, B> = (
    &'a mut HostBuffer<<B as Backend>::Act>,
    &'a mut HostBuffer<<B as Backend>::Residual>,
);

impl<B: LlmBackend> Taps<B> {
    pub(super) fn new(dim: usize, most: usize) -> Self {
        Self {
            all: Vec::new(),
            dim,
            most,
            values: Vec::new(),
        }
    }

    /// Packs which rows are wanted at those places that the stage `has`.
    pub(super) fn pack(
        &mut self,
        device: &B,
        batch: &StepBatch,
        has: impl Fn(TapPoint) -> bool,
        packed: &mut PackedStep,
    ) -> Result<()> {
        for tap in batch.taps.iter().filter(|tap| has(tap.point)) {
            if !self.all.iter().any(|own| own.point == tap.point) {
                self.all
                    .push(Tap::alloc(device, tap.point, self.most, self.dim)?);
            }
        }
        for own in &mut self.all {
            let rows = batch.taps.iter().filter(|tap| tap.point == own.point);
            own.count = packed.push_with(|ints| ints.extend(rows.map(|tap| tap.row as i32)));
            if own.count > own.rows.len() {
                // Some row is wanted more than once.
                let count = own.count;
                *own = Tap {
                    count,
                    ..Tap::alloc(device, own.point, count, self.dim)?
                };
            }
        }
        Ok(())
    }

    /// What the packed rows go to, in order.
    pub(super) fn buffers(&mut self) -> impl Iterator<Item = &mut B::Buffer<i32>> {
        self.all.iter_mut().map(|tap| &mut tap.rows)
    }

    /// Whether the step wants something.
    pub(super) fn any(&self) -> bool {
        self.all.iter().any(|tap| tap.count > 0)
    }

    /// Whether the step wants something at this place.
    pub(super) fn wants(&self, point: TapPoint) -> bool {
        let mut all = self.all.iter();
        all.any(|tap| tap.point == point && tap.count > 0)
    }

    /// The residual stream behind a layer, once nothing is pending.
    pub(super) fn take_stream(
        &mut self,
        ctx: &mut B::Context,
        layer: usize,
        (stream, profiler): (&Residual<B>, &mut Profiler<B>),
    ) -> Result<()> {
        let (point, dim) = (TapPoint::Layer(layer as u32), self.dim);
        for tap in self.all.iter_mut().filter(|tap| tap.point == point) {
            let rows = tap.count;
            if let TapBuffer::Stream(out) = &mut tap.out
                && rows > 0
            {
                // [tokens, hidden] → [count, hidden]
                profiler.measure(ctx, "tap", |ctx| {
                    B::gather_rows(ctx, stream, &tap.rows, out, RowShape { rows, dim })
                })?;
            }
        }
        Ok(())
    }

    /// What is behind the final norm.
    pub(super) fn take_normed(
        &mut self,
        ctx: &mut B::Context,
        (normed, profiler): (&Act<B>, &mut Profiler<B>),
    ) -> Result<()> {
        let dim = self.dim;
        for tap in &mut self.all {
            let rows = tap.count;
            if let TapBuffer::Normed(out) = &mut tap.out
                && rows > 0
            {
                // [tokens, hidden] → [count, hidden]
                profiler.measure(ctx, "tap", |ctx| {
                    B::gather_rows(ctx, normed, &tap.rows, out, RowShape { rows, dim })
                })?;
            }
        }
        Ok(())
    }

    /// Waits for what was tapped of a batch, and puts it where that wants it.
    pub(super) fn read(
        &mut self,
        ctx: &mut B::Context,
        (activations, residual): TapStaging<'_, B>,
        batch: &StepBatch,
        output: &mut StepOutput,
    ) -> Result<()> {
        let dim = self.dim;
        for tap in self.all.iter().filter(|tap| tap.count > 0) {
            let values = &mut self.values;
            values.resize(tap.count * dim, 0.0);
            match &tap.out {
                TapBuffer::Stream(out) => read_floats::<B, _>(ctx, (out, 0), residual, values)?,
                TapBuffer::Normed(out) => read_floats::<B, _>(ctx, (out, 0), activations, values)?,
            }
            scatter(values, places(batch, tap.point), dim, output.tapped_mut());
        }
        Ok(())
    }

    /// Begins to read what was tapped of a batch.
    pub(super) fn begin_read(
        &self,
        ctx: &mut B::Context,
        batch: &StepBatch,
    ) -> Result<Vec<PendingTap<B>>> {
        let wanted = self.all.iter().filter(|tap| tap.count > 0);
        let begun = wanted.map(|tap| {
            let len = tap.count * self.dim;
            let (mut stream, mut normed) = (None, None);
            match &tap.out {
                TapBuffer::Stream(out) => stream = begin_floats::<B, _>(ctx, (out, 0), len)?,
                TapBuffer::Normed(out) => normed = begin_floats::<B, _>(ctx, (out, 0), len)?,
            }
            Ok(PendingTap {
                places: places(batch, tap.point).collect(),
                stream,
                normed,
            })
        });
        begun.collect()
    }

    /// Waits for what was begun to be read.
    pub(super) fn finish(
        &mut self,
        device: &B,
        pending: Vec<PendingTap<B>>,
        (activations, residual): TapStaging<'_, B>,
        output: &mut StepOutput,
    ) -> Result<()> {
        let (values, dim) = (&mut self.values, self.dim);
        for tap in pending {
            values.resize(tap.places.len() * dim, 0.0);
            finish_floats(device, tap.stream, residual, values)?;
            finish_floats(device, tap.normed, activations, values)?;
            scatter(values, tap.places.into_iter(), dim, output.tapped_mut());
        }
        Ok(())
    }
}

/// What is being read of one place.
pub(super) struct PendingTap<B: Backend> {
    /// Of each row, its place among all that is tapped.
    places: Vec<usize>,
    stream: Option<PendingRead<B::Residual>>,
    normed: Option<PendingRead<B::Act>>,
}

/// The taps of a batch at a place of the forward path: their places among all taps.
fn places(batch: &StepBatch, point: TapPoint) -> impl Iterator<Item = usize> {
    let taps = batch.taps.iter().enumerate();
    let taps = taps.filter(move |(_, tap)| tap.point == point);
    taps.map(|(place, _)| place)
}

/// Puts rows in their places.
fn scatter(rows: &[f32], places: impl Iterator<Item = usize>, dim: usize, out: &mut [f32]) {
    for (row, place) in rows.chunks_exact(dim).zip(places) {
        out[place * dim..][..dim].copy_from_slice(row);
    }
}
