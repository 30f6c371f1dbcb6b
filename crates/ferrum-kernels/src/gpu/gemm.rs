//! Matrix products, and rows by index.
//!
//! One scheme for any number of rows: each of 32 lanes strides over `k` in steps of four elements,
//! and the 32 partial sums are added in lane order. A workgroup makes four columns for one, four or
//! eight rows, so that a weight that was loaded is used for several rows; how many share a workgroup
//! does not change the order of any sum, and so not a bit of a row's result.

use super::buffer::GpuBuffer;
use super::context::{GpuContext, LANES, P};
use super::pipeline::Kernel;
use super::weight::{GpuWeight, row_stride};
use crate::backend::check::{self, elements};
use crate::backend::{DeviceBuffer, GemmShape, RowShape};
use ferrum_types::{Result, SrcDtype};

/// Columns of a workgroup; the shader has one vector of this many.
const COLUMNS: usize = 4;

macro_rules! for_each_dtype {
    ($name:literal, $file:literal, $constants:expr) => {
        [
            Kernel {
                name: concat!($name, "_f32"),
                wgsl: &[
                    include_str!("shaders/grid.wgsl"),
                    include_str!("shaders/weight_f32.wgsl"),
                    include_str!($file),
                ],
                access: "rrw",
                constants: $constants,
            },
            Kernel {
                name: concat!($name, "_f16"),
                wgsl: &[
                    include_str!("shaders/grid.wgsl"),
                    include_str!("shaders/weight_f16.wgsl"),
                    include_str!($file),
                ],
                access: "rrw",
                constants: $constants,
            },
            Kernel {
                name: concat!($name, "_bf16"),
                wgsl: &[
                    include_str!("shaders/grid.wgsl"),
                    include_str!("shaders/weight_bf16.wgsl"),
                    include_str!($file),
                ],
                access: "rrw",
                constants: $constants,
            },
        ]
    };
}

pub(super) static GEMM: [Kernel; 3] = for_each_dtype!("gemm", "shaders/gemm.wgsl", &["ROWS"]);
pub(super) static EMBEDDING: [Kernel; 3] =
    for_each_dtype!("embedding", "shaders/embedding.wgsl", &[]);
pub(super) static GATHER_ROWS: Kernel = Kernel {
    name: "gather_rows",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/gather_rows.wgsl"),
    ],
    access: "rrw",
    constants: &[],
};
pub(super) static ARGMAX: Kernel = Kernel {
    name: "argmax",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/float_key.wgsl"),
        include_str!("shaders/argmax.wgsl"),
    ],
    access: "rw",
    constants: &[],
};

/// Rows that a workgroup can make.
pub(super) const ROW_TILES: [u32; 3] = [1, 4, 8];

fn of_dtype(kernels: &'static [Kernel; 3], dtype: SrcDtype) -> &'static Kernel {
    match dtype {
        SrcDtype::F32 => &kernels[0],
        SrcDtype::F16 => &kernels[1],
        SrcDtype::BF16 => &kernels[2],
    }
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(super) fn gemm(
    ctx: &mut GpuContext,
    x: &GpuBuffer<f32>,
    weight: &GpuWeight,
    out: &mut GpuBuffer<f32>,
    shape: GemmShape,
) -> Result<()> {
    const OP: &str = "gemm";
    let GemmShape { rows, n, k } = shape;
    let lens = check::gemm(OP, x, weight.shape(), out, shape)?;
    if k == 0 {
        super::elementwise::zero(ctx, out, lens.out);
        return Ok(());
    }
    let tile = match rows {
        0 | 1 => ROW_TILES[0],
        2..=4 => ROW_TILES[1],
        _ => ROW_TILES[2],
    };
    for slab in &weight.slabs {
        let row_tiles = rows.div_ceil(tile as usize);
        let groups = elements(OP, &[slab.rows.div_ceil(COLUMNS), row_tiles])?;
        ctx.run(
            OP,
            (of_dtype(&GEMM, slab.dtype), &[tile]),
            [(&slab.raw).into(), x.into(), (&mut *out).into()],
            &[
                P::U(rows),
                P::U(k),
                P::U(row_stride(k) / 4),
                P::U(slab.rows),
                P::U(slab.first_row),
                P::U(n),
            ],
            groups,
        )?;
    }
    Ok(())
}

/// `out[i, :] = table[ids[i], :]`, zeros for an id outside.
pub(super) fn embedding_lookup(
    ctx: &mut GpuContext,
    table: &GpuWeight,
    ids: &GpuBuffer<i32>,
    out: &mut GpuBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "embedding_lookup";
    let total = check::embedding_lookup(OP, table.shape(), ids, out, shape)?;
    if table.slabs.is_empty() {
        super::elementwise::zero(ctx, out, total);
        return Ok(());
    }
    for (i, slab) in table.slabs.iter().enumerate() {
        ctx.run(
            OP,
            (of_dtype(&EMBEDDING, slab.dtype), &[]),
            [(&slab.raw).into(), ids.into(), (&mut *out).into()],
            &[
                P::U(shape.rows),
                P::U(shape.dim),
                P::U(row_stride(shape.dim) / 4),
                P::U(slab.first_row),
                P::U(slab.rows),
                P::U(table.rows),
                // One of the dispatches also writes the rows that belong to no slab.
                P::U(usize::from(i == 0)),
            ],
            elements(OP, &[shape.rows, shape.dim.div_ceil(4)])?.div_ceil(LANES),
        )?;
    }
    Ok(())
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside.
pub(super) fn gather_rows(
    ctx: &mut GpuContext,
    src: &GpuBuffer<f32>,
    rows: &GpuBuffer<i32>,
    out: &mut GpuBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "gather_rows";
    let total = check::gather_rows(rows, out, shape)?;
    if total == 0 {
        return Ok(());
    }
    ctx.run(
        OP,
        (&GATHER_ROWS, &[]),
        [src.into(), rows.into(), out.into()],
        &[P::U(total), P::U(shape.dim), P::U(src.len() / shape.dim)],
        total.div_ceil(LANES),
    )
}

/// `out[i]` = lowest index of the largest element of row `i`.
pub(super) fn argmax_rows(
    ctx: &mut GpuContext,
    x: &GpuBuffer<f32>,
    out: &mut GpuBuffer<i32>,
    shape: RowShape,
) -> Result<()> {
    const OP: &str = "argmax_rows";
    check::argmax_rows(x, out, shape)?;
    ctx.run(
        OP,
        (&ARGMAX, &[]),
        [x.into(), out.into()],
        &[P::U(shape.rows), P::U(shape.dim)],
        shape.rows,
    )
}
