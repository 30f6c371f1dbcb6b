//! Dense products, row look-ups and the largest element of a row.

use crate::backend::{GemmShape, RowShape, check};
use ferrum_simd::exec::{Exec, Scratch};
use ferrum_simd::gemm::{self, CpuWeight};
use ferrum_simd::memory::CpuBuffer;
use ferrum_types::Result;

type Buf = CpuBuffer<f32>;

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(crate) fn gemm(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &Buf,
    weight: &CpuWeight,
    out: &mut Buf,
    shape: GemmShape,
) -> Result<()> {
    check::gemm("gemm", x, weight.shape(), out, shape)?;
    let (x, out) = (x.as_slice(), out.as_mut_slice());
    gemm::gemm(exec, scratch, x, weight, out, shape)
}

/// `out[i, :] = table[ids[i], :]`, zeros for an id outside the table.
pub(crate) fn embedding_lookup(
    exec: &Exec,
    table: &CpuWeight,
    ids: &CpuBuffer<i32>,
    out: &mut Buf,
    shape: RowShape,
) -> Result<()> {
    check::embedding_lookup("embedding_lookup", table.shape(), ids, out, shape)?;
    gemm::embedding_lookup(exec, table, ids.as_slice(), out.as_mut_slice(), shape);
    Ok(())
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside `src`.
pub(crate) fn gather_rows(
    exec: &Exec,
    src: &Buf,
    rows: &CpuBuffer<i32>,
    out: &mut Buf,
    shape: RowShape,
) -> Result<()> {
    check::gather_rows(rows, out, shape)?;
    let (src, rows) = (src.as_slice(), rows.as_slice());
    gemm::gather_rows(exec, src, rows, out.as_mut_slice(), shape);
    Ok(())
}

/// Index of the largest element of each row; the lowest of equals, never a NaN.
pub(crate) fn argmax_rows(
    exec: &Exec,
    x: &Buf,
    out: &mut CpuBuffer<i32>,
    shape: RowShape,
) -> Result<()> {
    check::argmax_rows(x, out, shape)?;
    gemm::argmax_rows(exec, x.as_slice(), out.as_mut_slice(), shape);
    Ok(())
}
