//! [`GpuContext`]: records dispatches and copies, and submits them together.
//!
//! A step of the forward path is one command encoder with as few compute passes as there are copies
//! in between. Parameters of dispatches are collected on the host and uploaded by a small encoder
//! that goes in front of the step in the same submission. Nothing is submitted before somebody
//! wants a result ([`read`], [`GpuContext::finish`]) or very much has been recorded.

use super::GpuBackend;
use super::buffer::{GpuBuffer, RawBuffer};
use super::core::{Shared, lock};
use super::pipeline::{Kernel, MAX_BINDINGS, PARAM_BYTES};
use super::staging::Staging;
use crate::backend::{DeviceBuffer, FinishRead, GroupHandle, PendingRead, UploadPiece, check};
use ferrum_types::{Element, Error, Result};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Dispatches whose parameters fit into one page.
const PAGE_SLOTS: u32 = 512;

/// Dispatches after which work is submitted even if no caller waits for it, so that what is recorded
/// but not yet running stays bounded.
const MAX_RECORDED: u32 = 16 << 10;

/// A write of more bytes goes through the queue and not through the staging pool, which keeps what
/// it once had.
const LARGE_WRITE: usize = 8 << 20;

/// How long a callback of finished work may take to arrive.
const CALLBACK: Duration = Duration::from_secs(60);

/// Bytes that are read back at once.
const READ_STEP: u64 = 32 << 20;

/// A parameter of a dispatch.
#[derive(Clone, Copy, Debug)]
pub(super) enum P {
    /// A size, index or flag.
    U(usize),
    /// A number.
    F(f32),
}

/// A buffer that a dispatch binds.
#[derive(Clone, Copy)]
pub(super) enum Bind<'a> {
    To(&'a RawBuffer),
    /// An optional argument that is absent; the parameters tell the shader so.
    Nothing,
}

impl<'a, T> From<&'a GpuBuffer<T>> for Bind<'a> {
    fn from(buffer: &'a GpuBuffer<T>) -> Self {
        Bind::To(&buffer.raw)
    }
}

impl<'a, T> From<&'a mut GpuBuffer<T>> for Bind<'a> {
    fn from(buffer: &'a mut GpuBuffer<T>) -> Self {
        Bind::To(&buffer.raw)
    }
}

impl<'a> From<&'a RawBuffer> for Bind<'a> {
    fn from(raw: &'a RawBuffer) -> Self {
        Bind::To(raw)
    }
}

impl<'a, T> From<Option<&'a GpuBuffer<T>>> for Bind<'a> {
    fn from(buffer: Option<&'a GpuBuffer<T>>) -> Self {
        buffer.map_or(Bind::Nothing, Bind::from)
    }
}

/// Uniform memory for the parameters of [`PAGE_SLOTS`] dispatches.
struct ParamPage {
    buffer: wgpu::Buffer,
    group: wgpu::BindGroup,
}

/// Records work for one device and submits it.
///
/// Dropping a context submits what it has recorded.
pub struct GpuContext {
    // Dropped in this order: a pass must end before its encoder.
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    pub(super) backend: GpuBackend,
    staging: Staging,
    pages: Vec<ParamPage>,
    params: Vec<u8>,
    slot: u32,
    recorded: u32,
    /// Memory that no read uses, and how many pieces of such memory there are.
    spares: Arc<Mutex<Vec<wgpu::Buffer>>>,
    read_backs: u64,
    scratch: Option<GpuBuffer<f32>>,
    submissions: u64,
    last_submission: Option<wgpu::SubmissionIndex>,
    pub(super) group: Option<GroupHandle>,
}

impl GpuContext {
    pub(super) fn new(backend: GpuBackend) -> Self {
        let slot = PARAM_BYTES.next_multiple_of(backend.shared.uniform_align.max(1));
        Self {
            pass: None,
            encoder: None,
            backend,
            staging: Staging::new(),
            pages: Vec::new(),
            params: Vec::new(),
            slot,
            recorded: 0,
            spares: Arc::default(),
            read_backs: 0,
            scratch: None,
            submissions: 0,
            last_submission: None,
            group: None,
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.backend.shared
    }

    /// Submissions made so far; a decode step with its read-back is one.
    pub fn submissions(&self) -> u64 {
        self.submissions
    }

    /// Pieces of memory that this context has made for itself so far: staging, parameters,
    /// read-back. Constant in a steady state.
    pub fn allocations(&self) -> u64 {
        self.staging.allocated()
            + self.pages.len() as u64
            + u64::from(self.scratch.is_some())
            + self.read_backs
    }

    // ---- recording -------------------------------------------------------------------------------

    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        let device = &self.backend.shared.device;
        self.encoder
            .get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    /// Ends the compute pass, so that something else can be recorded behind its work.
    pub(super) fn outside_pass(&mut self) -> &mut wgpu::CommandEncoder {
        self.encoder()
    }

    fn pass(&mut self) -> &mut wgpu::ComputePass<'static> {
        let pass = match self.pass.take() {
            Some(pass) => pass,
            None => {
                let pass = self.encoder().begin_compute_pass(&Default::default());
                pass.forget_lifetime()
            }
        };
        self.pass.insert(pass)
    }

    /// Records a dispatch of `groups` workgroups; none is no work.
    ///
    /// # Errors
    /// `InvalidArgument` in the name of `op` when a size does not fit into 32 bits.
    pub(super) fn run<const N: usize>(
        &mut self,
        op: &'static str,
        (kernel, constants): (&'static Kernel, &[u32]),
        binds: [Bind<'_>; N],
        params: &[P],
        groups: usize,
    ) -> Result<()> {
        const { assert!(N <= MAX_BINDINGS) };
        debug_assert_eq!(N, kernel.access.len(), "{}", kernel.name);
        if groups == 0 {
            return Ok(());
        }
        let (x, y) = self.grid(op, groups)?;
        let (page, offset) = self.push_params(op, params)?;
        let shared = Arc::clone(self.shared());
        let buffers = binds.map(|b| match b {
            Bind::To(raw) => (raw.id, &raw.buffer),
            Bind::Nothing => (0, &shared.nothing),
        });
        let mut cache = lock(&shared.pipelines);
        let pipeline = cache.pipeline(&shared.device, kernel, constants);
        let group = cache.bind_group(&shared.device, &pipeline, &buffers);
        drop(cache);

        let of_params = self.pages[page].group.clone();
        let pass = self.pass();
        pass.set_pipeline(&pipeline.compute);
        pass.set_bind_group(0, &of_params, &[offset]);
        pass.set_bind_group(1, &group, &[]);
        pass.dispatch_workgroups(x, y, 1);
        self.recorded += 1;
        if self.recorded >= MAX_RECORDED {
            self.submit()?;
        }
        Ok(())
    }

    /// A grid of two dimensions with at least `groups` workgroups; shaders ignore those beyond.
    fn grid(&self, op: &'static str, groups: usize) -> Result<(u32, u32)> {
        let limit = self.shared().max_groups as usize;
        let y = groups.div_ceil(limit);
        if y > limit {
            let reason = format!("{groups} workgroups are more than a grid of {limit} by {limit}");
            return Err(Error::invalid(op, reason));
        }
        // Spread evenly, so that few of the last row are idle; both are at most `limit`.
        Ok((groups.div_ceil(y) as u32, y as u32))
    }

    /// Appends parameters; returns the page and the offset in it.
    fn push_params(&mut self, op: &'static str, params: &[P]) -> Result<(usize, u32)> {
        let page_bytes = (self.slot * PAGE_SLOTS) as usize;
        let at = self.params.len();
        debug_assert!(params.len() * 4 <= PARAM_BYTES as usize);
        for p in params {
            let word = match *p {
                P::F(x) => x.to_bits(),
                P::U(n) => u32::try_from(n).map_err(|_| {
                    self.params.truncate(at);
                    Error::invalid(op, format!("the size {n} does not fit into 32 bits"))
                })?,
            };
            self.params.extend_from_slice(&word.to_le_bytes());
        }
        self.params.resize(at + self.slot as usize, 0);
        let page = at / page_bytes;
        if page == self.pages.len() {
            self.pages.push(self.new_page());
        }
        Ok((page, (at % page_bytes) as u32))
    }

    fn new_page(&self) -> ParamPage {
        let shared = self.shared();
        let buffer = shared.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("params"),
            size: u64::from(self.slot * PAGE_SLOTS),
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let group = shared.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("params"),
            layout: &lock(&shared.pipelines).params,
            entries: &[wgpu::BindGroupEntry {
                binding: 0,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &buffer,
                    offset: 0,
                    size: wgpu::BufferSize::new(u64::from(PARAM_BYTES)),
                }),
            }],
        });
        ParamPage { buffer, group }
    }

    /// Records a copy of whole words between buffers.
    pub(super) fn copy_words(
        &mut self,
        from: (&RawBuffer, u64),
        to: (&RawBuffer, u64),
        bytes: u64,
    ) {
        self.encoder()
            .copy_buffer_to_buffer(&from.0.buffer, from.1, &to.0.buffer, to.1, bytes);
        self.recorded += 1;
    }

    /// Records zeros in the first `bytes`, a multiple of four.
    pub(super) fn clear(&mut self, raw: &RawBuffer, bytes: u64) {
        if bytes > 0 {
            self.encoder().clear_buffer(&raw.buffer, 0, Some(bytes));
            self.recorded += 1;
        }
    }

    /// Records a copy of host bytes to word-aligned device memory.
    pub(super) fn upload(&mut self, bytes: &[u8], to: (&RawBuffer, u64)) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() > LARGE_WRITE && bytes.len().is_multiple_of(4) {
            // Everything recorded so far goes first; the queue keeps the order from there on.
            self.submit()?;
            self.shared().queue.write_buffer(&to.0.buffer, to.1, bytes);
            return Ok(());
        }
        self.encoder();
        let shared = Arc::clone(self.shared());
        if let Some(encoder) = &mut self.encoder {
            self.staging
                .copy(&shared.device, encoder, bytes, (&to.0.buffer, to.1))
                .map_err(|e| shared.failure("write", e))?;
        }
        self.recorded += 1;
        Ok(())
    }

    /// Puts bytes where copies that are recorded next find them: a buffer, and the first byte in it.
    fn stage(&mut self, bytes: &[u8]) -> Result<(wgpu::Buffer, u64)> {
        let shared = Arc::clone(self.shared());
        let staged = self.staging.put(&shared.device, bytes);
        staged.map_err(|e| shared.failure("write", e))
    }

    /// Scratch memory of at least `len` elements, to be given back with
    /// [`put_scratch`](Self::put_scratch). One piece is enough, as ops run one after the other.
    pub(super) fn take_scratch(&mut self, len: usize) -> Result<GpuBuffer<f32>> {
        match self.scratch.take() {
            Some(buffer) if buffer.len() >= len => Ok(buffer),
            _ => super::buffer::alloc(self.shared(), len),
        }
    }

    /// Keeps scratch memory for the next call.
    pub(super) fn put_scratch(&mut self, buffer: GpuBuffer<f32>) {
        self.scratch = Some(buffer);
    }

    // ---- running ---------------------------------------------------------------------------------

    /// Submits what is recorded, if anything.
    pub(super) fn submit(&mut self) -> Result<()> {
        self.pass = None;
        let Some(encoder) = self.encoder.take() else {
            return Ok(());
        };
        let shared = Arc::clone(self.shared());
        let mut first = shared.device.create_command_encoder(&Default::default());
        let page_bytes = (self.slot * PAGE_SLOTS) as usize;
        let mut uploaded = Ok(());
        for (page, bytes) in self.pages.iter().zip(self.params.chunks(page_bytes)) {
            let copied = self
                .staging
                .copy(&shared.device, &mut first, bytes, (&page.buffer, 0));
            uploaded = uploaded.and(copied);
        }
        self.params.clear();
        self.recorded = 0;
        self.staging.close();
        // Dispatches without their parameters must not run.
        if let Err(e) = uploaded {
            return Err(shared
                .check("submit")
                .err()
                .unwrap_or_else(|| shared.failure("submit", e)));
        }
        let submitted = shared.queue.submit([first.finish(), encoder.finish()]);
        self.last_submission = Some(submitted);
        self.staging.recall();
        self.submissions += 1;
        Ok(())
    }

    /// Submits what is recorded and waits for all of it.
    pub(super) fn finish(&mut self, op: &'static str) -> Result<()> {
        self.submit()?;
        match self.last_submission.take() {
            Some(last) => self.shared().wait(op, last),
            None => self.shared().check(op),
        }
    }

    /// Submits, and copies `bytes` of `src` from the word-aligned `offset` to the host, where
    /// `take(at, piece)` gets them piece by piece.
    pub(super) fn download(
        &mut self,
        src: &RawBuffer,
        offset: u64,
        bytes: u64,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.download_regions(&[(src, offset)], bytes, |_, at, piece| take(at, piece))
    }

    /// [`download`](Self::download) of several regions of `bytes` each, as many as fit with one wait.
    /// `take(region, at, piece)` gets bytes `at..` of a region.
    pub(super) fn download_regions(
        &mut self,
        regions: &[(&RawBuffer, u64)],
        bytes: u64,
        mut take: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // Regions that are copied together, or the part of one that is.
        let together = (READ_STEP / bytes).max(1) as usize;
        let size = READ_STEP.min(bytes);
        for (group, regions) in regions.chunks(together).enumerate() {
            let mut at = 0;
            while at < bytes {
                let size = size.min(bytes - at);
                let all = size * regions.len() as u64;
                let to = self.spare_read_back(all);
                let encoder = self.encoder();
                for (i, (src, offset)) in (0u64..).zip(regions) {
                    let from = offset + at;
                    encoder.copy_buffer_to_buffer(&src.buffer, from, &to, i * size, size);
                }
                let mut begun = self.begin_map(to, all)?;
                begun.take(|view| {
                    for (i, piece) in view.chunks_exact(size as usize).enumerate() {
                        take(group * together + i, at as usize, piece);
                    }
                })?;
                at += size;
            }
        }
        Ok(())
    }

    /// Submits, and begins to copy `bytes` of `src` from the word-aligned `offset` to the host.
    fn begin_download(&mut self, src: &RawBuffer, offset: u64, bytes: u64) -> Result<Download> {
        let to = self.spare_read_back(bytes);
        self.encoder()
            .copy_buffer_to_buffer(&src.buffer, offset, &to, 0, bytes);
        self.begin_map(to, bytes)
    }

    /// Submits, and begins to read the first `bytes` of what is copied to `to`.
    fn begin_map(&mut self, to: wgpu::Buffer, bytes: u64) -> Result<Download> {
        self.submit()?;
        let (sender, mapped) = std::sync::mpsc::channel();
        to.map_async(wgpu::MapMode::Read, ..bytes, move |result| {
            // The receiver is gone when the read was dropped.
            let _ = sender.send(result);
        });
        Ok(Download {
            shared: Arc::clone(self.shared()),
            submission: self.last_submission.clone(),
            buffer: to,
            bytes,
            mapped,
            spares: Arc::clone(&self.spares),
        })
    }

    /// Memory to read into that no read uses.
    fn spare_read_back(&mut self, bytes: u64) -> wgpu::Buffer {
        let mut spares = lock(&self.spares);
        match spares.iter().position(|spare| spare.size() >= bytes) {
            Some(found) => spares.swap_remove(found),
            None => {
                drop(spares);
                self.read_backs += 1;
                read_back_buffer(self.shared(), bytes)
            }
        }
    }
}

/// Memory that is read into.
fn read_back_buffer(shared: &Shared, bytes: u64) -> wgpu::Buffer {
    shared.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("read-back"),
        size: bytes.next_power_of_two().max(4096),
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    })
}

/// A copy to the host that has begun.
struct Download {
    shared: Arc<Shared>,
    submission: Option<wgpu::SubmissionIndex>,
    buffer: wgpu::Buffer,
    bytes: u64,
    mapped: Receiver<std::result::Result<(), wgpu::BufferAsyncError>>,
    /// Where the memory goes afterwards.
    spares: Arc<Mutex<Vec<wgpu::Buffer>>>,
}

impl Download {
    /// Waits, and hands over the bytes.
    fn take(&mut self, take: impl FnOnce(&[u8])) -> Result<()> {
        if let Some(submission) = self.submission.take() {
            self.shared.wait("read", submission)?;
        }
        let fail = |reason: String| self.shared.failure("read", reason);
        // The callback runs on whichever thread polls first, so it may not have run yet.
        let result = self.mapped.recv_timeout(CALLBACK);
        let result = result.map_err(|e| fail(e.to_string()))?;
        result.map_err(|e| fail(e.to_string()))?;
        let view = self.buffer.get_mapped_range(..self.bytes);
        take(&view.map_err(|e| fail(e.to_string()))?);
        self.buffer.unmap();
        lock(&self.spares).push(self.buffer.clone());
        Ok(())
    }
}

/// The end of a [`begin_read`]: some bytes of a download.
struct PendingDownload {
    download: Download,
    skip: usize,
    bytes: usize,
}

impl FinishRead for PendingDownload {
    fn finish(mut self: Box<Self>, out: &mut [u8]) -> Result<()> {
        let (skip, bytes) = (self.skip, self.bytes);
        self.download
            .take(|piece| out.copy_from_slice(&piece[skip..skip + bytes]))
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for GpuContext {
    fn drop(&mut self) {
        // As on a device that runs work at once; a caller that needs the errors calls `sync` before.
        let _ = self.submit();
    }
}

// ---- typed copies --------------------------------------------------------------------------------

/// `dst[offset..] = src`.
pub(super) fn write<T: Element>(
    ctx: &mut GpuContext,
    dst: &mut GpuBuffer<T>,
    offset: usize,
    src: &[T],
) -> Result<()> {
    check::range("write", "dst", dst, offset, src.len())?;
    let bytes: &[u8] = bytemuck::cast_slice(src);
    let at = offset * size_of::<T>();
    let ends_at_word = bytes.len().is_multiple_of(4);
    if at.is_multiple_of(4) && ends_at_word {
        return ctx.upload(bytes, (&dst.raw, at as u64));
    }
    // Neighbours in the same word must survive: through scratch memory and a copy of bytes.
    let scratch = ctx.take_scratch(bytes.len().div_ceil(4))?;
    let done = ctx
        .upload(bytes, (&scratch.raw, 0))
        .and_then(|()| copy_bytes(ctx, "write", (&scratch.raw, 0), (&dst.raw, at), bytes.len()));
    ctx.put_scratch(scratch);
    done
}

/// `dst[piece.to..] = src[piece.from..][..piece.len]` for each piece: the host's memory is filled once, and the device
/// copies each piece from there.
pub(super) fn write_packed<'b, 'p>(
    ctx: &mut GpuContext,
    src: &[i32],
    to: impl IntoIterator<Item = (&'b mut GpuBuffer<i32>, &'p [UploadPiece])>,
) -> Result<()> {
    let bytes: &[u8] = bytemuck::cast_slice(src);
    let packed = match bytes.len() {
        0 => None,
        n if n > LARGE_WRITE => None,
        _ => Some(ctx.stage(bytes)?),
    };
    for (dst, pieces) in to {
        for piece in pieces {
            let part = piece.of(src)?;
            let Some((staged, first)) = &packed else {
                write(ctx, dst, piece.to, part)?;
                continue;
            };
            check::range("write", "dst", dst, piece.to, part.len())?;
            if part.is_empty() {
                continue;
            }
            let (from, to) = (first + 4 * piece.from as u64, 4 * piece.to as u64);
            let bytes = size_of_val(part) as u64;
            ctx.encoder()
                .copy_buffer_to_buffer(staged, from, &dst.raw.buffer, to, bytes);
            ctx.recorded += 1;
        }
    }
    Ok(())
}

/// `out = src[offset..][..out.len()]`, once everything recorded has run.
pub(super) fn read<T: Element>(
    ctx: &mut GpuContext,
    src: &GpuBuffer<T>,
    offset: usize,
    out: &mut [T],
) -> Result<()> {
    check::range("read", "src", src, offset, out.len())?;
    let out: &mut [u8] = bytemuck::cast_slice_mut(out);
    if out.is_empty() {
        return ctx.finish("read");
    }
    let start = offset * size_of::<T>();
    let first_word = start / 4 * 4;
    let skip = start - first_word;
    let words = (skip + out.len()).next_multiple_of(4) as u64;
    ctx.download(&src.raw, first_word as u64, words, |at, piece| {
        // `piece` is bytes `at..` of the words, of which the first `skip` belong to others.
        let from = skip.saturating_sub(at).min(piece.len());
        let to = (at + from).saturating_sub(skip);
        let n = (piece.len() - from).min(out.len().saturating_sub(to));
        out[to..to + n].copy_from_slice(&piece[from..from + n]);
    })
}

/// [`read`], of which the host waits for the end later.
pub(super) fn begin_read<T: Element>(
    ctx: &mut GpuContext,
    src: &GpuBuffer<T>,
    offset: usize,
    len: usize,
) -> Result<PendingRead<T>> {
    check::range("read", "src", src, offset, len)?;
    let (start, bytes) = (offset * size_of::<T>(), len * size_of::<T>());
    if bytes == 0 {
        ctx.submit()?;
        return Ok(PendingRead::Ready(Vec::new()));
    }
    let first_word = start / 4 * 4;
    let skip = start - first_word;
    let words = (skip + bytes).next_multiple_of(4) as u64;
    let download = ctx.begin_download(&src.raw, first_word as u64, words)?;
    Ok(PendingRead::Later(Box::new(PendingDownload {
        download,
        skip,
        bytes,
    })))
}

/// `dst[dst_offset..][..len] = src[src_offset..][..len]`.
pub(super) fn copy_slice<T: Element>(
    ctx: &mut GpuContext,
    (src, src_offset): (&GpuBuffer<T>, usize),
    (dst, dst_offset): (&mut GpuBuffer<T>, usize),
    len: usize,
) -> Result<()> {
    const OP: &str = "copy_slice";
    check::copy_slice(src, src_offset, dst, dst_offset, len)?;
    let size = size_of::<T>();
    let (from, to, bytes) = (src_offset * size, dst_offset * size, len * size);
    copy_bytes(ctx, OP, (&src.raw, from), (&dst.raw, to), bytes)
}

pub(super) static COPY_BYTES: Kernel = Kernel {
    name: "copy_bytes",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/copy_bytes.wgsl"),
    ],
    access: "rw",
    constants: &[],
};

/// Copies bytes at any offsets; in words where that is possible.
fn copy_bytes(
    ctx: &mut GpuContext,
    op: &'static str,
    (src, from): (&RawBuffer, usize),
    (dst, to): (&RawBuffer, usize),
    bytes: usize,
) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    if [from, to, bytes].iter().all(|n| n.is_multiple_of(4)) {
        ctx.copy_words((src, from as u64), (dst, to as u64), bytes as u64);
        return Ok(());
    }
    let words = (to + bytes).div_ceil(4) - to / 4;
    ctx.run(
        op,
        (&COPY_BYTES, &[]),
        [src.into(), dst.into()],
        &[P::U(from), P::U(to), P::U(bytes)],
        words.div_ceil(LANES),
    )
}

/// Lanes of the shaders in which each lane makes one element.
pub(super) const LANES: usize = 256;
