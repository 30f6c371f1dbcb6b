//! A call of attention: sizes and layouts.

use super::context::Arg;
use super::heads::Layout;
use crate::backend::check::elements;
use crate::backend::{AttnConfig, HeadLayout, HeadsShape};
use ferrum_types::Result;

/// Keys of a tile, and threads of a block.
pub(super) const TILE: usize = 128;

/// What the kernel core needs to know of a call.
pub(super) struct Call {
    pub(super) tokens: usize,
    pub(super) q: Layout,
    pub(super) out: Layout,
    pub(super) config: AttnConfig,
}

impl Call {
    /// Queries of one layout.
    pub(super) fn of(layout: HeadLayout, tokens: usize, config: &AttnConfig) -> Self {
        let of = |head_dim| {
            let queries = HeadsShape {
                tokens,
                heads: config.heads,
                head_dim,
            };
            Layout::of(layout, queries)
        };
        Self {
            tokens,
            q: of(config.head_dim),
            out: of(config.value_dim),
            config: *config,
        }
    }

    /// The parameters that all kernels begin with.
    pub(super) fn args(&self, [out, q, sinks]: [Arg; 3]) -> [Arg; 16] {
        let c = &self.config;
        // No index is as high as this, so a larger window means the same.
        let widest = i32::MAX as usize;
        [
            out,
            q,
            sinks,
            Arg::Int(c.heads),
            Arg::Int(c.heads / c.kv_heads),
            Arg::Int(c.head_dim),
            Arg::Int(c.value_dim),
            Arg::Long(self.q.token),
            Arg::Long(self.q.head),
            Arg::Long(self.out.token),
            Arg::Long(self.out.head),
            Arg::Float(c.scale),
            // Zero for none: a cap is positive.
            Arg::Float(c.softcap.unwrap_or(0.0)),
            c.causal.into(),
            Arg::Int(c.sliding_window.unwrap_or(widest).min(widest)),
            c.chunked.into(),
        ]
    }

    /// A block for each query of each head, with room for the query, the sum of values and a tile's weights.
    pub(super) fn grid(&self, op: &'static str) -> Result<(usize, u32, usize)> {
        let c = &self.config;
        let blocks = match c.value_dim {
            0 => 0,
            _ => elements(op, &[self.tokens, c.heads])?,
        };
        let floats = c.head_dim.saturating_add(c.value_dim).saturating_add(TILE);
        Ok((blocks, TILE as u32, floats.saturating_mul(4)))
    }
}
