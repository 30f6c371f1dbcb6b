//! [`BackendDispatch`]: the one place where a backend is chosen at run time.

#[cfg(feature = "cuda")]
use super::job::CudaForm;
#[cfg(feature = "gpu")]
use super::job::GpuForm;
use super::job::{CpuDequantized, CpuNative, DeviceJob, KvElement, ReferenceForm};
use super::kind::{Activations, BackendKind, KvDtype};
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
#[cfg(feature = "cuda")]
use ferrum_kernels::cuda::{CudaBf16, CudaF16, CudaOptions};
#[cfg(feature = "gpu")]
use ferrum_kernels::gpu::{GpuApi, GpuBackend};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, DeviceInfo, KvBf16, KvF32, KvFp8, KvFp16, KvInt8};
use ferrum_models::{MemoryPlan, Model, RunnerConfig, Stage, WeightPolicy, stage_memory_plan};
use ferrum_types::{Error, Result};
use std::path::Path;

/// Settings of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendOptions {
    /// Index among the devices of the backend.
    pub ordinal: usize,
    /// CPU threads; `None`: one for each physical core.
    pub threads: Option<usize>,
    /// Instructions of the CPU; `None`: the fastest that it has, for encoders with [`Isa::for_encoders`].
    pub isa: Option<Isa>,
    /// Whether a device that would not by itself gives a row the same bits whatever is computed beside it. It is slower for
    /// that; those that do so anyway (all but CUDA) take no notice.
    pub batch_invariant: bool,
    /// Element of activations, which CUDA has a choice of: other devices are refused with one. `None`: its default.
    pub activations: Option<Activations>,
}

/// An open device of whichever backend.
#[derive(Clone)]
pub enum BackendDispatch {
    /// Threads and SIMD.
    Cpu(CpuBackend),
    /// NVIDIA, with activations of bf16.
    #[cfg(feature = "cuda")]
    Cuda(CudaBf16),
    /// NVIDIA, with activations of f16.
    #[cfg(feature = "cuda")]
    CudaF16(CudaF16),
    /// Vulkan or Metal.
    #[cfg(feature = "gpu")]
    Gpu(GpuBackend),
    /// Plain loops.
    Reference(ReferenceBackend),
}

/// Runs `$body` with `$device` bound to the device inside a [`BackendDispatch`] and `$B` to its type.
macro_rules! with_device {
    ($dispatch:expr, $device:ident: $B:ident => $body:expr) => {
        match $dispatch {
            $crate::BackendDispatch::Cpu($device) => {
                type $B = ferrum_kernels::cpu::CpuBackend;
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::BackendDispatch::Cuda($device) => {
                type $B = ferrum_kernels::cuda::CudaBf16;
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::BackendDispatch::CudaF16($device) => {
                type $B = ferrum_kernels::cuda::CudaF16;
                $body
            }
            #[cfg(feature = "gpu")]
            $crate::BackendDispatch::Gpu($device) => {
                type $B = ferrum_kernels::gpu::GpuBackend;
                $body
            }
            $crate::BackendDispatch::Reference($device) => {
                type $B = ferrum_kernels::reference::ReferenceBackend;
                $body
            }
        }
    };
}
pub(crate) use with_device;

/// What a device has to do for a model.
#[derive(Clone, Copy, Debug, Default)]
struct Demands {
    /// Bytes of its weights.
    bytes: u64,
    /// Whether it has layers with experts.
    experts: bool,
    /// Whether weights are quantised.
    quantised: bool,
}

impl Demands {
    fn of(model: &Model) -> Self {
        Self {
            bytes: model.tensors().total_bytes(),
            experts: model.spec.experts().is_some(),
            quantised: !model.dequantized_types(WeightPolicy::floats()).is_empty(),
        }
    }

    /// Whether a GPU computes the model better than the CPU. Through wgpu there are no kernels for experts, and what is
    /// quantised would take its size in f32.
    fn suit_gpu(self, info: &DeviceInfo) -> bool {
        // Weights, and headroom for KV.
        let needed = self.bytes.saturating_add(self.bytes / 2);
        let fits = info.memory.is_none_or(|memory| memory.free >= needed);
        let native = !self.experts && !self.quantised || info.backend == BackendKind::Cuda.name();
        !info.software && fits && native
    }
}

impl BackendDispatch {
    /// Most tokens of a step: prompts come in chunks of it. Those of CUDA are larger, because its products of matrices were
    /// faster with more rows on an H200.
    pub(crate) fn step_tokens(&self) -> usize {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::CudaF16(_) => 2048,
            _ => 512,
        }
    }

    /// Opens a device; `Auto` takes the fastest.
    ///
    /// # Errors
    /// [`Error::NoDevice`] names what an explicit choice was missing.
    pub fn from_kind(kind: BackendKind, options: BackendOptions) -> Result<Self> {
        Self::open(kind, Demands::default(), options)
    }

    /// Opens a device for a model. `Auto` takes the fastest one that computes its weights as they are and has memory
    /// for 1.5 times as much (where that is known); a GPU that is only software does not count. An explicit choice is
    /// taken whatever the model.
    ///
    /// # Errors
    /// [`Error::NoDevice`] names what an explicit choice was missing.
    pub fn for_model(kind: BackendKind, model: &Model, options: BackendOptions) -> Result<Self> {
        let demands = match kind {
            BackendKind::Auto => Demands::of(model),
            _ => Demands::default(),
        };
        Self::open(kind, demands, options)
    }

    fn open(kind: BackendKind, demands: Demands, options: BackendOptions) -> Result<Self> {
        let ordinal = options.ordinal;
        if ordinal > 0 && matches!(kind, BackendKind::Auto | BackendKind::Cpu) {
            let hint = match kind {
                BackendKind::Auto => "name the backend too, such as --backend vulkan",
                _ => "leave out --device",
            };
            return Err(Error::NoDevice {
                backend: kind.name(),
                reason: format!("device number {ordinal} does not exist"),
                hint: hint.into(),
            });
        }
        let opened = match kind {
            BackendKind::Auto => {
                let suits = |info: &DeviceInfo| demands.suit_gpu(info);
                match may_have_gpu() {
                    true => Self::best_gpu(suits, options).map_or_else(|| Self::cpu(options), Ok),
                    false => Self::cpu(options),
                }
            }
            BackendKind::Cpu => Self::cpu(options),
            BackendKind::Cuda => Self::cuda(ordinal, options),
            BackendKind::Gpu | BackendKind::Metal | BackendKind::Vulkan => Self::gpu(kind, ordinal),
            BackendKind::Reference => ReferenceBackend::open(ordinal).map(Self::Reference),
        };
        opened?.with_activations(options.activations)
    }

    /// This device, unless it has no choice of activations and one was made.
    fn with_activations(self, activations: Option<Activations>) -> Result<Self> {
        let backend = self.info().backend;
        match activations {
            Some(activations) if backend != BackendKind::Cuda.name() => {
                Err(no_activations(activations, backend))
            }
            _ => Ok(self),
        }
    }

    /// The GPU that `kind` names, whatever the model; of any kind for `Auto`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] says what was missing.
    pub(crate) fn any_gpu(kind: BackendKind, options: BackendOptions) -> Result<Self> {
        if kind != BackendKind::Auto {
            return Self::from_kind(kind, options);
        }
        let suits = |info: &DeviceInfo| !info.software;
        let found = match may_have_gpu() {
            true => Self::best_gpu(suits, options),
            false => None,
        };
        let found = found.ok_or_else(|| Error::NoDevice {
            backend: BackendKind::Gpu.name(),
            reason: "this machine has none that is more than software".into(),
            hint: "leave out --gpu-layers, or name one of `ferrum devices` with --backend".into(),
        });
        found?.with_activations(options.activations)
    }

    /// The first GPU that suits and opens; those of NVIDIA through their own driver.
    fn best_gpu(suits: impl Fn(&DeviceInfo) -> bool, options: BackendOptions) -> Option<Self> {
        let nvidia = cuda_devices().into_iter().find(&suits);
        let nvidia = nvidia.and_then(|info| Self::cuda(info.ordinal, options).ok());
        nvidia.or_else(|| {
            let other = gpu_devices().into_iter().find(suits)?;
            Self::gpu(BackendKind::Gpu, other.ordinal).ok()
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda(ordinal: usize, options: BackendOptions) -> Result<Self> {
        let BackendOptions {
            batch_invariant,
            activations,
            ..
        } = options;
        let options = CudaOptions { batch_invariant };
        match activations.unwrap_or_default() {
            Activations::Bf16 => CudaBf16::open_with(ordinal, options).map(Self::Cuda),
            Activations::F16 => CudaF16::open_with(ordinal, options).map(Self::CudaF16),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: usize, _: BackendOptions) -> Result<Self> {
        Err(not_compiled(BackendKind::Cuda, "cuda"))
    }

    /// A GPU through wgpu, by the interface that `kind` names.
    #[cfg(feature = "gpu")]
    fn gpu(kind: BackendKind, ordinal: usize) -> Result<Self> {
        let opened = match kind {
            BackendKind::Metal => GpuBackend::open_kind(GpuApi::Metal, ordinal),
            BackendKind::Vulkan => GpuBackend::open_kind(GpuApi::Vulkan, ordinal),
            _ => GpuBackend::open(ordinal),
        };
        opened.map(Self::Gpu)
    }

    #[cfg(not(feature = "gpu"))]
    fn gpu(kind: BackendKind, _: usize) -> Result<Self> {
        Err(not_compiled(kind, "gpu"))
    }

    fn cpu(options: BackendOptions) -> Result<Self> {
        let config = CpuConfig {
            threads: options.threads,
            isa: options.isa,
        };
        CpuBackend::with_config(config).map(Self::Cpu)
    }

    /// What this device is.
    pub fn info(&self) -> DeviceInfo {
        with_device!(self, device: B => B::info(device))
    }

    /// This device as it is for encoders, see [`Backend::for_encoders`].
    pub(crate) fn for_encoders(&self) -> Self {
        match self {
            Self::Cpu(device) => Self::Cpu(device.for_encoders().unwrap_or_else(|| device.clone())),
            others => others.clone(),
        }
    }

    /// Whether this device computes a model's products with activations of fewer bits than f32, so that layers differ
    /// from those of a device that keeps all.
    pub fn rounds_activations(&self, model: &Model) -> bool {
        match self {
            Self::Cpu(device) => device.isa().rounds_bf16() && model.has_bf16(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::CudaF16(_) => true,
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => false,
            Self::Reference(_) => false,
        }
    }

    /// What of a model's weights this device keeps as they are. [`load`](Self::load) loads them so.
    pub fn weight_policy(&self, model: &Model) -> WeightPolicy {
        match self {
            Self::Cpu(_) if model.keeps_blocks() => WeightPolicy::of::<CpuBackend, CpuNative>(),
            Self::Cpu(_) => WeightPolicy::of::<CpuBackend, CpuDequantized>(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => WeightPolicy::of::<CudaBf16, CudaForm>(),
            #[cfg(feature = "cuda")]
            Self::CudaF16(_) => WeightPolicy::of::<CudaF16, CudaForm>(),
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => WeightPolicy::of::<GpuBackend, GpuForm>(),
            Self::Reference(_) => WeightPolicy::of::<ReferenceBackend, ReferenceForm>(),
        }
    }

    /// Quantised weights of a model that are dequantised to floats when it is loaded onto this device.
    pub fn dequantized_types(&self, model: &Model) -> Vec<String> {
        model.dequantized_types(self.weight_policy(model))
    }

    /// The memory that a run of a model on this device takes, with a cache of `kv`.
    pub fn memory_plan(&self, model: &Model, config: &RunnerConfig, kv: KvDtype) -> MemoryPlan {
        self.stage_plan(model, config, (kv, &Stage::whole(&model.spec)))
    }

    /// The memory that a stage of a model takes on this device.
    pub(crate) fn stage_plan(
        &self,
        model: &Model,
        config: &RunnerConfig,
        (kv, stage): (KvDtype, &Stage),
    ) -> MemoryPlan {
        let policy = self.weight_policy(model);
        let plan = match kv {
            KvDtype::F32 => stage_memory_plan::<KvF32>(model, policy, config, stage),
            KvDtype::F16 => stage_memory_plan::<KvFp16>(model, policy, config, stage),
            KvDtype::Bf16 => stage_memory_plan::<KvBf16>(model, policy, config, stage),
            KvDtype::Fp8 => stage_memory_plan::<KvFp8>(model, policy, config, stage),
            KvDtype::Int8 => stage_memory_plan::<KvInt8>(model, policy, config, stage),
        };
        plan.with_workspace(self.workspace_bytes(1))
    }

    /// Bytes that this device takes for itself as one of so many ranks: [`Backend::workspace_bytes`].
    pub(crate) fn workspace_bytes(&self, ranks: usize) -> u64 {
        with_device!(self, device: B => B::workspace_bytes(device, ranks))
    }

    /// Does a job on this device with a KV cache of element `K`, and its form of the model's weights; the CPU `keeps` blocks
    /// of quantised weights or dequantises them.
    ///
    /// # Errors
    /// Those of the job; [`Error::Unsupported`] when this backend has no such cache.
    pub(crate) fn with_kv<K: KvElement, J: DeviceJob<K>>(
        &self,
        keeps: bool,
        job: J,
    ) -> Result<J::Output> {
        match self {
            Self::Cpu(device) => K::on_cpu(device, keeps, job),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => K::on_cuda(device, job),
            #[cfg(feature = "cuda")]
            Self::CudaF16(device) => K::on_cuda(device, job),
            #[cfg(feature = "gpu")]
            Self::Gpu(device) => K::on_gpu(device, job),
            Self::Reference(device) => K::on_reference(device, job),
        }
    }
}

/// Whether this machine may have a GPU that is worth asking its drivers for.
///
/// Asking loads every driver, and keeps the software ones (40 MB with their compiler). On Linux a
/// GPU of any vendor has a device node; elsewhere only the drivers know.
fn may_have_gpu() -> bool {
    const NODES: [&str; 6] = [
        "/dev/dri",
        "/dev/nvidiactl",
        "/dev/nvgpu",    // NVIDIA Tegra
        "/dev/dxg",      // Windows Subsystem for Linux
        "/dev/kgsl-3d0", // Qualcomm Adreno
        "/dev/mali0",    // Arm Mali
    ];
    !cfg!(target_os = "linux") || NODES.iter().any(|node| Path::new(node).exists())
}

/// The error for activations of a backend that has one element for them.
pub(super) fn no_activations(activations: Activations, backend: &str) -> Error {
    let reason = format!(
        "found --activations {activations} with the backend {backend}, which has no choice of them\nhint: it is for --backend cuda"
    );
    Error::invalid("activations", reason)
}

/// The error for a backend that this program does not have.
#[cfg(not(all(feature = "cuda", feature = "gpu")))]
fn not_compiled(kind: BackendKind, feature: &str) -> Error {
    Error::NoDevice {
        backend: kind.name(),
        reason: "this program was built without it".into(),
        hint: format!("build it with the feature {feature}, or use --backend cpu"),
    }
}

/// NVIDIA's devices.
pub(crate) fn cuda_devices() -> Vec<DeviceInfo> {
    #[cfg(feature = "cuda")]
    return CudaBf16::devices();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

/// The devices of wgpu.
fn gpu_devices() -> Vec<DeviceInfo> {
    #[cfg(feature = "gpu")]
    return GpuBackend::devices();
    #[cfg(not(feature = "gpu"))]
    Vec::new()
}

/// The devices of every backend, fastest first.
pub fn list_devices() -> Vec<DeviceInfo> {
    let mut all = cuda_devices();
    all.extend(gpu_devices());
    all.sort_by_key(|info| info.software);
    let hardware = all.iter().take_while(|info| !info.software).count();
    let slow = all.split_off(hardware);
    all.extend(CpuBackend::devices());
    all.extend(slow);
    all.extend(ReferenceBackend::devices());
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_kernels::DeviceMemory;

    #[test]
    fn a_backend_is_named_as_it_is_chosen() {
        for (name, kind) in [
            (CpuBackend::NAME, BackendKind::Cpu),
            (CudaBf16::NAME, BackendKind::Cuda),
            (GpuBackend::NAME, BackendKind::Gpu),
            (ReferenceBackend::NAME, BackendKind::Reference),
        ] {
            assert_eq!(name.parse(), Ok(kind));
            assert_eq!(kind.name(), name);
        }
    }

    #[test]
    fn a_gpu_gets_what_it_computes_as_it_is() {
        // What others have taken of the memory cannot be had.
        let memory = |free: Option<u64>| {
            free.map(|free| DeviceMemory {
                free,
                total: 3 << 30,
            })
        };
        let info = |software, free| DeviceInfo {
            software,
            memory: memory(free),
            ..ReferenceBackend::open(0).unwrap().info()
        };
        let plain = Demands {
            bytes: 1 << 30,
            ..Demands::default()
        };
        let experts = Demands {
            experts: true,
            ..plain
        };
        let quantised = Demands {
            quantised: true,
            ..plain
        };
        for (demands, software, memory, suits) in [
            (plain, false, None, true),
            (plain, false, Some(3 << 29), true),
            (plain, false, Some((3 << 29) - 1), false),
            (plain, true, None, false),
            (experts, false, None, false),
            (quantised, false, None, false),
            (Demands::default(), false, None, true),
        ] {
            let found = demands.suit_gpu(&info(software, memory));
            assert_eq!(found, suits, "{demands:?} {software} {memory:?}");
        }
        // CUDA has kernels for blocks and experts.
        let cuda = DeviceInfo {
            backend: CudaBf16::NAME,
            ..info(false, None)
        };
        assert!(quantised.suit_gpu(&cuda) && experts.suit_gpu(&cuda));
    }
}
