//! The end of a step: tokens are chosen on the device, and what the host wants of the rows is read.

use super::ModelRunner;
use crate::batch::StepBatch;
use crate::readback::{Readback, StepOutput};
use ferrum_kernels::{
    Act, BackendKvDtype, KvDtypeKind, LlmBackend, Logprobs, MAX_LOGPROBS, NoToken, RowShape,
    SampleShape,
};
use ferrum_types::{FloatElement, Result, TokenId};

/// How many rows of a step want what, in their order on the device.
#[derive(Clone, Copy)]
pub(super) struct WantedRows {
    pub(super) greedy: usize,
    pub(super) sampled: usize,
    pub(super) logits: usize,
    pub(super) hidden: usize,
}

impl WantedRows {
    /// What is wanted of a batch.
    pub(super) fn of(batch: &StepBatch, wanted: &[Readback]) -> Self {
        let count = |kind: fn(&Readback) -> bool| wanted.iter().filter(|w| kind(w)).count();
        Self {
            greedy: count(is_greedy),
            sampled: count(is_sampled),
            logits: count(is_logits),
            hidden: batch.hidden_rows.len(),
        }
    }

    /// Rows whose token is chosen on the device.
    pub(super) fn tokens(self) -> usize {
        self.greedy + self.sampled
    }

    /// Rows that are multiplied with the vocabulary.
    pub(super) fn with_logits(self) -> usize {
        self.tokens() + self.logits
    }
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> ModelRunner<B, K> {
    /// Reads what is wanted of the rows that were computed.
    pub(super) fn read(
        &mut self,
        rows: WantedRows,
        batch: &StepBatch,
        wanted: &[Readback],
        out: &mut StepOutput,
    ) -> Result<()> {
        let (vocab, dim) = (self.spec.vocab_size, self.spec.hidden_size);
        out.begin(wanted, vocab, rows.hidden * dim);
        if rows.tokens() > 0 {
            self.choose(rows, batch)?;
            self.read_tokens(rows, batch, wanted, out)?;
        }
        let staging = &mut self.staging.activations;
        let logits = (&self.logits, rows.tokens() * vocab);
        // Behind the states that the logits were made of.
        let hidden = (&self.scratch.delta, rows.with_logits() * dim);
        read_floats::<B>(&mut self.ctx, logits, staging, out.logits_mut())?;
        read_floats::<B>(&mut self.ctx, hidden, staging, out.hidden_mut())
    }

    /// Chooses the tokens of the first rows on the device.
    fn choose(&mut self, rows: WantedRows, batch: &StepBatch) -> Result<()> {
        let vocab = self.spec.vocab_size;
        let Self {
            ctx,
            logits,
            sampled,
            previous,
            scratch,
            ..
        } = self;
        let profiler = &mut scratch.profiler;
        if rows.greedy > 0 {
            let shape = RowShape {
                rows: rows.greedy,
                dim: vocab,
            };
            profiler.measure(ctx, "argmax", |ctx| {
                B::argmax_rows(ctx, logits, &mut sampled.tokens, shape)
            })?;
        }
        if rows.sampled > 0 {
            let shape = SampleShape {
                vocab,
                first: rows.greedy,
            };
            profiler.measure(ctx, "sample", |ctx| {
                B::sample_rows(ctx, logits, shape, &batch.sampling, previous, sampled)
            })?;
        }
        Ok(())
    }

    /// Reads the tokens that were chosen, and what was wanted beside them.
    fn read_tokens(
        &mut self,
        rows: WantedRows,
        batch: &StepBatch,
        wanted: &[Readback],
        out: &mut StepOutput,
    ) -> Result<()> {
        let dim = self.spec.vocab_size;
        self.staging.ints.resize(rows.tokens(), 0);
        B::read(
            &mut self.ctx,
            &self.sampled.tokens,
            0,
            &mut self.staging.ints,
        )?;
        let places =
            |kind: fn(&Readback) -> bool| (0..wanted.len()).filter(move |&row| kind(&wanted[row]));
        for (index, place) in places(is_greedy).enumerate() {
            let best = self.staging.ints[index];
            let mut token = Ok(best as TokenId);
            if best == 0 {
                // A row of NaN gives token 0, too; the first logit tells.
                let mut first = [B::Act::from_f32(0.0)];
                B::read(&mut self.ctx, &self.logits, index * dim, &mut first)?;
                if first[0].to_f32().is_nan() || first[0].to_f32() == f32::NEG_INFINITY {
                    token = Err(NoToken::NotANumber);
                }
            }
            out.set_token(place, token);
        }
        for (index, place) in places(is_sampled).enumerate() {
            let at = rows.greedy + index;
            let token = NoToken::or_token(self.staging.ints[at]);
            out.set_token(place, token);
            let top = batch.sampling.rows()[index].logprobs;
            if let (Ok(token), Some(top)) = (token, top) {
                let (mut ranks, mut logprobs) = ([0; 1 + MAX_LOGPROBS], [0.0; 1 + MAX_LOGPROBS]);
                let first = at * ranks.len();
                B::read(&mut self.ctx, &self.sampled.ranks, first, &mut ranks)?;
                B::read(&mut self.ctx, &self.sampled.logprobs, first, &mut logprobs)?;
                let told = Logprobs::of_row(token, &ranks, &logprobs, top as usize);
                out.set_logprobs(place, told);
            }
        }
        Ok(())
    }

    /// Whether rows can want a [sampled](crate::DeviceChoice::Sampled) token.
    pub fn samples(&self) -> bool {
        B::device(&self.ctx).samples()
    }
}

pub(super) fn is_greedy(wanted: &Readback) -> bool {
    *wanted == Readback::GREEDY
}

pub(super) fn is_sampled(wanted: &Readback) -> bool {
    *wanted == Readback::SAMPLED
}

pub(super) fn is_logits(wanted: &Readback) -> bool {
    *wanted == Readback::Logits
}

/// Reads as many floats of a buffer as `out` has, from an offset on.
fn read_floats<B: LlmBackend>(
    ctx: &mut B::Context,
    (from, first): (&Act<B>, usize),
    staging: &mut Vec<B::Act>,
    out: &mut [f32],
) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    staging.resize(out.len(), B::Act::from_f32(0.0));
    B::read(ctx, from, first, staging)?;
    for (out, x) in out.iter_mut().zip(staging) {
        *out = x.to_f32();
    }
    Ok(())
}
