//! From f32 to stored bytes.
//!
//! [`quantize`] is the simple form: each block by itself, rounded to nearest, for the types that have
//! such a reference quantiser. Its results are bit-equal to those of the `gguf` Python package for
//! finite numbers (Q8_K, which it does not write, follows ggml; so does the sign of a zero minimum in
//! Q4_1 and Q5_1, which in the package depends on the CPU).
//!
//! [`encode_row`] is what files are made with: it searches for the scales that keep the weighted
//! error small ([`search`]), for the K types, IQ4 and those of the simple types that gain by it. A
//! type is a row in [`grid`]: its levels, how its scales are stored, and what numbers weigh.

mod levels;
mod pack;
mod places;
mod search;

use crate::block::{F16Le, encode_all};
use crate::error::{QuantError, Result};
use crate::integers::{CodeValues, Integers, SUB, code_values};
use crate::{fp4, k_quants, legacy, ternary};
use ferrum_types::GgufQuantType;
use levels::{E2M1, IQ4, Levels, Range};
use search::{Fit, Grid, MAX_BLOCK, Minimums, Scales, Unit, fit_block};

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
    check_lengths(ty, values, out)?;
    encode(values, out);
    Ok(())
}

/// Whether `values` are whole blocks and `out` has room for just these.
fn check_lengths(ty: GgufQuantType, values: &[f32], out: &[u8]) -> Result<()> {
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

/// Encodes one row of a matrix as `ty` into `out`, which has `ty.bytes_for(row.len())` bytes.
///
/// `importance` has a weight for each column of the matrix: the mean square of the activations that
/// it is multiplied with. Without it, larger numbers weigh a little more.
///
/// Never panics; blocks with NaN or infinities encode to unspecified numbers, except in the float
/// types, which keep them.
///
/// # Errors
/// As [`quantize`], for the types of [`can_encode`]; [`QuantError::Length`] also for an `importance`
/// of another length than the row.
pub fn encode_row(
    ty: GgufQuantType,
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<()> {
    if let Some(importance) = importance
        && importance.len() != row.len()
    {
        return Err(QuantError::Length {
            ty,
            what: "importance",
            found: importance.len(),
            expected: row.len(),
        });
    }
    let searched = grid(ty).filter(|kind| importance.is_some() || kind.gains);
    let (Some(kind), Some(values)) = (searched, code_values(ty)) else {
        return quantize(ty, row, out);
    };
    check_lengths(ty, row, out)?;
    match values {
        CodeValues::Unsigned { bits, zero } => {
            encode_blocks(ty, &kind, Range::new(bits, zero), row, importance, out);
        }
        CodeValues::Table(_) if ty == GgufQuantType::MXFP4 => {
            encode_blocks(ty, &kind, &*E2M1, row, importance, out);
        }
        CodeValues::Table(_) => encode_blocks(ty, &kind, &*IQ4, row, importance, out),
        // Eight bits are rounded to nearest.
        CodeValues::Signed => return quantize(ty, row, out),
    }
    Ok(())
}

/// Whether [`encode_row`] can write this type.
pub fn can_encode(ty: GgufQuantType) -> bool {
    grid(ty).is_some() || can_quantize(ty)
}

/// What a number's error counts when nothing is known of activations.
///
/// With every column alike, the error of a product is the plain squared error. Large numbers yet
/// deserve a little more than their share: a column with large weights is more often one that matters.
/// Counting by the square, as one may for a coarse search, makes a thorough one worse: it gives up
/// the many for the few (see `docs/quantize.md`).
#[derive(Clone, Copy, Debug)]
enum Emphasis {
    /// All the same.
    Even,
    /// By magnitude, on top of the block's root mean square.
    Magnitude,
}

/// A type that the search can encode.
struct Kind {
    grid: Grid,
    emphasis: Emphasis,
    /// Whether the search is used without importance too; else rounding to nearest is.
    gains: bool,
}

/// What the search has to know of a type beside its [`code_values`].
fn grid(ty: GgufQuantType) -> Option<Kind> {
    use Emphasis::{Even, Magnitude};
    use GgufQuantType as T;
    let (sub, scales, minimums, emphasis, gains) = match ty {
        T::Q4_0 => (32, Scales::One, Minimums::None, Even, false),
        T::Q5_0 => (32, Scales::One, Minimums::None, Even, false),
        T::Q4_1 => (32, Scales::One, Minimums::One, Even, false),
        T::Q5_1 => (32, Scales::One, Minimums::One, Even, false),
        T::IQ4_NL => (32, Scales::One, Minimums::None, Magnitude, true),
        T::MXFP4 => (32, Scales::One, Minimums::None, Even, true),
        T::IQ4_XS => (32, Scales::Steps(-32, 31), Minimums::None, Magnitude, true),
        T::Q3_K => (16, Scales::Steps(-32, 31), Minimums::None, Magnitude, true),
        T::Q6_K => (
            16,
            Scales::Steps(-128, 127),
            Minimums::None,
            Magnitude,
            true,
        ),
        T::Q2_K => (
            16,
            Scales::Steps(0, 15),
            Minimums::Steps(15),
            Magnitude,
            true,
        ),
        T::Q4_K => (
            32,
            Scales::Steps(0, 63),
            Minimums::Steps(63),
            Magnitude,
            true,
        ),
        T::Q5_K => (
            32,
            Scales::Steps(0, 63),
            Minimums::Steps(63),
            Magnitude,
            true,
        ),
        _ => return None,
    };
    let unit = match ty {
        T::MXFP4 => Unit::Power,
        _ => Unit::F16,
    };
    Some(Kind {
        grid: Grid {
            sub,
            scales,
            minimums,
            unit,
        },
        emphasis,
        gains,
    })
}

/// Encodes on the instruction set that there is. The lengths are checked.
fn encode_blocks<L: Levels>(
    ty: GgufQuantType,
    kind: &Kind,
    levels: L,
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the function asks for AVX2 and nothing else, and this CPU has it.
        return unsafe { encode_blocks_avx2(ty, kind, levels, row, importance, out) };
    }
    encode_each(ty, kind, levels, row, importance, out);
}

/// [`encode_each`] with eight numbers to a register.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_blocks_avx2<L: Levels>(
    ty: GgufQuantType,
    kind: &Kind,
    levels: L,
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) {
    encode_each(ty, kind, levels, row, importance, out);
}

#[inline(always)]
fn encode_each<L: Levels>(
    ty: GgufQuantType,
    kind: &Kind,
    levels: L,
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) {
    let len = ty.block_len();
    let mut weights = [0.0; MAX_BLOCK];
    let weights = &mut weights[..len];
    // Importance of any size; the search works near 1.
    let mean = importance.map_or(1.0, |all| all.iter().sum::<f32>() / all.len() as f32);
    let blocks = row
        .chunks_exact(len)
        .zip(out.chunks_exact_mut(ty.block_bytes()));
    for (i, (x, out)) in blocks.enumerate() {
        let importance = importance.map(|all| &all[i * len..][..len]);
        weigh(kind.emphasis, x, importance, mean, weights);
        let fit = fit_block(&kind.grid, levels, x, weights);
        pack::pack(ty, &parts_of(&kind.grid, levels, &fit, len), out);
    }
}

/// What each number's error counts.
fn weigh(
    emphasis: Emphasis,
    x: &[f32],
    importance: Option<&[f32]>,
    mean: f32,
    weights: &mut [f32],
) {
    let square = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
    match importance {
        Some(importance) => {
            for ((w, &x), &q) in weights.iter_mut().zip(x).zip(importance) {
                // A column that no text has touched keeps a trace of weight.
                *w = (q / mean).max(1e-6) * (square + x * x).sqrt();
            }
        }
        None => {
            let root = square.sqrt();
            for (w, &x) in weights.iter_mut().zip(x) {
                *w = match emphasis {
                    Emphasis::Even => 1.0,
                    Emphasis::Magnitude => root + x.abs(),
                };
            }
        }
    }
}

/// The codes and steps of a fit of `len` numbers, as they are stored.
fn parts_of<L: Levels>(grid: &Grid, levels: L, fit: &Fit, len: usize) -> Integers {
    let mut parts = Integers::ZERO;
    (parts.d, parts.dmin) = (fit.d, fit.dmin);
    for (code, &level) in parts.codes.iter_mut().zip(&fit.levels[..len]) {
        *code = levels.code(level);
    }
    for i in 0..MAX_BLOCK / SUB {
        let sub = i * SUB / grid.sub;
        parts.scales[i] = fit.scales[sub] as i8;
        parts.minimums[i] = fit.minimums[sub] as u8;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instruction_set_changes_no_byte() {
        let mut state = 3u64;
        let mut number = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            // Magnitudes from far below to far above the usual.
            f32::from_bits(((state >> 33) as u32 & 0x8fff_ffff) + 0x3000_0000)
        };
        let row: Vec<f32> = (0..4096).map(|_| number()).collect();
        for ty in GgufQuantType::all() {
            let (Some(kind), Some(values)) = (grid(ty), code_values(ty)) else {
                continue;
            };
            let mut bytes = [(); 2].map(|()| vec![0; ty.bytes_for(row.len()).unwrap_or(0)]);
            let [here, plain] = &mut bytes;
            match values {
                CodeValues::Unsigned { bits, zero } => {
                    let levels = Range::new(bits, zero);
                    encode_blocks(ty, &kind, levels, &row, None, here);
                    encode_each(ty, &kind, levels, &row, None, plain);
                }
                _ => {
                    encode_blocks(ty, &kind, &*IQ4, &row, None, here);
                    encode_each(ty, &kind, &*IQ4, &row, None, plain);
                }
            }
            assert!(here == plain, "{ty}");
        }
    }
}
