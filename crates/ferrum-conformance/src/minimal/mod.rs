//! A backend that implements what the traits require and little else, so that the suite runs on the bodies which the
//! contract provides; a function that becomes required stops this file from compiling. It is what the other backends
//! of this workspace are not: its activations have 16 bits, nothing that is recorded runs before somebody waits for
//! it, graphs are captured and replayed, and what goes up to it is counted; its host memory is its own. So tests of what is built on backends use
//! it, too. It lives in host memory and hands each function to the reference.

mod queue;
mod sample;

use ferrum_kernels::reference::{KvCodec, Mixed, RefBuffer, RefKvScales, RefWeight, Reference};
use ferrum_kernels::{
    Activation, AttnConfig, Backend, BackendCollective, BackendGraph, BackendKvDtype,
    BackendPagedKv, BackendState, CausalConvShape, Conv1dShape, DeviceBatch, FlashShape, GemmShape,
    GraphKey, GraphRun, HeadLayout, HeadsShape, HostBuffer, HostTimer, KvLayer, NormShape,
    PagedKvShape, PendingRead, QkNorm, Rope, RowShape, UploadPiece, WeightPart, check,
};
use ferrum_types::{BlockId, Element, FloatElement, Result};
use half::bf16;
use queue::{Memory, Pinned, SharedQueue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What computes: activations of 16 bits, the residual stream and logits in f32.
type P = Mixed<bf16>;
type R = Reference<P>;

/// The device. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Minimal {
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    uploads: AtomicU64,
    bytes: AtomicU64,
}

/// What went from the host to a device so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uploads {
    /// Transfers.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Minimal {
    /// What was uploaded so far, on all contexts.
    pub fn uploads(&self) -> Uploads {
        Uploads {
            count: self.counters.uploads.load(Ordering::Relaxed),
            bytes: self.counters.bytes.load(Ordering::Relaxed),
        }
    }

    fn count_upload<T>(&self, src: &[T]) {
        let bytes = size_of_val(src) as u64;
        self.counters.uploads.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What was recorded for a [`Minimal`] device.
pub struct MinimalContext {
    device: Minimal,
    queue: SharedQueue,
}

/// Memory of a [`Minimal`] device.
pub type MinimalBuffer<T> = Memory<RefBuffer<T>>;

type Buffer<T> = MinimalBuffer<T>;
type Acts = Buffer<bf16>;
type Floats = Buffer<f32>;
type Ctx = MinimalContext;

/// Records `$call` on the reference with what the buffers hold by then: first those that are read, then those that
/// are written.
macro_rules! record {
    ($ctx:ident, [$($read:ident),*], [$($written:ident),*], |$r:ident| $call:expr) => {{
        $(let $read = $read.clone();)*
        $(let $written = $written.clone();)*
        $ctx.queue.record(move |$r| {
            $(let $read = $read.get();)*
            $(let mut $written = $written.get_mut();)*
            $call
        });
        Ok(())
    }};
}

impl Backend for Minimal {
    const NAME: &'static str = "minimal";

    type Act = bf16;
    type Residual = f32;
    type Logit = f32;
    type Buffer<T: Element> = Buffer<T>;
    type Weight = Arc<RefWeight>;
    type Context = MinimalContext;
    type Timer = HostTimer<Self>;

    fn open(ordinal: usize) -> Result<Self> {
        R::open(ordinal).map(|_| Self::default())
    }

    fn new_context(&self) -> Result<Ctx> {
        Ok(MinimalContext {
            device: self.clone(),
            queue: SharedQueue::new()?,
        })
    }

    fn device(ctx: &Ctx) -> &Self {
        &ctx.device
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Ok(Memory::new(R::new().alloc(len)?, len))
    }

    fn host_buffer<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        Ok(HostBuffer::of_device(
            Pinned::boxed(len * size_of::<T>()),
            len,
        ))
    }

    fn write<T: Element>(
        ctx: &mut Ctx,
        dst: &mut Buffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        check::range("write", "dst", dst, offset, src.len())?;
        ctx.device.count_upload(src);
        let src = src.to_vec();
        record!(ctx, [], [dst], |r| R::write(r, &mut *dst, offset, &src))
    }

    fn write_packed<'b, 'p>(
        ctx: &mut Ctx,
        src: &[i32],
        to: impl IntoIterator<Item = (&'b mut Buffer<i32>, &'p [UploadPiece])>,
    ) -> Result<()> {
        ctx.device.count_upload(src);
        let packed: Arc<[i32]> = src.into();
        for (dst, pieces) in to {
            for piece in pieces {
                let len = piece.of(src)?.len();
                check::range("write", "dst", dst, piece.to, len)?;
                let (dst, packed, piece) = (dst.clone(), Arc::clone(&packed), *piece);
                ctx.queue
                    .record(move |r| R::write(r, &mut dst.get_mut(), piece.to, piece.of(&packed)?));
            }
        }
        Ok(())
    }

    fn read<T: Element>(
        ctx: &mut Ctx,
        src: &Buffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()> {
        Self::begin_read(ctx, src, offset, out.len())?.finish(out)
    }

    fn begin_read<T: Element>(
        ctx: &mut Ctx,
        src: &Buffer<T>,
        offset: usize,
        len: usize,
    ) -> Result<PendingRead<T>> {
        check::range("read", "src", src, offset, len)?;
        Ok(ctx.queue.begin_read(src.clone(), offset, len))
    }

    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<Arc<RefWeight>> {
        R::new().from_weight_parts(parts, cols).map(Arc::new)
    }

    fn copy_slice<T: Element>(
        ctx: &mut Ctx,
        src: &Buffer<T>,
        src_offset: usize,
        dst: &mut Buffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        check::copy_slice(src, src_offset, dst, dst_offset, len)?;
        record!(ctx, [src], [dst], |r| R::copy_slice(
            r, &*src, src_offset, &mut *dst, dst_offset, len
        ))
    }

    fn gemm<T: FloatElement>(
        ctx: &mut Ctx,
        x: &Acts,
        weight: &Arc<RefWeight>,
        out: &mut Buffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        check::gemm("gemm", x, weight.shape(), out, shape)?;
        let weight = Arc::clone(weight);
        record!(ctx, [x], [out], |r| R::gemm(
            r, &*x, &weight, &mut *out, shape
        ))
    }

    fn embedding_lookup(
        ctx: &mut Ctx,
        table: &Arc<RefWeight>,
        ids: &Buffer<i32>,
        out: &mut Floats,
        shape: RowShape,
    ) -> Result<()> {
        check::embedding_lookup("embedding_lookup", table.shape(), ids, out, shape)?;
        let table = Arc::clone(table);
        record!(ctx, [ids], [out], |r| R::embedding_lookup(
            r, &table, &*ids, &mut *out, shape
        ))
    }

    fn gather_rows<T: Element>(
        ctx: &mut Ctx,
        src: &Buffer<T>,
        rows: &Buffer<i32>,
        out: &mut Buffer<T>,
        shape: RowShape,
    ) -> Result<()> {
        check::gather_rows(rows, out, shape)?;
        record!(ctx, [src, rows], [out], |r| R::gather_rows(
            r, &*src, &*rows, &mut *out, shape
        ))
    }

    fn argmax_rows(
        ctx: &mut Ctx,
        x: &Floats,
        out: &mut Buffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        check::argmax_rows(x, out, shape)?;
        record!(ctx, [x], [out], |r| R::argmax_rows(
            r, &*x, &mut *out, shape
        ))
    }

    fn rms_norm<T: FloatElement>(
        ctx: &mut Ctx,
        x: &Buffer<T>,
        weight: &Floats,
        out: &mut Acts,
        shape: NormShape,
    ) -> Result<()> {
        check::rms_norm(x, weight, out, shape)?;
        record!(ctx, [x, weight], [out], |r| R::rms_norm(
            r, &*x, &*weight, &mut *out, shape
        ))
    }

    fn layer_norm<T: FloatElement>(
        ctx: &mut Ctx,
        x: &Buffer<T>,
        weight: &Floats,
        bias: Option<&Floats>,
        out: &mut Acts,
        shape: NormShape,
    ) -> Result<()> {
        check::layer_norm(x, weight, bias, out, shape)?;
        let bias = bias.cloned();
        record!(ctx, [x, weight], [out], |r| {
            let bias = bias.as_ref().map(Memory::get);
            R::layer_norm(r, &*x, &*weight, bias.as_deref(), &mut *out, shape)
        })
    }

    fn activate<T: FloatElement>(
        ctx: &mut Ctx,
        activation: Activation,
        x: &Buffer<T>,
        y: Option<&Buffer<T>>,
        out: &mut Buffer<T>,
        len: usize,
    ) -> Result<()> {
        check::activate("activate", x, y, out, len)?;
        let y = y.cloned();
        record!(ctx, [x], [out], |r| {
            let y = y.as_ref().map(Memory::get);
            R::activate(r, activation, &*x, y.as_deref(), &mut *out, len)
        })
    }

    fn scaled_add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Ctx,
        x: &mut Buffer<T>,
        y: &Buffer<U>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        check::zip_inplace("scaled_add_inplace", x, y, len)?;
        record!(ctx, [y], [x], |r| R::scaled_add_inplace(
            r, &mut *x, &*y, scale, len
        ))
    }

    fn qk_norm_rope(
        ctx: &mut Ctx,
        x: &mut Acts,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        check::qk_norm_rope::<Self>(x, norm, rope, shape)?;
        let norm = norm.map(|norm| (norm.weight.clone(), norm.eps));
        let rope = rope.map(|rope| {
            let buffers = (rope.cos.clone(), rope.sin.clone(), rope.rows.clone());
            (buffers, rope.rot_dim, rope.style)
        });
        record!(ctx, [], [x], |r| {
            let norm = norm.as_ref().map(|(weight, eps)| (weight.get(), *eps));
            let norm = norm.as_ref().map(|(weight, eps)| QkNorm {
                weight: &**weight,
                eps: *eps,
            });
            let rope = rope.as_ref().map(|((cos, sin, rows), rot_dim, style)| {
                ((cos.get(), sin.get(), rows.get()), *rot_dim, *style)
            });
            let rope = rope
                .as_ref()
                .map(|((cos, sin, rows), rot_dim, style)| Rope {
                    cos: &**cos,
                    sin: &**sin,
                    rows: &**rows,
                    rot_dim: *rot_dim,
                    style: *style,
                });
            R::qk_norm_rope(r, &mut *x, layout, norm, rope, shape)
        })
    }

    fn flash_attention(
        ctx: &mut Ctx,
        q: &Acts,
        (k, v): (&Acts, &Acts),
        sinks: Option<&Floats>,
        out: &mut Acts,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()> {
        check::flash_attention(q, (k, v), sinks, out, shape, config)?;
        let (sinks, config) = (sinks.cloned(), *config);
        record!(ctx, [q, k, v], [out], |r| {
            let sinks = sinks.as_ref().map(Memory::get);
            let sinks = sinks.as_deref();
            R::flash_attention(r, &*q, (&*k, &*v), sinks, &mut *out, shape, &config)
        })
    }

    fn conv1d(
        ctx: &mut Ctx,
        x: &Acts,
        weight: &Floats,
        bias: Option<&Floats>,
        out: &mut Acts,
        shape: Conv1dShape,
    ) -> Result<()> {
        check::conv1d(x, weight, bias, out, shape)?;
        let bias = bias.cloned();
        record!(ctx, [x, weight], [out], |r| {
            let bias = bias.as_ref().map(Memory::get);
            R::conv1d(r, &*x, &*weight, bias.as_deref(), &mut *out, shape)
        })
    }
}

impl BackendState for Minimal {
    fn records_states(&self) -> bool {
        true
    }

    fn causal_conv1d(
        ctx: &mut Ctx,
        x: &Acts,
        (weight, bias): (&Floats, Option<&Floats>),
        states: &mut Floats,
        batch: &DeviceBatch<Self>,
        out: &mut Acts,
        shape: CausalConvShape,
    ) -> Result<()> {
        check::causal_conv1d::<Self>(x, (weight, bias), states, batch, out, shape)?;
        let (bias, batch) = (bias.cloned(), later(batch));
        record!(ctx, [x, weight], [states, out], |r| {
            let bias = bias.as_ref().map(Memory::get);
            let weights = (&*weight, bias.as_deref());
            R::causal_conv1d(r, &*x, weights, &mut *states, &batch(), &mut *out, shape)
        })
    }
}

impl BackendPagedKv for Minimal {}
impl BackendCollective for Minimal {}

impl BackendGraph for Minimal {
    fn captures(&self) -> bool {
        true
    }

    fn run_graph(
        ctx: &mut Ctx,
        key: GraphKey,
        body: &mut dyn FnMut(&mut Ctx) -> Result<()>,
    ) -> Result<GraphRun> {
        let queue = ctx.queue.clone();
        queue.run_graph(key, &mut || body(ctx))
    }

    fn reset_graph(ctx: &mut Ctx, key: GraphKey) -> Result<()> {
        ctx.queue.forget(Some(key));
        Ok(())
    }

    fn reset_all_graphs(ctx: &mut Ctx) -> Result<()> {
        ctx.queue.forget(None);
        Ok(())
    }
}

/// A batch whose buffers are read when its work runs.
fn later(batch: &DeviceBatch<Minimal>) -> impl Fn() -> DeviceBatch<R> + use<> {
    let shape = batch.shape;
    let buffers = [
        &batch.tokens,
        &batch.rope_rows,
        &batch.query_starts,
        &batch.kv_lens,
        &batch.state_slots,
    ]
    .map(Clone::clone);
    let tables = batch.block_tables.clone();
    move || {
        let [tokens, rope_rows, query_starts, kv_lens, state_slots] =
            buffers.each_ref().map(|buffer| buffer.get().clone());
        DeviceBatch {
            shape,
            tokens,
            rope_rows,
            query_starts,
            kv_lens,
            state_slots,
            block_tables: tables.iter().map(|table| table.get().clone()).collect(),
        }
    }
}

/// The parts of a pool.
struct Pool<K: KvCodec> {
    k: Buffer<K::Stored>,
    v: Buffer<K::Stored>,
    scales: Memory<RefKvScales>,
    shape: PagedKvShape,
    group: usize,
}

impl<K: KvCodec> Pool<K> {
    fn of(kv: &KvLayer<Minimal, K>) -> Self {
        Self {
            k: kv.k.clone(),
            v: kv.v.clone(),
            scales: kv.scales.clone(),
            shape: kv.shape,
            group: kv.group,
        }
    }

    /// Runs `f` on the pool as the reference's.
    fn with<T>(&self, f: impl FnOnce(&mut KvLayer<R, K>) -> Result<T>) -> Result<T> {
        let nothing = || R::new().alloc::<K::Stored>(0);
        let mut pool = KvLayer {
            k: std::mem::replace(&mut *self.k.get_mut(), nothing()?),
            v: std::mem::replace(&mut *self.v.get_mut(), nothing()?),
            scales: std::mem::take(&mut *self.scales.get_mut()),
            shape: self.shape,
            group: self.group,
        };
        let done = f(&mut pool);
        *self.k.get_mut() = pool.k;
        *self.v.get_mut() = pool.v;
        *self.scales.get_mut() = pool.scales;
        done
    }
}

impl<K: KvCodec> BackendKvDtype<K> for Minimal {
    type KvBuffer = Buffer<K::Stored>;
    type KvScales = Memory<RefKvScales>;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        let pool: KvLayer<R, K> = R::new().alloc_kv_layer(shape)?;
        let lens = check::kv_shape("alloc_kv_layer", &shape)?;
        Ok(KvLayer {
            k: Memory::new(pool.k, lens.keys),
            v: Memory::new(pool.v, lens.values),
            scales: Memory::new(pool.scales, 0),
            shape,
            group: pool.group,
        })
    }

    fn kv_append(
        ctx: &mut Ctx,
        kv: &mut KvLayer<Self, K>,
        k: &Acts,
        v: &Acts,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        check::kv_append::<Self>((kv.group, &kv.shape), k, v, batch)?;
        let (pool, batch) = (Pool::of(kv), later(batch));
        record!(ctx, [k, v], [], |r| pool.with(|kv| R::kv_append(
            r,
            kv,
            &*k,
            &*v,
            &batch()
        )))
    }

    fn kv_attention(
        ctx: &mut Ctx,
        q: &Acts,
        kv: &KvLayer<Self, K>,
        sinks: Option<&Floats>,
        batch: &DeviceBatch<Self>,
        out: &mut Acts,
        config: &AttnConfig,
    ) -> Result<()> {
        check::kv_attention::<Self>((kv.group, &kv.shape), q, sinks, batch, out, config)?;
        let (pool, batch) = (Pool::of(kv), later(batch));
        let (sinks, config) = (sinks.cloned(), *config);
        record!(ctx, [q], [out], |r| {
            let sinks = sinks.as_ref().map(Memory::get);
            let (sinks, batch) = (sinks.as_deref(), batch());
            pool.with(|kv| R::kv_attention(r, &*q, kv, sinks, &batch, &mut *out, &config))
        })
    }

    fn kv_copy_blocks(
        ctx: &mut Ctx,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        check::kv_copy_blocks(kv.shape.blocks, pairs)?;
        let (pool, pairs) = (Pool::of(kv), pairs.to_vec());
        record!(ctx, [], [], |r| pool
            .with(|kv| R::kv_copy_blocks(r, kv, &pairs)))
    }

    fn kv_read_blocks(
        ctx: &mut Ctx,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        ctx.queue.run()?;
        let mut ctx = R::new().new_context()?;
        Pool::of(kv).with(|kv| R::kv_read_blocks(&mut ctx, kv, blocks))
    }

    fn kv_write_blocks(
        ctx: &mut Ctx,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        ctx.queue.run()?;
        let mut ctx = R::new().new_context()?;
        Pool::of(kv).with(|kv| R::kv_write_blocks(&mut ctx, kv, blocks))
    }
}
