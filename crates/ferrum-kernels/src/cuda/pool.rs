//! The pool of the driver that a device's memory comes from.
//!
//! Its allocator puts buffers side by side (at multiples of 512 bytes), where `cuMemAlloc` would round the many small ones
//! of a model up to pages of 2 MiB, and it maps pages anew where others were freed, so that loading models in turns leaves
//! no holes. An allocator of our own over a few large pieces could do the first, not the second, and tools that check bounds
//! (compute-sanitizer, the stand-in driver) would see its pieces instead of buffers.
//!
//! The pool's order by streams is not used (`memory.rs`). What is free goes back to the driver but for [`KEPT`] bytes, so
//! that other programs can use it and queries of free memory count it.

use super::error::check;
use cudarc::driver::sys;
use ferrum_types::Result;
use std::ptr::{from_mut, null_mut};

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

    /// Writes the address of so many bytes to `at`, once they can be used on all streams.
    pub(super) fn alloc(&self, at: &mut u64, bytes: usize) -> sys::CUresult {
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
    pub(super) fn free(&self, at: u64) {
        // SAFETY: allocated by `alloc`, freed once, and nothing that uses it is left.
        unsafe {
            sys::cuCtxSynchronize();
            sys::cuMemFreeAsync(at, self.stream);
            sys::cuStreamSynchronize(self.stream);
        }
    }
}
