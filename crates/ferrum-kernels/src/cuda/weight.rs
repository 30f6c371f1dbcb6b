//! Dense weights on the device, in the precision of the file.
//!
//! Rows are padded with zeros to a multiple of eight elements, so that a kernel loads 16 bytes at once whatever the width.
//! A fused projection of parts with different dtypes is a slab for each run of equal dtypes.

use super::context::CudaContext;
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

/// Bytes that are staged at once. Two such pieces are uploaded while the next one is filled.
const STAGED: usize = 8 << 20;

/// Bytes for which a thread of its own copies: one alone reads a mapped file at a fraction of what the bus takes.
const OF_A_THREAD: usize = 2 << 20;

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
    mut at: u64,
) -> Result<()> {
    if padded > STAGED {
        for number in 0..rows {
            let mut row = row(number).to_vec();
            row.resize(padded, 0);
            ctx.upload(op, at, &row)?;
            at += padded as u64;
        }
        return Ok(());
    }
    let fill = |staged: &mut [u8], first: usize| {
        for (i, to) in staged.chunks_exact_mut(padded).enumerate() {
            let row = row(first + i);
            let (data, padding) = to.split_at_mut(row.len());
            data.copy_from_slice(row);
            padding.fill(0);
        }
    };
    let (at_once, share) = (STAGED / padded, (OF_A_THREAD / padded).max(1));
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let fill_all = |staged: &mut [u8]| {
            match count <= share {
                true => fill(staged, first),
                false => std::thread::scope(|scope| {
                    for (i, staged) in staged.chunks_mut(share * padded).enumerate() {
                        scope.spawn(move || fill(staged, first + i * share));
                    }
                }),
            }
            Ok(())
        };
        ctx.upload_with(op, &[(at, count * padded)], fill_all)?;
        at += (count * padded) as u64;
    }
    Ok(())
}
