//! Devices: finding them, opening one, and what its handles share.

use super::blas::Blas;
use super::compiler::{KernelFile, Modules};
use super::driver::{Driver, Function, count};
use super::error::no_device;
use super::role::CudaAct;
use super::staging::StagingPool;
use super::stream::Stream;
use super::sync::lock;
use super::{BACKEND, CudaOptions};
use crate::backend::{DeviceInfo, DeviceMemory};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use ferrum_types::{Result, SrcDtype};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// What the handles, buffers and contexts of one open device share.
pub(super) struct Shared {
    pub(super) driver: Arc<Driver>,
    pub(super) options: CudaOptions,
    /// The weights that products take as they are.
    weight: SrcDtype,
    info: DeviceInfo,
    /// Major and minor.
    pub(super) capability: (i32, i32),
    /// Streaming multiprocessors, for kernels that split work so that all have some.
    pub(super) multiprocessors: usize,
    /// Bytes of shared memory that a block may ask for.
    pub(super) max_shared: usize,
    /// Bytes of shared memory of all blocks of a multiprocessor.
    pub(super) processor_shared: usize,
    /// Bytes of the second cache, which all multiprocessors share.
    pub(super) second_cache: usize,
    /// Whether a kernel may be started while the one before it runs.
    pub(super) programmatic_launch: bool,
    functions: Mutex<HashMap<&'static str, Function>>,
    modules: Modules,
    /// Memory of the host between it and the device.
    pub(super) slots: Arc<Mutex<StagingPool>>,
    /// Opened by the first product that is large enough for it.
    blas: OnceLock<Option<Blas>>,
    /// For what happens outside of contexts: zeros of new buffers.
    idle: Mutex<Stream>,
}

impl Shared {
    pub(super) fn info(&self) -> DeviceInfo {
        let memory = self.driver.memory();
        DeviceInfo {
            memory: memory.map(|(free, total)| DeviceMemory { free, total }),
            ..self.info.clone()
        }
    }

    /// A kernel by its file and name, which no other kernel has. Its file is waited for, and loaded if nobody has begun to.
    pub(super) fn function(&self, (file, name): (KernelFile, &'static str)) -> Result<Function> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let function = self.modules.function(file, name)?;
        functions.insert(name, function);
        Ok(function)
    }

    /// The compiler's version.
    pub(super) fn nvrtc(&self) -> (i32, i32) {
        self.modules.nvrtc()
    }

    /// Begins to load files of which kernels will be asked for.
    pub(super) fn prepare(&self, files: &[KernelFile]) {
        self.modules.prepare(files);
    }

    /// NVIDIA's products of matrices, where there are any and a row's bits may depend on its batch.
    pub(super) fn blas(&self) -> Option<&Blas> {
        match self.options.batch_invariant {
            true => None,
            false => self
                .blas
                .get_or_init(|| Blas::open(&self.driver, self.weight))
                .as_ref(),
        }
    }

    /// Makes memory zeros, and waits for it.
    pub(super) fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = lock(&self.idle);
        stream.zero("alloc", at, bytes)?;
        stream.wait("alloc")
    }
}

fn describe(driver: &Driver, ordinal: usize) -> (DeviceInfo, (i32, i32)) {
    let capability = (
        driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    );
    let (major, minor) = Driver::version();
    let info = DeviceInfo {
        backend: BACKEND,
        ordinal,
        name: driver.name(),
        detail: format!(
            "compute capability {}.{}, driver for CUDA {major}.{minor}",
            capability.0, capability.1
        ),
        // What has no clock is none of NVIDIA's.
        software: driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE) == 0,
        memory: driver
            .memory()
            .map(|(free, total)| DeviceMemory { free, total }),
    };
    (info, capability)
}

/// The devices, without compiling anything for them.
pub(super) fn devices() -> Vec<DeviceInfo> {
    let found = count().unwrap_or(0);
    let described = (0..found).filter_map(|ordinal| {
        let driver = Driver::open(ordinal).ok()?;
        Some(describe(&driver, ordinal).0)
    });
    described.collect()
}

/// Opens a device for activations of `A`.
pub(super) fn open<A: CudaAct>(ordinal: usize, options: CudaOptions) -> Result<Shared> {
    let driver = Arc::new(Driver::open(ordinal)?);
    let (info, capability) = describe(&driver, ordinal);
    if capability < (8, 0) {
        return Err(no_device(
            format!(
                "{} has compute capability {}.{}, the kernels need 8.0",
                info.name, capability.0, capability.1
            ),
            "use --backend vulkan or --backend cpu",
        ));
    }
    let count_of = |attribute| usize::try_from(driver.attribute(attribute)).unwrap_or(0);
    let asked = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    // Kernels have up to 1 KiB of their own beside what they ask for.
    let max_shared = count_of(asked).saturating_sub(1 << 10).max(32 << 10);
    let multiprocessors = count_of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).max(1);
    Ok(Shared {
        options,
        weight: A::WEIGHT,
        info,
        capability,
        multiprocessors,
        max_shared,
        processor_shared: count_of(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        ),
        second_cache: count_of(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        // Graphs keep such launches from CUDA 12.3 on.
        programmatic_launch: capability >= (9, 0) && Driver::version() >= (12, 3),
        functions: Mutex::default(),
        slots: Arc::default(),
        modules: Modules::open(&driver, capability, A::DEFINES)?,
        blas: OnceLock::new(),
        idle: Mutex::new(Stream::new(&driver)?),
        driver,
    })
}
