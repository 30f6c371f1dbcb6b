//! The kernels of weights that are integers, by their number of bits, and the parameters that all of them have of a weight.
//!
//! Products of a few rows (`quant.rs`), tiles (`tile.rs`) and experts (`moe.rs`) launch them.

use super::context::Arg;
use super::pack::{Format, PackedSlab};

/// The kernels of a number of bits.
pub(super) struct Kernels {
    /// Products of one, four and eight rows; of each those that write activations and f32.
    pub(super) products: [[&'static str; 2]; 3],
    /// Rows of a table.
    pub(super) embedding: &'static str,
    /// Products of pairs with the matrices of their experts.
    pub(super) experts: &'static str,
    /// Rows of the weight as activations are.
    pub(super) unpack: &'static str,
}

/// Those of this number of bits.
pub(super) fn kernels(bits: u32) -> Kernels {
    macro_rules! of {
        ($bits:literal) => {
            Kernels {
                products: [of!($bits, "_1"), of!($bits, "_4"), of!($bits, "_8")],
                embedding: concat!("quant_embedding_", $bits),
                experts: concat!("quant_moe_", $bits),
                unpack: concat!("unpack_", $bits),
            }
        };
        ($bits:literal, $rows:literal) => {
            [
                concat!("quant_gemm_", $bits, $rows, "_act"),
                concat!("quant_gemm_", $bits, $rows, "_f32"),
            ]
        };
    }
    match bits {
        2 => of!(2),
        3 => of!(3),
        4 => of!(4),
        5 => of!(5),
        6 => of!(6),
        // Formats have no other numbers of bits.
        _ => of!(8),
    }
}

/// The parameters that all kernels have of a weight.
pub(super) fn weight_args(slab: &PackedSlab) -> [Arg; 7] {
    let Format {
        zero,
        table,
        has_min,
        ..
    } = slab.format;
    let [low, high, subs, d] = slab.planes().map(Arg::At);
    [
        low,
        high,
        subs,
        d,
        Arg::Int(zero),
        has_min.into(),
        Arg::Int(table),
    ]
}
