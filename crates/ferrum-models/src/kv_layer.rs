//! [`AnyKvLayer`]: the pool of a layer without its element type, so that the forward path is compiled once for each
//! backend and not once for each element of its caches.

use ferrum_kernels::{
    Act, AttnConfig, Backend, BackendKvDtype, DeviceBatch, KvCache, KvDtypeKind, KvLayer,
    PagedKvShape, PagedQkv,
};
use ferrum_types::{BlockId, Result};

/// What a layer has of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlockPart {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head; 0 where keys hold the values.
    pub value_dim: usize,
    /// Its bytes.
    pub bytes: usize,
}

impl KvBlockPart {
    /// What a layer with this pool has; `None` when that is larger than the address space.
    pub(crate) fn of<K: KvDtypeKind>(pool: &PagedKvShape) -> Option<Self> {
        Some(Self {
            kv_heads: pool.kv_heads,
            key_dim: pool.head_dim,
            value_dim: pool.stored_value_dim(),
            bytes: pool.block_bytes::<K>()?.len(),
        })
    }
}

/// What layers ask of a [`KvLayer`] of any element. Errors are those of the ops.
pub(crate) trait AnyKvLayer<B: Backend>: Send + Sync {
    /// Its cache group.
    fn group(&self) -> usize;

    /// What it has of a block; `None` when that is larger than the address space.
    fn block_part(&self) -> Option<KvBlockPart>;

    /// [`kv_append`](BackendKvDtype::kv_append).
    fn append(
        &mut self,
        ctx: &mut B::Context,
        k: &Act<B>,
        v: &Act<B>,
        batch: &DeviceBatch<B>,
    ) -> Result<()>;

    /// [`split_qkv_norm_rope_into_paged_cache`](ferrum_kernels::BackendPagedKv::split_qkv_norm_rope_into_paged_cache).
    fn append_qkv(
        &mut self,
        ctx: &mut B::Context,
        input: PagedQkv<'_, B>,
        q: &mut Act<B>,
        batch: &DeviceBatch<B>,
    ) -> Result<()>;

    /// [`append_latent_paged`](ferrum_kernels::BackendPagedKv::append_latent_paged).
    fn append_latent(
        &mut self,
        ctx: &mut B::Context,
        latent: &Act<B>,
        batch: &DeviceBatch<B>,
    ) -> Result<()>;

    /// [`paged_attention`](ferrum_kernels::BackendPagedKv::paged_attention).
    fn attention(
        &self,
        ctx: &mut B::Context,
        q: &Act<B>,
        sinks: Option<&B::Buffer<f32>>,
        batch: &DeviceBatch<B>,
        out: &mut Act<B>,
        config: &AttnConfig,
    ) -> Result<()>;

    /// [`paged_mla_attention`](ferrum_kernels::BackendPagedKv::paged_mla_attention).
    fn mla_attention(
        &self,
        ctx: &mut B::Context,
        q: &Act<B>,
        batch: &DeviceBatch<B>,
        out: &mut Act<B>,
        heads_and_scale: (usize, f32),
    ) -> Result<()>;

    /// [`kv_read_blocks`](BackendKvDtype::kv_read_blocks).
    fn read_blocks(&self, ctx: &mut B::Context, blocks: &mut [(BlockId, &mut [u8])]) -> Result<()>;

    /// [`kv_write_blocks`](BackendKvDtype::kv_write_blocks).
    fn write_blocks(&mut self, ctx: &mut B::Context, blocks: &[(BlockId, &[u8])]) -> Result<()>;
}

impl<B: BackendKvDtype<K>, K: KvDtypeKind> AnyKvLayer<B> for KvLayer<B, K> {
    fn group(&self) -> usize {
        self.group
    }

    fn block_part(&self) -> Option<KvBlockPart> {
        KvBlockPart::of::<K>(&self.shape)
    }

    fn append(
        &mut self,
        ctx: &mut B::Context,
        k: &Act<B>,
        v: &Act<B>,
        batch: &DeviceBatch<B>,
    ) -> Result<()> {
        B::kv_append(ctx, self, k, v, batch)
    }

    fn append_qkv(
        &mut self,
        ctx: &mut B::Context,
        input: PagedQkv<'_, B>,
        q: &mut Act<B>,
        batch: &DeviceBatch<B>,
    ) -> Result<()> {
        B::split_qkv_norm_rope_into_paged_cache::<K>(ctx, input, q, self, batch)
    }

    fn append_latent(
        &mut self,
        ctx: &mut B::Context,
        latent: &Act<B>,
        batch: &DeviceBatch<B>,
    ) -> Result<()> {
        B::append_latent_paged::<K>(ctx, self, latent, batch)
    }

    fn attention(
        &self,
        ctx: &mut B::Context,
        q: &Act<B>,
        sinks: Option<&B::Buffer<f32>>,
        batch: &DeviceBatch<B>,
        out: &mut Act<B>,
        config: &AttnConfig,
    ) -> Result<()> {
        B::paged_attention::<K>(ctx, q, self, sinks, batch, out, config)
    }

    fn mla_attention(
        &self,
        ctx: &mut B::Context,
        q: &Act<B>,
        batch: &DeviceBatch<B>,
        out: &mut Act<B>,
        heads_and_scale: (usize, f32),
    ) -> Result<()> {
        B::paged_mla_attention::<K>(ctx, q, self, batch, out, heads_and_scale)
    }

    fn read_blocks(&self, ctx: &mut B::Context, blocks: &mut [(BlockId, &mut [u8])]) -> Result<()> {
        B::kv_read_blocks(ctx, self, blocks)
    }

    fn write_blocks(&mut self, ctx: &mut B::Context, blocks: &[(BlockId, &[u8])]) -> Result<()> {
        B::kv_write_blocks(ctx, self, blocks)
    }
}

/// The pools of a stage, whatever their element.
pub(crate) struct AnyKvCache<B: Backend> {
    /// Name of the element.
    pub(crate) dtype: &'static str,
    /// Of each layer that has one, in model order.
    pub(crate) layers: Vec<Box<dyn AnyKvLayer<B>>>,
}

/// Allocates pools: the cache group and the shape of each.
pub(crate) type AllocKvCache<B> = fn(&B, Vec<(usize, PagedKvShape)>) -> Result<AnyKvCache<B>>;

impl<B: Backend> AnyKvCache<B> {
    /// A [`KvCache`] of element `K`.
    pub(crate) fn alloc<K: KvDtypeKind>(
        device: &B,
        pools: Vec<(usize, PagedKvShape)>,
    ) -> Result<Self>
    where
        B: BackendKvDtype<K>,
    {
        let boxed = |layer| Box::new(layer) as Box<dyn AnyKvLayer<B>>;
        let layers = KvCache::<B, K>::alloc(device, pools)?.layers;
        Ok(Self {
            dtype: K::NAME,
            layers: layers.into_iter().map(boxed).collect(),
        })
    }
}
