//! Heads: splitting a fused projection, norm and rotation of each head, layouts.

use super::ReferenceBackend;
use super::buffer::RefBuffer;
use super::norm::rms_factor;
use crate::backend::{
    CacheSpan, HeadLayout, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope, RopeStyle, check,
};
use ferrum_types::Result;

/// Where head `head` of token `token` begins.
fn offset(layout: HeadLayout, shape: HeadsShape, token: usize, head: usize) -> usize {
    let vector = match layout {
        HeadLayout::TokenMajor => token * shape.heads + head,
        HeadLayout::HeadMajor => head * shape.tokens + token,
    };
    vector * shape.head_dim
}

/// A [`Rope`] whose tokens all have their factors.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    rows: &'a [i32],
    rot_dim: usize,
    style: RopeStyle,
}

impl<'a> Rotation<'a> {
    fn new(op: &'static str, rope: &Rope<'a, ReferenceBackend>, tokens: usize) -> Result<Self> {
        let rows = &rope.rows.0[..tokens];
        if let Some(table_rows) = check::rope_table_rows(rope) {
            check::rope_rows(op, rows, table_rows)?;
        }
        Ok(Rotation {
            cos: &rope.cos.0,
            sin: &rope.sin.0,
            rows,
            rot_dim: rope.rot_dim,
            style: rope.style,
        })
    }

    /// `(a, b) → (a·cos - b·sin, b·cos + a·sin)` for every pair of the rotated part.
    fn apply(&self, head: &mut [f64], token: usize) {
        let half = self.rot_dim / 2;
        let table = self.rows[token] as usize * half;
        for i in 0..half {
            let (first, second) = match self.style {
                RopeStyle::HalfSplit => (i, i + half),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let (cos, sin) = (
                f64::from(self.cos[table + i]),
                f64::from(self.sin[table + i]),
            );
            let (a, b) = (head[first], head[second]);
            head[first] = a * cos - b * sin;
            head[second] = b * cos + a * sin;
        }
    }
}

/// What happens to a head on its way: optional norm, then optional rotation, rounded once.
#[derive(Clone, Copy)]
struct HeadTransform<'a> {
    norm: Option<(&'a [f32], f32)>,
    rotation: Option<Rotation<'a>>,
}

impl<'a> HeadTransform<'a> {
    fn new(
        op: &'static str,
        norm: Option<QkNorm<'a, ReferenceBackend>>,
        rope: Option<Rope<'a, ReferenceBackend>>,
        tokens: usize,
    ) -> Result<Self> {
        let rotation = rope.map(|rope| Rotation::new(op, &rope, tokens));
        Ok(HeadTransform {
            norm: norm.map(|norm| (norm.weight.0.as_slice(), norm.eps)),
            rotation: rotation.transpose()?,
        })
    }

    fn apply(&self, head: &mut [f32], token: usize) {
        let mut values: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
        if let Some((weight, eps)) = self.norm {
            let factor = rms_factor(head, eps);
            for (value, &w) in values.iter_mut().zip(weight) {
                *value *= factor * f64::from(w);
            }
        }
        if let Some(rotation) = &self.rotation {
            rotation.apply(&mut values, token);
        }
        for (x, value) in head.iter_mut().zip(values) {
            *x = value as f32;
        }
    }
}

/// In place: norm, then rotation of every head.
pub(super) fn qk_norm_rope(
    x: &mut RefBuffer<f32>,
    layout: HeadLayout,
    norm: Option<QkNorm<'_, ReferenceBackend>>,
    rope: Option<Rope<'_, ReferenceBackend>>,
    shape: HeadsShape,
) -> Result<()> {
    check::qk_norm_rope(x, norm, rope, shape)?;
    let transform = HeadTransform::new("qk_norm_rope", norm, rope, shape.tokens)?;
    for token in 0..shape.tokens {
        for head in 0..shape.heads {
            let at = offset(layout, shape, token, head);
            transform.apply(&mut x.0[at..][..shape.head_dim], token);
        }
    }
    Ok(())
}

/// The three parts of a fused projection, transformed, each `[tokens, heads, head_dim]`.
pub(super) struct SplitQkv {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

/// Splits checked rows `[q | k | v]` and transforms q and k.
pub(super) fn split(
    op: &'static str,
    qkv: &RefBuffer<f32>,
    transform: QkvTransform<'_, ReferenceBackend>,
    shape: QkvShape,
) -> Result<SplitQkv> {
    let QkvShape {
        tokens,
        heads,
        kv_heads,
        head_dim,
    } = shape;
    let q_transform = HeadTransform::new(op, transform.q_norm, transform.rope, tokens)?;
    let k_transform = HeadTransform::new(op, transform.k_norm, transform.rope, tokens)?;

    let mut parts = SplitQkv {
        q: Vec::new(),
        k: Vec::new(),
        v: Vec::new(),
    };
    for token in 0..tokens {
        let (q, kv) = qkv.0[token * shape.row_dim()..][..shape.row_dim()].split_at(shape.q_dim());
        let (k, v) = kv.split_at(shape.kv_dim());
        parts.q.extend_from_slice(q);
        parts.k.extend_from_slice(k);
        parts.v.extend_from_slice(v);
        for head in 0..heads {
            let at = offset(HeadLayout::TokenMajor, shape.q(), token, head);
            q_transform.apply(&mut parts.q[at..][..head_dim], token);
        }
        for head in 0..kv_heads {
            let at = offset(HeadLayout::TokenMajor, shape.kv(), token, head);
            k_transform.apply(&mut parts.k[at..][..head_dim], token);
        }
    }
    Ok(parts)
}

/// Rows of a fused projection → token-major q, k and v.
pub(super) fn split_qkv(
    qkv: &RefBuffer<f32>,
    q: &mut RefBuffer<f32>,
    k: &mut RefBuffer<f32>,
    v: &mut RefBuffer<f32>,
    shape: QkvShape,
) -> Result<()> {
    let op = "split_qkv";
    let plain = QkvTransform::<ReferenceBackend>::none();
    check::split_qkv(op, qkv, [q, k, v], plain, shape)?;
    let parts = split(op, qkv, plain, shape)?;
    for (part, out) in [(parts.q, q), (parts.k, k), (parts.v, v)] {
        out.0[..part.len()].copy_from_slice(&part);
    }
    Ok(())
}

/// Split, norm, rotation; head-major q, k and v.
pub(super) fn split_qkv_norm_rope(
    qkv: &RefBuffer<f32>,
    q: &mut RefBuffer<f32>,
    k: &mut RefBuffer<f32>,
    v: &mut RefBuffer<f32>,
    transform: QkvTransform<'_, ReferenceBackend>,
    shape: QkvShape,
) -> Result<()> {
    let op = "split_qkv_norm_rope";
    check::split_qkv(op, qkv, [q, k, v], transform, shape)?;
    let parts = split(op, qkv, transform, shape)?;
    let to = HeadLayout::HeadMajor;
    relayout(&parts.q, &mut q.0, to, shape.q());
    relayout(&parts.k, &mut k.0, to, shape.kv());
    relayout(&parts.v, &mut v.0, to, shape.kv());
    Ok(())
}

/// Split, norm, rotation; head-major q, and k and v into a contiguous cache.
pub(super) fn split_qkv_norm_rope_into_cache(
    qkv: &RefBuffer<f32>,
    q: &mut RefBuffer<f32>,
    caches: (&mut RefBuffer<f32>, &mut RefBuffer<f32>),
    span: CacheSpan,
    transform: QkvTransform<'_, ReferenceBackend>,
    shape: QkvShape,
) -> Result<()> {
    let op = "split_qkv_norm_rope_into_cache";
    let (k_cache, v_cache) = caches;
    check::split_qkv_norm_rope_into_cache(qkv, q, [k_cache, v_cache], span, transform, shape)?;
    let parts = split(op, qkv, transform, shape)?;
    for (part, cache) in [(&parts.k, k_cache), (&parts.v, v_cache)] {
        append((part, HeadLayout::TokenMajor), cache, span, shape.kv());
    }
    relayout(&parts.q, &mut q.0, HeadLayout::HeadMajor, shape.q());
    Ok(())
}

/// Head-major k and v → a contiguous cache.
pub(super) fn kv_cache_append_head_major(
    k: &RefBuffer<f32>,
    v: &RefBuffer<f32>,
    caches: (&mut RefBuffer<f32>, &mut RefBuffer<f32>),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    let (k_cache, v_cache) = caches;
    check::kv_cache_append_head_major([k, v], [k_cache, v_cache], span, shape)?;
    append((&k.0, HeadLayout::HeadMajor), k_cache, span, shape);
    append((&v.0, HeadLayout::HeadMajor), v_cache, span, shape);
    Ok(())
}

/// `src` (in its layout) → tokens `span.offset..` of the cache `[heads, capacity, head_dim]`.
fn append(
    (src, layout): (&[f32], HeadLayout),
    cache: &mut RefBuffer<f32>,
    span: CacheSpan,
    shape: HeadsShape,
) {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = shape;
    for token in 0..tokens {
        for head in 0..heads {
            let from = offset(layout, shape, token, head);
            let to = (head * span.capacity + span.offset + token) * head_dim;
            cache.0[to..][..head_dim].copy_from_slice(&src[from..][..head_dim]);
        }
    }
}

/// Transposes to the layout `to` from the other one.
pub(super) fn transpose(
    op: &'static str,
    src: &RefBuffer<f32>,
    dst: &mut RefBuffer<f32>,
    to: HeadLayout,
    shape: HeadsShape,
) -> Result<()> {
    check::transpose(op, src, dst, shape)?;
    relayout(&src.0, &mut dst.0, to, shape);
    Ok(())
}

fn relayout(src: &[f32], dst: &mut [f32], to: HeadLayout, shape: HeadsShape) {
    let from = match to {
        HeadLayout::HeadMajor => HeadLayout::TokenMajor,
        HeadLayout::TokenMajor => HeadLayout::HeadMajor,
    };
    for token in 0..shape.tokens {
        for head in 0..shape.heads {
            let src = &src[offset(from, shape, token, head)..][..shape.head_dim];
            dst[offset(to, shape, token, head)..][..shape.head_dim].copy_from_slice(src);
        }
    }
}
