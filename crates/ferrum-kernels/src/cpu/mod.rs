//! The CPU backend: threads and SIMD, chosen at start.
//!
//! What computes is [`ferrum_simd`]; here is what makes a [`Backend`](crate::Backend) of it. An op checks its arguments
//! and hands slices to the kernels of the module of the same name.
//!
//! * [`logits`]: what samplers ask of a row of logits on the host; `sample` asks it of all rows of a step.
//! * [`peak`]: what the machine can do at best.

mod attention;
mod chooser;
mod conv;
mod core;
mod elementwise;
mod gemm;
mod heads;
mod kv;
pub mod logits;
mod marlin;
mod moe;
mod norm;
pub mod peak;
mod quant;
mod sample;
mod state;
#[cfg(test)]
mod tests;

pub use self::core::{CpuBackend, CpuConfig, CpuContext};
pub use ferrum_simd::gemm::CpuWeight;
pub use ferrum_simd::isa::Isa;
pub use ferrum_simd::kv::{CpuKvElement, CpuKvScales};
pub use ferrum_simd::memory::{CpuBuffer, SharedBytes};
pub use ferrum_simd::moe::CpuExperts;
pub use ferrum_simd::packed_store::{PackedEntry, PackedKey, PackedStore};
pub use ferrum_simd::quant::CpuQuantWeight;
