//! What all group schemes share once they are unpacked: integers, and a scale and a zero point for
//! each group of input features.
//!
//! `weight[o, i] = scale[g, o] · (code[o, i] − zero[g, o])`, `g` the group of input feature `i`. A
//! backend repacks from this; how a scheme lies in a file is known to [`gptq`](crate::gptq),
//! [`awq`](crate::awq) and [`compressed`](crate::compressed) alone.

use crate::error::Result;
use crate::layer::Matrix;
use ferrum_types::SrcDtype;
use half::{bf16, f16};

/// A layer taken apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Affine {
    /// Bits of a code.
    pub bits: u32,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// `[out, in]`.
    pub codes: Vec<u8>,
    /// `[groups, out]`.
    pub scales: Vec<f32>,
    /// `[groups, out]`.
    pub zeros: Vec<u8>,
    /// The group of each input feature, `[in]`.
    pub of_inputs: Vec<usize>,
}

impl Affine {
    /// The weights, f32 `[out, in]`: an integer of at most 9 bits times a scale, rounded once.
    pub fn values(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.codes.len());
        if self.in_features == 0 {
            return out;
        }
        for (o, codes) in self.codes.chunks_exact(self.in_features).enumerate() {
            for (&code, &group) in codes.iter().zip(&self.of_inputs) {
                let at = group * self.out_features + o;
                let steps = i32::from(code) - i32::from(self.zeros[at]);
                out.push(self.scales[at] * steps as f32);
            }
        }
        out
    }
}

/// The order of input features in which those of a group follow one another (those of one group as
/// they were); `None` when they do so as they are.
pub fn group_order(of_inputs: &[usize]) -> Option<Vec<u32>> {
    if of_inputs.is_sorted() {
        return None;
    }
    let mut order: Vec<u32> = (0..).take(of_inputs.len()).collect();
    order.sort_by_key(|&i| of_inputs[i as usize]);
    Some(order)
}

/// Input features of each group that has any, in the order of the groups.
pub fn group_lengths(of_inputs: &[usize]) -> Vec<usize> {
    let groups = of_inputs.iter().max().map_or(0, |last| last + 1);
    let mut lengths = vec![0; groups];
    for &group in of_inputs {
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
