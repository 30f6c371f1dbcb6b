//! KV caches whose element type is part of their Rust type.
//!
//! A paged pool of one layer is `[blocks, kv_heads, block_size, head_dim]` for keys and
//! `[blocks, kv_heads, block_size, value_dim]` for values in meaning; the bytes are the backend's choice. A contiguous cache is the same pool with one block of the whole context for
//! each sequence, so both go through one code path.

use crate::{BlockId, Dtype, Error, Result};
use std::ops::Range;

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
    /// Elements of a key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Whether a value is the first `value_dim` elements of its key and not stored by itself: the latent rows of
    /// multi-head latent attention.
    pub values_in_keys: bool,
}

impl PagedKvShape {
    /// A pool of latent rows (multi-head latent attention): one of `rank + rope_dim` elements for each token and all
    /// heads, whose first `rank` are the value.
    pub fn latent(blocks: usize, block_size: usize, (rank, rope_dim): (usize, usize)) -> Self {
        Self {
            blocks,
            block_size,
            kv_heads: 1,
            head_dim: rank.saturating_add(rope_dim),
            value_dim: rank,
            values_in_keys: true,
        }
    }

    /// Elements that are stored of a value head.
    #[inline]
    pub fn stored_value_dim(&self) -> usize {
        match self.values_in_keys {
            true => 0,
            false => self.value_dim,
        }
    }

    /// Bytes of keys and values together with scales, `None` on overflow.
    pub fn bytes<K: KvDtypeKind>(&self) -> Option<usize> {
        let block = self.block_bytes::<K>()?.len();
        block.checked_mul(self.blocks)
    }
}

/// Where the parts of a block lie among its stored bytes, as blocks leave a device: keys, values, scales of keys, scales of
/// values, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBlockBytes {
    /// Keys, `[kv_heads, block_size, head_dim]` elements.
    pub keys: Range<usize>,
    /// Values, `[kv_heads, block_size, value_dim]` elements; empty where keys hold them.
    pub values: Range<usize>,
    /// Scales of keys, `[kv_heads, block_size]` in f32; empty where the element has none.
    pub key_scales: Range<usize>,
    /// Scales of values, likewise; empty where keys hold them, too.
    pub value_scales: Range<usize>,
}

impl KvBlockBytes {
    /// All bytes of a block.
    #[inline]
    pub fn len(&self) -> usize {
        self.value_scales.end
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl PagedKvShape {
    /// The stored bytes of one block of one layer, `None` on overflow.
    pub fn block_bytes<K: KvDtypeKind>(&self) -> Option<KvBlockBytes> {
        let vectors = self.block_size.checked_mul(self.kv_heads)?;
        let elements = |dim: usize| vectors.checked_mul(dim)?.checked_mul(K::DTYPE.size());
        let scales = |stored: bool| match K::SCALED && stored {
            true => vectors.checked_mul(4),
            false => Some(0),
        };
        let keys = elements(self.head_dim)?;
        let values = keys.checked_add(elements(self.stored_value_dim())?)?;
        let key_scales = values.checked_add(scales(true)?)?;
        let value_scales = key_scales.checked_add(scales(!self.values_in_keys)?)?;
        Some(KvBlockBytes {
            keys: 0..keys,
            values: keys..values,
            key_scales: values..key_scales,
            value_scales: key_scales..value_scales,
        })
    }

    /// Holds blocks and the lengths of their bytes against the pool; where the parts of a block lie.
    ///
    /// # Errors
    /// `InvalidArgument` for a block that the pool does not have; `Shape` for another length.
    pub fn check_block_bytes<K: KvDtypeKind>(
        &self,
        op: &'static str,
        blocks: impl IntoIterator<Item = (BlockId, usize)>,
    ) -> Result<KvBlockBytes> {
        let parts = self.block_bytes::<K>();
        let parts = parts.ok_or_else(|| {
            let reason = format!("a block of {self:?} is larger than the address space");
            Error::invalid(op, reason)
        })?;
        for (block, found) in blocks {
            if block.0 as usize >= self.blocks {
                let reason = format!("block {}, the pool has {} blocks", block.0, self.blocks);
                return Err(Error::invalid(op, reason));
            }
            let expected = parts.len();
            if found != expected {
                return Err(Error::Shape {
                    op,
                    what: "bytes of a block",
                    found,
                    expected,
                });
            }
        }
        Ok(parts)
    }
}
