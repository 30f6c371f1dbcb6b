//! Memory of a device and pinned memory of the host.
//!
//! All of a device's memory comes from the pool of its [`Driver`], where there is one (`pool.rs`). Memory that was asked
//! for is there when [`Memory::new`] returns, on every stream, and [`Memory`] waits for all work before it goes back.
//! That costs nothing in a step, which allocates only where what ops need for a moment is more than before. It does not go back while a stream is captured (`capture.rs`).

use super::BACKEND;
use super::capture;
use super::driver::Driver;
use super::error::{failure, words};
use crate::backend::HostMemory;
use cudarc::driver::sys;
use ferrum_types::{Error, Result};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

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
        if self.at == 0 {
            return;
        }
        let freed = capture::outside(&self.driver, || {
            if self.driver.bind("free").is_err() {
                return;
            }
            match self.driver.pool() {
                Some(pool) => pool.free(self.at),
                // SAFETY: allocated by `new`, freed once; the driver waits for work that uses it.
                None => unsafe {
                    sys::cuMemFree_v2(self.at);
                },
            }
        });
        if freed.is_none() {
            capture::drop_behind(Self {
                at: self.at,
                bytes: self.bytes,
                driver: Arc::clone(&self.driver),
            });
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
