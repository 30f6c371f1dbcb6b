//! Host memory: buffers that are aligned for vectors, bytes that several weights share, and pages straight from the
//! system.

mod buffer;
pub mod pages;

pub use buffer::{CpuBuffer, SharedBytes, SharedMut};
