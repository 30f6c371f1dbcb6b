//! The checks with which every op begins, written once for all backends.
//!
//! A function is named after the op that it checks and gets the same buffers and sizes. It looks at
//! lengths and sizes alone, so it serves a device whose memory the host cannot see; sizes multiply
//! without overflow. It returns the element counts that the op needs next. What a host backend can
//! check besides, because it sees the contents of index buffers ([`Batch`], [`SortedPairs`],
//! [`rope_rows`]), is here too.
//!
//! An op calls its check before the first write, so that an error leaves all buffers as they were,
//! and a wrong argument is the same error on every backend. Limits of one device are the backend's
//! own, behind the shared check.

mod attention;
mod conv;
mod elementwise;
mod gemm;
mod heads;
mod kv;
mod memory;
mod moe;
mod norm;
mod state;
#[cfg(test)]
mod tests;

pub use self::attention::{FlashLen, MlaLen, attn_config, flash_attention, mla_attention};
pub use self::conv::{ConvLen, conv1d, conv2d_patch};
pub use self::elementwise::{activate, add_bias, gated, inplace, softcap, zip_inplace};
pub use self::gemm::{GemmLen, argmax_rows, embedding_lookup, gather_rows, gemm, gemm_gated};
pub use self::heads::{
    CacheLen, QkvLen, kv_cache_append_head_major, qk_norm_rope, rope_table_rows, split_qkv,
    split_qkv_norm_rope_into_cache, transpose,
};
pub use self::kv::{
    PoolLen, kv_append, kv_append_qkv, kv_attention, kv_copy_blocks, kv_pool, kv_shape, latent_pool,
};
pub use self::memory::{copy_columns, copy_slice, only, only_mut, range};
pub use self::moe::{
    MoeLen, compute_ids_tpe, expert_layers, expert_parts, expert_stack, moe_down, moe_product,
    moe_scale_weights, route_topk, weighted_sum, weighted_sum_norm,
};
pub use self::norm::{fused_add_rms_norm, layer_norm, rms_norm};
pub use self::state::{
    CausalConvLen, LinearAttentionLen, causal_conv1d, copy_states, linear_attention,
};
pub use ferrum_quant::weights::check_quant_rows;
pub use ferrum_types::check::{
    Batch, Sequence, SortedPairs, block_and_slot, check_weight_parts, elements, index, require,
    rope_rows, state_sequence,
};

use super::DeviceBuffer;
use ferrum_types::{Error, Result};

/// [`Error::Shape`] when `buffer` has fewer than `expected` elements.
pub fn len(
    op: &'static str,
    what: &'static str,
    buffer: &impl DeviceBuffer,
    expected: usize,
) -> Result<()> {
    Error::check_len(op, what, buffer.len(), expected)
}
