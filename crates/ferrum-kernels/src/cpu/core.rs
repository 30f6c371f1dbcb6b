//! The device, its memory, and the table of ops: each is a function of the file named after it.

use super::chooser::Chooser;
use super::{attention, conv, elementwise, gemm, heads, norm};
use crate::backend::*;
use ferrum_simd::exec::{Exec, Scratch};
use ferrum_simd::gemm::CpuWeight;
use ferrum_simd::isa::{Isa, Level};
use ferrum_simd::memory::{CpuBuffer, SharedMut, pages};
use ferrum_simd::packed_store::{self, PackedKey, PackedStore};
use ferrum_simd::threads::{Pool, topology};
use ferrum_types::{Element, Error, FloatElement, Result};
use std::sync::{Arc, Mutex};

/// How to open a [`CpuBackend`]; the default is what the machine has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute, the caller's included; `None`: one for each physical core that the
    /// process may use.
    pub threads: Option<usize>,
    /// Instruction-set level; `None`: the best that this CPU has, and for encoders what [`Isa::for_encoders`] makes of it.
    pub isa: Option<Isa>,
}

/// The host's processor: a handle to its own pool of threads and the level that was chosen.
///
/// Contexts on several threads may use one device at the same time; while one has the pool, the others
/// compute on their own thread.
#[derive(Clone)]
pub struct CpuBackend {
    exec: Arc<Exec>,
    /// Whether the level was asked for.
    level_asked: bool,
}

/// Runs each op when it is recorded, and keeps the memory that ops need for a moment.
pub struct CpuContext {
    device: CpuBackend,
    scratch: Scratch,
    /// What each thread chooses tokens with.
    choosers: Vec<Mutex<Chooser>>,
    group: Option<GroupHandle>,
}

/// More than any machine has; a larger number is a mistake.
const MAX_THREADS: usize = 1024;
/// Elements that one thread copies before another could help.
const COPIED: usize = 16 << 10;

impl CpuBackend {
    /// Opens the CPU with chosen threads or level.
    ///
    /// # Errors
    /// [`NoDevice`](Error::NoDevice) when the CPU lacks the level or the system gives no threads;
    /// [`InvalidArgument`](Error::InvalidArgument) for a thread number out of range.
    pub fn with_config(config: CpuConfig) -> Result<Self> {
        let level = Level::new(config.isa.unwrap_or_else(Isa::best))?;
        let device = Self::with_level(level, config.threads.unwrap_or_else(topology::cores))?;
        Ok(Self {
            level_asked: config.isa.is_some(),
            ..device
        })
    }

    pub(super) fn with_level(level: Level, threads: usize) -> Result<Self> {
        if !(1..=MAX_THREADS).contains(&threads) {
            let reason = format!("{threads} threads, expected 1 to {MAX_THREADS}");
            return Err(Error::invalid("open", reason));
        }
        let pool = Pool::new(threads).map_err(|error| Error::NoDevice {
            backend: Self::NAME,
            reason: format!("cannot start {threads} threads: {error}"),
            hint: "ask for fewer threads".into(),
        })?;
        Ok(Self {
            exec: Arc::new(Exec {
                pool: Arc::new(pool),
                level,
                store: None,
            }),
            level_asked: true,
        })
    }

    /// This device, with matrices that are loaded on the handle restored from `store` where it has them, and
    /// given to it where it has not.
    #[must_use]
    pub fn with_packed_store(&self, store: Arc<dyn PackedStore>) -> Self {
        self.with_exec(self.exec.level, Some(store))
    }

    /// This device, with matrices packed and not kept.
    #[must_use]
    pub fn without_packed_store(&self) -> Self {
        self.with_exec(self.exec.level, None)
    }

    fn with_exec(&self, level: Level, store: Option<Arc<dyn PackedStore>>) -> Self {
        let pool = Arc::clone(&self.exec.pool);
        Self {
            exec: Arc::new(Exec { pool, level, store }),
            level_asked: self.level_asked,
        }
    }

    /// What packed weights depend on besides their source: the version of the layout, and what the level
    /// changes of it. Weights that were packed under one name can be used under the same name only.
    pub fn packed_layout(&self) -> String {
        packed_store::layout(self.exec.level)
    }

    /// Has the pages of files that this thread reads or writes from now on come from all memory nodes of the
    /// process in turns, as weights do that are packed.
    pub fn interleave_thread() {
        pages::interleave_thread();
    }

    /// Threads that compute, the caller's included.
    pub fn threads(&self) -> usize {
        self.exec.pool.threads()
    }

    /// The instruction-set level.
    pub fn isa(&self) -> Isa {
        self.exec.level.isa()
    }

    pub(crate) fn exec(&self) -> &Exec {
        &self.exec
    }
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuBackend")
            .field("isa", &self.isa())
            .field("threads", &self.threads())
            .finish()
    }
}

impl CpuContext {
    pub(crate) fn exec(&self) -> &Exec {
        &self.device.exec
    }

    /// What ops run with, and their memory.
    pub(crate) fn parts(&mut self) -> (&Exec, &mut Scratch) {
        (&self.device.exec, &mut self.scratch)
    }

    /// What ops run with, and a chooser of tokens for each thread.
    pub(super) fn choosers(&mut self) -> (&Exec, &[Mutex<Chooser>]) {
        let exec = &self.device.exec;
        let threads = exec.pool.threads();
        if self.choosers.len() < threads {
            self.choosers.resize_with(threads, Mutex::default);
        }
        (exec, &self.choosers)
    }
}

fn info(isa: Isa, threads: usize) -> DeviceInfo {
    let plural = if threads == 1 { "" } else { "s" };
    DeviceInfo {
        backend: CpuBackend::NAME,
        ordinal: 0,
        name: topology::name(),
        detail: format!("{}, {threads} thread{plural}", isa.name()),
        software: false,
        memory: topology::memory(),
    }
}

type Buf = CpuBuffer<f32>;

impl Backend for CpuBackend {
    const NAME: &'static str = "cpu";

    type Act = f32;
    type Residual = f32;
    type Logit = f32;
    type Buffer<T: Element> = CpuBuffer<T>;
    type Weight = CpuWeight;
    type Context = CpuContext;
    /// An op has run when its call returns, so the host's clock measures the device.
    type Timer = HostTimer<Self>;

    fn devices() -> Vec<DeviceInfo> {
        vec![info(Isa::best(), topology::cores())]
    }

    fn open(ordinal: usize) -> Result<Self> {
        if ordinal == 0 {
            return Self::with_config(CpuConfig::default());
        }
        Err(Error::NoDevice {
            backend: Self::NAME,
            reason: format!("there is no device {ordinal}"),
            hint: "the only CPU device is number 0".into(),
        })
    }

    fn info(&self) -> DeviceInfo {
        info(self.isa(), self.threads())
    }

    fn for_encoders(&self) -> Option<Self> {
        let isa = self.isa();
        if self.level_asked || isa.for_encoders() == isa {
            return None;
        }
        let level = Level::new(isa.for_encoders()).ok()?;
        // A store has what was packed for one level.
        Some(self.with_exec(level, None))
    }

    fn new_context(&self) -> Result<CpuContext> {
        Ok(CpuContext {
            device: self.clone(),
            scratch: Scratch::new()?,
            choosers: Vec::new(),
            group: None,
        })
    }

    fn device(ctx: &CpuContext) -> &Self {
        &ctx.device
    }

    fn sync(_: &mut CpuContext) -> Result<()> {
        Ok(())
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<CpuBuffer<T>> {
        CpuBuffer::zeroed(len)
    }

    fn from_slice<T: Element>(&self, data: &[T]) -> Result<CpuBuffer<T>> {
        CpuBuffer::copy_of(data)
    }

    fn write<T: Element>(
        _: &mut CpuContext,
        dst: &mut CpuBuffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        let to = check::range("write", "dst", dst, offset, src.len())?;
        dst.as_mut_slice()[to].copy_from_slice(src);
        Ok(())
    }

    fn read<T: Element>(
        ctx: &mut CpuContext,
        src: &CpuBuffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()> {
        let from = check::range("read", "src", src, offset, out.len())?;
        let src = &src.as_slice()[from];
        let out = SharedMut::new(out);
        // Logits of many sequences are more than one core should copy alone.
        let exec = ctx.exec();
        exec.parallel_for(src.len().div_ceil(COPIED), COPIED / 8, |pieces, _| {
            let start = pieces.start * COPIED;
            let src = &src[start..src.len().min(pieces.end * COPIED)];
            // SAFETY: each piece belongs to one task.
            unsafe { out.part(start, src.len()) }.copy_from_slice(src);
        });
        Ok(())
    }

    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<CpuWeight> {
        let key = |key: &mut PackedKey| key.dense(parts, cols);
        let pack = || CpuWeight::pack(&self.exec, parts, cols);
        self.exec.restore_or("dense", key, pack)
    }

    fn from_table_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<CpuWeight> {
        let key = |key: &mut PackedKey| key.dense(parts, cols);
        let pack = || CpuWeight::pack_table(&self.exec, parts, cols);
        self.exec.restore_or("table", key, pack)
    }

    fn split_sums(weight: &mut CpuWeight, split: SumSplit) {
        weight.split_sums(split);
    }

    fn copy_slice<T: Element>(
        _: &mut CpuContext,
        src: &CpuBuffer<T>,
        src_offset: usize,
        dst: &mut CpuBuffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        let [from, to] = check::copy_slice(src, src_offset, dst, dst_offset, len)?;
        dst.as_mut_slice()[to].copy_from_slice(&src.as_slice()[from]);
        Ok(())
    }

    fn copy_columns<T: Element>(
        ctx: &mut CpuContext,
        src: &CpuBuffer<T>,
        dst: &mut CpuBuffer<T>,
        shape: CopyColumnsShape,
    ) -> Result<()> {
        if !check::copy_columns(src, dst, shape)? {
            return Ok(());
        }
        let (src, dst) = (src.as_slice(), SharedMut::new(dst.as_mut_slice()));
        // Moving an element costs less than an operation of arithmetic.
        ctx.exec()
            .parallel_for(shape.rows, shape.len / 4, |rows, _| {
                for row in rows {
                    let from = row * shape.src_width + shape.src_first;
                    let to = row * shape.dst_width + shape.dst_first;
                    // SAFETY: each row belongs to one task, and the check holds its columns inside of it.
                    let dst = unsafe { dst.part(to, shape.len) };
                    dst.copy_from_slice(&src[from..][..shape.len]);
                }
            });
        Ok(())
    }

    fn gemm<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &Buf,
        weight: &Self::Weight,
        out: &mut CpuBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        let out = check::only_mut::<Self, T, f32>("gemm", out)?;
        let (exec, scratch) = ctx.parts();
        gemm::gemm(exec, scratch, x, weight, out, shape)
    }

    fn embedding_lookup(
        ctx: &mut CpuContext,
        table: &Self::Weight,
        ids: &CpuBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup(ctx.exec(), table, ids, out, shape)
    }

    fn gather_rows<T: Element>(
        ctx: &mut CpuContext,
        src: &CpuBuffer<T>,
        rows: &CpuBuffer<i32>,
        out: &mut CpuBuffer<T>,
        shape: RowShape,
    ) -> Result<()> {
        let src = check::only::<Self, T, f32>("gather_rows", src)?;
        let out = check::only_mut::<Self, T, f32>("gather_rows", out)?;
        gemm::gather_rows(ctx.exec(), src, rows, out, shape)
    }

    fn argmax_rows(
        ctx: &mut CpuContext,
        x: &Buf,
        out: &mut CpuBuffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::argmax_rows(ctx.exec(), x, out, shape)
    }

    fn rms_norm<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &CpuBuffer<T>,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        let x = check::only::<Self, T, f32>("rms_norm", x)?;
        norm::rms_norm(ctx.exec(), x, weight, out, shape)
    }

    fn fused_add_rms_norm(
        ctx: &mut CpuContext,
        residual: &mut Buf,
        x: &Buf,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        norm::fused_add_rms_norm(ctx.exec(), residual, x, weight, out, shape)
    }

    fn layer_norm<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &CpuBuffer<T>,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        let x = check::only::<Self, T, f32>("layer_norm", x)?;
        norm::layer_norm(ctx.exec(), x, weight, bias, out, shape)
    }

    fn activate<T: FloatElement>(
        ctx: &mut CpuContext,
        activation: Activation,
        x: &CpuBuffer<T>,
        y: Option<&CpuBuffer<T>>,
        out: &mut CpuBuffer<T>,
        len: usize,
    ) -> Result<()> {
        let x = check::only::<Self, T, f32>("activate", x)?;
        let y = y
            .map(|y| check::only::<Self, T, f32>("activate", y))
            .transpose()?;
        let out = check::only_mut::<Self, T, f32>("activate", out)?;
        elementwise::activate(ctx.exec(), activation, (x, y), out, len)
    }

    fn fused_silu_mul_split(
        ctx: &mut CpuContext,
        gate_up: &Buf,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::silu_gated(ctx.exec(), gate_up, out, shape)
    }

    fn fused_gelu_mul_split(
        ctx: &mut CpuContext,
        gate_up: &Buf,
        out: &mut Buf,
        kind: GeluKind,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::gelu_gated(ctx.exec(), gate_up, out, kind, shape)
    }

    fn add_bias<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &mut CpuBuffer<T>,
        bias: &Buf,
        shape: RowShape,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("add_bias", x)?;
        elementwise::add_bias(ctx.exec(), x, bias, shape)
    }

    fn add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut CpuContext,
        x: &mut CpuBuffer<T>,
        y: &CpuBuffer<U>,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("add_inplace", x)?;
        let y = check::only::<Self, U, f32>("add_inplace", y)?;
        elementwise::add_inplace(ctx.exec(), x, y, len)
    }

    fn scaled_add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut CpuContext,
        x: &mut CpuBuffer<T>,
        y: &CpuBuffer<U>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("scaled_add_inplace", x)?;
        let y = check::only::<Self, U, f32>("scaled_add_inplace", y)?;
        elementwise::scaled_add_inplace(ctx.exec(), x, y, scale, len)
    }

    fn scale_inplace<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &mut CpuBuffer<T>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("scale_inplace", x)?;
        elementwise::scale_inplace(ctx.exec(), x, scale, len)
    }

    fn softcap<T: FloatElement>(
        ctx: &mut CpuContext,
        x: &mut CpuBuffer<T>,
        cap: f32,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("softcap", x)?;
        elementwise::softcap(ctx.exec(), x, cap, len)
    }

    fn split_qkv(
        ctx: &mut CpuContext,
        qkv: &Buf,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        shape: QkvShape,
    ) -> Result<()> {
        let transform = QkvTransform::<Self>::none();
        let layout = HeadLayout::TokenMajor;
        let (exec, scratch) = ctx.parts();
        heads::split(
            exec,
            scratch,
            "split_qkv",
            (qkv, transform),
            [q, k, v],
            layout,
            shape,
        )
    }

    fn qk_norm_rope(
        ctx: &mut CpuContext,
        x: &mut Buf,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::qk_norm_rope(ctx.exec(), x, layout, (norm, rope), shape)
    }

    fn split_qkv_norm_rope(
        ctx: &mut CpuContext,
        qkv: &Buf,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        let (op, layout) = ("split_qkv_norm_rope", HeadLayout::HeadMajor);
        let (exec, scratch) = ctx.parts();
        heads::split(
            exec,
            scratch,
            op,
            (qkv, transform),
            [q, k, v],
            layout,
            shape,
        )
    }

    fn split_qkv_norm_rope_into_cache(
        ctx: &mut CpuContext,
        qkv: &Buf,
        q: &mut Buf,
        caches: (&mut Buf, &mut Buf),
        span: CacheSpan,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        let (exec, scratch) = ctx.parts();
        heads::split_into_cache(exec, scratch, (qkv, transform), q, caches, span, shape)
    }

    fn kv_cache_append_head_major(
        ctx: &mut CpuContext,
        k: &Buf,
        v: &Buf,
        caches: (&mut Buf, &mut Buf),
        span: CacheSpan,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::append_head_major(ctx.exec(), (k, v), caches, span, shape)
    }

    fn transpose_head_to_token(
        ctx: &mut CpuContext,
        src: &Buf,
        dst: &mut Buf,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::transpose(
            ctx.exec(),
            "transpose_head_to_token",
            src,
            dst,
            HeadLayout::TokenMajor,
            shape,
        )
    }

    fn transpose_token_to_head(
        ctx: &mut CpuContext,
        src: &Buf,
        dst: &mut Buf,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::transpose(
            ctx.exec(),
            "transpose_token_to_head",
            src,
            dst,
            HeadLayout::HeadMajor,
            shape,
        )
    }

    fn flash_attention(
        ctx: &mut CpuContext,
        q: &Buf,
        kv: (&Buf, &Buf),
        sinks: Option<&Buf>,
        out: &mut Buf,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()> {
        let (exec, scratch) = ctx.parts();
        attention::flash_attention(exec, scratch, (q, kv.0, kv.1), sinks, out, shape, config)
    }

    fn mla_attention(
        ctx: &mut CpuContext,
        q: &Buf,
        latent: &Buf,
        out: &mut Buf,
        shape: MlaShape,
    ) -> Result<()> {
        let (exec, scratch) = ctx.parts();
        attention::mla_attention(exec, scratch, q, latent, out, shape)
    }

    fn conv1d(
        ctx: &mut CpuContext,
        x: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: Conv1dShape,
    ) -> Result<()> {
        let (exec, scratch) = ctx.parts();
        conv::conv1d(exec, scratch, x, (weight, bias), out, shape)
    }

    fn conv2d_patch(
        ctx: &mut CpuContext,
        image: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        rows: &mut Buf,
        shape: PatchShape,
    ) -> Result<()> {
        let (exec, scratch) = ctx.parts();
        conv::conv2d_patch(exec, scratch, image, (weight, bias), rows, shape)
    }
}

/// Nothing to capture.
impl BackendGraph for CpuBackend {}

/// Ranks exchange host memory.
impl BackendCollective for CpuBackend {
    fn group(ctx: &CpuContext) -> Option<&GroupHandle> {
        ctx.group.as_ref()
    }

    fn join(ctx: &mut CpuContext, rank: GroupHandle) -> Result<()> {
        join_once(&mut ctx.group, rank)
    }

    fn rms_norm_parallel(
        ctx: &mut CpuContext,
        x: &CpuBuffer<f32>,
        weight: &CpuBuffer<f32>,
        out: &mut CpuBuffer<f32>,
        shape: ParallelNorm,
    ) -> Result<()> {
        norm::rms_norm_parallel(ctx, x, weight, out, shape)
    }
}

impl<T: Element> DeviceBuffer for CpuBuffer<T> {
    fn len(&self) -> usize {
        self.as_slice().len()
    }
}
