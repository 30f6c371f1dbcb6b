//! Matrix products and rows by index.

use super::{elements, len, require};
use crate::backend::{DeviceBuffer, GemmShape, MatShape, RowShape};
use ferrum_types::Result;

/// Elements of a product's buffers.
#[derive(Clone, Copy, Debug)]
pub struct GemmLen {
    /// `rows · k`.
    pub x: usize,
    /// `rows · n`.
    pub out: usize,
}

/// [`Backend::gemm`](crate::Backend::gemm) and its like, with a weight of any form.
pub fn gemm(
    op: &'static str,
    x: &impl DeviceBuffer,
    weight: MatShape,
    out: &impl DeviceBuffer,
    shape: GemmShape,
) -> Result<GemmLen> {
    let GemmShape { rows, n, k } = shape;
    let MatShape { rows: wn, cols: wk } = weight;
    require(op, (wn, wk) == (n, k), || {
        format!("the weight is [{wn}, {wk}], expected [{n}, {k}]")
    })?;
    let lens = GemmLen {
        x: elements(op, &[rows, k])?,
        out: elements(op, &[rows, n])?,
    };
    len(op, "x", x, lens.x)?;
    len(op, "out", out, lens.out)?;
    Ok(lens)
}

/// [`Backend::gemm_gated`](crate::Backend::gemm_gated) and its like, but for the weight: the rows of `out`, as long as gate and as up.
pub fn gemm_gated(
    op: &'static str,
    x: &impl DeviceBuffer,
    (room, out): (&impl DeviceBuffer, &impl DeviceBuffer),
    shape: GemmShape,
) -> Result<RowShape> {
    let GemmShape { rows, n, k } = shape;
    require(op, n.is_multiple_of(2), || {
        format!("the weight has {n} rows, expected as many of gate as of up")
    })?;
    let dim = n / 2;
    len(op, "x", x, elements(op, &[rows, k])?)?;
    len(op, "room", room, elements(op, &[rows, n])?)?;
    len(op, "out", out, elements(op, &[rows, dim])?)?;
    Ok(RowShape { rows, dim })
}

/// [`Backend::embedding_lookup`](crate::Backend::embedding_lookup): elements of `out`.
pub fn embedding_lookup(
    op: &'static str,
    table: MatShape,
    ids: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    shape: RowShape,
) -> Result<usize> {
    require(op, table.cols == shape.dim, || {
        let (found, expected) = (table.cols, shape.dim);
        format!("rows of the table have {found} elements, expected {expected}")
    })?;
    len(op, "ids", ids, shape.rows)?;
    let total = elements(op, &[shape.rows, shape.dim])?;
    len(op, "out", out, total)?;
    Ok(total)
}

/// [`Backend::gather_rows`](crate::Backend::gather_rows): elements of `out`.
pub fn gather_rows(
    rows: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    shape: RowShape,
) -> Result<usize> {
    let op = "gather_rows";
    len(op, "rows", rows, shape.rows)?;
    let total = elements(op, &[shape.rows, shape.dim])?;
    len(op, "out", out, total)?;
    Ok(total)
}

/// [`Backend::argmax_rows`](crate::Backend::argmax_rows): elements of `x`.
pub fn argmax_rows(
    x: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    RowShape { rows, dim }: RowShape,
) -> Result<usize> {
    let op = "argmax_rows";
    require(op, dim > 0 && i32::try_from(dim).is_ok(), || {
        format!("rows have {dim} elements, expected 1 to {}", i32::MAX)
    })?;
    let total = elements(op, &[rows, dim])?;
    len(op, "x", x, total)?;
    len(op, "out", out, rows)?;
    Ok(total)
}
