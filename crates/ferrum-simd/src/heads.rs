//! Heads: splitting a fused projection, norm and rotation of each head, layouts.

use super::exec::{Exec, Scratch};
use super::isa::Kernel;
use super::math::{for_vectors, load_at, store_at};
use super::memory::SharedMut;
use super::norm::rms_factor;
use super::simd::Simd;
use ferrum_types::{CacheSpan, HeadLayout, HeadsShape, QkvShape, Result, RopeStyle};
use std::ops::Range;

/// Rotary position embedding by table: row `rows[token]` of the tables has the factors of a token.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// `[table_rows, rot_dim/2]`, cosines.
    pub cos: &'a [f32],
    /// `[table_rows, rot_dim/2]`, sines.
    pub sin: &'a [f32],
    /// `[tokens]`, each a row of the tables.
    pub rows: &'a [i32],
    /// Rotated elements of a head: even.
    pub rot_dim: usize,
    /// Pairing.
    pub style: RopeStyle,
}

impl Rotation<'_> {
    /// `(a, b) → (a·cos - b·sin, b·cos + a·sin)` for every pair of the rotated part.
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, head: &mut [f32], token: usize) {
        let half = self.rot_dim / 2;
        let table = self.rows[token] as usize * half;
        let cos = &self.cos[table..][..half];
        let sin = &self.sin[table..][..half];
        match self.style {
            RopeStyle::HalfSplit => {
                let (first, rest) = head.split_at_mut(half);
                let second = &mut rest[..half];
                for_vectors(
                    half,
                    #[inline(always)]
                    |at, _| {
                        let (c, n) = (load_at(s, cos, at), load_at(s, sin, at));
                        let (a, b) = (load_at(s, first, at), load_at(s, second, at));
                        store_at(s, first, at, s.sub(s.mul(a, c), s.mul(b, n)));
                        store_at(s, second, at, s.add(s.mul(b, c), s.mul(a, n)));
                    },
                );
            }
            RopeStyle::Interleaved => {
                for ((pair, c), n) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * c - b * n;
                    pair[1] = b * c + a * n;
                }
            }
        }
    }
}

/// Transform of a head: optional norm, then optional rotation.
#[derive(Clone, Copy, Default)]
pub struct HeadTransform<'a> {
    /// Weight `[head_dim]`, and what is added to the mean square.
    pub norm: Option<(&'a [f32], f32)>,
    /// The rotation.
    pub rotation: Option<Rotation<'a>>,
}

impl HeadTransform<'_> {
    /// Whether heads stay as they are.
    fn is_identity(&self) -> bool {
        self.norm.is_none() && self.rotation.is_none()
    }

    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, head: &mut [f32], token: usize) {
        if let Some((weight, eps)) = self.norm {
            let factor = s.splat(rms_factor(s, head, eps));
            for_vectors(
                head.len(),
                #[inline(always)]
                |at, _| {
                    let v = s.mul(load_at(s, head, at), factor);
                    store_at(s, head, at, s.mul(v, load_at(s, weight, at)));
                },
            );
        }
        if let Some(rotation) = &self.rotation {
            rotation.apply(s, head, token);
        }
    }
}

/// Where heads come from: head `h` of token `t` begins at `start + t·token_stride + h·head_dim`.
#[derive(Clone, Copy)]
pub(crate) struct HeadSource<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) start: usize,
    pub(crate) token_stride: usize,
}

/// Where heads go.
pub(crate) trait HeadSink: Sync {
    /// Takes head `head` of token `token`.
    ///
    /// # Safety
    /// No two threads store heads of the same number at the same time.
    unsafe fn store<S: Simd>(&self, s: S, token: usize, head: usize, values: &[f32]);
}

/// An f32 buffer in either layout, or a contiguous cache.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a> {
    out: SharedMut<'a, f32>,
    start: usize,
    token_stride: usize,
    head_stride: usize,
}

impl<'a> Strided<'a> {
    fn new(out: &'a mut [f32], layout: HeadLayout, shape: HeadsShape) -> Self {
        let (token_stride, head_stride) = strides(layout, shape);
        Self {
            out: SharedMut::new(out),
            start: 0,
            token_stride,
            head_stride,
        }
    }

    /// [`HeadSink::store`], for which no vectors are needed.
    ///
    /// # Safety
    /// That of [`HeadSink::store`].
    unsafe fn put(&self, token: usize, head: usize, values: &[f32]) {
        let at = self.start + token * self.token_stride + head * self.head_stride;
        // SAFETY: heads of different tokens and numbers do not overlap; those of one number belong to
        // one thread (contract).
        unsafe { self.out.part(at, values.len()) }.copy_from_slice(values);
    }

    /// `[tokens, heads, head_dim]`.
    pub(crate) fn token_major(out: &'a mut [f32], shape: HeadsShape) -> Self {
        Self::new(out, HeadLayout::TokenMajor, shape)
    }

    /// Tokens from `span.offset` on of `[heads, capacity, head_dim]`.
    ///
    /// # Panics
    /// When the tokens do not fit: they would be those of another head.
    fn cache(cache: &'a mut [f32], span: CacheSpan, shape: HeadsShape) -> Self {
        let free = span.capacity.checked_sub(span.offset);
        assert!(free.is_some_and(|free| shape.tokens <= free), "the span");
        let head_dim = shape.head_dim;
        Self {
            out: SharedMut::new(cache),
            start: span.offset * head_dim,
            token_stride: head_dim,
            head_stride: span.capacity * head_dim,
        }
    }
}

impl HeadSink for Strided<'_> {
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, _: S, token: usize, head: usize, values: &[f32]) {
        // SAFETY: the caller's contract.
        unsafe { self.put(token, head, values) };
    }
}

/// Elements from one token to the next, and from one head to the next.
fn strides(layout: HeadLayout, shape: HeadsShape) -> (usize, usize) {
    match layout {
        HeadLayout::TokenMajor => (shape.heads * shape.head_dim, shape.head_dim),
        HeadLayout::HeadMajor => (shape.head_dim, shape.tokens * shape.head_dim),
    }
}

/// Copies heads from a source through a transform to a sink, all tokens of each head.
pub(crate) struct HeadCopy<'a, K> {
    pub(crate) source: HeadSource<'a>,
    pub(crate) transform: HeadTransform<'a>,
    pub(crate) sink: K,
}

/// A range of heads of a [`HeadCopy`].
struct HeadRangeCopy<'a, K> {
    all: &'a HeadCopy<'a, K>,
    shape: HeadsShape,
    heads: Range<usize>,
    /// One head.
    buffer: &'a mut [f32],
}

impl<K: HeadSink> Kernel for HeadRangeCopy<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let HeadCopy {
            source,
            transform,
            sink,
        } = self.all;
        for token in 0..self.shape.tokens {
            for head in self.heads.clone() {
                let at = source.start + token * source.token_stride + head * self.shape.head_dim;
                let mut values = &source.data[at..][..self.shape.head_dim];
                if !transform.is_identity() {
                    self.buffer.copy_from_slice(values);
                    transform.apply(s, self.buffer, token);
                    values = self.buffer;
                }
                // SAFETY: a range of heads belongs to one thread.
                unsafe { sink.store(s, token, head, values) };
            }
        }
    }
}

/// Moves q, k and v. Work is divided by heads, never by tokens: a cache in which two tokens share a
/// slot (by a wrong block table) then still has one writer for each element.
pub(crate) fn move_qkv<Q: HeadSink, K: HeadSink>(
    exec: &Exec,
    scratch: &mut Scratch,
    q: Option<HeadCopy<'_, Q>>,
    kv: [HeadCopy<'_, K>; 2],
    shape: QkvShape,
) -> Result<()> {
    let QkvShape {
        tokens, kv_heads, ..
    } = shape;
    let heads = if q.is_some() { shape.heads } else { 0 };
    // A width of zero is that of values which are not stored.
    let value_heads = if shape.value_dim == 0 { 0 } else { kv_heads };
    let widest = shape.head_dim.max(shape.value_dim);
    let buffers = SharedMut::new(scratch.floats(exec.pool.threads() * widest)?);
    exec.parallel_for(
        heads + kv_heads + value_heads,
        tokens * widest * 2,
        |units, thread| {
            // SAFETY: no two running tasks share a thread number.
            let buffer = |dim| unsafe { buffers.part(thread * widest, dim) };
            let part = |from: usize, count: usize| {
                units.start.clamp(from, from + count) - from
                    ..units.end.clamp(from, from + count) - from
            };
            if let Some(q) = &q {
                exec.level.run(HeadRangeCopy {
                    all: q,
                    shape: shape.q(),
                    heads: part(0, heads),
                    buffer: buffer(shape.head_dim),
                });
            }
            let kv = kv.iter().zip([shape.k(), shape.v()]).enumerate();
            for (i, (all, of)) in kv {
                let count = if i == 0 { kv_heads } else { value_heads };
                exec.level.run(HeadRangeCopy {
                    all,
                    shape: of,
                    heads: part(heads + i * kv_heads, count),
                    buffer: buffer(of.head_dim),
                });
            }
        },
    );
    Ok(())
}

/// A fused projection, whose rows are `[q | k | v]`, with what happens to q and k.
pub struct Projection<'a> {
    qkv: &'a [f32],
    q: HeadTransform<'a>,
    k: HeadTransform<'a>,
    shape: QkvShape,
}

impl<'a> Projection<'a> {
    /// Rows of `shape`.
    pub fn new(qkv: &'a [f32], [q, k]: [HeadTransform<'a>; 2], shape: QkvShape) -> Self {
        Self { qkv, q, k, shape }
    }

    /// Sizes.
    pub(crate) fn shape(&self) -> QkvShape {
        self.shape
    }

    /// Moves the parts to their sinks.
    pub(crate) fn store<Q: HeadSink, K: HeadSink>(
        self,
        exec: &Exec,
        scratch: &mut Scratch,
        q: Q,
        kv: [K; 2],
    ) -> Result<()> {
        let shape = self.shape;
        let source = |start| HeadSource {
            data: self.qkv,
            start,
            token_stride: shape.row_dim(),
        };
        let (k, v) = (shape.q_dim(), shape.q_dim() + shape.k_dim());
        let [q_source, k_source, v_source] = [source(0), source(k), source(v)];
        let [k, v] = kv;
        let q = HeadCopy {
            source: q_source,
            transform: self.q,
            sink: q,
        };
        let k = HeadCopy {
            source: k_source,
            transform: self.k,
            sink: k,
        };
        let v = HeadCopy {
            source: v_source,
            transform: HeadTransform::default(),
            sink: v,
        };
        move_qkv(exec, scratch, Some(q), [k, v], shape)
    }
}

/// Splits a projection into q, k and v of one layout.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn split(
    exec: &Exec,
    scratch: &mut Scratch,
    projection: Projection<'_>,
    [q, k, v]: [&mut [f32]; 3],
    layout: HeadLayout,
) -> Result<()> {
    let shape = projection.shape;
    let q = Strided::new(q, layout, shape.q());
    let k = Strided::new(k, layout, shape.k());
    let v = Strided::new(v, layout, shape.v());
    projection.store(exec, scratch, q, [k, v])
}

/// Splits a projection into head-major q, and k and v at a place of contiguous caches.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn split_into_cache(
    exec: &Exec,
    scratch: &mut Scratch,
    projection: Projection<'_>,
    q: &mut [f32],
    (k, v): (&mut [f32], &mut [f32]),
    span: CacheSpan,
) -> Result<()> {
    let shape = projection.shape;
    let q = Strided::new(q, HeadLayout::HeadMajor, shape.q());
    let k = Strided::cache(k, span, shape.k());
    let v = Strided::cache(v, span, shape.v());
    projection.store(exec, scratch, q, [k, v])
}

/// In place: norm, then rotation of every head.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn qk_norm_rope(
    exec: &Exec,
    x: &mut [f32],
    layout: HeadLayout,
    transform: HeadTransform<'_>,
    shape: HeadsShape,
) {
    let x = SharedMut::new(&mut x[..shape.len()]);
    exec.parallel_for(
        shape.tokens * shape.heads,
        2 * shape.head_dim,
        |vectors, _| {
            exec.level.run(InPlace {
                transform: &transform,
                x,
                layout,
                shape,
                vectors,
            });
        },
    );
}

/// A range of heads in memory order, transformed in place.
struct InPlace<'a> {
    transform: &'a HeadTransform<'a>,
    x: SharedMut<'a, f32>,
    layout: HeadLayout,
    shape: HeadsShape,
    vectors: Range<usize>,
}

impl Kernel for InPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let head_dim = self.shape.head_dim;
        for vector in self.vectors {
            let token = match self.layout {
                HeadLayout::TokenMajor => vector / self.shape.heads,
                HeadLayout::HeadMajor => vector % self.shape.tokens,
            };
            // SAFETY: each vector belongs to one task.
            let head = unsafe { self.x.part(vector * head_dim, head_dim) };
            self.transform.apply(s, head, token);
        }
    }
}

/// Head-major k and v → contiguous caches.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn append_head_major(
    exec: &Exec,
    (k, v): (&[f32], &[f32]),
    (k_cache, v_cache): (&mut [f32], &mut [f32]),
    span: CacheSpan,
    shape: HeadsShape,
) {
    let k_cache = Strided::cache(k_cache, span, shape);
    let v_cache = Strided::cache(v_cache, span, shape);
    let part = shape.tokens * shape.head_dim;
    exec.parallel_for(shape.heads, 2 * part, |heads, _| {
        for head in heads {
            for (src, cache) in [(k, &k_cache), (v, &v_cache)] {
                // The tokens of a head lie together on both sides.
                // SAFETY: each head belongs to one task.
                unsafe { cache.put(0, head, &src[head * part..][..part]) };
            }
        }
    });
}

/// Transposes to the layout `to` from the other one.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn transpose(exec: &Exec, src: &[f32], dst: &mut [f32], to: HeadLayout, shape: HeadsShape) {
    let dst = SharedMut::new(&mut dst[..shape.len()]);
    let HeadsShape {
        tokens,
        heads,
        head_dim,
    } = shape;
    let (outer, inner) = match to {
        HeadLayout::HeadMajor => (heads, tokens),
        HeadLayout::TokenMajor => (tokens, heads),
    };
    exec.parallel_for(outer, inner * head_dim, |range, _| {
        for i in range {
            for j in 0..inner {
                // SAFETY: each vector belongs to one task.
                let dst = unsafe { dst.part((i * inner + j) * head_dim, head_dim) };
                dst.copy_from_slice(&src[(j * outer + i) * head_dim..][..head_dim]);
            }
        }
    });
}
