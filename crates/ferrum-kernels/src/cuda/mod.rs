//! The CUDA backend: NVIDIA GPUs from compute capability 8.0 on.
//!
//! [`CudaBackend`] is generic over the element of activations. With bf16 or f16 it is what models run on: activations take
//! half the memory and go through tensor cores, sums, the residual stream and logits are f32. Those of f16 have three bits more,
//! and become infinite from 65520 on. With f32 nothing between two products is rounded, which is what tests compare with other
//! implementations (`role.rs` says how kernels have all forms).
//! Dense weights keep the precision of the file, quantised ones stay integers (`pack.rs` says how they lie). `tile.rs` says
//! which kernel multiplies 16 bits with them: tiles on tensor cores, or for a few rows one that streams the weight. Activations of f32
//! take f32 sums, and products of bytes with quantised weights.
//!
//! * `driver.rs`, `pool.rs`, `memory.rs`, `stream.rs` and `error.rs` are all that call the driver, whose library is opened
//!   at run time; `compiler.rs` all that calls NVRTC.
//! * `blas.rs` is all that calls cuBLASLt, for prompts with dense weights of 16 bits, where that is installed.
//! * `core.rs` finds and opens devices, `buffer.rs`, `weight.rs` and `quant_weight.rs` hold their memory.
//! * `context.rs` is a stream: launches, copies through pinned memory, and captured steps.
//! * The files named after ops check sizes and say which kernel runs with which parameters. Kernels are the CUDA C++ texts
//!   in `kernels/`, which NVRTC compiles for the device that is there: the files that every model needs when it is opened,
//!   the others when an op first asks for them. The machine code is kept in the user's cache.
//!
//! What goes wrong on the device is [`ferrum_types::Error::Device`] of the call that waits for it, and of all later ones.
//!
//! **What has been executed.** Tests run all of this, kernels included, under the stand-in driver of
//! `tools/cuda-emulator`, and compile every kernel with NVIDIA's compiler where that is installed. An H200 has
//! run the conformance suite and all families at the commits that `docs/reports` says; `docs/performance.md` lists what came
//! later. Several devices, and other architectures, are still to come.

mod attention;
mod attention_call;
mod blas;
mod buffer;
mod capture;
mod collective;
mod compiler;
mod context;
mod conv;
mod core;
mod driver;
mod elementwise;
mod error;
mod flash;
mod flash_tiles;
mod float8;
mod gemm;
mod gemv;
mod heads;
mod kv;
mod memory;
mod moe;
mod nccl;
mod norm;
mod pack;
mod pool;
mod quant;
mod quant_gemv;
mod quant_kernels;
mod quant_weight;
mod role;
mod sample;
mod staging;
mod stream;
mod sync;
mod tile;
mod tile_operands;
mod weight;

pub use self::buffer::CudaBuffer;
pub use self::context::CudaContext;
pub use self::kv::{CudaKvBuffer, CudaKvKind, CudaKvScales};
pub use self::moe::CudaExperts;
pub use self::quant_weight::CudaQuantWeight;
pub use self::role::CudaAct;
pub use self::weight::CudaWeight;

use self::core::Shared;
use self::tile_operands::TileRows;
use crate::backend::*;
use ferrum_types::{Element, FloatElement, Result, SrcDtype};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

const BACKEND: &str = "cuda";

/// Settings of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Whether a row has the same bits whatever is computed beside it, for which some kernels are slower.
    pub batch_invariant: bool,
}

/// An NVIDIA GPU, with activations of `A`.
pub struct CudaBackend<A> {
    shared: Arc<Shared>,
    element: PhantomData<fn() -> A>,
}

/// An NVIDIA GPU as models run on it.
pub type CudaBf16 = CudaBackend<half::bf16>;

/// The same with finer activations of less range.
pub type CudaF16 = CudaBackend<half::f16>;

/// An NVIDIA GPU that rounds nothing between products, for comparisons.
pub type CudaF32 = CudaBackend<f32>;

impl<A> Clone for CudaBackend<A> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            element: PhantomData,
        }
    }
}

impl<A: CudaAct> fmt::Debug for CudaBackend<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("CudaBackend");
        all.field("act", &A::DTYPE.name());
        all.field("options", &self.shared.options).finish()
    }
}

impl<A: CudaAct> CudaBackend<A> {
    /// Opens the device number `ordinal` with settings of its own.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn open_with(ordinal: usize, options: CudaOptions) -> Result<Self> {
        Ok(Self {
            shared: Arc::new(self::core::open::<A>(ordinal, options)?),
            element: PhantomData,
        })
    }

    /// Whether a row has the same bits whatever is computed beside it: [`CudaOptions::batch_invariant`].
    pub fn batch_invariant(&self) -> bool {
        self.shared.options.batch_invariant
    }

    /// Major and minor of the compute capability, by which kernels for it are chosen.
    pub fn capability(&self) -> (i32, i32) {
        self.shared.capability
    }

    /// Streaming multiprocessors, by which work is split so that all have some.
    pub fn multiprocessors(&self) -> usize {
        self.shared.multiprocessors
    }
}

type Buf = CudaBuffer<f32>;
type Acts<A> = CudaBuffer<A>;
type Ctx<A> = CudaContext<A>;

impl<A: CudaAct> Backend for CudaBackend<A> {
    const NAME: &'static str = BACKEND;
    /// Tensor cores take 16 bits as they are, and f32 as two products. Activations are no finer either.
    const DEQUANTIZED_DTYPE: SrcDtype = A::WEIGHT;

    type Act = A;
    type Residual = f32;
    type Logit = f32;
    type Buffer<T: Element> = CudaBuffer<T>;
    type Weight = CudaWeight;
    type Context = CudaContext<A>;
    type Timer = HostTimer<Self>;

    fn devices() -> Vec<DeviceInfo> {
        self::core::devices()
    }

    fn open(ordinal: usize) -> Result<Self> {
        Self::open_with(ordinal, CudaOptions::default())
    }

    fn info(&self) -> DeviceInfo {
        self.shared.info()
    }

    fn new_context(&self) -> Result<CudaContext<A>> {
        CudaContext::new(self.clone())
    }

    fn device(ctx: &CudaContext<A>) -> &Self {
        &ctx.backend
    }

    fn overlaps(&self) -> bool {
        true
    }

    /// What cuBLASLt works with and, of ranks, the buffers of NCCL.
    fn workspace_bytes(&self, ranks: usize) -> u64 {
        let products = match self.batch_invariant() {
            true => 0,
            false => tile::WORKSPACE as u64,
        };
        products.saturating_add(collective::workspace_bytes(ranks))
    }

    /// With activations of 16 bits, the number of rows decides which kernels run: quantised weights are multiplied as they are with a few
    /// rows and rounded to 16 bits for many, many rows are rounded to FP8 for products with FP8 weights, and keys are parted among
    /// blocks by what fills the device. `batch_invariant` leaves one order of sums.
    fn batch_invariance(&self) -> BatchInvariance {
        if tile::is_for::<A>() && !self.batch_invariant() {
            let of_codes = match float8::code_tiles(&self.shared) {
                Some(_) => float8::ROUNDING,
                None => 0.0,
            };
            BatchInvariance::WithinNmse(flash::ROW_TOLERANCE.max(tile::ROW_TOLERANCE).max(of_codes))
        } else {
            BatchInvariance::BitExact
        }
    }

    fn sync(ctx: &mut CudaContext<A>) -> Result<()> {
        ctx.finish("sync")
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<CudaBuffer<T>> {
        CudaBuffer::zeros(&self.shared, len)
    }

    fn host_buffer<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        let bytes = check::elements("host_buffer", &[len, size_of::<T>()])?;
        let memory = context::host_memory(&self.shared, bytes)?;
        Ok(HostBuffer::of_device(memory, len))
    }

    fn from_slice<T: Element>(&self, data: &[T]) -> Result<CudaBuffer<T>> {
        let mut buffer = CudaBuffer::unwritten(&self.shared, data.len())?;
        let mut ctx = self.new_context()?;
        context::write(&mut ctx, &mut buffer, 0, data)?;
        ctx.finish("write")?;
        Ok(buffer)
    }

    fn write<T: Element>(
        ctx: &mut Ctx<A>,
        dst: &mut CudaBuffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        context::write(ctx, dst, offset, src)
    }

    fn write_packed<'b, 'p>(
        ctx: &mut Ctx<A>,
        src: &[i32],
        to: impl IntoIterator<Item = (&'b mut CudaBuffer<i32>, &'p [UploadPiece])>,
    ) -> Result<()> {
        context::write_packed(ctx, src, to)
    }

    fn read<T: Element>(
        ctx: &mut Ctx<A>,
        src: &CudaBuffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()> {
        context::read(ctx, src, offset, out)
    }

    fn begin_read<T: Element>(
        ctx: &mut Ctx<A>,
        src: &CudaBuffer<T>,
        offset: usize,
        len: usize,
    ) -> Result<PendingRead<T>> {
        context::begin_read(ctx, src, offset, len)
    }

    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<CudaWeight> {
        weight::load(self.new_context()?, "from_weight_parts", parts, cols)
    }

    fn copy_slice<T: Element>(
        ctx: &mut Ctx<A>,
        src: &CudaBuffer<T>,
        src_offset: usize,
        dst: &mut CudaBuffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        context::copy_slice(ctx, (src, src_offset), (dst, dst_offset), len)
    }

    fn copy_columns<T: Element>(
        ctx: &mut Ctx<A>,
        src: &CudaBuffer<T>,
        dst: &mut CudaBuffer<T>,
        shape: CopyColumnsShape,
    ) -> Result<()> {
        gemm::copy_columns(ctx, src, dst, shape)
    }

    fn gemm<T: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &Acts<A>,
        weight: &CudaWeight,
        out: &mut CudaBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm(ctx, x, weight, out, shape)
    }

    fn gemm_gated(
        ctx: &mut Ctx<A>,
        x: &Acts<A>,
        weight: &CudaWeight,
        activation: Activation,
        (room, out): (&mut Acts<A>, &mut Acts<A>),
        shape: GemmShape,
    ) -> Result<()> {
        const OP: &str = "gemm_gated";
        let halves = check::gemm_gated(OP, x, (&*room, &*out), shape)?;
        check::gemm("gemm", x, weight.shape(), room, shape)?;
        let rows = TileRows::of(x, shape.rows, shape.k);
        let to = (out.at(0), halves.dim);
        if let [slab] = &weight.slabs[..]
            && tile::gated(ctx, OP, rows, slab.into(), activation, to)?
        {
            return Ok(());
        }
        Self::gemm(ctx, x, weight, room, shape)?;
        Self::activate_split(ctx, activation, room, out, halves)
    }

    fn embedding_lookup(
        ctx: &mut Ctx<A>,
        table: &CudaWeight,
        ids: &CudaBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup(ctx, table, ids, out, shape)
    }

    fn gather_rows<T: Element>(
        ctx: &mut Ctx<A>,
        src: &CudaBuffer<T>,
        rows: &CudaBuffer<i32>,
        out: &mut CudaBuffer<T>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::gather_rows(ctx, src, rows, out, shape)
    }

    fn argmax_rows(
        ctx: &mut Ctx<A>,
        x: &Buf,
        out: &mut CudaBuffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::argmax_rows(ctx, x, out, shape)
    }

    fn rms_norm<T: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &CudaBuffer<T>,
        weight: &Buf,
        out: &mut Acts<A>,
        shape: NormShape,
    ) -> Result<()> {
        norm::rms_norm(ctx, x, weight, out, shape)
    }

    fn fused_add_rms_norm(
        ctx: &mut Ctx<A>,
        residual: &mut Buf,
        x: &Acts<A>,
        weight: &Buf,
        out: &mut Acts<A>,
        shape: NormShape,
    ) -> Result<()> {
        norm::fused_add_rms_norm(ctx, residual, x, weight, out, shape)
    }

    fn layer_norm<T: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &CudaBuffer<T>,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Acts<A>,
        shape: NormShape,
    ) -> Result<()> {
        norm::layer_norm(ctx, x, weight, bias, out, shape)
    }

    fn activate<T: FloatElement>(
        ctx: &mut Ctx<A>,
        activation: Activation,
        x: &CudaBuffer<T>,
        y: Option<&CudaBuffer<T>>,
        out: &mut CudaBuffer<T>,
        len: usize,
    ) -> Result<()> {
        elementwise::activate(ctx, activation, (x, y), out, len)
    }

    fn fused_silu_mul_split(
        ctx: &mut Ctx<A>,
        gate_up: &Acts<A>,
        out: &mut Acts<A>,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::gated(
            ctx,
            "fused_silu_mul_split",
            Activation::Silu,
            gate_up,
            out,
            shape,
        )
    }

    fn fused_gelu_mul_split(
        ctx: &mut Ctx<A>,
        gate_up: &Acts<A>,
        out: &mut Acts<A>,
        kind: GeluKind,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::gated(
            ctx,
            "fused_gelu_mul_split",
            Activation::Gelu(kind),
            gate_up,
            out,
            shape,
        )
    }

    fn add_bias<T: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &mut CudaBuffer<T>,
        bias: &Buf,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::add_bias(ctx, x, bias, shape)
    }

    fn add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &mut CudaBuffer<T>,
        y: &CudaBuffer<U>,
        len: usize,
    ) -> Result<()> {
        elementwise::scaled_add(ctx, "add_inplace", x, y, 1.0, len)
    }

    fn scaled_add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &mut CudaBuffer<T>,
        y: &CudaBuffer<U>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        elementwise::scaled_add(ctx, "scaled_add_inplace", x, y, scale, len)
    }

    fn scale_inplace<T: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &mut CudaBuffer<T>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        elementwise::scale_inplace(ctx, x, scale, len)
    }

    fn softcap<T: FloatElement>(
        ctx: &mut Ctx<A>,
        x: &mut CudaBuffer<T>,
        cap: f32,
        len: usize,
    ) -> Result<()> {
        elementwise::softcap(ctx, x, cap, len)
    }

    fn split_qkv(
        ctx: &mut Ctx<A>,
        qkv: &Acts<A>,
        q: &mut Acts<A>,
        k: &mut Acts<A>,
        v: &mut Acts<A>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv(ctx, qkv, [q, k, v], shape)
    }

    fn qk_norm_rope(
        ctx: &mut Ctx<A>,
        x: &mut Acts<A>,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::qk_norm_rope(ctx, x, layout, norm, rope, shape)
    }

    fn split_qkv_norm_rope(
        ctx: &mut Ctx<A>,
        qkv: &Acts<A>,
        q: &mut Acts<A>,
        k: &mut Acts<A>,
        v: &mut Acts<A>,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv_norm_rope(ctx, qkv, [q, k, v], transform, shape)
    }

    fn split_qkv_norm_rope_into_cache(
        ctx: &mut Ctx<A>,
        qkv: &Acts<A>,
        q: &mut Acts<A>,
        caches: (&mut Acts<A>, &mut Acts<A>),
        span: CacheSpan,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv_norm_rope_into_cache(ctx, qkv, q, caches, span, transform, shape)
    }

    fn kv_cache_append_head_major(
        ctx: &mut Ctx<A>,
        k: &Acts<A>,
        v: &Acts<A>,
        caches: (&mut Acts<A>, &mut Acts<A>),
        span: CacheSpan,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::kv_cache_append_head_major(ctx, k, v, caches, span, shape)
    }

    fn transpose_head_to_token(
        ctx: &mut Ctx<A>,
        src: &Acts<A>,
        dst: &mut Acts<A>,
        shape: HeadsShape,
    ) -> Result<()> {
        let to = HeadLayout::TokenMajor;
        heads::transpose(ctx, "transpose_head_to_token", src, dst, to, shape)
    }

    fn transpose_token_to_head(
        ctx: &mut Ctx<A>,
        src: &Acts<A>,
        dst: &mut Acts<A>,
        shape: HeadsShape,
    ) -> Result<()> {
        let to = HeadLayout::HeadMajor;
        heads::transpose(ctx, "transpose_token_to_head", src, dst, to, shape)
    }

    fn flash_attention(
        ctx: &mut Ctx<A>,
        q: &Acts<A>,
        kv: (&Acts<A>, &Acts<A>),
        sinks: Option<&Buf>,
        out: &mut Acts<A>,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()> {
        attention::flash_attention(ctx, q, kv, sinks, out, shape, config)
    }

    fn mla_attention(
        ctx: &mut Ctx<A>,
        q: &Acts<A>,
        latent: &Acts<A>,
        out: &mut Acts<A>,
        shape: MlaShape,
    ) -> Result<()> {
        attention::mla_attention(ctx, q, latent, out, shape)
    }

    fn conv1d(
        ctx: &mut Ctx<A>,
        x: &Acts<A>,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Acts<A>,
        shape: Conv1dShape,
    ) -> Result<()> {
        conv::conv1d(ctx, x, weight, bias, out, shape)
    }

    fn conv2d_patch(
        ctx: &mut Ctx<A>,
        image: &Acts<A>,
        weight: &Buf,
        bias: Option<&Buf>,
        rows: &mut Acts<A>,
        shape: PatchShape,
    ) -> Result<()> {
        conv::conv2d_patch(ctx, image, weight, bias, rows, shape)
    }
}

/// Ranks with a device each exchange by NCCL, where it is installed; others, what is read into host memory.
impl<A: CudaAct> BackendCollective for CudaBackend<A> {
    fn group(ctx: &Ctx<A>) -> Option<&GroupHandle> {
        ctx.group.as_ref()
    }

    fn join(ctx: &mut Ctx<A>, rank: GroupHandle) -> Result<()> {
        join_once(&mut ctx.group, rank)
    }

    fn records_collectives(ctx: &Ctx<A>) -> bool {
        ctx.group.is_none() || ctx.link.nccl().is_some()
    }

    fn all_reduce<T: Element>(
        ctx: &mut Ctx<A>,
        buf: &mut CudaBuffer<T>,
        len: usize,
        op: ReduceOp,
    ) -> Result<()> {
        collective::all_reduce(ctx, buf, len, op)
    }

    fn all_gather_rows<T: Element>(
        ctx: &mut Ctx<A>,
        src: &CudaBuffer<T>,
        dst: &mut CudaBuffer<T>,
        rows: usize,
        dims: &[usize],
    ) -> Result<()> {
        collective::all_gather_rows(ctx, src, dst, rows, dims)
    }

    fn broadcast<T: Element>(
        ctx: &mut Ctx<A>,
        buf: &mut CudaBuffer<T>,
        len: usize,
        root: usize,
    ) -> Result<()> {
        collective::broadcast(ctx, buf, len, root)
    }

    fn rms_norm_parallel(
        ctx: &mut Ctx<A>,
        x: &Acts<A>,
        weight: &Buf,
        out: &mut Acts<A>,
        shape: ParallelNorm,
    ) -> Result<()> {
        collective::rms_norm_parallel(ctx, x, weight, out, shape)
    }

    fn ids_from(
        ctx: &mut Ctx<A>,
        ids: &CudaBuffer<i32>,
        out: &mut CudaBuffer<i32>,
        first: usize,
        len: usize,
    ) -> Result<()> {
        collective::ids_from(ctx, ids, out, first, len)
    }
}
