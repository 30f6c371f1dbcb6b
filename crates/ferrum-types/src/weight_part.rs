//! Dense weights as they lie in a file.

use crate::size::{elements, require};
use crate::{Error, Result, SrcDtype};

/// Rows of a dense weight as they lie in a file.
#[derive(Clone, Copy, Debug)]
pub struct WeightPart<'a> {
    /// From the first element of the first row to the last element of the last row, little-endian, any alignment.
    pub bytes: &'a [u8],
    /// Element type of `bytes`.
    pub dtype: SrcDtype,
    /// Rows in this part.
    pub rows: usize,
    /// Bytes from the start of a row to that of the next, where other elements lie between them: rows of another
    /// projection (gate and up interleaved), or the columns of other ranks. `None`: rows follow each other.
    pub row_stride: Option<usize>,
}

impl<'a> WeightPart<'a> {
    /// Rows that follow each other.
    pub fn new(bytes: &'a [u8], dtype: SrcDtype, rows: usize) -> Self {
        Self {
            bytes,
            dtype,
            rows,
            row_stride: None,
        }
    }

    /// The `row_bytes` bytes of row `row`.
    ///
    /// # Panics
    /// When there is no such row; [`check_weight_parts`] says whether all are there.
    #[inline]
    pub fn row(&self, row: usize, row_bytes: usize) -> &'a [u8] {
        let start = row * self.row_stride.unwrap_or(row_bytes);
        &self.bytes[start..start + row_bytes]
    }
}

/// Checks that each part of a dense matrix has the bytes of its rows of `cols` elements. Returns the rows of all parts.
pub fn check_weight_parts(
    op: &'static str,
    parts: &[WeightPart<'_>],
    cols: usize,
) -> Result<usize> {
    let mut rows = 0usize;
    for part in parts {
        let row_bytes = elements(op, &[cols, part.dtype.size()])?;
        check_rows(op, part.bytes, part.rows, row_bytes, part.row_stride)?;
        rows = rows
            .checked_add(part.rows)
            .ok_or_else(|| Error::invalid(op, "the rows of all parts overflow"))?;
    }
    Ok(rows)
}

/// Checks that `bytes` are `rows` rows of `row_bytes`, which follow each other or begin `row_stride` bytes apart.
///
/// # Errors
/// `Shape` for another number of bytes, `InvalidArgument` for rows that overlap.
pub fn check_rows(
    op: &'static str,
    bytes: &[u8],
    rows: usize,
    row_bytes: usize,
    row_stride: Option<usize>,
) -> Result<()> {
    let stride = row_stride.unwrap_or(row_bytes);
    require(op, stride >= row_bytes, || {
        format!("rows of {row_bytes} bytes begin {stride} bytes apart, expected at least as many")
    })?;
    let expected = match rows.checked_sub(1) {
        None => Some(0),
        Some(before_last) => elements(op, &[before_last, stride])?.checked_add(row_bytes),
    };
    let expected = expected.ok_or_else(|| Error::invalid(op, "the bytes of all rows overflow"))?;
    if bytes.len() == expected {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        what: "weight (in bytes)",
        found: bytes.len(),
        expected,
    })
}
