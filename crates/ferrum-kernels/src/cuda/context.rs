//! [`CudaContext`]: a stream, what goes up to it and comes back through pinned memory, and captured steps.

use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::core::Shared;
use super::error::failure;
use super::memory::{Memory, Pinned};
use super::nccl::Communicator;
use super::nccl::Link;
use super::role::CudaAct;
use super::staging::{Slot, StagingPool};
use super::stream::{Event, Graph, LaunchConfig, Stream};
use super::sync::lock;
use super::{BACKEND, CudaBackend};
use crate::backend::{
    BackendGraph, FinishRead, GraphKey, GraphRun, GroupHandle, HostMemory, PendingRead,
    UploadPiece, check,
};
use ferrum_types::{Element, Error, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes that are copied between host and device at once.
const STEP: usize = 8 << 20;

/// Bytes of a piece of a weight, which one thread fills.
pub(super) const PIECE: usize = 1 << 20;

/// Pieces of pinned memory of one size that may be uploaded at once, beside as many at most that are being filled, and of the
/// largest size: two of them keep the bus busy while the third is filled.
const MAX_SLOTS: usize = 16;
const MAX_LARGE: usize = 3;

/// Counters of a context. Attention whose last blocks join parts takes one for each tile and kv head, so this is the most of such a
/// launch. Keys of a tile are shared where tiles are less than the blocks that a device has room for, which are 528 on an H200.
pub(super) const COUNTERS: usize = 1024;

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg {
    /// An address on the device; null for an absent argument.
    At(u64),
    /// A count or index of 32 bits.
    Int(usize),
    /// One of 64 bits.
    Long(usize),
    /// A number.
    Float(f32),
}

impl<T: Element> From<&CudaBuffer<T>> for Arg {
    fn from(buffer: &CudaBuffer<T>) -> Self {
        Arg::At(buffer.memory.at)
    }
}

impl<T: Element> From<&mut CudaBuffer<T>> for Arg {
    fn from(buffer: &mut CudaBuffer<T>) -> Self {
        Arg::At(buffer.memory.at)
    }
}

impl<T: Element> From<Option<&CudaBuffer<T>>> for Arg {
    fn from(buffer: Option<&CudaBuffer<T>>) -> Self {
        buffer.map_or(Arg::At(0), Arg::from)
    }
}

impl From<bool> for Arg {
    fn from(flag: bool) -> Self {
        Arg::Int(usize::from(flag))
    }
}

/// Records work for one device, in a stream.
///
/// Dropping a context finishes what it has recorded.
pub struct CudaContext<A> {
    // Dropped in this order: graphs before the communicator and the stream, and the stream, which is finished then, before
    // memory.
    graphs: HashMap<GraphKey, Graph>,
    pub(super) link: Link,
    stream: Stream,
    pub(super) backend: CudaBackend<A>,
    /// The last is in use; those before it may be part of captured work.
    scratch: Vec<Memory>,
    /// The same for what has to stay beside other scratch memory.
    second_scratch: Vec<Memory>,
    /// Counters of attention, which are zero between launches: each launch of this stream finds them so.
    counters: Memory,
    pub(super) group: Option<GroupHandle>,
}

impl<A: CudaAct> CudaContext<A> {
    pub(super) fn new(backend: CudaBackend<A>) -> Result<Self> {
        let stream = Stream::new(&backend.shared.driver)?;
        // Before any capture: a captured fill would run when the step is replayed, or never.
        let counters = Memory::new(stream.driver(), COUNTERS * size_of::<u32>())?;
        stream.zero("context", counters.at, counters.bytes)?;
        Ok(Self {
            graphs: HashMap::new(),
            link: Link::default(),
            stream,
            backend,
            counters,
            scratch: Vec::new(),
            second_scratch: Vec::new(),
            group: None,
        })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.backend.shared
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn finish(&mut self, op: &'static str) -> Result<()> {
        self.stream.wait(op)?;
        self.link.nccl().map_or(Ok(()), |nccl| nccl.check(op))
    }

    /// Launches `blocks` blocks of `threads` threads with `shared` bytes of dynamic shared memory; no block is no work.
    ///
    /// Kernels are part of this program, and their parameters are what the function that calls this says: memory
    /// that its check has found to be long enough.
    ///
    /// # Errors
    /// `InvalidArgument` in the name of `op` when a count does not fit its parameter.
    pub(super) fn launch<const N: usize>(
        &mut self,
        op: &'static str,
        kernel: (KernelFile, &'static str),
        (blocks, threads, shared): (usize, u32, usize),
        args: [Arg; N],
    ) -> Result<()> {
        const { assert!(N <= 40) };
        if blocks == 0 {
            return Ok(());
        }
        let too_large =
            |size| Error::invalid(op, format!("the size {size} does not fit into 32 bits"));
        let int = |size: usize| i32::try_from(size).map_err(|_| too_large(size));
        if shared > self.shared().max_shared {
            let most = self.shared().max_shared;
            return Err(Error::Unsupported {
                op,
                backend: BACKEND,
                reason: format!("it needs {shared} bytes of shared memory, the device has {most}"),
                hint: "use --backend cpu".into(),
            });
        }
        let mut words = [0u64; N];
        for (word, arg) in words.iter_mut().zip(args) {
            *word = match arg {
                Arg::At(at) => at,
                Arg::Long(size) => size as u64,
                Arg::Int(size) => u64::from(int(size)?.cast_unsigned()),
                Arg::Float(x) => u64::from(x.to_bits()),
            };
        }
        let config = LaunchConfig {
            blocks: int(blocks)?.cast_unsigned(),
            threads,
            shared: shared as u32,
            programmatic: self.shared().programmatic_launch,
        };
        let function = self.shared().function(kernel)?;
        // SAFETY: see above: kernels and the functions that launch them are written together, lengths are checked, and
        // freeing memory waits for all work.
        unsafe { self.stream.launch(op, function, config, &mut words) }
    }

    /// Threads that make an element each.
    pub(super) fn launch_elementwise<const N: usize>(
        &mut self,
        op: &'static str,
        kernel: (KernelFile, &'static str),
        total: usize,
        args: [Arg; N],
    ) -> Result<()> {
        const THREADS: usize = 256;
        let grid = (total.div_ceil(THREADS), THREADS as u32, 0);
        self.launch(op, kernel, grid, args)
    }

    /// Memory for what an op needs for a moment; what is in it is anything, and the next op may overwrite it.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64> {
        grown(&mut self.scratch, &self.stream, bytes)
    }

    /// The same, beside what [`scratch`](Self::scratch) gives.
    pub(super) fn second_scratch(&mut self, bytes: usize) -> Result<u64> {
        grown(&mut self.second_scratch, &self.stream, bytes)
    }

    /// [`COUNTERS`] counters of 32 bits, which the launch that takes them leaves at zero.
    pub(super) fn counters(&self) -> u64 {
        self.counters.at
    }

    /// Runs captured work, which may have collectives in it.
    fn replay(&self, graph: &Graph) -> Result<()> {
        let replay = || self.stream.replay(graph);
        match self.link.nccl() {
            Some(nccl) => nccl.while_open("run_graph", replay),
            None => replay(),
        }
    }

    // ---- copies --------------------------------------------------------------------------------------

    /// A slot that no copy uses, of at least `bytes`.
    fn take_up(&mut self, bytes: usize) -> Result<Slot> {
        let mut slots = lock(&self.shared().slots);
        let size = bytes.next_power_of_two().max(4 << 10);
        let same = |slot: &Slot| slot.memory.bytes().len() == size;
        if let Some(free) = slots
            .uploads
            .iter()
            .position(|slot| same(slot) && slot.event.is_done())
        {
            return Ok(slots.uploads.swap_remove(free));
        }
        let most = match size {
            STEP => MAX_LARGE,
            _ => MAX_SLOTS,
        };
        if slots.uploads.iter().filter(|slot| same(slot)).count() >= most
            && let Some(oldest) = slots.uploads.iter().position(same)
        {
            let slot = slots.uploads.remove(oldest);
            drop(slots);
            slot.event.wait("write")?;
            return Ok(slot);
        }
        drop(slots);
        self.new_slot(size)
    }

    fn new_slot(&self, bytes: usize) -> Result<Slot> {
        Ok(Slot {
            memory: Pinned::new(self.stream.driver(), bytes)?,
            event: Event::new(self.stream.driver())?,
        })
    }

    /// Copies host bytes to `at`; they may be reused when this returns.
    pub(super) fn upload(&mut self, op: &'static str, at: u64, bytes: &[u8]) -> Result<()> {
        let mut at = at;
        for piece in bytes.chunks(STEP) {
            self.upload_with(op, &[(at, piece.len())], |staged| {
                staged.copy_from_slice(piece);
                Ok(())
            })?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Copies to the device what `fill` puts into pinned memory, at most [`STEP`] bytes: to each address as many as it says,
    /// one after the other.
    pub(super) fn upload_with(
        &mut self,
        op: &'static str,
        to: &[(u64, usize)],
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let bytes = to.iter().map(|(_, bytes)| bytes).sum();
        if bytes == 0 {
            return Ok(());
        }
        let mut slot = self.take_up(bytes)?;
        let filled = fill(&mut slot.memory.bytes_mut()[..bytes]);
        let some = if filled.is_ok() { to } else { &[] };
        self.send_up(op, slot, some)?;
        filled
    }

    /// Copies what pinned memory holds, and gives the slot back.
    fn send_up(&mut self, op: &'static str, slot: Slot, to: &[(u64, usize)]) -> Result<()> {
        let mut first = 0;
        for &(at, bytes) in to {
            self.stream.upload(op, at, &slot.memory, first, bytes)?;
            first += bytes;
        }
        self.stream.record(&slot.event)?;
        lock(&self.shared().slots).uploads.push(slot);
        Ok(())
    }

    /// Copies pieces to the device, which all threads fill: `place` is the address and the bytes of a piece, at most [`STEP`].
    /// One thread alone reads a mapped file, or packs weights, at a fraction of what the bus takes.
    pub(super) fn upload_pieces(
        &mut self,
        op: &'static str,
        pieces: usize,
        place: impl Fn(usize) -> (u64, usize) + Sync,
        fill: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(pieces).min(MAX_SLOTS);
        let next = AtomicUsize::new(0);
        let ctx = Mutex::new(self);
        let upload = |piece| {
            let to = place(piece);
            let mut slot = lock(&ctx).take_up(to.1)?;
            let filled = fill(piece, &mut slot.memory.bytes_mut()[..to.1]);
            let some = if filled.is_ok() { &[to][..] } else { &[] };
            lock(&ctx).send_up(op, slot, some)?;
            filled
        };
        let work = || {
            // After an error or a panic, the others find nothing left to do.
            let _stop = StopAt(&next, pieces);
            loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    piece if piece < pieces => upload(piece)?,
                    _ => return Ok(()),
                }
            }
        };
        if threads <= 1 {
            return work();
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let panicked = |_| failure(op, "a thread that fills pinned memory panicked");
            let ended = threads.into_iter().map(|thread| thread.join());
            let ended: Vec<Result<()>> = ended.map(|ended| ended.map_err(panicked)?).collect();
            ended.into_iter().collect()
        })
    }

    fn begin_download(&mut self, op: &'static str, at: u64, bytes: usize) -> Result<Download> {
        let size = bytes.next_power_of_two().max(4 << 10);
        let free = {
            let mut slots = lock(&self.shared().slots);
            let fits = |slot: &Slot| slot.memory.bytes().len() == size;
            let found = slots.downloads.iter().position(fits);
            found.map(|index| slots.downloads.swap_remove(index))
        };
        let mut slot = match free {
            Some(slot) => slot,
            None => self.new_slot(size)?,
        };
        self.stream.download(op, &mut slot.memory, at, bytes)?;
        self.stream.record(&slot.event)?;
        Ok(Download {
            nccl: self.link.nccl().cloned(),
            slot: Some(slot),
            slots: Arc::clone(&self.shared().slots),
            bytes,
        })
    }

    /// Copies from `at` to the host, once everything recorded has run.
    pub(super) fn download(&mut self, op: &'static str, at: u64, out: &mut [u8]) -> Result<()> {
        let mut at = at;
        for piece in out.chunks_mut(STEP) {
            self.begin_download(op, at, piece.len())?
                .finish_to(op, piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }
}

/// Raises a counter to the end when it is dropped.
struct StopAt<'a>(&'a AtomicUsize, usize);

impl Drop for StopAt<'_> {
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::Relaxed);
    }
}

/// The last of some memory, of at least `bytes`.
fn grown(all: &mut Vec<Memory>, stream: &Stream, bytes: usize) -> Result<u64> {
    if all.last().is_none_or(|last| last.bytes < bytes) {
        // Doubling bounds what earlier ones hold, which captured work may still use.
        let bytes = bytes.next_power_of_two().max(1 << 16);
        all.push(Memory::new(stream.driver(), bytes).map_err(in_step)?);
    }
    Ok(all.last().map_or(0, |last| last.at))
}

/// An allocation of a step that failed: all else is there by then, so only the cache can leave room.
fn in_step(error: Error) -> Error {
    match error {
        Error::OutOfMemory {
            backend,
            requested,
            reason,
        } => Error::OutOfMemory {
            backend,
            requested,
            reason: format!(
                "{reason}; steps need memory beside weights and the KV cache\nhint: lower --kv-tokens or \
                 --gpu-memory-utilization"
            ),
        },
        error => error,
    }
}

/// Graphs and the stream may wait for ranks that never come.
impl<A> Drop for CudaContext<A> {
    fn drop(&mut self) {
        if let Some(nccl) = self.link.nccl() {
            nccl.finish(&self.stream);
        }
    }
}

/// A copy to the host that was begun.
struct Download {
    /// What the copied bytes may depend on.
    nccl: Option<Arc<Communicator>>,
    slot: Option<Slot>,
    slots: Arc<Mutex<StagingPool>>,
    bytes: usize,
}

impl Download {
    fn finish_to(mut self, op: &'static str, out: &mut [u8]) -> Result<()> {
        let Some(slot) = self.slot.take() else {
            return Ok(());
        };
        slot.event.wait(op)?;
        out.copy_from_slice(&slot.memory.bytes()[..out.len()]);
        lock(&self.slots).downloads.push(slot);
        self.nccl.map_or(Ok(()), |nccl| nccl.check(op))
    }
}

impl FinishRead for Download {
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<()> {
        self.finish_to("read", out)
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

// ---- the contract's copies -------------------------------------------------------------------------------

/// `dst[offset..] = src`.
pub(super) fn write<A: CudaAct, T: Element>(
    ctx: &mut CudaContext<A>,
    dst: &mut CudaBuffer<T>,
    offset: usize,
    src: &[T],
) -> Result<()> {
    check::range("write", "dst", dst, offset, src.len())?;
    ctx.upload("write", dst.at(offset), bytemuck::cast_slice(src))
}

/// Pieces of one upload. All of it is staged once; each piece is a copy that the device makes by itself.
pub(super) fn write_packed<'b, 'p, A: CudaAct>(
    ctx: &mut CudaContext<A>,
    src: &[i32],
    to: impl IntoIterator<Item = (&'b mut CudaBuffer<i32>, &'p [UploadPiece])>,
) -> Result<()> {
    let bytes: &[u8] = bytemuck::cast_slice(src);
    if bytes.is_empty() || bytes.len() > STEP {
        for (dst, pieces) in to {
            for piece in pieces {
                write(ctx, dst, piece.to, piece.of(src)?)?;
            }
        }
        return Ok(());
    }
    let mut slot = ctx.take_up(bytes.len())?;
    slot.memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    let done = to.into_iter().try_for_each(|(dst, pieces)| {
        pieces.iter().try_for_each(|piece| {
            let part = piece.of(src)?;
            check::range("write", "dst", dst, piece.to, part.len())?;
            let size = size_of_val(part);
            match size {
                0 => Ok(()),
                _ => ctx.stream.upload(
                    "write",
                    dst.at(piece.to),
                    &slot.memory,
                    4 * piece.from,
                    size,
                ),
            }
        })
    });
    ctx.stream.record(&slot.event)?;
    lock(&ctx.shared().slots).uploads.push(slot);
    done
}

/// `out = src[offset..][..out.len()]`.
pub(super) fn read<A: CudaAct, T: Element>(
    ctx: &mut CudaContext<A>,
    src: &CudaBuffer<T>,
    offset: usize,
    out: &mut [T],
) -> Result<()> {
    check::range("read", "src", src, offset, out.len())?;
    if out.is_empty() {
        return ctx.finish("read");
    }
    ctx.download("read", src.at(offset), bytemuck::cast_slice_mut(out))
}

/// [`read`], of which the host waits for the end later.
pub(super) fn begin_read<A: CudaAct, T: Element>(
    ctx: &mut CudaContext<A>,
    src: &CudaBuffer<T>,
    offset: usize,
    len: usize,
) -> Result<PendingRead<T>> {
    check::range("read", "src", src, offset, len)?;
    if len == 0 {
        return Ok(PendingRead::Ready(Vec::new()));
    }
    let download = ctx.begin_download("read", src.at(offset), len * size_of::<T>())?;
    Ok(PendingRead::Later(Box::new(download)))
}

/// `dst[dst_offset..][..len] = src[src_offset..][..len]`.
pub(super) fn copy_slice<A: CudaAct, T: Element>(
    ctx: &mut CudaContext<A>,
    (src, src_offset): (&CudaBuffer<T>, usize),
    (dst, dst_offset): (&mut CudaBuffer<T>, usize),
    len: usize,
) -> Result<()> {
    check::copy_slice(src, src_offset, dst, dst_offset, len)?;
    let (from, to) = (src.at(src_offset), dst.at(dst_offset));
    ctx.stream
        .copy("copy_slice", to, from, len * size_of::<T>())
}

// ---- captured steps ------------------------------------------------------------------------------------------

impl<A: CudaAct> BackendGraph for CudaBackend<A> {
    fn captures(&self) -> bool {
        true
    }

    fn run_graph(
        ctx: &mut CudaContext<A>,
        key: GraphKey,
        body: &mut dyn FnMut(&mut CudaContext<A>) -> Result<()>,
    ) -> Result<GraphRun> {
        if let Some(graph) = ctx.graphs.get(&key) {
            ctx.replay(graph)?;
            return Ok(GraphRun::Replayed);
        }
        let capture = ctx.stream.begin_capture()?;
        let ran = body(ctx);
        // The capture has to end whatever the body says.
        let graph = ctx.stream.end_capture(capture);
        ran?;
        let graph = graph?;
        ctx.replay(&graph)?;
        ctx.graphs.insert(key, graph);
        Ok(GraphRun::Captured)
    }

    fn reset_graph(ctx: &mut CudaContext<A>, key: GraphKey) -> Result<()> {
        ctx.graphs.remove(&key);
        Ok(())
    }

    fn reset_all_graphs(ctx: &mut CudaContext<A>) -> Result<()> {
        ctx.graphs.clear();
        Ok(())
    }
}

/// Pinned memory in the form of the contract.
pub(super) fn host_memory(shared: &Shared, bytes: usize) -> Result<Box<dyn HostMemory>> {
    Ok(Box::new(Pinned::new(&shared.driver, bytes)?))
}
