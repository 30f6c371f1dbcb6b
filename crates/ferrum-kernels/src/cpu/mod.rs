//! The CPU backend: threads and SIMD, chosen at start.
//!
//! * [`isa`](Isa): the instruction-set level is found once; a kernel is written once for all levels.
//! * `pool`: the device's own threads; an op with little work stays on the caller's.
//! * `gemm`: weights are packed at load into panels of 32 output features and keep the precision of
//!   their file; activations are f32, or bf16 beside weights of that where there are dot products of it.
//! * `fp8`: such panels of bytes, which are decoded to f32 where they are used.
//! * `quant`, `marlin`: ggml blocks and layers of GPTQ or AWQ stay integers; activations become bytes, products are summed in integers.
//! * `moe`: the same products over the rows of each expert, all experts in one region.
//! * [`PackedStore`]: packed weights that were kept when the model was loaded before.
//! * [`logits`]: what samplers ask of a row of logits on the host; `sample` asks it of all rows of a step.
//! * `attention`, `kv`: online softmax over tiles of keys, contiguous or paged.
//!
//! Every reduction has one order, by index, that depends on nothing else. So a row has the same bits
//! whether it is alone or among many, in one chunk or several, in small KV blocks or large ones, on
//! one thread or all, at any level (but for the rounding of [dot products of bf16](Isa::rounds_bf16)).

mod attention;
mod buffer;
mod conv;
mod core;
mod elementwise;
mod exec;
mod fp8;
mod gemm;
mod heads;
mod isa;
mod kv;
pub mod logits;
mod marlin;
mod math;
mod moe;
mod norm;
mod packed_store;
mod pages;
mod panels;
pub mod peak;
mod pool;
mod quant;
mod sample;
mod simd;
mod state;
#[cfg(test)]
mod tests;
mod topology;

pub use self::buffer::{CpuBuffer, SharedBytes};
pub use self::core::{CpuBackend, CpuConfig, CpuContext};
pub use self::gemm::pack::CpuWeight;
pub use self::isa::Isa;
pub use self::kv::CpuKvElement;
pub use self::moe::CpuExperts;
pub use self::packed_store::{PackedEntry, PackedKey, PackedStore};
pub use self::quant::CpuQuantWeight;
