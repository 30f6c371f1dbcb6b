//! Heads: splitting a fused projection, norm and rotation of each head, layouts.
//!
//! Every layout is a pair of strides, so splitting, transposing and writing to a contiguous cache are one kernel, and so
//! is norm and rotation with any of them as the destination.

use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::CudaAct;
use crate::backend::check::{self, elements};
use crate::backend::{
    CacheSpan, HeadLayout, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope, RopeStyle,
};
use ferrum_types::Result;

/// Where element 0 of head `h` of token `t` lies: `offset + t · token + h · head`.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) offset: usize,
    pub(super) token: usize,
    pub(super) head: usize,
}

impl Layout {
    pub(super) fn of(layout: HeadLayout, shape: HeadsShape) -> Self {
        let (token, head) = match layout {
            HeadLayout::TokenMajor => (shape.heads * shape.head_dim, shape.head_dim),
            HeadLayout::HeadMajor => (shape.head_dim, shape.tokens * shape.head_dim),
        };
        Layout {
            offset: 0,
            token,
            head,
        }
    }

    fn of_cache(span: CacheSpan, head_dim: usize) -> Self {
        Layout {
            offset: span.offset * head_dim,
            token: head_dim,
            head: span.capacity * head_dim,
        }
    }

    pub(super) fn args(self) -> [Arg; 3] {
        [self.offset, self.token, self.head].map(Arg::Long)
    }
}

/// Heads somewhere: the address of their buffer and their layout in it.
pub(super) type Heads = (Arg, Layout);

/// Copies heads from one layout to another; the caller has checked that both are in bounds.
fn copy_heads<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (src, from): Heads,
    (dst, to): Heads,
    shape: HeadsShape,
) -> Result<()> {
    let total = shape.len();
    let ([f0, f1, f2], [t0, t1, t2]) = (from.args(), to.args());
    let (heads, dim) = (Arg::Int(shape.heads), Arg::Int(shape.head_dim));
    let args = [
        dst,
        src,
        Arg::Long(total),
        heads,
        dim,
        f0,
        f1,
        f2,
        t0,
        t1,
        t2,
    ];
    ctx.launch_elementwise(op, (KernelFile::Heads, "copy_heads"), total, args)
}

/// What happens to each head.
type Transform<'a, A> = (
    Option<QkNorm<'a, CudaBackend<A>>>,
    Option<Rope<'a, CudaBackend<A>>>,
);

/// The weight of a norm, which is null without one, and its epsilon.
pub(super) fn norm_args<A: CudaAct>(norm: Option<QkNorm<'_, CudaBackend<A>>>) -> (Arg, Arg) {
    let (weight, eps) = norm.map_or((Arg::At(0), 0.0), |norm| (norm.weight.into(), norm.eps));
    (weight, Arg::Float(eps))
}

/// Cosines, sines, rows (null without rotation), rotated elements, whether pairs are neighbours, and the last row, so that a
/// kernel stays inside the tables whatever the rows say.
pub(super) fn rope_args<A: CudaAct>(rope: Option<Rope<'_, CudaBackend<A>>>) -> [Arg; 6] {
    let Some(rope) = rope else {
        let (null, none) = (Arg::At(0), Arg::Int(0));
        return [null, null, null, none, none, none];
    };
    let last = check::rope_table_rows(&rope).unwrap_or(0).saturating_sub(1);
    [
        rope.cos.into(),
        rope.sin.into(),
        rope.rows.into(),
        Arg::Int(rope.rot_dim),
        (rope.style == RopeStyle::Interleaved).into(),
        Arg::Int(last),
    ]
}

/// Norms and rotates heads while it moves them; the caller has checked all arguments.
pub(super) fn transform_heads<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (src, from): Heads,
    (dst, to): Heads,
    (norm, rope): Transform<'_, A>,
    shape: HeadsShape,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let blocks = elements(op, &[shape.tokens, shape.heads])?;
    let ([f0, f1, f2], [t0, t1, t2]) = (from.args(), to.args());
    let (weight, eps) = norm_args(norm);
    let [cos, sin, rows, rot_dim, interleaved, last_row] = rope_args(rope);
    let args = [
        dst,
        src,
        Arg::Int(shape.heads),
        Arg::Int(shape.head_dim),
        f0,
        f1,
        f2,
        t0,
        t1,
        t2,
        weight,
        eps,
        cos,
        sin,
        rows,
        rot_dim,
        interleaved,
        last_row,
    ];
    let grid = (blocks, 128, shape.head_dim * 4);
    ctx.launch(op, (KernelFile::Heads, "transform_heads"), grid, args)
}

/// In place: norm, then rotation of every head.
pub(super) fn qk_norm_rope<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    x: &mut CudaBuffer<A>,
    layout: HeadLayout,
    norm: Option<QkNorm<'_, CudaBackend<A>>>,
    rope: Option<Rope<'_, CudaBackend<A>>>,
    shape: HeadsShape,
) -> Result<()> {
    check::qk_norm_rope(x, norm, rope, shape)?;
    let heads = (Arg::from(x), Layout::of(layout, shape));
    transform_heads(ctx, "qk_norm_rope", heads, heads, (norm, rope), shape)
}

/// Where q, k and v begin in a row of the fused projection.
pub(super) fn in_row(shape: QkvShape) -> [Layout; 3] {
    let part = |offset, head| Layout {
        offset,
        token: shape.row_dim(),
        head,
    };
    [
        part(0, shape.head_dim),
        part(shape.q_dim(), shape.head_dim),
        part(shape.q_dim() + shape.k_dim(), shape.value_dim),
    ]
}

/// q and k of a fused projection, normed and rotated, to their destinations. The caller has checked all arguments.
pub(super) fn split_qk<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    qkv: &CudaBuffer<A>,
    [q, k]: [Heads; 2],
    transform: QkvTransform<'_, CudaBackend<A>>,
    shape: QkvShape,
) -> Result<()> {
    let QkvTransform {
        q_norm,
        k_norm,
        rope,
    } = transform;
    let [q_from, k_from, _] = in_row(shape).map(|layout| (Arg::from(qkv), layout));
    transform_heads(ctx, op, q_from, q, (q_norm, rope), shape.q())?;
    transform_heads(ctx, op, k_from, k, (k_norm, rope), shape.k())
}

/// Rows of a fused projection → token-major q, k and v.
pub(super) fn split_qkv<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    qkv: &CudaBuffer<A>,
    [q, k, v]: [&mut CudaBuffer<A>; 3],
    shape: QkvShape,
) -> Result<()> {
    const OP: &str = "split_qkv";
    let plain = QkvTransform::<CudaBackend<A>>::none();
    check::split_qkv(OP, qkv, [&*q, &*k, &*v], plain, shape)?;
    let parts = [(q, shape.q()), (k, shape.k()), (v, shape.v())];
    for (from, (dst, heads)) in in_row(shape).into_iter().zip(parts) {
        let to = Layout::of(HeadLayout::TokenMajor, heads);
        copy_heads(ctx, OP, (qkv.into(), from), (dst.into(), to), heads)?;
    }
    Ok(())
}

/// Split, norm, rotation; head-major q, k and v.
pub(super) fn split_qkv_norm_rope<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    qkv: &CudaBuffer<A>,
    [q, k, v]: [&mut CudaBuffer<A>; 3],
    transform: QkvTransform<'_, CudaBackend<A>>,
    shape: QkvShape,
) -> Result<()> {
    const OP: &str = "split_qkv_norm_rope";
    check::split_qkv(OP, qkv, [&*q, &*k, &*v], transform, shape)?;
    let head_major = |heads| Layout::of(HeadLayout::HeadMajor, heads);
    let q_to = (q.into(), head_major(shape.q()));
    let k_to = (k.into(), head_major(shape.k()));
    split_qk(ctx, OP, qkv, [q_to, k_to], transform, shape)?;
    let [_, _, v_from] = in_row(shape);
    let v_to = (v.into(), head_major(shape.v()));
    copy_heads(ctx, OP, (qkv.into(), v_from), v_to, shape.v())
}

/// Split, norm, rotation; k and v to a contiguous cache.
pub(super) fn split_qkv_norm_rope_into_cache<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    qkv: &CudaBuffer<A>,
    q: &mut CudaBuffer<A>,
    (k_cache, v_cache): (&mut CudaBuffer<A>, &mut CudaBuffer<A>),
    span: CacheSpan,
    transform: QkvTransform<'_, CudaBackend<A>>,
    shape: QkvShape,
) -> Result<()> {
    const OP: &str = "split_qkv_norm_rope_into_cache";
    let caches = [&*k_cache, &*v_cache];
    check::split_qkv_norm_rope_into_cache(qkv, q, caches, span, transform, shape)?;
    let q_to = (q.into(), Layout::of(HeadLayout::HeadMajor, shape.q()));
    let k_to = (k_cache.into(), Layout::of_cache(span, shape.head_dim));
    let v_to = (v_cache.into(), Layout::of_cache(span, shape.value_dim));
    split_qk(ctx, OP, qkv, [q_to, k_to], transform, shape)?;
    let [_, _, v_from] = in_row(shape);
    copy_heads(ctx, OP, (qkv.into(), v_from), v_to, shape.v())
}

/// Head-major k and v → a contiguous cache.
pub(super) fn kv_cache_append_head_major<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    k: &CudaBuffer<A>,
    v: &CudaBuffer<A>,
    (k_cache, v_cache): (&mut CudaBuffer<A>, &mut CudaBuffer<A>),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    const OP: &str = "kv_cache_append_head_major";
    check::kv_cache_append_head_major([k, v], [&*k_cache, &*v_cache], span, shape)?;
    let from = Layout::of(HeadLayout::HeadMajor, shape);
    let to = Layout::of_cache(span, shape.head_dim);
    copy_heads(ctx, OP, (k.into(), from), (k_cache.into(), to), shape)?;
    copy_heads(ctx, OP, (v.into(), from), (v_cache.into(), to), shape)
}

/// Transposes to the layout `to` from the other one.
pub(super) fn transpose<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    src: &CudaBuffer<A>,
    dst: &mut CudaBuffer<A>,
    to: HeadLayout,
    shape: HeadsShape,
) -> Result<()> {
    check::transpose(op, src, dst, shape)?;
    let from = match to {
        HeadLayout::HeadMajor => HeadLayout::TokenMajor,
        HeadLayout::TokenMajor => HeadLayout::HeadMajor,
    };
    let (from, to) = (Layout::of(from, shape), Layout::of(to, shape));
    copy_heads(ctx, op, (src.into(), from), (dst.into(), to), shape)
}
