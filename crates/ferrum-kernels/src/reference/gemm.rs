//! Dense matrices: products, row look-ups and the largest element of a row.

use super::buffer::{RefBuffer, elements, require};
use crate::backend::{GemmShape, MatShape, RowShape, WeightPart};
use ferrum_types::{Error, Result, SrcDtype};
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
    let op = "from_weight_parts";
    let mut values = Vec::new();
    let mut rows = 0;
    for part in parts {
        decode(
            op,
            part.bytes,
            part.dtype,
            elements(op, &[part.rows, cols])?,
            &mut values,
        )?;
        rows += part.rows;
    }
    let shape = MatShape { rows, cols };
    Ok(RefWeight { values, shape })
}

/// Appends `count` numbers stored as `dtype`.
pub(super) fn decode(
    op: &'static str,
    bytes: &[u8],
    dtype: SrcDtype,
    count: usize,
    values: &mut Vec<f32>,
) -> Result<()> {
    let expected = elements(op, &[count, dtype.size()])?;
    if bytes.len() != expected {
        return Err(Error::Shape {
            op,
            what: "weight (in bytes)",
            found: bytes.len(),
            expected,
        });
    }
    let half_words = || bytes.as_chunks().0.iter().copied().map(u16::from_le_bytes);
    match dtype {
        SrcDtype::F32 => values.extend(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes)),
        SrcDtype::F16 => values.extend(half_words().map(|bits| f16::from_bits(bits).to_f32())),
        SrcDtype::BF16 => values.extend(half_words().map(|bits| bf16::from_bits(bits).to_f32())),
    }
    Ok(())
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(super) fn gemm(
    op: &'static str,
    x: &RefBuffer<f32>,
    weight: &RefWeight,
    out: &mut RefBuffer<f32>,
    shape: GemmShape,
) -> Result<()> {
    let GemmShape { rows, n, k } = shape;
    let MatShape { rows: wn, cols: wk } = weight.shape;
    require(op, (wn, wk) == (n, k), || {
        format!("the weight is [{wn}, {wk}], expected [{n}, {k}]")
    })?;
    let x = x.first(op, "x", elements(op, &[rows, k])?)?;
    let out = out.first_mut(op, "out", elements(op, &[rows, n])?)?;
    for r in 0..rows {
        weight.apply(&x[r * k..][..k], &mut out[r * n..][..n]);
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
    require(op, table.shape.cols == shape.dim, || {
        format!(
            "rows of the table have {} elements, expected {}",
            table.shape.cols, shape.dim
        )
    })?;
    copy_rows(op, &table.values, table.shape.rows, ids, out, shape)
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside `src`.
pub(super) fn gather_rows(
    src: &RefBuffer<f32>,
    rows: &RefBuffer<i32>,
    out: &mut RefBuffer<f32>,
    shape: RowShape,
) -> Result<()> {
    let src_rows = src.0.len().checked_div(shape.dim).unwrap_or(0);
    copy_rows("gather_rows", &src.0, src_rows, rows, out, shape)
}

fn copy_rows(
    op: &'static str,
    src: &[f32],
    src_rows: usize,
    ids: &RefBuffer<i32>,
    out: &mut RefBuffer<f32>,
    RowShape { rows, dim }: RowShape,
) -> Result<()> {
    let ids = ids.first(op, "ids", rows)?;
    let out = out.first_mut(op, "out", elements(op, &[rows, dim])?)?;
    for (i, &id) in ids.iter().enumerate() {
        let out = &mut out[i * dim..][..dim];
        match usize::try_from(id) {
            Ok(id) if id < src_rows => out.copy_from_slice(&src[id * dim..][..dim]),
            _ => out.fill(0.0),
        }
    }
    Ok(())
}

/// Index of the largest element of each row; the lowest of equals, never a NaN.
pub(super) fn argmax_rows(
    x: &RefBuffer<f32>,
    out: &mut RefBuffer<i32>,
    RowShape { rows, dim }: RowShape,
) -> Result<()> {
    let op = "argmax_rows";
    require(op, dim > 0 && i32::try_from(dim).is_ok(), || {
        format!("rows have {dim} elements, expected 1 to {}", i32::MAX)
    })?;
    let x = x.first(op, "x", elements(op, &[rows, dim])?)?;
    let out = out.first_mut(op, "out", rows)?;
    for (row, out) in x.chunks_exact(dim).zip(out) {
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
