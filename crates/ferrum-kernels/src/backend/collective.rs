//! Collectives between the ranks of a group that computes one model.
//!
//! A context belongs to a group or is alone; [`BackendCollective::join`] makes it a rank. What ranks exchange goes
//! through the group's [`GroupTransport`]. The provided methods read a rank's buffer, exchange bytes in host memory and
//! write the result, so they work on every backend; a device with a transport of its own (peer copies, NCCL)
//! overrides them. A context that is alone is a group of one, for which every collective is the identity.
//!
//! All ranks make the same collectives in the same order, as in MPI. Sums are made in rank order on every rank, so all
//! ranks hold the same bits, and the same from run to run. A rank that fails or is dropped ends the group: the others
//! get an error that names it, from the collective that they are in and from every later one.

mod local;

pub use self::local::LocalGroup;

use super::{Act, Backend, NormShape, check};
use ferrum_types::{Dtype, Element, Error, FloatElement, Result};
use half::{bf16, f16};
use std::fmt;
use std::sync::Arc;

/// How [`BackendCollective::all_reduce`] combines ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum, in rank order: of 16-bit floats in f32 and rounded once, of integers modulo 2ⁿ.
    Sum,
    /// Largest. A NaN loses against every number.
    Max,
    /// Smallest. A NaN loses against every number.
    Min,
}

/// A collective, as all ranks have to call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupCall {
    /// Name of the op.
    pub op: &'static str,
    /// Element of the buffers.
    pub dtype: Dtype,
    /// Elements of the result.
    pub len: usize,
    /// What else has to agree: the root of a broadcast, the operation of a reduction.
    pub detail: usize,
}

/// A norm of rows whose columns the ranks of a group share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParallelNorm {
    /// The columns of this rank.
    pub part: NormShape,
    /// Elements of a whole row.
    pub dim: usize,
    /// Whether this rank's columns count for the mean. Of ranks that hold the same columns, one does.
    pub counts: bool,
}

/// One rank's end of a group, and what carries bytes between its ranks.
///
/// A collective is a [`post`](Self::post) and then a [`gather`](Self::gather). Dropping the last handle of a rank ends
/// the group for the others.
pub trait GroupTransport: fmt::Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// Gives this rank's part of a collective, `bytes` long, which `fill` writes into memory aligned to 8 bytes.
    ///
    /// # Errors
    /// What `fill` says; [`Error::Device`] when the group has ended, or when the other ranks are in another
    /// collective.
    fn post(
        &self,
        call: GroupCall,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()>;

    /// Waits for all ranks, and calls `take` with what each of them posted, by rank.
    ///
    /// # Errors
    /// What `take` says; [`Error::Device`] when another rank failed or went away.
    fn gather(&self, take: &mut dyn FnMut(&[&[u8]]) -> Result<()>) -> Result<()>;

    /// Ends the group, because this rank cannot go on. The first reason counts.
    fn abort(&self, reason: &str);

    /// Why the group has ended and the rank that ended it; `None` while it works.
    fn failure(&self) -> Option<(usize, String)>;
}

/// A rank's end of a group.
pub type GroupRank = Arc<dyn GroupTransport>;

/// Ranks and what they exchange. `len` counts elements, and every length is the same on all ranks.
///
/// All methods fail with [`Error::Shape`] for a buffer that is shorter than asked for, before anything is exchanged,
/// and with [`Error::Device`] when another rank failed.
pub trait BackendCollective: Backend {
    /// The group that a context belongs to; `None` when it is alone.
    fn group(_ctx: &Self::Context) -> Option<&GroupRank> {
        None
    }

    /// Makes a context a rank of a group, of which it stays one until it is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a backend whose contexts are always alone; [`Error::InvalidArgument`] for a
    /// context that belongs to a group already.
    fn join(_ctx: &mut Self::Context, _rank: GroupRank) -> Result<()> {
        Err(Error::Unsupported {
            op: "join",
            backend: Self::NAME,
            reason: "its contexts cannot belong to a group".into(),
            hint: String::new(),
        })
    }

    /// Number of ranks.
    fn world_size(ctx: &Self::Context) -> usize {
        Self::group(ctx).map_or(1, |group| group.size())
    }

    /// This rank, from 0.
    fn rank(ctx: &Self::Context) -> usize {
        Self::group(ctx).map_or(0, |group| group.rank())
    }

    /// Combines `buf[..len]` over all ranks; every rank gets the result.
    fn all_reduce<T: Element>(
        ctx: &mut Self::Context,
        buf: &mut Self::Buffer<T>,
        len: usize,
        op: ReduceOp,
    ) -> Result<()> {
        const OP: &str = "all_reduce";
        check::len(OP, "buf", &*buf, len)?;
        let Some(group) = Self::group(ctx).cloned() else {
            return Ok(());
        };
        let call = GroupCall {
            op: OP,
            dtype: T::DTYPE,
            len,
            detail: op as usize,
        };
        post::<Self, T>(ctx, &group, call, (&*buf, len))?;
        group.gather(&mut |ranks| {
            let mut sums = [T::zeroed(); REDUCED];
            for first in (0..len).step_by(REDUCED) {
                let part = &mut sums[..REDUCED.min(len - first)];
                combine(op, ranks, first, part);
                Self::write(ctx, buf, first, part)?;
            }
            Ok(())
        })
    }

    /// `dst[rank · len..][..len]` = that rank's `src[..len]`.
    fn all_gather<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        dst: &mut Self::Buffer<T>,
        len: usize,
    ) -> Result<()> {
        let dims = vec![len; Self::world_size(ctx)];
        Self::all_gather_rows(ctx, src, dst, 1, &dims)
    }

    /// Puts the columns of all ranks side by side: rank `r` has `src`, `[rows, dims[r]]`, and every rank gets
    /// `dst`, `[rows, Σ dims]`. `dims` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `dims` has not one width for each rank.
    fn all_gather_rows<T: Element>(
        ctx: &mut Self::Context,
        src: &Self::Buffer<T>,
        dst: &mut Self::Buffer<T>,
        rows: usize,
        dims: &[usize],
    ) -> Result<()> {
        const OP: &str = "all_gather";
        let (world, rank) = (Self::world_size(ctx), Self::rank(ctx));
        if dims.len() != world {
            let reason = format!(
                "{} widths, expected one for each of {world} ranks",
                dims.len()
            );
            return Err(Error::invalid(OP, reason));
        }
        let (own, width) = (rows * dims[rank], dims.iter().sum::<usize>());
        check::len(OP, "src", src, own)?;
        check::len(OP, "dst", dst, rows * width)?;
        let Some(group) = Self::group(ctx).cloned() else {
            return Self::copy_slice(ctx, src, 0, dst, 0, own);
        };
        let call = GroupCall {
            op: OP,
            dtype: T::DTYPE,
            len: rows * width,
            detail: rows,
        };
        post::<Self, T>(ctx, &group, call, (src, own))?;
        group.gather(&mut |ranks| {
            let mut first = 0;
            for (part, &dim) in ranks.iter().zip(dims) {
                let part: &[T] = bytemuck::cast_slice(part);
                Error::check_len(OP, "another rank's part", part.len(), rows * dim)?;
                for (row, values) in part.chunks_exact(dim.max(1)).take(rows).enumerate() {
                    Self::write(ctx, dst, row * width + first, values)?;
                }
                first += dim;
            }
            Ok(())
        })
    }

    /// Every rank's `buf[..len]` becomes that of `root`.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::InvalidArgument) when `root` is not a rank.
    fn broadcast<T: Element>(
        ctx: &mut Self::Context,
        buf: &mut Self::Buffer<T>,
        len: usize,
        root: usize,
    ) -> Result<()> {
        const OP: &str = "broadcast";
        let (world, rank) = (Self::world_size(ctx), Self::rank(ctx));
        if root >= world {
            let reason = format!("root {root} is not one of {world} ranks");
            return Err(Error::invalid(OP, reason));
        }
        check::len(OP, "buf", &*buf, len)?;
        let Some(group) = Self::group(ctx).cloned() else {
            return Ok(());
        };
        let call = GroupCall {
            op: OP,
            dtype: T::DTYPE,
            len,
            detail: root,
        };
        let own = if rank == root { len } else { 0 };
        post::<Self, T>(ctx, &group, call, (&*buf, own))?;
        group.gather(&mut |ranks| match rank == root {
            true => Ok(()),
            false => Self::write(ctx, buf, 0, bytemuck::cast_slice(ranks[root])),
        })
    }

    /// [`Backend::rms_norm`] of rows whose columns the ranks share: `x`, `weight` and `out` are this rank's columns, and
    /// the mean square is that of whole rows. Sums of squares are made in f32, of ranks in rank order.
    ///
    /// The provided method goes through host memory, which waits for the device.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::InvalidArgument) when this rank's columns are more than the row, or a context that
    /// is alone holds fewer.
    fn rms_norm_parallel(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: &Self::Buffer<f32>,
        out: &mut Act<Self>,
        shape: ParallelNorm,
    ) -> Result<()> {
        const OP: &str = "rms_norm_parallel";
        let ParallelNorm { part, dim, counts } = shape;
        check::rms_norm(x, weight, out, part)?;
        let group = Self::group(ctx).cloned();
        if part.dim > dim || (group.is_none() && part.dim != dim) {
            let reason = format!("{} of {dim} columns on this rank", part.dim);
            return Err(Error::invalid(OP, reason));
        }
        let Some(group) = group else {
            return Self::rms_norm(ctx, x, weight, out, part);
        };
        let mut values = vec![Self::Act::from_f32(0.0); part.rows * part.dim];
        let mut weights = vec![0.0; part.dim];
        Self::read(ctx, x, 0, &mut values)?;
        Self::read(ctx, weight, 0, &mut weights)?;
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
            each::<f32>(ranks, 0, bytemuck::cast_slice_mut(&mut sums), |a, b| a + b);
            Ok(())
        })?;
        for (row, sum) in values.chunks_exact_mut(part.dim.max(1)).zip(&sums) {
            let factor = 1.0 / (sum / dim as f32 + part.eps).sqrt();
            for (x, w) in row.iter_mut().zip(&weights) {
                *x = Self::Act::from_f32(x.to_f32() * factor * w);
            }
        }
        Self::write(ctx, out, 0, &values)
    }

    /// `out[i] = ids[i] − first`: token ids as rows of a part of the vocabulary that begins at `first`. Ids of other
    /// parts come to lie outside it, where [`Backend::embedding_lookup`] gives zeros.
    ///
    /// The provided method goes through host memory, which waits for the device.
    fn ids_from(
        ctx: &mut Self::Context,
        ids: &Self::Buffer<i32>,
        out: &mut Self::Buffer<i32>,
        first: usize,
        len: usize,
    ) -> Result<()> {
        const OP: &str = "ids_from";
        check::len(OP, "ids", ids, len)?;
        check::len(OP, "out", out, len)?;
        let first = i32::try_from(first)
            .map_err(|_| Error::invalid(OP, format!("no vocabulary has a token {first}")))?;
        let mut part = [0; REDUCED];
        for at in (0..len).step_by(REDUCED) {
            let part = &mut part[..REDUCED.min(len - at)];
            Self::read(ctx, ids, at, part)?;
            for id in &mut *part {
                *id = id.wrapping_sub(first);
            }
            Self::write(ctx, out, at, part)?;
        }
        Ok(())
    }
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
    group: &GroupRank,
    call: GroupCall,
    (src, len): (&B::Buffer<T>, usize),
) -> Result<()> {
    group.post(call, len * size_of::<T>(), &mut |bytes| {
        B::read(ctx, src, 0, bytemuck::cast_slice_mut(bytes))
    })
}

/// `out[i]` = element `first + i` of all ranks, combined in rank order.
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
    for (i, out) in out.iter_mut().enumerate() {
        let all = ranks
            .iter()
            .map(|rank| of_rank::<T>(rank)[first + i].to_f32());
        *out = T::from_f32(all.reduce(|a, b| real(op, a, b)).unwrap_or(0.0));
    }
}

fn each<T: Element>(ranks: &[&[u8]], first: usize, out: &mut [u8], f: impl Fn(T, T) -> T) {
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    for (index, rank) in ranks.iter().enumerate() {
        let from = &of_rank::<T>(rank)[first..][..out.len()];
        for (out, &x) in out.iter_mut().zip(from) {
            *out = if index == 0 { x } else { f(*out, x) };
        }
    }
}

fn of_rank<T: Element>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(bytes)
}

/// Sets the group of a context that is alone: what [`BackendCollective::join`] does on a backend whose contexts keep a
/// [`GroupRank`].
pub(crate) fn join_once(group: &mut Option<GroupRank>, rank: GroupRank) -> Result<()> {
    match group {
        None => {
            *group = Some(rank);
            Ok(())
        }
        Some(own) => {
            let (rank, size) = (own.rank(), own.size());
            let reason = format!("the context is rank {rank} of {size} already");
            Err(Error::invalid("join", reason))
        }
    }
}
