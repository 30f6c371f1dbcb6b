//! The end of a step: tokens are chosen on the device, and what the host wants of the rows is read.
//!
//! Where a device computes while the host goes on, reading is begun when the step is submitted and finished when it
//! is collected. Else all is read at once, into memory that is there already.

use super::ModelRunner;
use super::head::taps_behind;
use super::stage::{StageRunner, Staging};
use crate::batch::StepBatch;
use crate::readback::{Readback, StepOutput};
use ferrum_kernels::{
    BackendKvDtype, KvDtypeKind, LlmBackend, Logprobs, MAX_LOGPROBS, NoToken, PendingRead,
    RowOrder, RowSampling, RowShape, SampleBatch, SampleShape, Sampled,
};
use ferrum_types::{FloatElement, Result, TokenId};

/// Numbers beside each token.
const BESIDE: usize = 1 + MAX_LOGPROBS;

/// How many rows of a step want what, in their order on the device.
#[derive(Clone, Copy)]
pub(super) struct WantedRows {
    /// Those whose token is chosen here.
    tokens: usize,
    logits: usize,
    pub(super) hidden: usize,
    /// Of which the residual stream behind the last layer is wanted.
    pub(super) taps: usize,
}

impl WantedRows {
    /// What is wanted of a batch by a runner with this last layer.
    pub(super) fn of(batch: &StepBatch, wanted: &[Readback], last: usize) -> Self {
        let count = |kind: fn(&Readback) -> bool| wanted.iter().filter(|w| kind(w)).count();
        Self {
            tokens: count(is_token),
            logits: count(is_logits),
            hidden: batch.hidden_rows.len(),
            taps: taps_behind(batch, last).count(),
        }
    }

    /// Rows that are multiplied with the vocabulary.
    pub(super) fn with_logits(self) -> usize {
        self.tokens + self.logits
    }
}

/// How tokens are chosen, and which were.
pub(super) struct Choices<B: LlmBackend> {
    /// What this step and the one before it chose, by turns.
    sampled: [Sampled<B>; 2],
    /// How this step chooses, for each of its rows that want a token.
    sampling: SampleBatch,
    /// Of each of its logit rows, the place among those.
    places: Vec<Option<u32>>,
    /// Those of the step before.
    places_before: Vec<Option<u32>>,
    /// Tokens of this step that the one before it chooses, with their places there.
    taken: Vec<(u32, u32)>,
}

impl<B: LlmBackend> Choices<B> {
    pub(super) fn alloc(device: &B, rows: usize) -> Result<Self> {
        Ok(Self {
            sampled: [Sampled::alloc(device, rows)?, Sampled::alloc(device, rows)?],
            sampling: SampleBatch::default(),
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
        self.sampled.swap(0, 1);
        std::mem::swap(&mut self.places, &mut self.places_before);
        self.places.clear();
        self.sampling.clear();
        let before = |row: u32| self.places_before.get(row as usize).copied().flatten();
        let (mut place, mut sampled) = (0, 0);
        for wanted in wanted {
            self.places.push(is_token(wanted).then_some(place));
            match *wanted {
                Readback::SAMPLED => {
                    let (row, changes, mask) = batch.sampling.row(sampled);
                    let last = row.last.and_then(before);
                    let row = RowSampling { last, ..*row };
                    let mask = (!mask.is_empty()).then_some(mask);
                    self.sampling.push(row, changes.iter().copied(), mask);
                    sampled += 1;
                }
                Readback::Token(_) => self.sampling.push(RowSampling::default(), [], None),
                Readback::Nothing | Readback::Logits => continue,
            }
            place += 1;
        }
        let taken = batch.choices.iter();
        self.taken.clear();
        self.taken
            .extend(taken.filter_map(|choice| Some((choice.token, before(choice.row)?))));
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
    /// All taps: steps that overlap have one stage.
    tapped: Option<PendingRead<B::Residual>>,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> ModelRunner<B, K> {
    /// Whether rows can want a [sampled](crate::DeviceChoice::Sampled) token.
    pub fn samples(&self) -> bool {
        B::device(&self.stage.ctx).samples()
    }

    /// What the bits of a row depend on.
    pub fn row_order(&self) -> RowOrder {
        B::device(&self.stage.ctx).row_order()
    }

    /// Puts tokens that the step before chose where this one looks for them.
    pub(super) fn take_choices(&mut self) -> Result<()> {
        let Choices { sampled, taken, .. } = &self.choices;
        match taken.is_empty() {
            true => Ok(()),
            false => {
                let chosen = &sampled[1].tokens;
                B::take_tokens(
                    &mut self.stage.ctx,
                    chosen,
                    taken,
                    &mut self.stage.batch.tokens,
                )
            }
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
        if rows.tokens > 0 {
            self.choose(rows.tokens)?;
        }
        if self.in_flight() > 1 {
            let reads = Some(self.begin_reads(rows)?);
            return Ok(SubmittedStep { output, reads });
        }
        if rows.tokens > 0 {
            self.read_tokens(rows.tokens, &mut output)?;
        }
        let last = self.last_layer();
        let StageRunner {
            ctx,
            scratch,
            staging,
            ..
        } = &mut self.stage;
        let Staging {
            activations,
            residual,
            logits: staging,
            ..
        } = staging;
        let logits = (&self.logits, rows.tokens * vocab);
        // Behind the states that the logits were made of.
        let hidden = (&scratch.delta, rows.with_logits() * dim);
        read_floats::<B, _>(ctx, logits, staging, output.logits_mut())?;
        read_floats::<B, _>(ctx, hidden, activations, output.hidden_mut())?;
        if let Some(tapped) = &self.tapped {
            for (index, (place, _)) in taps_behind(batch, last).enumerate() {
                let out = &mut output.tapped_mut()[place * dim..][..dim];
                read_floats::<B, _>(ctx, (tapped, index * dim), residual, out)?;
            }
        }
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
            output.tell_tokens(|place| {
                let all = place * BESIDE..(place + 1) * BESIDE;
                let beside = ranks.get(all.clone()).zip(logprobs.get(all));
                Ok(told(chosen[place], reads.tops[place], beside))
            })?;
        }
        let Staging {
            activations,
            residual,
            logits,
            ..
        } = &mut self.stage.staging;
        finish_floats(reads.logits, logits, output.logits_mut())?;
        finish_floats(reads.hidden, activations, output.hidden_mut())?;
        finish_floats(reads.tapped, residual, output.tapped_mut())?;
        Ok(output)
    }

    fn begin_reads(&mut self, rows: WantedRows) -> Result<Reads<B>> {
        let (vocab, dim) = (self.spec().vocab_size, self.spec().hidden_size);
        let Self {
            stage: StageRunner { ctx, scratch, .. },
            choices,
            logits,
            tapped,
            ..
        } = self;
        let settings = choices.sampling.rows().iter();
        let tops: Vec<_> = settings.map(|row| row.logprobs).collect();
        let (sampled, some) = (&choices.sampled[0], rows.tokens > 0);
        let hidden = (&scratch.delta, rows.with_logits() * dim);
        let hidden = begin_floats::<B, _>(ctx, hidden, rows.hidden * dim)?;
        let tapped = match tapped {
            Some(tapped) => begin_floats::<B, _>(ctx, (&*tapped, 0), rows.taps * dim)?,
            None => None,
        };
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
            tapped,
        })
    }

    /// Chooses the tokens of the first `rows` rows on the device.
    fn choose(&mut self, rows: usize) -> Result<()> {
        let vocab = self.spec().vocab_size;
        let samples = self.samples();
        let Self {
            stage: StageRunner { ctx, scratch, .. },
            logits,
            choices,
            ..
        } = self;
        let [sampled, previous] = &mut choices.sampled;
        let profiler = &mut scratch.profiler;
        if samples {
            let shape = SampleShape { vocab, first: 0 };
            return profiler.measure(ctx, "sample", |ctx| {
                let batch = &choices.sampling;
                B::sample_rows(ctx, logits, shape, batch, &previous.tokens, sampled)
            });
        }
        let shape = RowShape { rows, dim: vocab };
        profiler.measure(ctx, "argmax", |ctx| {
            B::argmax_rows(ctx, logits, &mut sampled.tokens, shape)
        })
    }

    /// Reads the tokens that were chosen, and what was wanted beside them.
    fn read_tokens(&mut self, rows: usize, output: &mut StepOutput) -> Result<()> {
        let dim = self.spec().vocab_size;
        let samples = self.samples();
        let (ctx, sampled) = (&mut self.stage.ctx, &self.choices.sampled[0]);
        self.stage.staging.ints.resize(rows, 0);
        B::read(ctx, &sampled.tokens, 0, &mut self.stage.staging.ints)?;
        output.tell_tokens(|place| {
            let mut token = self.stage.staging.ints[place];
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
            let top = self.choices.sampling.rows()[place].logprobs;
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

/// Reads as many floats of a buffer as `out` has, from an offset on.
pub(super) fn read_floats<B: LlmBackend, T: FloatElement>(
    ctx: &mut B::Context,
    (from, first): (&B::Buffer<T>, usize),
    staging: &mut Vec<T>,
    out: &mut [f32],
) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    staging.resize(out.len(), T::from_f32(0.0));
    B::read(ctx, from, first, staging)?;
    widen(staging, out);
    Ok(())
}

/// [`read_floats`] that goes on while the device computes, if there is anything to read.
fn begin_floats<B: LlmBackend, T: FloatElement>(
    ctx: &mut B::Context,
    (from, first): (&B::Buffer<T>, usize),
    len: usize,
) -> Result<Option<PendingRead<T>>> {
    match len {
        0 => Ok(None),
        len => B::begin_read(ctx, from, first, len).map(Some),
    }
}

fn finish_floats<T: FloatElement>(
    read: Option<PendingRead<T>>,
    staging: &mut Vec<T>,
    out: &mut [f32],
) -> Result<()> {
    let Some(read) = read else {
        return Ok(());
    };
    staging.resize(out.len(), T::from_f32(0.0));
    read.finish(staging)?;
    widen(staging, out);
    Ok(())
}

fn widen<T: FloatElement>(from: &[T], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = x.to_f32();
    }
}
