//! Where the rows of a product lie and where its result goes, as addresses and sizes.
//!
//! A buffer is allocated by its device, which holds the handle of `blas.rs`, so what that takes names no buffer. `tile.rs`
//! makes these values of buffers.

use super::context::Arg;

/// Rows `[rows, k]` of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct TileRows {
    pub(super) at: u64,
    pub(super) rows: usize,
    pub(super) k: usize,
}

/// Pairs of rows and experts.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    /// The expert of each pair.
    pub(super) expert_ids: Arg,
    /// The pairs by expert.
    pub(super) ids: Arg,
    pub(super) pairs: usize,
    pub(super) experts: usize,
    /// Pairs of one token, which read one row of x; at least one.
    pub(super) pairs_per_row: usize,
}

/// Rows of activations as products read them.
pub(super) struct Arranged {
    pub(super) at: u64,
    /// Numbers of 16 bits from a row to the next.
    pub(super) stride: usize,
    /// What sums are to be multiplied with, or null.
    pub(super) row_scales: Arg,
    /// Pairs that read one row.
    pub(super) pairs_per_row: usize,
}

/// Where a product goes: `columns` columns from `first` on of rows of `n`.
#[derive(Clone, Copy)]
pub(super) struct TileOut {
    pub(super) at: u64,
    pub(super) is_f32: bool,
    pub(super) columns: usize,
    pub(super) first: usize,
    pub(super) n: usize,
}
