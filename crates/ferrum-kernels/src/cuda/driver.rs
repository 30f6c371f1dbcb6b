//! The driver API behind types that own what they name: contexts, streams, events, memory, modules, graphs.
//!
//! Everything is opened at run time, so a program that has this in it needs no driver to start. Whoever has one of these
//! values has a [`Driver`], and with it a context that stays; every call makes it the thread's current one first.

use ferrum_types::{Error, Result};
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use super::BACKEND;
use super::memory::{Pinned, Pool};
use crate::backend::HostMemory;
use cudarc::driver::sys;

/// An error of the device in the name of `op`.
pub(super) fn failure(op: &'static str, reason: impl Into<String>) -> Error {
    Error::Device {
        backend: BACKEND,
        op,
        reason: reason.into(),
    }
}

pub(super) fn no_device(reason: impl Into<String>, hint: &str) -> Error {
    Error::NoDevice {
        backend: BACKEND,
        reason: reason.into(),
        hint: hint.into(),
    }
}

/// What the driver says of an error.
pub(super) fn words(code: sys::CUresult) -> String {
    let mut text = null();
    // SAFETY: the driver writes a pointer to a text of its own that ends with zero.
    unsafe {
        sys::cuGetErrorString(code, &mut text);
        match text.is_null() {
            true => format!("{code:?}"),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

pub(super) fn check(op: &'static str, code: sys::CUresult) -> Result<()> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(failure(op, words(code))),
    }
}

/// Whether the driver's library is there; `cuInit` may still find no device.
pub(super) fn is_present() -> bool {
    // SAFETY: opens libraries by their names, whose initialisers are the driver's.
    unsafe { sys::is_culib_present() }
}

/// How many devices there are.
pub(super) fn count() -> Result<usize> {
    let hint = "install the driver of your NVIDIA GPU, or use --backend cpu";
    if !is_present() {
        return Err(no_device("no NVIDIA driver (libcuda) was found", hint));
    }
    let mut count = 0;
    // SAFETY: the library is there; `count` outlives the call.
    let code = unsafe {
        match sys::cuInit(0) {
            sys::CUresult::CUDA_SUCCESS => sys::cuDeviceGetCount(&mut count),
            code => code,
        }
    };
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(usize::try_from(count).unwrap_or(0)),
        code => Err(no_device(
            format!("the NVIDIA driver finds no device: {}", words(code)),
            hint,
        )),
    }
}

/// A device whose primary context is held.
pub(super) struct Driver {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// What all memory of the device comes from, where the driver has pools.
    pool: Option<Pool>,
}

// SAFETY: a context may be used from any thread that makes it current, and the driver locks what it shares.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.bind("open").is_ok()
            && let Some(pool) = &mut self.pool
        {
            pool.close();
        }
        // SAFETY: retained by `open`, once; all that lives in the context holds the driver, so it is gone.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Driver {
    pub(super) fn open(ordinal: usize) -> Result<Self> {
        let found = count()?;
        if ordinal >= found {
            let plural = if found == 1 { "" } else { "s" };
            return Err(no_device(
                format!("ordinal {ordinal} asked for, {found} device{plural} found"),
                "`ferrum devices` lists what there is",
            ));
        }
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: `cuInit` was called; both outlive the calls.
        unsafe {
            check("open", sys::cuDeviceGet(&mut device, ordinal as i32))?;
            check("open", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        let mut driver = Self {
            device,
            context,
            pool: None,
        };
        driver.bind("open")?;
        driver.pool = Pool::new(device)?;
        Ok(driver)
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self, op: &'static str) -> Result<()> {
        // SAFETY: the context is held.
        check(op, unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    pub(super) fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    pub(super) fn name(&self) -> String {
        let mut name = [0; 256];
        // SAFETY: the driver writes at most as many bytes, the last of them zero.
        unsafe {
            match sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, self.device) {
                sys::CUresult::CUDA_SUCCESS => {
                    CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
                }
                _ => "NVIDIA GPU".into(),
            }
        }
    }

    /// What no other device has, on this machine or another.
    pub(super) fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` outlives the call.
        check("uuid", unsafe {
            sys::cuDeviceGetUuid_v2(&mut uuid, self.device)
        })?;
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// 0 where the driver does not know it.
    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> i32 {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        match unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) } {
            sys::CUresult::CUDA_SUCCESS => value,
            _ => 0,
        }
    }

    /// Major and minor of the driver's CUDA.
    pub(super) fn version() -> (i32, i32) {
        let mut version = 0;
        // SAFETY: the library is there, or no driver would be.
        unsafe { sys::cuDriverGetVersion(&mut version) };
        (version / 1000, version % 1000 / 10)
    }

    /// Free memory, unused memory of the pool included, and total memory.
    pub(super) fn memory(&self) -> Option<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        self.bind("memory").ok()?;
        // SAFETY: both outlive the call.
        match unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } {
            sys::CUresult::CUDA_SUCCESS => {
                let idle = self.pool.as_ref().map_or(0, Pool::idle);
                Some((free as u64 + idle, total as u64))
            }
            _ => None,
        }
    }
}

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

/// A kernel of a loaded module. Modules stay as long as their device.
#[derive(Clone, Copy)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: a name for what the driver holds, which any thread may launch.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Kernels in machine code.
pub(super) struct Module {
    module: sys::CUmodule,
    driver: Arc<Driver>,
}

// SAFETY: a module may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(driver: &Arc<Driver>, cubin: &[u8]) -> Result<Self> {
        let mut module = null_mut();
        driver.bind("load_kernels")?;
        // SAFETY: NVRTC made the image, and it is whole; `module` outlives the call.
        check("load_kernels", unsafe {
            sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast())
        })?;
        Ok(Self {
            module,
            driver: Arc::clone(driver),
        })
    }

    /// A kernel that may ask for all shared memory of a block that its own variables leave.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        const OP: &str = "load_kernels";
        let most = self.driver.attribute(
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        );
        let (mut function, mut own) = (null_mut(), 0);
        let text = CString::new(name).map_err(|e| failure(OP, e.to_string()))?;
        self.driver.bind(OP)?;
        // SAFETY: the module is held, the name ends with zero, `function` and `own` outlive the calls.
        unsafe {
            use sys::CUfunction_attribute as Attribute;
            let found = sys::cuModuleGetFunction(&mut function, self.module, text.as_ptr());
            check(OP, found)?;
            let shared = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            check(OP, sys::cuFuncGetAttribute(&mut own, shared, function))?;
            let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let left = (most.max(48 << 10) - own).max(0);
            check(OP, sys::cuFuncSetAttribute(function, dynamic, left))?;
        }
        Ok(Function(function))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.driver.bind("load_kernels").is_ok() {
            // SAFETY: loaded by `load`, unloaded once, with the device that had its functions.
            unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// Blocks, threads of each, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// Whether it may be started while the work before it runs, for which it waits itself.
    pub(super) early: bool,
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
        grid: Grid,
        args: &mut [u64],
    ) -> Result<()> {
        const MOST: usize = 40;
        let mut places = [null_mut::<c_void>(); MOST];
        for (place, arg) in places.iter_mut().zip(args.iter_mut()) {
            *place = std::ptr::from_mut(arg).cast();
        }
        self.driver.bind(op)?;
        let Grid {
            blocks,
            threads,
            shared,
            early,
        } = grid;
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
            numAttrs: u32::from(early),
        };
        // SAFETY: the function is held by its device; the driver copies the arguments before it returns.
        let code =
            unsafe { sys::cuLaunchKernelEx(&config, function.0, places.as_mut_ptr(), null_mut()) };
        check(op, code)
    }

    /// From here on work is put into a graph and does not run.
    pub(super) fn begin_capture(&self) -> Result<()> {
        self.driver.bind("run_graph")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is held.
        check("run_graph", unsafe {
            sys::cuStreamBeginCapture_v2(self.stream, mode)
        })
    }

    /// The graph of the work since [`begin_capture`](Self::begin_capture).
    pub(super) fn end_capture(&self) -> Result<Graph> {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        self.driver.bind("run_graph")?;
        // SAFETY: both outlive the calls; the graph is destroyed once it was made executable.
        unsafe {
            check(
                "run_graph",
                sys::cuStreamEndCapture(self.stream, &mut graph),
            )?;
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
