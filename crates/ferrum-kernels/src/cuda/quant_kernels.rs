//! The kernels of weights that are integers, by their number of bits, the parameters that all of them have of a weight, and rows
//! in the order of its columns.
//!
//! Products of a few rows (`quant.rs`, `quant_gemv.rs`), tiles (`tile.rs`) and experts (`moe.rs`) launch them.

use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::pack::{Format, Order, PackedSlab};
use super::role::CudaAct;
use super::tile_operands::{Arranged, Pairs, TileRows};
use super::weight::row_stride;
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

/// Kernels of `quant_gemv.cu`, `quant_gemv_gated.cu`, `quant_pairs.cu`, `quant_down.cu` and `quant_groups.cu`.
pub(super) struct Gemv {
    /// Of one row.
    pub(super) one: &'static str,
    /// Of up to eight rows.
    pub(super) eight: &'static str,
    /// Of one row, and of up to eight, with gate and up, which become one number.
    pub(super) dense_gated: [&'static str; 2],
    /// Of pairs with the matrices of their experts.
    pub(super) pairs: &'static str,
    /// Of pairs with two matrices, gate and up, which become one number.
    pub(super) gated: &'static str,
    /// Weighted sums of those of a token's pairs.
    pub(super) down: &'static str,
    /// Of up to eight pairs of an expert.
    pub(super) groups: &'static str,
    /// The same with two matrices.
    pub(super) gated_groups: &'static str,
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
                    dense_gated: [
                        concat!("quant_gemv_gated_", $gemv, "_1"),
                        concat!("quant_gemv_gated_", $gemv, "_8"),
                    ],
                    pairs: concat!("quant_pairs_", $gemv),
                    gated: concat!("quant_gated_", $gemv),
                    down: concat!("quant_down_", $gemv),
                    groups: concat!("quant_groups_", $gemv),
                    gated_groups: concat!("quant_gated_groups_", $gemv),
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

/// The rows of x with a stride, zeros behind their elements, which come in the order of `slab` if that has one. Where each expert has an order,
/// each pair gets a row of its own.
pub(super) fn reordered<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, pairs): (TileRows, Option<&Pairs>),
    slab: Option<&PackedSlab>,
) -> Result<Arranged> {
    let order = slab.and_then(|slab| slab.order.as_ref());
    let stride = row_stride(x.k);
    let mut arranged = Arranged {
        at: x.at,
        stride,
        row_scales: Arg::At(0),
        pairs_per_row: pairs.map_or(1, |of| of.pairs_per_row),
    };
    if order.is_none() && stride == x.k {
        return Ok(arranged);
    }
    let of_experts = pairs.filter(|_| order.is_some());
    let rows = of_experts.map_or(x.rows, |of| of.pairs);
    let (expert_ids, experts, share) = of_experts.map_or((Arg::At(0), 1, 1), |of| {
        (of.expert_ids, of.experts, of.pairs_per_row)
    });
    arranged.at = ctx.scratch(elements(op, &[rows, stride, 2])?)?;
    let args = [
        Arg::At(arranged.at),
        Arg::At(x.at),
        Arg::At(order.map_or(0, Order::at)),
        expert_ids,
        Arg::Int(experts),
        Arg::Int(share),
        Arg::Int(x.k),
        Arg::Int(stride),
    ];
    let kernel = (KernelFile::TileHalf, "arrange_rows");
    ctx.launch(op, kernel, (rows, 256, 0), args)?;
    if of_experts.is_some() {
        arranged.pairs_per_row = 1;
    }
    Ok(arranged)
}
