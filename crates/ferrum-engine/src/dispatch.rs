//! The one place where a backend is chosen at run time.

use crate::{Placement, Session};
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
#[cfg(feature = "cuda")]
use ferrum_kernels::cuda::{CudaBf16, CudaOptions};
#[cfg(feature = "gpu")]
use ferrum_kernels::gpu::{GpuApi, GpuBackend};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{
    Backend, BackendKvDtype, DeviceInfo, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8,
    LlmBackend,
};
use ferrum_models::{
    Expanded, LoadProgress, MemoryPlan, Model, Moe, Native, RunnerConfig, Stage, WeightForm,
    WeightPolicy, stage_memory_plan,
};
use ferrum_types::{Error, Result};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// What `--backend` can say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// The fastest device that computes the model as it is, with room for it.
    #[default]
    Auto,
    /// Threads and SIMD.
    Cpu,
    /// Any GPU, by whichever interface this system has.
    Gpu,
    /// NVIDIA.
    Cuda,
    /// Apple.
    Metal,
    /// Any GPU with a Vulkan driver, also a software one.
    Vulkan,
    /// Plain loops; slow, and the meaning of every op.
    Reference,
}

impl BackendKind {
    /// Every kind with its name.
    pub const NAMES: &'static [(&'static str, BackendKind)] = &[
        ("auto", BackendKind::Auto),
        ("cpu", BackendKind::Cpu),
        ("gpu", BackendKind::Gpu),
        ("cuda", BackendKind::Cuda),
        ("metal", BackendKind::Metal),
        ("vulkan", BackendKind::Vulkan),
        ("reference", BackendKind::Reference),
    ];

    /// Names of the backends that this program was compiled with.
    pub fn compiled() -> Vec<&'static str> {
        // wgpu has Metal on Apple's systems and Vulkan on all others.
        let gpu = match cfg!(target_vendor = "apple") {
            true => Self::Metal,
            false => Self::Vulkan,
        };
        let all = [
            (Self::Cpu, true),
            (Self::Cuda, cfg!(feature = "cuda")),
            (gpu, cfg!(feature = "gpu")),
            (Self::Reference, true),
        ];
        let compiled = all.into_iter().filter(|(_, compiled)| *compiled);
        compiled.map(|(kind, _)| kind.name()).collect()
    }

    /// Its name, which is also that of its backend, if it is the kind of one.
    pub(crate) fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }
}

impl FromStr for BackendKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        find_name("backend", Self::NAMES, s)
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What `--kv-dtype` can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    /// binary32.
    F32,
    /// binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3.
    Fp8,
    /// INT8 with scales.
    Int8,
}

impl KvDtype {
    /// Every element with its name.
    pub const NAMES: &'static [(&'static str, KvDtype)] = &[
        ("f32", KvDtype::F32),
        ("f16", KvDtype::F16),
        ("bf16", KvDtype::Bf16),
        ("fp8", KvDtype::Fp8),
        ("int8", KvDtype::Int8),
    ];

    /// The default for a model: f32 for an f32 model, so that nothing is rounded; else f16.
    pub fn for_model(model: &Model) -> Self {
        if model.is_f32() {
            KvDtype::F32
        } else {
            KvDtype::F16
        }
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        find_name("KV dtype", Self::NAMES, s)
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(name_of(Self::NAMES, *self))
    }
}

fn find_name<T: Copy>(what: &str, names: &[(&str, T)], s: &str) -> Result<T, String> {
    match names.iter().find(|(name, _)| name.eq_ignore_ascii_case(s)) {
        Some((_, value)) => Ok(*value),
        None => {
            let known: Vec<_> = names.iter().map(|(name, _)| *name).collect();
            Err(format!(
                "unknown {what} \"{s}\", expected one of: {}",
                known.join(", ")
            ))
        }
    }
}

fn name_of<T: Copy + PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    names
        .iter()
        .find(|(_, v)| *v == value)
        .map_or("?", |(name, _)| *name)
}

/// Settings of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendOptions {
    /// Index among the devices of the backend.
    pub ordinal: usize,
    /// CPU threads; `None`: one for each physical core.
    pub threads: Option<usize>,
    /// Instructions of the CPU; `None`: the fastest that it has.
    pub isa: Option<Isa>,
    /// Whether a device that would not by itself gives a row the same bits whatever is computed beside it. It is slower for
    /// that; those that do so anyway (all but CUDA) take no notice.
    pub batch_invariant: bool,
}

/// An open device of whichever backend.
#[derive(Clone)]
pub enum BackendDispatch {
    /// Threads and SIMD.
    Cpu(CpuBackend),
    /// NVIDIA, with activations of bf16.
    #[cfg(feature = "cuda")]
    Cuda(CudaBf16),
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
            quantised: !model.expanded(WeightPolicy::floats()).is_empty(),
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
            Self::Cuda(_) => 2048,
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
        match kind {
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
        found.ok_or_else(|| Error::NoDevice {
            backend: BackendKind::Gpu.name(),
            reason: "this machine has none that is more than software".into(),
            hint: "leave out --gpu-layers, or name one of `ferrum devices` with --backend".into(),
        })
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
            batch_invariant, ..
        } = options;
        CudaBf16::open_with(ordinal, CudaOptions { batch_invariant }).map(Self::Cuda)
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

    /// Whether this device computes a model's products with activations of fewer bits than f32, so that layers differ
    /// from those of a device that keeps all.
    pub fn rounds_activations(&self, model: &Model) -> bool {
        match self {
            Self::Cpu(device) => device.isa().rounds_bf16() && model.has_bf16(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => true,
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => false,
            Self::Reference(_) => false,
        }
    }

    /// What of a model's weights this device keeps as they are. [`load`](Self::load) loads them so.
    pub fn weight_policy(&self, model: &Model) -> WeightPolicy {
        match self {
            Self::Cpu(_) if model.keeps_blocks() => WeightPolicy::of::<CpuBackend, CpuNative>(),
            Self::Cpu(_) => WeightPolicy::of::<CpuBackend, CpuExpanded>(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => WeightPolicy::of::<CudaBf16, CudaForm>(),
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => WeightPolicy::of::<GpuBackend, GpuForm>(),
            Self::Reference(_) => WeightPolicy::of::<ReferenceBackend, ReferenceForm>(),
        }
    }

    /// Quantised weights of a model that are expanded to floats when it is loaded onto this device.
    pub fn expanded_types(&self, model: &Model) -> Vec<String> {
        model.expanded(self.weight_policy(model))
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

    /// Loads a whole model onto this device for one sequence at a time or many: [`Placement::load`].
    ///
    /// # Errors
    /// Those of [`Placement::load`].
    pub fn load(
        &self,
        model: &Model,
        config: RunnerConfig,
        kv: KvDtype,
        progress: LoadProgress<'_>,
    ) -> Result<Session> {
        Placement::on(self.clone(), model).load(model, config, kv, progress)
    }

    /// Does a job on this device with a KV cache of element `K`, and its form of the model's weights; the CPU `keeps` blocks
    /// of quantised weights or expands them.
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
            #[cfg(feature = "gpu")]
            Self::Gpu(device) => K::on_gpu(device, job),
            Self::Reference(device) => K::on_reference(device, job),
        }
    }
}

/// Something to be done on a device of any backend that has a KV cache of element `K`.
pub(crate) trait DeviceJob<K: KvDtypeKind> {
    /// What it gives.
    type Output;

    /// Does it, with weights in the form `W`: the first handle is for loading a model's weights, the second one for all
    /// else.
    ///
    /// # Errors
    /// What the job says.
    fn run<B: LlmBackend + BackendKvDtype<K>, W: WeightForm<B>>(
        self,
        devices: (&B, &B),
    ) -> Result<Self::Output>;
}

/// An element of KV caches, with the backends that have it.
pub(crate) trait KvElement: KvDtypeKind {
    /// Does a job on a CPU, which keeps the blocks of models that are large enough.
    fn on_cpu<J: DeviceJob<Self>>(device: &CpuBackend, keeps: bool, job: J) -> Result<J::Output>;

    /// Does a job on a GPU of NVIDIA.
    #[cfg(feature = "cuda")]
    fn on_cuda<J: DeviceJob<Self>>(device: &CudaBf16, job: J) -> Result<J::Output>;

    /// Does a job on another GPU.
    #[cfg(feature = "gpu")]
    fn on_gpu<J: DeviceJob<Self>>(device: &GpuBackend, job: J) -> Result<J::Output>;

    /// Does a job on the reference backend.
    fn on_reference<J: DeviceJob<Self>>(device: &ReferenceBackend, job: J) -> Result<J::Output>;
}

/// A [`KvElement`] of the CPU, CUDA and the reference backend, and what other GPUs do with it.
macro_rules! kv_element {
    ($kv:ty, |$device:ident, $job:ident| $on_gpu:expr) => {
        impl KvElement for $kv {
            fn on_cpu<J: DeviceJob<Self>>(
                device: &CpuBackend,
                keeps: bool,
                job: J,
            ) -> Result<J::Output> {
                // What is loaded later, such as adapters, belongs to no model's cache.
                let running = &device.without_packed_store();
                match keeps {
                    true => job.run::<_, CpuNative>((device, running)),
                    false => job.run::<_, CpuExpanded>((device, running)),
                }
            }

            #[cfg(feature = "cuda")]
            fn on_cuda<J: DeviceJob<Self>>(device: &CudaBf16, job: J) -> Result<J::Output> {
                job.run::<_, CudaForm>((device, device))
            }

            #[cfg(feature = "gpu")]
            fn on_gpu<J: DeviceJob<Self>>($device: &GpuBackend, $job: J) -> Result<J::Output> {
                $on_gpu
            }

            fn on_reference<J: DeviceJob<Self>>(
                device: &ReferenceBackend,
                job: J,
            ) -> Result<J::Output> {
                job.run::<_, ReferenceForm>((device, device))
            }
        }
    };
}

kv_element!(KvF32, |device, job| job.run::<_, GpuForm>((device, device)));
kv_element!(KvFp16, |device, job| job
    .run::<_, GpuForm>((device, device)));
kv_element!(KvBf16, |device, job| job
    .run::<_, GpuForm>((device, device)));
kv_element!(KvFp8, |device, _job| Err(no_gpu_cache::<Self>(device)));
kv_element!(KvInt8, |device, _job| Err(no_gpu_cache::<Self>(device)));

#[cfg(feature = "gpu")]
fn no_gpu_cache<K: KvDtypeKind>(device: &GpuBackend) -> Error {
    Error::Unsupported {
        op: "kv_cache",
        backend: device.info().backend,
        reason: format!("it has no KV cache of {}", K::NAME),
        hint: "use --kv-dtype f32, f16 or bf16".into(),
    }
}

/// How the CPU loads models that are large enough for their blocks to be kept, and the others.
type CpuNative = Moe<Native>;
type CpuExpanded = Moe<Expanded>;

/// How CUDA loads models: blocks and experts as they are.
#[cfg(feature = "cuda")]
type CudaForm = Moe<Native>;

/// How other GPUs load models: they have no kernels for blocks, nor for experts.
#[cfg(feature = "gpu")]
type GpuForm = Expanded;

/// How the reference backend loads models.
type ReferenceForm = Moe<Expanded>;

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
