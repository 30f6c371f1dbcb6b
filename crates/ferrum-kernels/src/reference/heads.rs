//! Heads: splitting a fused projection, norm and rotation of each head, layouts.

use super::ReferenceBackend;
use super::buffer::{RefBuffer, elements, index, require};
use super::norm::rms_factor;
use crate::backend::{
    CacheSpan, HeadLayout, HeadsShape, QkNorm, QkvShape, QkvTransform, Rope, RopeStyle,
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

pub(super) fn heads_len(op: &'static str, shape: HeadsShape) -> Result<usize> {
    elements(op, &[shape.tokens, shape.heads, shape.head_dim])
}

/// A checked [`Rope`]: every token's factors exist.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    rows: &'a [i32],
    rot_dim: usize,
    style: RopeStyle,
}

impl<'a> Rotation<'a> {
    fn check(
        op: &'static str,
        rope: &Rope<'a, ReferenceBackend>,
        shape: HeadsShape,
    ) -> Result<Self> {
        let rot_dim = rope.rot_dim;
        require(
            op,
            rot_dim.is_multiple_of(2) && rot_dim <= shape.head_dim,
            || {
                format!(
                    "rot_dim is {rot_dim}, expected an even number up to {}",
                    shape.head_dim
                )
            },
        )?;
        let rows = rope.rows.first(op, "rope rows", shape.tokens)?;
        if rot_dim > 0 {
            let table_rows = rope.cos.0.len().min(rope.sin.0.len()) / (rot_dim / 2);
            for &row in rows {
                index(op, "a row of the rope tables", row, table_rows)?;
            }
        }
        Ok(Rotation {
            cos: &rope.cos.0,
            sin: &rope.sin.0,
            rows,
            rot_dim,
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
    fn check(
        op: &'static str,
        norm: Option<QkNorm<'a, ReferenceBackend>>,
        rope: Option<Rope<'a, ReferenceBackend>>,
        shape: HeadsShape,
    ) -> Result<Self> {
        let norm = match norm {
            Some(norm) => Some((
                norm.weight.first(op, "norm weight", shape.head_dim)?,
                norm.eps,
            )),
            None => None,
        };
        let rotation = match rope {
            Some(rope) => Some(Rotation::check(op, &rope, shape)?),
            None => None,
        };
        Ok(HeadTransform { norm, rotation })
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
    let op = "qk_norm_rope";
    let transform = HeadTransform::check(op, norm, rope, shape)?;
    let x = x.first_mut(op, "x", heads_len(op, shape)?)?;
    for token in 0..shape.tokens {
        for head in 0..shape.heads {
            let at = offset(layout, shape, token, head);
            transform.apply(&mut x[at..][..shape.head_dim], token);
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

/// Splits rows `[q | k | v]` and transforms q and k.
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
    let q_dim = elements(op, &[heads, head_dim])?;
    let kv_dim = elements(op, &[kv_heads, head_dim])?;
    let row_dim = elements(op, &[kv_dim, 2])?.saturating_add(q_dim);
    let qkv = qkv.first(op, "qkv", elements(op, &[tokens, row_dim])?)?;
    let q_transform = HeadTransform::check(op, transform.q_norm, transform.rope, shape.q())?;
    let k_transform = HeadTransform::check(op, transform.k_norm, transform.rope, shape.kv())?;

    let mut parts = SplitQkv {
        q: Vec::new(),
        k: Vec::new(),
        v: Vec::new(),
    };
    for token in 0..tokens {
        let (q, kv) = qkv[token * row_dim..][..row_dim].split_at(q_dim);
        let (k, v) = kv.split_at(kv_dim);
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
    let plain = QkvTransform {
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    let parts = split(op, qkv, plain, shape)?;
    q.first_mut(op, "q", parts.q.len())?
        .copy_from_slice(&parts.q);
    k.first_mut(op, "k", parts.k.len())?
        .copy_from_slice(&parts.k);
    v.first_mut(op, "v", parts.v.len())?
        .copy_from_slice(&parts.v);
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
    let parts = split(op, qkv, transform, shape)?;
    let to = HeadLayout::HeadMajor;
    relayout(
        &parts.q,
        q.first_mut(op, "q", parts.q.len())?,
        to,
        shape.q(),
    );
    relayout(
        &parts.k,
        k.first_mut(op, "k", parts.k.len())?,
        to,
        shape.kv(),
    );
    relayout(
        &parts.v,
        v.first_mut(op, "v", parts.v.len())?,
        to,
        shape.kv(),
    );
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
    let parts = split(op, qkv, transform, shape)?;
    let q = q.first_mut(op, "q", parts.q.len())?;
    for (part, cache, what) in [
        (&parts.k, caches.0, "k_cache"),
        (&parts.v, caches.1, "v_cache"),
    ] {
        append(
            op,
            (part, HeadLayout::TokenMajor),
            (cache, what),
            span,
            shape.kv(),
        )?;
    }
    relayout(&parts.q, q, HeadLayout::HeadMajor, shape.q());
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
    let op = "kv_cache_append_head_major";
    let len = heads_len(op, shape)?;
    let k = k.first(op, "k", len)?;
    let v = v.first(op, "v", len)?;
    append(
        op,
        (k, HeadLayout::HeadMajor),
        (caches.0, "k_cache"),
        span,
        shape,
    )?;
    append(
        op,
        (v, HeadLayout::HeadMajor),
        (caches.1, "v_cache"),
        span,
        shape,
    )
}

/// `src` (in its layout) → tokens `span.offset..` of the cache `[heads, capacity, head_dim]`.
fn append(
    op: &'static str,
    (src, layout): (&[f32], HeadLayout),
    (cache, what): (&mut RefBuffer<f32>, &'static str),
    span: CacheSpan,
    shape: HeadsShape,
) -> Result<()> {
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = shape;
    require(
        op,
        tokens <= span.capacity && span.offset <= span.capacity - tokens,
        || {
            format!(
                "{tokens} tokens at offset {} do not fit a cache of {} tokens",
                span.offset, span.capacity
            )
        },
    )?;
    let cache = cache.first_mut(op, what, elements(op, &[heads, span.capacity, head_dim])?)?;
    for token in 0..tokens {
        for head in 0..heads {
            let from = offset(layout, shape, token, head);
            let to = (head * span.capacity + span.offset + token) * head_dim;
            cache[to..][..head_dim].copy_from_slice(&src[from..][..head_dim]);
        }
    }
    Ok(())
}

/// Transposes to the layout `to` from the other one.
pub(super) fn transpose(
    op: &'static str,
    src: &RefBuffer<f32>,
    dst: &mut RefBuffer<f32>,
    to: HeadLayout,
    shape: HeadsShape,
) -> Result<()> {
    let len = heads_len(op, shape)?;
    let src = src.first(op, "src", len)?;
    relayout(src, dst.first_mut(op, "dst", len)?, to, shape);
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
