//! A device of the emulator with the kernels of `kernels.cu`.
#![allow(dead_code, reason = "each test binary uses a part")]

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;
use ferrum_test_support::skip;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard};

/// What the order of warps is drawn from, and errors name.
pub(crate) const SEED: &str = "CUDA_EMULATOR_SEED";

/// One device, one error at a time.
static ALONE: Mutex<()> = Mutex::new(());

pub(crate) struct Device {
    pub(crate) module: sys::CUmodule,
    pub(crate) stream: sys::CUstream,
    _alone: MutexGuard<'static, ()>,
}

/// Panics unless a call of the driver gives success.
pub(crate) fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "{}", words(code));
}

pub(crate) fn words(code: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the emulator gives a text that ends with zero.
    unsafe {
        sys::cuGetErrorString(code, &mut text);
        std::ffi::CStr::from_ptr(text)
            .to_string_lossy()
            .into_owned()
    }
}

/// The machine code of `kernels.cu`.
pub(crate) fn compiled() -> Vec<u8> {
    let (source, name) = (include_str!("../kernels.cu"), "kernels.cu");
    let [source, name, header, text] =
        [source, name, "intrinsics.cuh", "#error replaced"].map(|t| CString::new(t).unwrap());
    let mut program = null_mut();
    // SAFETY: texts end with zero; sizes are those that are asked for.
    unsafe {
        nvrtc::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            1,
            &text.as_ptr(),
            &header.as_ptr(),
        );
        let done = nvrtc::nvrtcCompileProgram(program, 0, std::ptr::null());
        let mut size = 0;
        nvrtc::nvrtcGetProgramLogSize(program, &mut size);
        let mut log = vec![0u8; size];
        nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        let log = String::from_utf8_lossy(&log);
        assert_eq!(done, nvrtc::nvrtcResult::NVRTC_SUCCESS, "{log}");
        nvrtc::nvrtcGetCUBINSize(program, &mut size);
        let mut cubin = vec![0u8; size];
        nvrtc::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast());
        nvrtc::nvrtcDestroyProgram(&mut program);
        cubin
    }
}

impl Device {
    /// `None`, said aloud, where the emulator cannot be built.
    pub(crate) fn open() -> Option<Self> {
        let alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        if let Err(reason) = ferrum_cuda_emulator::load() {
            skip(reason);
            return None;
        }
        ferrum_cuda_emulator::clear_error();
        ferrum_cuda_emulator::run_blocks_together(true);
        let cubin = compiled();
        let (mut context, mut module, mut stream) = (null_mut(), null_mut(), null_mut());
        // SAFETY: all outlive the calls.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
            ok(sys::cuCtxSetCurrent(context));
            ok(sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()));
            ok(sys::cuStreamCreate(&mut stream, 1));
        }
        Some(Self {
            module,
            stream,
            _alone: alone,
        })
    }

    pub(crate) fn alloc(&self, bytes: usize) -> u64 {
        let mut at = 0;
        // SAFETY: `at` outlives the call.
        ok(unsafe { sys::cuMemAlloc_v2(&mut at, bytes) });
        at
    }

    pub(crate) fn upload<T: Copy>(&self, data: &[T]) -> u64 {
        let at = self.alloc(size_of_val(data));
        let from = data.as_ptr().cast();
        // SAFETY: pageable memory is copied before the call returns.
        ok(unsafe { sys::cuMemcpyHtoDAsync_v2(at, from, size_of_val(data), self.stream) });
        at
    }

    pub(crate) fn download(&self, at: u64, len: usize) -> Vec<f32> {
        let mut out = vec![0f32; len];
        let to = out.as_mut_ptr().cast();
        // SAFETY: `out` has the bytes, and a copy to pageable memory ends before the call returns.
        ok(unsafe { sys::cuMemcpyDtoHAsync_v2(to, at, len * 4, self.stream) });
        out
    }

    /// Launches a kernel and gives what went wrong.
    pub(crate) fn run(
        &self,
        name: &str,
        blocks: u32,
        threads: u32,
        shared: u32,
        args: &mut [u64],
    ) -> String {
        self.launch(name, [blocks, threads, shared], false, args);
        self.finish()
    }

    pub(crate) fn function(&self, name: &str) -> sys::CUfunction {
        let name = CString::new(name).unwrap();
        let mut function = null_mut();
        // SAFETY: all outlive the call.
        ok(unsafe { sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()) });
        function
    }

    /// Launches blocks of threads with so much shared memory, perhaps as a kernel that may be started early.
    pub(crate) fn launch(&self, name: &str, grid: [u32; 3], early: bool, args: &mut [u64]) {
        let function = self.function(name);
        let mut places: Vec<_> = args
            .iter_mut()
            .map(|arg| std::ptr::from_mut(arg).cast::<c_void>())
            .collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: grid[1],
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid[2],
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        // SAFETY: the kernel has as many parameters; those that do wrong do it in the emulator, which finds it. What is wrong
        // may be found here already, and is the answer to the next call, too.
        unsafe {
            sys::cuLaunchKernelEx(&config, function, places.as_mut_ptr(), null_mut());
        }
    }

    /// Waits for all work, and gives what went wrong.
    pub(crate) fn finish(&self) -> String {
        // SAFETY: the stream is held.
        match unsafe { sys::cuStreamSynchronize(self.stream) } {
            sys::CUresult::CUDA_SUCCESS => String::new(),
            code => words(code),
        }
    }

    /// Captures what `work` launches.
    pub(crate) fn capture(&self, work: impl FnOnce()) -> sys::CUgraphExec {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: all outlive the calls.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            ok(sys::cuStreamBeginCapture_v2(self.stream, mode));
            work();
            ok(sys::cuStreamEndCapture(self.stream, &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        }
        exec
    }
}

pub(crate) fn float(x: f32) -> u64 {
    u64::from(x.to_bits())
}
