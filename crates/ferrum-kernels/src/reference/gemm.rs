//! Dense matrices: products, row look-ups and the largest element of a row.

use super::buffer::RefBuffer;
use super::precision::{narrow, wide};
use crate::backend::{GemmShape, MatShape, RowShape, WeightPart, check};
use ferrum_types::{Element, FloatElement, Result, SrcDtype};
use half::{bf16, f16};

/// A matrix `[n, k]`, decoded to f32 (exact for every source type) whatever it was in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct RefWeight {
    pub(super) values: Vec<f32>,
    pub(super) shape: MatShape,
}

impl RefWeight {
    /// Rows and columns.
    pub fn shape(&self) -> MatShape {
        self.shape
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.shape.cols..][..self.shape.cols]
    }

    /// `y = W · x` for one row of activations.
    pub(super) fn apply<A: FloatElement, T: FloatElement>(&self, x: &[A], y: &mut [T]) {
        for (n, y) in y.iter_mut().enumerate() {
            *y = narrow(dot(x, self.row(n)));
        }
    }
}

/// Σ aᵢ·bᵢ in f64.
pub(super) fn dot<A: FloatElement, B: FloatElement>(a: &[A], b: &[B]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| wide(a) * wide(b)).sum()
}

/// Stacks the rows of `parts`.
pub(super) fn weight_from_parts(parts: &[WeightPart<'_>], cols: usize) -> Result<RefWeight> {
    let rows = check::check_weight_parts("from_weight_parts", parts, cols)?;
    let mut values = Vec::new();
    for part in parts {
        decode(part, cols, &mut values);
    }
    let shape = MatShape { rows, cols };
    Ok(RefWeight { values, shape })
}

/// Appends the numbers of a part with rows of `cols`, which was checked.
pub(super) fn decode(part: &WeightPart<'_>, cols: usize, values: &mut Vec<f32>) {
    for row in 0..part.rows {
        let bytes = part.row(row, cols * part.dtype.size());
        let words = || bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes);
        let half_words = || bytes.as_chunks().0.iter().copied().map(u16::from_le_bytes);
        match part.dtype {
            SrcDtype::F32 => values.extend(words()),
            SrcDtype::F16 => values.extend(half_words().map(|bits| f16::from_bits(bits).to_f32())),
            SrcDtype::BF16 => {
                values.extend(half_words().map(|bits| bf16::from_bits(bits).to_f32()));
            }
        }
    }
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
pub(super) fn gemm<A: FloatElement, T: FloatElement>(
    op: &'static str,
    x: &RefBuffer<A>,
    weight: &RefWeight,
    out: &mut RefBuffer<T>,
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
pub(super) fn embedding_lookup<T: FloatElement>(
    op: &'static str,
    table: &RefWeight,
    ids: &RefBuffer<i32>,
    out: &mut RefBuffer<T>,
    shape: RowShape,
) -> Result<()> {
    check::embedding_lookup(op, table.shape, ids, out, shape)?;
    copy_rows(
        &table.values,
        table.shape.rows,
        T::from_f32,
        ids,
        out,
        shape,
    );
    Ok(())
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside `src`.
pub(super) fn gather_rows<T: Element>(
    src: &RefBuffer<T>,
    rows: &RefBuffer<i32>,
    out: &mut RefBuffer<T>,
    shape: RowShape,
) -> Result<()> {
    check::gather_rows(rows, out, shape)?;
    let src_rows = src.0.len().checked_div(shape.dim).unwrap_or(0);
    copy_rows(&src.0, src_rows, |x| x, rows, out, shape);
    Ok(())
}

/// Rows of `src` as `value` makes them, zeros for those that are not there.
fn copy_rows<S: Copy, T: Element>(
    src: &[S],
    src_rows: usize,
    value: impl Fn(S) -> T,
    ids: &RefBuffer<i32>,
    out: &mut RefBuffer<T>,
    RowShape { rows, dim }: RowShape,
) {
    for (i, &id) in ids.0[..rows].iter().enumerate() {
        let out = &mut out.0[i * dim..][..dim];
        match usize::try_from(id) {
            Ok(id) if id < src_rows => {
                for (out, &x) in out.iter_mut().zip(&src[id * dim..][..dim]) {
                    *out = value(x);
                }
            }
            _ => out.fill(T::zeroed()),
        }
    }
}

/// Index of the largest element of each row; the lowest of equals, never a NaN.
pub(super) fn argmax_rows<T: FloatElement>(
    x: &RefBuffer<T>,
    out: &mut RefBuffer<i32>,
    shape: RowShape,
) -> Result<()> {
    let size = check::argmax_rows(x, out, shape)?;
    for (row, out) in x.0[..size].chunks_exact(shape.dim).zip(&mut out.0) {
        let mut best = (0, f32::NAN);
        for (i, value) in row.iter().map(|x| x.to_f32()).enumerate() {
            if value > best.1 || (best.1.is_nan() && !value.is_nan()) {
                best = (i, value);
            }
        }
        *out = best.0 as i32;
    }
    Ok(())
}
