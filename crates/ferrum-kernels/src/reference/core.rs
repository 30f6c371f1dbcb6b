//! The device, its memory, and the table of ops: each is a function of the file named after it. What is
//! not here is a composition, with the body that the contract provides.

use super::buffer::RefBuffer;
use super::precision::{Precision, Uniform};
use super::{attention, conv, elementwise, gemm, heads, norm};
use crate::backend::*;
use ferrum_types::{Element, Error, FloatElement, Result};
use std::marker::PhantomData;

/// The host, computing with plain loops, on elements of one [`Precision`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reference<P>(PhantomData<P>);

/// The reference that decides: all in f32.
pub type ReferenceBackend = Reference<Uniform<f32>>;

impl<P> Reference<P> {
    /// The host.
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<P> Default for Reference<P> {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs each op when it is recorded.
#[derive(Debug)]
pub struct RefContext<P> {
    device: Reference<P>,
    group: Option<GroupHandle>,
}

type Floats = RefBuffer<f32>;
type Acts<P> = RefBuffer<<P as Precision>::Act>;

impl<P: Precision> Backend for Reference<P> {
    const NAME: &'static str = "reference";

    type Act = P::Act;
    type Residual = P::Residual;
    type Logit = P::Logit;
    type Buffer<T: Element> = RefBuffer<T>;
    type Weight = gemm::RefWeight;
    type Context = RefContext<P>;
    type Timer = HostTimer<Self>;

    fn open(ordinal: usize) -> Result<Self> {
        if ordinal == 0 {
            return Ok(Self::new());
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
            memory: None,
        }
    }

    fn new_context(&self) -> Result<RefContext<P>> {
        Ok(RefContext {
            device: *self,
            group: None,
        })
    }

    fn device(ctx: &RefContext<P>) -> &Self {
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
        _: &mut RefContext<P>,
        dst: &mut RefBuffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()> {
        let to = check::range("write", "dst", dst, offset, src.len())?;
        dst.0[to].copy_from_slice(src);
        Ok(())
    }

    fn read<T: Element>(
        _: &mut RefContext<P>,
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
        _: &mut RefContext<P>,
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

    fn gemm<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &Acts<P>,
        weight: &Self::Weight,
        out: &mut RefBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        gemm::gemm("gemm", x, weight, out, shape)
    }

    fn embedding_lookup(
        _: &mut RefContext<P>,
        table: &Self::Weight,
        ids: &RefBuffer<i32>,
        out: &mut RefBuffer<P::Residual>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::embedding_lookup("embedding_lookup", table, ids, out, shape)
    }

    fn gather_rows<T: Element>(
        _: &mut RefContext<P>,
        src: &RefBuffer<T>,
        rows: &RefBuffer<i32>,
        out: &mut RefBuffer<T>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::gather_rows(src, rows, out, shape)
    }

    fn argmax_rows(
        _: &mut RefContext<P>,
        x: &RefBuffer<P::Logit>,
        out: &mut RefBuffer<i32>,
        shape: RowShape,
    ) -> Result<()> {
        gemm::argmax_rows(x, out, shape)
    }

    fn rms_norm<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &RefBuffer<T>,
        weight: &Floats,
        out: &mut Acts<P>,
        shape: NormShape,
    ) -> Result<()> {
        norm::rms_norm(x, weight, out, shape)
    }

    fn layer_norm<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &RefBuffer<T>,
        weight: &Floats,
        bias: Option<&Floats>,
        out: &mut Acts<P>,
        shape: NormShape,
    ) -> Result<()> {
        norm::layer_norm(x, weight, bias, out, shape)
    }

    fn activate<T: FloatElement>(
        _: &mut RefContext<P>,
        activation: Activation,
        x: &RefBuffer<T>,
        y: Option<&RefBuffer<T>>,
        out: &mut RefBuffer<T>,
        len: usize,
    ) -> Result<()> {
        elementwise::activate(activation, x, y, out, len)
    }

    fn add_bias<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &mut RefBuffer<T>,
        bias: &Floats,
        shape: RowShape,
    ) -> Result<()> {
        elementwise::add_bias(x, bias, shape)
    }

    fn scaled_add_inplace<T: FloatElement, U: FloatElement>(
        _: &mut RefContext<P>,
        x: &mut RefBuffer<T>,
        y: &RefBuffer<U>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        elementwise::scaled_add(x, y, scale, len)
    }

    fn softcap<T: FloatElement>(
        _: &mut RefContext<P>,
        x: &mut RefBuffer<T>,
        cap: f32,
        len: usize,
    ) -> Result<()> {
        elementwise::softcap(x, cap, len)
    }

    fn qk_norm_rope(
        _: &mut RefContext<P>,
        x: &mut Acts<P>,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()> {
        heads::qk_norm_rope::<P>(x, layout, norm, rope, shape)
    }

    fn flash_attention(
        _: &mut RefContext<P>,
        q: &Acts<P>,
        kv: (&Acts<P>, &Acts<P>),
        sinks: Option<&Floats>,
        out: &mut Acts<P>,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()> {
        attention::flash_attention(q, kv, sinks, out, shape, config)
    }

    fn mla_attention(
        _: &mut RefContext<P>,
        q: &Acts<P>,
        latent: &Acts<P>,
        out: &mut Acts<P>,
        shape: MlaShape,
    ) -> Result<()> {
        attention::mla_attention(q, latent, out, shape)
    }

    fn conv1d(
        _: &mut RefContext<P>,
        x: &Acts<P>,
        weight: &Floats,
        bias: Option<&Floats>,
        out: &mut Acts<P>,
        shape: Conv1dShape,
    ) -> Result<()> {
        conv::conv1d(x, weight, bias, out, shape)
    }

    fn conv2d_patch(
        _: &mut RefContext<P>,
        image: &Acts<P>,
        weight: &Floats,
        bias: Option<&Floats>,
        rows: &mut Acts<P>,
        shape: PatchShape,
    ) -> Result<()> {
        conv::conv2d_patch(image, weight, bias, rows, shape)
    }
}

/// Nothing to capture.
impl<P: Precision> BackendGraph for Reference<P> {}

/// Ranks exchange host memory.
impl<P: Precision> BackendCollective for Reference<P> {
    fn group(ctx: &RefContext<P>) -> Option<&GroupHandle> {
        ctx.group.as_ref()
    }

    fn join(ctx: &mut RefContext<P>, rank: GroupHandle) -> Result<()> {
        join_once(&mut ctx.group, rank)
    }
}
