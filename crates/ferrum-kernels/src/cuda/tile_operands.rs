//! Where the rows of a product lie and where its result goes, as addresses and sizes.
//!
//! A buffer is allocated by its device, which holds the handle of `blas.rs`, so what that takes names no buffer. `tile.rs`
//! makes these values of buffers.

/// Rows `[rows, k]` of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct TileRows {
    pub(super) at: u64,
    pub(super) rows: usize,
    pub(super) k: usize,
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
