//! From stored bytes to f32: whole tensors, single rows, and dot products as a yardstick.

use crate::block::{decode_all, f16_bits_to_f32};
use crate::error::{QuantError, Result};
use crate::{fp4, iq, k_quants, legacy, ternary};
use ferrum_types::GgufQuantType;

/// Decodes `bytes` of type `ty` into `out`, in order.
///
/// Works for every [`GgufQuantType`]. Block types, F16, BF16 and I8/I16 are exact up to the f32
/// arithmetic the format defines; F64, I32 and I64 round to the nearest f32.
///
/// # Errors
/// [`QuantError::PartialBlock`] when `bytes` is not a whole number of blocks,
/// [`QuantError::Length`] when `out` does not hold exactly the numbers of those blocks.
pub fn dequantize(ty: GgufQuantType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    check_len(ty, bytes, "output", out.len())?;
    decoder(ty)(bytes, out)
}

/// Σ wᵢ·xᵢ in f64, with w decoded from `bytes`: what every quantised kernel is measured against.
///
/// # Errors
/// As [`dequantize`], for `x` in the place of the output.
pub fn dot_reference(ty: GgufQuantType, bytes: &[u8], x: &[f32]) -> Result<f64> {
    check_len(ty, bytes, "vector", x.len())?;
    let decode = decoder(ty);
    let (block_bytes, block_len) = (ty.block_bytes(), ty.block_len());
    let mut buffer = [0.0f32; 256];
    let mut sum = 0.0;
    // A block type has at most 256 numbers in a block; the others are taken one by one.
    let (buffer, _) = buffer.split_at_mut(block_len.min(256));
    for (block, x) in bytes
        .chunks_exact(block_bytes)
        .zip(x.chunks_exact(block_len))
    {
        decode(block, buffer)?;
        for (&w, &x) in buffer.iter().zip(x) {
            sum += f64::from(w) * f64::from(x);
        }
    }
    Ok(sum)
}

/// A tensor of `ty` seen as rows of equal length, each decoded on demand.
///
/// This is how an embedding table is read and how a large tensor is converted without holding all
/// of it in f32.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    ty: GgufQuantType,
    bytes: &'a [u8],
    row_len: usize,
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    /// `bytes` as rows of `row_len` numbers.
    ///
    /// # Errors
    /// [`QuantError::RowLength`] when a row is empty or not a whole number of blocks,
    /// [`QuantError::Length`] when `bytes` is not a whole number of rows.
    pub fn new(ty: GgufQuantType, bytes: &'a [u8], row_len: usize) -> Result<Self> {
        let row_bytes = match ty.bytes_for(row_len) {
            Some(row_bytes) if row_bytes > 0 => row_bytes,
            _ => {
                return Err(QuantError::RowLength {
                    ty,
                    found: row_len,
                    block_len: ty.block_len(),
                });
            }
        };
        if !bytes.len().is_multiple_of(row_bytes) {
            return Err(QuantError::Length {
                ty,
                what: "last row in bytes",
                found: bytes.len() % row_bytes,
                expected: row_bytes,
            });
        }
        Ok(Rows {
            ty,
            bytes,
            row_len,
            row_bytes,
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Numbers in a row.
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// The stored bytes of one row.
    ///
    /// # Errors
    /// [`QuantError::NoSuchRow`].
    pub fn bytes(&self, row: usize) -> Result<&'a [u8]> {
        row.checked_mul(self.row_bytes)
            .and_then(|start| self.bytes.get(start..)?.get(..self.row_bytes))
            .ok_or(QuantError::NoSuchRow {
                ty: self.ty,
                row,
                rows: self.len(),
            })
    }

    /// Decodes one row into `out`, which has [`Rows::row_len`] elements.
    ///
    /// # Errors
    /// [`QuantError::NoSuchRow`], or [`QuantError::Length`] for a wrong `out`.
    pub fn decode(&self, row: usize, out: &mut [f32]) -> Result<()> {
        dequantize(self.ty, self.bytes(row)?, out)
    }

    /// Decodes row after row into one buffer and hands each to `each` with its number.
    ///
    /// # Errors
    /// None from here; the first error of `each` ends the walk.
    pub fn try_for_each<E: From<QuantError>>(
        &self,
        mut each: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = vec![0.0; self.row_len];
        for row in 0..self.len() {
            self.decode(row, &mut buffer)?;
            each(row, &buffer)?;
        }
        Ok(())
    }
}

/// `Ok` when `bytes` hold exactly `found` numbers.
fn check_len(ty: GgufQuantType, bytes: &[u8], what: &'static str, found: usize) -> Result<()> {
    if !bytes.len().is_multiple_of(ty.block_bytes()) {
        return Err(QuantError::PartialBlock {
            ty,
            found: bytes.len(),
            block_bytes: ty.block_bytes(),
        });
    }
    let blocks = bytes.len() / ty.block_bytes();
    // Saturation is safe: no slice of f32 is that long.
    let expected = blocks.saturating_mul(ty.block_len());
    if found == expected {
        Ok(())
    } else {
        Err(QuantError::Length {
            ty,
            what,
            found,
            expected,
        })
    }
}

type Decoder = fn(&[u8], &mut [f32]) -> Result<()>;

/// The decoder of a type; its lengths are checked before it is called.
fn decoder(ty: GgufQuantType) -> Decoder {
    use GgufQuantType as T;
    match ty {
        T::F32 => |b, o| scalars(b, o, f32::from_le_bytes),
        T::F16 => |b, o| scalars(b, o, |v| f16_bits_to_f32(u16::from_le_bytes(v))),
        T::BF16 => |b, o| {
            scalars(b, o, |v| {
                f32::from_bits(u32::from(u16::from_le_bytes(v)) << 16)
            })
        },
        T::F64 => |b, o| scalars(b, o, |v| f64::from_le_bytes(v) as f32),
        T::I8 => |b, o| scalars(b, o, |v| f32::from(i8::from_le_bytes(v))),
        T::I16 => |b, o| scalars(b, o, |v| f32::from(i16::from_le_bytes(v))),
        T::I32 => |b, o| scalars(b, o, |v| i32::from_le_bytes(v) as f32),
        T::I64 => |b, o| scalars(b, o, |v| i64::from_le_bytes(v) as f32),
        T::Q4_0 => decode_all::<legacy::BlockQ4_0, 32>,
        T::Q4_1 => decode_all::<legacy::BlockQ4_1, 32>,
        T::Q5_0 => decode_all::<legacy::BlockQ5_0, 32>,
        T::Q5_1 => decode_all::<legacy::BlockQ5_1, 32>,
        T::Q8_0 => decode_all::<legacy::BlockQ8_0, 32>,
        T::Q8_1 => decode_all::<legacy::BlockQ8_1, 32>,
        T::Q2_K => decode_all::<k_quants::BlockQ2K, 256>,
        T::Q3_K => decode_all::<k_quants::BlockQ3K, 256>,
        T::Q4_K => decode_all::<k_quants::BlockQ4K, 256>,
        T::Q5_K => decode_all::<k_quants::BlockQ5K, 256>,
        T::Q6_K => decode_all::<k_quants::BlockQ6K, 256>,
        T::Q8_K => decode_all::<k_quants::BlockQ8K, 256>,
        T::IQ1_S => decode_all::<iq::BlockIq1S, 256>,
        T::IQ1_M => decode_all::<iq::BlockIq1M, 256>,
        T::IQ2_XXS => decode_all::<iq::BlockIq2Xxs, 256>,
        T::IQ2_XS => decode_all::<iq::BlockIq2Xs, 256>,
        T::IQ2_S => decode_all::<iq::BlockIq2S, 256>,
        T::IQ3_XXS => decode_all::<iq::BlockIq3Xxs, 256>,
        T::IQ3_S => decode_all::<iq::BlockIq3S, 256>,
        T::IQ4_NL => decode_all::<iq::BlockIq4Nl, 32>,
        T::IQ4_XS => decode_all::<iq::BlockIq4Xs, 256>,
        T::TQ1_0 => decode_all::<ternary::BlockTq1_0, 256>,
        T::TQ2_0 => decode_all::<ternary::BlockTq2_0, 256>,
        T::Q1_0 => decode_all::<ternary::BlockQ1_0, 128>,
        T::Q2_0 => decode_all::<ternary::BlockQ2_0, 64>,
        T::MXFP4 => decode_all::<fp4::BlockMxfp4, 32>,
        T::NVFP4 => decode_all::<fp4::BlockNvfp4, 64>,
    }
}

fn scalars<const B: usize>(
    bytes: &[u8],
    out: &mut [f32],
    convert: impl Fn([u8; B]) -> f32,
) -> Result<()> {
    for (out, &value) in out.iter_mut().zip(bytes.as_chunks::<B>().0) {
        *out = convert(value);
    }
    Ok(())
}
