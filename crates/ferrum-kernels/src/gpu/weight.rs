//! Dense weights on the device.
//!
//! f32 stays f32; f16 and bf16 stay packed, two to a word, and are widened in registers. Rows are
//! padded with zeros to four elements, so that a shader loads four at once whatever the width. A
//! matrix larger than the device's limit for a binding is kept as several buffers of whole rows, and
//! a fused projection of parts with different dtypes as one buffer for each run of equal dtypes.

use super::buffer::RawBuffer;
use super::core::Shared;
use crate::backend::check::{self, elements};
use crate::backend::{MatShape, WeightPart};
use ferrum_types::{Error, Result, SrcDtype};
use std::sync::Arc;

/// A dense matrix `[rows, cols]`.
pub struct GpuWeight {
    pub(super) slabs: Vec<Slab>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl GpuWeight {
    pub(super) fn shape(&self) -> MatShape {
        MatShape {
            rows: self.rows,
            cols: self.cols,
        }
    }
}

/// Consecutive rows in one buffer.
pub(super) struct Slab {
    pub(super) raw: RawBuffer,
    pub(super) dtype: SrcDtype,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// Elements from one row to the next.
pub(super) fn row_stride(cols: usize) -> usize {
    cols.next_multiple_of(4)
}

const OP: &str = "from_weight_parts";

pub(super) fn load(
    shared: &Arc<Shared>,
    parts: &[WeightPart<'_>],
    cols: usize,
) -> Result<GpuWeight> {
    check::check_weight_parts(OP, parts, cols)?;
    let mut weight = GpuWeight {
        slabs: Vec::new(),
        rows: 0,
        cols,
    };
    for run in parts.chunk_by(|a, b| a.dtype == b.dtype) {
        load_run(shared, &mut weight, run)?;
    }
    Ok(weight)
}

/// Appends parts of one dtype, cut into buffers of as many rows as a binding allows.
fn load_run(shared: &Arc<Shared>, weight: &mut GpuWeight, run: &[WeightPart<'_>]) -> Result<()> {
    let Some(dtype) = run.first().map(|part| part.dtype) else {
        return Ok(());
    };
    let from_row = weight.cols * dtype.size();
    let row_bytes = elements(OP, &[weight.cols.next_multiple_of(4), dtype.size()])?;
    let rows: usize = run.iter().map(|part| part.rows).sum();
    if row_bytes == 0 {
        weight.rows += rows;
        return Ok(());
    }
    let limit = shared.max_binding.min(shared.max_buffer) as usize;
    let rows_of_slab = limit / row_bytes;
    if rows_of_slab == 0 {
        return Err(Error::OutOfMemory {
            backend: shared.info.backend,
            requested: row_bytes as u64,
            reason: format!("one row is more than the {limit} bytes that a shader can see"),
        });
    }
    let row_at = |row: usize| row_of(run, row, from_row);
    let mut first = 0;
    while first < rows {
        let n = rows_of_slab.min(rows - first);
        let raw = RawBuffer::upload(shared, n * row_bytes, row_bytes, |at, mut to| {
            let begin = first + at / row_bytes;
            for r in 0..to.len() / row_bytes {
                let mut row = to.slice(r * row_bytes..(r + 1) * row_bytes);
                row.slice(..from_row).copy_from_slice(row_at(begin + r));
                row.slice(from_row..).fill(0);
            }
        })?;
        weight.slabs.push(Slab {
            raw,
            dtype,
            first_row: weight.rows,
            rows: n,
        });
        weight.rows += n;
        first += n;
    }
    Ok(())
}

/// The bytes of a row in a run of parts; the lengths were checked before.
fn row_of<'a>(run: &[WeightPart<'a>], mut row: usize, row_bytes: usize) -> &'a [u8] {
    for part in run {
        if row < part.rows {
            return part.row(row, row_bytes);
        }
        row -= part.rows;
    }
    &[]
}
