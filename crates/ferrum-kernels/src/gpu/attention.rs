//! Attention: one shader core for contiguous, latent and paged caches.
//!
//! A workgroup makes one query of one head. It goes over the keys in tiles of 64 that begin at
//! multiples of 64 of the key's index, with a running maximum and sum. Which tiles there are, and in
//! which order a tile is summed, follows from the query's index alone: neither the batch, nor chunks
//! of the prompt, nor the size of a block changes a bit.

use super::GpuBackend;
use super::buffer::GpuBuffer;
use super::context::{Bind, GpuContext, P};
use super::heads::{Layout, MAX_HEAD_DIM, heads_len};
use super::pipeline::Kernel;
use super::shape::{check_cap, product, require};
use crate::backend::{
    AttnConfig, Backend, DeviceBuffer, FlashShape, HeadLayout, HeadsShape, MlaShape,
};
use ferrum_types::{Error, Result};

pub(super) static CONTIGUOUS: Kernel = Kernel {
    name: "attention_contiguous",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/activation.wgsl"),
        include_str!("shaders/attention.wgsl"),
        include_str!("shaders/attention_contiguous.wgsl"),
    ],
    access: "rrrrw",
    constants: &[],
};

/// Parameters of a [`Call`]; two of them are padding, as a struct in uniform memory has a multiple
/// of 16 bytes.
pub(super) const CALL_PARAMS: usize = 16;

/// What the shader core needs to know of a call, in the order of its parameters.
pub(super) struct Call {
    pub(super) tokens: usize,
    pub(super) heads: usize,
    /// Query heads that share a kv head.
    pub(super) group: usize,
    /// Elements of a query and a key.
    pub(super) key_dim: usize,
    /// Elements of a value.
    pub(super) value_dim: usize,
    pub(super) q: Layout,
    pub(super) out: Layout,
    pub(super) rule: Rule,
    pub(super) has_sinks: bool,
}

/// How scores are made and which keys a query sees.
pub(super) struct Rule {
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    pub(super) causal: bool,
    pub(super) window: Option<usize>,
}

impl Call {
    pub(super) fn params(&self) -> [P; CALL_PARAMS] {
        // No index is as high as this, so a larger window means the same.
        let widest = i32::MAX as usize;
        [
            P::U(self.tokens),
            P::U(self.heads),
            P::U(self.group),
            P::U(self.key_dim),
            P::U(self.value_dim),
            P::U(self.q.token),
            P::U(self.q.head),
            P::U(self.out.token),
            P::U(self.out.head),
            P::F(self.rule.scale),
            // Zero for none: a cap is positive.
            P::F(self.rule.softcap.unwrap_or(0.0)),
            P::U(usize::from(self.rule.causal)),
            P::U(self.rule.window.unwrap_or(widest).min(widest)),
            P::U(usize::from(self.has_sinks)),
            P::U(0),
            P::U(0),
        ]
    }
}

/// Checks what every attention op asks of its config.
pub(super) fn check_config(op: &'static str, config: &AttnConfig) -> Result<Rule> {
    let AttnConfig {
        heads, kv_heads, ..
    } = *config;
    require(op, kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
        format!("{heads} heads are not a multiple of {kv_heads} kv heads")
    })?;
    if let Some(cap) = config.softcap {
        check_cap(op, cap)?;
    }
    check_dim(op, config.head_dim)?;
    Ok(Rule {
        scale: config.scale,
        softcap: config.softcap,
        causal: config.causal,
        window: config.sliding_window,
    })
}

fn check_dim(op: &'static str, dim: usize) -> Result<()> {
    if dim <= MAX_HEAD_DIM {
        return Ok(());
    }
    Err(Error::Unsupported {
        op,
        backend: GpuBackend::NAME,
        reason: format!("heads have {dim} elements, the shaders hold {MAX_HEAD_DIM}"),
        hint: "use --backend cpu".to_owned(),
    })
}

/// Where keys or values of a contiguous cache lie: strides of a kv head and of a token.
struct CacheLayout {
    head: usize,
    token: usize,
}

/// Records the shader over a contiguous cache of `kv_len` keys; the first query has the key index
/// `pos_offset`.
fn contiguous(
    ctx: &mut GpuContext,
    op: &'static str,
    call: &Call,
    [q, k, v, sinks, out]: [Bind<'_>; 5],
    layout: CacheLayout,
    (kv_len, pos_offset): (usize, usize),
) -> Result<()> {
    let mut params = [P::U(0); CALL_PARAMS + 4];
    params[..CALL_PARAMS].copy_from_slice(&call.params());
    params[CALL_PARAMS..].copy_from_slice(&[
        P::U(kv_len),
        P::U(pos_offset),
        P::U(layout.head),
        P::U(layout.token),
    ]);
    let groups = match call.value_dim {
        0 => 0,
        _ => product(op, &[call.tokens, call.heads])?,
    };
    ctx.run(
        op,
        (&CONTIGUOUS, &[]),
        [q, k, v, sinks, out],
        &params,
        groups,
    )
}

/// Attention over a contiguous head-major cache.
pub(super) fn flash_attention(
    ctx: &mut GpuContext,
    q: &GpuBuffer<f32>,
    (k, v): (&GpuBuffer<f32>, &GpuBuffer<f32>),
    sinks: Option<&GpuBuffer<f32>>,
    out: &mut GpuBuffer<f32>,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    const OP: &str = "flash_attention";
    let rule = check_config(OP, config)?;
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *config;
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        pos_offset,
    } = shape;
    require(OP, kv_len <= kv_seq_stride, || {
        format!("kv_len is {kv_len}, expected at most kv_seq_stride, {kv_seq_stride}")
    })?;
    check_positions(OP, pos_offset, q_len)?;
    let queries = HeadsShape {
        tokens: q_len,
        heads,
        head_dim,
    };
    let q_size = heads_len(OP, queries)?;
    let kv_size = product(OP, &[kv_heads, kv_seq_stride, head_dim])?;
    Error::check_len(OP, "q", q.len(), q_size)?;
    Error::check_len(OP, "k", k.len(), kv_size)?;
    Error::check_len(OP, "v", v.len(), kv_size)?;
    if let Some(sinks) = sinks {
        Error::check_len(OP, "sinks", sinks.len(), heads)?;
    }
    Error::check_len(OP, "out", out.len(), q_size)?;
    let layout = Layout::of(HeadLayout::HeadMajor, queries);
    let call = Call {
        tokens: q_len,
        heads,
        group: heads / kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        q: layout,
        out: layout,
        rule,
        has_sinks: sinks.is_some(),
    };
    let cache = CacheLayout {
        head: kv_seq_stride * head_dim,
        token: head_dim,
    };
    let binds = [q.into(), k.into(), v.into(), sinks.into(), out.into()];
    contiguous(ctx, OP, &call, binds, cache, (kv_len, pos_offset))
}

/// The shader's key indices are signed and 32 bits wide.
fn check_positions(op: &'static str, pos_offset: usize, q_len: usize) -> Result<()> {
    let last = pos_offset.saturating_add(q_len);
    require(op, last < (i32::MAX / 2) as usize, || {
        format!("queries at {pos_offset} to {last} are beyond any context")
    })
}

/// Multi-head latent attention, absorbed.
pub(super) fn mla_attention(
    ctx: &mut GpuContext,
    q: &GpuBuffer<f32>,
    latent: &GpuBuffer<f32>,
    out: &mut GpuBuffer<f32>,
    shape: MlaShape,
) -> Result<()> {
    const OP: &str = "mla_attention";
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        rope_dim,
        ..
    } = shape;
    let dim = rank.saturating_add(rope_dim);
    check_dim(OP, dim)?;
    check_positions(OP, shape.pos_offset, q_len)?;
    Error::check_len(OP, "q", q.len(), product(OP, &[q_len, heads, dim])?)?;
    Error::check_len(OP, "latent", latent.len(), product(OP, &[kv_len, dim])?)?;
    Error::check_len(OP, "out", out.len(), product(OP, &[q_len, heads, rank])?)?;
    let token_major = |head_dim| {
        let shape = HeadsShape {
            tokens: q_len,
            heads,
            head_dim,
        };
        Layout::of(HeadLayout::TokenMajor, shape)
    };
    let call = Call {
        tokens: q_len,
        heads,
        group: heads.max(1),
        key_dim: dim,
        value_dim: rank,
        q: token_major(dim),
        out: token_major(rank),
        rule: Rule {
            scale: shape.scale,
            softcap: None,
            causal: shape.causal,
            window: None,
        },
        has_sinks: false,
    };
    let cache = CacheLayout {
        head: 0,
        token: dim,
    };
    let binds = [
        q.into(),
        latent.into(),
        latent.into(),
        Bind::Nothing,
        out.into(),
    ];
    contiguous(ctx, OP, &call, binds, cache, (kv_len, shape.pos_offset))
}
