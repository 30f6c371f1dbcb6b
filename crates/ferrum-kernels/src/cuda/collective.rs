//! What the ranks of a group exchange: by NCCL in the order of the stream, where each has a device of its own, otherwise through
//! host memory.
//!
//! Sums of floats are gathered and added as a tree by a kernel on devices that promise equal bits. On others NCCL adds them,
//! which moves fewer bytes with more than two ranks, in an order that depends on how many there are.

use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::gemm::of_size;
use super::nccl::{Communicator, Link};
use super::role::CudaAct;
use super::{CudaBackend, CudaBuffer};
use crate::backend::{
    Backend, BackendCollective, BatchInvariance, ParallelNorm, ReduceOp, check, host_collectives,
};
use ferrum_types::{Dtype, Element, Result};
use std::sync::Arc;

type Device<A> = CudaBackend<A>;
type Ctx<A> = CudaContext<A>;

/// Bytes of each rank that are gathered at once to be summed, which bounds what the sum needs beside them.
const GATHERED: usize = 4 << 20;

/// Bytes of a device that exchanging takes as one of so many ranks.
///
/// NCCL has no call that says what it takes. By its documented defaults it has at most 32 channels (`NCCL_MAX_CTAS`) with 4 MiB for each
/// connection (`NCCL_BUFFSIZE`), of which a channel has two. Not measured on a card.
pub(super) fn workspace_bytes(ranks: usize) -> u64 {
    const CHANNELS: u64 = 32;
    const CONNECTIONS: u64 = 2;
    const CONNECTION: u64 = 4 << 20;
    match ranks {
        0 | 1 => 0,
        ranks => CHANNELS * CONNECTIONS * CONNECTION + (ranks * GATHERED) as u64,
    }
}

/// The communicator of a rank, which the first collective connects; `None` where bytes go through host memory.
fn communicator<A: CudaAct>(ctx: &mut Ctx<A>) -> Result<Option<Arc<Communicator>>> {
    let Some(group) = &ctx.group else {
        return Ok(None);
    };
    if let Link::Undecided = ctx.link {
        let connected = Communicator::connect(group, ctx.stream().driver())?;
        ctx.link = connected.map_or(Link::Host, |nccl| Link::Nccl(Arc::new(nccl)));
    }
    Ok(ctx.link.nccl().cloned())
}

/// [`BackendCollective::all_reduce`].
pub(super) fn all_reduce<A: CudaAct, T: Element>(
    ctx: &mut Ctx<A>,
    buf: &mut CudaBuffer<T>,
    len: usize,
    reduce: ReduceOp,
) -> Result<()> {
    const OP: &str = "all_reduce";
    check::len(OP, "buf", &*buf, len)?;
    let Some(nccl) = communicator(ctx)? else {
        return host_collectives::all_reduce::<Device<A>, T>(ctx, buf, len, reduce);
    };
    let kernel = match T::DTYPE {
        Dtype::F32 => Some("rank_sum_f32"),
        Dtype::F16 => Some("rank_sum_f16"),
        Dtype::BF16 => Some("rank_sum_bf16"),
        _ => None,
    };
    let ordered =
        ctx.backend.batch_invariance() == BatchInvariance::BitExact && reduce == ReduceOp::Sum;
    let Some(kernel) = kernel.filter(|_| ordered) else {
        let elements = (buf.at(0), len, T::DTYPE);
        return match len {
            0 => Ok(()),
            _ => nccl.all_reduce(OP, ctx.stream(), elements, reduce),
        };
    };
    let world = Device::<A>::world_size(ctx);
    let step = GATHERED / size_of::<T>();
    for first in (0..len).step_by(step) {
        let part = step.min(len - first);
        let bytes = part * size_of::<T>();
        let parts = ctx.scratch(world * bytes)?;
        nccl.all_gather(OP, ctx.stream(), (buf.at(first), parts), bytes)?;
        let args = [
            Arg::At(buf.at(first)),
            Arg::At(parts),
            Arg::Int(world),
            Arg::Long(part),
            Arg::Long(part),
        ];
        ctx.launch_elementwise(OP, (KernelFile::Collective, kernel), part, args)?;
    }
    Ok(())
}

/// [`BackendCollective::all_gather_rows`].
pub(super) fn all_gather_rows<A: CudaAct, T: Element>(
    ctx: &mut Ctx<A>,
    src: &CudaBuffer<T>,
    dst: &mut CudaBuffer<T>,
    rows: usize,
    dims: &[usize],
) -> Result<()> {
    const OP: &str = "all_gather";
    let (own, width) = host_collectives::gathered::<Device<A>, T>(ctx, src, dst, rows, dims)?;
    let Some(nccl) = communicator(ctx)? else {
        return host_collectives::all_gather_rows::<Device<A>, T>(ctx, src, dst, rows, dims);
    };
    let (world, rank) = (dims.len(), Device::<A>::rank(ctx));
    let size = size_of::<T>();
    // NCCL gathers as much of each rank: the longest part.
    let most = rows * dims.iter().max().copied().unwrap_or(0);
    if most == 0 {
        return Ok(());
    }
    if rows == 1 && most * world == width {
        let places = (src.at(0), dst.at(0));
        return nccl.all_gather(OP, ctx.stream(), places, most * size);
    }
    let parts = ctx.scratch(world * most * size)?;
    let part = |rank: usize| parts + (rank * most * size) as u64;
    let (at, rest) = (part(rank), (most - own) * size);
    let stream = ctx.stream();
    stream.copy(OP, at, src.at(0), own * size)?;
    stream.zero(OP, at + (own * size) as u64, rest)?;
    nccl.all_gather(OP, stream, (at, parts), most * size)?;
    let kernel = of_size::<T>(OP, ["copy_columns_1", "copy_columns_2", "copy_columns_4"])?;
    let mut first = 0;
    for (rank, &dim) in dims.iter().enumerate() {
        let args = [
            (&mut *dst).into(),
            Arg::At(part(rank)),
            Arg::Long(rows * dim),
            Arg::Long(dim),
            Arg::Long(0),
            Arg::Long(dim),
            Arg::Long(first),
            Arg::Long(width),
        ];
        ctx.launch_elementwise(OP, (KernelFile::Rows, kernel), rows * dim, args)?;
        first += dim;
    }
    Ok(())
}

/// [`BackendCollective::broadcast`].
pub(super) fn broadcast<A: CudaAct, T: Element>(
    ctx: &mut Ctx<A>,
    buf: &mut CudaBuffer<T>,
    len: usize,
    root: usize,
) -> Result<()> {
    const OP: &str = "broadcast";
    let world = Device::<A>::world_size(ctx);
    host_collectives::check_root(root, world)?;
    check::len(OP, "buf", &*buf, len)?;
    match communicator(ctx)? {
        None => host_collectives::broadcast::<Device<A>, T>(ctx, buf, len, root),
        Some(_) if len == 0 => Ok(()),
        Some(nccl) => {
            let bytes = len * size_of::<T>();
            nccl.broadcast(OP, ctx.stream(), (buf.at(0), bytes), root)
        }
    }
}

/// [`BackendCollective::rms_norm_parallel`].
pub(super) fn rms_norm_parallel<A: CudaAct>(
    ctx: &mut Ctx<A>,
    x: &CudaBuffer<A>,
    weight: &CudaBuffer<f32>,
    out: &mut CudaBuffer<A>,
    shape: ParallelNorm,
) -> Result<()> {
    const OP: &str = "rms_norm_parallel";
    let ParallelNorm {
        part, dim, counts, ..
    } = shape;
    check::rms_norm(x, weight, out, part)?;
    let nccl = match part.dim <= dim {
        true => communicator(ctx)?,
        false => None,
    };
    let Some(nccl) = nccl else {
        return host_collectives::rms_norm_parallel::<Device<A>>(ctx, x, weight, out, shape);
    };
    let (world, rank) = (Device::<A>::world_size(ctx), Device::<A>::rank(ctx));
    let bytes = part.rows * size_of::<f32>();
    if bytes == 0 {
        return Ok(());
    }
    let squares = ctx.scratch(world * bytes)?;
    let own = squares + (rank * bytes) as u64;
    let args = [
        Arg::At(own),
        x.into(),
        Arg::Long(part.dim),
        Arg::from(counts),
    ];
    let grid = (part.rows, 256, 0);
    ctx.launch(OP, (KernelFile::Collective, "row_squares"), grid, args)?;
    nccl.all_gather(OP, ctx.stream(), (own, squares), bytes)?;
    let args = [
        out.into(),
        x.into(),
        weight.into(),
        Arg::At(squares),
        Arg::Int(world),
        Arg::Long(part.dim),
        Arg::Long(dim),
        Arg::Float(part.eps),
    ];
    ctx.launch(OP, (KernelFile::Collective, "rms_norm_part"), grid, args)
}

/// [`BackendCollective::ids_from`].
pub(super) fn ids_from<A: CudaAct>(
    ctx: &mut Ctx<A>,
    ids: &CudaBuffer<i32>,
    out: &mut CudaBuffer<i32>,
    first: usize,
    len: usize,
) -> Result<()> {
    const OP: &str = "ids_from";
    host_collectives::check_ids(ids, out, first, len)?;
    let args = [out.into(), ids.into(), Arg::Int(first), Arg::Long(len)];
    ctx.launch_elementwise(OP, (KernelFile::Collective, "ids_from"), len, args)
}
