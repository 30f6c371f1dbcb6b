//! Collectives between the ranks of a group that computes one model.
//!
//! A context belongs to a group or is alone; [`BackendCollective::join`] makes it a rank. What ranks exchange goes
//! through the group's [`GroupTransport`]. The provided methods read a rank's buffer, exchange bytes in host memory and
//! write the result, so they work on every backend; a device with a transport of its own (NCCL on CUDA)
//! overrides them. A context that is alone is a group of one, for which every collective is the identity.
//!
//! All ranks make the same collectives in the same order, as in MPI, and all get the same bits. Sums over ranks are balanced trees: those
//! of neighbours first, then those of pairs. So they are the same from run to run, and, where the context of one rank cuts its sums as
//! [`SumSplit`] says, the same as there. A device whose [`Backend::batch_invariance`] promises no equal bits may add floats in
//! another order, which depends on the length, and round 16-bit elements at each step. A rank that fails or is dropped ends the
//! group: the others get an error that names it, from the collective that they are in and from every later one. Where a device
//! exchanges by itself, the collective is only recorded when its call returns, and the error comes from whatever waits for it.
//! Nor does such a device have to notice ranks whose calls differ.

pub(crate) mod host;
mod local;

pub use self::local::LocalGroup;

use super::{Act, Backend, NormShape};
use ferrum_types::{Dtype, Element, Error, Result, SumSplit};
use std::fmt;
use std::sync::Arc;

/// How [`BackendCollective::all_reduce`] combines ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum: of integers modulo 2ⁿ; of floats as a balanced tree, of 16-bit ones in f32 and rounded once, unless the device
    /// promises no equal bits.
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
    /// How the sums of squares of this rank's columns are cut. Backends that promise no equal bits for numbers of ranks may
    /// ignore it.
    pub sums: SumSplit,
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
pub type GroupHandle = Arc<dyn GroupTransport>;

/// Ranks and what they exchange. `len` counts elements, and every length is the same on all ranks.
///
/// All methods fail with [`Error::Shape`] for a buffer that is shorter than asked for, before anything is exchanged,
/// and with [`Error::Device`] when another rank failed.
pub trait BackendCollective: Backend {
    /// The group that a context belongs to; `None` when it is alone.
    fn group(_ctx: &Self::Context) -> Option<&GroupHandle> {
        None
    }

    /// Makes a context a rank of a group, of which it stays one until it is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a backend whose contexts are always alone; [`Error::InvalidArgument`] for a
    /// context that belongs to a group already.
    fn join(_ctx: &mut Self::Context, _rank: GroupHandle) -> Result<()> {
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

    /// Whether collectives of a context may be part of [captured work](super::BackendGraph). Those that go through host memory
    /// may not. All ranks of a group give the same answer, which a device with a transport of its own may not know before
    /// the first collective.
    fn records_collectives(ctx: &Self::Context) -> bool {
        Self::group(ctx).is_none()
    }

    /// Combines `buf[..len]` over all ranks; every rank gets the result.
    fn all_reduce<T: Element>(
        ctx: &mut Self::Context,
        buf: &mut Self::Buffer<T>,
        len: usize,
        op: ReduceOp,
    ) -> Result<()> {
        host::all_reduce::<Self, T>(ctx, buf, len, op)
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
        host::all_gather_rows::<Self, T>(ctx, src, dst, rows, dims)
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
        host::broadcast::<Self, T>(ctx, buf, len, root)
    }

    /// [`Backend::rms_norm`] of rows whose columns the ranks share: `x`, `weight` and `out` are this rank's columns, and
    /// the mean square is that of whole rows. Sums of squares are made in f32 at least, those of ranks as a balanced tree.
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
        host::rms_norm_parallel::<Self>(ctx, x, weight, out, shape)
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
        host::ids_from::<Self>(ctx, ids, out, first, len)
    }
}

/// Sets the group of a context that is alone: what [`BackendCollective::join`] does on a backend whose contexts keep a
/// [`GroupHandle`].
pub(crate) fn join_once(group: &mut Option<GroupHandle>, rank: GroupHandle) -> Result<()> {
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
