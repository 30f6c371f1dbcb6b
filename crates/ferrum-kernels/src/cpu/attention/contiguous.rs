//! Attention over contiguous memory: head-major caches, and the latent cache of MLA.

use super::{Attention, Copied, KEYS, KeyValues, Queries, Values};
use crate::backend::{AttnConfig, FlashShape, MlaShape, check};
use crate::cpu::buffer::{CpuBuffer, SharedMut};
use crate::cpu::exec::{Exec, Scratch};
use crate::cpu::simd::Simd;
use ferrum_types::Result;
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
pub(crate) fn flash_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    (q, k, v): (&CpuBuffer<f32>, &CpuBuffer<f32>, &CpuBuffer<f32>),
    sinks: Option<&CpuBuffer<f32>>,
    out: &mut CpuBuffer<f32>,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    let lens = check::flash_attention(q, (k, v), sinks, out, shape, config)?;
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
        k: rows(&k.as_slice()[..lens.k], head_dim),
        v: rows(&v.as_slice()[..lens.v], value_dim),
    };
    let call = Attention {
        source: &source,
        config: *config,
        q: &q.as_slice()[..lens.q],
        q_strides: (head_dim, q_len * head_dim),
        out: SharedMut::new(&mut out.as_mut_slice()[..lens.out]),
        out_strides: (value_dim, q_len * value_dim),
        sinks: sinks.map(CpuBuffer::as_slice),
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
pub(crate) fn mla_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    q: &CpuBuffer<f32>,
    latent: &CpuBuffer<f32>,
    out: &mut CpuBuffer<f32>,
    shape: MlaShape,
) -> Result<()> {
    let lens = check::mla_attention(q, latent, out, shape)?;
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        ..
    } = shape;
    let dim = shape.key_dim();
    let rows = |of| Rows {
        data: &latent.as_slice()[..lens.latent],
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
        q: &q.as_slice()[..lens.q],
        q_strides: (heads * dim, dim),
        out: SharedMut::new(&mut out.as_mut_slice()[..lens.out]),
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
