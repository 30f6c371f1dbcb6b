//! The device, its memory, and the table of ops: each is a function of the file named after it. What is
//! not here is a composition, with the body that the contract provides.

use super::buffer::RefBuffer;
use super::{attention, conv, elementwise, gemm, heads, norm};
use crate::backend::*;
use ferrum_types::{Element, Error, Result};

/// The host, computing with plain loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceBackend;

/// Runs each op when it is recorded.
#[derive(Debug)]
pub struct RefContext {
    device: ReferenceBackend,
    group: Option<GroupRank>,
}

type Buf = RefBuffer<f32>;

impl Backend for ReferenceBackend {
    const NAME: &'static str = "reference";

    type Act = f32;
    type Buffer<T: Element> = RefBuffer<T>;
    type Weight = gemm::RefWeight;
    type Context = RefContext;
    type Timer = HostTimer<Self>;

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
        Ok(RefContext {
            device: *self,
            group: None,
        })
    }

    fn device(ctx: &RefContext) -> &Self {
        &ctx.device
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

    fn activate(
        _: &mut RefContext,
        activation: Activation,
        x: &Buf,
        y: Option<&Buf>,
        out: &mut Buf,
        len: usize,
    ) -> Result<()> {
        elementwise::activate(activation, x, y, out, len)
    }

    fn add_bias(_: &mut RefContext, x: &mut Buf, bias: &Buf, shape: RowShape) -> Result<()> {
        elementwise::add_bias(x, bias, shape)
    }

    fn scaled_add_inplace(
        _: &mut RefContext,
        x: &mut Buf,
        y: &Buf,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        elementwise::scaled_add(x, y, scale, len)
    }

    fn softcap(_: &mut RefContext, x: &mut Buf, cap: f32, len: usize) -> Result<()> {
        elementwise::softcap(x, cap, len)
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

/// Nothing to capture.
impl BackendGraph for ReferenceBackend {}

/// Ranks exchange host memory.
impl BackendCollective for ReferenceBackend {
    fn group(ctx: &RefContext) -> Option<&GroupRank> {
        ctx.group.as_ref()
    }

    fn join(ctx: &mut RefContext, rank: GroupRank) -> Result<()> {
        join_once(&mut ctx.group, rank)
    }
}
