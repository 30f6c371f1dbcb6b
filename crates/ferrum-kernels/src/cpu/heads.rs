//! Heads: splitting a fused projection, norm and rotation of each head, layouts.

use super::CpuBackend;
use crate::backend::{
    CacheSpan, HeadLayout, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope, check,
};
use ferrum_simd::exec::{Exec, Scratch};
use ferrum_simd::heads::{self, HeadTransform, Projection, Rotation};
use ferrum_simd::memory::CpuBuffer;
use ferrum_types::Result;

type Buf = CpuBuffer<f32>;

/// A rotation whose tokens all have their factors.
fn rotation<'a>(
    op: &'static str,
    rope: &Rope<'a, CpuBackend>,
    tokens: usize,
) -> Result<Rotation<'a>> {
    let rows = &rope.rows.as_slice()[..tokens];
    if let Some(table_rows) = check::rope_table_rows(rope) {
        check::rope_rows(op, rows, table_rows)?;
    }
    Ok(Rotation {
        cos: rope.cos.as_slice(),
        sin: rope.sin.as_slice(),
        rows,
        rot_dim: rope.rot_dim,
        style: rope.style,
    })
}

/// A norm and a rotation whose lengths have been checked.
fn transform<'a>(
    op: &'static str,
    norm: Option<QkNorm<'a, CpuBackend>>,
    rope: Option<Rope<'a, CpuBackend>>,
    tokens: usize,
) -> Result<HeadTransform<'a>> {
    let rotation = rope.map(|rope| rotation(op, &rope, tokens));
    Ok(HeadTransform {
        norm: norm.map(|norm| (norm.weight.as_slice(), norm.eps)),
        rotation: rotation.transpose()?,
    })
}

/// A fused projection whose lengths have been checked.
pub(crate) fn projection<'a>(
    op: &'static str,
    qkv: &'a Buf,
    with: QkvTransform<'a, CpuBackend>,
    shape: QkvShape,
) -> Result<Projection<'a>> {
    let q = transform(op, with.q_norm, with.rope, shape.tokens)?;
    let k = transform(op, with.k_norm, with.rope, shape.tokens)?;
    Ok(Projection::new(qkv.as_slice(), [q, k], shape))
}

/// Splits rows `[q | k | v]` into three buffers of one layout.
pub(crate) fn split(
    exec: &Exec,
    scratch: &mut Scratch,
    op: &'static str,
    (qkv, transform): (&Buf, QkvTransform<'_, CpuBackend>),
    outs: [&mut Buf; 3],
    layout: HeadLayout,
    shape: QkvShape,
) -> Result<()> {
    let [q, k, v] = outs;
    let lens = check::split_qkv(op, qkv, [&*q, &*k, &*v], transform, shape)?;
    let projection = projection(op, qkv, transform, shape)?;
    let outs = [
        &mut q.as_mut_slice()[..lens.q],
        &mut k.as_mut_slice()[..lens.k],
        &mut v.as_mut_slice()[..lens.v],
    ];
    heads::split(exec, scratch, projection, outs, layout)
}

/// Splits, norms and rotates; head-major q, and k and v into a contiguous cache.
pub(crate) fn split_into_cache(
    exec: &Exec,
    scratch: &mut Scratch,
    (qkv, transform): (&Buf, QkvTransform<'_, CpuBackend>),
    q: &mut Buf,
    caches: (&mut Buf, &mut Buf),
    span: CacheSpan,
    shape: QkvShape,
) -> Result<()> {
    let op = "split_qkv_norm_rope_into_cache";
    let (k, v) = caches;
    let (lens, [k_len, v_len]) =
        check::split_qkv_norm_rope_into_cache(qkv, q, [&*k, &*v], span, transform, shape)?;
    let projection = projection(op, qkv, transform, shape)?;
    let q = &mut q.as_mut_slice()[..lens.q];
    let k = &mut k.as_mut_slice()[..k_len.cache];
    let v = &mut v.as_mut_slice()[..v_len.cache];
    heads::split_into_cache(exec, scratch, projection, q, (k, v), span)
}

/// In place: norm, then rotation of every head.
pub(crate) fn qk_norm_rope(
    exec: &Exec,
    x: &mut Buf,
    layout: HeadLayout,
    (norm, rope): (Option<QkNorm<'_, CpuBackend>>, Option<Rope<'_, CpuBackend>>),
    shape: HeadsShape,
) -> Result<()> {
    check::qk_norm_rope(x, norm, rope, shape)?;
    let transform = transform("qk_norm_rope", norm, rope, shape.tokens)?;
    heads::qk_norm_rope(exec, x.as_mut_slice(), layout, transform, shape);
    Ok(())
}

/// Head-major k and v → a contiguous cache.
pub(crate) fn append_head_major(
    exec: &Exec,
    (k, v): (&Buf, &Buf),
    caches: (&mut Buf, &mut Buf),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    let (k_cache, v_cache) = caches;
    let lens = check::kv_cache_append_head_major([k, v], [&*k_cache, &*v_cache], span, shape)?;
    let caches = (
        &mut k_cache.as_mut_slice()[..lens.cache],
        &mut v_cache.as_mut_slice()[..lens.cache],
    );
    heads::append_head_major(exec, (k.as_slice(), v.as_slice()), caches, span, shape);
    Ok(())
}

/// Transposes to the layout `to` from the other one.
pub(crate) fn transpose(
    exec: &Exec,
    op: &'static str,
    src: &Buf,
    dst: &mut Buf,
    to: HeadLayout,
    shape: HeadsShape,
) -> Result<()> {
    check::transpose(op, src, dst, shape)?;
    heads::transpose(exec, src.as_slice(), dst.as_mut_slice(), to, shape);
    Ok(())
}
