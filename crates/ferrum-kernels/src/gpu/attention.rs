//! Attention: one shader core for contiguous, latent and paged caches.
//!
//! A workgroup makes one query of one head. It goes over the keys in tiles of 64 that begin at
//! multiples of 64 of the key's index, with a running maximum and sum. Which tiles there are, and in
//! which order a tile is summed, follows from the query's index alone: neither the batch, nor chunks
//! of the prompt, nor the size of a block changes a bit.

use super::buffer::GpuBuffer;
use super::context::{Bind, GpuContext, P};
use super::heads::{Layout, check_dim};
use super::pipeline::Kernel;
use crate::backend::check::{self, elements};
use crate::backend::{AttnConfig, FlashShape, HeadLayout, HeadsShape, MlaShape};
use ferrum_types::Result;

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
    /// Elements of a query and a key.
    pub(super) key_dim: usize,
    /// Elements of a value.
    pub(super) value_dim: usize,
    pub(super) q: Layout,
    pub(super) out: Layout,
    pub(super) config: AttnConfig,
    pub(super) has_sinks: bool,
}

impl Call {
    pub(super) fn params(&self) -> [P; CALL_PARAMS] {
        let AttnConfig {
            heads, kv_heads, ..
        } = self.config;
        // No index is as high as this, so a larger window means the same.
        let widest = i32::MAX as usize;
        [
            P::U(self.tokens),
            P::U(heads),
            P::U(heads / kv_heads),
            P::U(self.key_dim),
            P::U(self.value_dim),
            P::U(self.q.token),
            P::U(self.q.head),
            P::U(self.out.token),
            P::U(self.out.head),
            P::F(self.config.scale),
            // Zero for none: a cap is positive.
            P::F(self.config.softcap.unwrap_or(0.0)),
            P::U(usize::from(self.config.causal)),
            P::U(self.config.sliding_window.unwrap_or(widest).min(widest)),
            P::U(usize::from(self.has_sinks)),
            P::U(usize::from(self.config.chunked)),
            P::U(0),
        ]
    }
}

/// Where keys and values of a contiguous cache lie.
struct CacheLayout {
    /// Tokens from one kv head to the next.
    head_tokens: usize,
    /// Elements from one key to the next.
    key: usize,
    /// Elements from one value to the next.
    value: usize,
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
    let mut params = [P::U(0); CALL_PARAMS + 5];
    params[..CALL_PARAMS].copy_from_slice(&call.params());
    params[CALL_PARAMS..].copy_from_slice(&[
        P::U(kv_len),
        P::U(pos_offset),
        P::U(layout.head_tokens),
        P::U(layout.key),
        P::U(layout.value),
    ]);
    let groups = match call.value_dim {
        0 => 0,
        _ => elements(op, &[call.tokens, call.config.heads])?,
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
    check::flash_attention(q, (k, v), sinks, out, shape, config)?;
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
    check_dim(OP, head_dim.max(value_dim))?;
    check_positions(OP, pos_offset, q_len)?;
    let layout = |head_dim| {
        let queries = HeadsShape {
            tokens: q_len,
            heads: config.heads,
            head_dim,
        };
        Layout::of(HeadLayout::HeadMajor, queries)
    };
    let call = Call {
        tokens: q_len,
        key_dim: head_dim,
        value_dim,
        q: layout(head_dim),
        out: layout(value_dim),
        config: *config,
        has_sinks: sinks.is_some(),
    };
    let cache = CacheLayout {
        head_tokens: kv_seq_stride,
        key: head_dim,
        value: value_dim,
    };
    let binds = [q.into(), k.into(), v.into(), sinks.into(), out.into()];
    contiguous(ctx, OP, &call, binds, cache, (kv_len, pos_offset))
}

/// The shader's key indices are signed and 32 bits wide.
fn check_positions(op: &'static str, pos_offset: usize, q_len: usize) -> Result<()> {
    let last = pos_offset.saturating_add(q_len);
    check::require(op, last < (i32::MAX / 2) as usize, || {
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
    check::mla_attention(q, latent, out, shape)?;
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        ..
    } = shape;
    let dim = shape.key_dim();
    check_dim(OP, dim)?;
    check_positions(OP, shape.pos_offset, q_len)?;
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
        key_dim: dim,
        value_dim: rank,
        q: token_major(dim),
        out: token_major(rank),
        config: shape.config(),
        has_sinks: false,
    };
    let cache = CacheLayout {
        head_tokens: 0,
        key: dim,
        value: dim,
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
