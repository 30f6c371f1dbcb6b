//! Paged KV: block-table writes, and attention over a ragged batch.
//!
//! One call serves prefill, chunks of it, decode and any mix: a batch is flat tokens with
//! `query_starts`, as in vLLM's variable-length attention.

use super::*;
use ferrum_types::{BlockId, Result};

/// The state of one step on the device. Buffers may be longer than the sizes in `shape`, so that a
/// graph can be replayed over them with new contents.
///
/// Query token `t` of sequence `s` has the key index
/// `kv_lens[s] - (query_starts[s+1] - query_starts[s]) + (t - query_starts[s])`. Its key and value live
/// in block `table[s, index / block_size]` at slot `index % block_size`, by the table of its layer's
/// [group](KvLayer::group).
///
/// Only entries that some query of the step sees, or some token of it is written to, have to name a block of the
/// pool. Those behind a sliding window may be [released](ferrum_types::BlockId::RELEASED) (-1), and those after the
/// last key anything: no op reads keys or values by them.
pub struct DeviceBatch<B: Backend> {
    /// Sizes.
    pub shape: BatchShape,
    /// `[tokens]`: input ids.
    pub tokens: B::Buffer<i32>,
    /// `[tokens]`: row in the RoPE tables; normally the position.
    pub rope_rows: B::Buffer<i32>,
    /// `[seqs + 1]`: first token of each sequence; non-decreasing.
    pub query_starts: B::Buffer<i32>,
    /// `[seqs]`: keys in the cache after this step's writes.
    pub kv_lens: B::Buffer<i32>,
    /// `[seqs]`: the slot of each sequence's recurrent state; not read where no layer has one.
    pub state_slots: B::Buffer<i32>,
    /// For each cache group `[seqs, table_stride]`: block ids.
    pub block_tables: Vec<B::Buffer<i32>>,
}

/// A fused projection that is appended to a paged cache.
pub struct PagedQkv<'a, B: Backend> {
    /// `[tokens, q_dim + k_dim + v_dim]`.
    pub qkv: &'a Act<B>,
    /// Norm and rotation.
    pub transform: QkvTransform<'a, B>,
    /// Sizes; `tokens` equals the batch's.
    pub shape: QkvShape,
}

/// Can store and read a cache of element `K`.
pub trait BackendKvDtype<K: KvDtypeKind>: BackendPagedKv {
    /// Keys or values of one layer.
    type KvBuffer: Send + Sync;
    /// Scales of keys and values; `()` where there are none.
    type KvScales: Send + Sync + Default;

    /// An empty pool of one layer.
    ///
    /// # Errors
    /// [`OutOfMemory`](ferrum_types::Error::OutOfMemory); `InvalidArgument` for a zero size.
    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>>;

    /// Writes token-major `k` (`[tokens, kv_heads, head_dim]`) and `v` (`[tokens, kv_heads, value_dim]`) of this step's
    /// tokens. Where [keys hold the values](PagedKvShape::values_in_keys), nothing is read of `v`.
    fn kv_append(
        ctx: &mut Self::Context,
        kv: &mut KvLayer<Self, K>,
        k: &Act<Self>,
        v: &Act<Self>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()>;

    /// Splits a fused projection, norms and rotates, writes k and v to the pool and q token-major to
    /// `q` (`[tokens, heads, head_dim]`). The provided one goes through buffers of its own.
    fn kv_append_qkv(
        ctx: &mut Self::Context,
        input: PagedQkv<'_, Self>,
        q: &mut Act<Self>,
        kv: &mut KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        compose::kv_append_qkv(ctx, input, q, kv, batch)
    }

    /// Attention of every query token over its own sequence. `q`: `[tokens, heads, head_dim]`, `out`:
    /// `[tokens, heads, value_dim]`. `sinks` as in [`Backend::flash_attention`].
    fn kv_attention(
        ctx: &mut Self::Context,
        q: &Act<Self>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&Self::Buffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut Act<Self>,
        config: &AttnConfig,
    ) -> Result<()>;

    /// Copies whole blocks `(from, to)`, in order (copy-on-write of shared prefixes).
    fn kv_copy_blocks(
        ctx: &mut Self::Context,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()>;

    /// Runs what is recorded and copies the stored bytes of whole blocks to the host, each into a slice of
    /// [`PagedKvShape::block_bytes`]. The layout is that of [`KvBlockBytes`] on every backend, little-endian,
    /// whatever the pool's own is, so blocks may go to another device and to a file.
    ///
    /// # Errors
    /// `InvalidArgument` for a block that is not in the pool, [`Shape`](ferrum_types::Error::Shape) for a slice of
    /// another length; then nothing is copied. What the device says.
    fn kv_read_blocks(
        ctx: &mut Self::Context,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()>;

    /// Records copies of stored bytes, as [`kv_read_blocks`](Self::kv_read_blocks) gives them, to whole blocks, in
    /// order. The bytes may be reused when this returns, and what they say is not looked at.
    ///
    /// # Errors
    /// As [`kv_read_blocks`](Self::kv_read_blocks); then nothing is written.
    fn kv_write_blocks(
        ctx: &mut Self::Context,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()>;
}

/// Paged attention under its usual names, for whatever cache element the backend can store.
pub trait BackendPagedKv: Backend {
    /// See [`BackendKvDtype::kv_append_qkv`].
    fn split_qkv_norm_rope_into_paged_cache<K: KvDtypeKind>(
        ctx: &mut Self::Context,
        input: PagedQkv<'_, Self>,
        q: &mut Act<Self>,
        kv: &mut KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()>
    where
        Self: BackendKvDtype<K>,
    {
        <Self as BackendKvDtype<K>>::kv_append_qkv(ctx, input, q, kv, batch)
    }

    /// See [`BackendKvDtype::kv_attention`].
    fn paged_attention<K: KvDtypeKind>(
        ctx: &mut Self::Context,
        q: &Act<Self>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&Self::Buffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut Act<Self>,
        config: &AttnConfig,
    ) -> Result<()>
    where
        Self: BackendKvDtype<K>,
    {
        <Self as BackendKvDtype<K>>::kv_attention(ctx, q, kv, sinks, batch, out, config)
    }

    /// Writes the latent rows of this step's tokens, `[tokens, rank + rope_dim]`, to a
    /// [latent pool](PagedKvShape::latent): one row for all heads, and no values beside it.
    ///
    /// # Errors
    /// `InvalidArgument` for another pool.
    fn append_latent_paged<K: KvDtypeKind>(
        ctx: &mut Self::Context,
        kv: &mut KvLayer<Self, K>,
        latent: &Act<Self>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()>
    where
        Self: BackendKvDtype<K>,
    {
        check::latent_pool("append_latent_paged", &kv.shape)?;
        <Self as BackendKvDtype<K>>::kv_append(ctx, kv, latent, latent, batch)
    }

    /// [`mla_attention`](Backend::mla_attention) of every query token over the latent rows of its own sequence, causal.
    /// `q`: `[tokens, heads, rank + rope_dim]`, `out`: `[tokens, heads, rank]`.
    ///
    /// # Errors
    /// `InvalidArgument` for a pool that is not [latent](PagedKvShape::latent).
    fn paged_mla_attention<K: KvDtypeKind>(
        ctx: &mut Self::Context,
        q: &Act<Self>,
        kv: &KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
        out: &mut Act<Self>,
        (heads, scale): (usize, f32),
    ) -> Result<()>
    where
        Self: BackendKvDtype<K>,
    {
        check::latent_pool("paged_mla_attention", &kv.shape)?;
        let config = AttnConfig {
            heads,
            kv_heads: 1,
            head_dim: kv.shape.head_dim,
            value_dim: kv.shape.value_dim,
            scale,
            causal: true,
            sliding_window: None,
            chunked: false,
            softcap: None,
        };
        <Self as BackendKvDtype<K>>::kv_attention(ctx, q, kv, None, batch, out, &config)
    }
}

/// Append and attention on the INT8 cache, for callers that name the element instead of being
/// generic over it.
pub trait BackendInt8KvOps: BackendKvDtype<KvInt8> {
    /// [`BackendKvDtype::kv_append`] on an INT8 pool.
    fn int8_kv_append_paged(
        ctx: &mut Self::Context,
        kv: &mut KvLayer<Self, KvInt8>,
        k: &Act<Self>,
        v: &Act<Self>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        <Self as BackendKvDtype<KvInt8>>::kv_append(ctx, kv, k, v, batch)
    }

    /// [`BackendKvDtype::kv_attention`] on an INT8 pool.
    fn int8_paged_attention(
        ctx: &mut Self::Context,
        q: &Act<Self>,
        kv: &KvLayer<Self, KvInt8>,
        batch: &DeviceBatch<Self>,
        out: &mut Act<Self>,
        config: &AttnConfig,
    ) -> Result<()> {
        <Self as BackendKvDtype<KvInt8>>::kv_attention(ctx, q, kv, None, batch, out, config)
    }
}
