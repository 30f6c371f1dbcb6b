//! Pinned memory through which contexts copy.

use super::memory::Pinned;
use super::stream::Event;

/// Pinned memory and the event behind the last copy that used it.
pub(super) struct Slot {
    pub(super) memory: Pinned,
    pub(super) event: Event,
}

/// Pinned memory by size, which all contexts of a device share: a steady step makes none, and neither does the second weight
/// of a model.
#[derive(Default)]
pub(super) struct StagingPool {
    pub(super) uploads: Vec<Slot>,
    /// For reads: free ones only.
    pub(super) downloads: Vec<Slot>,
}
