//! Zeroed memory straight from the system, for what is large and lives long.
//!
//! An allocator would zero such memory by writing to it: one thread would then take all page faults,
//! in small pages, before the first byte is loaded. Fresh pages are zero by themselves, come when they
//! are first touched (by the threads that pack a weight), and can be asked to be huge ones before
//! that, which saves the page walks of a stream that touches each page once.
//!
//! Matrices of a small model are shorter than a few huge pages. They lie one after the other in mappings
//! that they share, so that no part of them is left to small pages.

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod linux;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub use linux::{Nodes, Pages, interleave_thread, node_bits, set_policy};

/// Elsewhere the system decides.
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub fn interleave_thread() {}

/// Elsewhere the allocator serves all sizes.
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
#[derive(Debug)]
pub enum Pages {}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
impl Pages {
    /// None of any size.
    pub fn for_size(_bytes: usize) -> Option<std::io::Result<Self>> {
        None
    }

    /// None of any size.
    pub fn zeroed_for_weights(_bytes: usize) -> Option<std::io::Result<Self>> {
        None
    }

    /// Where the memory begins.
    pub fn start(&self) -> std::ptr::NonNull<u8> {
        match *self {}
    }
}
