//! A backend that implements what the traits require and nothing else, so that the suite runs on the
//! bodies which the contract provides. It lives in host memory and hands each required function to the
//! reference backend; a function that becomes required stops this file from compiling.

use crate::report::Report;
use crate::{Filter, run_collective, run_core, run_graph, run_paged, run_sample, run_timer};
use ferrum_kernels::reference::{
    KvCodec, RefBuffer, RefContext, RefKvScales, RefWeight, ReferenceBackend as R,
};
use ferrum_kernels::{
    Activation, AttnConfig, Backend, BackendCollective, BackendGraph, BackendKvDtype,
    BackendPagedKv, BackendSample, Conv1dShape, DeviceBatch, FlashShape, GemmShape, HeadLayout,
    HeadsShape, HostTimer, KvF32, KvInt8, KvLayer, LlmBackend, NormShape, PagedKvShape, QkNorm,
    Rope, RowShape, WeightPart,
};
use ferrum_types::{BlockId, Element, Result};

/// The suite on [`Minimal`].
pub(super) fn run(filter: &Filter) -> Report {
    fn whole(_: &impl LlmBackend) {}
    whole(&Minimal);
    let mut report = Report::new(Minimal::NAME);
    run_core(&Minimal, filter, &mut report);
    run_paged::<_, KvF32>(&Minimal, filter, &mut report);
    run_paged::<_, KvInt8>(&Minimal, filter, &mut report);
    run_graph(&Minimal, filter, &mut report);
    run_sample(&Minimal, filter, &mut report);
    run_collective(&Minimal, filter, &mut report);
    run_timer(&Minimal, filter, &mut report);
    report
}

#[derive(Clone, Debug)]
struct Minimal;

struct MinimalContext {
    device: Minimal,
    reference: RefContext,
}

type Buf = RefBuffer<f32>;
type Ctx = MinimalContext;

impl Backend for Minimal {
    const NAME: &'static str = "minimal";

    type Act = f32;
    type Buffer<T: Element> = RefBuffer<T>;
    type Weight = RefWeight;
    type Context = MinimalContext;
    type Timer = HostTimer<Self>;

    fn open(ordinal: usize) -> Result<Self> {
        R::open(ordinal).map(|_| Minimal)
    }

    fn new_context(&self) -> Result<Ctx> {
        Ok(MinimalContext {
            device: Minimal,
            reference: R.new_context()?,
        })
    }

    fn device(ctx: &Ctx) -> &Self {
        &ctx.device
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<RefBuffer<T>> {
        R.alloc(len)
    }

    fn write<T: Element>(
        ctx: &mut Ctx,
        dst: &mut RefBuffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        R::write(&mut ctx.reference, dst, offset, src)
    }

    fn read<T: Element>(
        ctx: &mut Ctx,
        src: &RefBuffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()> {
        R::read(&mut ctx.reference, src, offset, out)
    }

    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<RefWeight> {
        R.from_weight_parts(parts, cols)
    }

    fn copy_slice<T: Element>(
        ctx: &mut Ctx,
        src: &RefBuffer<T>,
        src_offset: usize,
        dst: &mut RefBuffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        R::copy_slice(&mut ctx.reference, src, src_offset, dst, dst_offset, len)
    }

    fn gemm(
        ctx: &mut Ctx,
        x: &Buf,
        weight: &RefWeight,
        out: &mut Buf,
        shape: GemmShape,
    ) -> Result<()> {
        R::gemm(&mut ctx.reference, x, weight, out, shape)
    }

    fn embedding_lookup(
        ctx: &mut Ctx,
        table: &RefWeight,
        ids: &RefBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        R::embedding_lookup(&mut ctx.reference, table, ids, out, shape)
    }

    fn gather_rows(
        ctx: &mut Ctx,
        src: &Buf,
        rows: &RefBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        R::gather_rows(&mut ctx.reference, src, rows, out, shape)
    }

    fn argmax_rows(
        ctx: &mut Ctx,
        x: &Buf,
        out: &mut RefBuffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        R::argmax_rows(&mut ctx.reference, x, out, shape)
    }

    fn rms_norm(
        ctx: &mut Ctx,
        x: &Buf,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        R::rms_norm(&mut ctx.reference, x, weight, out, shape)
    }

    fn layer_norm(
        ctx: &mut Ctx,
        x: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        R::layer_norm(&mut ctx.reference, x, weight, bias, out, shape)
    }

    fn activate(
        ctx: &mut Ctx,
        activation: Activation,
        x: &Buf,
        y: Option<&Buf>,
        out: &mut Buf,
        len: usize,
    ) -> Result<()> {
        R::activate(&mut ctx.reference, activation, x, y, out, len)
    }

    fn scaled_add_inplace(
        ctx: &mut Ctx,
        x: &mut Buf,
        y: &Buf,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        R::scaled_add_inplace(&mut ctx.reference, x, y, scale, len)
    }

    fn qk_norm_rope(
        ctx: &mut Ctx,
        x: &mut Buf,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        let norm = norm.map(|norm| QkNorm {
            weight: norm.weight,
            eps: norm.eps,
        });
        let rope = rope.map(|rope| Rope {
            cos: rope.cos,
            sin: rope.sin,
            rows: rope.rows,
            rot_dim: rope.rot_dim,
            style: rope.style,
        });
        R::qk_norm_rope(&mut ctx.reference, x, layout, norm, rope, shape)
    }

    fn flash_attention(
        ctx: &mut Ctx,
        q: &Buf,
        kv: (&Buf, &Buf),
        sinks: Option<&Buf>,
        out: &mut Buf,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()> {
        R::flash_attention(&mut ctx.reference, q, kv, sinks, out, shape, config)
    }

    fn conv1d(
        ctx: &mut Ctx,
        x: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: Conv1dShape,
    ) -> Result<()> {
        R::conv1d(&mut ctx.reference, x, weight, bias, out, shape)
    }
}

impl BackendPagedKv for Minimal {}
impl BackendGraph for Minimal {}
impl BackendSample for Minimal {}
impl BackendCollective for Minimal {}

/// The reference's copy of a batch: its buffers are the same, its type is not.
fn of_reference(batch: &DeviceBatch<Minimal>) -> DeviceBatch<R> {
    DeviceBatch {
        shape: batch.shape,
        tokens: batch.tokens.clone(),
        rope_rows: batch.rope_rows.clone(),
        token_seqs: batch.token_seqs.clone(),
        query_starts: batch.query_starts.clone(),
        kv_lens: batch.kv_lens.clone(),
        block_tables: batch.block_tables.clone(),
    }
}

/// Runs `f` on the pool as the reference's.
fn on_pool<K: KvCodec>(
    kv: &mut KvLayer<Minimal, K>,
    f: impl FnOnce(&mut KvLayer<R, K>) -> Result<()>,
) -> Result<()> {
    let nothing = || R.alloc::<K::Stored>(0);
    let mut pool = KvLayer {
        k: std::mem::replace(&mut kv.k, nothing()?),
        v: std::mem::replace(&mut kv.v, nothing()?),
        scales: std::mem::take(&mut kv.scales),
        shape: kv.shape,
        group: kv.group,
    };
    let done = f(&mut pool);
    (kv.k, kv.v, kv.scales) = (pool.k, pool.v, pool.scales);
    done
}

/// A copy of the pool as the reference's.
fn copied<K: KvCodec>(kv: &KvLayer<Minimal, K>) -> KvLayer<R, K> {
    KvLayer {
        k: kv.k.clone(),
        v: kv.v.clone(),
        scales: kv.scales.clone(),
        shape: kv.shape,
        group: kv.group,
    }
}

impl<K: KvCodec> BackendKvDtype<K> for Minimal {
    type KvBuffer = RefBuffer<K::Stored>;
    type KvScales = RefKvScales;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        let pool: KvLayer<R, K> = R.alloc_kv_layer(shape)?;
        Ok(KvLayer {
            k: pool.k,
            v: pool.v,
            scales: pool.scales,
            shape,
            group: pool.group,
        })
    }

    fn kv_append(
        ctx: &mut Ctx,
        kv: &mut KvLayer<Self, K>,
        k: &Buf,
        v: &Buf,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let batch = of_reference(batch);
        on_pool(kv, |kv| R::kv_append(&mut ctx.reference, kv, k, v, &batch))
    }

    fn kv_attention(
        ctx: &mut Ctx,
        q: &Buf,
        kv: &KvLayer<Self, K>,
        sinks: Option<&Buf>,
        batch: &DeviceBatch<Self>,
        out: &mut Buf,
        config: &AttnConfig,
    ) -> Result<()> {
        let pool = copied(kv);
        let batch = of_reference(batch);
        R::kv_attention(&mut ctx.reference, q, &pool, sinks, &batch, out, config)
    }

    fn kv_copy_blocks(
        ctx: &mut Ctx,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        on_pool(kv, |kv| R::kv_copy_blocks(&mut ctx.reference, kv, pairs))
    }

    fn kv_read_blocks(
        ctx: &mut Ctx,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        let pool = copied(kv);
        R::kv_read_blocks(&mut ctx.reference, &pool, blocks)
    }

    fn kv_write_blocks(
        ctx: &mut Ctx,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        on_pool(kv, |kv| R::kv_write_blocks(&mut ctx.reference, kv, blocks))
    }
}
