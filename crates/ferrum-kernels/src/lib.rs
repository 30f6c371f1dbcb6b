//! The kernel contract and the backends that fulfil it.
//!
//! [`backend`] is the contract: the [`Backend`] trait with its typed buffers, and one trait for each
//! capability that only some devices have. Each backend is a folder of its own with the same file
//! names (`gemm.rs`, `norm.rs`, `attention.rs`, …), so that a reader who knows one knows all:
//!
//! * `reference`: plain loops with f64 sums; the meaning of every op.
//! * `cpu`: threads and SIMD, chosen at start; its kernels are `ferrum-simd`.
//! * `cuda`: NVIDIA GPUs through their driver, opened at run time.
//! * `gpu`: compute shaders through wgpu (Vulkan, Metal).
//!
//! Nothing here knows what a model or a file is.

pub mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod reference;

pub use backend::*;
pub use cpu::CpuBackend;
pub use reference::ReferenceBackend;
