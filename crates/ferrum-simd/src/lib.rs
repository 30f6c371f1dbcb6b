//! The inner kernels of the CPU: each is written once over [`Simd`](simd::Simd) and compiled for every
//! instruction-set level of the architecture.
//!
//! * [`isa`]: the level is found once; `simd`: sixteen lanes at each of them; `math`: functions of lanes.
//! * [`threads`], [`exec`]: the threads that compute, and how work is spread over them; [`memory`]: buffers, huge pages.
//! * [`gemm`]: weights are packed at load into panels of 32 output features and keep the precision of their file;
//!   activations are f32, or bf16 beside weights of that where there are dot products of it. Tiles of AMX multiply these, and
//!   at a level of its own numbers of f32 as two of bf16.
//! * [`fp8`]: such panels of bytes, which are decoded to f32 where they are used.
//! * [`quant`], [`marlin`]: ggml blocks and layers of GPTQ or AWQ stay integers; activations become bytes, products are
//!   summed in integers.
//! * [`moe`]: the same products over the rows of each expert, all experts in one region.
//! * [`attention`], [`kv`]: online softmax over tiles of keys, contiguous or paged.
//! * [`norm`], [`heads`], [`elementwise`], [`conv`], [`state`], [`logits`]: the other ops.
//! * [`packed_store`]: packed weights that were kept when the model was loaded before.
//!
//! It knows slices and sizes, and nothing of devices, contexts or the traits that backends implement: a change of those
//! compiles none of this again. What it offers is not generic over levels, nor over elements that are compiled by
//! the caller (see [`CpuKvElement`](kv::CpuKvElement)). Lengths are the caller's to check: a slice that is too short
//! is a panic here.
//!
//! Every reduction has one order, by index, that depends on nothing else. So a row has the same bits
//! whether it is alone or among many, in one chunk or several, in small KV blocks or large ones, on
//! one thread or all, at any level (but for [products with weights of bf16](isa::Isa::rounds_bf16) where these round, and for
//! [numbers of f32 that are split](isa::Isa::splits_f32)).

// As a unit test it would be compiled again, every kernel of it, and it has none: see `tests/simd`.
#![cfg(not(test))]

pub mod attention;
pub mod conv;
pub mod elementwise;
pub mod exec;
pub mod fp8;
pub mod gemm;
pub mod heads;
pub mod isa;
pub mod kv;
pub mod linear_attention;
pub mod logits;
pub mod marlin;
pub mod math;
pub mod memory;
pub mod moe;
pub mod norm;
pub mod packed_store;
mod panels;
pub mod peak;
pub mod quant;
pub mod simd;
pub mod state;
mod store;
pub mod threads;
mod unrolled;
