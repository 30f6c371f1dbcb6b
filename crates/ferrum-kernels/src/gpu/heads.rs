//! Heads: splitting a fused projection, norm and rotation of each head, layouts.
//!
//! Every layout is a pair of strides, so splitting, transposing and writing to a contiguous cache
//! are one shader ([`copy_heads`]), and so is norm and rotation with any of them as the destination.

use super::GpuBackend;
use super::buffer::GpuBuffer;
use super::context::{Bind, GpuContext, LANES, P};
use super::pipeline::Kernel;
use crate::backend::check::{self, elements};
use crate::backend::{
    Backend, CacheSpan, HeadLayout, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope, RopeStyle,
};
use ferrum_types::{Error, Result};

/// Elements of a head that the shaders have workgroup memory for.
pub(super) const MAX_HEAD_DIM: usize = 1024;

/// The shaders hold a query and a sum of values in workgroup memory.
pub(super) fn check_dim(op: &'static str, dim: usize) -> Result<()> {
    if dim <= MAX_HEAD_DIM {
        return Ok(());
    }
    Err(Error::Unsupported {
        op,
        backend: GpuBackend::NAME,
        reason: format!("heads have {dim} elements, the shaders hold {MAX_HEAD_DIM}"),
        hint: "use --backend cpu".to_owned(),
    })
}

pub(super) static COPY_HEADS: Kernel = Kernel {
    name: "copy_heads",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/copy_heads.wgsl"),
    ],
    access: "rw",
    constants: &[],
};
pub(super) static QK_NORM_ROPE: Kernel = Kernel {
    name: "qk_norm_rope",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/lane_sum.wgsl"),
        include_str!("shaders/head_transform.wgsl"),
        include_str!("shaders/qk_norm_rope.wgsl"),
    ],
    access: "wrrrr",
    constants: &[],
};
pub(super) static SPLIT_QK_NORM_ROPE: Kernel = Kernel {
    name: "split_qk_norm_rope",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/lane_sum.wgsl"),
        include_str!("shaders/head_transform.wgsl"),
        include_str!("shaders/split_qk_norm_rope.wgsl"),
    ],
    access: "rwwrrrrr",
    constants: &[],
};

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

    pub(super) fn params(self) -> [P; 3] {
        [P::U(self.offset), P::U(self.token), P::U(self.head)]
    }
}

/// Copies heads from one layout to another; the caller has checked that both are in bounds.
fn copy_heads(
    ctx: &mut GpuContext,
    op: &'static str,
    (src, from): (&GpuBuffer<f32>, Layout),
    (dst, to): (&mut GpuBuffer<f32>, Layout),
    shape: HeadsShape,
) -> Result<()> {
    let total = shape.len();
    let [so, st, sh] = from.params();
    let [to, tt, th] = to.params();
    let sizes = [P::U(total), P::U(shape.heads), P::U(shape.head_dim)];
    let [total_p, heads, head_dim] = sizes;
    ctx.run(
        op,
        (&COPY_HEADS, &[]),
        [src.into(), dst.into()],
        &[total_p, heads, head_dim, so, st, sh, to, tt, th],
        total.div_ceil(LANES),
    )
}

/// The parameters of a rotation and the buffers that it needs.
fn rope_arguments<'a>(rope: Option<Rope<'a, GpuBackend>>) -> ([P; 3], [Bind<'a>; 3]) {
    let Some(rope) = rope else {
        return ([P::U(0); 3], [Bind::Nothing; 3]);
    };
    let interleaved = rope.style == RopeStyle::Interleaved;
    let table_rows = check::rope_table_rows(&rope).unwrap_or(0);
    (
        [
            P::U(rope.rot_dim),
            P::U(usize::from(interleaved)),
            // The shader stays inside the tables whatever the rows say.
            P::U(table_rows.saturating_sub(1)),
        ],
        [rope.cos.into(), rope.sin.into(), rope.rows.into()],
    )
}

/// Whether there is a norm, its `eps`, its weight.
fn norm_arguments<'a>(norm: Option<QkNorm<'a, GpuBackend>>) -> ([P; 2], Bind<'a>) {
    match norm {
        Some(norm) => ([P::U(1), P::F(norm.eps)], norm.weight.into()),
        None => ([P::U(0), P::F(0.0)], Bind::Nothing),
    }
}

/// In place: norm, then rotation of every head.
pub(super) fn qk_norm_rope(
    ctx: &mut GpuContext,
    x: &mut GpuBuffer<f32>,
    layout: HeadLayout,
    norm: Option<QkNorm<'_, GpuBackend>>,
    rope: Option<Rope<'_, GpuBackend>>,
    shape: HeadsShape,
) -> Result<()> {
    const OP: &str = "qk_norm_rope";
    let total = check::qk_norm_rope(x, norm, rope, shape)?;
    check_dim(OP, shape.head_dim)?;
    let ([has_norm, eps], weight) = norm_arguments(norm);
    let ([rot_dim, style, last_row], [cos, sin, rows]) = rope_arguments(rope);
    if total == 0 {
        return Ok(());
    }
    let [_, token_stride, head_stride] = Layout::of(layout, shape).params();
    ctx.run(
        OP,
        (&QK_NORM_ROPE, &[]),
        [x.into(), weight, cos, sin, rows],
        &[
            P::U(shape.tokens),
            P::U(shape.heads),
            P::U(shape.head_dim),
            rot_dim,
            style,
            last_row,
            token_stride,
            head_stride,
            has_norm,
            eps,
        ],
        elements(OP, &[shape.tokens, shape.heads])?,
    )
}

/// Where k begins in a row of the fused projection, with heads `head_dim` apart.
pub(super) fn k_in_row(shape: QkvShape) -> Layout {
    Layout {
        offset: shape.q_dim(),
        token: shape.row_dim(),
        head: shape.head_dim,
    }
}

/// Where v begins in a row of the fused projection.
pub(super) fn v_in_row(shape: QkvShape) -> Layout {
    Layout {
        offset: shape.q_dim() + shape.k_dim(),
        token: shape.row_dim(),
        head: shape.value_dim,
    }
}

/// A destination of heads: buffer and layout.
pub(super) type Target<'a> = (&'a mut GpuBuffer<f32>, Layout);

/// q and k of a fused projection, normed and rotated, to their destinations in one dispatch. The
/// caller has checked all arguments.
pub(super) fn split_qk(
    ctx: &mut GpuContext,
    op: &'static str,
    qkv: &GpuBuffer<f32>,
    (q, q_to): Target<'_>,
    (k, k_to): Target<'_>,
    transform: QkvTransform<'_, GpuBackend>,
    shape: QkvShape,
) -> Result<()> {
    check_dim(op, shape.head_dim)?;
    let ([q_norm, q_eps], q_weight) = norm_arguments(transform.q_norm);
    let ([k_norm, k_eps], k_weight) = norm_arguments(transform.k_norm);
    let ([rot_dim, style, last_row], [cos, sin, rows]) = rope_arguments(transform.rope);
    if shape.tokens == 0 || shape.row_dim() == 0 {
        return Ok(());
    }
    let [q_offset, q_token, q_head] = q_to.params();
    let [k_offset, k_token, k_head] = k_to.params();
    ctx.run(
        op,
        (&SPLIT_QK_NORM_ROPE, &[]),
        [
            qkv.into(),
            q.into(),
            k.into(),
            q_weight,
            k_weight,
            cos,
            sin,
            rows,
        ],
        &[
            P::U(shape.tokens),
            P::U(shape.heads),
            P::U(shape.head_dim),
            rot_dim,
            style,
            last_row,
            P::U(shape.kv_heads),
            P::U(shape.row_dim()),
            q_offset,
            q_token,
            q_head,
            k_offset,
            k_token,
            k_head,
            q_norm,
            q_eps,
            k_norm,
            k_eps,
        ],
        elements(op, &[shape.tokens, shape.heads + shape.kv_heads])?,
    )
}

/// Rows of a fused projection → token-major q, k and v.
pub(super) fn split_qkv(
    ctx: &mut GpuContext,
    qkv: &GpuBuffer<f32>,
    q: &mut GpuBuffer<f32>,
    k: &mut GpuBuffer<f32>,
    v: &mut GpuBuffer<f32>,
    shape: QkvShape,
) -> Result<()> {
    const OP: &str = "split_qkv";
    let plain = QkvTransform::<GpuBackend>::none();
    check::split_qkv(OP, qkv, [&*q, &*k, &*v], plain, shape)?;
    let q_in_row = Layout {
        offset: 0,
        ..k_in_row(shape)
    };
    let parts = [
        (q_in_row, q, shape.q()),
        (k_in_row(shape), k, shape.k()),
        (v_in_row(shape), v, shape.v()),
    ];
    for (from, dst, heads) in parts {
        let to = Layout::of(HeadLayout::TokenMajor, heads);
        copy_heads(ctx, OP, (qkv, from), (dst, to), heads)?;
    }
    Ok(())
}

/// Split, norm, rotation; head-major q, k and v.
pub(super) fn split_qkv_norm_rope(
    ctx: &mut GpuContext,
    qkv: &GpuBuffer<f32>,
    q: &mut GpuBuffer<f32>,
    (k, v): (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
    transform: QkvTransform<'_, GpuBackend>,
    shape: QkvShape,
) -> Result<()> {
    const OP: &str = "split_qkv_norm_rope";
    check::split_qkv(OP, qkv, [&*q, &*k, &*v], transform, shape)?;
    let q_to = Layout::of(HeadLayout::HeadMajor, shape.q());
    let k_to = Layout::of(HeadLayout::HeadMajor, shape.k());
    let v_to = Layout::of(HeadLayout::HeadMajor, shape.v());
    split_qk(ctx, OP, qkv, (q, q_to), (k, k_to), transform, shape)?;
    copy_heads(ctx, OP, (qkv, v_in_row(shape)), (v, v_to), shape.v())
}

/// Split, norm, rotation; head-major q, and k and v into a contiguous cache.
pub(super) fn split_qkv_norm_rope_into_cache(
    ctx: &mut GpuContext,
    qkv: &GpuBuffer<f32>,
    q: &mut GpuBuffer<f32>,
    (k_cache, v_cache): (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
    span: CacheSpan,
    transform: QkvTransform<'_, GpuBackend>,
    shape: QkvShape,
) -> Result<()> {
    const OP: &str = "split_qkv_norm_rope_into_cache";
    let caches = [&*k_cache, &*v_cache];
    check::split_qkv_norm_rope_into_cache(qkv, q, caches, span, transform, shape)?;
    let q_to = Layout::of(HeadLayout::HeadMajor, shape.q());
    let k_to = Layout::of_cache(span, shape.head_dim);
    let v_to = Layout::of_cache(span, shape.value_dim);
    split_qk(ctx, OP, qkv, (q, q_to), (k_cache, k_to), transform, shape)?;
    copy_heads(ctx, OP, (qkv, v_in_row(shape)), (v_cache, v_to), shape.v())
}

/// Head-major k and v → a contiguous cache.
pub(super) fn kv_cache_append_head_major(
    ctx: &mut GpuContext,
    k: &GpuBuffer<f32>,
    v: &GpuBuffer<f32>,
    (k_cache, v_cache): (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    const OP: &str = "kv_cache_append_head_major";
    check::kv_cache_append_head_major([k, v], [&*k_cache, &*v_cache], span, shape)?;
    let from = Layout::of(HeadLayout::HeadMajor, shape);
    let to = Layout::of_cache(span, shape.head_dim);
    copy_heads(ctx, OP, (k, from), (k_cache, to), shape)?;
    copy_heads(ctx, OP, (v, from), (v_cache, to), shape)
}

/// Transposes to the layout `to` from the other one.
pub(super) fn transpose(
    ctx: &mut GpuContext,
    op: &'static str,
    src: &GpuBuffer<f32>,
    dst: &mut GpuBuffer<f32>,
    to: HeadLayout,
    shape: HeadsShape,
) -> Result<()> {
    check::transpose(op, src, dst, shape)?;
    let from = match to {
        HeadLayout::HeadMajor => HeadLayout::TokenMajor,
        HeadLayout::TokenMajor => HeadLayout::HeadMajor,
    };
    let (from, to) = (Layout::of(from, shape), Layout::of(to, shape));
    copy_heads(ctx, op, (src, from), (dst, to), shape)
}
