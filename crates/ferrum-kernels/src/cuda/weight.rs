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

/// Bytes that are staged at once. Two such pieces are on their way up while the next one is filled.
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
    check::weight_parts(op, parts, cols)?;
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
        let all: Vec<usize> = (0..part.rows).collect();
        for rows in all.chunks((STAGED / padded).max(1)) {
            upload_rows(ctx, op, part, rows, [plain, padded], at)?;
            at += (rows.len() * padded) as u64;
        }
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

/// Copies rows of a part, each with its padding.
fn upload_rows<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    part: &WeightPart<'_>,
    rows: &[usize],
    [plain, padded]: [usize; 2],
    at: u64,
) -> Result<()> {
    let bytes = rows.len() * padded;
    if bytes > STAGED {
        // One row that is longer than what is staged at once.
        let mut row = part.row(rows[0], plain).to_vec();
        row.resize(padded, 0);
        return ctx.upload(op, at, &row);
    }
    let fill = |staged: &mut [u8], rows: &[usize]| {
        for (to, row) in staged.chunks_exact_mut(padded).zip(rows) {
            let (data, padding) = to.split_at_mut(plain);
            data.copy_from_slice(part.row(*row, plain));
            padding.fill(0);
        }
    };
    let share = (OF_A_THREAD / padded).max(1);
    let fill_all = |staged: &mut [u8]| match rows.len() <= share {
        true => fill(staged, rows),
        false => std::thread::scope(|scope| {
            let shares = staged.chunks_mut(share * padded).zip(rows.chunks(share));
            shares.for_each(|(staged, rows)| {
                scope.spawn(move || fill(staged, rows));
            });
        }),
    };
    ctx.upload_with(op, bytes, fill_all, at)
}
