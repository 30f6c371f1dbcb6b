//! [`EarlierStage`]: the stages of a runner before its last one, on whatever backends.
//!
//! The residual stream goes from one to the next through host memory, in f32, whatever elements the activations of
//! their devices have.

use super::config::RunnerConfig;
use super::stage::StageRunner;
use super::weights::DecoderWeights;
use crate::batch::StepBatch;
use crate::inventory::Stage;
use crate::kv_blocks::KvBlockLayout;
use crate::kv_layer::AnyKvCache;
use crate::lora::{AdapterPart, LoadedAdapter, PartLoader};
use crate::readback::StepOutput;
use crate::spec::DecoderSpec;
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, LlmBackend, Span};
use ferrum_types::{AdapterId, BlockId, Error, Result, StateSlot};
use std::marker::PhantomData;
use std::sync::Arc;

/// A stage of a [`DecoderRunner`](crate::DecoderRunner) that is not its last, with a KV cache of element `K`.
pub struct EarlierStage<K: KvDtypeKind> {
    pub(super) stage: Box<dyn AnyStage>,
    element: PhantomData<K>,
}

impl<K: KvDtypeKind> EarlierStage<K> {
    /// Allocates what steps of the given sizes need for a stage of the decoder `spec`.
    ///
    /// # Errors
    /// `InvalidArgument` for sizes out of range, and for weights of the last stage or of a rank; `OutOfMemory`.
    pub fn new<B: LlmBackend + BackendKvDtype<K>>(
        device: &B,
        spec: &DecoderSpec,
        weights: DecoderWeights<B>,
        config: RunnerConfig,
    ) -> Result<Self> {
        config.validate()?;
        spec.validate().map_err(Error::Model)?;
        let DecoderWeights { body, head } = weights;
        if head.is_some() {
            let reason = "found the weights of the last stage, expected those of an earlier one";
            return Err(Error::invalid("stage", reason));
        }
        if !body.cut.is_whole() {
            return Err(no_ranks());
        }
        let stage = StageRunner::new(device, spec, body, config, AnyKvCache::alloc::<K>)?;
        Ok(Self {
            stage: Box::new(stage),
            element: PhantomData,
        })
    }
}

/// What a group of ranks would need is a transport for each stage.
pub(super) fn no_ranks() -> Error {
    let reason = "a rank of a group runs all layers on one device, it has no stages";
    Error::invalid("stage", reason)
}

/// A [`StageRunner`] of any backend.
pub(crate) trait AnyStage: Send {
    fn stage(&self) -> &Stage;

    fn backend(&self) -> &'static str;

    fn config(&self) -> &RunnerConfig;

    /// Runs a step: `stream` is the residual stream behind the stage before this one, `[tokens, hidden]`, and then that
    /// behind this one. The first stage looks up the tokens instead. Auxiliary hidden states go to `output`.
    fn run(
        &mut self,
        batch: &StepBatch,
        stream: &mut Vec<f32>,
        output: &mut StepOutput,
    ) -> Result<()>;

    fn kv_block_layout(&self, group: usize) -> Result<KvBlockLayout>;

    /// See [`StageRunner::read_kv_blocks`].
    fn read_kv_blocks(
        &mut self,
        group: usize,
        blocks: &[BlockId],
        parts: &mut [&mut [u8]],
    ) -> Result<()>;

    /// See [`StageRunner::write_kv_blocks`].
    fn write_kv_blocks(&mut self, group: usize, blocks: &[BlockId], parts: &[&[u8]]) -> Result<()>;

    fn state_elements(&self) -> Vec<usize>;

    /// See [`StageRunner::read_state`].
    fn read_state(&mut self, slot: StateSlot, out: &mut [u8]) -> Result<()>;

    /// See [`StageRunner::write_state`].
    fn write_state(&mut self, slot: StateSlot, bytes: &[u8]) -> Result<()>;

    fn take_spans(&mut self) -> Result<Vec<Span>>;

    fn adapter_loader(&self) -> Arc<dyn PartLoader>;

    fn add_adapter(&mut self, id: AdapterId, part: AdapterPart) -> Result<()>;

    fn unload_adapter(&mut self, id: AdapterId) -> bool;
}

impl<B: LlmBackend> AnyStage for StageRunner<B> {
    fn stage(&self) -> &Stage {
        StageRunner::stage(self)
    }

    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn config(&self) -> &RunnerConfig {
        StageRunner::config(self)
    }

    fn run(
        &mut self,
        batch: &StepBatch,
        stream: &mut Vec<f32>,
        output: &mut StepOutput,
    ) -> Result<()> {
        self.pack(batch)?;
        self.send([])?;
        if !StageRunner::stage(self).is_first() {
            self.write_stream(stream)?;
        }
        self.compute(batch, false, &mut |ctx, step, scratch, _| {
            scratch.add_pending(ctx, step)
        })?;
        self.read_aux_hidden(batch, output)?;
        self.read_stream(stream)
    }

    fn kv_block_layout(&self, group: usize) -> Result<KvBlockLayout> {
        StageRunner::kv_block_layout(self, group)
    }

    fn read_kv_blocks(
        &mut self,
        group: usize,
        blocks: &[BlockId],
        parts: &mut [&mut [u8]],
    ) -> Result<()> {
        StageRunner::read_kv_blocks(self, group, blocks, parts)
    }

    fn write_kv_blocks(&mut self, group: usize, blocks: &[BlockId], parts: &[&[u8]]) -> Result<()> {
        StageRunner::write_kv_blocks(self, group, blocks, parts)
    }

    fn state_elements(&self) -> Vec<usize> {
        StageRunner::state_elements(self)
    }

    fn read_state(&mut self, slot: StateSlot, out: &mut [u8]) -> Result<()> {
        StageRunner::read_state(self, slot, out)
    }

    fn write_state(&mut self, slot: StateSlot, bytes: &[u8]) -> Result<()> {
        StageRunner::write_state(self, slot, bytes)
    }

    fn take_spans(&mut self) -> Result<Vec<Span>> {
        StageRunner::take_spans(self)
    }

    fn adapter_loader(&self) -> Arc<dyn PartLoader> {
        Arc::new(StageRunner::adapter_loader(self))
    }

    fn add_adapter(&mut self, id: AdapterId, part: AdapterPart) -> Result<()> {
        let part = part.downcast::<LoadedAdapter<B>>();
        let part = part.map_err(|_| other_runner())?;
        StageRunner::add_adapter(self, id, *part)
    }

    fn unload_adapter(&mut self, id: AdapterId) -> bool {
        StageRunner::unload_adapter(self, id)
    }
}

/// An adapter whose parts are those of other stages.
pub(super) fn other_runner() -> Error {
    Error::invalid("adapter", "it was loaded for another runner")
}
