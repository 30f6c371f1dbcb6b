//! Jobs that are generic over backend and KV element, and the forms in which each backend holds weights.

#[cfg(feature = "gpu")]
use ferrum_kernels::Backend;
use ferrum_kernels::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use ferrum_kernels::cuda::{CudaAct, CudaBackend};
#[cfg(feature = "gpu")]
use ferrum_kernels::gpu::GpuBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{
    BackendKvDtype, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8, LlmBackend,
};
use ferrum_models::{Dequantized, Moe, Native, WeightForm};
#[cfg(feature = "gpu")]
use ferrum_types::Error;
use ferrum_types::Result;

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
    fn on_cuda<A: CudaAct, J: DeviceJob<Self>>(
        device: &CudaBackend<A>,
        job: J,
    ) -> Result<J::Output>;

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
                    false => job.run::<_, CpuDequantized>((device, running)),
                }
            }

            #[cfg(feature = "cuda")]
            fn on_cuda<A: CudaAct, J: DeviceJob<Self>>(
                device: &CudaBackend<A>,
                job: J,
            ) -> Result<J::Output> {
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
pub(super) type CpuNative = Moe<Native>;
pub(super) type CpuDequantized = Moe<Dequantized>;

/// How CUDA loads models: blocks and experts as they are.
#[cfg(feature = "cuda")]
pub(super) type CudaForm = Moe<Native>;

/// How other GPUs load models: they have no kernels for blocks, nor for experts.
#[cfg(feature = "gpu")]
pub(super) type GpuForm = Dequantized;

/// How the reference backend loads models.
pub(super) type ReferenceForm = Moe<Dequantized>;
