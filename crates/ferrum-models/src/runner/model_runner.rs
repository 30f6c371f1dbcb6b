//! [`ModelRunner`]: a decoder's runner that has the element of its KV cache as a type parameter.

use super::{DecoderRunner, DecoderWeights, EarlierStage, RunnerConfig};
use crate::kv_layer::AnyKvCache;
use crate::spec::DecoderSpec;
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, KvFp16, LlmBackend};
use ferrum_types::Result;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A [`DecoderRunner`], to which it dereferences, with a KV cache of element `K`. The element is known where pools are
/// allocated, and nothing that runs steps is compiled for it.
pub struct ModelRunner<B: LlmBackend, K: KvDtypeKind = KvFp16> {
    runner: DecoderRunner<B>,
    element: PhantomData<K>,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> ModelRunner<B, K> {
    /// Allocates everything that steps of the given sizes need.
    ///
    /// # Errors
    /// `InvalidArgument` for sizes out of range, and for weights of a stage; `OutOfMemory`.
    pub fn new(
        device: &B,
        spec: DecoderSpec,
        weights: DecoderWeights<B>,
        config: RunnerConfig,
    ) -> Result<Self> {
        Self::with_stages(Vec::new(), device, spec, weights, config)
    }

    /// A runner of several stages: `earlier` ones, and a last one of these weights on this device. All have the same
    /// sizes.
    ///
    /// # Errors
    /// As [`new`](Self::new); `InvalidArgument` when the stages do not follow each other, or are those of a rank.
    pub fn with_stages(
        earlier: Vec<EarlierStage<K>>,
        device: &B,
        spec: DecoderSpec,
        weights: DecoderWeights<B>,
        config: RunnerConfig,
    ) -> Result<Self> {
        let earlier = earlier.into_iter().map(|stage| stage.stage).collect();
        let alloc = AnyKvCache::alloc::<K>;
        Ok(Self {
            runner: DecoderRunner::with_stages(earlier, device, spec, weights, config, alloc)?,
            element: PhantomData,
        })
    }
}

impl<B: LlmBackend, K: KvDtypeKind> From<ModelRunner<B, K>> for DecoderRunner<B> {
    fn from(runner: ModelRunner<B, K>) -> Self {
        runner.runner
    }
}

impl<B: LlmBackend, K: KvDtypeKind> Deref for ModelRunner<B, K> {
    type Target = DecoderRunner<B>;

    fn deref(&self) -> &DecoderRunner<B> {
        &self.runner
    }
}

impl<B: LlmBackend, K: KvDtypeKind> DerefMut for ModelRunner<B, K> {
    fn deref_mut(&mut self) -> &mut DecoderRunner<B> {
        &mut self.runner
    }
}
