//! The device of the tests on wgpu.

use ferrum_kernels::Backend;
use ferrum_kernels::gpu::GpuBackend;
use ferrum_test_support::skip;
use ferrum_types::Error;

/// `None`, said aloud, where there is none. That one does not open is a failure.
pub(crate) fn gpu() -> Option<GpuBackend> {
    match GpuBackend::open(0) {
        Ok(device) => Some(device),
        Err(absent @ Error::NoDevice { .. }) => {
            skip(absent);
            None
        }
        Err(error) => panic!("opening the gpu: {error}"),
    }
}
