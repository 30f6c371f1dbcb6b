//! Attention over contiguous keys and values, and what all attention ops ask of their settings.

use super::{elements, elementwise, heads, len, require};
use crate::backend::{AttnConfig, DeviceBuffer, FlashShape, HeadsShape, MlaShape};
use ferrum_types::Result;

/// Elements of the buffers of [`Backend::flash_attention`](crate::Backend::flash_attention).
#[derive(Clone, Copy, Debug)]
pub struct FlashLen {
    /// `q`, and `out`.
    pub q: usize,
    /// `k`, and `v`.
    pub kv: usize,
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
    let queries = HeadsShape {
        tokens: q_len,
        heads: config.heads,
        head_dim: config.head_dim,
    };
    let lens = FlashLen {
        q: heads::heads(op, queries)?,
        kv: elements(op, &[config.kv_heads, kv_seq_stride, config.head_dim])?,
    };
    len(op, "q", q, lens.q)?;
    len(op, "k", k, lens.kv)?;
    len(op, "v", v, lens.kv)?;
    if let Some(sinks) = sinks {
        len(op, "sinks", sinks, config.heads)?;
    }
    len(op, "out", out, lens.q)?;
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
