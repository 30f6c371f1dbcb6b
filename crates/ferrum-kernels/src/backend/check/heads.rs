//! Heads: fused projections, norm and rotation, layouts, contiguous caches.

use super::{elements, len, require};
use crate::backend::{
    Act, Backend, CacheSpan, DeviceBuffer, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope,
};
use ferrum_types::{Error, Result};

/// Elements of a fused projection and its parts.
#[derive(Clone, Copy, Debug)]
pub struct QkvLen {
    /// All rows of the projection.
    pub qkv: usize,
    /// q.
    pub q: usize,
    /// k.
    pub k: usize,
    /// v.
    pub v: usize,
}

/// Elements of new tokens and of the contiguous cache that they go to.
#[derive(Clone, Copy, Debug)]
pub struct CacheLen {
    /// The new tokens.
    pub new: usize,
    /// The cache.
    pub cache: usize,
}

/// Elements of all heads.
pub(super) fn heads(op: &'static str, shape: HeadsShape) -> Result<usize> {
    elements(op, &[shape.tokens, shape.heads, shape.head_dim])
}

/// [`Backend::qk_norm_rope`]: elements of `x`.
pub fn qk_norm_rope<B: Backend>(
    x: &Act<B>,
    norm: Option<QkNorm<'_, B>>,
    rope: Option<Rope<'_, B>>,
    shape: HeadsShape,
) -> Result<usize> {
    let op = "qk_norm_rope";
    let total = heads(op, shape)?;
    len(op, "x", x, total)?;
    self::norm(op, norm, shape.head_dim)?;
    self::rope(op, rope, shape.tokens, shape.head_dim)?;
    Ok(total)
}

fn norm<B: Backend>(op: &'static str, norm: Option<QkNorm<'_, B>>, head_dim: usize) -> Result<()> {
    match norm {
        Some(norm) => len(op, "norm weight", norm.weight, head_dim),
        None => Ok(()),
    }
}

fn rope<B: Backend>(
    op: &'static str,
    rope: Option<Rope<'_, B>>,
    tokens: usize,
    head_dim: usize,
) -> Result<()> {
    let Some(rope) = rope else {
        return Ok(());
    };
    let rot_dim = rope.rot_dim;
    require(op, rot_dim.is_multiple_of(2) && rot_dim <= head_dim, || {
        format!("rot_dim is {rot_dim}, expected an even number up to {head_dim}")
    })?;
    len(op, "rope rows", rope.rows, tokens)?;
    // Which rows there have to be is in a buffer; a token needs one at least.
    let row = if tokens > 0 { rot_dim / 2 } else { 0 };
    len(op, "cos", rope.cos, row)?;
    len(op, "sin", rope.sin, row)
}

/// Rows of the tables of a checked rotation; `None` where nothing rotates.
pub fn rope_table_rows<B: Backend>(rope: &Rope<'_, B>) -> Option<usize> {
    let shorter = rope.cos.len().min(rope.sin.len());
    shorter.checked_div(rope.rot_dim / 2)
}

/// A fused projection with what happens to it.
pub(super) fn projection<B: Backend>(
    op: &'static str,
    qkv: &Act<B>,
    transform: QkvTransform<'_, B>,
    shape: QkvShape,
) -> Result<QkvLen> {
    let (q, k, v) = (
        heads(op, shape.q())?,
        heads(op, shape.k())?,
        heads(op, shape.v())?,
    );
    let row = shape.q_dim().checked_add(shape.k_dim());
    let Some(row) = row.and_then(|row| row.checked_add(shape.v_dim())) else {
        return Err(Error::invalid(op, format!("{shape:?} is too large")));
    };
    let all = elements(op, &[shape.tokens, row])?;
    len(op, "qkv", qkv, all)?;
    norm(op, transform.q_norm, shape.head_dim)?;
    norm(op, transform.k_norm, shape.head_dim)?;
    rope(op, transform.rope, shape.tokens, shape.head_dim)?;
    Ok(QkvLen { qkv: all, q, k, v })
}

/// [`Backend::split_qkv`] and [`Backend::split_qkv_norm_rope`]; `outs` are q, k and v.
pub fn split_qkv<B: Backend>(
    op: &'static str,
    qkv: &Act<B>,
    outs: [&Act<B>; 3],
    transform: QkvTransform<'_, B>,
    shape: QkvShape,
) -> Result<QkvLen> {
    let lens = projection(op, qkv, transform, shape)?;
    let [q, k, v] = outs;
    len(op, "q", q, lens.q)?;
    len(op, "k", k, lens.k)?;
    len(op, "v", v, lens.v)?;
    Ok(lens)
}

/// [`Backend::split_qkv_norm_rope_into_cache`]; `caches` are those of k and v.
pub fn split_qkv_norm_rope_into_cache<B: Backend>(
    qkv: &Act<B>,
    q: &Act<B>,
    caches: [&Act<B>; 2],
    span: CacheSpan,
    transform: QkvTransform<'_, B>,
    shape: QkvShape,
) -> Result<(QkvLen, [CacheLen; 2])> {
    let op = "split_qkv_norm_rope_into_cache";
    let lens = projection(op, qkv, transform, shape)?;
    len(op, "q", q, lens.q)?;
    let k = cache(op, ("k_cache", caches[0]), span, shape.k())?;
    let v = cache(op, ("v_cache", caches[1]), span, shape.v())?;
    Ok((lens, [k, v]))
}

/// [`Backend::kv_cache_append_head_major`]; `kv` and `caches` are those of k and v.
pub fn kv_cache_append_head_major<A: DeviceBuffer>(
    kv: [&A; 2],
    caches: [&A; 2],
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<CacheLen> {
    let op = "kv_cache_append_head_major";
    let total = heads(op, shape)?;
    len(op, "k", kv[0], total)?;
    len(op, "v", kv[1], total)?;
    cache(op, ("k_cache", caches[0]), span, shape)?;
    cache(op, ("v_cache", caches[1]), span, shape)
}

/// The tokens fit the cache and the cache its buffers.
fn cache<A: DeviceBuffer>(
    op: &'static str,
    (name, buffer): (&'static str, &A),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<CacheLen> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = shape;
    let CacheSpan { capacity, offset } = span;
    let fits = tokens <= capacity && offset <= capacity - tokens;
    require(op, fits, || {
        format!("{tokens} tokens at offset {offset} do not fit a cache of {capacity} tokens")
    })?;
    let lens = CacheLen {
        new: self::heads(op, shape)?,
        cache: elements(op, &[heads, capacity, head_dim])?,
    };
    len(op, name, buffer, lens.cache)?;
    Ok(lens)
}

/// The two transpositions: elements of `src` and `dst`.
pub fn transpose(
    op: &'static str,
    src: &impl DeviceBuffer,
    dst: &impl DeviceBuffer,
    shape: HeadsShape,
) -> Result<usize> {
    let total = heads(op, shape)?;
    len(op, "src", src, total)?;
    len(op, "dst", dst, total)?;
    Ok(total)
}
