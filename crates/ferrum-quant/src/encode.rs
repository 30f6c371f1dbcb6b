//! From f32 to stored bytes, for the types with a simple reference quantiser.
//!
//! Results are bit-equal to those of the `gguf` Python package for finite numbers (Q8_K, which it
//! does not write, follows ggml; so does the sign of a zero minimum in Q4_1 and Q5_1, which in the
//! package depends on the CPU). Quantisers that search for scales (the K and IQ types) are not
//! here.

use crate::block::{F16Le, encode_all};
use crate::error::{QuantError, Result};
use crate::{fp4, k_quants, legacy, ternary};
use ferrum_types::GgufQuantType;

/// Encodes `values` as `ty` into `out`, which has `ty.bytes_for(values.len())` bytes.
///
/// Never panics; blocks with NaN or infinities encode to unspecified numbers, except in the float
/// types, which keep them.
///
/// # Errors
/// [`QuantError::NoEncoder`] for other types than F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
/// Q8_K, TQ1_0, TQ2_0 and MXFP4; [`QuantError::RowLength`] when `values` is not a whole number of
/// blocks; [`QuantError::Length`] for a wrong `out`.
pub fn quantize(ty: GgufQuantType, values: &[f32], out: &mut [u8]) -> Result<()> {
    let Some(encode) = encoder(ty) else {
        return Err(QuantError::NoEncoder { ty });
    };
    let Some(expected) = ty.bytes_for(values.len()) else {
        return Err(QuantError::RowLength {
            ty,
            found: values.len(),
            block_len: ty.block_len(),
        });
    };
    if out.len() != expected {
        return Err(QuantError::Length {
            ty,
            what: "output in bytes",
            found: out.len(),
            expected,
        });
    }
    encode(values, out);
    Ok(())
}

/// Whether [`quantize`] can write this type.
pub fn can_quantize(ty: GgufQuantType) -> bool {
    encoder(ty).is_some()
}

type Encoder = fn(&[f32], &mut [u8]);

fn encoder(ty: GgufQuantType) -> Option<Encoder> {
    use GgufQuantType as T;
    Some(match ty {
        T::F32 => |v, o| scalars(v, o, f32::to_le_bytes),
        T::F16 => |v, o| scalars(v, o, |v| F16Le::from_f32(v).0),
        T::BF16 => |v, o| scalars(v, o, |v| half::bf16::from_f32(v).to_le_bytes()),
        T::Q4_0 => encode_all::<legacy::BlockQ4_0, 32>,
        T::Q4_1 => encode_all::<legacy::BlockQ4_1, 32>,
        T::Q5_0 => encode_all::<legacy::BlockQ5_0, 32>,
        T::Q5_1 => encode_all::<legacy::BlockQ5_1, 32>,
        T::Q8_0 => encode_all::<legacy::BlockQ8_0, 32>,
        T::Q8_K => encode_all::<k_quants::BlockQ8K, 256>,
        T::TQ1_0 => encode_all::<ternary::BlockTq1_0, 256>,
        T::TQ2_0 => encode_all::<ternary::BlockTq2_0, 256>,
        T::MXFP4 => encode_all::<fp4::BlockMxfp4, 32>,
        _ => return None,
    })
}

fn scalars<const B: usize>(values: &[f32], out: &mut [u8], convert: impl Fn(f32) -> [u8; B]) {
    for (&value, out) in values.iter().zip(out.as_chunks_mut::<B>().0) {
        *out = convert(value);
    }
}
