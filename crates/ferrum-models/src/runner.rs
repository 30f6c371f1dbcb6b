//! [`DecoderRunner`]: runs steps of the forward path through a list of stages, and reads what is wanted of them.

mod aux_hidden;
mod caches;
pub(crate) mod config;
mod floats;
mod graphs;
mod head;
mod model_runner;
mod read;
mod stage;
mod stages;
mod upload;
mod weights;

pub use config::{KvLayout, RunnerConfig};
pub use graphs::GraphCounts;
pub(crate) use graphs::Graphs;
pub use model_runner::ModelRunner;
pub(crate) use stage::StageRunner;
pub use stages::EarlierStage;
pub(crate) use weights::{BodyWeights, HeadWeights};
pub use weights::{DecoderWeights, SharedTables};

use crate::batch::{AuxHiddenPoint, AuxHiddenState, PendingToken, StepBatch};
use crate::cache::{CacheGroup, StateSlots};
use crate::inventory::Stage;
use crate::kv_layer::AllocKvCache;
use crate::lora::{AdapterLoader, LoadedAdapter};
use crate::readback::{Readback, StepOutput, Ticket};
use crate::spec::DecoderSpec;
use ferrum_formats::LoraFolder;
use ferrum_kernels::{LlmBackend, Logits, PagedKvShape, Span};
use ferrum_types::{AdapterId, Error, Result};
use read::{SamplerState, SubmittedStep, WantedRows, is_sampled};
pub(crate) use stages::AnyStage;
use stages::{no_ranks, other_runner};
use std::collections::VecDeque;

/// Runs a decoder: a list of stages, each some of its layers on one device. Where one device has all layers, there is one
/// stage. `B` is the backend of the last stage, which makes logits and chooses tokens. Made as a [`ModelRunner`].
pub struct DecoderRunner<B: LlmBackend> {
    spec: DecoderSpec,
    pool: PagedKvShape,
    state_slots: Option<StateSlots>,
    /// The stages before the last one, in order.
    pub(crate) earlier: Vec<Box<dyn AnyStage>>,
    pub(crate) stage: StageRunner<B>,
    head: HeadWeights<B>,
    /// The residual stream between two stages, `[tokens, hidden]`.
    stream: Vec<f32>,
    /// Rows that want something: first those whose token is chosen here, then those whose logits are read, then
    /// those that want hidden states.
    wanted_rows: B::Buffer<i32>,
    logits: Logits<B>,
    sampler: SamplerState<B>,
    /// Steps that were submitted and not collected, oldest first.
    in_flight: VecDeque<SubmittedStep<B>>,
    /// What a step was read into, to be filled again.
    spare: Option<StepOutput>,
    /// Steps that were submitted.
    steps: u64,
}

impl<B: LlmBackend> DecoderRunner<B> {
    /// See [`ModelRunner::with_stages`]; the pools of the last stage come from `alloc`.
    fn with_stages(
        earlier: Vec<Box<dyn AnyStage>>,
        device: &B,
        spec: DecoderSpec,
        weights: DecoderWeights<B>,
        config: RunnerConfig,
        alloc: AllocKvCache<B>,
    ) -> Result<Self> {
        config.validate()?;
        spec.validate().map_err(Error::Model)?;
        if let Some(rows) = spec.learned_positions.filter(|&rows| config.context > rows) {
            let found = config.context;
            let reason =
                format!("found a context of {found}, the model has {rows} learned positions");
            return Err(Error::invalid("runner", reason));
        }
        let DecoderWeights { body, head } = weights;
        let Some(head) = head else {
            let found = &body.stage;
            let reason = format!("found layers {found} at the end, expected the last ones");
            return Err(Error::invalid("stage", reason));
        };
        if !earlier.is_empty() && !body.cut.is_whole() {
            return Err(no_ranks());
        }
        let stages = earlier.iter().map(|stage| stage.stage());
        let mut next = 0;
        for stage in stages.chain([&body.stage]) {
            if stage.layers().start != next {
                let reason = format!("found layers {stage}, expected those from {next} on");
                return Err(Error::invalid("stage", reason));
            }
            next = stage.layers().end;
        }
        if next != spec.layers.len() || earlier.iter().any(|stage| *stage.config() != config) {
            let reason = "the stages are those of another model, or have other sizes";
            return Err(Error::invalid("stage", reason));
        }
        Ok(Self {
            stream: Vec::new(),
            // At most all rows are read, for whatever is wanted of them.
            wanted_rows: device.alloc(config.max_tokens)?,
            logits: device.alloc(config.max_logit_rows * spec.vocab_size)?,
            sampler: SamplerState::alloc(device, config.max_logit_rows)?,
            stage: StageRunner::new(device, &spec, body, config, alloc)?,
            pool: config.pool_shape(&spec),
            state_slots: config.state_slots(&spec),
            earlier,
            head,
            spec,
            in_flight: VecDeque::with_capacity(2),
            spare: None,
            steps: 0,
        })
    }

    /// What is being run.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The stages: their backends and layers, in order.
    pub fn stages(&self) -> impl Iterator<Item = (&'static str, &Stage)> {
        let earlier = self
            .earlier
            .iter()
            .map(|stage| (stage.backend(), stage.stage()));
        earlier.chain([(B::NAME, self.stage.stage())])
    }

    /// The sizes that were allocated for.
    pub fn config(&self) -> &RunnerConfig {
        self.stage.config()
    }

    /// The KV pool of the first layer of the first cache group.
    pub fn pool(&self) -> PagedKvShape {
        self.pool
    }

    /// Which layers share block tables.
    pub fn cache_groups(&self) -> &[CacheGroup] {
        self.stage.cache_groups()
    }

    /// How the steps of the last stage were run, where its device captures them.
    pub fn graph_counts(&self) -> GraphCounts {
        self.stage.graphs.counts()
    }

    /// The slots for recurrent states, where layers have such: each sequence of a step names one.
    pub fn state_slots(&self) -> Option<StateSlots> {
        self.state_slots
    }

    /// The context that the last stage is recorded on.
    pub fn context_mut(&mut self) -> &mut B::Context {
        &mut self.stage.ctx
    }

    /// How many steps may be submitted and not collected: 2 on a device that computes while the host goes on. With several
    /// stages it is 1: the host waits for the residual stream of each but the last.
    pub fn in_flight(&self) -> usize {
        let device = B::device(&self.stage.ctx);
        // What the host alone can choose, it would have to wait for anyway.
        let overlaps = device.overlaps() && device.samples() && self.earlier.is_empty();
        match overlaps && !self.config().profile {
            true => 2,
            false => 1,
        }
    }

    /// Submits one step: writes the batch's keys and values, and reads what is wanted of its rows: one entry of
    /// `wanted` for each of its `logit_rows`, and the hidden states of its `hidden_rows` and `aux_hidden`.
    /// [`collect`](Self::collect) hands it over. A device that computes at once has it when this returns.
    ///
    /// # Errors
    /// `InvalidArgument` when the batch does not fit the runner's sizes or the pool, before anything
    /// is recorded; otherwise what the device says.
    pub fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.check(batch, wanted)?;
        let mut rows = WantedRows::of(batch, wanted);
        self.sampler.begin(batch, wanted);
        let mut output = self.spare.take().unwrap_or_default();
        let (vocab, dim) = (self.spec.vocab_size, self.spec.hidden_size);
        output.begin(wanted, vocab, rows.hidden * dim);
        output.begin_aux_hidden(batch.aux_hidden.len() * dim);
        if !batch.tokens.is_empty() {
            self.run_earlier(batch, &mut output)?;
            self.stage.pack(batch)?;
            rows = rows.filled(self.stage.layout.logit_rows);
            self.pack_wanted(batch, wanted, rows)?;
            // What the step before chose goes among the tokens that are uploaded here.
            self.send()?;
            if !self.earlier.is_empty() {
                self.stage.write_stream(&self.stream)?;
            }
            self.stage.write_features(batch)?;
            self.take_sampled_tokens()?;
            self.compute(batch, rows)?;
        }
        let step = self.read(batch, rows, output)?;
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

    /// Runs the stages before the last one, and keeps their auxiliary hidden states.
    fn run_earlier(&mut self, batch: &StepBatch, output: &mut StepOutput) -> Result<()> {
        let dim = self.spec.hidden_size;
        for stage in &mut self.earlier {
            stage.run(batch, &mut self.stream, output)?;
            let end = stage.stage().layers().end;
            let places = output.aux_hidden_mut().chunks_exact_mut(dim);
            for (tap, out) in batch.aux_hidden.iter().zip(places) {
                if tap.point == AuxHiddenPoint::Layer(end as u32 - 1) {
                    out.copy_from_slice(&self.stream[tap.row as usize * dim..][..dim]);
                }
            }
        }
        Ok(())
    }

    /// The last layer, counted from 0.
    fn last_layer(&self) -> usize {
        self.spec.layers.len() - 1
    }

    /// The spans of all ops since the last call, stage after stage, when the runner was made to measure them; else none.
    /// Times are nanoseconds since the stage was made.
    ///
    /// # Errors
    /// What the device says.
    pub fn take_spans(&mut self) -> Result<Vec<Span>> {
        let mut spans = Vec::new();
        for stage in &mut self.earlier {
            spans.extend(stage.take_spans()?);
        }
        spans.extend(self.stage.take_spans()?);
        Ok(spans)
    }

    /// What loads LoRA adapters for this runner, on whatever thread.
    pub fn adapter_loader(&self) -> AdapterLoader<B> {
        let earlier = self.earlier.iter().map(|stage| stage.adapter_loader());
        AdapterLoader {
            earlier: earlier.collect(),
            ..self.stage.adapter_loader()
        }
    }

    /// Takes a LoRA adapter of this runner's [`adapter_loader`](Self::adapter_loader), for batches that name
    /// it. Memory for what adapters add is allocated with the first of them.
    ///
    /// # Errors
    /// `InvalidArgument` for an adapter that was loaded for a runner of other stages; what the device says.
    pub fn add_adapter(&mut self, id: AdapterId, mut adapter: LoadedAdapter<B>) -> Result<()> {
        let parts = std::mem::take(&mut adapter.earlier);
        if parts.len() != self.earlier.len() {
            return Err(other_runner());
        }
        let mut earlier = self.earlier.iter_mut().zip(parts);
        let added = earlier
            .try_for_each(|(stage, part)| stage.add_adapter(id, part))
            .and_then(|()| self.stage.add_adapter(id, adapter));
        if added.is_err() {
            // What some stages have is of no use without the others.
            self.unload_adapter(id);
        }
        added
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
        for stage in &mut self.earlier {
            stage.unload_adapter(id);
        }
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

    /// Checks that the layers and rows of the auxiliary hidden states exist.
    fn check_aux_hidden(&self, batch: &StepBatch) -> Result<()> {
        let fail = |reason: String| Err(Error::invalid("step", reason));
        let layers = self.spec.layers.len();
        for AuxHiddenState { point, row } in &batch.aux_hidden {
            if let AuxHiddenPoint::Layer(layer) = point
                && *layer as usize >= layers
            {
                return fail(format!(
                    "hidden states are wanted behind layer {layer} of a model with {layers} layers"
                ));
            }
            if *row as usize >= batch.tokens.len() {
                return fail(format!(
                    "hidden states of row {row} are wanted of a step without it"
                ));
            }
        }
        Ok(())
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
        for choice in &batch.pending_tokens {
            let PendingToken { token, row } = *choice;
            if found == 0 || self.sampler.place(row).is_none() {
                return fail(format!(
                    "token {token} is to be chosen in row {row} of no step in flight"
                ));
            }
        }
        let read = batch.logit_rows.len() + batch.hidden_rows.len();
        let limits = [
            ("rows to be read", read, self.config().max_tokens),
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
        self.check_aux_hidden(batch)?;
        self.stage.check_features(batch)?;
        let vocab = self.stage.input_vocab(self.spec.vocab_size);
        if let Some(token) = batch.tokens.iter().find(|&&t| t as usize >= vocab) {
            return fail(format!(
                "token {token} is outside the vocabulary of {vocab}"
            ));
        }
        if let Some(AdapterId(id)) = self.stage.missing_adapter(batch) {
            return fail(format!("adapter {id} is not loaded"));
        }
        let causal = self.spec.is_causal();
        for seq in 0..batch.seqs() {
            let kv_len = batch.kv_lens[seq] as usize;
            let (found, all) = (batch.rows(seq).len(), batch.prompt_lens[seq] as usize);
            if !causal && (found != kv_len || found < all) {
                return fail(format!(
                    "{found} tokens of a sequence of {}: expected all, as attention is bidirectional",
                    all.max(kv_len)
                ));
            }
            if kv_len > self.config().context {
                let capacity = self.config().context;
                return Err(Error::ContextOverflow {
                    requested: kv_len,
                    capacity,
                });
            }
        }
        batch.check_images(&self.spec)?;
        batch.check_states(self.state_slots)?;
        batch.check_tables(self.cache_groups())
    }
}
