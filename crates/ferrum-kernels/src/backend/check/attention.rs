//! Attention over contiguous keys and values, and what all attention ops ask of their settings.

use super::{elements, elementwise, heads, len, require};
use crate::backend::{AttnConfig, DeviceBuffer, FlashShape, HeadsShape, MlaShape};
use ferrum_types::Result;

/// Elements of the buffers of [`Backend::flash_attention`](crate::Backend::flash_attention).
#[derive(Clone, Copy, Debug)]
pub struct FlashLen {
    /// `q`.
    pub q: usize,
    /// `k`.
    pub k: usize,
    /// `v`.
    pub v: usize,
    /// `out`.
    pub out: usize,
}

/// Elements of the buffers of [`Backend::mla_attention`](crate::Backend::mla_attention).
#[derive(Clone, Copy, Debug)]
pub struct MlaLen {
    /// `q`.
    pub q: usize,
    /// `latent`.
    pub latent: usize,
    /// `out`.
    pub out: usize,
}

/// Heads that share kv heads evenly, and a soft-cap that is one.
pub fn attn_config(op: &'static str, config: &AttnConfig) -> Result<()> {
    let AttnConfig {
        heads, kv_heads, ..
    } = *config;
    require(op, kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
        format!("{heads} heads are not a multiple of {kv_heads} kv heads")
    })?;
    match config.softcap {
        Some(cap) => elementwise::cap(op, cap),
        None => Ok(()),
    }
}

/// [`Backend::flash_attention`](crate::Backend::flash_attention).
pub fn flash_attention<A: DeviceBuffer>(
    q: &A,
    (k, v): (&A, &A),
    sinks: Option<&impl DeviceBuffer>,
    out: &A,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<FlashLen> {
    let op = "flash_attention";
    attn_config(op, config)?;
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        ..
    } = shape;
    require(op, kv_len <= kv_seq_stride, || {
        format!("kv_len is {kv_len}, expected at most kv_seq_stride, {kv_seq_stride}")
    })?;
    let queries = |head_dim| HeadsShape {
        tokens: q_len,
        heads: config.heads,
        head_dim,
    };
    let AttnConfig {
        kv_heads,
        head_dim,
        value_dim,
        ..
    } = *config;
    let lens = FlashLen {
        q: heads::heads(op, queries(head_dim))?,
        k: elements(op, &[kv_heads, kv_seq_stride, head_dim])?,
        v: elements(op, &[kv_heads, kv_seq_stride, value_dim])?,
        out: heads::heads(op, queries(value_dim))?,
    };
    len(op, "q", q, lens.q)?;
    len(op, "k", k, lens.k)?;
    len(op, "v", v, lens.v)?;
    if let Some(sinks) = sinks {
        len(op, "sinks", sinks, config.heads)?;
    }
    len(op, "out", out, lens.out)?;
    Ok(lens)
}

/// [`Backend::mla_attention`](crate::Backend::mla_attention).
pub fn mla_attention<A: DeviceBuffer>(
    q: &A,
    latent: &A,
    out: &A,
    shape: MlaShape,
) -> Result<MlaLen> {
    let op = "mla_attention";
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        rope_dim,
        ..
    } = shape;
    let Some(dim) = rank.checked_add(rope_dim) else {
        let reason = format!("a rank of {rank} plus {rope_dim} rotated elements overflows");
        return Err(ferrum_types::Error::invalid(op, reason));
    };
    let lens = MlaLen {
        q: elements(op, &[q_len, heads, dim])?,
        latent: elements(op, &[kv_len, dim])?,
        out: elements(op, &[q_len, heads, rank])?,
    };
    len(op, "q", q, lens.q)?;
    len(op, "latent", latent, lens.latent)?;
    len(op, "out", out, lens.out)?;
    Ok(lens)
}
