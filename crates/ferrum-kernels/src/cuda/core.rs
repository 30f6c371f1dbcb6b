//! Devices: finding them, opening one, and what its handles share.

use super::CudaBackend;
use super::compiler::{self, In, SOURCES};
use super::driver::{Driver, Function, Module, Stream, count, failure};
use crate::backend::{Backend, DeviceInfo, DeviceMemory};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use ferrum_types::Result;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the handles, buffers and contexts of one open device share.
pub(super) struct Shared {
    pub(super) driver: Arc<Driver>,
    info: DeviceInfo,
    /// Bytes of shared memory that a block may ask for.
    pub(super) max_shared: usize,
    functions: Mutex<HashMap<&'static str, Function>>,
    modules: Vec<Module>,
    /// For what happens outside of contexts: zeros of new buffers.
    idle: Mutex<Stream>,
}

/// A poisoned lock only means that another thread panicked; what is behind these locks is valid at each point.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn info(&self) -> DeviceInfo {
        let memory = self.driver.memory();
        DeviceInfo {
            memory: memory.map(|(free, total)| DeviceMemory { free, total }),
            ..self.info.clone()
        }
    }

    /// A kernel by its file and name.
    pub(super) fn function(&self, (file, name): (In, &'static str)) -> Result<Function> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let module = self.modules.get(file as usize).ok_or_else(|| {
            failure(
                "load_kernels",
                format!("{} was not loaded", SOURCES[file as usize].name),
            )
        })?;
        let function = module.function(name, self.max_shared)?;
        functions.insert(name, function);
        Ok(function)
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
        backend: CudaBackend::NAME,
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

pub(super) fn open(ordinal: usize) -> Result<Shared> {
    let driver = Arc::new(Driver::open(ordinal)?);
    let (info, capability) = describe(&driver, ordinal);
    if capability < (8, 0) {
        return Err(super::driver::no_device(
            format!(
                "{} has compute capability {}.{}, the kernels need 8.0",
                info.name, capability.0, capability.1
            ),
            "use --backend vulkan or --backend cpu",
        ));
    }
    let asked = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    // Kernels have up to 1 KiB of their own beside what they ask for.
    let max_shared = usize::try_from(driver.attribute(asked)).unwrap_or(0);
    Ok(Shared {
        info,
        max_shared: max_shared.saturating_sub(1 << 10).max(32 << 10),
        functions: Mutex::default(),
        modules: compiler::load_all(&driver, capability)?,
        idle: Mutex::new(Stream::new(&driver)?),
        driver,
    })
}
