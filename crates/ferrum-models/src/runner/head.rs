//! The end of a step's forward path: final norm, and logits or hidden states of the rows that want some.

use super::DecoderRunner;
use super::read::{WantedRows, is_logits, is_token};
use super::weights::HeadWeights;
use crate::batch::{AuxHiddenPoint, StepBatch};
use crate::layer::{Scratch, StepState};
use crate::readback::Readback;
use crate::spec::DecoderSpec;
use ferrum_kernels::{LlmBackend, Logits, RowShape};
use ferrum_types::Result;

impl<B: LlmBackend> DecoderRunner<B> {
    /// Packs which rows want something, and how their tokens are chosen.
    pub(super) fn pack_wanted(
        &mut self,
        batch: &StepBatch,
        wanted: &[Readback],
        rows: WantedRows,
    ) -> Result<()> {
        let of_kind = |kind: fn(&Readback) -> bool| {
            let rows = batch.logit_rows.iter().zip(wanted);
            rows.filter(move |(_, wanted)| kind(wanted)).map(|(r, _)| r)
        };
        let wanted = of_kind(is_token).chain(of_kind(is_logits));
        let wanted = wanted.chain(&batch.hidden_rows).map(|&row| row as i32);
        let padding = std::iter::repeat_n(0, rows.padding);
        self.stage.packed.push(wanted.chain(padding));
        self.pack_sampling(rows)
    }

    /// Uploads all that was packed.
    pub(super) fn send(&mut self) -> Result<()> {
        let sampling = &mut self.sampler.sampling;
        let head = [&mut self.wanted_rows, &mut sampling.words];
        self.stage.send(head)
    }

    /// Records a step over what was uploaded.
    pub(super) fn compute(&mut self, batch: &StepBatch, rows: WantedRows) -> Result<()> {
        let (logit_rows, hidden_rows) = (rows.with_logits(), rows.hidden);
        let (samples, last) = (self.samples(), self.last_layer());
        let of_tokens = RowShape {
            rows: rows.chosen(),
            dim: self.spec.vocab_size,
        };
        let Self {
            stage,
            head,
            wanted_rows,
            logits,
            sampler,
            ..
        } = self;
        let chosen = rows.chosen();
        let captured = stage.layout.captured;
        // What is chosen of some rows of a captured step alone would be a graph for each number of them.
        let inside = chosen > 0 && !(captured && rows.logits > 0);
        stage.compute(batch, inside, &mut |ctx, step, scratch, aux_hidden| {
            let wanted = logit_rows + hidden_rows;
            if wanted > 0 || aux_hidden.wants(AuxHiddenPoint::FinalNorm) {
                gather(ctx, head, step, scratch, (wanted_rows, wanted))?;
                aux_hidden.take_normed(ctx, (&scratch.normed, &mut scratch.profiler))?;
            } else if aux_hidden.wants(AuxHiddenPoint::Layer(last as u32)) {
                scratch.add_pending(ctx, step)?;
            }
            aux_hidden.take_stream(ctx, last, (&scratch.residual, &mut scratch.profiler))?;
            if logit_rows > 0 {
                project(ctx, head, (step.spec, scratch), logits, logit_rows)?;
            }
            match inside {
                true => sampler.choose(ctx, &mut scratch.profiler, (logits, of_tokens), samples),
                false => Ok(()),
            }
        })?;
        match chosen > 0 && !inside {
            true => {
                let profiler = &mut stage.scratch.profiler;
                sampler.choose(&mut stage.ctx, profiler, (logits, of_tokens), samples)
            }
            false => Ok(()),
        }
    }
}

/// Final norm of all rows, in `normed`, and those that want logits or hidden states, in `delta`.
fn gather<B: LlmBackend>(
    ctx: &mut B::Context,
    head: &HeadWeights<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
    (rows, count): (&B::Buffer<i32>, usize),
) -> Result<()> {
    let (dim, rows_of_step) = (step.spec.hidden_size, step.batch.shape.tokens);
    let Scratch {
        residual,
        delta,
        normed,
        profiler,
        ..
    } = scratch;
    // [tokens, hidden] → [wanted, hidden]; nothing is pending in the residual then.
    profiler.measure(ctx, "final_norm", |ctx| {
        let stream = (residual, &*delta);
        let norm = &head.final_norm;
        norm.add_and_norm(ctx, step.spec, stream, normed, rows_of_step)?;
        match count {
            0 => Ok(()),
            rows_wanted => {
                let shape = RowShape {
                    rows: rows_wanted,
                    dim,
                };
                B::gather_rows(ctx, normed, rows, delta, shape)
            }
        }
    })
}

/// Output projection of the first `count` rows that were gathered.
fn project<B: LlmBackend>(
    ctx: &mut B::Context,
    head: &HeadWeights<B>,
    (spec, scratch): (&DecoderSpec, &mut Scratch<B>),
    logits: &mut Logits<B>,
    count: usize,
) -> Result<()> {
    let Scratch {
        delta, profiler, ..
    } = scratch;
    // [wanted, hidden] → [wanted, vocab]
    profiler.measure(ctx, "lm_head", |ctx| {
        head.lm_head.logits(ctx, delta, logits, count)?;
        let (scales, len) = (&spec.scales, count * spec.vocab_size);
        if scales.logits != 1.0 {
            B::scale_inplace(ctx, logits, scales.logits, len)?;
        }
        match scales.logit_softcap {
            Some(cap) => B::softcap(ctx, logits, cap, len),
            None => Ok(()),
        }
    })
}
