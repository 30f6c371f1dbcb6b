//! The kernels of weights that are integers, by their number of bits, the parameters that all of them have of a weight, and rows
//! in the order of its columns.
//!
//! Products of a few rows (`quant.rs`, `quant_gemv.rs`), tiles (`tile.rs`) and experts (`moe.rs`) launch them.

use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::pack::{Format, PackedSlab};
use super::role::CudaAct;
use super::tile_operands::TileRows;
use crate::backend::check::elements;
use ferrum_types::Result;

/// The kernels of a number of bits.
pub(super) struct Kernels {
    /// Products of one, four and eight rows of f32.
    pub(super) products: [&'static str; 3],
    /// Rows of a table.
    pub(super) embedding: &'static str,
    /// Products of pairs with the matrices of their experts, of f32.
    pub(super) experts: &'static str,
    /// Rows of the weight as activations are.
    pub(super) unpack: &'static str,
    /// Products of 16 bits.
    pub(super) gemv: Gemv,
}

/// Kernels of `quant_gemv.cu` and `quant_pairs.cu`.
pub(super) struct Gemv {
    /// Of one row.
    pub(super) one: &'static str,
    /// Of up to eight rows.
    pub(super) eight: &'static str,
    /// Of pairs with the matrices of their experts.
    pub(super) pairs: &'static str,
    /// Of pairs with two matrices, gate and up, which become one number.
    pub(super) gated: &'static str,
}

/// Those of this format.
pub(super) fn kernels(format: Format) -> Kernels {
    macro_rules! of {
        ($bits:literal) => {
            of!($bits, $bits)
        };
        ($bits:literal, $gemv:literal) => {
            Kernels {
                products: [
                    concat!("quant_gemm_", $bits, "_1"),
                    concat!("quant_gemm_", $bits, "_4"),
                    concat!("quant_gemm_", $bits, "_8"),
                ],
                embedding: concat!("quant_embedding_", $bits),
                experts: concat!("quant_moe_", $bits),
                unpack: concat!("unpack_", $bits),
                gemv: Gemv {
                    one: concat!("quant_gemv_", $gemv, "_1"),
                    eight: concat!("quant_gemv_", $gemv, "_8"),
                    pairs: concat!("quant_pairs_", $gemv),
                    gated: concat!("quant_gated_", $gemv),
                },
            }
        };
    }
    match format.bits {
        2 => of!(2),
        3 => of!(3),
        4 if format.table > 0 => of!(4, "table"),
        4 => of!(4),
        5 => of!(5),
        6 => of!(6),
        // Formats have no other numbers of bits.
        _ => of!(8),
    }
}

/// The parameters that all kernels have of a weight.
pub(super) const WEIGHT_ARGS: usize = 6;

/// What they are for this one.
pub(super) fn weight_args(slab: &PackedSlab) -> [Arg; WEIGHT_ARGS] {
    let Format {
        zero,
        table,
        nested,
        min_groups,
        ..
    } = slab.format;
    [
        Arg::At(slab.at()),
        Arg::Int(slab.format.tile_bytes()),
        nested.into(),
        Arg::Int(zero),
        Arg::Int(min_groups),
        Arg::Int(table),
    ]
}

/// The rows of x with a stride, zeros behind their elements, which come in the order at `order` unless that is null.
pub(super) fn reordered<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    (order, stride): (u64, usize),
) -> Result<u64> {
    if order == 0 && stride == x.k {
        return Ok(x.at);
    }
    let at = ctx.scratch(elements(op, &[x.rows, stride, 2])?)?;
    let args = [
        Arg::At(at),
        Arg::At(x.at),
        Arg::At(order),
        Arg::Int(x.k),
        Arg::Int(stride),
    ];
    let kernel = (KernelFile::TileHalf, "arrange_rows");
    ctx.launch(op, kernel, (x.rows, 256, 0), args)?;
    Ok(at)
}
