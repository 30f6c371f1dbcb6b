//! The reference backend: the meaning of every op.
//!
//! Plain loops, sums in f64, one rounding at the end, no threads, no SIMD, no `unsafe`. When
//! another backend and this one disagree, this one is right or the contract needs a better sentence.
//! It is also the example of how small a backend can be: it implements what the traits require and
//! those compositions whose own formula says more ([`Backend::softcap`](crate::Backend::softcap),
//! [`add_bias`](crate::Backend::add_bias), [`mla_attention`](crate::Backend::mla_attention),
//! [`conv2d_patch`](crate::Backend::conv2d_patch)). `core.rs` has the device and hands each op to a
//! function of the file named after it, and weights of every kind become one f32 matrix at load.
//!
//! It is strict where a GPU cannot be: every index that comes from a buffer (a RoPE row, a block id,
//! an expert) is checked before it is used, so that a caller's mistake is a sentence here.

mod attention;
mod buffer;
mod conv;
mod core;
mod elementwise;
mod gemm;
mod heads;
mod kv;
mod moe;
mod norm;
mod precision;
mod quant;
mod sample;
#[cfg(test)]
mod tests;

pub use self::buffer::RefBuffer;
pub use self::core::{RefContext, Reference, ReferenceBackend};
pub use self::gemm::RefWeight;
pub use self::kv::{KvCodec, RefKvScales};
pub use self::moe::RefExperts;
pub use self::precision::{Mixed, Precision, Uniform};
