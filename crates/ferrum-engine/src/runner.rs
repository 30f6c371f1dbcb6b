//! [`StepRunner`]: what the engine asks of a model on a device.
//!
//! A step is submitted and collected. Between the two the device works, and the host may do something else; a
//! runner that computes at once has the results ready when it was submitted. One that says so takes the next step
//! before the last one is collected, with tokens in it that only the device knows.

use ferrum_formats::LoraFolder;
use ferrum_kernels::{BatchInvariance, LlmBackend, PagedKvShape, Span};
use ferrum_models::{
    CacheGroup, DecoderRunner, DecoderSpec, KvBlockLayout, Readback, RunnerConfig, RunnerGroup,
    StateLayout, StateSlots, StepBatch, StepOutput, Ticket,
};
use ferrum_types::{AdapterId, BlockId, Error, Result, StateSlot};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// An object-safe view on a [`DecoderRunner`], or on whatever else makes steps: whole steps, no generics.
pub trait StepRunner: Send {
    /// Name of the backend that chooses tokens: that of the last stage.
    fn backend(&self) -> &'static str;

    /// The backends with their layers, as in `--layers`; by default the name of the one backend.
    fn placement(&self) -> String {
        self.backend().to_owned()
    }

    /// What is being run.
    fn spec(&self) -> &DecoderSpec;

    /// The sizes that were allocated for.
    fn config(&self) -> &RunnerConfig;

    /// The KV pool of the first layer of the first cache group.
    fn pool(&self) -> PagedKvShape {
        self.config().pool_shape(self.spec())
    }

    /// Which layers share block tables.
    fn cache_groups(&self) -> Vec<CacheGroup> {
        self.config().cache_groups(self.spec())
    }

    /// The slots for recurrent states, where layers have such: each sequence of a step names one.
    fn state_slots(&self) -> Option<StateSlots> {
        self.config().state_slots(self.spec())
    }

    /// How many steps may be submitted and not collected; 1: steps do not overlap. The engine uses at most 2.
    ///
    /// Steps run in the order in which they were submitted, each as if the one before it had ended. With 2, a batch
    /// may have [`pending_tokens`](StepBatch::pending_tokens): tokens that the step in flight chooses, in rows of which
    /// [`Readback::Token`] is read. Adapters may be added while steps are in flight, and unloaded while steps that do not
    /// name them are. A runner may be dropped with steps in flight.
    fn in_flight(&self) -> usize {
        1
    }

    /// Whether rows can want a [sampled](Readback::SAMPLED) token.
    fn samples(&self) -> bool {
        false
    }

    /// What the bits of a row depend on; with less than [`BitExact`](BatchInvariance::BitExact), drafts and cached prefixes may
    /// change a text.
    fn batch_invariance(&self) -> BatchInvariance {
        BatchInvariance::BitExact
    }

    /// Submits a step: writes the batch's keys and values, and reads of its rows what `wanted` says, one entry for each of
    /// its `logit_rows`. The arguments are not read later.
    ///
    /// # Errors
    /// `InvalidArgument` when the batch does not fit the runner's sizes or the pool; what the device says.
    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket>;

    /// Waits for a step and returns what was read of it. Steps are collected in the order in which they were
    /// submitted. `out` is overwritten.
    ///
    /// # Errors
    /// `InvalidArgument` for the ticket of another step; what the device says.
    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()>;

    /// [`submit`](Self::submit), and [`collect`](Self::collect) at once.
    ///
    /// # Errors
    /// Those of both.
    fn run(&mut self, batch: &StepBatch, wanted: &[Readback], out: &mut StepOutput) -> Result<()> {
        let ticket = self.submit(batch, wanted)?;
        self.collect(ticket, out)
    }

    /// What the bytes of a KV block of a cache group are; `None`, as by default, where blocks cannot be read and written.
    fn kv_block_layout(&self, _group: usize) -> Option<KvBlockLayout> {
        None
    }

    /// See [`DecoderRunner::read_kv_blocks`]. With steps in flight, those that were submitted come first.
    ///
    /// # Errors
    /// Those of the runner; `InvalidArgument` where [`kv_block_layout`](Self::kv_block_layout) is `None`.
    fn read_kv_blocks(&mut self, _group: usize, _: &[BlockId], _: &mut [u8]) -> Result<()> {
        Err(no_blocks())
    }

    /// See [`DecoderRunner::write_kv_blocks`].
    ///
    /// # Errors
    /// As [`read_kv_blocks`](Self::read_kv_blocks).
    fn write_kv_blocks(&mut self, _group: usize, _: &[BlockId], _: &[u8]) -> Result<()> {
        Err(no_blocks())
    }

    /// What the bytes of a sequence's recurrent states are; `None`, as by default, where there are none, or they cannot
    /// be read and written.
    fn state_layout(&self) -> Option<StateLayout> {
        None
    }

    /// See [`DecoderRunner::read_state`]. With steps in flight, those that were submitted come first.
    ///
    /// # Errors
    /// Those of the runner; `InvalidArgument` where [`state_layout`](Self::state_layout) is `None`.
    fn read_state(&mut self, _: StateSlot, _: &mut [u8]) -> Result<()> {
        Err(no_blocks())
    }

    /// See [`DecoderRunner::write_state`].
    ///
    /// # Errors
    /// As [`read_state`](Self::read_state).
    fn write_state(&mut self, _: StateSlot, _: &[u8]) -> Result<()> {
        Err(no_blocks())
    }

    /// See [`DecoderRunner::take_spans`]; by default nothing is measured.
    ///
    /// # Errors
    /// What the device says.
    fn take_spans(&mut self) -> Result<Vec<Span>> {
        Ok(Vec::new())
    }

    /// See [`DecoderRunner::adapter_loader`]; by default there are no adapters.
    fn adapter_loader(&self) -> AdapterLoader {
        AdapterLoader::new(|_| Err(no_adapters()))
    }

    /// See [`DecoderRunner::add_adapter`].
    ///
    /// # Errors
    /// What the device says.
    fn add_adapter(&mut self, _: AdapterId, _: LoadedAdapter) -> Result<()> {
        Err(no_adapters())
    }

    /// See [`DecoderRunner::unload_adapter`].
    fn unload_adapter(&mut self, _: AdapterId) -> bool {
        false
    }
}

fn no_blocks() -> Error {
    Error::invalid(
        "kv_blocks",
        "this runner has no blocks or states to read or write",
    )
}

fn no_adapters() -> Error {
    Error::invalid("adapter", "this runner takes no adapters")
}

impl<B: LlmBackend> StepRunner for DecoderRunner<B> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn placement(&self) -> String {
        let stages = self
            .stages()
            .map(|(backend, stage)| match stage.is_whole() {
                true => backend.to_owned(),
                false => format!("{backend}:{stage}"),
            });
        stages.collect::<Vec<_>>().join(",")
    }

    fn spec(&self) -> &DecoderSpec {
        DecoderRunner::spec(self)
    }

    fn config(&self) -> &RunnerConfig {
        DecoderRunner::config(self)
    }

    fn state_slots(&self) -> Option<StateSlots> {
        DecoderRunner::state_slots(self)
    }

    fn in_flight(&self) -> usize {
        DecoderRunner::in_flight(self)
    }

    fn samples(&self) -> bool {
        DecoderRunner::samples(self)
    }

    fn batch_invariance(&self) -> BatchInvariance {
        DecoderRunner::batch_invariance(self)
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        DecoderRunner::submit(self, batch, wanted)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        DecoderRunner::collect(self, ticket, out)
    }

    fn kv_block_layout(&self, group: usize) -> Option<KvBlockLayout> {
        DecoderRunner::kv_block_layout(self, group).ok()
    }

    fn read_kv_blocks(&mut self, group: usize, blocks: &[BlockId], out: &mut [u8]) -> Result<()> {
        DecoderRunner::read_kv_blocks(self, group, blocks, out)
    }

    fn write_kv_blocks(&mut self, group: usize, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        DecoderRunner::write_kv_blocks(self, group, blocks, bytes)
    }

    fn state_layout(&self) -> Option<StateLayout> {
        DecoderRunner::state_layout(self).ok().flatten()
    }

    fn read_state(&mut self, slot: StateSlot, out: &mut [u8]) -> Result<()> {
        DecoderRunner::read_state(self, slot, out)
    }

    fn write_state(&mut self, slot: StateSlot, bytes: &[u8]) -> Result<()> {
        DecoderRunner::write_state(self, slot, bytes)
    }

    fn take_spans(&mut self) -> Result<Vec<Span>> {
        DecoderRunner::take_spans(self)
    }

    fn adapter_loader(&self) -> AdapterLoader {
        let loader = DecoderRunner::adapter_loader(self);
        AdapterLoader::new(move |folder| Ok(LoadedAdapter::new(loader.load(folder)?)))
    }

    fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter) -> Result<()> {
        DecoderRunner::add_adapter(self, id, adapter.take()?)
    }

    fn unload_adapter(&mut self, id: AdapterId) -> bool {
        DecoderRunner::unload_adapter(self, id)
    }
}

/// Keys, values and states are in parts on all ranks, and rank 0 cannot read those of the others.
impl<B: LlmBackend> StepRunner for RunnerGroup<B> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn placement(&self) -> String {
        format!("{} ranks of {}", self.ranks(), B::NAME)
    }

    fn spec(&self) -> &DecoderSpec {
        RunnerGroup::spec(self)
    }

    fn config(&self) -> &RunnerConfig {
        RunnerGroup::config(self)
    }

    fn pool(&self) -> PagedKvShape {
        RunnerGroup::pool(self)
    }

    fn cache_groups(&self) -> Vec<CacheGroup> {
        RunnerGroup::cache_groups(self).to_vec()
    }

    fn state_slots(&self) -> Option<StateSlots> {
        RunnerGroup::state_slots(self)
    }

    fn samples(&self) -> bool {
        RunnerGroup::samples(self)
    }

    fn batch_invariance(&self) -> BatchInvariance {
        RunnerGroup::batch_invariance(self)
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        RunnerGroup::submit(self, batch, wanted)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        RunnerGroup::collect(self, ticket, out)
    }

    fn take_spans(&mut self) -> Result<Vec<Span>> {
        RunnerGroup::take_spans(self)
    }

    fn adapter_loader(&self) -> AdapterLoader {
        let loader = RunnerGroup::adapter_loader(self);
        AdapterLoader::new(move |folder| Ok(LoadedAdapter::new(loader.load(folder)?)))
    }

    fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter) -> Result<()> {
        RunnerGroup::add_adapter(self, id, adapter.take()?)
    }

    fn unload_adapter(&mut self, id: AdapterId) -> bool {
        RunnerGroup::unload_adapter(self, id)
    }
}

/// A loaded LoRA adapter, whose type is that of the runner for which it was loaded.
pub struct LoadedAdapter(Box<dyn Any + Send>);

impl LoadedAdapter {
    /// Hides the type of `adapter`.
    pub fn new<T: Send + 'static>(adapter: T) -> Self {
        Self(Box::new(adapter))
    }

    /// What was given to [`new`](Self::new).
    ///
    /// # Errors
    /// `InvalidArgument` when it is of another type: it was loaded for another runner.
    pub fn take<T: 'static>(self) -> Result<T> {
        let reason = "it was loaded for another runner";
        let adapter = self.0.downcast();
        adapter.map_or_else(|_| Err(Error::invalid("adapter", reason)), |a| Ok(*a))
    }
}

type LoadAdapter = dyn Fn(&LoraFolder) -> Result<LoadedAdapter> + Send + Sync;

/// Loads LoRA adapters for a runner, on any thread and while it makes steps. Clones are the same.
#[derive(Clone)]
pub struct AdapterLoader(Arc<LoadAdapter>);

impl AdapterLoader {
    /// One that loads as `load` does.
    pub fn new(
        load: impl Fn(&LoraFolder) -> Result<LoadedAdapter> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(load))
    }

    /// Reads an adapter, checks it against the model, and uploads it to the device.
    ///
    /// # Errors
    /// `Model` names the module that does not fit the model; what the device says.
    pub fn load(&self, folder: &LoraFolder) -> Result<LoadedAdapter> {
        (self.0)(folder)
    }
}

impl fmt::Debug for AdapterLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AdapterLoader").finish_non_exhaustive()
    }
}
