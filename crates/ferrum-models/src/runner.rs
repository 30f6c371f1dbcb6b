//! [`ModelRunner`]: owns weights, KV pool and scratch, and runs one step of the forward path.

mod config;
mod head;
mod read;
mod stage;
mod weights;

pub use config::{KvLayout, RunnerConfig};
pub use weights::DecoderWeights;
pub(crate) use weights::{BodyWeights, HeadWeights};

use crate::batch::{ChosenToken, StepBatch};
use crate::lora::{AdapterLoader, LoadedAdapter};
use crate::readback::{Readback, StepOutput, Ticket};
use crate::spec::DecoderSpec;
use ferrum_formats::LoraFolder;
use ferrum_kernels::{Act, BackendKvDtype, KvDtypeKind, KvFp16, LlmBackend, PagedKvShape, Span};
use ferrum_types::{AdapterId, Error, Result};
use read::{Choices, SubmittedStep, WantedRows, is_sampled};
use stage::StageRunner;
use std::collections::VecDeque;

/// Runs a decoder on one device with a KV cache of element `K`.
pub struct ModelRunner<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind = KvFp16> {
    pub(crate) stage: StageRunner<B, K>,
    head: HeadWeights<B>,
    /// Rows that want something: first those whose token is chosen here, then those whose logits are read, then
    /// those that want hidden states.
    wanted_rows: B::Buffer<i32>,
    logits: Act<B>,
    choices: Choices<B>,
    /// Steps that were submitted and not collected, oldest first.
    in_flight: VecDeque<SubmittedStep<B>>,
    /// What a step was read into, to be filled again.
    spare: Option<StepOutput>,
    /// Steps that were submitted.
    steps: u64,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> ModelRunner<B, K> {
    /// Allocates everything that steps of the given sizes need.
    ///
    /// # Errors
    /// `InvalidArgument` for sizes out of range; `OutOfMemory`.
    pub fn new(
        device: &B,
        spec: DecoderSpec,
        weights: DecoderWeights<B>,
        config: RunnerConfig,
    ) -> Result<Self> {
        config.validate()?;
        spec.validate().map_err(Error::Model)?;
        let DecoderWeights { body, head } = weights;
        Ok(Self {
            // A row wants one thing or the other.
            wanted_rows: device.alloc(config.max_tokens)?,
            logits: device.alloc(config.max_logit_rows * spec.vocab_size)?,
            choices: Choices::alloc(device, config.max_logit_rows)?,
            stage: StageRunner::new(device, spec, body, config)?,
            head,
            in_flight: VecDeque::with_capacity(2),
            spare: None,
            steps: 0,
        })
    }

    /// What is being run.
    pub fn spec(&self) -> &DecoderSpec {
        self.stage.spec()
    }

    /// The sizes that were allocated for.
    pub fn config(&self) -> &RunnerConfig {
        self.stage.config()
    }

    /// The KV pool of one layer.
    pub fn pool(&self) -> PagedKvShape {
        self.stage.pool()
    }

    /// The context that steps are recorded on.
    pub fn context_mut(&mut self) -> &mut B::Context {
        &mut self.stage.ctx
    }

    /// How many steps may be submitted and not collected: 2 on a device that computes while the host goes on.
    pub fn in_flight(&self) -> usize {
        let device = B::device(&self.stage.ctx);
        // What the host alone can choose, it would have to wait for anyway.
        match device.overlaps() && device.samples() && !self.config().profile {
            true => 2,
            false => 1,
        }
    }

    /// Submits one step: writes the batch's keys and values, and reads what is wanted of its rows: one entry of
    /// `wanted` for each of its `logit_rows`, and the hidden states of its `hidden_rows`.
    /// [`collect`](Self::collect) hands it over. A device that computes at once has it when this returns.
    ///
    /// # Errors
    /// `InvalidArgument` when the batch does not fit the runner's sizes or the pool, before anything
    /// is recorded; otherwise what the device says.
    pub fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.check(batch, wanted)?;
        let rows = WantedRows::of(batch, wanted);
        self.choices.begin(batch, wanted);
        if !batch.tokens.is_empty() {
            self.stage.upload(batch)?;
            self.upload_wanted(batch, wanted)?;
            self.take_choices()?;
            self.compute(batch, rows)?;
        }
        let step = self.read(rows, wanted)?;
        self.in_flight.push_back(step);
        self.steps += 1;
        Ok(Ticket::new(self.steps))
    }

    /// Waits for the oldest step in flight and hands over what was read of it. `out` is filled anew.
    ///
    /// # Errors
    /// `InvalidArgument` for the ticket of another step; what the device says.
    pub fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        let oldest = self.steps + 1 - self.in_flight.len() as u64;
        let found = ticket.number();
        let Some(step) = self.in_flight.pop_front_if(|_| found == oldest) else {
            let reason = match self.in_flight.is_empty() {
                true => format!("found the ticket of step {found}, no step is in flight"),
                false => format!("found the ticket of step {found}, step {oldest} is the next one"),
            };
            return Err(Error::invalid("collect", reason));
        };
        let mut read = self.finish(step)?;
        std::mem::swap(&mut read, out);
        self.spare = Some(read);
        Ok(())
    }

    /// [`submit`](Self::submit), and [`collect`](Self::collect) at once.
    ///
    /// # Errors
    /// Those of `submit`.
    pub fn run(
        &mut self,
        batch: &StepBatch,
        wanted: &[Readback],
        out: &mut StepOutput,
    ) -> Result<()> {
        let ticket = self.submit(batch, wanted)?;
        self.collect(ticket, out)
    }

    /// The spans of all ops since the last call, when the runner was made to measure them; else none.
    /// Times are nanoseconds since the runner was made.
    ///
    /// # Errors
    /// What the device says.
    pub fn take_spans(&mut self) -> Result<Vec<Span>> {
        self.stage.take_spans()
    }

    /// What loads LoRA adapters for this runner, on whatever thread.
    pub fn adapter_loader(&self) -> AdapterLoader<B> {
        self.stage.adapter_loader()
    }

    /// Takes a LoRA adapter of this runner's [`adapter_loader`](Self::adapter_loader), for batches that name
    /// it. Memory for what adapters add is allocated with the first of them.
    ///
    /// # Errors
    /// What the device says.
    pub fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter<B>) -> Result<()> {
        self.stage.add_adapter(id, adapter)
    }

    /// Loads a LoRA adapter and takes it.
    ///
    /// # Errors
    /// Those of [`AdapterLoader::load`] and [`add_adapter`](Self::add_adapter).
    pub fn load_adapter(&mut self, id: AdapterId, folder: &LoraFolder) -> Result<()> {
        let adapter = self.adapter_loader().load(folder)?;
        self.add_adapter(id, adapter)
    }

    /// Forgets an adapter; whether it was there.
    pub fn unload_adapter(&mut self, id: AdapterId) -> bool {
        self.stage.unload_adapter(id)
    }

    /// Holds what is wanted against the batch, and the batch against this runner.
    pub(crate) fn check(&self, batch: &StepBatch, wanted: &[Readback]) -> Result<()> {
        let (found, rows) = (wanted.len(), batch.logit_rows.len());
        if found != rows {
            let reason = format!("{found} rows are wanted of a step with {rows} logit rows");
            return Err(Error::invalid("step", reason));
        }
        let sampled = wanted.iter().filter(|w| is_sampled(w)).count();
        if sampled != batch.sampling.len() {
            let found = batch.sampling.len();
            let reason = format!("{sampled} rows want a sampled token, {found} say how");
            return Err(Error::invalid("step", reason));
        }
        self.check_sizes(batch)
    }

    /// Holds the batch against the sizes of this runner and of its pool.
    fn check_sizes(&self, batch: &StepBatch) -> Result<()> {
        let fail = |reason: String| Err(Error::invalid("step", reason));
        let (most, found) = (self.in_flight(), self.in_flight.len());
        if found >= most {
            return fail(format!(
                "{found} steps are in flight, this runner takes {most}"
            ));
        }
        for choice in &batch.choices {
            let ChosenToken { token, row } = *choice;
            if found == 0 || self.choices.place(row).is_none() {
                return fail(format!(
                    "token {token} is to be chosen in row {row} of no step in flight"
                ));
            }
        }
        let limits = [
            ("tokens", batch.tokens.len(), self.config().max_tokens),
            ("sequences", batch.seqs(), self.config().max_seqs),
            (
                "logit rows",
                batch.logit_rows.len(),
                self.config().max_logit_rows,
            ),
        ];
        for (what, found, most) in limits {
            if found > most {
                return fail(format!(
                    "{found} {what} in a step, this runner takes {most}"
                ));
            }
        }
        let vocab = self.spec().vocab_size;
        if let Some(token) = batch.tokens.iter().find(|&&t| t as usize >= vocab) {
            return fail(format!(
                "token {token} is outside the vocabulary of {vocab}"
            ));
        }
        if let Some(AdapterId(id)) = self.stage.missing_adapter(batch) {
            return fail(format!("adapter {id} is not loaded"));
        }
        for seq in 0..batch.seqs() {
            let kv_len = batch.kv_lens[seq] as usize;
            if kv_len > self.config().context {
                let capacity = self.config().context;
                return Err(Error::ContextOverflow {
                    requested: kv_len,
                    capacity,
                });
            }
            let table = batch.table(seq);
            let needed = kv_len.div_ceil(self.pool().block_size);
            if table.len() < needed {
                let found = table.len();
                return fail(format!(
                    "sequence {seq} has {found} KV blocks and needs {needed}"
                ));
            }
            if let Some(block) = table.iter().find(|b| b.0 as usize >= self.pool().blocks) {
                let blocks = self.pool().blocks;
                return fail(format!(
                    "KV block {} is outside the pool of {blocks}",
                    block.0
                ));
            }
        }
        Ok(())
    }
}
