//! Quantised weight formats as pure functions: bytes in, numbers out, and back.
//!
//! This crate defines the storage formats: the tensor types of GGUF files ([`dequantize`],
//! [`quantize`], [`dot_reference`], and the block structs themselves), the integer layouts of
//! [`gptq`], [`awq`] and [`compressed_tensors`] checkpoints, their [`fp8_layer`] layers, 8-bit floats ([`fp8_codec`]) and the INT8 form of a KV cache
//! ([`kv_int8`]); [`weights`] is a matrix of a checkpoint in any of them. It does no I/O, owns no threads and knows nothing of files, tensors by name or
//! devices. Backends repack from the block structs into the form their kernels like; what a block
//! *means* is defined here and nowhere else.
//!
//! All stored integers and floats are little-endian, and every function checks lengths before it
//! touches anything, so bytes of a hostile file can give wrong numbers but never a panic.

mod block;
mod dequant;
mod encode;
mod error;
mod iq_grids;
mod packed_matrix;

pub mod affine;
pub mod awq;
pub mod compressed_tensors;
pub mod fp4;
pub mod fp8_codec;
pub mod fp8_layer;
pub mod gptq;
pub mod iq;
pub mod k_quants;
pub mod kv_int8;
pub mod legacy;
pub mod ternary;
pub mod unpack;
pub mod weights;

pub use block::{Block, EncodeBlock, F16Le, blocks};
pub use dequant::{Rows, dequantize, dot_reference};
pub use encode::{Search, can_encode, can_quantize, encode_row, quantize};
pub use error::{QuantError, Result};
