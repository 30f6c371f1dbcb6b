//! Products of few rows of 16 bits with floats, which stream the weight: the kernels of `gemv.cu`.

use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::CudaAct;
use super::tile::{self, TileWeight};
use super::tile_operands::{TileOut, TileRows};
use super::weight::row_stride;
use ferrum_types::{Result, SrcDtype};

/// Rows that a product may have.
pub(super) const MAX_ROWS: usize = 4;

/// Threads of a block: four warps, each with a column of its own, or several with parts of one.
const THREADS: u32 = 128;

/// A product of up to [`MAX_ROWS`] rows with floats; with an activation, of gate and up of 16 bits.
pub(super) fn product<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    (weight, dtype): (u64, SrcDtype),
    out: TileOut,
    activation: Option<usize>,
) -> Result<()> {
    let (names, gated) = match dtype {
        SrcDtype::F32 => (["gemv_f32_1", "gemv_f32_2", "gemv_f32_4"], [""; 3]),
        SrcDtype::F16 => (
            ["gemv_f16_1", "gemv_f16_2", "gemv_f16_4"],
            ["gemv_gated_f16_1", "gemv_gated_f16_2", "gemv_gated_f16_4"],
        ),
        SrcDtype::BF16 => (
            ["gemv_bf16_1", "gemv_bf16_2", "gemv_bf16_4"],
            [
                "gemv_gated_bf16_1",
                "gemv_gated_bf16_2",
                "gemv_gated_bf16_4",
            ],
        ),
    };
    let of_rows = x.rows.clamp(1, 3) - 1;
    let columns_of_warp = match activation {
        None if of_rows > 0 => 2,
        _ => 1,
    };
    let stride = row_stride(x.k);
    // The kernel reads activations as they are, whatever the weight is.
    let as_rows = TileWeight::Dense {
        at: weight,
        dtype: A::WEIGHT,
    };
    let x_rows = tile::arranged(ctx, op, (x, None), as_rows)?;
    let warps = out.columns.div_ceil(columns_of_warp);
    let parts = parts_of_columns(warps, stride, ctx.shared().multiprocessors);
    let blocks = warps.div_ceil(4 / parts);
    let grid = (blocks, THREADS, 0);
    if let Some(activation) = activation {
        let args = [
            Arg::At(out.at),
            Arg::At(x_rows.at),
            Arg::At(weight),
            Arg::Int(x.rows),
            Arg::Int(stride),
            Arg::Int(out.columns),
            Arg::Int(parts),
            Arg::Int(activation),
        ];
        return ctx.launch(op, (KernelFile::Gemv, gated[of_rows]), grid, args);
    }
    let args = [
        Arg::At(out.at),
        out.is_f32.into(),
        Arg::At(x_rows.at),
        Arg::At(weight),
        Arg::Int(x.rows),
        Arg::Int(stride),
        Arg::Int(out.columns),
        Arg::Long(out.first),
        Arg::Long(out.n),
        Arg::Int(parts),
    ];
    ctx.launch(op, (KernelFile::Gemv, names[of_rows]), grid, args)
}

/// Warps that share a column: more where there are few for each processor, as long as each has a range of k.
fn parts_of_columns(warps: usize, stride: usize, processors: usize) -> usize {
    let wanted = match warps / processors.max(1) {
        0..=7 => 4,
        8..=15 => 2,
        _ => 1,
    };
    let most = stride.div_ceil(1024);
    if most >= wanted {
        wanted
    } else if most >= 2 {
        2
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_columns_share_warps() {
        let found = [
            (4096, 4096),
            (1500, 4096),
            (256, 4096),
            (256, 2048),
            (256, 512),
        ]
        .map(|(warps, stride)| parts_of_columns(warps, stride, 132));
        assert_eq!(found, [1, 2, 4, 2, 1]);
    }
}
