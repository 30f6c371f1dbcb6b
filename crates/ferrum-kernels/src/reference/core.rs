//! The device, its memory, and the table of ops: each is a function of the file named after it.

use super::buffer::RefBuffer;
use super::{attention, conv, elementwise, gemm, heads, norm};
use crate::backend::*;
use ferrum_types::{Element, Error, Result};
use std::time::Instant;

/// The host, computing with plain loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceBackend;

/// Runs each op when it is recorded.
#[derive(Debug)]
pub struct RefContext {
    device: ReferenceBackend,
}

/// The host's clock.
#[derive(Debug)]
pub struct RefTimer {
    origin: Instant,
    /// In order of opening; a span without duration is open.
    spans: Vec<(&'static str, u64, Option<u64>)>,
}

type Buf = RefBuffer<f32>;

impl Backend for ReferenceBackend {
    const NAME: &'static str = "reference";

    type Act = f32;
    type Buffer<T: Element> = RefBuffer<T>;
    type Weight = gemm::RefWeight;
    type Context = RefContext;
    type Timer = RefTimer;

    fn devices() -> Vec<DeviceInfo> {
        vec![ReferenceBackend.info()]
    }

    fn open(ordinal: usize) -> Result<Self> {
        if ordinal == 0 {
            return Ok(ReferenceBackend);
        }
        Err(Error::NoDevice {
            backend: Self::NAME,
            reason: format!("there is no device {ordinal}"),
            hint: "the only reference device is number 0".into(),
        })
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            backend: Self::NAME,
            ordinal: 0,
            name: "host".into(),
            detail: "plain loops, f64 sums".into(),
            software: false,
            memory_bytes: None,
        }
    }

    fn new_context(&self) -> Result<RefContext> {
        Ok(RefContext { device: *self })
    }

    fn device(ctx: &RefContext) -> &Self {
        &ctx.device
    }

    fn sync(_: &mut RefContext) -> Result<()> {
        Ok(())
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<RefBuffer<T>> {
        let mut data = Vec::new();
        data.try_reserve_exact(len)
            .map_err(|error| Error::OutOfMemory {
                backend: Self::NAME,
                requested: (len as u64).saturating_mul(size_of::<T>() as u64),
                reason: error.to_string(),
            })?;
        data.resize(len, T::zeroed());
        Ok(RefBuffer(data))
    }

    fn from_slice<T: Element>(&self, data: &[T]) -> Result<RefBuffer<T>> {
        Ok(RefBuffer(data.to_vec()))
    }

    fn write<T: Element>(
        _: &mut RefContext,
        dst: &mut RefBuffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        let to = check::range("write", "dst", dst, offset, src.len())?;
        dst.0[to].copy_from_slice(src);
        Ok(())
    }

    fn read<T: Element>(
        _: &mut RefContext,
        src: &RefBuffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()> {
        out.copy_from_slice(&src.0[check::range("read", "src", src, offset, out.len())?]);
        Ok(())
    }

    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<Self::Weight> {
        gemm::weight_from_parts(parts, cols)
    }

    fn copy_slice<T: Element>(
        _: &mut RefContext,
        src: &RefBuffer<T>,
        src_offset: usize,
        dst: &mut RefBuffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()> {
        let [from, to] = check::copy_slice(src, src_offset, dst, dst_offset, len)?;
        dst.0[to].copy_from_slice(&src.0[from]);
        Ok(())
    }

    fn gemm(
        _: &mut RefContext,
        x: &Buf,
        weight: &Self::Weight,
        out: &mut Buf,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm("gemm", x, weight, out, shape)
    }

    fn embedding_lookup(
        _: &mut RefContext,
        table: &Self::Weight,
        ids: &RefBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup("embedding_lookup", table, ids, out, shape)
    }

    fn gather_rows(
        _: &mut RefContext,
        src: &Buf,
        rows: &RefBuffer<i32>,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        gemm::gather_rows(src, rows, out, shape)
    }

    fn argmax_rows(
        _: &mut RefContext,
        x: &Buf,
        out: &mut RefBuffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::argmax_rows(x, out, shape)
    }

    fn rms_norm(
        _: &mut RefContext,
        x: &Buf,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        norm::rms_norm(x, weight, out, shape)
    }

    fn fused_add_rms_norm(
        _: &mut RefContext,
        residual: &mut Buf,
        x: &Buf,
        weight: &Buf,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        norm::fused_add_rms_norm(residual, x, weight, out, shape)
    }

    fn layer_norm(
        _: &mut RefContext,
        x: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: NormShape,
    ) -> Result<()> {
        norm::layer_norm(x, weight, bias, out, shape)
    }

    fn gelu(_: &mut RefContext, x: &Buf, out: &mut Buf, len: usize) -> Result<()> {
        elementwise::map("gelu", x, out, len, |x| {
            elementwise::gelu(GeluKind::Exact, x)
        })
    }

    fn gelu_tanh(_: &mut RefContext, x: &Buf, out: &mut Buf, len: usize) -> Result<()> {
        elementwise::map("gelu_tanh", x, out, len, |x| {
            elementwise::gelu(GeluKind::Tanh, x)
        })
    }

    fn silu(_: &mut RefContext, x: &Buf, out: &mut Buf, len: usize) -> Result<()> {
        elementwise::map("silu", x, out, len, elementwise::silu)
    }

    fn fused_silu_mul_split(
        _: &mut RefContext,
        gate_up: &Buf,
        out: &mut Buf,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::gated(
            "fused_silu_mul_split",
            gate_up,
            out,
            shape,
            elementwise::silu,
        )
    }

    fn fused_gelu_mul_split(
        _: &mut RefContext,
        gate_up: &Buf,
        out: &mut Buf,
        kind: GeluKind,
        shape: RowShape,
    ) -> Result<()> {
        let gelu = |x| elementwise::gelu(kind, x);
        elementwise::gated("fused_gelu_mul_split", gate_up, out, shape, gelu)
    }

    fn add_bias(_: &mut RefContext, x: &mut Buf, bias: &Buf, shape: RowShape) -> Result<()> {
        elementwise::add_bias(x, bias, shape)
    }

    fn add_inplace(_: &mut RefContext, x: &mut Buf, y: &Buf, len: usize) -> Result<()> {
        elementwise::zip_inplace("add_inplace", x, y, len, |x, y| x + y)
    }

    fn scaled_add_inplace(
        _: &mut RefContext,
        x: &mut Buf,
        y: &Buf,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        let scale = f64::from(scale);
        elementwise::zip_inplace("scaled_add_inplace", x, y, len, |x, y| x + scale * y)
    }

    fn scale_inplace(_: &mut RefContext, x: &mut Buf, scale: f32, len: usize) -> Result<()> {
        elementwise::map_inplace("scale_inplace", x, len, |x| x * f64::from(scale))
    }

    fn mul(_: &mut RefContext, x: &Buf, y: &Buf, out: &mut Buf, len: usize) -> Result<()> {
        elementwise::mul(x, y, out, len)
    }

    fn softcap(_: &mut RefContext, x: &mut Buf, cap: f32, len: usize) -> Result<()> {
        elementwise::softcap(x, cap, len)
    }

    fn split_qkv(
        _: &mut RefContext,
        qkv: &Buf,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv(qkv, q, k, v, shape)
    }

    fn qk_norm_rope(
        _: &mut RefContext,
        x: &mut Buf,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::qk_norm_rope(x, layout, norm, rope, shape)
    }

    fn split_qkv_norm_rope(
        _: &mut RefContext,
        qkv: &Buf,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv_norm_rope(qkv, q, k, v, transform, shape)
    }

    fn split_qkv_norm_rope_into_cache(
        _: &mut RefContext,
        qkv: &Buf,
        q: &mut Buf,
        caches: (&mut Buf, &mut Buf),
        span: CacheSpan,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        heads::split_qkv_norm_rope_into_cache(qkv, q, caches, span, transform, shape)
    }

    fn kv_cache_append_head_major(
        _: &mut RefContext,
        k: &Buf,
        v: &Buf,
        caches: (&mut Buf, &mut Buf),
        span: CacheSpan,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::kv_cache_append_head_major(k, v, caches, span, shape)
    }

    fn transpose_head_to_token(
        _: &mut RefContext,
        src: &Buf,
        dst: &mut Buf,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::transpose(
            "transpose_head_to_token",
            src,
            dst,
            HeadLayout::TokenMajor,
            shape,
        )
    }

    fn transpose_token_to_head(
        _: &mut RefContext,
        src: &Buf,
        dst: &mut Buf,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::transpose(
            "transpose_token_to_head",
            src,
            dst,
            HeadLayout::HeadMajor,
            shape,
        )
    }

    fn flash_attention(
        _: &mut RefContext,
        q: &Buf,
        kv: (&Buf, &Buf),
        sinks: Option<&Buf>,
        out: &mut Buf,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()> {
        attention::flash_attention(q, kv, sinks, out, shape, config)
    }

    fn mla_attention(
        _: &mut RefContext,
        q: &Buf,
        latent: &Buf,
        out: &mut Buf,
        shape: MlaShape,
    ) -> Result<()> {
        attention::mla_attention(q, latent, out, shape)
    }

    fn conv1d(
        _: &mut RefContext,
        x: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
        shape: Conv1dShape,
    ) -> Result<()> {
        conv::conv1d(x, weight, bias, out, shape)
    }

    fn conv2d_patch(
        _: &mut RefContext,
        image: &Buf,
        weight: &Buf,
        bias: Option<&Buf>,
        rows: &mut Buf,
        shape: PatchShape,
    ) -> Result<()> {
        conv::conv2d_patch(image, weight, bias, rows, shape)
    }
}

/// Nothing to capture: a body simply runs.
impl BackendGraph for ReferenceBackend {
    fn run_graph(
        ctx: &mut RefContext,
        _: GraphKey,
        body: &mut dyn FnMut(&mut RefContext) -> Result<()>,
    ) -> Result<GraphRun> {
        body(ctx)?;
        Ok(GraphRun::Immediate)
    }

    fn reset_graph(_: &mut RefContext, _: GraphKey) -> Result<()> {
        Ok(())
    }

    fn reset_all_graphs(_: &mut RefContext) -> Result<()> {
        Ok(())
    }
}

/// A single rank.
impl BackendCollective for ReferenceBackend {}

impl RefTimer {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl BackendTimer<ReferenceBackend> for RefTimer {
    fn new(_: &ReferenceBackend) -> Result<Self> {
        Ok(RefTimer {
            origin: Instant::now(),
            spans: Vec::new(),
        })
    }

    fn begin(&mut self, _: &mut RefContext, name: &'static str) -> Result<()> {
        self.spans.push((name, self.now(), None));
        Ok(())
    }

    fn end(&mut self, _: &mut RefContext) -> Result<()> {
        let now = self.now();
        match self.spans.iter_mut().rfind(|span| span.2.is_none()) {
            Some((_, start, duration)) => {
                *duration = Some(now - *start);
                Ok(())
            }
            None => Err(Error::invalid("timer", "end was called with no open span")),
        }
    }

    fn take_spans(&mut self, _: &mut RefContext) -> Result<Vec<Span>> {
        let mut closed = Vec::new();
        self.spans
            .retain(|&(name, start_ns, duration)| match duration {
                Some(duration_ns) => {
                    closed.push(Span {
                        name,
                        start_ns,
                        duration_ns,
                    });
                    false
                }
                None => true,
            });
        Ok(closed)
    }
}
