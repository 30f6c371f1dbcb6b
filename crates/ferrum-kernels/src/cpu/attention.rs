//! Attention over contiguous memory: head-major caches, and the latent cache of MLA.

use crate::backend::{AttnConfig, FlashShape, MlaShape, check};
use ferrum_simd::attention;
use ferrum_simd::exec::{Exec, Scratch};
use ferrum_simd::memory::CpuBuffer;
use ferrum_types::Result;

type Buf = CpuBuffer<f32>;

/// Attention over a contiguous head-major cache.
pub(crate) fn flash_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    (q, k, v): (&Buf, &Buf, &Buf),
    sinks: Option<&Buf>,
    out: &mut Buf,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    let lens = check::flash_attention(q, (k, v), sinks, out, shape, config)?;
    let qkv = (
        &q.as_slice()[..lens.q],
        &k.as_slice()[..lens.k],
        &v.as_slice()[..lens.v],
    );
    let sinks = sinks.map(CpuBuffer::as_slice);
    let out = &mut out.as_mut_slice()[..lens.out];
    attention::flash_attention(exec, scratch, qkv, sinks, out, shape, config)
}

/// Attention of all heads over one latent cache, whose rows are keys and begin with the values.
pub(crate) fn mla_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    q: &Buf,
    latent: &Buf,
    out: &mut Buf,
    shape: MlaShape,
) -> Result<()> {
    let lens = check::mla_attention(q, latent, out, shape)?;
    let (q, latent) = (&q.as_slice()[..lens.q], &latent.as_slice()[..lens.latent]);
    let out = &mut out.as_mut_slice()[..lens.out];
    attention::mla_attention(exec, scratch, q, latent, out, shape)
}
