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
    fn inputs_of_a_group_are_brought_together() {
        assert_eq!(group_order(&[0, 0, 1, 2]), None);
        assert_eq!(group_order(&[1, 0, 1, 0]), Some(vec![1, 3, 0, 2]));
        assert_eq!(group_lengths(&[1, 0, 1, 3]), [1, 2, 1]);
        assert_eq!(group_lengths(&[]), [0usize; 0]);
    }
}
