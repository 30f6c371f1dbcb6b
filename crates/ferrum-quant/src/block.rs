//! What all block formats share: a block is plain bytes that decode to a fixed number of floats.
//!
//! Block structs have alignment 1, so a mapped file can be viewed as blocks wherever its tensors
//! start. Multi-byte fields are byte arrays for the same reason.

use crate::error::{QuantError, Result};
use ferrum_types::GgufQuantType;

/// A block of `N` numbers as it lies in a file.
///
/// The fields follow ggml's `block_*` structs (`ggml-common.h`), in file order, without padding.
pub trait Block<const N: usize>: bytemuck::Pod {
    /// The tensor type made of these blocks.
    const TYPE: GgufQuantType;

    /// Writes the `N` numbers of this block, in row order.
    ///
    /// The arithmetic is f32, in the order in which ggml and the `gguf` package do it, so results
    /// are bit-equal to theirs.
    fn decode(&self, out: &mut [f32; N]);
}

/// A block that can be made from floats.
pub trait EncodeBlock<const N: usize>: Block<N> {
    /// The block nearest to `values` in the sense of ggml's reference quantiser.
    ///
    /// Never panics; blocks that contain NaN or infinities encode to unspecified numbers.
    fn encode(values: &[f32; N]) -> Self;
}

/// An IEEE binary16 as two little-endian bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F16Le(pub [u8; 2]);

impl F16Le {
    /// The exact value as f32.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        f16_bits_to_f32(u16::from_le_bytes(self.0))
    }

    /// Rounds to nearest, ties to even; too large becomes infinity.
    #[inline]
    pub fn from_f32(x: f32) -> Self {
        F16Le(half::f16::from_f32(x).to_le_bytes())
    }
}

/// Exact binary16 → binary32.
///
/// `half`'s conversion asks the CPU for F16C on each call, which costs more than the few
/// instructions here and keeps loops from being vectorised; this one is branch-free selects.
#[inline(always)]
pub(crate) fn f16_bits_to_f32(h: u16) -> f32 {
    const BIAS: u32 = (127 - 15) << 23;
    let sign = u32::from(h & 0x8000) << 16;
    let magnitude = u32::from(h & 0x7fff);
    // Subnormals are small integers times 2^-24; the product of an integer < 1024 is exact.
    let subnormal = ((magnitude as f32) * (1.0 / 16_777_216.0)).to_bits();
    let normal = (magnitude << 13) + BIAS;
    // Exponent 31 (infinity, NaN) moves up to 255 with a second bias.
    let special = normal + BIAS;
    let bits = if magnitude < 0x0400 {
        subnormal
    } else if magnitude < 0x7c00 {
        normal
    } else {
        special
    };
    f32::from_bits(bits | sign)
}

/// Views bytes as blocks without copying.
///
/// # Errors
/// [`QuantError::PartialBlock`] when `bytes` is not a whole number of blocks.
pub fn blocks<B: Block<N>, const N: usize>(bytes: &[u8]) -> Result<&[B]> {
    // Fails only for the length: block structs have alignment 1.
    bytemuck::try_cast_slice(bytes).map_err(|_| QuantError::PartialBlock {
        ty: B::TYPE,
        found: bytes.len(),
        block_bytes: size_of::<B>(),
    })
}

/// Decodes whole blocks; the caller has checked the lengths.
pub(crate) fn decode_all<B: Block<N>, const N: usize>(bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let (out, _) = out.as_chunks_mut::<N>();
    for (block, out) in blocks::<B, N>(bytes)?.iter().zip(out) {
        block.decode(out);
    }
    Ok(())
}

/// Encodes whole blocks; the caller has checked the lengths.
pub(crate) fn encode_all<B: EncodeBlock<N>, const N: usize>(values: &[f32], out: &mut [u8]) {
    let (values, _) = values.as_chunks::<N>();
    for (values, out) in values.iter().zip(out.chunks_exact_mut(size_of::<B>())) {
        out.copy_from_slice(bytemuck::bytes_of(&B::encode(values)));
    }
}

/// The largest magnitude; NaN when there is one.
///
/// Magnitudes order as their bits do, and a maximum of integers can be vectorised.
#[inline]
pub(crate) fn largest_magnitude<const N: usize>(values: &[f32; N]) -> f32 {
    let bits = values.iter().map(|v| v.abs().to_bits() as i32);
    f32::from_bits(bits.fold(0, i32::max) as u32)
}

/// The value of largest magnitude (the first of equals), with its sign.
#[inline]
pub(crate) fn extreme<const N: usize>(values: &[f32; N]) -> f32 {
    let largest = largest_magnitude(values).to_bits();
    let is_largest = |v: &f32| v.abs().to_bits() == largest;
    values.iter().copied().find(is_largest).unwrap_or(0.0)
}

/// The nearest integer, halves away from zero (C's `roundf`), for magnitudes below 2²².
///
/// Adding the number just below a half, not the half itself, keeps 0.49999997 from becoming 1.
/// Unlike `f32::round` this needs no call on CPUs of the baseline instruction set.
#[inline(always)]
pub(crate) fn round_half_away(x: f32) -> i32 {
    (x + 0.499_999_97f32.copysign(x)) as i32
}

/// `1 / d`, with 0 for 0: an all-zero block encodes as zeros.
#[inline]
pub(crate) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_equals_the_library_around_halves() {
        for i in -512..512 {
            let half = i as f32 + 0.5;
            for x in [half.next_down(), half, half.next_up(), i as f32] {
                assert_eq!(round_half_away(x), x.round() as i32, "{x}");
            }
        }
    }

    #[test]
    fn f16_decoding_equals_half_for_every_code() {
        for h in 0..=u16::MAX {
            let (ours, theirs) = (f16_bits_to_f32(h), half::f16::from_bits(h).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{h:#06x}: {ours} and {theirs}"
            );
        }
    }
}
