//! Memory of a device and pinned memory of the host.
//!
//! All of a device's memory comes from one pool of the driver. Its allocator puts buffers side by side (at multiples of 512
//! bytes), where `cuMemAlloc` would round the many small ones of a model up to pages of 2 MiB, and it maps pages anew where
//! others were freed, so that loading models in turns leaves no holes. An allocator of our own over a few large pieces could do
//! the first, not the second, and tools that check bounds (compute-sanitizer, the stand-in driver) would see its
//! pieces instead of buffers.
//!
//! The pool's order by streams is not used: memory that was asked for is there when [`Memory::new`] returns, on every
//! stream, and [`Memory`] waits for all work before it goes back. That costs nothing in a step, which allocates nothing.
//! What is free goes back to the driver but for [`KEPT`] bytes, so that other programs can use it and queries of free memory count it.

use super::BACKEND;
use super::driver::{Driver, check, failure, words};
use crate::backend::HostMemory;
use cudarc::driver::sys;
use ferrum_types::{Error, Result};
use std::ffi::c_void;
use std::ptr::{from_mut, null_mut};
use std::sync::Arc;

/// Free bytes that the pool keeps, for the small buffers that come and go while a model runs.
const KEPT: u64 = 64 << 20;

/// The driver's pool for one device, and the stream in whose order it gives memory.
pub(super) struct Pool {
    pool: sys::CUmemoryPool,
    stream: sys::CUstream,
}

// SAFETY: both may be used from any thread.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool of a device whose context is current; none where the driver has no pools.
    pub(super) fn new(device: sys::CUdevice) -> Result<Option<Self>> {
        let mut supported = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        // SAFETY: `supported` outlives the call.
        let asked = unsafe { sys::cuDeviceGetAttribute(&mut supported, attribute, device) };
        if asked != sys::CUresult::CUDA_SUCCESS || supported == 0 {
            return Ok(None);
        }
        // SAFETY: zeros are a valid value of the type: no handles, no limit, and what is set below.
        let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        props.location.id = device;
        let (mut pool, mut stream) = (null_mut(), null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut kept = KEPT;
        // SAFETY: the context is current; everything that is written outlives the calls, and the attribute has 64 bits.
        unsafe {
            check("open", sys::cuMemPoolCreate(&mut pool, &props))?;
            let set = sys::cuMemPoolSetAttribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                from_mut(&mut kept).cast(),
            );
            let made = match set {
                sys::CUresult::CUDA_SUCCESS => sys::cuStreamCreate(&mut stream, flags),
                code => code,
            };
            if made != sys::CUresult::CUDA_SUCCESS {
                sys::cuMemPoolDestroy(pool);
            }
            check("open", made)?;
        }
        Ok(Some(Self { pool, stream }))
    }

    /// Gives the pool back, whose memory is all free by then. The context is current.
    pub(super) fn close(&mut self) {
        // SAFETY: made by `new`, destroyed once, by the driver that had it.
        unsafe {
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuMemPoolDestroy(self.pool);
        }
    }

    /// Unused bytes of the pool.
    pub(super) fn idle(&self) -> u64 {
        let of = |attribute| {
            let mut bytes = 0u64;
            // SAFETY: the pool is held; the attribute has 64 bits.
            match unsafe {
                sys::cuMemPoolGetAttribute(self.pool, attribute, from_mut(&mut bytes).cast())
            } {
                sys::CUresult::CUDA_SUCCESS => bytes,
                _ => 0,
            }
        };
        let reserved = of(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        reserved.saturating_sub(of(
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        ))
    }

    fn alloc(&self, at: &mut u64, bytes: usize) -> sys::CUresult {
        // SAFETY: both are held; `at` outlives the call.
        unsafe {
            match sys::cuMemAllocFromPoolAsync(at, bytes, self.pool, self.stream) {
                // Other streams use it, too.
                sys::CUresult::CUDA_SUCCESS => sys::cuStreamSynchronize(self.stream),
                code => code,
            }
        }
    }

    /// Gives memory back, once all work of the context has run.
    fn free(&self, at: u64) {
        // SAFETY: allocated by `alloc`, freed once, and nothing that uses it is left.
        unsafe {
            sys::cuCtxSynchronize();
            sys::cuMemFreeAsync(at, self.stream);
            sys::cuStreamSynchronize(self.stream);
        }
    }
}

/// Memory of the device.
pub(super) struct Memory {
    pub(super) at: u64,
    pub(super) bytes: usize,
    driver: Arc<Driver>,
}

impl Memory {
    /// Memory with anything in it; none is a null pointer.
    pub(super) fn new(driver: &Arc<Driver>, bytes: usize) -> Result<Self> {
        let mut at = 0;
        if bytes > 0 {
            driver.bind("alloc")?;
            let code = match driver.pool() {
                Some(pool) => pool.alloc(&mut at, bytes),
                // SAFETY: `at` outlives the call.
                None => unsafe { sys::cuMemAlloc_v2(&mut at, bytes) },
            };
            match code {
                sys::CUresult::CUDA_SUCCESS => {}
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    return Err(out_of_memory(driver, bytes));
                }
                code => return Err(failure("alloc", words(code))),
            }
        }
        Ok(Self {
            at,
            bytes,
            driver: Arc::clone(driver),
        })
    }
}

fn out_of_memory(driver: &Driver, bytes: usize) -> Error {
    let reason = match driver.memory() {
        Some((free, total)) => format!("{free} of {total} bytes are free"),
        None => "the device has no more".into(),
    };
    Error::OutOfMemory {
        backend: BACKEND,
        requested: bytes as u64,
        reason,
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.at != 0 && self.driver.bind("free").is_ok() {
            match self.driver.pool() {
                Some(pool) => pool.free(self.at),
                // SAFETY: allocated by `new`, freed once; the driver waits for work that uses it.
                None => unsafe {
                    sys::cuMemFree_v2(self.at);
                },
            }
        }
    }
}

/// Memory of the host that the device copies from and to by itself.
pub(super) struct Pinned {
    at: *mut u8,
    bytes: usize,
    driver: Arc<Driver>,
}

// SAFETY: it owns its bytes as a vector would.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeros.
    pub(super) fn new(driver: &Arc<Driver>, bytes: usize) -> Result<Self> {
        let mut at = null_mut::<c_void>();
        let bytes = bytes.max(16);
        driver.bind("host_buffer")?;
        // SAFETY: `at` outlives the call; what was allocated has `bytes` bytes, which are made zeros before anyone
        // sees them.
        unsafe {
            match sys::cuMemHostAlloc(&mut at, bytes, 0) {
                sys::CUresult::CUDA_SUCCESS => at.write_bytes(0, bytes),
                code => {
                    return Err(Error::OutOfMemory {
                        backend: BACKEND,
                        requested: bytes as u64,
                        reason: format!("pinned memory of the host: {}", words(code)),
                    });
                }
            }
        }
        Ok(Self {
            at: at.cast(),
            bytes,
            driver: Arc::clone(driver),
        })
    }
}

impl HostMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with as many bytes, all initialised; the device writes them only between the start of a
        // copy and the end that its owner waits for before it looks.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.driver.bind("free").is_ok() {
            // SAFETY: allocated by `new`, freed once; the driver waits for copies that use it.
            unsafe { sys::cuMemFreeHost(self.at.cast()) };
        }
    }
}
