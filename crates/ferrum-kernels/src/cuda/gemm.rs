//! Products with dense matrices, and rows by index.
//!
//! Activations of 16 bits go through `tile.rs`. Those of f32 have one scheme for any number of rows: a warp makes a column for
//! one, four or eight rows, and the order of its sums does not depend on which. So a row has the same bits alone and among
//! many.

use super::BACKEND;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::role::{CudaAct, of_role};
use super::tile;
use super::tile_operands::{TileOut, TileRows};
use super::weight::{CudaWeight, Slab, row_stride};
use crate::backend::check::{self, elements};
use crate::backend::{CopyColumnsShape, DeviceBuffer, GemmShape, RowShape};
use ferrum_types::{Element, Error, FloatElement, Result, SrcDtype};

/// Columns of a block: one for each of its warps.
pub(super) const COLUMNS: usize = 4;

/// The kernels by dtype, for one, four and eight rows; of each those that write activations and f32.
fn kernels(dtype: SrcDtype) -> [[&'static str; 2]; 3] {
    macro_rules! of_rows {
        ($dtype:literal: $($rows:literal)*) => {
            [$([
                concat!("gemm_", $dtype, "_", $rows, "_act"),
                concat!("gemm_", $dtype, "_", $rows, "_f32"),
            ]),*]
        };
    }
    match dtype {
        SrcDtype::F32 => of_rows!("f32": 1 4 8),
        SrcDtype::F16 => of_rows!("f16": 1 4 8),
        SrcDtype::BF16 => of_rows!("bf16": 1 4 8),
    }
}

/// Which of a dtype's kernels, and its rows.
pub(super) fn row_tile(rows: usize) -> (usize, usize) {
    match rows {
        0 | 1 => (0, 1),
        2..=4 => (1, 4),
        _ => (2, 8),
    }
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(super) fn gemm<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    x: &CudaBuffer<A>,
    weight: &CudaWeight,
    out: &mut CudaBuffer<T>,
    shape: GemmShape,
) -> Result<()> {
    const OP: &str = "gemm";
    let lens = check::gemm(OP, x, weight.shape(), out, shape)?;
    if shape.k == 0 {
        return ctx.stream().zero(OP, out.at(0), lens.out * size_of::<T>());
    }
    for slab in &weight.slabs {
        slab_product(ctx, OP, x, slab, out, shape)?;
    }
    Ok(())
}

/// The columns of one slab, in an output whose rows have those of all.
pub(super) fn slab_product<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &CudaBuffer<A>,
    slab: &Slab,
    out: &mut CudaBuffer<T>,
    GemmShape { rows, n, k }: GemmShape,
) -> Result<()> {
    if tile::is_for::<A>() {
        let out = TileOut::of::<A, T>(op, out, (slab.first_row, slab.rows, n))?;
        return tile::product(ctx, op, TileRows::of(x, rows, k), slab.into(), out);
    }
    let (kernel, tile) = row_tile(rows);
    let blocks = elements(op, &[slab.rows.div_ceil(COLUMNS), rows.div_ceil(tile)])?;
    let args = [
        out.into(),
        x.into(),
        Arg::At(slab.memory.at),
        Arg::Int(rows),
        Arg::Int(k),
        Arg::Long(row_stride(k)),
        Arg::Int(slab.rows),
        Arg::Long(slab.first_row),
        Arg::Long(n),
    ];
    let kernel = (
        KernelFile::Gemm,
        of_role::<A, T>(op, kernels(slab.dtype)[kernel])?,
    );
    ctx.launch(op, kernel, (blocks, 32 * COLUMNS as u32, 0), args)
}

/// `out[i, :] = table[ids[i], :]`, zeros for an id outside.
pub(super) fn embedding_lookup<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    table: &CudaWeight,
    ids: &CudaBuffer<i32>,
    out: &mut CudaBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "embedding_lookup";
    let total = check::embedding_lookup(OP, table.shape(), ids, out, shape)?;
    if table.slabs.is_empty() {
        return ctx.stream().zero(OP, out.at(0), total * 4);
    }
    for (i, slab) in table.slabs.iter().enumerate() {
        slab_rows(
            ctx,
            OP,
            (slab, table.rows, i == 0),
            ids,
            out,
            (shape, total),
        )?;
    }
    Ok(())
}

/// The rows that one slab has; with the flag, also zeros for ids that none has.
pub(super) fn slab_rows<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (slab, all, writes_zeros): (&Slab, usize, bool),
    ids: &CudaBuffer<i32>,
    out: &mut CudaBuffer<f32>,
    (shape, total): (RowShape, usize),
) -> Result<()> {
    let kernel = match slab.dtype {
        SrcDtype::F32 => "embedding_f32",
        SrcDtype::F16 => "embedding_f16",
        SrcDtype::BF16 => "embedding_bf16",
    };
    let args = [
        out.into(),
        Arg::At(slab.memory.at),
        ids.into(),
        Arg::Long(total),
        Arg::Long(shape.dim),
        Arg::Long(row_stride(shape.dim)),
        Arg::Int(slab.first_row),
        Arg::Int(slab.rows),
        Arg::Int(all),
        writes_zeros.into(),
    ];
    ctx.launch_elementwise(op, (KernelFile::Rows, kernel), total, args)
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside.
pub(super) fn gather_rows<A: CudaAct, T: Element>(
    ctx: &mut CudaContext<A>,
    src: &CudaBuffer<T>,
    rows: &CudaBuffer<i32>,
    out: &mut CudaBuffer<T>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "gather_rows";
    let total = check::gather_rows(rows, out, shape)?;
    if total == 0 {
        return Ok(());
    }
    let kernels = ["gather_rows_1", "gather_rows_2", "gather_rows_4"];
    let kernel = of_size::<T>(OP, kernels)?;
    let args = [
        out.into(),
        src.into(),
        rows.into(),
        Arg::Long(total),
        Arg::Long(shape.dim),
        Arg::Long(src.len() / shape.dim),
    ];
    ctx.launch_elementwise(OP, (KernelFile::Rows, kernel), total, args)
}

/// Columns of rows to columns of others.
pub(super) fn copy_columns<A: CudaAct, T: Element>(
    ctx: &mut CudaContext<A>,
    src: &CudaBuffer<T>,
    dst: &mut CudaBuffer<T>,
    shape: CopyColumnsShape,
) -> Result<()> {
    const OP: &str = "copy_columns";
    if !check::copy_columns(src, dst, shape)? {
        return Ok(());
    }
    let kernels = ["copy_columns_1", "copy_columns_2", "copy_columns_4"];
    let kernel = of_size::<T>(OP, kernels)?;
    let total = check::elements(OP, &[shape.rows, shape.len])?;
    let args = [
        dst.into(),
        src.into(),
        Arg::Long(total),
        Arg::Long(shape.len),
        Arg::Long(shape.src_first),
        Arg::Long(shape.src_width),
        Arg::Long(shape.dst_first),
        Arg::Long(shape.dst_width),
    ];
    ctx.launch_elementwise(OP, (KernelFile::Rows, kernel), total, args)
}

/// The kernel for elements of the size of `T`, of those for 1, 2 and 4 bytes.
pub(super) fn of_size<T>(op: &'static str, kernels: [&'static str; 3]) -> Result<&'static str> {
    match size_of::<T>() {
        1 => Ok(kernels[0]),
        2 => Ok(kernels[1]),
        4 => Ok(kernels[2]),
        size => Err(Error::Unsupported {
            op,
            backend: BACKEND,
            reason: format!("elements have {size} bytes, the kernels are for 1, 2 and 4"),
            hint: String::new(),
        }),
    }
}

/// `out[i]` = lowest index of the largest element of row `i`.
pub(super) fn argmax_rows<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    x: &CudaBuffer<f32>,
    out: &mut CudaBuffer<i32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "argmax_rows";
    check::argmax_rows(x, out, shape)?;
    let args = [out.into(), x.into(), Arg::Int(shape.dim)];
    ctx.launch(OP, (KernelFile::Rows, "argmax"), (shape.rows, 256, 0), args)
}
