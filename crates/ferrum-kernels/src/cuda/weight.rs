//! Dense weights on the device, in the precision of the file.
//!
//! Rows are padded with zeros to a multiple of eight elements, so that a kernel loads 16 bytes at once whatever the width.
//! A fused projection of parts with different dtypes is a slab for each run of equal dtypes.

use super::context::{CudaContext, PIECE};
use super::memory::Memory;
use super::role::CudaAct;
use crate::backend::check::{self, elements};
use crate::backend::{MatShape, WeightPart};
use ferrum_types::{Result, SrcDtype};

/// A dense matrix `[rows, cols]`.
pub struct CudaWeight {
    pub(super) slabs: Vec<Slab>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl CudaWeight {
    pub(super) fn shape(&self) -> MatShape {
        MatShape {
            rows: self.rows,
            cols: self.cols,
        }
    }
}

/// Consecutive rows of one dtype.
pub(super) struct Slab {
    pub(super) memory: Memory,
    pub(super) dtype: SrcDtype,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// Elements from one row to the next.
pub(super) fn row_stride(cols: usize) -> usize {
    cols.next_multiple_of(8)
}

/// Loads a matrix in a context of its own.
pub(super) fn load<A: CudaAct>(
    mut ctx: CudaContext<A>,
    op: &'static str,
    parts: &[WeightPart<'_>],
    cols: usize,
) -> Result<CudaWeight> {
    check::check_weight_parts(op, parts, cols)?;
    let mut weight = CudaWeight {
        slabs: Vec::new(),
        rows: 0,
        cols,
    };
    for run in parts.chunk_by(|a, b| a.dtype == b.dtype) {
        load_run(&mut ctx, op, &mut weight, run)?;
    }
    ctx.finish(op)?;
    Ok(weight)
}

/// Appends parts of one dtype.
fn load_run<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    weight: &mut CudaWeight,
    run: &[WeightPart<'_>],
) -> Result<()> {
    let Some(dtype) = run.first().map(|part| part.dtype) else {
        return Ok(());
    };
    let plain = weight.cols * dtype.size();
    let padded = elements(op, &[row_stride(weight.cols), dtype.size()])?;
    let rows: usize = run.iter().map(|part| part.rows).sum();
    if padded == 0 || rows == 0 {
        weight.rows += rows;
        return Ok(());
    }
    let memory = Memory::new(&ctx.shared().driver, elements(op, &[rows, padded])?)?;
    let mut at = memory.at;
    for part in run {
        upload_rows(ctx, op, (part.rows, padded), |row| part.row(row, plain), at)?;
        at += (part.rows * padded) as u64;
    }
    weight.slabs.push(Slab {
        memory,
        dtype,
        first_row: weight.rows,
        rows,
    });
    weight.rows += rows;
    Ok(())
}

/// Copies rows to the device, each with zeros behind it up to `padded` bytes.
pub(super) fn upload_rows<'a, A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (rows, padded): (usize, usize),
    row: impl Fn(usize) -> &'a [u8] + Sync,
    at: u64,
) -> Result<()> {
    if padded > PIECE {
        let mut at = at;
        for number in 0..rows {
            let mut row = row(number).to_vec();
            row.resize(padded, 0);
            ctx.upload(op, at, &row)?;
            at += padded as u64;
        }
        return Ok(());
    }
    let at_once = PIECE / padded;
    let place = |piece: usize| {
        let first = piece * at_once;
        let count = at_once.min(rows - first);
        (at + (first * padded) as u64, count * padded)
    };
    ctx.upload_pieces(op, rows.div_ceil(at_once), place, |piece, staged| {
        for (i, to) in staged.chunks_exact_mut(padded).enumerate() {
            let row = row(piece * at_once + i);
            let (data, padding) = to.split_at_mut(row.len());
            data.copy_from_slice(row);
            padding.fill(0);
        }
        Ok(())
    })
}
