//! Ops made of other ops: the bodies behind the provided methods of the traits.
//!
//! A backend that implements the required functions alone is whole by these. They say what a fused op
//! means, not how fast it can be: most allocate buffers for a moment, and those that move rows write
//! lists of row numbers to the device. So a backend overrides what its models call in a steady step,
//! and all that runs inside a captured graph. Each checks its arguments in its own name before it
//! writes anything, so its errors are those of a backend that overrides it.

use super::*;
use ferrum_types::{Element, Error, FloatElement, Result};

/// Copies rows of `dim` elements: row `i` of `out` is row `rows[i]` of `src`.
fn move_rows<B: Backend, T: Element>(
    ctx: &mut B::Context,
    op: &'static str,
    src: &B::Buffer<T>,
    rows: impl Iterator<Item = usize>,
    out: &mut B::Buffer<T>,
    dim: usize,
) -> Result<()> {
    let numbers: std::result::Result<Vec<i32>, _> = rows.map(i32::try_from).collect();
    let numbers =
        numbers.map_err(|_| Error::invalid(op, format!("more than {} rows to move", i32::MAX)))?;
    if numbers.is_empty() || dim == 0 {
        return Ok(());
    }
    let mut rows = B::device(ctx).alloc(numbers.len())?;
    B::write(ctx, &mut rows, 0, &numbers)?;
    let shape = RowShape {
        rows: numbers.len(),
        dim,
    };
    B::gather_rows(ctx, src, &rows, out, shape)
}

/// [`Backend::fused_add_rms_norm`].
pub(super) fn fused_add_rms_norm<B: Backend>(
    ctx: &mut B::Context,
    residual: &mut Residual<B>,
    x: &Act<B>,
    weight: &B::Buffer<f32>,
    out: &mut Act<B>,
    shape: NormShape,
) -> Result<()> {
    let total = check::fused_add_rms_norm(residual, x, weight, out, shape)?;
    B::add_inplace(ctx, residual, x, total)?;
    B::rms_norm(ctx, residual, weight, out, shape)
}

/// The two ops over rows `[gate | up]`.
pub(super) fn gated<B: Backend>(
    ctx: &mut B::Context,
    op: &'static str,
    activation: Activation,
    gate_up: &Act<B>,
    out: &mut Act<B>,
    shape: RowShape,
) -> Result<()> {
    let total = check::gated(op, gate_up, out, shape)?;
    if total == 0 {
        return Ok(());
    }
    let RowShape { rows, dim } = shape;
    let mut halves = [B::device(ctx).alloc(total)?, B::device(ctx).alloc(total)?];
    for (i, half) in halves.iter_mut().enumerate() {
        move_rows::<B, _>(ctx, op, gate_up, (0..rows).map(|r| 2 * r + i), half, dim)?;
    }
    let [gate, up] = &halves;
    B::activate(ctx, activation, gate, Some(up), out, total)
}

/// [`Backend::add_bias`]: rows of nothing but the bias, added.
pub(super) fn add_bias<B: Backend, T: FloatElement>(
    ctx: &mut B::Context,
    x: &mut B::Buffer<T>,
    bias: &B::Buffer<f32>,
    shape: RowShape,
) -> Result<()> {
    let total = check::add_bias(x, bias, shape)?;
    if total == 0 {
        return Ok(());
    }
    let RowShape { rows, dim } = shape;
    let mut repeated = B::device(ctx).alloc(total)?;
    let first = std::iter::repeat_n(0, rows);
    move_rows::<B, _>(ctx, "add_bias", bias, first, &mut repeated, dim)?;
    B::add_inplace(ctx, x, &repeated, total)
}

/// `scale · x` in a buffer of its own, which is zero whenever this runs: in a replay it has what the last one left.
fn scaled<B: Backend, T: FloatElement>(
    ctx: &mut B::Context,
    x: &B::Buffer<T>,
    scale: f32,
    len: usize,
) -> Result<B::Buffer<T>> {
    let (zeros, mut scaled) = (B::device(ctx).alloc::<T>(len)?, B::device(ctx).alloc(len)?);
    B::copy_slice(ctx, &zeros, 0, &mut scaled, 0, len)?;
    B::scaled_add_inplace(ctx, &mut scaled, x, scale, len)?;
    Ok(scaled)
}

/// [`Backend::scale_inplace`].
pub(super) fn scale_inplace<B: Backend, T: FloatElement>(
    ctx: &mut B::Context,
    x: &mut B::Buffer<T>,
    scale: f32,
    len: usize,
) -> Result<()> {
    check::inplace("scale_inplace", x, len)?;
    let scaled = scaled::<B, T>(ctx, x, scale, len)?;
    B::copy_slice(ctx, &scaled, 0, x, 0, len)
}

/// [`Backend::softcap`].
pub(super) fn softcap<B: Backend, T: FloatElement>(
    ctx: &mut B::Context,
    x: &mut B::Buffer<T>,
    cap: f32,
    len: usize,
) -> Result<()> {
    check::softcap(x, cap, len)?;
    let scaled = scaled::<B, T>(ctx, x, 1.0 / cap, len)?;
    B::activate(ctx, Activation::Tanh, &scaled, None, x, len)?;
    B::scale_inplace(ctx, x, cap, len)
}

/// [`Backend::split_qkv`].
pub(super) fn split_qkv<B: Backend>(
    ctx: &mut B::Context,
    qkv: &Act<B>,
    outs: [&mut Act<B>; 3],
    shape: QkvShape,
) -> Result<()> {
    let op = "split_qkv";
    let [q, k, v] = outs;
    check::split_qkv::<B>(op, qkv, [&*q, &*k, &*v], QkvTransform::none(), shape)?;
    let QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim,
    } = shape;
    // Rows are moved in pieces that all heads are multiples of.
    let piece = common_divisor(head_dim, value_dim);
    if piece == 0 {
        return Ok(());
    }
    let row = shape.row_dim() / piece;
    let [q_end, k_end] = [heads, heads + kv_heads].map(|heads| heads * head_dim / piece);
    let parts = [(q, 0..q_end), (k, q_end..k_end), (v, k_end..row)];
    for (out, part) in parts {
        let rows = (0..tokens).flat_map(|t| part.clone().map(move |i| t * row + i));
        move_rows::<B, _>(ctx, op, qkv, rows, out, piece)?;
    }
    Ok(())
}

/// [`Backend::split_qkv_norm_rope`].
pub(super) fn split_qkv_norm_rope<B: Backend>(
    ctx: &mut B::Context,
    qkv: &Act<B>,
    outs: [&mut Act<B>; 3],
    transform: QkvTransform<'_, B>,
    shape: QkvShape,
) -> Result<()> {
    let op = "split_qkv_norm_rope";
    let [q, k, v] = outs;
    let lens = check::split_qkv::<B>(op, qkv, [&*q, &*k, &*v], transform, shape)?;
    let [q_parts, k_parts, v_parts] = transformed(ctx, qkv, transform, shape, lens)?;
    // [tokens, heads, head_dim] → [heads, tokens, head_dim]
    B::transpose_token_to_head(ctx, &q_parts, q, shape.q())?;
    B::transpose_token_to_head(ctx, &k_parts, k, shape.k())?;
    B::transpose_token_to_head(ctx, &v_parts, v, shape.v())
}

/// Token-major q, k and v of a checked projection, with norm and rotation.
fn transformed<B: Backend>(
    ctx: &mut B::Context,
    qkv: &Act<B>,
    transform: QkvTransform<'_, B>,
    shape: QkvShape,
    lens: check::QkvLen,
) -> Result<[Act<B>; 3]> {
    let alloc = |len| B::device(ctx).alloc(len);
    let (mut q, mut k, mut v) = (alloc(lens.q)?, alloc(lens.k)?, alloc(lens.v)?);
    B::split_qkv(ctx, qkv, &mut q, &mut k, &mut v, shape)?;
    let QkvTransform {
        q_norm,
        k_norm,
        rope,
    } = transform;
    let layout = HeadLayout::TokenMajor;
    B::qk_norm_rope(ctx, &mut q, layout, q_norm, rope, shape.q())?;
    B::qk_norm_rope(ctx, &mut k, layout, k_norm, rope, shape.k())?;
    Ok([q, k, v])
}

/// [`Backend::split_qkv_norm_rope_into_cache`].
pub(super) fn split_qkv_norm_rope_into_cache<B: Backend>(
    ctx: &mut B::Context,
    (qkv, q): (&Act<B>, &mut Act<B>),
    (k_cache, v_cache): (&mut Act<B>, &mut Act<B>),
    span: CacheSpan,
    transform: QkvTransform<'_, B>,
    shape: QkvShape,
) -> Result<()> {
    let caches = [&*k_cache, &*v_cache];
    let (lens, _) = check::split_qkv_norm_rope_into_cache(qkv, q, caches, span, transform, shape)?;
    let (mut k, mut v) = (B::device(ctx).alloc(lens.k)?, B::device(ctx).alloc(lens.v)?);
    B::split_qkv_norm_rope(ctx, qkv, q, &mut k, &mut v, transform, shape)?;
    put_head_major::<B>(ctx, &k, k_cache, span, shape.k())?;
    put_head_major::<B>(ctx, &v, v_cache, span, shape.v())
}

/// [`Backend::kv_cache_append_head_major`]: the tokens of a head lie together on both sides.
pub(super) fn kv_cache_append_head_major<B: Backend>(
    ctx: &mut B::Context,
    kv: [&Act<B>; 2],
    (k_cache, v_cache): (&mut Act<B>, &mut Act<B>),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    check::kv_cache_append_head_major(kv, [&*k_cache, &*v_cache], span, shape)?;
    put_head_major::<B>(ctx, kv[0], k_cache, span, shape)?;
    put_head_major::<B>(ctx, kv[1], v_cache, span, shape)
}

/// [`Backend::copy_columns`], row by row.
pub(super) fn copy_columns<B: Backend, T: Element>(
    ctx: &mut B::Context,
    src: &B::Buffer<T>,
    dst: &mut B::Buffer<T>,
    shape: CopyColumnsShape,
) -> Result<()> {
    if check::copy_columns(src, &*dst, shape)? {
        for row in 0..shape.rows {
            let from = row * shape.src_width + shape.src_first;
            let to = row * shape.dst_width + shape.dst_first;
            B::copy_slice(ctx, src, from, dst, to, shape.len)?;
        }
    }
    Ok(())
}

/// Copies head-major tokens to their place in a contiguous cache.
fn put_head_major<B: Backend>(
    ctx: &mut B::Context,
    src: &Act<B>,
    cache: &mut Act<B>,
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    let part = shape.tokens * shape.head_dim;
    for head in 0..shape.heads {
        let to = (head * span.capacity + span.offset) * shape.head_dim;
        B::copy_slice(ctx, src, head * part, cache, to, part)?;
    }
    Ok(())
}

/// Transposes to the layout `to` from the other one.
pub(super) fn transpose<B: Backend>(
    ctx: &mut B::Context,
    op: &'static str,
    src: &Act<B>,
    dst: &mut Act<B>,
    to: HeadLayout,
    shape: HeadsShape,
) -> Result<()> {
    check::transpose(op, src, dst, shape)?;
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = shape;
    let (outer, inner) = match to {
        HeadLayout::HeadMajor => (heads, tokens),
        HeadLayout::TokenMajor => (tokens, heads),
    };
    let rows = (0..outer).flat_map(|i| (0..inner).map(move |j| j * outer + i));
    move_rows::<B, _>(ctx, op, src, rows, dst, head_dim)
}

/// [`Backend::mla_attention`]: attention whose heads share one kv head, with the latent rows as keys
/// and values; of each value, the first `rank` elements are wanted.
pub(super) fn mla_attention<B: Backend>(
    ctx: &mut B::Context,
    q: &Act<B>,
    latent: &Act<B>,
    out: &mut Act<B>,
    shape: MlaShape,
) -> Result<()> {
    let op = "mla_attention";
    let lens = check::mla_attention(q, latent, out, shape)?;
    if lens.out == 0 {
        return Ok(());
    }
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        pos_offset,
        ..
    } = shape;
    let dim = shape.key_dim();
    let queries = HeadsShape {
        tokens: q_len,
        heads,
        head_dim: dim,
    };
    let (mut head_major, mut values) =
        (B::device(ctx).alloc(lens.q)?, B::device(ctx).alloc(lens.q)?);
    B::transpose_token_to_head(ctx, q, &mut head_major, queries)?;
    let flash = FlashShape {
        q_len,
        kv_len,
        kv_seq_stride: kv_len,
        pos_offset,
    };
    let kv = (latent, latent);
    let config = AttnConfig {
        value_dim: dim,
        ..shape.config()
    };
    B::flash_attention(ctx, &head_major, kv, None, &mut values, flash, &config)?;
    // [heads, q_len, dim] → [q_len, heads, rank], in pieces that both row lengths are multiples of.
    let piece = common_divisor(rank, dim);
    let (from, to) = (dim / piece, rank / piece);
    let rows = (0..q_len).flat_map(|t| {
        (0..heads).flat_map(move |h| (0..to).map(move |i| (h * q_len + t) * from + i))
    });
    move_rows::<B, _>(ctx, op, &values, rows, out, piece)
}

/// The greatest common divisor; the other number where one is zero.
fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// [`BackendMoeFused::moe_down`].
pub(crate) fn moe_down<B: BackendMoeFused>(
    ctx: &mut B::Context,
    x: &Act<B>,
    experts: ExpertProjection<'_, B>,
    (routing, weights): (&MoeRouting<B>, &MoeRouting<B>),
    pairs: &mut Act<B>,
    out: (&mut Act<B>, bool),
    shape: MoeShape,
) -> Result<()> {
    let input = ExpertInput::PerPair;
    B::moe_gemm(ctx, x, input, experts, routing, pairs, shape)?;
    let ExpertShape { experts, n, .. } = shape.experts;
    let route = RouteShape::softmax(shape.tokens, experts, shape.top_k);
    B::moe_weighted_sum(ctx, pairs, weights, out, route, n)
}

/// [`Backend::conv2d_patch`]: pixels become columns, `[taps, patches]`, and the projection a
/// convolution with a kernel of one.
pub(super) fn conv2d_patch<B: Backend>(
    ctx: &mut B::Context,
    image: &Act<B>,
    (weight, bias): (&B::Buffer<f32>, Option<&B::Buffer<f32>>),
    rows: &mut Act<B>,
    shape: PatchShape,
) -> Result<()> {
    let op = "conv2d_patch";
    let lens = check::conv2d_patch(image, weight, bias, rows, shape)?;
    if lens.out == 0 {
        return Ok(());
    }
    let PatchShape {
        channels,
        height,
        width,
        patch,
        out,
    } = shape;
    let across = width / patch;
    let (taps, patches) = (channels * patch * patch, height / patch * across);
    let pixel = move |tap: usize, p: usize| {
        // In the order of the weight: [channels, patch, patch].
        let (c, y, x) = (tap / patch / patch, tap / patch % patch, tap % patch);
        let line = c * height + p / across * patch + y;
        line * width + p % across * patch + x
    };
    let mut columns = B::device(ctx).alloc(check::elements(op, &[taps, patches])?)?;
    let pixels = (0..taps).flat_map(|tap| (0..patches).map(move |p| pixel(tap, p)));
    move_rows::<B, _>(ctx, op, image, pixels, &mut columns, 1)?;
    let conv = Conv1dShape {
        c_in: taps,
        c_out: out,
        len: patches,
        kernel: 1,
        stride: 1,
        padding: 0,
        groups: 1,
    };
    let mut channel_major = B::device(ctx).alloc(lens.out)?;
    B::conv1d(ctx, &columns, weight, bias, &mut channel_major, conv)?;
    // [out, patches] → [patches, out]
    let numbers = HeadsShape {
        tokens: patches,
        heads: out,
        head_dim: 1,
    };
    B::transpose_head_to_token(ctx, &channel_major, rows, numbers)
}

/// [`BackendKvDtype::kv_append_qkv`].
pub(super) fn kv_append_qkv<B: BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    input: PagedQkv<'_, B>,
    q: &mut Act<B>,
    kv: &mut KvLayer<B, K>,
    batch: &DeviceBatch<B>,
) -> Result<()> {
    let lens = check::kv_append_qkv((kv.group, &kv.shape), &input, q, batch)?;
    let PagedQkv {
        qkv,
        transform,
        shape,
    } = input;
    let [q_parts, k, v] = transformed(ctx, qkv, transform, shape, lens)?;
    B::kv_append(ctx, kv, &k, &v, batch)?;
    B::copy_slice(ctx, &q_parts, 0, q, 0, lens.q)
}

/// [`BackendState::copy_states`]: through a row in between.
pub(super) fn copy_states<B: Backend>(
    ctx: &mut B::Context,
    states: &mut B::Buffer<f32>,
    pairs: &[(usize, usize)],
    shape: StateShape,
) -> Result<()> {
    check::copy_states(states, pairs, shape)?;
    let len = shape.elements;
    let mut row = B::device(ctx).alloc::<f32>(if pairs.is_empty() { 0 } else { len })?;
    for (from, to) in pairs {
        B::copy_slice(ctx, states, from * len, &mut row, 0, len)?;
        B::copy_slice(ctx, &row, 0, states, to * len, len)?;
    }
    Ok(())
}

/// [`BackendState::causal_conv1d`] on the host: sums in f64 and in the order of the taps, rounded once.
pub(super) fn causal_conv1d<B: Backend>(
    ctx: &mut B::Context,
    x: &Act<B>,
    (weight, bias): (&B::Buffer<f32>, Option<&B::Buffer<f32>>),
    states: &mut B::Buffer<f32>,
    batch: &DeviceBatch<B>,
    out: &mut Act<B>,
    shape: CausalConvShape,
) -> Result<()> {
    let op = "causal_conv1d";
    let lens = check::causal_conv1d::<B>(x, (weight, bias), states, batch, out, shape)?;
    let CausalConvShape {
        channels,
        kernel,
        states: StateShape { slots, elements },
        offset,
    } = shape;
    let (starts, named) = (
        B::to_vec(ctx, &batch.query_starts)?,
        B::to_vec(ctx, &batch.state_slots)?,
    );
    let mut inputs = vec![B::Act::from_f32(0.0); lens.x];
    B::read(ctx, x, 0, &mut inputs)?;
    let weight = B::to_vec(ctx, weight)?;
    let bias = bias.map(|bias| B::to_vec(ctx, bias)).transpose()?;
    let mut kept = vec![0.0; lens.states];
    B::read(ctx, states, 0, &mut kept)?;
    let mut sums = inputs.clone();
    for s in 0..batch.shape.seqs {
        let of_batch = (&starts[..], &named[..]);
        let (tokens, slot) = check::state_sequence(op, batch.shape, of_batch, slots, s)?;
        if tokens.is_empty() {
            continue;
        }
        let state = &mut kept[slot * elements + offset..][..shape.state_len()];
        // What is in the state and then the inputs, `[kernel - 1 + tokens, channels]`.
        let new = inputs[tokens.start * channels..tokens.end * channels].iter();
        let all: Vec<f32> = state
            .iter()
            .copied()
            .chain(new.map(|x| x.to_f32()))
            .collect();
        for (i, token) in tokens.clone().enumerate() {
            for c in 0..channels {
                let taps = (0..kernel).map(|tap| {
                    let u = all[(i + tap) * channels + c];
                    f64::from(weight[c * kernel + tap]) * f64::from(u)
                });
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[c]));
                let sum = taps.fold(bias, |sum, product| sum + product);
                sums[token * channels + c] = B::Act::from_f32(sum as f32);
            }
        }
        state.copy_from_slice(&all[tokens.len() * channels..]);
    }
    B::write(ctx, states, 0, &kept)?;
    B::write(ctx, out, 0, &sums)
}
