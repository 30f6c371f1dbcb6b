//! Devices of the driver API: finding them, their contexts and the kernels loaded there.
//!
//! Everything is opened at run time, so a program that has this in it needs no driver to start. What lives in a context
//! (memory in `memory.rs`, streams in `stream.rs`, modules) holds its [`Driver`], so the context stays as long; every call
//! makes it the thread's current one first.

use super::error::{check, failure, no_device, words};
use super::pool::Pool;
use cudarc::driver::sys;
use ferrum_types::Result;
use std::ffi::{CStr, CString};
use std::ptr::null_mut;
use std::sync::Arc;

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
    ordinal: usize,
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
            ordinal,
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

    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
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

/// A kernel of a loaded module. Modules stay as long as their device.
#[derive(Clone, Copy)]
pub(super) struct Function(pub(super) sys::CUfunction);

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
