//! The end of a step: tokens are chosen on the device, and what the host wants of the rows is read.
//!
//! Where a device computes while the host goes on, reading is begun when the step is submitted and finished when it
//! is collected. Else all is read at once, into memory that is there already.

use super::DecoderRunner;
use super::aux_hidden::PendingAuxHidden;
use super::floats::{begin_floats, finish_floats, read_floats};
use super::stage::{StageRunner, Staging};
use crate::batch::StepBatch;
use crate::profile::Profiler;
use crate::readback::{Readback, StepOutput};
use ferrum_kernels::{
    BatchInvariance, DeviceBuffer, DeviceSampling, LlmBackend, Logits, Logprobs, MAX_LOGPROBS,
    NoToken, PendingRead, RowSampling, RowShape, SampleBatch, SampleShape, Sampled,
};
use ferrum_types::{FloatElement, Result, TokenId};

/// Numbers beside each token.
const BESIDE: usize = 1 + MAX_LOGPROBS;

/// How many rows of a step want what, in their order on the device.
#[derive(Clone, Copy)]
pub(super) struct WantedRows {
    /// Those whose token is chosen here.
    tokens: usize,
    /// Those whose logits are read.
    pub(super) logits: usize,
    /// Those that fill up a captured step: nothing is read of them.
    pub(super) padding: usize,
    pub(super) hidden: usize,
}

impl WantedRows {
    /// What is wanted of a batch.
    pub(super) fn of(batch: &StepBatch, wanted: &[Readback]) -> Self {
        let count = |kind: fn(&Readback) -> bool| wanted.iter().filter(|w| kind(w)).count();
        Self {
            tokens: count(is_token),
            logits: count(is_logits),
            padding: 0,
            hidden: batch.hidden_rows.len(),
        }
    }

    /// The same of a step that is filled up to so many rows with logits. Those of which nothing is wanted are among them.
    pub(super) fn filled(self, rows: usize) -> Self {
        Self {
            padding: rows.saturating_sub(self.tokens + self.logits),
            ..self
        }
    }

    /// Rows that are multiplied with the vocabulary.
    pub(super) fn with_logits(self) -> usize {
        self.tokens + self.logits + self.padding
    }

    /// Rows of which a token is chosen: all of them where that costs nothing but room.
    pub(super) fn chosen(self) -> usize {
        match (self.tokens, self.logits) {
            (0, _) => 0,
            (tokens, 0) => tokens + self.padding,
            (tokens, _) => tokens,
        }
    }
}

/// State of device sampling: the settings of this step, and the tokens that the last two steps sampled.
pub(super) struct SamplerState<B: LlmBackend> {
    /// Tokens sampled by the step that was submitted last.
    sampled: Sampled<B>,
    /// Tokens of the previous step, read by rows with a pending token.
    previous: B::Buffer<i32>,
    /// Sampling settings of this step: of each row that wants a token, then of the rows that pad the step.
    pub(super) sampling: DeviceSampling<B>,
    /// Of each logit row of this step, its index among the rows that sample.
    places: Vec<Option<u32>>,
    /// The same of the step before it.
    places_before: Vec<Option<u32>>,
    /// Tokens of this step that the previous step samples: index here, and index there.
    taken: Vec<(u32, u32)>,
}

impl<B: LlmBackend> SamplerState<B> {
    pub(super) fn alloc(device: &B, rows: usize) -> Result<Self> {
        // Room for settings of all rows; biases and masks may want more.
        let mut settings = SampleBatch::default();
        (0..rows).for_each(|_| settings.push(RowSampling::default(), [], None));
        Ok(Self {
            sampled: Sampled::alloc(device, rows)?,
            previous: device.alloc(rows)?,
            sampling: DeviceSampling::new(device, settings)?,
            places: Vec::with_capacity(rows),
            places_before: Vec::with_capacity(rows),
            taken: Vec::with_capacity(rows),
        })
    }

    /// Where the step that was submitted last chooses the token of a logit row.
    pub(super) fn place(&self, row: u32) -> Option<u32> {
        self.places.get(row as usize).copied().flatten()
    }

    /// Begins a step.
    pub(super) fn begin(&mut self, batch: &StepBatch, wanted: &[Readback]) {
        std::mem::swap(&mut self.places, &mut self.places_before);
        self.places.clear();
        let sampling = &mut self.sampling.rows;
        sampling.clear();
        let before = |row: u32| self.places_before.get(row as usize).copied().flatten();
        let (mut place, mut sampled) = (0, 0);
        for wanted in wanted {
            self.places.push(is_token(wanted).then_some(place));
            match *wanted {
                Readback::SAMPLED => {
                    let (row, changes, mask) = batch.sampling.row(sampled);
                    let last = row.pending_row.and_then(before);
                    let row = RowSampling {
                        pending_row: last,
                        ..*row
                    };
                    let mask = (!mask.is_empty()).then_some(mask);
                    sampling.push(row, changes.iter().copied(), mask);
                    sampled += 1;
                }
                Readback::Token(_) => sampling.push(RowSampling::default(), [], None),
                Readback::Nothing | Readback::Logits => continue,
            }
            place += 1;
        }
        let taken = batch.pending_tokens.iter();
        self.taken.clear();
        self.taken
            .extend(taken.filter_map(|choice| Some((choice.token, before(choice.row)?))));
    }

    /// Chooses the tokens of the first rows of logits on the device, which may have
    /// [`samples`](DecoderRunner::samples).
    pub(super) fn choose(
        &mut self,
        ctx: &mut B::Context,
        profiler: &mut Profiler<B>,
        (logits, shape): (&mut Logits<B>, RowShape),
        samples: bool,
    ) -> Result<()> {
        let Self {
            sampled,
            previous,
            sampling,
            ..
        } = self;
        if samples {
            let (vocab, first) = (shape.dim, 0);
            let shape = SampleShape { vocab, first };
            return profiler.measure(ctx, "sample", |ctx| {
                B::sample_rows(ctx, logits, shape, sampling, previous, sampled)
            });
        }
        profiler.measure(ctx, "argmax", |ctx| {
            B::argmax_rows(ctx, logits, &mut sampled.tokens, shape)
        })
    }
}

/// A step that was submitted, and what is wanted of it.
pub(super) struct SubmittedStep<B: LlmBackend> {
    output: StepOutput,
    /// What is still to be read; nothing where all was read at once.
    reads: Option<Reads<B>>,
}

/// Reads that were begun.
struct Reads<B: LlmBackend> {
    tokens: Option<PendingRead<i32>>,
    /// Ranks and log-probabilities.
    beside: Option<(PendingRead<i32>, PendingRead<f32>)>,
    /// Of each row that wants a token, how many alternatives it wants beside it.
    tops: Vec<Option<u32>>,
    logits: Option<PendingRead<B::Logit>>,
    hidden: Option<PendingRead<B::Act>>,
    /// Auxiliary hidden states of all places: steps that overlap have one stage.
    aux_hidden: Vec<PendingAuxHidden<B>>,
}

impl<B: LlmBackend> DecoderRunner<B> {
    /// Whether rows can want a [sampled](crate::DeviceChoice::Sampled) token.
    pub fn samples(&self) -> bool {
        B::device(&self.stage.ctx).samples()
    }

    /// What the bits of a row depend on.
    pub fn batch_invariance(&self) -> BatchInvariance {
        B::device(&self.stage.ctx).batch_invariance()
    }

    /// Packs how tokens are chosen, as far as the device reads it.
    pub(super) fn pack_sampling(&mut self, rows: WantedRows) -> Result<()> {
        let samples = self.samples();
        let Self {
            stage,
            sampler,
            logits,
            spec,
            ..
        } = self;
        let SamplerState {
            sampling,
            previous,
            sampled,
            ..
        } = sampler;
        if !samples || rows.tokens == 0 {
            stage.packed.push([]);
            return Ok(());
        }
        for _ in rows.tokens..rows.chosen() {
            sampling.rows.push(RowSampling::default(), [], None);
        }
        let device = B::device(&stage.ctx);
        let DeviceSampling { rows, words } = sampling;
        let len = stage
            .packed
            .push_with(|ints| device.sampling_words(rows, ints));
        if len > words.len() {
            *words = device.alloc(len.next_power_of_two())?;
            stage.graphs.reset::<B>(&mut stage.ctx)?;
        }
        if stage.layout.captured {
            // A replay looks at nothing.
            let (vocab, first) = (spec.vocab_size, 0);
            rows.check::<B>(logits, SampleShape { vocab, first }, previous, sampled)?;
        }
        Ok(())
    }

    /// Copies the previous step's sampled tokens into this step's inputs.
    pub(super) fn take_sampled_tokens(&mut self) -> Result<()> {
        let SamplerState {
            sampled,
            previous,
            sampling,
            taken,
            ..
        } = &mut self.sampler;
        let (ctx, batch) = (&mut self.stage.ctx, &mut self.stage.batch);
        let chosen = &sampled.tokens;
        if sampling
            .rows
            .rows()
            .iter()
            .any(|row| row.pending_row.is_some())
        {
            B::copy_slice(ctx, chosen, 0, previous, 0, chosen.len())?;
        }
        match taken.is_empty() {
            true => Ok(()),
            false => B::take_tokens(ctx, chosen, taken, &mut batch.tokens),
        }
    }

    /// Reads what is wanted of the rows that were computed, or begins to.
    pub(super) fn read(
        &mut self,
        batch: &StepBatch,
        rows: WantedRows,
        mut output: StepOutput,
    ) -> Result<SubmittedStep<B>> {
        let (vocab, dim) = (self.spec.vocab_size, self.spec.hidden_size);
        if self.in_flight() > 1 {
            let reads = Some(self.begin_reads(batch, rows)?);
            return Ok(SubmittedStep { output, reads });
        }
        if rows.tokens > 0 {
            self.read_tokens(rows.tokens, &mut output)?;
        }
        self.stage.read_aux_hidden(batch, &mut output)?;
        let StageRunner {
            ctx,
            scratch,
            staging,
            ..
        } = &mut self.stage;
        let Staging {
            activations,
            logits: staging,
            ..
        } = staging;
        let logits = (&self.logits, rows.tokens * vocab);
        // Behind the states that the logits were made of.
        let hidden = (&scratch.delta, rows.with_logits() * dim);
        read_floats::<B, _>(ctx, logits, staging, output.logits_mut())?;
        read_floats::<B, _>(ctx, hidden, activations, output.hidden_mut())?;
        let reads = None;
        Ok(SubmittedStep { output, reads })
    }

    /// Waits for what was begun to be read.
    pub(super) fn finish(&mut self, step: SubmittedStep<B>) -> Result<StepOutput> {
        let SubmittedStep { mut output, reads } = step;
        let Some(reads) = reads else {
            return Ok(output);
        };
        if let Some(tokens) = reads.tokens {
            let (mut chosen, mut ranks, mut logprobs) = (vec![0; reads.tops.len()], vec![], vec![]);
            tokens.finish(&mut chosen)?;
            if let Some((of_ranks, of_logprobs)) = reads.beside {
                ranks.resize(chosen.len() * BESIDE, 0);
                of_ranks.finish(&mut ranks)?;
                logprobs.resize(chosen.len() * BESIDE, 0.0);
                of_logprobs.finish(&mut logprobs)?;
            }
            output.set_tokens(|place| {
                let all = place * BESIDE..(place + 1) * BESIDE;
                let beside = ranks.get(all.clone()).zip(logprobs.get(all));
                Ok(told(chosen[place], reads.tops[place], beside))
            })?;
        }
        let StageRunner {
            ctx,
            staging,
            aux_hidden,
            ..
        } = &mut self.stage;
        let Staging {
            activations,
            residual,
            logits,
            ..
        } = staging;
        let device = B::device(ctx);
        finish_floats(device, reads.logits, logits, output.logits_mut())?;
        finish_floats(device, reads.hidden, activations, output.hidden_mut())?;
        aux_hidden.finish(
            device,
            reads.aux_hidden,
            (activations, residual),
            &mut output,
        )?;
        Ok(output)
    }

    fn begin_reads(&mut self, batch: &StepBatch, rows: WantedRows) -> Result<Reads<B>> {
        let (vocab, dim) = (self.spec().vocab_size, self.spec().hidden_size);
        let Self {
            stage:
                StageRunner {
                    ctx,
                    scratch,
                    aux_hidden,
                    ..
                },
            sampler,
            logits,
            ..
        } = self;
        let settings = sampler.sampling.rows.rows()[..rows.tokens].iter();
        let tops: Vec<_> = settings.map(|row| row.logprobs).collect();
        let (sampled, some) = (&sampler.sampled, rows.tokens > 0);
        let hidden = (&scratch.delta, rows.with_logits() * dim);
        let hidden = begin_floats::<B, _>(ctx, hidden, rows.hidden * dim)?;
        let aux_hidden = aux_hidden.begin_read(ctx, batch)?;
        let logits = (&*logits, rows.tokens * vocab);
        let logits = begin_floats::<B, _>(ctx, logits, rows.logits * vocab)?;
        let mut beside = None;
        if tops.iter().any(Option::is_some) {
            let len = rows.tokens * BESIDE;
            let ranks = B::begin_read(ctx, &sampled.ranks, 0, len)?;
            beside = Some((ranks, B::begin_read(ctx, &sampled.logprobs, 0, len)?));
        }
        let tokens = some.then(|| B::begin_read(ctx, &sampled.tokens, 0, rows.tokens));
        Ok(Reads {
            tokens: tokens.transpose()?,
            beside,
            tops,
            logits,
            hidden,
            aux_hidden,
        })
    }

    /// Reads the tokens that were chosen, and what was wanted beside them.
    fn read_tokens(&mut self, rows: usize, output: &mut StepOutput) -> Result<()> {
        let dim = self.spec().vocab_size;
        let samples = self.samples();
        let (ctx, sampled) = (&mut self.stage.ctx, &self.sampler.sampled);
        let tokens = &mut self.stage.staging.tokens[..rows];
        B::read(ctx, &sampled.tokens, 0, tokens)?;
        output.set_tokens(|place| {
            let mut token = self.stage.staging.tokens[place];
            if !samples && token == 0 {
                // A row of NaN gives token 0, too; the first logit tells.
                let mut first = [B::Logit::from_f32(0.0)];
                B::read(ctx, &self.logits, place * dim, &mut first)?;
                let is_number = first[0].to_f32() > f32::NEG_INFINITY;
                token = if is_number {
                    0
                } else {
                    NoToken::NotANumber.code()
                };
            }
            let top = self.sampler.sampling.rows.rows()[place].logprobs;
            let (mut ranks, mut logprobs) = ([0; BESIDE], [0.0; BESIDE]);
            if top.is_some() {
                B::read(ctx, &sampled.ranks, place * BESIDE, &mut ranks)?;
                B::read(ctx, &sampled.logprobs, place * BESIDE, &mut logprobs)?;
            }
            Ok(told(token, top, Some((&ranks, &logprobs))))
        })
    }
}

/// A token as the device gave it, and its log-probabilities with `top` alternatives where they are wanted.
fn told(
    token: i32,
    top: Option<u32>,
    beside: Option<(&[i32], &[f32])>,
) -> (std::result::Result<TokenId, NoToken>, Option<Logprobs>) {
    let token = NoToken::or_token(token);
    let logprobs = match (token, top, beside) {
        (Ok(token), Some(top), Some((ranks, logprobs))) => {
            Some(Logprobs::of_row(token, ranks, logprobs, top as usize))
        }
        _ => None,
    };
    (token, logprobs)
}

pub(super) fn is_token(wanted: &Readback) -> bool {
    matches!(wanted, Readback::Token(_))
}

pub(super) fn is_sampled(wanted: &Readback) -> bool {
    *wanted == Readback::SAMPLED
}

pub(super) fn is_logits(wanted: &Readback) -> bool {
    *wanted == Readback::Logits
}
