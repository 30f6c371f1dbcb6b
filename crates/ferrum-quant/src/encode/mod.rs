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

mod lanes;
mod levels;
mod pack;
mod round;
mod search;

use crate::block::encode_all;
use crate::error::{QuantError, Result};
use crate::unpack::{CodeValues, SUB as SUB_OF_PARTS, UnpackedBlock, code_values};
use crate::{fp4, k_quants, ternary};
use ferrum_types::GgufQuantType;
use half::slice::HalfFloatSliceExt;
use lanes::{InstructionSet, LANES, Lanes, SimdKernel};
use levels::{E2M1, IQ4, Levels, Range};
use search::{BlockScaleType, Effort, Minimums, ScaleFormat, Scales, SubBlocks, fit_blocks};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

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

/// Most numbers in a block.
const MAX_BLOCK: usize = 256;

type Encoder = fn(&[f32], &mut [u8]);

fn encoder(ty: GgufQuantType) -> Option<Encoder> {
    use GgufQuantType as T;
    Some(match ty {
        T::F32 => |v, o| scalars(v, o, f32::to_le_bytes),
        T::F16 => halves,
        T::BF16 => |v, o| scalars(v, o, |v| half::bf16::from_f32(v).to_le_bytes()),
        T::Q4_0 => |v, o| round::round(T::Q4_0, v, o),
        T::Q4_1 => |v, o| round::round(T::Q4_1, v, o),
        T::Q5_0 => |v, o| round::round(T::Q5_0, v, o),
        T::Q5_1 => |v, o| round::round(T::Q5_1, v, o),
        T::Q8_0 => |v, o| round::round(T::Q8_0, v, o),
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

/// As [`scalars`], several at a time: `half` asks the CPU for its instruction on each call.
fn halves(values: &[f32], out: &mut [u8]) {
    let mut converted = [half::f16::ZERO; 64];
    for (values, out) in values.chunks(64).zip(out.chunks_mut(128)) {
        let converted = &mut converted[..values.len()];
        converted.convert_from_f32_slice(values);
        for (out, half) in out.as_chunks_mut().0.iter_mut().zip(&*converted) {
            *out = half.to_le_bytes();
        }
    }
}

/// How long the search for scales looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Search {
    /// Few scales, each fitted once or twice.
    #[default]
    Fast,
    /// More of everything, for several times as long.
    Thorough,
}

impl Search {
    /// Both.
    pub const ALL: [Search; 2] = [Search::Fast, Search::Thorough];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Search::Fast => "fast",
            Search::Thorough => "thorough",
        }
    }

    fn effort(self) -> Effort {
        match self {
            Search::Fast => Effort {
                tries: 3,
                step: 0.3,
                refits: 2,
                reach: 1,
                rounds: 2,
            },
            Search::Thorough => Effort {
                tries: 7,
                step: 0.13,
                refits: 16,
                reach: 1,
                rounds: 4,
            },
        }
    }
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Search {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|search| search.name() == text);
        found.ok_or_else(|| format!("found \"{text}\", expected fast or thorough"))
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
    search: Search,
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
    let job = Job {
        ty,
        kind,
        effort: search.effort(),
        row,
        importance,
    };
    match values {
        // Eight bits are rounded to nearest.
        CodeValues::Signed => return quantize(ty, row, out),
        values => job.encode(InstructionSet::best(), values, out),
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
    grid: ScaleFormat,
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
    let scale_type = match ty {
        T::MXFP4 => BlockScaleType::Power,
        _ => BlockScaleType::F16,
    };
    Some(Kind {
        grid: ScaleFormat {
            sub,
            scales,
            minimums,
            scale_type,
        },
        emphasis,
        gains,
    })
}

/// A row to encode by search. The lengths are checked.
struct Job<'a> {
    ty: GgufQuantType,
    kind: Kind,
    effort: Effort,
    row: &'a [f32],
    importance: Option<&'a [f32]>,
}

impl Job<'_> {
    /// Encodes with an instruction set. Bytes are not searched.
    fn encode(&self, set: InstructionSet, values: CodeValues, out: &mut [u8]) {
        match (values, self.kind.grid.sub) {
            (CodeValues::Unsigned { bits, zero }, 16) => {
                self.encode_with::<_, 16>(set, Range::new(bits, zero), out);
            }
            (CodeValues::Unsigned { bits, zero }, _) => {
                self.encode_with::<_, 32>(set, Range::new(bits, zero), out);
            }
            (CodeValues::Table(_), _) if self.ty == GgufQuantType::MXFP4 => {
                self.encode_with::<_, 32>(set, &*E2M1, out);
            }
            (CodeValues::Table(_), _) => self.encode_with::<_, 32>(set, &*IQ4, out),
            (CodeValues::Signed, _) => {}
        }
    }

    /// Sub-blocks have `SUB` numbers.
    fn encode_with<L: Levels, const SUB: usize>(
        &self,
        set: InstructionSet,
        levels: L,
        out: &mut [u8],
    ) {
        set.run(Searched::<L, SUB> {
            job: self,
            levels,
            out,
        });
    }

    /// Encodes as many blocks at a time as there are lanes for their sub-blocks.
    #[inline(always)]
    fn encode_as<V: Lanes, L: Levels, const SUB: usize>(&self, levels: L, out: &mut [u8]) {
        let (len, bytes) = (self.ty.block_len(), self.ty.block_bytes());
        let blocks = LANES * SUB / len;
        // Importance of any size; the search works near 1.
        let per_mean = self
            .importance
            .map_or(1.0, |all| all.len() as f32 / sum(all));
        let mut parts = UnpackedBlock::ZERO;
        let mut out = out.chunks_mut(blocks * bytes);
        for (i, x) in self.row.chunks(blocks * len).enumerate() {
            let x = runs::<SUB>(x);
            let importance = self.importance.map(|all| {
                let here = &all[i * blocks * len..];
                runs::<SUB>(&here[..here.len().min(blocks * len)])
            });
            let subs = SubBlocks {
                weighted_values: weighed::<V, SUB>(
                    self.kind.emphasis,
                    &x,
                    len / SUB,
                    importance.as_ref(),
                    per_mean,
                ),
                per_block: len / SUB,
            };
            let fit = fit_blocks(&self.kind.grid, &self.effort, levels, &subs);
            let mut codes = [V::splat(0.0); SUB];
            for (i, code) in codes.iter_mut().enumerate() {
                *code = levels.codes(fit.level(levels, subs.weighted_values[i].0));
            }
            let codes = codes_of(&codes);
            let (d, dmin) = (fit.d.store(), fit.dmin.store());
            let (scales, minimums) = (fit.scales.store(), fit.minimums.store());
            let Some(out) = out.next() else { break };
            for (block, out) in out.chunks_exact_mut(bytes).enumerate() {
                let first = block * subs.per_block;
                (parts.d, parts.dmin) = (d[first], dmin[first]);
                let codes = &codes[first..first + subs.per_block];
                parts.codes[..len].copy_from_slice(codes.as_flattened());
                for i in 0..MAX_BLOCK / SUB_OF_PARTS {
                    let sub = first + (i * SUB_OF_PARTS / SUB).min(subs.per_block - 1);
                    parts.scales[i] = scales[sub] as i8;
                    parts.minimums[i] = minimums[sub] as u8;
                }
                pack::pack(self.ty, &parts, out);
            }
        }
    }
}

/// A [`Job`] with the levels of its type.
struct Searched<'a, L, const SUB: usize> {
    job: &'a Job<'a>,
    levels: L,
    out: &'a mut [u8],
}

impl<L: Levels, const SUB: usize> SimdKernel for Searched<'_, L, SUB> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        self.job.encode_as::<V, L, SUB>(self.levels, self.out);
    }
}

/// The sub-blocks of as many lanes; those that are missing at the end of a row are 0.
#[inline(always)]
fn runs<const SUB: usize>(numbers: &[f32]) -> Cow<'_, [[f32; SUB]; LANES]> {
    let (runs, _) = numbers.as_chunks::<SUB>();
    match runs.first_chunk() {
        Some(runs) => Cow::Borrowed(runs),
        None => {
            let mut padded = [[0.0; SUB]; LANES];
            padded[..runs.len()].copy_from_slice(runs);
            Cow::Owned(padded)
        }
    }
}

/// The bytes of each lane's numbers, which are integers.
#[inline(always)]
fn codes_of<V: Lanes, const SUB: usize>(numbers: &[V; SUB]) -> [[u8; SUB]; LANES] {
    let mut codes = [[0; SUB]; LANES];
    let (fours, _) = numbers.as_chunks::<4>();
    for (i, &four) in fours.iter().enumerate() {
        let words = V::bytes(four);
        for (lane, codes) in codes.iter_mut().enumerate() {
            codes.as_chunks_mut().0[i] = words[lane].to_le_bytes();
        }
    }
    codes
}

/// The numbers of each sub-block, and what their errors count.
#[inline(always)]
fn weighed<V: Lanes, const SUB: usize>(
    emphasis: Emphasis,
    runs: &[[f32; SUB]; LANES],
    per_block: usize,
    importance: Option<&Cow<'_, [[f32; SUB]; LANES]>>,
    per_mean: f32,
) -> [(V, V); SUB] {
    let zero = V::splat(0.0);
    let mut numbers = [(zero, V::splat(1.0)); SUB];
    let mut square = zero;
    for (i, number) in numbers.iter_mut().enumerate() {
        number.0 = V::column(runs, i);
        square = square + number.0 * number.0;
    }
    let count = V::splat((per_block * SUB) as f32);
    let square = search::fold_blocks(square, per_block, |a, b| a + b) / count;
    match (importance, emphasis) {
        (Some(importance), _) => {
            let (per_mean, trace) = (V::splat(per_mean), V::splat(1e-6));
            for (i, (x, w)) in numbers.iter_mut().enumerate() {
                // A column that no text has touched keeps a trace of weight.
                let column = (V::column(importance, i) * per_mean).max(trace);
                *w = column * (square + *x * *x).sqrt();
            }
        }
        (None, Emphasis::Even) => {}
        (None, Emphasis::Magnitude) => {
            let root = square.sqrt();
            for (x, w) in &mut numbers {
                *w = root + x.abs();
            }
        }
    }
    numbers
}

/// The sum in an order that vectorises.
fn sum(numbers: &[f32]) -> f32 {
    let (chunks, rest) = numbers.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for (sum, number) in lanes.iter_mut().zip(chunk) {
            *sum += number;
        }
    }
    lanes.iter().chain(rest).sum()
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
        // Not a whole number of vectors' blocks. Miri is thousands of times slower: it gets a format of either kind of levels.
        let values = if cfg!(miri) { 256 } else { 4096 };
        let row: Vec<f32> = (0..values + 256).map(|_| number()).collect();
        let importance: Vec<f32> = row.iter().map(|x| x.abs().sqrt()).collect();
        for ty in GgufQuantType::all() {
            let (Some(values), Some(size)) = (code_values(ty), ty.bytes_for(row.len())) else {
                continue;
            };
            if cfg!(miri) && ![GgufQuantType::Q4_K, GgufQuantType::IQ4_NL].contains(&ty) {
                continue;
            }
            for search in [Search::Fast, Search::Thorough] {
                for importance in [None, Some(&*importance)] {
                    let Some(kind) = grid(ty) else { continue };
                    let job = Job {
                        ty,
                        kind,
                        effort: search.effort(),
                        row: &row,
                        importance,
                    };
                    let found: Vec<_> = InstructionSet::all()
                        .into_iter()
                        .map(|set| {
                            let mut bytes = vec![0; size];
                            job.encode(set, values, &mut bytes);
                            (set, bytes)
                        })
                        .collect();
                    for (set, bytes) in &found {
                        assert!(*bytes == found[0].1, "{ty}, {search}: {set:?}");
                    }
                }
            }
        }
    }
}
