//! What all group schemes share once they are unpacked: a scale and a zero point for each group of input
//! features, and codes as they lie in a file.
//!
//! `weight[o, i] = scale[g, o] · (code[o, i] − zero[g, o])`, `g` the group of input feature `i`. A
//! backend repacks from this; how a scheme lies in a file is known to [`gptq`](crate::gptq),
//! [`awq`](crate::awq) and [`compressed`](crate::compressed_tensors), which give [`PackedCodes`].

use crate::error::Result;
use crate::packed_matrix::Matrix;
use ferrum_types::SrcDtype;
use half::{bf16, f16};

/// The bit at which each of the eight columns of a word of AWQ starts.
pub const COLUMN_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// A layer but for its codes.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupParams {
    /// Bits of a code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// `[groups, out]`.
    pub scales: Vec<f32>,
    /// `[groups, out]`.
    pub zeros: Vec<u8>,
    /// The group of each input feature, `[in]`.
    pub group_of_input: Vec<usize>,
}

/// The codes of a layer as its file has them, of as many words as its sizes say.
#[derive(Clone, Copy, Debug)]
pub enum PackedCodes<'a> {
    /// `[in·bits/32, out]`: 32 codes of an output feature, one for each input feature, are a stream of `bits`
    /// words, lowest bits first.
    Columns(&'a [[u8; 4]]),
    /// `[out, ⌈in·bits/32⌉]`: the same stream along a row, of 4 or 8 bits.
    Rows(&'a [[u8; 4]]),
    /// `[in, out/8]`: four bits of eight output features, which begin at [`COLUMN_SHIFTS`].
    Interleaved(&'a [[u8; 4]]),
}

impl PackedCodes<'_> {
    /// The code of input feature `i` of output feature `o`.
    pub fn code(&self, layer: &GroupParams, o: usize, i: usize) -> u8 {
        let GroupParams {
            bits, out_features, ..
        } = *layer;
        let bits = bits as usize;
        let word = |words: &[[u8; 4]], at: usize| u64::from(u32::from_le_bytes(words[at]));
        let (first, shift) = (i * bits / 32, i * bits % 32);
        let stream = match *self {
            Self::Columns(words) => {
                let at = first * out_features + o;
                // A code of three bits may go on in the next word.
                let next = match shift + bits > 32 {
                    true => word(words, at + out_features) << 32,
                    false => 0,
                };
                (word(words, at) | next) >> shift
            }
            Self::Rows(words) => {
                let each = (layer.in_features * bits).div_ceil(32);
                word(words, o * each + first) >> shift
            }
            Self::Interleaved(words) => {
                word(words, i * (out_features / 8) + o / 8) >> COLUMN_SHIFTS[o % 8]
            }
        };
        (stream & ((1 << bits) - 1)) as u8
    }

    /// The codes of 32 input features of output feature `o`, from `first`, a multiple of 32, on; all of them are features of the
    /// layer.
    pub fn run_of_32(&self, layer: &GroupParams, o: usize, first: usize) -> [u8; 32] {
        let outputs = layer.out_features;
        let of_words = |words: &[[u8; 4]], at: usize, stride: usize| {
            let word = |i: usize| u32::from_le_bytes(words[at + i * stride]);
            match layer.bits {
                2 => run_of_words::<2>(word),
                3 => run_of_words::<3>(word),
                4 => run_of_words::<4>(word),
                _ => run_of_words::<8>(word),
            }
        };
        let bits = layer.bits as usize;
        match *self {
            Self::Columns(words) => of_words(words, first / 32 * bits * outputs + o, outputs),
            Self::Rows(words) => {
                let each = (layer.in_features * bits).div_ceil(32);
                of_words(words, o * each + first / 32 * bits, 1)
            }
            Self::Interleaved(words) => {
                let (each, shift) = (outputs / 8, COLUMN_SHIFTS[o % 8]);
                let rows = &words[first * each + o / 8..];
                std::array::from_fn(|i| (u32::from_le_bytes(rows[i * each]) >> shift) as u8 & 0x0f)
            }
        }
    }
}

/// The codes of a stream of `BITS` words, lowest bits first.
fn run_of_words<const BITS: usize>(word: impl Fn(usize) -> u32) -> [u8; 32] {
    let mut words = [0; 9];
    for (i, to) in words.iter_mut().take(BITS).enumerate() {
        *to = word(i);
    }
    let eight = |run: usize| {
        // The bits of eight codes, which begin at a byte.
        let (at, shift) = (run * BITS / 4, run * BITS % 4 * 8);
        let both = u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        // Parted in halves until each code has a byte.
        let mut codes = both >> shift;
        for bytes in [8, 4, 2, 1] {
            let mask =
                u64::MAX / (u64::MAX >> (64 - 8 * bytes)) * (u64::MAX >> (64 - BITS * bytes));
            codes = (codes | codes << ((8 - BITS) * bytes)) & mask;
        }
        codes.to_le_bytes()
    };
    bytemuck::cast([eight(0), eight(1), eight(2), eight(3)])
}

/// The order of input features in which those of a group follow one another (those of one group as
/// they were); `None` when they do so as they are.
pub fn group_order(group_of_input: &[usize]) -> Option<Vec<u32>> {
    if group_of_input.is_sorted() {
        return None;
    }
    let mut order: Vec<u32> = (0..).take(group_of_input.len()).collect();
    order.sort_by_key(|&i| group_of_input[i as usize]);
    Some(order)
}

/// Input features of each group that has any, in the order of the groups.
pub fn group_lengths(group_of_input: &[usize]) -> Vec<usize> {
    let groups = group_of_input.iter().max().map_or(0, |last| last + 1);
    let mut lengths = vec![0; groups];
    for &group in group_of_input {
        lengths[group] += 1;
    }
    lengths.retain(|&length| length > 0);
    lengths
}

/// The elements of a tensor of scales as f32, exactly.
pub(crate) fn floats(
    matrix: Matrix,
    tensor: &'static str,
    (bytes, dtype): (&[u8], SrcDtype),
    expected: usize,
) -> Result<Vec<f32>> {
    Ok(match dtype {
        SrcDtype::F32 => {
            let all = matrix.tensor::<4>(tensor, bytes, expected)?;
            all.iter().map(|&b| f32::from_le_bytes(b)).collect()
        }
        SrcDtype::F16 => {
            let all = matrix.tensor::<2>(tensor, bytes, expected)?;
            all.iter()
                .map(|&b| f16::from_le_bytes(b).to_f32())
                .collect()
        }
        SrcDtype::BF16 => {
            let all = matrix.tensor::<2>(tensor, bytes, expected)?;
            all.iter()
                .map(|&b| bf16::from_le_bytes(b).to_f32())
                .collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_the_codes_one_by_one() {
        let words: Vec<[u8; 4]> = (0..4096u32)
            .map(|i| {
                i.wrapping_mul(0x9e37_79b9)
                    .rotate_left(i % 31)
                    .to_le_bytes()
            })
            .collect();
        let [columns, rows, interleaved] = [
            PackedCodes::Columns,
            PackedCodes::Rows,
            PackedCodes::Interleaved,
        ]
        .map(|of| of(&words));
        for (codes, bits) in [
            (columns, 2),
            (columns, 3),
            (columns, 4),
            (columns, 8),
            (rows, 4),
            (rows, 8),
            (interleaved, 4),
        ] {
            // Rows may end in the middle of a word.
            let layer = GroupParams {
                bits,
                in_features: 100,
                out_features: 24,
                scales: Vec::new(),
                zeros: Vec::new(),
                group_of_input: Vec::new(),
            };
            for (o, first) in [(0, 0), (7, 32), (23, 64), (12, 64)] {
                let expected = std::array::from_fn(|i| codes.code(&layer, o, first + i));
                let found = codes.run_of_32(&layer, o, first);
                assert_eq!(found, expected, "{bits} bits, output {o}, from {first}");
            }
        }
    }

    #[test]
    fn inputs_of_a_group_are_brought_together() {
        assert_eq!(group_order(&[0, 0, 1, 2]), None);
        assert_eq!(group_order(&[1, 0, 1, 0]), Some(vec![1, 3, 0, 2]));
        assert_eq!(group_lengths(&[1, 0, 1, 3]), [1, 2, 1]);
        assert_eq!(group_lengths(&[]), [0usize; 0]);
    }
}
