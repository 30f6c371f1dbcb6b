//! Devices: finding adapters, opening one, and what its handles share.

use super::pipeline::Pipelines;
use crate::backend::{Backend, DeviceInfo};
use ferrum_types::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::GpuBackend;

/// The graphics API that reaches a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuApi {
    /// Vulkan: Linux, Windows, Android.
    Vulkan,
    /// Metal: Apple devices.
    Metal,
}

impl GpuApi {
    /// Name as in `--backend`.
    pub const fn name(self) -> &'static str {
        match self {
            GpuApi::Vulkan => "vulkan",
            GpuApi::Metal => "metal",
        }
    }

    const fn of(backend: wgpu::Backend) -> Option<Self> {
        match backend {
            wgpu::Backend::Vulkan => Some(GpuApi::Vulkan),
            wgpu::Backend::Metal => Some(GpuApi::Metal),
            _ => None,
        }
    }

    const fn backends(api: Option<Self>) -> wgpu::Backends {
        match api {
            Some(GpuApi::Vulkan) => wgpu::Backends::VULKAN,
            Some(GpuApi::Metal) => wgpu::Backends::METAL,
            None => wgpu::Backends::VULKAN.union(wgpu::Backends::METAL),
        }
    }
}

/// Which device to open, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuConfig {
    /// The API to use; `None` takes devices of any.
    pub api: Option<GpuApi>,
    /// Index among the devices of that API: real GPUs first, software devices last.
    pub ordinal: usize,
    /// Bytes that a shader may see of one buffer, where that should be less than the device's own
    /// limit. A weight larger than this is kept in several buffers.
    pub max_binding_bytes: Option<u64>,
}

/// What the handles, buffers and contexts of one open device share.
///
/// Everything that lives on the device holds an [`Arc`] of this, so the device outlives them in
/// whatever order they are dropped.
pub(super) struct Shared {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) info: DeviceInfo,
    /// Bytes that one binding may cover, a multiple of 16.
    pub(super) max_binding: u64,
    pub(super) max_buffer: u64,
    /// Workgroups in one dimension of a grid.
    pub(super) max_groups: u32,
    /// Alignment of dynamic offsets into uniform buffers.
    pub(super) uniform_align: u32,
    /// Whether timestamps can be written between passes.
    pub(super) timestamps: bool,
    pub(super) pipelines: Mutex<Pipelines>,
    /// What shaders bind in place of an absent optional argument.
    pub(super) nothing: wgpu::Buffer,
    faults: Arc<Mutex<Faults>>,
}

/// Errors that the device reported outside of a call that could return them.
#[derive(Default)]
struct Faults {
    /// The first since the last look.
    first: Option<String>,
    /// Set for good once the device is gone.
    lost: Option<String>,
}

/// A poisoned lock only means that another thread panicked between two map operations; the data
/// behind every lock of this backend is valid at each of those points.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The first error that the device reported since the last call.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let mut faults = lock(&self.faults);
        let first = faults.first.take();
        let Some(reason) = faults.lost.clone().or(first) else {
            return Ok(());
        };
        drop(faults);
        Err(self.failure(op, reason))
    }

    /// [`Error::Device`] in the name of this device.
    pub(super) fn failure(&self, op: &'static str, reason: impl Into<String>) -> Error {
        Error::Device {
            backend: self.info.backend,
            op,
            reason: reason.into(),
        }
    }

    /// Waits until a submission is done and runs the callbacks of finished work. What other contexts
    /// have submitted since does not matter.
    pub(super) fn wait(&self, op: &'static str, until: wgpu::SubmissionIndex) -> Result<()> {
        // A device that is lost while it is polled makes wgpu panic, with no other way to hear of
        // it; the state behind the panic is wgpu's own, and no device is used again after it.
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            self.device.poll(wgpu::PollType::Wait {
                submission_index: Some(until),
                timeout: None,
            })
        }));
        match polled {
            Ok(Ok(_)) => self.check(op),
            // A submission that failed has no number to wait for; its own error says more.
            Ok(Err(e)) => self.check(op).and(Err(self.failure(op, e.to_string()))),
            Err(_) => {
                let reason = "the device was lost while waiting for it".to_owned();
                lock(&self.faults).lost.get_or_insert(reason.clone());
                Err(self.failure(op, reason))
            }
        }
    }
}

/// Adapters that can compute, best first, with the index that each has among its API's.
fn adapters(instance: &wgpu::Instance, api: Option<GpuApi>) -> Vec<(wgpu::Adapter, GpuApi)> {
    let found = pollster::block_on(instance.enumerate_adapters(GpuApi::backends(api)));
    let mut found: Vec<_> = found
        .into_iter()
        .filter(|a| {
            let flags = a.get_downlevel_capabilities().flags;
            flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS)
        })
        .filter_map(|a| {
            let api = GpuApi::of(a.get_info().backend)?;
            Some((a, api))
        })
        .collect();
    found.sort_by_key(|(a, _)| match a.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    });
    found
}

fn instance(backends: wgpu::Backends) -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    // Debug builds would otherwise ask for the validation layers, and print when they are missing.
    descriptor.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(descriptor)
}

fn describe(adapter: &wgpu::Adapter, api: GpuApi, ordinal: usize) -> DeviceInfo {
    let info = adapter.get_info();
    let kind = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Other => "other",
        wgpu::DeviceType::Cpu => "software device",
    };
    let driver = [info.driver.as_str(), info.driver_info.as_str()].join(" ");
    let detail = match driver.trim() {
        "" => kind.to_owned(),
        driver => format!("{kind}, {driver}"),
    };
    DeviceInfo {
        backend: api.name(),
        ordinal,
        name: info.name,
        detail,
        software: info.device_type == wgpu::DeviceType::Cpu,
        // wgpu does not tell, and a guess would make `auto` refuse or accept models wrongly.
        memory: None,
    }
}

/// The devices of `api` (or of any), in the order of their ordinals.
pub(super) fn devices(api: Option<GpuApi>) -> Vec<DeviceInfo> {
    let found = adapters(&instance(GpuApi::backends(api)), api);
    let described = found.iter().enumerate();
    described
        .map(|(i, (a, api))| describe(a, *api, i))
        .collect()
}

fn no_device(config: &GpuConfig, found: usize) -> Error {
    let backend = config.api.map_or(GpuBackend::NAME, GpuApi::name);
    let (missing, hint) = match config.api {
        Some(GpuApi::Metal) => (
            "Metal was not found on this machine",
            "Metal is part of macOS; use --backend vulkan or cpu elsewhere",
        ),
        Some(GpuApi::Vulkan) => (
            "no Vulkan loader, or no driver that it knows of",
            "install the Vulkan driver of your GPU (mesa-vulkan-drivers for software Vulkan) or use --backend cpu",
        ),
        None => (
            "neither a Vulkan driver nor Metal was found",
            "install the Vulkan driver of your GPU (mesa-vulkan-drivers for software Vulkan) or use --backend cpu",
        ),
    };
    let reason = match found {
        0 => missing.to_owned(),
        n => format!(
            "ordinal {} asked for, {n} device{} found",
            config.ordinal,
            if n == 1 { "" } else { "s" }
        ),
    };
    Error::NoDevice {
        backend,
        reason,
        hint: match found {
            0 => hint.to_owned(),
            _ => "`ferrum devices` lists what there is".to_owned(),
        },
    }
}

pub(super) fn open(config: &GpuConfig) -> Result<Shared> {
    open_on(&instance(GpuApi::backends(config.api)), config)
}

fn open_on(instance: &wgpu::Instance, config: &GpuConfig) -> Result<Shared> {
    let mut found = adapters(instance, config.api);
    if config.ordinal >= found.len() {
        return Err(no_device(config, found.len()));
    }
    let (adapter, api) = found.swap_remove(config.ordinal);
    let info = describe(&adapter, api, config.ordinal);

    let timing =
        wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);
    let timestamps = adapter.features().contains(timing);
    let limits = adapter.limits();
    check_limits(&info, &limits)?;
    let flags = adapter.get_downlevel_capabilities().flags;
    if !flags.contains(wgpu::DownlevelFlags::SHADER_F16_IN_F32) {
        return Err(Error::NoDevice {
            backend: info.backend,
            reason: format!("the driver of {} cannot unpack f16", info.name),
            hint: "use --backend cpu".to_owned(),
        });
    }
    let request = adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("ferrum"),
        required_features: match timestamps {
            true => timing,
            false => wgpu::Features::empty(),
        },
        required_limits: limits.clone(),
        ..Default::default()
    });
    let (device, queue) = pollster::block_on(request).map_err(|e| Error::NoDevice {
        backend: info.backend,
        reason: format!("{} could not be opened: {e}", info.name),
        hint: String::new(),
    })?;

    let faults = Arc::new(Mutex::new(Faults::default()));
    listen(&device, &faults);
    let nothing = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("absent argument"),
        size: 16,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let max_binding = limits
        .max_storage_buffer_binding_size
        .min(config.max_binding_bytes.unwrap_or(u64::MAX))
        .max(16);
    Ok(Shared {
        pipelines: Mutex::new(Pipelines::new(&device)),
        max_binding: max_binding / 16 * 16,
        max_buffer: limits.max_buffer_size,
        max_groups: limits.max_compute_workgroups_per_dimension,
        uniform_align: limits.min_uniform_buffer_offset_alignment,
        timestamps,
        nothing,
        faults,
        info,
        device,
        queue,
    })
}

/// Keeps what the device reports, instead of wgpu's default of a panic.
fn listen(device: &wgpu::Device, faults: &Arc<Mutex<Faults>>) {
    let of_errors = Arc::clone(faults);
    device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
        lock(&of_errors)
            .first
            .get_or_insert_with(|| one_line(&e.to_string()));
    }));
    // Not the faults themselves: the callback lives in the device, which may outlive them.
    let of_loss = Arc::downgrade(faults);
    device.set_device_lost_callback(move |reason, message| {
        if let Some(faults) = of_loss.upgrade() {
            let text = format!("the device was lost ({reason:?}): {}", one_line(&message));
            lock(&faults).lost.get_or_insert(text);
        }
    });
}

/// wgpu's messages are indented over several lines; an error is one sentence.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|l| !l.is_empty());
    lines
        .map(|l| l.trim_end_matches(':'))
        .collect::<Vec<_>>()
        .join(": ")
}

/// The least that the shaders need; WebGPU promises all of it, some old drivers do not.
fn check_limits(info: &DeviceInfo, limits: &wgpu::Limits) -> Result<()> {
    let needs = [
        (
            "storage buffers",
            limits.max_storage_buffers_per_shader_stage,
            8,
        ),
        (
            "lanes in a workgroup",
            limits.max_compute_invocations_per_workgroup,
            256,
        ),
        (
            "lanes in one dimension",
            limits.max_compute_workgroup_size_x,
            256,
        ),
        (
            "bytes of workgroup memory",
            limits.max_compute_workgroup_storage_size,
            16 << 10,
        ),
    ];
    for (what, found, needed) in needs {
        if found < needed {
            return Err(Error::NoDevice {
                backend: info.backend,
                reason: format!(
                    "{} has {found} {what}, the shaders need {needed}",
                    info.name
                ),
                hint: "use --backend cpu".to_owned(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_adapter_is_an_error_with_a_hint() {
        let none = instance(wgpu::Backends::empty());
        for api in [None, Some(GpuApi::Vulkan), Some(GpuApi::Metal)] {
            let config = GpuConfig {
                api,
                ..GpuConfig::default()
            };
            match open_on(&none, &config).map(|_| ()) {
                Err(Error::NoDevice { backend, hint, .. }) => {
                    assert_eq!(backend, api.map_or("gpu", GpuApi::name));
                    assert!(!hint.is_empty());
                }
                other => panic!("expected NoDevice, found {other:?}"),
            }
        }
    }

    #[test]
    fn an_ordinal_too_high_says_how_many_there_are() {
        let config = GpuConfig {
            ordinal: 1000,
            ..GpuConfig::default()
        };
        let text = open(&config)
            .map(|_| ())
            .expect_err("no such ordinal")
            .to_string();
        let found = devices(None).len();
        assert!(
            found == 0 || text.contains("ordinal 1000 asked for"),
            "{text}"
        );
    }

    #[test]
    fn messages_become_one_line() {
        let text = "Validation Error\n\nCaused by:\n  In a pass\n    too small\n";
        assert_eq!(
            one_line(text),
            "Validation Error: Caused by: In a pass: too small"
        );
    }
}
