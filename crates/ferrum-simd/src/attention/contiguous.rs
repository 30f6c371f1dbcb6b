//! Attention over contiguous memory: head-major caches, and the latent cache of MLA.

use super::{Attention, Copied, KEYS, KeyValues, Queries, Values};
use crate::exec::{Exec, Scratch};
use crate::memory::SharedMut;
use crate::simd::Simd;
use ferrum_types::{AttnConfig, FlashShape, MlaShape, Result};
use std::ops::Range;

/// Contiguous f32 keys and values.
struct Contiguous<'a> {
    k: Rows<'a>,
    v: Rows<'a>,
}

/// Rows of `dim` elements: that of key `j` of kv head `h` begins at `h·head + j·row`.
struct Rows<'a> {
    data: &'a [f32],
    head: usize,
    row: usize,
    dim: usize,
}

impl Rows<'_> {
    #[inline(always)]
    fn of(&self, kv_head: usize, j: usize) -> &[f32] {
        &self.data[kv_head * self.head + j * self.row..][..self.dim]
    }
}

impl KeyValues for Contiguous<'_> {
    const F32: bool = true;
    type Direct = Copied<'static>;

    fn direct(&self, _: (usize, usize), _: usize) -> Option<Copied<'static>> {
        None
    }

    #[inline(always)]
    fn keys<S: Simd>(&self, _: S, at: (usize, usize), keys: Range<usize>, out: &mut [f32]) {
        for j in keys {
            let key = self.k.of(at.1, j);
            for (x, column) in key.iter().zip(out.as_chunks_mut::<KEYS>().0) {
                column[j % KEYS] = *x;
            }
        }
    }

    #[inline(always)]
    fn values<'a, S: Simd>(
        &'a self,
        _: S,
        at: (usize, usize),
        keys: Range<usize>,
        buffer: &'a mut [f32],
        stride: usize,
    ) -> Values<'a> {
        let tile = keys.start / KEYS * KEYS;
        let v = &self.v;
        let first = at.1 * v.head + tile * v.row;
        if stride == v.dim {
            return Values {
                data: &v.data[first..],
                stride: v.row,
            };
        }
        for j in keys {
            buffer[j % KEYS * stride..][..v.dim].copy_from_slice(v.of(at.1, j));
        }
        Values {
            data: buffer,
            stride,
        }
    }
}

/// Attention over a contiguous head-major cache.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn flash_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    (q, k, v): (&[f32], &[f32], &[f32]),
    sinks: Option<&[f32]>,
    out: &mut [f32],
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    let AttnConfig {
        head_dim,
        value_dim,
        ..
    } = *config;
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        pos_offset,
    } = shape;
    let rows = |data, dim| Rows {
        data,
        head: kv_seq_stride * dim,
        row: dim,
        dim,
    };
    let source = Contiguous {
        k: rows(k, head_dim),
        v: rows(v, value_dim),
    };
    let call = Attention {
        source: &source,
        config: *config,
        q,
        q_strides: (head_dim, q_len * head_dim),
        out: SharedMut::new(out),
        out_strides: (value_dim, q_len * value_dim),
        sinks,
        key_dim: head_dim,
        value_dim,
    };
    let queries = Queries {
        first_token: 0,
        len: q_len,
        first_index: pos_offset,
        kv_len,
    };
    call.run(exec, scratch, &[queries])
}

/// Attention of all heads over one latent cache, whose rows are keys and begin with the values.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn mla_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    q: &[f32],
    latent: &[f32],
    out: &mut [f32],
    shape: MlaShape,
) -> Result<()> {
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        ..
    } = shape;
    let dim = shape.key_dim();
    let rows = |of| Rows {
        data: latent,
        head: 0,
        row: dim,
        dim: of,
    };
    let source = Contiguous {
        k: rows(dim),
        v: rows(rank),
    };
    let call = Attention {
        source: &source,
        config: shape.config(),
        q,
        q_strides: (heads * dim, dim),
        out: SharedMut::new(out),
        out_strides: (heads * rank, rank),
        sinks: None,
        key_dim: dim,
        value_dim: rank,
    };
    let queries = Queries {
        first_token: 0,
        len: q_len,
        first_index: shape.pos_offset,
        kv_len,
    };
    call.run(exec, scratch, &[queries])
}
