//! KV caches whose element type is part of their Rust type.

use super::{Backend, BackendKvDtype};
use ferrum_types::{KvDtypeKind, KvFp16, PagedKvShape, Result};

/// K and V of one layer, for all sequences of a pool.
pub struct KvLayer<B: BackendKvDtype<K>, K: KvDtypeKind = KvFp16> {
    /// Keys.
    pub k: B::KvBuffer,
    /// Values.
    pub v: B::KvBuffer,
    /// Scales of keys and values, where the element type has them.
    pub scales: B::KvScales,
    /// Sizes.
    pub shape: PagedKvShape,
    /// The cache group of the layer: which of a batch's [`block_tables`](super::DeviceBatch::block_tables) finds its
    /// blocks. 0 as allocated.
    pub group: usize,
}

/// The KV pool of a model: one [`KvLayer`] for each layer.
pub struct KvCache<B: BackendKvDtype<K>, K: KvDtypeKind = KvFp16> {
    /// Layers in model order.
    pub layers: Vec<KvLayer<B, K>>,
}

impl<B: Backend + BackendKvDtype<K>, K: KvDtypeKind> KvCache<B, K> {
    /// Allocates a pool for each layer: its cache group, and its shape.
    ///
    /// # Errors
    /// Those of [`alloc_kv_layer`](BackendKvDtype::alloc_kv_layer).
    pub fn alloc(
        device: &B,
        layers: impl IntoIterator<Item = (usize, PagedKvShape)>,
    ) -> Result<Self> {
        let alloc = |(group, shape)| {
            let layer = device.alloc_kv_layer(shape)?;
            Ok(KvLayer { group, ..layer })
        };
        let layers = layers.into_iter().map(alloc).collect::<Result<_>>()?;
        Ok(Self { layers })
    }
}

/// A [`KvCache`] with quantised elements.
pub type KvCacheQuant<B, K> = KvCache<B, K>;
