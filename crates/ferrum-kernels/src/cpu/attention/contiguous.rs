//! Attention over contiguous memory: head-major caches, and the latent cache of MLA.

use super::{Attention, Copied, KEYS, KeyValues, Queries, Values};
use crate::backend::{AttnConfig, FlashShape, MlaShape, check};
use crate::cpu::buffer::{CpuBuffer, SharedMut};
use crate::cpu::exec::{Exec, Scratch};
use crate::cpu::simd::Simd;
use ferrum_types::Result;
use std::ops::Range;

/// Contiguous f32 rows: key `j` of kv head `h` begins at `h·head + j·row`, its value likewise.
struct Contiguous<'a> {
    k: &'a [f32],
    v: &'a [f32],
    head: usize,
    row: usize,
    key_dim: usize,
    value_dim: usize,
}

impl KeyValues for Contiguous<'_> {
    type Direct = Copied<'static>;

    fn direct(&self, _: (usize, usize), _: usize) -> Option<Copied<'static>> {
        None
    }

    #[inline(always)]
    fn keys<S: Simd>(&self, _: S, at: (usize, usize), keys: Range<usize>, out: &mut [f32]) {
        for j in keys {
            let key = &self.k[at.1 * self.head + j * self.row..][..self.key_dim];
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
        let first = at.1 * self.head + tile * self.row;
        if stride == self.value_dim {
            return Values {
                data: &self.v[first..],
                stride: self.row,
            };
        }
        for j in keys {
            let value = &self.v[at.1 * self.head + j * self.row..][..self.value_dim];
            buffer[j % KEYS * stride..][..self.value_dim].copy_from_slice(value);
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
    let head_dim = config.head_dim;
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        pos_offset,
    } = shape;
    let source = Contiguous {
        k: &k.as_slice()[..lens.kv],
        v: &v.as_slice()[..lens.kv],
        head: kv_seq_stride * head_dim,
        row: head_dim,
        key_dim: head_dim,
        value_dim: head_dim,
    };
    let strides = (head_dim, q_len * head_dim);
    let call = Attention {
        source: &source,
        config: *config,
        q: &q.as_slice()[..lens.q],
        q_strides: strides,
        out: SharedMut::new(&mut out.as_mut_slice()[..lens.q]),
        out_strides: strides,
        sinks: sinks.map(CpuBuffer::as_slice),
        key_dim: head_dim,
        value_dim: head_dim,
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
    let latent = &latent.as_slice()[..lens.latent];
    let source = Contiguous {
        k: latent,
        v: latent,
        head: 0,
        row: dim,
        key_dim: dim,
        value_dim: rank,
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
