//! Work of a device in order: streams, the events that mark points in them, and the graphs captured from them.
//!
//! A module apart from `driver.rs`, because copies go through the pinned memory of `memory.rs`, which needs a
//! [`Driver`].

use super::capture::Capture;
use super::driver::{Driver, Function};
use super::error::check;
use super::memory::Pinned;
use crate::backend::HostMemory;
use cudarc::driver::sys;
use ferrum_types::Result;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// A point in the work of a stream.
pub(super) struct Event {
    event: sys::CUevent,
    driver: Arc<Driver>,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self> {
        let mut event = null_mut();
        driver.bind("event")?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` outlives the call.
        check("event", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Self {
            event,
            driver: Arc::clone(driver),
        })
    }

    /// Whether all work before it is done. An error is reported where the event is waited for.
    pub(super) fn is_done(&self) -> bool {
        // SAFETY: the event is held.
        self.driver.bind("event").is_ok()
            && unsafe { sys::cuEventQuery(self.event) } == sys::CUresult::CUDA_SUCCESS
    }

    pub(super) fn wait(&self, op: &'static str) -> Result<()> {
        self.driver.bind(op)?;
        // SAFETY: the event is held.
        check(op, unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.driver.bind("event").is_ok() {
            // SAFETY: created by `new`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Blocks, threads of each, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchConfig {
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// Whether it may be started while the work before it runs, for which it waits itself.
    pub(super) programmatic: bool,
}

/// Work in order.
pub(super) struct Stream {
    stream: sys::CUstream,
    driver: Arc<Driver>,
}

// SAFETY: a stream may be used from any thread, and its owner is borrowed alone by all that adds work.
unsafe impl Send for Stream {}

impl Stream {
    /// For libraries that add work.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self> {
        let mut stream = null_mut();
        driver.bind("stream")?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` outlives the call.
        check("stream", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Self {
            stream,
            driver: Arc::clone(driver),
        })
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    pub(super) fn wait(&self, op: &'static str) -> Result<()> {
        self.driver.bind(op)?;
        // SAFETY: the stream is held.
        check(op, unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Sets `bytes` bytes from `at` on to zero.
    pub(super) fn zero(&self, op: &'static str, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.driver.bind(op)?;
        // SAFETY: the caller has memory of the device there.
        check(op, unsafe {
            sys::cuMemsetD8Async(at, 0, bytes, self.stream)
        })
    }

    /// Copies the first `bytes` bytes of pinned memory, which is not written before an event behind this.
    pub(super) fn upload(
        &self,
        op: &'static str,
        at: u64,
        from: &Pinned,
        offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let source = &from.bytes()[offset..][..bytes];
        self.driver.bind(op)?;
        // SAFETY: `source` has the bytes, and stays until the copy is done; so does the memory at `at`.
        check(op, unsafe {
            sys::cuMemcpyHtoDAsync_v2(at, source.as_ptr().cast(), bytes, self.stream)
        })
    }

    /// Copies to the first `bytes` bytes of pinned memory, which is not read before an event after this copy.
    pub(super) fn download(
        &self,
        op: &'static str,
        to: &mut Pinned,
        at: u64,
        bytes: usize,
    ) -> Result<()> {
        let to = &mut to.bytes_mut()[..bytes];
        self.driver.bind(op)?;
        // SAFETY: as in `upload`, the other way round.
        check(op, unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), at, bytes, self.stream)
        })
    }

    /// Copies on the device, between ranges that do not overlap.
    pub(super) fn copy(&self, op: &'static str, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.driver.bind(op)?;
        // SAFETY: the caller has memory of the device in both places.
        check(op, unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)
        })
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        self.driver.bind("event")?;
        // SAFETY: both are held.
        check("event", unsafe {
            sys::cuEventRecord(event.event, self.stream)
        })
    }

    /// Launches a kernel. `args` are words of 8 bytes, each with an argument in its first bytes.
    ///
    /// # Safety
    /// The kernel has as many parameters, of these types, and reads and writes only memory that stays until the work
    /// is done.
    pub(super) unsafe fn launch(
        &self,
        op: &'static str,
        function: Function,
        config: LaunchConfig,
        args: &mut [u64],
    ) -> Result<()> {
        const MOST: usize = 40;
        let mut places = [null_mut::<c_void>(); MOST];
        for (place, arg) in places.iter_mut().zip(args.iter_mut()) {
            *place = std::ptr::from_mut(arg).cast();
        }
        self.driver.bind(op)?;
        let LaunchConfig {
            blocks,
            threads,
            shared,
            programmatic,
        } = config;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(programmatic),
        };
        // SAFETY: the function is held by its device; the driver copies the arguments before it returns.
        let code =
            unsafe { sys::cuLaunchKernelEx(&config, function.0, places.as_mut_ptr(), null_mut()) };
        check(op, code)
    }

    /// From here on work is put into a graph and does not run. What it gives is held until
    /// [`end_capture`](Self::end_capture).
    pub(super) fn begin_capture(&self) -> Result<Capture> {
        let capture = Capture::begin(&self.driver);
        self.driver.bind("run_graph")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is held.
        check("run_graph", unsafe {
            sys::cuStreamBeginCapture_v2(self.stream, mode)
        })?;
        Ok(capture)
    }

    /// The graph of the work since [`begin_capture`](Self::begin_capture).
    pub(super) fn end_capture(&self, capture: Capture) -> Result<Graph> {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        self.driver.bind("run_graph")?;
        // SAFETY: both outlive the calls; the graph is destroyed once it was made executable.
        unsafe {
            check(
                "run_graph",
                sys::cuStreamEndCapture(self.stream, &mut graph),
            )?;
            drop(capture);
            let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            check("run_graph", made)?;
        }
        Ok(Graph {
            exec,
            driver: Arc::clone(&self.driver),
        })
    }

    pub(super) fn replay(&self, graph: &Graph) -> Result<()> {
        self.driver.bind("run_graph")?;
        // SAFETY: both are held, and what the graph uses is, too, by the contract of `BackendGraph`.
        check("run_graph", unsafe {
            sys::cuGraphLaunch(graph.exec, self.stream)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.driver.bind("stream").is_ok() {
            // SAFETY: created by `new`, destroyed once; the driver finishes its work.
            unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// Captured work.
pub(super) struct Graph {
    exec: sys::CUgraphExec,
    driver: Arc<Driver>,
}

// SAFETY: a graph may be used from any thread; its owner is a context, borrowed alone.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.driver.bind("run_graph").is_ok() {
            // SAFETY: made by `end_capture`, destroyed once; the driver waits for launches of it.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
