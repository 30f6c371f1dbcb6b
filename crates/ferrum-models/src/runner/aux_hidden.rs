//! Hidden states that a step gives beside logits: at which places of the forward path, of which rows, and their way to the
//! host. A step that wants none has none of it.

use super::floats::{begin_floats, finish_floats, read_floats};
use super::graphs::Graphs;
use super::upload::PackedStep;
use crate::batch::{AuxHiddenPoint, StepBatch};
use crate::profile::Profiler;
use crate::readback::StepOutput;
use ferrum_kernels::{
    Act, Backend, DeviceBuffer, HostBuffer, LlmBackend, PendingRead, Residual, RowShape,
};
use ferrum_types::Result;

/// The hidden states of one place.
struct AuxHidden<B: Backend> {
    point: AuxHiddenPoint,
    /// The rows, `[count]`.
    rows: B::Buffer<i32>,
    count: usize,
    /// How many of them are wanted; others fill up a captured step.
    wanted: usize,
    /// `[count, hidden]`.
    out: AuxBuffer<B>,
}

enum AuxBuffer<B: Backend> {
    Stream(Residual<B>),
    Normed(Act<B>),
}

impl<B: Backend> AuxHidden<B> {
    fn alloc(device: &B, point: AuxHiddenPoint, rows: usize, dim: usize) -> Result<Self> {
        Ok(Self {
            point,
            rows: device.alloc(rows)?,
            count: 0,
            wanted: 0,
            out: match point {
                AuxHiddenPoint::Layer(_) => AuxBuffer::Stream(device.alloc(rows * dim)?),
                AuxHiddenPoint::FinalNorm => AuxBuffer::Normed(device.alloc(rows * dim)?),
            },
        })
    }
}

/// All auxiliary hidden states of a stage. Memory for a place is allocated when it is first wanted.
pub(super) struct AuxHiddenStates<B: Backend> {
    all: Vec<AuxHidden<B>>,
    /// Elements of a row.
    dim: usize,
    /// Rows of a step, for which there is room at first.
    most: usize,
    /// Those of one place on the host.
    values: Vec<f32>,
}

/// Host memory on the way.
pub(super) type AuxStaging<'a, B> = (
    &'a mut HostBuffer<<B as Backend>::Act>,
    &'a mut HostBuffer<<B as Backend>::Residual>,
);

impl<B: LlmBackend> AuxHiddenStates<B> {
    pub(super) fn new(dim: usize, most: usize) -> Self {
        Self {
            all: Vec::new(),
            dim,
            most,
            values: Vec::new(),
        }
    }

    /// Packs which rows are wanted at those places that the stage `has`, filled up to `filled` rows in a captured step. What was captured over a buffer
    /// that is replaced is forgotten.
    pub(super) fn pack(
        &mut self,
        device: &B,
        (batch, filled): (&StepBatch, Option<usize>),
        has: impl Fn(AuxHiddenPoint) -> bool,
        (packed, graphs): (&mut PackedStep, &mut Graphs),
    ) -> Result<()> {
        for aux in batch.aux_hidden.iter().filter(|aux| has(aux.point)) {
            if !self.all.iter().any(|own| own.point == aux.point) {
                self.all
                    .push(AuxHidden::alloc(device, aux.point, self.most, self.dim)?);
            }
        }
        for own in &mut self.all {
            let rows = batch.aux_hidden.iter().filter(|aux| aux.point == own.point);
            let rows = rows.map(|aux| aux.row as i32);
            own.wanted = rows.clone().count();
            let padding = match own.wanted {
                0 => 0,
                wanted => filled.unwrap_or(0).saturating_sub(wanted),
            };
            let rows = rows.chain(std::iter::repeat_n(0, padding));
            own.count = packed.push_with(|ints| ints.extend(rows));
            if own.count > own.rows.len() {
                // Some row is wanted more than once.
                graphs.reset_later();
                let AuxHidden { count, wanted, .. } = *own;
                *own = AuxHidden {
                    count,
                    wanted,
                    ..AuxHidden::alloc(device, own.point, count, self.dim)?
                };
            }
        }
        Ok(())
    }

    /// What the packed rows go to, in order.
    pub(super) fn buffers(&mut self) -> impl Iterator<Item = &mut B::Buffer<i32>> {
        self.all.iter_mut().map(|aux| &mut aux.rows)
    }

    /// Whether the step wants something.
    pub(super) fn any(&self) -> bool {
        self.all.iter().any(|aux| aux.count > 0)
    }

    /// Whether the step wants something at this place.
    pub(super) fn wants(&self, point: AuxHiddenPoint) -> bool {
        let mut all = self.all.iter();
        all.any(|aux| aux.point == point && aux.count > 0)
    }

    /// The residual stream behind a layer, once nothing is pending.
    pub(super) fn take_stream(
        &mut self,
        ctx: &mut B::Context,
        layer: usize,
        (stream, profiler): (&Residual<B>, &mut Profiler<B>),
    ) -> Result<()> {
        let (point, dim) = (AuxHiddenPoint::Layer(layer as u32), self.dim);
        for aux in self.all.iter_mut().filter(|aux| aux.point == point) {
            let rows = aux.count;
            if let AuxBuffer::Stream(out) = &mut aux.out
                && rows > 0
            {
                // [tokens, hidden] → [count, hidden]
                profiler.measure(ctx, "aux_hidden", |ctx| {
                    B::gather_rows(ctx, stream, &aux.rows, out, RowShape { rows, dim })
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
        for aux in &mut self.all {
            let rows = aux.count;
            if let AuxBuffer::Normed(out) = &mut aux.out
                && rows > 0
            {
                // [tokens, hidden] → [count, hidden]
                profiler.measure(ctx, "aux_hidden", |ctx| {
                    B::gather_rows(ctx, normed, &aux.rows, out, RowShape { rows, dim })
                })?;
            }
        }
        Ok(())
    }

    /// Waits for the hidden states of a batch, and stores them in its order.
    pub(super) fn read(
        &mut self,
        ctx: &mut B::Context,
        (activations, residual): AuxStaging<'_, B>,
        batch: &StepBatch,
        output: &mut StepOutput,
    ) -> Result<()> {
        let dim = self.dim;
        for aux in self.all.iter().filter(|aux| aux.count > 0) {
            let values = &mut self.values;
            values.resize(aux.wanted * dim, 0.0);
            match &aux.out {
                AuxBuffer::Stream(out) => read_floats::<B, _>(ctx, (out, 0), residual, values)?,
                AuxBuffer::Normed(out) => read_floats::<B, _>(ctx, (out, 0), activations, values)?,
            }
            scatter(
                values,
                places(batch, aux.point),
                dim,
                output.aux_hidden_mut(),
            );
        }
        Ok(())
    }

    /// Begins to read the hidden states of a batch.
    pub(super) fn begin_read(
        &self,
        ctx: &mut B::Context,
        batch: &StepBatch,
    ) -> Result<Vec<PendingAuxHidden<B>>> {
        let wanted = self.all.iter().filter(|aux| aux.count > 0);
        let begun = wanted.map(|aux| {
            let len = aux.wanted * self.dim;
            let (mut stream, mut normed) = (None, None);
            match &aux.out {
                AuxBuffer::Stream(out) => stream = begin_floats::<B, _>(ctx, (out, 0), len)?,
                AuxBuffer::Normed(out) => normed = begin_floats::<B, _>(ctx, (out, 0), len)?,
            }
            Ok(PendingAuxHidden {
                places: places(batch, aux.point).collect(),
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
        pending: Vec<PendingAuxHidden<B>>,
        (activations, residual): AuxStaging<'_, B>,
        output: &mut StepOutput,
    ) -> Result<()> {
        let (values, dim) = (&mut self.values, self.dim);
        for aux in pending {
            values.resize(aux.places.len() * dim, 0.0);
            finish_floats(device, aux.stream, residual, values)?;
            finish_floats(device, aux.normed, activations, values)?;
            scatter(values, aux.places.into_iter(), dim, output.aux_hidden_mut());
        }
        Ok(())
    }
}

/// What is being read of one place.
pub(super) struct PendingAuxHidden<B: Backend> {
    /// Of each row, its index among all auxiliary hidden states.
    places: Vec<usize>,
    stream: Option<PendingRead<B::Residual>>,
    normed: Option<PendingRead<B::Act>>,
}

/// The hidden states of a batch at a place of the forward path: their indices among all of the batch.
fn places(batch: &StepBatch, point: AuxHiddenPoint) -> impl Iterator<Item = usize> {
    let all = batch.aux_hidden.iter().enumerate();
    let here = all.filter(move |(_, wanted)| wanted.point == point);
    here.map(|(place, _)| place)
}

/// Puts rows in their places.
fn scatter(rows: &[f32], places: impl Iterator<Item = usize>, dim: usize, out: &mut [f32]) {
    for (row, place) in rows.chunks_exact(dim).zip(places) {
        out[place * dim..][..dim].copy_from_slice(row);
    }
}
