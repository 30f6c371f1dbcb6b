//! That calls which block the host are counted, and no others.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use cudarc::driver::sys::{self, CUresult};
use ferrum_cuda_emulator::host_syncs;
use std::ffi::c_void;
use std::ptr::null_mut;
use support::{Device, compiled, float, ok};

/// Panics unless a call succeeds and adds so much to the count.
fn counts(name: &str, expected: u64, call: impl FnOnce() -> CUresult) {
    let before = host_syncs();
    ok(call());
    assert_eq!(host_syncs() - before, expected, "{name}");
}

#[test]
fn calls_that_block_the_host_are_counted() {
    let Some(device) = Device::open() else { return };
    let (stream, cubin) = (device.stream, compiled());
    let (x, mut host) = (device.upload(&[1f32; 16]), [1f32; 16]);
    let pageable = host.as_mut_ptr().cast::<c_void>();
    let (mut pinned, mut event, mut others, mut module) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut at, mut pooled, mut pool) = (0, 0, null_mut());
    let exec = device.capture(|| {
        // What is refused blocks nobody.
        let before = host_syncs();
        assert_ne!(device.finish(), "");
        assert_eq!(host_syncs(), before);
        device.launch("add", [1, 16, 0], false, &mut [x, x, float(1.0), 16]);
    });
    // SAFETY: all outlive the calls, and pinned memory has 64 bytes.
    unsafe {
        counts("alloc", 1, || sys::cuMemAlloc_v2(&mut at, 64));
        counts("pinned", 1, || sys::cuMemHostAlloc(&mut pinned, 64, 0));
        counts("load", 1, || {
            sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast())
        });
        counts("from pageable", 1, || {
            sys::cuMemcpyHtoDAsync_v2(at, pageable, 64, stream)
        });
        counts("to pageable", 1, || {
            sys::cuMemcpyDtoHAsync_v2(pageable, at, 64, stream)
        });
        counts("create", 0, || sys::cuEventCreate(&mut event, 0));
        counts("create", 0, || sys::cuStreamCreate(&mut others, 1));

        let before = host_syncs();
        device.launch("add", [1, 16, 0], false, &mut [x, x, float(1.0), 16]);
        assert_eq!(host_syncs(), before, "launch");
        counts("replay", 0, || sys::cuGraphLaunch(exec, stream));
        counts("record", 0, || sys::cuEventRecord(event, stream));
        counts("wait of a stream", 0, || {
            sys::cuStreamWaitEvent(others, event, 0)
        });
        counts("fill", 0, || sys::cuMemsetD8Async(at, 0, 64, stream));
        counts("on the device", 0, || {
            sys::cuMemcpyDtoDAsync_v2(at, x, 64, stream)
        });
        counts("from pinned", 0, || {
            sys::cuMemcpyHtoDAsync_v2(at, pinned, 64, stream)
        });
        counts("to pinned", 0, || {
            sys::cuMemcpyDtoHAsync_v2(pinned, at, 64, stream)
        });
        let props = std::mem::zeroed();
        counts("pool", 0, || sys::cuMemPoolCreate(&mut pool, &props));
        counts("of a pool", 0, || {
            sys::cuMemAllocFromPoolAsync(&mut pooled, 64, pool, stream)
        });
        counts("to a pool", 0, || sys::cuMemFreeAsync(pooled, stream));

        counts("event", 1, || sys::cuEventSynchronize(event));
        counts("query", 0, || sys::cuEventQuery(event));
        counts("event that has come", 1, || sys::cuEventSynchronize(event));
        counts("stream", 1, || sys::cuStreamSynchronize(stream));
        counts("context", 1, || sys::cuCtxSynchronize());
        counts("destroy", 0, || sys::cuEventDestroy_v2(event));
        counts("destroy", 0, || sys::cuStreamDestroy_v2(others));
        counts("destroy", 0, || sys::cuMemPoolDestroy(pool));
        counts("unload", 1, || sys::cuModuleUnload(module));
        counts("free", 1, || sys::cuMemFree_v2(at));
        counts("free pinned", 1, || sys::cuMemFreeHost(pinned));
    }
}
