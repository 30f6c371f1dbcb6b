//! GPTQ checkpoints: integer codes of 2, 3, 4 or 8 bits with a scale and a zero point per group.
//!
//! `weight[o, i] = scale[g, o] · (code[i, o] − zero[g, o])` with `g` the group of input feature
//! `i`. Source of the method: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
//! Transformers" (Frantar et al., 2022); of the layout: what AutoGPTQ and GPTQModel write.
//!
//! Codes are packed along the input features: `qweight` is i32 `[in·bits/32, out]`, and in each
//! column 32 codes are a little-endian stream of `bits` words (so a 3-bit code may straddle two
//! words). Zero points are packed in the same way along the output features: `qzeros` is i32
//! `[groups, out·bits/32]`. `scales` is f16 `[groups, out]`. With activation order (`desc_act`),
//! `g_idx` i32 `[in]` names the group of each input feature; otherwise groups are runs of
//! `group_size` features.

use crate::block::F16Le;
use crate::error::{QuantError, Result};

const FORMAT: &str = "gptq";

/// What the stored zero points mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroPoints {
    /// `checkpoint_format = "gptq"` (version 1): one less than meant.
    ///
    /// Writers take 1 from every packed field at once, so a zero point of 0 wraps around and
    /// borrows from the next field of its word. Reading adds the 1 back to the packed word, which
    /// undoes both.
    MinusOne,
    /// `checkpoint_format = "gptq_v2"`: as meant.
    AsIs,
}

/// A GPTQ linear layer as it lies in a checkpoint: little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct GptqTensors<'a> {
    /// Bits of a code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Input features in a group; the last group may be short.
    pub group_size: usize,
    /// Meaning of `qzeros`.
    pub zero_points: ZeroPoints,
    /// Input features; a multiple of 32 / bits (of 32 for 3 bits).
    pub in_features: usize,
    /// Output features; a multiple of the same.
    pub out_features: usize,
    /// i32 `[in·bits/32, out]`.
    pub qweight: &'a [u8],
    /// i32 `[groups, out·bits/32]`.
    pub qzeros: &'a [u8],
    /// f16 `[groups, out]`.
    pub scales: &'a [u8],
    /// i32 `[in]`, or `None` for runs of `group_size`.
    pub g_idx: Option<&'a [u8]>,
}

/// How many codes make a packing unit, and of how many words: no code straddles two units.
#[derive(Clone, Copy)]
struct Unit {
    bits: u32,
    codes: usize,
    words: usize,
}

impl Unit {
    fn new(bits: u32) -> Result<Self> {
        let (codes, words) = match bits {
            2 => (16, 1),
            3 => (32, 3),
            4 => (8, 1),
            8 => (4, 1),
            _ => return Err(parameter("bits", bits as usize, "2, 3, 4 or 8")),
        };
        Ok(Unit { bits, codes, words })
    }

    /// Words that hold `count` codes.
    fn words_for(self, what: &'static str, count: usize) -> Result<usize> {
        if count == 0 || !count.is_multiple_of(self.codes) {
            let expected = "a positive multiple of the codes in a packing unit (32 / bits, or 32)";
            return Err(parameter(what, count, expected));
        }
        // Not larger than `count`, so it cannot overflow.
        Ok(count / self.codes * self.words)
    }

    /// Splits a packed unit into its codes.
    #[inline(always)]
    fn unpack(self, packed: u128, codes: &mut [u8]) {
        let mask = (1u128 << self.bits) - 1;
        if self.words == 1 {
            // 128-bit shifts are slow and not needed here.
            let packed = packed as u32;
            for (code, shift) in codes.iter_mut().zip((0..).step_by(self.bits as usize)) {
                *code = ((packed >> shift) & mask as u32) as u8;
            }
        } else {
            for (code, shift) in codes.iter_mut().zip((0..).step_by(self.bits as usize)) {
                *code = ((packed >> shift) & mask) as u8;
            }
        }
    }

    fn pack(self, codes: impl Iterator<Item = u8>) -> u128 {
        let shifts = (0..).step_by(self.bits as usize);
        codes.zip(shifts).fold(0, |packed, (code, shift)| {
            packed | (u128::from(code) << shift)
        })
    }

    /// 1 in every field of a unit.
    fn ones(self) -> u128 {
        self.pack(std::iter::repeat_n(1, self.codes))
    }
}

fn parameter(what: &'static str, found: usize, expected: &'static str) -> QuantError {
    QuantError::Parameter {
        format: FORMAT,
        what,
        found: i64::try_from(found).unwrap_or(i64::MAX),
        expected,
    }
}

/// `Ok` when `bytes` hold `expected` elements of `element` bytes.
pub(crate) fn check_bytes(
    format: &'static str,
    tensor: &'static str,
    bytes: &[u8],
    element: usize,
    expected: usize,
) -> Result<()> {
    if expected.checked_mul(element) == Some(bytes.len()) {
        Ok(())
    } else {
        Err(QuantError::TensorSize {
            format,
            tensor,
            found: bytes.len() / element,
            expected,
        })
    }
}

/// `Ok` when an output slice has `expected` elements.
pub(crate) fn check_output(format: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        Ok(())
    } else {
        Err(QuantError::TensorSize {
            format,
            tensor: "output",
            found,
            expected,
        })
    }
}

/// A layer whose sizes and group indices have been checked.
struct Checked<'a> {
    unit: Unit,
    layer: GptqTensors<'a>,
    qweight: &'a [[u8; 4]],
    qzeros: &'a [[u8; 4]],
    scales: &'a [[u8; 2]],
    /// Group of each input feature.
    groups_of: Vec<usize>,
    groups: usize,
}

impl<'a> GptqTensors<'a> {
    /// Number of groups: ⌈in / group_size⌉ (1 for a group size of 0, which [`Self::validate`]
    /// refuses).
    pub fn groups(&self) -> usize {
        self.in_features.div_ceil(self.group_size.max(1)).max(1)
    }

    /// Checks bits, sizes and group indices.
    ///
    /// # Errors
    /// [`QuantError::Parameter`], [`QuantError::TensorSize`], [`QuantError::TooLarge`] or
    /// [`QuantError::GroupIndex`]; nothing is allocated for a layer whose sizes do not fit.
    pub fn validate(&self) -> Result<()> {
        self.check().map(|_| ())
    }

    fn check(&self) -> Result<Checked<'a>> {
        let (k, n) = (self.in_features, self.out_features);
        let unit = Unit::new(self.bits)?;
        let k_words = unit.words_for("in_features", k)?;
        let n_words = unit.words_for("out_features", n)?;
        if self.group_size == 0 {
            return Err(parameter("group_size", 0, "at least 1"));
        }
        let groups = self.groups();
        // All products below are at most in × out.
        if k.checked_mul(n).is_none() {
            return Err(QuantError::TooLarge {
                format: FORMAT,
                in_features: k,
                out_features: n,
            });
        }
        check_bytes(FORMAT, "qweight", self.qweight, 4, k_words * n)?;
        check_bytes(FORMAT, "qzeros", self.qzeros, 4, groups * n_words)?;
        check_bytes(FORMAT, "scales", self.scales, 2, groups * n)?;
        let groups_of = match self.g_idx {
            None => (0..k).map(|i| i / self.group_size).collect(),
            Some(bytes) => {
                check_bytes(FORMAT, "g_idx", bytes, 4, k)?;
                group_indices(bytes, groups)?
            }
        };
        Ok(Checked {
            unit,
            layer: *self,
            qweight: self.qweight.as_chunks().0,
            qzeros: self.qzeros.as_chunks().0,
            scales: self.scales.as_chunks().0,
            groups_of,
            groups,
        })
    }

    /// The integer codes, `[out, in]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::TensorSize`] when `out` has another size.
    pub fn codes(&self, out: &mut [u8]) -> Result<()> {
        let checked = self.check()?;
        check_output(FORMAT, out.len(), self.in_features * self.out_features)?;
        let k = self.in_features;
        checked.for_each_unit(|column, first, codes| {
            out[column * k + first..][..codes.len()].copy_from_slice(codes);
        });
        Ok(())
    }

    /// The zero points as meant, `[groups, out]`.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::TensorSize`] when `out` has another size.
    pub fn zeros(&self, out: &mut [u8]) -> Result<()> {
        let checked = self.check()?;
        check_output(FORMAT, out.len(), checked.groups * self.out_features)?;
        checked.zeros(out);
        Ok(())
    }

    /// The group of each input feature, `[in]`.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn groups_of_inputs(&self) -> Result<Vec<usize>> {
        self.check().map(|checked| checked.groups_of)
    }

    /// The weights, f32 `[out, in]`. Each is exact: a 9-bit integer times an f16.
    ///
    /// # Errors
    /// As [`Self::validate`]; [`QuantError::TensorSize`] when `out` has another size.
    pub fn dequantize(&self, out: &mut [f32]) -> Result<()> {
        let checked = self.check()?;
        check_output(FORMAT, out.len(), self.in_features * self.out_features)?;
        let (k, n) = (self.in_features, self.out_features);
        let mut zeros = vec![0; checked.groups * n];
        checked.zeros(&mut zeros);
        checked.for_each_unit(|column, first, codes| {
            let out = out[column * k + first..][..codes.len()].iter_mut();
            let groups = &checked.groups_of[first..][..codes.len()];
            for ((out, &code), &group) in out.zip(codes).zip(groups) {
                let at = group * n + column;
                let scale = F16Le(checked.scales[at]).to_f32();
                *out = scale * (i32::from(code) - i32::from(zeros[at])) as f32;
            }
        });
        Ok(())
    }
}

fn group_indices(bytes: &[u8], groups: usize) -> Result<Vec<usize>> {
    let indices = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .copied()
        .map(i32::from_le_bytes);
    let checked = indices.enumerate().map(|(position, found)| {
        usize::try_from(found)
            .ok()
            .filter(|&group| group < groups)
            .ok_or(QuantError::GroupIndex {
                position,
                found,
                groups,
            })
    });
    checked.collect()
}

impl Checked<'_> {
    /// Calls `each(column, first input feature, codes)` for every packing unit.
    ///
    /// Columns go in tiles, so that reads use the most of a cache line of `qweight` and the writes
    /// of a transposed result go to few lines at a time.
    fn for_each_unit(&self, mut each: impl FnMut(usize, usize, &[u8])) {
        const TILE: usize = 16;
        let n = self.layer.out_features;
        let unit = self.unit;
        let mut buffer = [0; 32];
        let codes = &mut buffer[..unit.codes];
        for tile in (0..n).step_by(TILE) {
            // [words][out]
            for (i, rows) in self.qweight.chunks_exact(unit.words * n).enumerate() {
                for column in tile..n.min(tile + TILE) {
                    let words = rows.iter().skip(column).step_by(n);
                    unit.unpack(join(words), codes);
                    each(column, i * unit.codes, codes);
                }
            }
        }
    }

    fn zeros(&self, out: &mut [u8]) {
        let unit = self.unit;
        let offset = match self.layer.zero_points {
            ZeroPoints::MinusOne => unit.ones(),
            ZeroPoints::AsIs => 0,
        };
        let packed = self.qzeros.chunks_exact(unit.words);
        for (words, out) in packed.zip(out.chunks_exact_mut(unit.codes)) {
            unit.unpack(join(words.iter()).wrapping_add(offset), out);
        }
    }
}

/// Words of a unit as one number, the first lowest.
#[inline(always)]
fn join<'a>(words: impl Iterator<Item = &'a [u8; 4]>) -> u128 {
    let shifts = (0..).step_by(32);
    words.zip(shifts).fold(0, |packed, (&word, shift)| {
        packed | (u128::from(u32::from_le_bytes(word)) << shift)
    })
}

/// Packs codes `[out, in]` into the bytes of `qweight`.
///
/// # Errors
/// [`QuantError::Parameter`] for sizes that do not pack or a code that needs more than `bits`,
/// [`QuantError::TensorSize`] when `codes` has another size than `in_features · out_features`.
pub fn pack_codes(
    bits: u32,
    codes: &[u8],
    in_features: usize,
    out_features: usize,
) -> Result<Vec<u8>> {
    let (k, n) = (in_features, out_features);
    let unit = Unit::new(bits)?;
    unit.words_for("in_features", k)?;
    check_output_size(codes.len(), k, n)?;
    check_range(bits, codes)?;
    let mut out = Vec::with_capacity(codes.len() / unit.codes * unit.words * 4);
    for first in (0..k).step_by(unit.codes) {
        let rows = codes.chunks_exact(k);
        let units: Vec<u128> = rows
            .map(|row| unit.pack(row[first..][..unit.codes].iter().copied()))
            .collect();
        for word in 0..unit.words {
            let words = units.iter().map(|&packed| (packed >> (32 * word)) as u32);
            out.extend(words.flat_map(u32::to_le_bytes));
        }
    }
    Ok(out)
}

/// Packs zero points `[groups, out]` into the bytes of `qzeros`.
///
/// # Errors
/// [`QuantError::Parameter`] for a number of output features that does not pack or a zero point
/// that needs more than `bits`; [`QuantError::TensorSize`] when `zeros` is not whole groups.
pub fn pack_zeros(
    bits: u32,
    zero_points: ZeroPoints,
    zeros: &[u8],
    out_features: usize,
) -> Result<Vec<u8>> {
    let unit = Unit::new(bits)?;
    unit.words_for("out_features", out_features)?;
    let groups = zeros.len() / out_features;
    check_output_size(zeros.len(), groups, out_features)?;
    check_range(bits, zeros)?;
    let offset = match zero_points {
        ZeroPoints::MinusOne => unit.ones(),
        ZeroPoints::AsIs => 0,
    };
    let mut out = Vec::with_capacity(zeros.len() / unit.codes * unit.words * 4);
    for codes in zeros.chunks_exact(unit.codes) {
        let packed = unit.pack(codes.iter().copied()).wrapping_sub(offset);
        out.extend_from_slice(&packed.to_le_bytes()[..4 * unit.words]);
    }
    Ok(out)
}

fn check_output_size(found: usize, a: usize, b: usize) -> Result<()> {
    let expected = a.checked_mul(b).ok_or(QuantError::TooLarge {
        format: FORMAT,
        in_features: a,
        out_features: b,
    })?;
    if found == expected {
        Ok(())
    } else {
        Err(QuantError::TensorSize {
            format: FORMAT,
            tensor: "codes",
            found,
            expected,
        })
    }
}

fn check_range(bits: u32, codes: &[u8]) -> Result<()> {
    match codes.iter().find(|&&code| u32::from(code) >> bits != 0) {
        None => Ok(()),
        Some(&code) => Err(parameter("code", code.into(), "less than 2^bits")),
    }
}
