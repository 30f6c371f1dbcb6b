//! Collectives through host memory: what [`BackendCollective`] provides.
//!
//! A rank's buffer is read, bytes are exchanged through the group's transport, and the result is written. So this works on
//! every backend, and waits for the device at each collective.

use super::{BackendCollective, GroupCall, GroupHandle, ParallelNorm, ReduceOp};
use crate::backend::{Act, Backend, DeviceBuffer, check};
use bytemuck::Pod;
use ferrum_types::{Dtype, Element, Error, FloatElement, Result};
use half::{bf16, f16};

/// [`BackendCollective::all_reduce`] through host memory.
pub(crate) fn all_reduce<B: BackendCollective, T: Element>(
    ctx: &mut B::Context,
    buf: &mut B::Buffer<T>,
    len: usize,
    op: ReduceOp,
) -> Result<()> {
    const OP: &str = "all_reduce";
    check::len(OP, "buf", &*buf, len)?;
    let Some(group) = B::group(ctx).cloned() else {
        return Ok(());
    };
    let call = GroupCall {
        op: OP,
        dtype: T::DTYPE,
        len,
        detail: op as usize,
    };
    post::<B, T>(ctx, &group, call, (&*buf, len))?;
    group.gather(&mut |ranks| {
        let mut sums = [T::zeroed(); REDUCED];
        for first in (0..len).step_by(REDUCED) {
            let part = &mut sums[..REDUCED.min(len - first)];
            combine(op, ranks, first, part);
            B::write(ctx, buf, first, part)?;
        }
        Ok(())
    })
}

/// What messages call a gather.
const GATHER: &str = "all_gather";

/// Checks a gather of rows. Gives the elements of this rank, and the width of a row of all ranks.
pub(crate) fn gathered<B: BackendCollective, T: Element>(
    ctx: &B::Context,
    src: &B::Buffer<T>,
    dst: &B::Buffer<T>,
    rows: usize,
    dims: &[usize],
) -> Result<(usize, usize)> {
    let (world, rank) = (B::world_size(ctx), B::rank(ctx));
    if dims.len() != world {
        let reason = format!(
            "{} widths, expected one for each of {world} ranks",
            dims.len()
        );
        return Err(Error::invalid(GATHER, reason));
    }
    let (own, width) = (rows * dims[rank], dims.iter().sum::<usize>());
    check::len(GATHER, "src", src, own)?;
    check::len(GATHER, "dst", dst, rows * width)?;
    Ok((own, width))
}

/// [`BackendCollective::all_gather_rows`] through host memory.
pub(crate) fn all_gather_rows<B: BackendCollective, T: Element>(
    ctx: &mut B::Context,
    src: &B::Buffer<T>,
    dst: &mut B::Buffer<T>,
    rows: usize,
    dims: &[usize],
) -> Result<()> {
    const OP: &str = GATHER;
    let (own, width) = gathered::<B, T>(ctx, src, dst, rows, dims)?;
    let Some(group) = B::group(ctx).cloned() else {
        return B::copy_slice(ctx, src, 0, dst, 0, own);
    };
    let call = GroupCall {
        op: OP,
        dtype: T::DTYPE,
        len: rows * width,
        detail: rows,
    };
    post::<B, T>(ctx, &group, call, (src, own))?;
    group.gather(&mut |ranks| {
        let mut first = 0;
        for (part, &dim) in ranks.iter().zip(dims) {
            let part: &[T] = bytemuck::cast_slice(part);
            Error::check_len(OP, "another rank's part", part.len(), rows * dim)?;
            for (row, values) in part.chunks_exact(dim.max(1)).take(rows).enumerate() {
                B::write(ctx, dst, row * width + first, values)?;
            }
            first += dim;
        }
        Ok(())
    })
}

/// Checks the root of a broadcast.
pub(crate) fn check_root(root: usize, world: usize) -> Result<()> {
    if root < world {
        return Ok(());
    }
    let reason = format!("root {root} is not one of {world} ranks");
    Err(Error::invalid("broadcast", reason))
}

/// [`BackendCollective::broadcast`] through host memory.
pub(crate) fn broadcast<B: BackendCollective, T: Element>(
    ctx: &mut B::Context,
    buf: &mut B::Buffer<T>,
    len: usize,
    root: usize,
) -> Result<()> {
    const OP: &str = "broadcast";
    let (world, rank) = (B::world_size(ctx), B::rank(ctx));
    check_root(root, world)?;
    check::len(OP, "buf", &*buf, len)?;
    let Some(group) = B::group(ctx).cloned() else {
        return Ok(());
    };
    let call = GroupCall {
        op: OP,
        dtype: T::DTYPE,
        len,
        detail: root,
    };
    let own = if rank == root { len } else { 0 };
    post::<B, T>(ctx, &group, call, (&*buf, own))?;
    group.gather(&mut |ranks| match rank == root {
        true => Ok(()),
        false => B::write(ctx, buf, 0, bytemuck::cast_slice(ranks[root])),
    })
}

/// Checks that a rank has no more columns than the row, and a context that is alone all of them.
pub(crate) fn check_columns<B: BackendCollective>(
    ctx: &B::Context,
    ParallelNorm { part, dim, .. }: ParallelNorm,
) -> Result<()> {
    if part.dim > dim || (B::group(ctx).is_none() && part.dim != dim) {
        let reason = format!("{} of {dim} columns on this rank", part.dim);
        return Err(Error::invalid("rms_norm_parallel", reason));
    }
    Ok(())
}

/// [`BackendCollective::rms_norm_parallel`] through host memory.
pub(crate) fn rms_norm_parallel<B: BackendCollective>(
    ctx: &mut B::Context,
    x: &Act<B>,
    weight: &B::Buffer<f32>,
    out: &mut Act<B>,
    shape: ParallelNorm,
) -> Result<()> {
    const OP: &str = "rms_norm_parallel";
    let ParallelNorm {
        part, dim, counts, ..
    } = shape;
    check::rms_norm(x, weight, out, part)?;
    check_columns::<B>(ctx, shape)?;
    let Some(group) = B::group(ctx).cloned() else {
        return B::rms_norm(ctx, x, weight, out, part);
    };
    let mut values = vec![B::Act::from_f32(0.0); part.rows * part.dim];
    let mut weights = vec![0.0; part.dim];
    B::read(ctx, x, 0, &mut values)?;
    B::read(ctx, weight, 0, &mut weights)?;
    let call = GroupCall {
        op: OP,
        dtype: Dtype::F32,
        len: part.rows,
        detail: dim,
    };
    group.post(call, part.rows * size_of::<f32>(), &mut |bytes| {
        let sums: &mut [f32] = bytemuck::cast_slice_mut(bytes);
        sums.fill(0.0);
        if counts {
            let rows = values.chunks_exact(part.dim.max(1));
            sums.iter_mut()
                .zip(rows)
                .for_each(|(sum, row)| *sum = sum_of_squares(row));
        }
        Ok(())
    })?;
    let mut sums = vec![0.0; part.rows];
    group.gather(&mut |ranks| {
        tree(ranks, &mut sums, &|x: f32| x, &|a, b| a + b, 0);
        Ok(())
    })?;
    for (row, sum) in values.chunks_exact_mut(part.dim.max(1)).zip(&sums) {
        let factor = 1.0 / (sum / dim as f32 + part.eps).sqrt();
        for (x, w) in row.iter_mut().zip(&weights) {
            *x = B::Act::from_f32(x.to_f32() * factor * w);
        }
    }
    B::write(ctx, out, 0, &values)
}

/// Checks ids of a part of a vocabulary. Gives its first token.
pub(crate) fn check_ids(
    ids: &impl DeviceBuffer,
    out: &impl DeviceBuffer,
    first: usize,
    len: usize,
) -> Result<i32> {
    const OP: &str = "ids_from";
    check::len(OP, "ids", ids, len)?;
    check::len(OP, "out", out, len)?;
    i32::try_from(first)
        .map_err(|_| Error::invalid(OP, format!("no vocabulary has a token {first}")))
}

/// [`BackendCollective::ids_from`] through host memory.
pub(crate) fn ids_from<B: BackendCollective>(
    ctx: &mut B::Context,
    ids: &B::Buffer<i32>,
    out: &mut B::Buffer<i32>,
    first: usize,
    len: usize,
) -> Result<()> {
    let first = check_ids(ids, out, first, len)?;
    let mut part = [0; REDUCED];
    for at in (0..len).step_by(REDUCED) {
        let part = &mut part[..REDUCED.min(len - at)];
        B::read(ctx, ids, at, part)?;
        for id in &mut *part {
            *id = id.wrapping_sub(first);
        }
        B::write(ctx, out, at, part)?;
    }
    Ok(())
}

/// Elements that are combined before they are written: few enough for the stack.
const REDUCED: usize = 2048;

/// In an order of its own, whatever the other rows are.
fn sum_of_squares<T: FloatElement>(row: &[T]) -> f32 {
    row.iter().map(|x| x.to_f32() * x.to_f32()).sum()
}

/// Posts `src[..len]`.
fn post<B: Backend, T: Element>(
    ctx: &mut B::Context,
    group: &GroupHandle,
    call: GroupCall,
    (src, len): (&B::Buffer<T>, usize),
) -> Result<()> {
    group.post(call, len * size_of::<T>(), &mut |bytes| {
        B::read(ctx, src, 0, bytemuck::cast_slice_mut(bytes))
    })
}

/// `out[i]` = element `first + i` of all ranks, combined as a tree.
fn combine<T: Element>(op: ReduceOp, ranks: &[&[u8]], first: usize, out: &mut [T]) {
    let out: &mut [u8] = bytemuck::cast_slice_mut(out);
    match T::DTYPE {
        Dtype::F16 => floats::<f16>(op, ranks, first, out),
        Dtype::BF16 => floats::<bf16>(op, ranks, first, out),
        Dtype::I32 => each::<i32>(ranks, first, out, integers(op, i32::wrapping_add)),
        Dtype::U32 => each::<u32>(ranks, first, out, integers(op, u32::wrapping_add)),
        Dtype::I8 => each::<i8>(ranks, first, out, integers(op, i8::wrapping_add)),
        Dtype::U8 => each::<u8>(ranks, first, out, integers(op, u8::wrapping_add)),
        // The elements are a closed list, of which this is the last.
        _ => each::<f32>(ranks, first, out, |a, b| real(op, a, b)),
    }
}

fn integers<T: Ord>(op: ReduceOp, add: fn(T, T) -> T) -> impl Fn(T, T) -> T {
    move |a, b| match op {
        ReduceOp::Sum => add(a, b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Min => a.min(b),
    }
}

fn real(op: ReduceOp, a: f32, b: f32) -> f32 {
    match op {
        ReduceOp::Sum => a + b,
        ReduceOp::Max => a.max(b),
        ReduceOp::Min => a.min(b),
    }
}

/// Elements of 16 bits, combined in f32 and rounded once.
fn floats<T: FloatElement>(op: ReduceOp, ranks: &[&[u8]], first: usize, out: &mut [u8]) {
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let mut sums = [0.0; REDUCED];
    let sums = &mut sums[..out.len()];
    tree(ranks, sums, &T::to_f32, &|a, b| real(op, a, b), first);
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = T::from_f32(*sum);
    }
}

fn each<T: Element>(ranks: &[&[u8]], first: usize, out: &mut [u8], f: impl Fn(T, T) -> T) {
    tree(ranks, bytemuck::cast_slice_mut(out), &|x: T| x, &f, first);
}

/// `out[i]` = element `first + i` of all ranks as `read` has it, combined as a balanced tree, whose left half is as many ranks as
/// the largest power of two that leaves some for the right one.
pub(crate) fn tree<T: Pod, S: Pod>(
    ranks: &[&[u8]],
    out: &mut [S],
    read: &impl Fn(T) -> S,
    combine: &impl Fn(S, S) -> S,
    first: usize,
) {
    /// Elements of the right half at once.
    const RIGHT: usize = 128;
    match ranks {
        [] => {}
        [only] => {
            let from: &[T] = &bytemuck::cast_slice(only)[first..];
            for (out, &x) in out.iter_mut().zip(from) {
                *out = read(x);
            }
        }
        [left, right] => {
            let [left, right] =
                [left, right].map(|bytes| &bytemuck::cast_slice::<_, T>(bytes)[first..]);
            for ((out, &a), &b) in out.iter_mut().zip(left).zip(right) {
                *out = combine(read(a), read(b));
            }
        }
        ranks => {
            let (left, right) = ranks.split_at(ranks.len().next_power_of_two() / 2);
            tree(left, out, read, combine, first);
            for (place, out) in out.chunks_mut(RIGHT).enumerate() {
                let mut sums = [S::zeroed(); RIGHT];
                let sums = &mut sums[..out.len()];
                tree(right, sums, read, combine, first + place * RIGHT);
                for (out, &sum) in out.iter_mut().zip(&*sums) {
                    *out = combine(*out, sum);
                }
            }
        }
    }
}
