//! The wgpu backend: compute shaders on any GPU with Vulkan or Metal.
//!
//! Activations and sums are f32; dense weights keep the precision of the file and are widened in
//! registers. Shaders are the WGSL texts in `shaders/`, one idea each; they use no optional feature
//! of a device and assume nothing of the width of its subgroups.
//!
//! * `core.rs` finds and opens devices, `buffer.rs` and `weight.rs` hold their memory.
//! * `context.rs` records dispatches and copies into one command encoder and submits them with the
//!   read-back that somebody waits for; `staging.rs` brings host data in, in order.
//! * `pipeline.rs` compiles shaders when they are first used, and caches bind groups.
//! * The files named after ops check sizes and say which shader runs with which parameters.
//!
//! What goes wrong on the device (validation, memory, loss) is kept, and comes out as
//! [`ferrum_types::Error::Device`] of the next [`Backend::sync`] or [`Backend::read`].
//!
//! **What has been executed.** Continuous integration runs every shader on software Vulkan
//! (lavapipe) and checks that each translates to valid Metal Shading Language; on Metal itself
//! nothing has been executed.

mod attention;
mod buffer;
mod context;
mod conv;
mod core;
mod elementwise;
mod gemm;
mod heads;
mod kv;
mod norm;
mod pipeline;
mod sample;
mod staging;
#[cfg(test)]
mod tests;
mod timer;
mod weight;

pub use self::buffer::GpuBuffer;
pub use self::context::GpuContext;
pub use self::core::{GpuApi, GpuConfig};
pub use self::kv::{GpuKvBuffer, GpuKvKind};
pub use self::timer::GpuTimer;
pub use self::weight::GpuWeight;

use self::core::Shared;
use crate::backend::*;
use ferrum_types::{Element, FloatElement, Result};
use std::sync::Arc;

/// A GPU that wgpu reaches.
#[derive(Clone)]
pub struct GpuBackend {
    shared: Arc<Shared>,
}

impl GpuBackend {
    /// Opens the device number `ordinal` of one API.
    ///
    /// # Errors
    /// [`NoDevice`](ferrum_types::Error::NoDevice) names what was missing.
    pub fn open_kind(api: GpuApi, ordinal: usize) -> Result<Self> {
        Self::open_with(GpuConfig {
            api: Some(api),
            ordinal,
            ..GpuConfig::default()
        })
    }

    /// Opens a device as `config` says.
    ///
    /// # Errors
    /// [`NoDevice`](ferrum_types::Error::NoDevice) names what was missing.
    pub fn open_with(config: GpuConfig) -> Result<Self> {
        Ok(Self {
            shared: Arc::new(self::core::open(&config)?),
        })
    }

    /// The devices of one API, in the order of the ordinals of [`open_kind`](Self::open_kind).
    pub fn devices_of(api: GpuApi) -> Vec<DeviceInfo> {
        self::core::devices(Some(api))
    }
}

type Buf = GpuBuffer<f32>;
type Ctx = GpuContext;

impl Backend for GpuBackend {
    const NAME: &'static str = "gpu";

    type Act = f32;
    type Residual = f32;
    type Logit = f32;
    type Buffer<T: Element> = GpuBuffer<T>;
    type Weight = GpuWeight;
    type Context = GpuContext;
    type Timer = GpuTimer;

    fn devices() -> Vec<DeviceInfo> {
        self::core::devices(None)
    }

    fn open(ordinal: usize) -> Result<Self> {
        Self::open_with(GpuConfig {
            ordinal,
            ..GpuConfig::default()
        })
    }

    fn info(&self) -> DeviceInfo {
        self.shared.info.clone()
    }

    fn new_context(&self) -> Result<GpuContext> {
        Ok(GpuContext::new(self.clone()))
    }

    fn device(ctx: &GpuContext) -> &Self {
        &ctx.backend
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn sync(ctx: &mut GpuContext) -> Result<()> {
        ctx.finish("sync")
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<GpuBuffer<T>> {
        buffer::alloc(&self.shared, len)
    }

    fn from_slice<T: Element>(&self, data: &[T]) -> Result<GpuBuffer<T>> {
        buffer::from_slice(&self.shared, data)
    }

    fn write<T: Element>(
        ctx: &mut Ctx,
        dst: &mut GpuBuffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        context::write(ctx, dst, offset, src)
    }

    fn write_packed<'b, 'p>(
        ctx: &mut Ctx,
        src: &[i32],
        to: impl IntoIterator<Item = (&'b mut GpuBuffer<i32>, &'p [UploadPiece])>,
    ) -> Result<()> {
        context::write_packed(ctx, src, to)
    }

    fn read<T: Element>(
        ctx: &mut Ctx,
        src: &GpuBuffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()> {
        context::read(ctx, src, offset, out)
    }

    fn begin_read<T: Element>(
        ctx: &mut Ctx,
        src: &GpuBuffer<T>,
        offset: usize,
        len: usize,
    ) -> Result<PendingRead<T>> {
        context::begin_read(ctx, src, offset, len)
    }

    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<GpuWeight> {
        weight::load(&self.shared, parts, cols)
    }

    fn copy_slice<T: Element>(
        ctx: &mut Ctx,
        src: &GpuBuffer<T>,
        src_offset: usize,
        dst: &mut GpuBuffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        context::copy_slice(ctx, (src, src_offset), (dst, dst_offset), len)
    }

    fn gemm<T: FloatElement>(
        ctx: &mut Ctx,
        x: &Buf,
        weight: &GpuWeight,
        out: &mut GpuBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        let out = check::only_mut::<Self, T, f32>("gemm", out)?;
        gemm::gemm(ctx, x, weight, out, shape)
    }

    fn embedding_lookup(
        ctx: &mut Ctx,
        table: &GpuWeight,
        ids: &GpuBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup(ctx, table, ids, out, shape)
    }

    fn gather_rows<T: Element>(
        ctx: &mut Ctx,
        src: &GpuBuffer<T>,
        rows: &GpuBuffer<i32>,
        out: &mut GpuBuffer<T>,
        shape: RowShape,
    ) -> Result<()> {
        let src = check::only::<Self, T, f32>("gather_rows", src)?;
        let out = check::only_mut::<Self, T, f32>("gather_rows", out)?;
        gemm::gather_rows(ctx, src, rows, out, shape)
    }

    fn argmax_rows(
        ctx: &mut Ctx,
        x: &Buf,
        out: &mut GpuBuffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::argmax_rows(ctx, x, out, shape)
    }

    fn rms_norm<T: FloatElement>(
        ctx: &mut Ctx,
        x: &GpuBuffer<T>,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        let x = check::only::<Self, T, f32>("rms_norm", x)?;
        norm::rms_norm(ctx, x, weight, out, shape)
    }

    fn fused_add_rms_norm(
        ctx: &mut Ctx,
        residual: &mut Buf,
        x: &Buf,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        norm::fused_add_rms_norm(ctx, residual, x, weight, out, shape)
    }

    fn layer_norm<T: FloatElement>(
        ctx: &mut Ctx,
        x: &GpuBuffer<T>,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        let x = check::only::<Self, T, f32>("layer_norm", x)?;
        norm::layer_norm(ctx, x, weight, bias, out, shape)
    }

    fn activate<T: FloatElement>(
        ctx: &mut Ctx,
        activation: Activation,
        x: &GpuBuffer<T>,
        y: Option<&GpuBuffer<T>>,
        out: &mut GpuBuffer<T>,
        len: usize,
    ) -> Result<()> {
        let x = check::only::<Self, T, f32>("activate", x)?;
        let y = y
            .map(|y| check::only::<Self, T, f32>("activate", y))
            .transpose()?;
        let out = check::only_mut::<Self, T, f32>("activate", out)?;
        elementwise::activate(ctx, activation, (x, y), out, len)
    }

    fn fused_silu_mul_split(
        ctx: &mut Ctx,
        gate_up: &Buf,
        out: &mut Buf,
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
        ctx: &mut Ctx,
        gate_up: &Buf,
        out: &mut Buf,
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
        ctx: &mut Ctx,
        x: &mut GpuBuffer<T>,
        bias: &Buf,
        shape: RowShape,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("add_bias", x)?;
        elementwise::add_bias(ctx, x, bias, shape)
    }

    fn add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Ctx,
        x: &mut GpuBuffer<T>,
        y: &GpuBuffer<U>,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("add_inplace", x)?;
        let y = check::only::<Self, U, f32>("add_inplace", y)?;
        elementwise::scaled_add(ctx, "add_inplace", x, y, 1.0, len)
    }

    fn scaled_add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Ctx,
        x: &mut GpuBuffer<T>,
        y: &GpuBuffer<U>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("scaled_add_inplace", x)?;
        let y = check::only::<Self, U, f32>("scaled_add_inplace", y)?;
        elementwise::scaled_add(ctx, "scaled_add_inplace", x, y, scale, len)
    }

    fn scale_inplace<T: FloatElement>(
        ctx: &mut Ctx,
        x: &mut GpuBuffer<T>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("scale_inplace", x)?;
        elementwise::scale_inplace(ctx, x, scale, len)
    }

    fn softcap<T: FloatElement>(
        ctx: &mut Ctx,
        x: &mut GpuBuffer<T>,
        cap: f32,
        len: usize,
    ) -> Result<()> {
        let x = check::only_mut::<Self, T, f32>("softcap", x)?;
        elementwise::softcap(ctx, x, cap, len)
    }

    fn split_qkv(
        ctx: &mut Ctx,
        qkv: &Buf,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv(ctx, qkv, q, k, v, shape)
    }

    fn qk_norm_rope(
        ctx: &mut Ctx,
        x: &mut Buf,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::qk_norm_rope(ctx, x, layout, norm, rope, shape)
    }

    fn split_qkv_norm_rope(
        ctx: &mut Ctx,
        qkv: &Buf,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv_norm_rope(ctx, qkv, q, (k, v), transform, shape)
    }

    fn split_qkv_norm_rope_into_cache(
        ctx: &mut Ctx,
        qkv: &Buf,
        q: &mut Buf,
        caches: (&mut Buf, &mut Buf),
        span: CacheSpan,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv_norm_rope_into_cache(ctx, qkv, q, caches, span, transform, shape)
    }

    fn kv_cache_append_head_major(
        ctx: &mut Ctx,
        k: &Buf,
        v: &Buf,
        caches: (&mut Buf, &mut Buf),
        span: CacheSpan,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::kv_cache_append_head_major(ctx, k, v, caches, span, shape)
    }

    fn transpose_head_to_token(
        ctx: &mut Ctx,
        src: &Buf,
        dst: &mut Buf,
        shape: HeadsShape,
    ) -> Result<()> {
        let to = HeadLayout::TokenMajor;
        heads::transpose(ctx, "transpose_head_to_token", src, dst, to, shape)
    }

    fn transpose_token_to_head(
        ctx: &mut Ctx,
        src: &Buf,
        dst: &mut Buf,
        shape: HeadsShape,
    ) -> Result<()> {
        let to = HeadLayout::HeadMajor;
        heads::transpose(ctx, "transpose_token_to_head", src, dst, to, shape)
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
        attention::flash_attention(ctx, q, kv, sinks, out, shape, config)
    }

    fn mla_attention(
        ctx: &mut Ctx,
        q: &Buf,
        latent: &Buf,
        out: &mut Buf,
        shape: MlaShape,
    ) -> Result<()> {
        attention::mla_attention(ctx, q, latent, out, shape)
    }

    fn conv1d(
        ctx: &mut Ctx,
        x: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: Conv1dShape,
    ) -> Result<()> {
        conv::conv1d(ctx, x, weight, bias, out, shape)
    }

    fn conv2d_patch(
        ctx: &mut Ctx,
        image: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        rows: &mut Buf,
        shape: PatchShape,
    ) -> Result<()> {
        conv::conv2d_patch(ctx, image, weight, bias, rows, shape)
    }
}

/// wgpu command buffers run once, so a body is recorded anew; pipelines, bind groups and staging
/// memory are cached, which leaves little to save.
impl BackendGraph for GpuBackend {}

/// Ranks exchange what is read into host memory.
impl BackendCollective for GpuBackend {
    fn group(ctx: &Ctx) -> Option<&GroupHandle> {
        ctx.group.as_ref()
    }

    fn join(ctx: &mut Ctx, rank: GroupHandle) -> Result<()> {
        join_once(&mut ctx.group, rank)
    }
}
