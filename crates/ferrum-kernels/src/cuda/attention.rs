//! Attention: one kernel core for contiguous, latent and paged caches; a block makes one query of one head.

use super::attention_call::Call;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::flash;
use super::role::CudaAct;
use crate::backend::check;
use crate::backend::{AttnConfig, FlashShape, HeadLayout, MlaShape};
use ferrum_types::Result;

/// Where keys and values of a contiguous cache lie.
struct Cache {
    k: Arg,
    v: Arg,
    /// Tokens from one kv head to the next.
    head_tokens: usize,
    /// Elements from one key to the next, and from one value.
    strides: [usize; 2],
    kv_len: usize,
    pos_offset: usize,
    /// Values are the first elements of keys.
    latent: bool,
}

fn contiguous<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    call: &Call,
    buffers: [Arg; 3],
    cache: &Cache,
) -> Result<()> {
    // Key indices are signed and 32 bits wide.
    let last = cache.pos_offset.saturating_add(call.tokens);
    check::require(op, last < (i32::MAX / 2) as usize, || {
        format!(
            "queries at {} to {last} are beyond any context",
            cache.pos_offset
        )
    })?;
    let tiles = flash::Cache {
        dtype: A::DTYPE,
        latent: cache.latent,
        k: cache.k,
        v: cache.v,
        scales: [Arg::At(0); 2],
        place: flash::Place::Contiguous {
            head_keys: cache.head_tokens,
            first_index: cache.pos_offset,
        },
        max_keys: cache.kv_len,
    };
    if flash::attention(ctx, op, call, buffers, &tiles)? {
        return Ok(());
    }
    let own = [
        cache.k,
        cache.v,
        Arg::Long(cache.head_tokens),
        Arg::Long(cache.strides[0]),
        Arg::Long(cache.strides[1]),
        Arg::Int(cache.kv_len),
        Arg::Int(cache.pos_offset),
    ];
    let mut args = [Arg::At(0); 23];
    args[..16].copy_from_slice(&call.args(buffers));
    args[16..].copy_from_slice(&own);
    let kernel = (KernelFile::Attention, "attention_contiguous");
    ctx.launch(op, kernel, call.grid(op)?, args)
}

/// Attention over a contiguous head-major cache.
pub(super) fn flash_attention<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    q: &CudaBuffer<A>,
    (k, v): (&CudaBuffer<A>, &CudaBuffer<A>),
    sinks: Option<&CudaBuffer<f32>>,
    out: &mut CudaBuffer<A>,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    const OP: &str = "flash_attention";
    check::flash_attention(q, (k, v), sinks, out, shape, config)?;
    let call = Call::of(HeadLayout::HeadMajor, shape.q_len, config);
    let cache = Cache {
        k: k.into(),
        v: v.into(),
        head_tokens: shape.kv_seq_stride,
        strides: [config.head_dim, config.value_dim],
        kv_len: shape.kv_len,
        pos_offset: shape.pos_offset,
        latent: false,
    };
    contiguous(ctx, OP, &call, [out.into(), q.into(), sinks.into()], &cache)
}

/// Multi-head latent attention, absorbed.
pub(super) fn mla_attention<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    q: &CudaBuffer<A>,
    latent: &CudaBuffer<A>,
    out: &mut CudaBuffer<A>,
    shape: MlaShape,
) -> Result<()> {
    const OP: &str = "mla_attention";
    check::mla_attention(q, latent, out, shape)?;
    let call = Call::of(HeadLayout::TokenMajor, shape.q_len, &shape.config());
    let cache = Cache {
        k: latent.into(),
        v: latent.into(),
        head_tokens: 0,
        strides: [shape.key_dim(); 2],
        kv_len: shape.kv_len,
        pos_offset: shape.pos_offset,
        latent: true,
    };
    contiguous(ctx, OP, &call, [out.into(), q.into(), Arg::At(0)], &cache)
}
