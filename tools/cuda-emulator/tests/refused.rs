//! That the emulator refuses calls of the host which a card refuses, or whose results nobody may count on.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use cudarc::cublaslt::sys as blas;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use support::{Device, float, ok, words};

/// Panics unless the call gave this error with these words.
fn refused(found: CUresult, code: CUresult, expected: &str) {
    let text = words(found);
    assert!(
        found == code && text.contains(expected),
        "{found:?}: {text}"
    );
}

#[test]
fn copies_on_the_device_do_not_overlap() {
    // Distances between the beginnings of two ranges of 64 bytes.
    for (distance, expected) in [
        (64, ""),
        (60, "ranges that overlap"),
        (4, "ranges that overlap"),
    ] {
        for back in [false, true] {
            let Some(device) = Device::open() else { return };
            let low = device.upload(&[1f32; 64]);
            let (to, from) = if back {
                (low, low + distance)
            } else {
                (low + distance, low)
            };
            // SAFETY: the allocation has 256 bytes.
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, 64, device.stream) };
            let found = device.finish();
            let right = found.contains(expected) && found.is_empty() == expected.is_empty();
            assert!(right, "{distance} {back}: {found}");
        }
    }
}

#[test]
fn copies_and_fills_stay_in_their_allocations() {
    type Copy = fn(u64, &mut [f32; 16], &Device);
    let copies: [(&str, Copy); 4] = [
        ("a copy to the device: ", |at, host, device| {
            // SAFETY: pageable memory is copied before the call returns.
            unsafe { sys::cuMemcpyHtoDAsync_v2(at, host.as_ptr().cast(), 64, device.stream) };
        }),
        ("a copy from the device: ", |at, host, device| {
            // SAFETY: `host` has 64 bytes, and a copy to pageable memory ends before the call returns.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), at, 64, device.stream) };
        }),
        ("a copy on the device: ", |at, _, device| {
            let other = device.upload(&[0f32; 16]);
            // SAFETY: what is behind the end of the allocation is found.
            unsafe { sys::cuMemcpyDtoDAsync_v2(at, other, 64, device.stream) };
        }),
        ("a fill: ", |at, _, device| {
            // SAFETY: as above.
            unsafe { sys::cuMemsetD8Async(at, 0, 64, device.stream) };
        }),
    ];
    for (expected, copy) in copies {
        for shift in [0, 4] {
            let Some(device) = Device::open() else { return };
            let at = device.upload(&[1f32; 16]);
            copy(at + shift, &mut [0.0; 16], &device);
            let found = device.finish();
            let right = match shift {
                0 => found.is_empty(),
                _ => found.contains(expected) && found.contains("out of bounds"),
            };
            assert!(right, "{expected}{shift}: {found}");
        }
    }
}

#[test]
fn launches_fit_what_a_card_takes() {
    let Some(device) = Device::open() else { return };
    let (refused_grid, refused_shared) = (
        (CUresult::CUDA_ERROR_INVALID_VALUE, "that no card takes"),
        (
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            "more dynamic shared memory",
        ),
    );
    let (function, bounded) = (
        device.function("unwritten_memory"),
        device.function("bounded"),
    );
    let (x, out) = (device.upload(&[1f32; 1024]), device.alloc(4096));
    let mut args = [out, x];
    let mut places = args
        .each_mut()
        .map(|arg| std::ptr::from_mut(arg).cast::<c_void>());
    let mut launch_of = |function, grid: [u32; 3], block: [u32; 3], shared| {
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        let places = places.as_mut_ptr();
        // SAFETY: both kernels have these parameters.
        unsafe {
            sys::cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                device.stream,
                places,
                null_mut(),
            )
        }
    };
    refused(
        launch_of(bounded, [1; 3], [65, 1, 1], 0),
        CUresult::CUDA_ERROR_INVALID_VALUE,
        "than its launch bounds allow",
    );
    ok(launch_of(bounded, [1; 3], [64, 1, 1], 0));
    let mut launch = |grid, block, shared| launch_of(function, grid, block, shared);
    for (grid, block) in [
        ([1, 1, 1], [1025, 1, 1]),
        ([1, 1, 1], [32, 33, 1]),
        ([1, 1, 1], [1, 1, 65]),
        ([1, 1, 1], [0, 1, 1]),
        ([0, 1, 1], [32, 1, 1]),
        ([1 << 31, 1, 1], [32, 1, 1]),
        ([1, 65536, 1], [32, 1, 1]),
        ([1, 1, 65536], [32, 1, 1]),
    ] {
        refused(launch(grid, block, 0), refused_grid.0, refused_grid.1);
    }
    refused(
        launch([1; 3], [32, 1, 1], (48 << 10) + 1),
        refused_shared.0,
        refused_shared.1,
    );
    ok(launch([1; 3], [1024, 1, 1], 48 << 10));

    // The variables of the module's kernels and what is asked for are 227 KiB together.
    let shared = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let own = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    let mut variables = 0;
    // SAFETY: the function is one of the module's, the number outlives the call.
    let set = |bytes| unsafe { sys::cuFuncSetAttribute(function, shared, bytes) };
    // SAFETY: as above.
    ok(unsafe { sys::cuFuncGetAttribute(&mut variables, own, function) });
    assert!(variables > 0);
    let most = (227 << 10) - variables;
    refused(
        set(most + 1),
        CUresult::CUDA_ERROR_INVALID_VALUE,
        "than a block may have",
    );
    ok(set(most));
    ok(launch([1; 3], [32, 1, 1], most.cast_unsigned()));
    refused(
        launch([1; 3], [32, 1, 1], most.cast_unsigned() + 1),
        refused_shared.0,
        refused_shared.1,
    );
    assert_eq!(device.finish(), "");
}

/// While a stream is captured, nobody waits for it, frees memory or copies what is not pinned.
#[test]
fn captured_steps_neither_wait_nor_copy_pageable_memory() {
    let Some(device) = Device::open() else { return };
    let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    let x = device.upload(&[1f32; 16]);
    let (mut pageable, mut event) = ([2f32; 16], null_mut());
    let host = pageable.as_mut_ptr().cast::<c_void>();
    let exec = device.capture(|| {
        // SAFETY: all outlive the calls; those that are refused touch nothing.
        unsafe {
            ok(sys::cuEventCreate(&mut event, 0));
            ok(sys::cuEventRecord(event, device.stream));
            refused(
                sys::cuStreamSynchronize(device.stream),
                unsupported,
                "that is captured",
            );
            refused(sys::cuCtxSynchronize(), unsupported, "a stream is captured");
            refused(
                sys::cuMemFree_v2(x),
                unsupported,
                "while a stream is captured",
            );
            let up = sys::cuMemcpyHtoDAsync_v2(x, host, 64, device.stream);
            refused(up, unsupported, "from pageable memory");
            let down = sys::cuMemcpyDtoHAsync_v2(host, x, 64, device.stream);
            refused(down, unsupported, "to pageable memory");
            for call in [sys::cuEventSynchronize, sys::cuEventQuery] {
                let code = CUresult::CUDA_ERROR_CAPTURED_EVENT;
                refused(call(event), code, "an event of a captured step");
            }
        }
        device.launch("add", [1, 16, 0], false, &mut [x, x, float(1.0), 16]);
    });
    // SAFETY: the stream is held.
    ok(unsafe { sys::cuGraphLaunch(exec, device.stream) });
    assert_eq!(device.download(x, 16), [2.0; 16]);
}

/// Makes the context of a device current.
fn use_device(ordinal: i32) {
    let mut context = null_mut();
    // SAFETY: the context outlives the calls.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&mut context, ordinal));
        ok(sys::cuCtxSetCurrent(context));
    }
}

#[test]
fn devices_have_memory_and_streams_of_their_own() {
    for kernel in [true, false] {
        let Some(device) = Device::open() else { return };
        ferrum_cuda_emulator::load_devices(2).unwrap();
        use_device(1);
        let theirs = device.alloc(256);
        // SAFETY: all outlive the call.
        let found = unsafe { sys::cuMemsetD8Async(theirs, 0, 256, device.stream) };
        let expected = "the stream is one of another device";
        refused(found, CUresult::CUDA_ERROR_INVALID_CONTEXT, expected);
        use_device(0);
        let out = device.alloc(256);
        if kernel {
            device.launch("unwritten_memory", [1, 64, 0], false, &mut [out, theirs]);
        } else {
            // SAFETY: that the memory is another device's is found.
            unsafe { sys::cuMemcpyDtoDAsync_v2(out, theirs, 256, device.stream) };
        }
        let found = device.finish();
        assert!(found.contains("of device 1 by device 0"), "{found}");
    }
}

/// Until its stream comes to an allocation, there is no memory. Work may begin early, so it takes several times to see it.
#[test]
fn memory_of_a_pool_is_not_there_before_its_stream_has_come_to_it() {
    let Some(device) = Device::open() else { return };
    let mut seen = 0;
    for _ in 0..20 {
        let x = device.upload(&[1f32; 64]);
        let (mut pool, mut others, mut at) = (null_mut(), null_mut(), 0);
        // SAFETY: all outlive the calls; the use that comes too early is found.
        unsafe {
            let props = std::mem::zeroed();
            ok(sys::cuMemPoolCreate(&mut pool, &props));
            ok(sys::cuStreamCreate(&mut others, 1));
            ok(sys::cuMemAllocFromPoolAsync(&mut at, 256, pool, others));
        }
        let found = device.run("add", 1, 64, 0, &mut [at, x, 0, 64]);
        assert!(
            found.is_empty() || found.contains("to which its stream has not come"),
            "{found}"
        );
        seen += usize::from(!found.is_empty());
        ferrum_cuda_emulator::clear_error();
    }
    assert!(seen > 0);
}

/// Descriptions of a product by cuBLASLt, and the kernel that was chosen for them: `[rows, k]` of bf16 times `[columns, k]`, in f32.
struct Plan {
    product: blas::cublasLtMatmulDesc_t,
    layouts: [blas::cublasLtMatrixLayout_t; 3],
    kernel: blas::cublasLtMatmulAlgo_t,
}

const WORKSPACE: usize = 4 << 20;

fn good(status: blas::cublasStatus_t) {
    assert_eq!(status, blas::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
}

impl Plan {
    fn new(handle: blas::cublasLtHandle_t, [rows, columns, k]: [u64; 3]) -> Self {
        use blas::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use blas::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let (bf16, f32) = (
            blas::cudaDataType::CUDA_R_16BF,
            blas::cudaDataType::CUDA_R_32F,
        );
        let compute = blas::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (mut product, mut layouts, mut limits) = (null_mut(), [null_mut(); 3], null_mut());
        let mut count = 0;
        // SAFETY: numbers and null pointers, which all bits of zero are.
        let mut found: blas::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all outlive the calls; attributes have the sizes of their types.
        unsafe {
            good(blas::cublasLtMatmulDescCreate(&mut product, compute, f32));
            let (turned, attribute) = (1i32, CUBLASLT_MATMUL_DESC_TRANSA);
            good(blas::cublasLtMatmulDescSetAttribute(
                product,
                attribute,
                from_ref(&turned).cast(),
                4,
            ));
            let sizes = [(bf16, k, columns), (bf16, k, rows), (f32, columns, rows)];
            for (layout, (dtype, height, width)) in layouts.iter_mut().zip(sizes) {
                good(blas::cublasLtMatrixLayoutCreate(
                    layout,
                    dtype,
                    height,
                    width,
                    height as i64,
                ));
            }
            good(blas::cublasLtMatmulPreferenceCreate(&mut limits));
            let (value, attribute) = (
                from_ref(&WORKSPACE).cast(),
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            );
            good(blas::cublasLtMatmulPreferenceSetAttribute(
                limits, attribute, value, 8,
            ));
            let [a, b, c] = layouts;
            good(blas::cublasLtMatmulAlgoGetHeuristic(
                handle, product, a, b, c, c, limits, 1, &mut found, &mut count,
            ));
        }
        assert_eq!(count, 1);
        Self {
            product,
            layouts,
            kernel: found.algo,
        }
    }
}

/// A kernel that was chosen for other sizes is refused at the call; operands and a workspace that are not there, when it runs.
#[test]
fn products_of_the_library_have_their_kernel_and_memory() {
    const SIZES: [u64; 3] = [8, 16, 32];
    let invalid = blas::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE;
    let kernels = [
        (SIZES, WORKSPACE, true),
        ([9, 16, 32], WORKSPACE, false),
        ([8, 24, 32], WORKSPACE, false),
        ([8, 16, 40], WORKSPACE, false),
        (SIZES, 16, false),
    ];
    // Elements of the operands that there are and are written, bytes of the workspace that there are.
    let memory = [
        ([16 * 32, 8 * 32], WORKSPACE, ""),
        ([16 * 32 - 1, 8 * 32], WORKSPACE, "out of bounds"),
        ([16 * 32, 8 * 32 - 1], WORKSPACE, "out of bounds"),
        ([16 * 32, 8 * 32], 1 << 10, "out of bounds"),
        ([16 * 32, 0], WORKSPACE, "nothing has written"),
    ];
    let all = kernels.map(|(sizes, bytes, taken)| (sizes, bytes, taken, memory[0]));
    let all = all
        .into_iter()
        .chain(memory.map(|memory| (SIZES, WORKSPACE, true, memory)));
    for (sizes, workspace_bytes, taken, ([a, b], there, expected)) in all {
        let Some(device) = Device::open() else { return };
        let ones = |count: usize| match count {
            0 => device.alloc(2 * 8 * 32),
            _ => device.upload(&vec![0x3f80u16; count]),
        };
        let (a, b, out, workspace) = (
            ones(a),
            ones(b),
            device.alloc(8 * 16 * 4),
            device.alloc(there),
        );
        let (mut handle, one, zero) = (null_mut(), 1f32, 0f32);
        // SAFETY: all outlive the calls; memory that is not there is found.
        let status = unsafe {
            good(blas::cublasLtCreate(&mut handle));
            let (plan, Plan { kernel, .. }) = (Plan::new(handle, SIZES), Plan::new(handle, sizes));
            let [of_a, of_b, of_out] = plan.layouts;
            blas::cublasLtMatmul(
                handle,
                plan.product,
                from_ref(&one).cast(),
                a as *const c_void,
                of_a,
                b as *const c_void,
                of_b,
                from_ref(&zero).cast(),
                out as *const c_void,
                of_out,
                out as *mut c_void,
                of_out,
                &kernel,
                workspace as *mut c_void,
                workspace_bytes,
                device.stream.cast(),
            )
        };
        if !taken {
            assert_eq!(status, invalid, "{sizes:?} {workspace_bytes}");
            continue;
        }
        // It may have run already.
        let found = device.finish();
        if expected.is_empty() {
            assert_eq!(
                (status, &*found),
                (blas::cublasStatus_t::CUBLAS_STATUS_SUCCESS, "")
            );
            assert_eq!(device.download(out, 8 * 16), [32.0; 8 * 16]);
        } else {
            let right = found.contains("a product of cuBLASLt: ") && found.contains(expected);
            assert!(right, "{expected}: {found}");
        }
    }
}
