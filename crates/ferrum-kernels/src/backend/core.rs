//! [`Backend`]: devices, typed buffers, contexts and the ops that every device can do.

use super::*;
use ferrum_types::{Element, Error, FloatElement, Result, SrcDtype};

/// Activations of a backend.
pub type Act<B> = <B as Backend>::Buffer<<B as Backend>::Act>;

/// The residual stream of a backend.
pub type Residual<B> = <B as Backend>::Buffer<<B as Backend>::Residual>;

/// Logits of a backend, of tokens and of experts.
pub type Logits<B> = <B as Backend>::Buffer<<B as Backend>::Logit>;

/// Memory on a device.
pub trait DeviceBuffer: Send + Sync + 'static {
    /// Elements.
    fn len(&self) -> usize;

    /// Whether it has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What `ferrum devices` says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Backend name as in `--backend`.
    pub backend: &'static str,
    /// Index among the devices of this backend.
    pub ordinal: usize,
    /// The device's own name.
    pub name: String,
    /// Instruction set, driver, or what else decides speed.
    pub detail: String,
    /// Whether a GPU is only imitated by the CPU, so that it should not be chosen for speed.
    pub software: bool,
    /// Its memory at the time of asking, where the device tells.
    pub memory: Option<DeviceMemory>,
}

/// Whether a row's result is independent of batching, chunking and drafting: of a prompt that is computed in one piece or in several, of a sequence that is
/// alone or among others, of a token that was drafted and one that was not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BatchInvariance {
    /// On the row alone, because its sums have a fixed order.
    BitExact,
    /// On what is computed beside it, too: the squared difference between two results is at most this part of
    /// their square (NMSE).
    WithinNmse(f64),
}

/// A piece of a packed upload: `len` elements of the host's slice from `from` on, which go to a buffer from `to` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadPiece {
    /// First element in the slice.
    pub from: usize,
    /// First element in the buffer.
    pub to: usize,
    /// Elements.
    pub len: usize,
}

impl UploadPiece {
    /// The elements of the slice.
    ///
    /// # Errors
    /// `Shape` when the slice ends before.
    pub fn of<'a, T>(&self, src: &'a [T]) -> Result<&'a [T]> {
        let piece = src.get(self.from..).and_then(|src| src.get(..self.len));
        piece.ok_or(Error::Shape {
            op: "write_packed",
            what: "src",
            found: src.len(),
            expected: self.from.saturating_add(self.len),
        })
    }
}

/// A device and the ops that every device can do. The value is a handle: cloning it is cheap and two
/// handles to different devices live side by side.
///
/// Ops are associated functions on a context, so that a context is all that a caller needs.
/// Names of shapes: `rows` or `tokens` outermost, see the [module](super) for the conventions.
/// Every op fails with [`ferrum_types::Error::Shape`] when a buffer is shorter than its shape
/// ([`check`] has the checks).
///
/// Methods with a body are compositions of the others. They make a backend whole, and fix what the op
/// means; they may allocate and take several passes over memory, so a backend overrides for speed what
/// its models call in a steady step.
#[expect(
    clippy::wrong_self_convention,
    reason = "`from_slice` and its like make something on `self`, which is a device"
)]
pub trait Backend: Clone + Send + Sync + Sized + 'static {
    /// Name as in `--backend` (`cpu`, `reference`, …).
    const NAME: &'static str;

    /// The type that weights without kernels in this backend are dequantised to at load.
    const DEQUANTIZED_DTYPE: SrcDtype = SrcDtype::F32;

    /// Element of activations: what products, attention and activation functions read and write.
    type Act: FloatElement;
    /// Element of the residual stream, a sum over all layers.
    type Residual: FloatElement;
    /// Element of logits of the vocabulary and of a router: what choices are made by.
    type Logit: FloatElement;
    /// Device memory for elements of one type.
    type Buffer<T: Element>: DeviceBuffer;
    /// A dense matrix `[n, k]` in the backend's favourite form.
    type Weight: Send + Sync;
    /// Accumulates work in order.
    type Context: Send;
    /// Measures spans of a context on the device.
    type Timer: BackendTimer<Self>;

    // ---- devices -------------------------------------------------------------------------------

    /// The devices that [`open`](Self::open) would accept; empty when there are none.
    ///
    /// The provided one opens them all, one after the other.
    fn devices() -> Vec<DeviceInfo> {
        let device = |ordinal| {
            let info = Self::open(ordinal).ok()?.info();
            Some(DeviceInfo { ordinal, ..info })
        };
        (0..).map_while(device).collect()
    }

    /// Opens the device number `ordinal`.
    ///
    /// # Errors
    /// [`NoDevice`](ferrum_types::Error::NoDevice) names what was missing (library, driver, device).
    fn open(ordinal: usize) -> Result<Self>;

    /// What this device is. The provided one knows the name of its backend alone.
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            backend: Self::NAME,
            ordinal: 0,
            name: Self::NAME.into(),
            detail: String::new(),
            software: false,
            memory: None,
        }
    }

    /// This device for encoders, if it computes them otherwise. Their states are compared as a whole, and no token is chosen by
    /// them, so products may keep fewer bits of factors of f32: 17 at least. Buffers and weights of either device can be used in
    /// contexts of the other, between which work has no order but that of [`sync`](Self::sync).
    fn for_encoders(&self) -> Option<Self> {
        None
    }

    /// A new, empty context on this device.
    fn new_context(&self) -> Result<Self::Context>;

    /// The device of a context.
    fn device(ctx: &Self::Context) -> &Self;

    /// Whether recorded work runs while the host goes on, so that the next step is worth recording before the last one
    /// was read.
    fn overlaps(&self) -> bool {
        false
    }

    /// Bytes that this device takes for itself once it computes, as one of `ranks` of a group: workspaces of libraries, and buffers
    /// through which ranks exchange. Memory plans count them as scratch. The provided device takes none.
    fn workspace_bytes(&self, ranks: usize) -> u64 {
        let _ = ranks;
        0
    }

    /// What this device promises of rows. Where it is less than equal bits, a prefix that is found in the cache and
    /// a draft that is accepted may lead to another text than computing all of it anew; the conformance suite holds
    /// the backend against what it says.
    fn batch_invariance(&self) -> BatchInvariance {
        BatchInvariance::BitExact
    }

    /// Waits until all recorded work is done. The provided one reads a byte.
    ///
    /// # Errors
    /// Whatever failed on the device since the last call.
    fn sync(ctx: &mut Self::Context) -> Result<()> {
        let byte = Self::device(ctx).alloc::<u8>(1)?;
        Self::read(ctx, &byte, 0, &mut [0])
    }

    // ---- memory --------------------------------------------------------------------------------

    /// `len` zeros.
    fn alloc<T: Element>(&self, len: usize) -> Result<Self::Buffer<T>>;

    /// `len` zeros in memory of the host, for copies to and from this device. By default they are in ordinary memory:
    /// that of a device which computes there, and of one that can reach none of the host's for longer than a copy
    /// (wgpu's, whose mapped memory is a stop on the way of each).
    ///
    /// # Errors
    /// `OutOfMemory`.
    fn host_buffer<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        Ok(HostBuffer::plain(len))
    }

    /// A buffer with a copy of `data`. Provided: [`write`](Self::write) on a context of its own.
    fn from_slice<T: Element>(&self, data: &[T]) -> Result<Self::Buffer<T>> {
        let mut buffer = self.alloc(data.len())?;
        let mut ctx = self.new_context()?;
        Self::write(&mut ctx, &mut buffer, 0, data)?;
        Self::sync(&mut ctx)?;
        Ok(buffer)
    }

    /// Records a copy of `src` to `dst[offset..]`. `src` may be reused when this returns.
    fn write<T: Element>(
        ctx: &mut Self::Context,
        dst: &mut Self::Buffer<T>,
        offset: usize,
        src: &[T],
    ) -> Result<()>;

    /// Records copies of pieces of `src` to buffers, as [`write`](Self::write) would one after the other. This is how the
    /// state of a step goes up: a device for which each transfer has a price makes one of it.
    ///
    /// By default a `write` for each piece.
    ///
    /// # Errors
    /// `Shape` for a piece that `src` or its buffer does not have; the pieces before it may have been recorded.
    fn write_packed<'b, 'p>(
        ctx: &mut Self::Context,
        src: &[i32],
        to: impl IntoIterator<Item = (&'b mut Self::Buffer<i32>, &'p [UploadPiece])>,
    ) -> Result<()> {
        for (dst, pieces) in to {
            for piece in pieces {
                Self::write(ctx, dst, piece.to, piece.of(src)?)?;
            }
        }
        Ok(())
    }

    /// Runs what is recorded and copies `src[offset..offset + out.len()]` to the host.
    ///
    /// The copy joins the recorded work, so that step + read-back is one submission.
    fn read<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<()>;

    /// Submits what is recorded, and begins to copy `src[offset..offset + len]`, as it is by then, to the host, which
    /// may go on and record more. By default it waits.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn begin_read<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        offset: usize,
        len: usize,
    ) -> Result<PendingRead<T>> {
        let mut out = vec![T::zeroed(); len];
        Self::read(ctx, src, offset, &mut out)?;
        Ok(PendingRead::Ready(out))
    }

    /// [`read`](Self::read) of a whole buffer into a new vector.
    fn to_vec<T: Element>(ctx: &mut Self::Context, src: &Self::Buffer<T>) -> Result<Vec<T>> {
        let mut out = vec![T::zeroed(); src.len()];
        Self::read(ctx, src, 0, &mut out)?;
        Ok(out)
    }

    /// Loads a dense matrix whose rows come from `parts`, one after the other (a fused projection is
    /// several parts; an ordinary weight is one). All parts have `cols` columns.
    ///
    /// Copies each byte at most once; keeps the precision of the file unless the backend's docs say
    /// otherwise.
    ///
    /// # Errors
    /// [`Shape`](ferrum_types::Error::Shape) when bytes and sizes disagree.
    fn from_weight_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<Self::Weight>;

    /// [`from_weight_parts`](Self::from_weight_parts) for a table whose rows are [looked up](Self::embedding_lookup), and which products
    /// may read as well: a backend that rounds other matrices as its products take them keeps all bits of this one. The provided one is
    /// that of all matrices.
    fn from_table_parts(&self, parts: &[WeightPart<'_>], cols: usize) -> Result<Self::Weight> {
        self.from_weight_parts(parts, cols)
    }

    /// Cuts the sums over inputs that products with a matrix are, so that they have the bits that the ranks of a group get, who each
    /// sum a part. The provided one cuts nothing, which backends may do whose activations are rounded in another way on ranks,
    /// or that promise no equal bits for numbers of ranks.
    fn split_sums(_weight: &mut Self::Weight, _split: SumSplit) {}

    /// Loads a dense matrix: [`from_weight_parts`](Self::from_weight_parts) with one part.
    fn from_weight_bytes(
        &self,
        raw: &[u8],
        dtype: SrcDtype,
        shape: MatShape,
    ) -> Result<Self::Weight> {
        self.from_weight_parts(&[WeightPart::new(raw, dtype, shape.rows)], shape.cols)
    }

    /// `dst[dst_offset..][..len] = src[src_offset..][..len]`.
    fn copy_slice<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        src_offset: usize,
        dst: &mut Self::Buffer<T>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()>;

    /// Columns of the rows of `src` to columns of the rows of `dst`, whose other columns stay as they are:
    /// `dst[row, dst_first..][..len] = src[row, src_first..][..len]`. Rows are `[rows, src_width]` and
    /// `[rows, dst_width]`.
    ///
    /// Provided: a [`copy_slice`](Self::copy_slice) for each row.
    fn copy_columns<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        dst: &mut Self::Buffer<T>,
        shape: CopyColumnsShape,
    ) -> Result<()> {
        compose::copy_columns::<Self, T>(ctx, src, dst, shape)
    }

    // ---- matrices ------------------------------------------------------------------------------

    /// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`, accumulated in at least f32.
    fn gemm<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::Weight,
        out: &mut Self::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()>;

    /// `out[rows, n / 2] = activation(gate) · up`, where [`gemm`](Self::gemm) gives rows `[gate | up]`, for which `room` is there.
    ///
    /// Provided: [`gemm`](Self::gemm), then [`activate_split`](Self::activate_split).
    fn gemm_gated(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::Weight,
        activation: Activation,
        (room, out): (&mut Act<Self>, &mut Act<Self>),
        shape: GemmShape,
    ) -> Result<()> {
        let halves = check::gemm_gated("gemm_gated", x, (&*room, &*out), shape)?;
        Self::gemm(ctx, x, weight, room, shape)?;
        Self::activate_split(ctx, activation, room, out, halves)
    }

    /// `out[i, :] = table[ids[i], :]` for `[tokens, dim]` rows; an id outside the table gives zeros. Of a matrix that was not
    /// [loaded as a table](Self::from_table_parts), numbers are what products take them for.
    fn embedding_lookup(
        ctx: &mut Self::Context,
        table: &Self::Weight,
        ids: &Self::Buffer<i32>,
        out: &mut Residual<Self>,
        shape: RowShape,
    ) -> Result<()>;

    /// `out[i, :] = src[rows[i], :]`; an index outside `src` gives zeros.
    fn gather_rows<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        rows: &Self::Buffer<i32>,
        out: &mut Self::Buffer<T>,
        shape: RowShape,
    ) -> Result<()>;

    /// `out[i]` = index of the largest element of row `i`; the lowest index of equals; NaN never wins
    /// (a row of NaN gives 0).
    fn argmax_rows(
        ctx: &mut Self::Context,
        x: &Logits<Self>,
        out: &mut Self::Buffer<i32>,
        shape: RowShape,
    ) -> Result<()>;

    // ---- norms ---------------------------------------------------------------------------------

    /// `out = x / √(mean(x²) + eps) · weight`, row by row. `weight` is `[dim]`.
    fn rms_norm<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &Self::Buffer<T>,
        weight: &Self::Buffer<f32>,
        out: &mut Act<Self>,
        shape: NormShape,
    ) -> Result<()>;

    /// `residual += x; out = rms_norm(residual)`.
    ///
    /// Provided: [`add_inplace`](Self::add_inplace), then [`rms_norm`](Self::rms_norm).
    fn fused_add_rms_norm(
        ctx: &mut Self::Context,
        residual: &mut Residual<Self>,
        x: &Act<Self>,
        weight: &Self::Buffer<f32>,
        out: &mut Act<Self>,
        shape: NormShape,
    ) -> Result<()> {
        compose::fused_add_rms_norm::<Self>(ctx, residual, x, weight, out, shape)
    }

    /// `out = (x - mean) / √(var + eps) · weight + bias`, row by row, with the biased variance.
    fn layer_norm<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &Self::Buffer<T>,
        weight: &Self::Buffer<f32>,
        bias: Option<&Self::Buffer<f32>>,
        out: &mut Act<Self>,
        shape: NormShape,
    ) -> Result<()>;

    // ---- element-wise --------------------------------------------------------------------------

    /// `out = f(x)`, or `out = f(x) · y` with `y`, `len` elements. What `f` is, [`Activation`] says.
    fn activate<T: FloatElement>(
        ctx: &mut Self::Context,
        activation: Activation,
        x: &Self::Buffer<T>,
        y: Option<&Self::Buffer<T>>,
        out: &mut Self::Buffer<T>,
        len: usize,
    ) -> Result<()>;

    /// `out = gelu(x)`, exact form, `len` elements.
    /// Provided: [`activate`](Self::activate).
    fn gelu(ctx: &mut Self::Context, x: &Act<Self>, out: &mut Act<Self>, len: usize) -> Result<()> {
        check::activate("gelu", x, None, out, len)?;
        Self::activate(ctx, Activation::Gelu(GeluKind::Exact), x, None, out, len)
    }

    /// `out = gelu(x)`, tanh form, `len` elements.
    /// Provided: [`activate`](Self::activate).
    fn gelu_tanh(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        out: &mut Act<Self>,
        len: usize,
    ) -> Result<()> {
        check::activate("gelu_tanh", x, None, out, len)?;
        Self::activate(ctx, Activation::Gelu(GeluKind::Tanh), x, None, out, len)
    }

    /// `out = x · sigmoid(x)`, `len` elements.
    /// Provided: [`activate`](Self::activate).
    fn silu(ctx: &mut Self::Context, x: &Act<Self>, out: &mut Act<Self>, len: usize) -> Result<()> {
        check::activate("silu", x, None, out, len)?;
        Self::activate(ctx, Activation::Silu, x, None, out, len)
    }

    /// Rows of `gate_up` are `[gate (dim) | up (dim)]`; `out[rows, dim] = silu(gate) · up`.
    ///
    /// Provided: copies both halves to buffers of its own.
    fn fused_silu_mul_split(
        ctx: &mut Self::Context,
        gate_up: &Act<Self>,
        out: &mut Act<Self>,
        shape: RowShape,
    ) -> Result<()> {
        let op = "fused_silu_mul_split";
        compose::gated::<Self>(ctx, op, Activation::Silu, gate_up, out, shape)
    }

    /// Rows of `gate_up` are `[gate (dim) | up (dim)]`; `out[rows, dim] = gelu(gate) · up`.
    ///
    /// Provided: copies both halves to buffers of its own.
    fn fused_gelu_mul_split(
        ctx: &mut Self::Context,
        gate_up: &Act<Self>,
        out: &mut Act<Self>,
        kind: GeluKind,
        shape: RowShape,
    ) -> Result<()> {
        let op = "fused_gelu_mul_split";
        compose::gated::<Self>(ctx, op, Activation::Gelu(kind), gate_up, out, shape)
    }

    /// Rows of `gate_up` are `[gate (dim) | up (dim)]`; `out[rows, dim] = activation(gate) · up`, with SiLU or GELU.
    ///
    /// Provided: the fused op of the activation.
    ///
    /// # Errors
    /// `InvalidArgument` for another activation.
    fn activate_split(
        ctx: &mut Self::Context,
        activation: Activation,
        gate_up: &Act<Self>,
        out: &mut Act<Self>,
        shape: RowShape,
    ) -> Result<()> {
        match activation {
            Activation::Silu => Self::fused_silu_mul_split(ctx, gate_up, out, shape),
            Activation::Gelu(kind) => Self::fused_gelu_mul_split(ctx, gate_up, out, kind, shape),
            other => Err(Error::invalid(
                "activate_split",
                format!("the activation is {other:?}, expected SiLU or GELU"),
            )),
        }
    }

    /// `x[r, :] += bias` for every row.
    ///
    /// Provided: the bias repeated in a buffer of its own, added.
    fn add_bias<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &mut Self::Buffer<T>,
        bias: &Self::Buffer<f32>,
        shape: RowShape,
    ) -> Result<()> {
        compose::add_bias::<Self, T>(ctx, x, bias, shape)
    }

    /// `x += y`, `len` elements.
    ///
    /// Provided: [`scaled_add_inplace`](Self::scaled_add_inplace) with 1.
    fn add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Self::Context,
        x: &mut Self::Buffer<T>,
        y: &Self::Buffer<U>,
        len: usize,
    ) -> Result<()> {
        check::zip_inplace("add_inplace", x, y, len)?;
        Self::scaled_add_inplace(ctx, x, y, 1.0, len)
    }

    /// `x += scale · y`, `len` elements.
    fn scaled_add_inplace<T: FloatElement, U: FloatElement>(
        ctx: &mut Self::Context,
        x: &mut Self::Buffer<T>,
        y: &Self::Buffer<U>,
        scale: f32,
        len: usize,
    ) -> Result<()>;

    /// `x = x · scale`, `len` elements (embedding and residual multipliers).
    ///
    /// Provided: through a buffer of its own.
    fn scale_inplace<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &mut Self::Buffer<T>,
        scale: f32,
        len: usize,
    ) -> Result<()> {
        compose::scale_inplace::<Self, T>(ctx, x, scale, len)
    }

    /// `out = x · y`, `len` elements.
    /// Provided: [`activate`](Self::activate).
    fn mul(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        y: &Act<Self>,
        out: &mut Act<Self>,
        len: usize,
    ) -> Result<()> {
        check::activate("mul", x, Some(y), out, len)?;
        Self::activate(ctx, Activation::Identity, x, Some(y), out, len)
    }

    /// `x = cap · tanh(x / cap)`, `len` elements.
    ///
    /// Provided: through a buffer of its own.
    fn softcap<T: FloatElement>(
        ctx: &mut Self::Context,
        x: &mut Self::Buffer<T>,
        cap: f32,
        len: usize,
    ) -> Result<()> {
        compose::softcap::<Self, T>(ctx, x, cap, len)
    }

    // ---- heads ---------------------------------------------------------------------------------

    /// Splits rows of a fused projection into token-major `q`, `k` and `v`.
    ///
    /// Provided: [`gather_rows`](Self::gather_rows) of heads, by lists that it writes to the device.
    fn split_qkv(
        ctx: &mut Self::Context,
        qkv: &Act<Self>,
        q: &mut Act<Self>,
        k: &mut Act<Self>,
        v: &mut Act<Self>,
        shape: QkvShape,
    ) -> Result<()> {
        compose::split_qkv::<Self>(ctx, qkv, [q, k, v], shape)
    }

    /// In place on heads: optional RMS norm of each head, then optional rotation.
    fn qk_norm_rope(
        ctx: &mut Self::Context,
        x: &mut Act<Self>,
        layout: HeadLayout,
        norm: Option<QkNorm<'_, Self>>,
        rope: Option<Rope<'_, Self>>,
        shape: HeadsShape,
    ) -> Result<()>;

    /// [`split_qkv`](Self::split_qkv) + [`qk_norm_rope`](Self::qk_norm_rope) on q and k; the three
    /// outputs are head-major `[heads, tokens, head_dim]`.
    ///
    /// Provided: the ops in its name, with buffers of its own between them.
    fn split_qkv_norm_rope(
        ctx: &mut Self::Context,
        qkv: &Act<Self>,
        q: &mut Act<Self>,
        k: &mut Act<Self>,
        v: &mut Act<Self>,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        compose::split_qkv_norm_rope(ctx, qkv, [q, k, v], transform, shape)
    }

    /// [`split_qkv_norm_rope`](Self::split_qkv_norm_rope) with k and v written to a contiguous
    /// head-major cache `[kv_heads, capacity, head_dim]` at `span.offset`.
    ///
    /// `caches` is `(k_cache, v_cache)`.
    ///
    /// Provided: the ops in its name, with buffers of its own between them.
    fn split_qkv_norm_rope_into_cache(
        ctx: &mut Self::Context,
        qkv: &Act<Self>,
        q: &mut Act<Self>,
        caches: (&mut Act<Self>, &mut Act<Self>),
        span: CacheSpan,
        transform: QkvTransform<'_, Self>,
        shape: QkvShape,
    ) -> Result<()> {
        let io = (qkv, q);
        compose::split_qkv_norm_rope_into_cache(ctx, io, caches, span, transform, shape)
    }

    /// Copies head-major `k` and `v` (`[kv_heads, tokens, head_dim]`) into a contiguous head-major
    /// cache at `span.offset`. `caches` is `(k_cache, v_cache)`.
    ///
    /// Provided: a [`copy_slice`](Self::copy_slice) for each head.
    fn kv_cache_append_head_major(
        ctx: &mut Self::Context,
        k: &Act<Self>,
        v: &Act<Self>,
        caches: (&mut Act<Self>, &mut Act<Self>),
        span: CacheSpan,
        shape: HeadsShape,
    ) -> Result<()> {
        compose::kv_cache_append_head_major::<Self>(ctx, [k, v], caches, span, shape)
    }

    /// `[heads, tokens, head_dim]` → `[tokens, heads, head_dim]`.
    ///
    /// Provided: [`gather_rows`](Self::gather_rows) by a list that it writes to the device.
    fn transpose_head_to_token(
        ctx: &mut Self::Context,
        src: &Act<Self>,
        dst: &mut Act<Self>,
        shape: HeadsShape,
    ) -> Result<()> {
        let (op, to) = ("transpose_head_to_token", HeadLayout::TokenMajor);
        compose::transpose::<Self>(ctx, op, src, dst, to, shape)
    }

    /// `[tokens, heads, head_dim]` → `[heads, tokens, head_dim]`.
    ///
    /// Provided: as [`transpose_head_to_token`](Self::transpose_head_to_token).
    fn transpose_token_to_head(
        ctx: &mut Self::Context,
        src: &Act<Self>,
        dst: &mut Act<Self>,
        shape: HeadsShape,
    ) -> Result<()> {
        let (op, to) = ("transpose_token_to_head", HeadLayout::HeadMajor);
        compose::transpose::<Self>(ctx, op, src, dst, to, shape)
    }

    // ---- attention -----------------------------------------------------------------------------

    /// Softmax attention over a contiguous cache, without materialised scores.
    ///
    /// `q`: `[heads, q_len, head_dim]`, `out`: `[heads, q_len, value_dim]`. `kv`: `(k, v)`,
    /// `[kv_heads, kv_seq_stride, head_dim or value_dim]` with `kv_len` valid tokens. Query `i` has key index
    /// `pos_offset + i`. `sinks`, `[heads]`, is one more logit for each head that takes part in the
    /// softmax and adds no value. A query that sees no key gives zeros.
    fn flash_attention(
        ctx: &mut Self::Context,
        q: &Act<Self>,
        kv: (&Act<Self>, &Act<Self>),
        sinks: Option<&Self::Buffer<f32>>,
        out: &mut Act<Self>,
        shape: FlashShape,
        config: &AttnConfig,
    ) -> Result<()>;

    /// Multi-head latent attention, absorbed: all heads share one latent cache.
    ///
    /// `q`: `[q_len, heads, rank + rope_dim]`; `latent`: `[kv_len, rank + rope_dim]` (keys are whole
    /// rows, values their first `rank` elements); `out`: `[q_len, heads, rank]`.
    ///
    /// Provided: [`flash_attention`](Self::flash_attention) with one kv head, between buffers of its
    /// own.
    fn mla_attention(
        ctx: &mut Self::Context,
        q: &Act<Self>,
        latent: &Act<Self>,
        out: &mut Act<Self>,
        shape: MlaShape,
    ) -> Result<()> {
        compose::mla_attention::<Self>(ctx, q, latent, out, shape)
    }

    // ---- convolutions --------------------------------------------------------------------------

    /// `x`: `[c_in, len]`, `weight`: `[c_out, c_in/groups, kernel]`, `bias`: `[c_out]`,
    /// `out`: `[c_out, out_len]`.
    fn conv1d(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::Buffer<f32>,
        bias: Option<&Self::Buffer<f32>>,
        out: &mut Act<Self>,
        shape: Conv1dShape,
    ) -> Result<()>;

    /// `image`: `[channels, height, width]`, `weight`: `[out, channels, patch, patch]`,
    /// `bias`: `[out]`, `rows`: `[(height/patch)·(width/patch), out]`, patches in row-major order.
    ///
    /// Provided: [`conv1d`](Self::conv1d) over pixels that it gathers into a buffer of its own.
    fn conv2d_patch(
        ctx: &mut Self::Context,
        image: &Act<Self>,
        weight: &Self::Buffer<f32>,
        bias: Option<&Self::Buffer<f32>>,
        rows: &mut Act<Self>,
        shape: PatchShape,
    ) -> Result<()> {
        compose::conv2d_patch::<Self>(ctx, image, (weight, bias), rows, shape)
    }
}
