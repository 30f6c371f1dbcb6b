//! Dense matrices: products, row look-ups and the largest element of a row.

use super::buffer::RefBuffer;
use crate::backend::{GemmShape, MatShape, RowShape, WeightPart, check};
use ferrum_types::{Result, SrcDtype};
use half::{bf16, f16};

/// A matrix `[n, k]`, decoded to f32 (exact for every source type) whatever it was in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct RefWeight {
    pub(super) values: Vec<f32>,
    pub(super) shape: MatShape,
}

impl RefWeight {
    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.shape.cols..][..self.shape.cols]
    }

    /// `y = W · x` for one row of activations.
    pub(super) fn apply(&self, x: &[f32], y: &mut [f32]) {
        for (n, y) in y.iter_mut().enumerate() {
            *y = dot(x, self.row(n)) as f32;
        }
    }
}

/// Σ aᵢ·bᵢ in f64.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum()
}

/// Stacks the rows of `parts`.
pub(super) fn weight_from_parts(parts: &[WeightPart<'_>], cols: usize) -> Result<RefWeight> {
    let rows = check::weight_parts("from_weight_parts", parts, cols)?;
    let mut values = Vec::new();
    for part in parts {
        decode(part.bytes, part.dtype, &mut values);
    }
    let shape = MatShape { rows, cols };
    Ok(RefWeight { values, shape })
}

/// Appends the numbers of `bytes`.
pub(super) fn decode(bytes: &[u8], dtype: SrcDtype, values: &mut Vec<f32>) {
    let half_words = || bytes.as_chunks().0.iter().copied().map(u16::from_le_bytes);
    match dtype {
        SrcDtype::F32 => values.extend(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes)),
        SrcDtype::F16 => values.extend(half_words().map(|bits| f16::from_bits(bits).to_f32())),
        SrcDtype::BF16 => values.extend(half_words().map(|bits| bf16::from_bits(bits).to_f32())),
    }
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(super) fn gemm(
    op: &'static str,
    x: &RefBuffer<f32>,
    weight: &RefWeight,
    out: &mut RefBuffer<f32>,
    shape: GemmShape,
) -> Result<()> {
    check::gemm(op, x, weight.shape, out, shape)?;
    let GemmShape { rows, n, k } = shape;
    for r in 0..rows {
        weight.apply(&x.0[r * k..][..k], &mut out.0[r * n..][..n]);
    }
    Ok(())
}

/// `out[i, :] = table[ids[i], :]`, zeros for an id outside the table.
pub(super) fn embedding_lookup(
    op: &'static str,
    table: &RefWeight,
    ids: &RefBuffer<i32>,
    out: &mut RefBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    check::embedding_lookup(op, table.shape, ids, out, shape)?;
    copy_rows(&table.values, table.shape.rows, ids, out, shape);
    Ok(())
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside `src`.
pub(super) fn gather_rows(
    src: &RefBuffer<f32>,
    rows: &RefBuffer<i32>,
    out: &mut RefBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    check::gather_rows(rows, out, shape)?;
    let src_rows = src.0.len().checked_div(shape.dim).unwrap_or(0);
    copy_rows(&src.0, src_rows, rows, out, shape);
    Ok(())
}

fn copy_rows(
    src: &[f32],
    src_rows: usize,
    ids: &RefBuffer<i32>,
    out: &mut RefBuffer<f32>,
    RowShape { rows, dim }: RowShape,
) {
    for (i, &id) in ids.0[..rows].iter().enumerate() {
        let out = &mut out.0[i * dim..][..dim];
        match usize::try_from(id) {
            Ok(id) if id < src_rows => out.copy_from_slice(&src[id * dim..][..dim]),
            _ => out.fill(0.0),
        }
    }
}

/// Index of the largest element of each row; the lowest of equals, never a NaN.
pub(super) fn argmax_rows(
    x: &RefBuffer<f32>,
    out: &mut RefBuffer<i32>,
    shape: RowShape,
) -> Result<()> {
    let size = check::argmax_rows(x, out, shape)?;
    for (row, out) in x.0[..size].chunks_exact(shape.dim).zip(&mut out.0) {
        let mut best = (0, f32::NAN);
        for (i, &value) in row.iter().enumerate() {
            if value > best.1 || (best.1.is_nan() && !value.is_nan()) {
                best = (i, value);
            }
        }
        *out = best.0 as i32;
    }
    Ok(())
}
