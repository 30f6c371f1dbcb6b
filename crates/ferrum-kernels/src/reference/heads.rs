//! Heads: norm and rotation of each. Splitting and layouts are compositions of row copies.

use super::buffer::RefBuffer;
use super::norm::rms_factor;
use super::precision::{narrow, wide};
use super::{Precision, Reference};
use crate::backend::{HeadLayout, HeadsShape, QkNorm, Rope, RopeStyle, check};
use ferrum_types::{FloatElement, Result};

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
    fn new<P: Precision>(
        op: &'static str,
        rope: &Rope<'a, Reference<P>>,
        tokens: usize,
    ) -> Result<Self> {
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

/// Transform of a head: optional norm, then optional rotation, rounded once.
#[derive(Clone, Copy)]
struct HeadTransform<'a> {
    norm: Option<(&'a [f32], f32)>,
    rotation: Option<Rotation<'a>>,
}

impl<'a> HeadTransform<'a> {
    fn new<P: Precision>(
        op: &'static str,
        norm: Option<QkNorm<'a, Reference<P>>>,
        rope: Option<Rope<'a, Reference<P>>>,
        tokens: usize,
    ) -> Result<Self> {
        let rotation = rope.map(|rope| Rotation::new(op, &rope, tokens));
        Ok(HeadTransform {
            norm: norm.map(|norm| (norm.weight.0.as_slice(), norm.eps)),
            rotation: rotation.transpose()?,
        })
    }

    fn apply<T: FloatElement>(&self, head: &mut [T], token: usize) {
        let mut values: Vec<f64> = head.iter().map(|&x| wide(x)).collect();
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
            *x = narrow(value);
        }
    }
}

/// In place: norm, then rotation of every head.
pub(super) fn qk_norm_rope<P: Precision>(
    x: &mut RefBuffer<P::Act>,
    layout: HeadLayout,
    norm: Option<QkNorm<'_, Reference<P>>>,
    rope: Option<Rope<'_, Reference<P>>>,
    shape: HeadsShape,
) -> Result<()> {
    check::qk_norm_rope::<Reference<P>>(x, norm, rope, shape)?;
    let transform = HeadTransform::new("qk_norm_rope", norm, rope, shape.tokens)?;
    for token in 0..shape.tokens {
        for head in 0..shape.heads {
            let at = offset(layout, shape, token, head);
            transform.apply(&mut x.0[at..][..shape.head_dim], token);
        }
    }
    Ok(())
}
