//! KV caches whose element type is part of their Rust type.
//!
//! A paged pool of one layer is `[blocks, kv_heads, block_size, head_dim]` in meaning; the bytes are
//! the backend's choice. A contiguous cache is the same pool with one block of the whole context for
//! each sequence, so both go through one code path.

use super::{Backend, BackendKvDtype};
use ferrum_types::{Dtype, Result};

mod sealed {
    pub trait Sealed {}
}

/// An element type that a KV cache can have.
pub trait KvDtypeKind: sealed::Sealed + Send + Sync + Copy + 'static {
    /// The stored element.
    const DTYPE: Dtype;
    /// Name as in `--kv-dtype`.
    const NAME: &'static str;
    /// Whether a scale is stored for each token and kv head.
    const SCALED: bool;
}

macro_rules! kv_kind {
    ($($(#[$doc:meta])* $t:ident => $d:ident, $n:literal, $s:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $t;
        impl sealed::Sealed for $t {}
        impl KvDtypeKind for $t {
            const DTYPE: Dtype = Dtype::$d;
            const NAME: &'static str = $n;
            const SCALED: bool = $s;
        }
    )*};
}
kv_kind! {
    /// binary32: exact, for parity tests.
    KvF32 => F32, "f32", false;
    /// binary16: the default.
    KvFp16 => F16, "f16", false;
    /// bfloat16.
    KvBf16 => BF16, "bf16", false;
    /// FP8 E4M3, no scale, saturating.
    KvFp8 => F8E4M3, "fp8", false;
    /// Signed 8 bit, symmetric, with an f32 scale `amax/127` for each token and kv head.
    KvInt8 => I8, "int8", true;
}

/// Size of one layer's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedKvShape {
    /// Blocks in the pool.
    pub blocks: usize,
    /// Tokens in a block; at least 1, need not be a power of two.
    pub block_size: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl PagedKvShape {
    /// Elements of K (and of V), `None` on overflow.
    pub fn elements(&self) -> Option<usize> {
        self.blocks
            .checked_mul(self.block_size)?
            .checked_mul(self.kv_heads)?
            .checked_mul(self.head_dim)
    }

    /// Bytes of K and V together with scales, `None` on overflow.
    pub fn bytes<K: KvDtypeKind>(&self) -> Option<usize> {
        let scales = if K::SCALED {
            self.elements()? / self.head_dim.max(1) * 4
        } else {
            0
        };
        self.elements()?
            .checked_mul(K::DTYPE.size())?
            .checked_add(scales)?
            .checked_mul(2)
    }
}

/// K and V of one layer, for all sequences of a pool.
pub struct KvLayer<B: BackendKvDtype<K>, K: KvDtypeKind = super::KvFp16> {
    /// Keys.
    pub k: B::KvBuffer,
    /// Values.
    pub v: B::KvBuffer,
    /// Scales of keys and values, where the element type has them.
    pub scales: B::KvScales,
    /// Sizes.
    pub shape: PagedKvShape,
}

/// The KV pool of a model: one [`KvLayer`] for each layer.
pub struct KvCache<B: BackendKvDtype<K>, K: KvDtypeKind = super::KvFp16> {
    /// Layers in model order.
    pub layers: Vec<KvLayer<B, K>>,
}

impl<B: Backend + BackendKvDtype<K>, K: KvDtypeKind> KvCache<B, K> {
    /// Allocates `layers` pools of the same shape.
    pub fn alloc(device: &B, layers: usize, shape: PagedKvShape) -> Result<Self> {
        let layers = (0..layers)
            .map(|_| device.alloc_kv_layer(shape))
            .collect::<Result<_>>()?;
        Ok(Self { layers })
    }
}

/// A [`KvCache`] with quantised elements.
pub type KvCacheQuant<B, K> = KvCache<B, K>;
