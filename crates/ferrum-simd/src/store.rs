//! Where packed weights are kept between runs: a trait, as this crate knows no files.

use super::memory::SharedBytes;

/// Where packed weights are kept between runs.
pub trait PackedStore: Send + Sync {
    /// What was kept under `key`, in memory that begins at a multiple of 64.
    fn get(&self, key: &PackedKey) -> Option<PackedEntry>;

    /// Keeps what was packed, in this process or beyond it. Returns what to compute with in its place, in memory as that of
    /// [`get`](Self::get); `None`: what was packed.
    fn put(&self, key: PackedKey, entry: PackedEntry) -> Option<PackedEntry>;
}

/// What a weight was packed from, as bytes: shapes, types, and the ends of each tensor. They tell the
/// matrices of one model apart; that the model is the same is the store's to know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PackedKey(pub(crate) Vec<u8>);

/// A packed weight.
#[derive(Clone, Debug)]
pub struct PackedEntry {
    /// Shapes and forms of its matrices.
    pub description: Vec<u8>,
    /// Their panels. To be kept one after the other, each at a multiple of 64; given back as one.
    pub panels: Vec<SharedBytes>,
}
