//! How many KV tokens fit into the memory of a device beside a model.

use super::kind::BackendKind;
use ferrum_kernels::{DeviceInfo, DeviceMemory};
use ferrum_models::MemoryPlan;

/// The share of a device's memory that a model may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryShare {
    /// Fraction of a GPU's memory that all models may use together, as in vLLM's setting of this name.
    pub gpu_memory_utilization: f64,
    /// Number of models that share the memory.
    pub models_sharing: u64,
}

/// Bytes of a KV pool on a device whose memory is unknown.
const KV_OF_UNKNOWN_MEMORY: u64 = 1 << 30;

impl MemoryShare {
    /// The share of a model that does not share the memory.
    pub fn alone(gpu_memory_utilization: f64) -> Self {
        Self {
            gpu_memory_utilization,
            models_sharing: 1,
        }
    }

    /// Number of KV tokens that a device has room for besides the rest of a plan.
    ///
    /// On a GPU the cache takes all that is left of the share and of the free memory. The host's memory is for other
    /// programs, too, so the cache takes half of what is left.
    pub(super) fn tokens(self, plan: &MemoryPlan, device: &DeviceInfo) -> usize {
        let models = self.models_sharing.max(1);
        let fixed = plan.weights.saturating_add(plan.scratch);
        let fixed = fixed.saturating_add(plan.states);
        let room = match device.memory {
            Some(DeviceMemory { free, total }) if is_gpu(device) => {
                let share = (total as f64 * self.gpu_memory_utilization) as u64;
                (share / models).min(free).saturating_sub(fixed)
            }
            Some(DeviceMemory { free, total }) => {
                (total / models).min(free).saturating_sub(fixed) / 2
            }
            None => KV_OF_UNKNOWN_MEMORY / models,
        };
        let room = room.saturating_sub(plan.kv_windows);
        usize::try_from(room / plan.kv_per_token.max(1)).unwrap_or(usize::MAX)
    }
}

pub(super) fn is_gpu(device: &DeviceInfo) -> bool {
    device.backend == BackendKind::Cuda.name()
}

/// Describes the memory of a plan, with a hint for reducing it.
pub(super) fn planned(plan: &MemoryPlan, memory: Option<DeviceMemory>, tokens: usize) -> String {
    let of_memory = memory.map_or(String::new(), |DeviceMemory { free, total }| {
        let (free, total) = (size(free), size(total));
        format!(", and before it {free} of {total} were free")
    });
    let states = match plan.states {
        0 => String::new(),
        bytes => format!(", recurrent states {}", size(bytes)),
    };
    let (weights, kv, scratch) = (size(plan.weights), size(plan.kv), size(plan.scratch));
    format!(
        "the model takes {weights} for weights, {kv} for a KV cache of {tokens} tokens{states} and {scratch} for \
         activations{of_memory}\nhint: lower --context or --kv-tokens, take --kv-dtype fp8, a model that is quantised \
         further, or part it with --layers"
    )
}

fn size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_kernels::Backend;
    use ferrum_kernels::cpu::CpuBackend;
    use ferrum_kernels::cuda::CudaBf16;

    const CUDA: &str = CudaBf16::NAME;

    const PLAN: MemoryPlan = MemoryPlan {
        weights: 3 << 30,
        kv_per_token: 1 << 16,
        kv_windows: 0,
        kv: 5 << 30,
        states: 0,
        scratch: 1 << 30,
        program: 0,
    };

    fn memory(free: u64, total: u64) -> Option<DeviceMemory> {
        let (free, total) = (free << 30, total << 30);
        Some(DeviceMemory { free, total })
    }

    #[test]
    fn a_pool_is_bounded_by_the_memory_whether_it_is_known_or_not() {
        for (backend, memory, models_sharing, tokens) in [
            (CpuBackend::NAME, memory(12, 12), 1, 4 << 14),
            (CpuBackend::NAME, memory(12, 12), 2, 1 << 14),
            (CpuBackend::NAME, memory(6, 12), 1, 1 << 14),
            (CpuBackend::NAME, memory(6, 12), 2, 1 << 14),
            (CpuBackend::NAME, memory(3, 12), 1, 0),
            (CpuBackend::NAME, memory(2, 2), 1, 0),
            ("vulkan", None, 1, 1 << 14),
            ("vulkan", None, 4, 1 << 12),
            // Three quarters of the memory, but no more than is free, and all of what is left.
            (CUDA, memory(16, 16), 1, 8 << 14),
            (CUDA, memory(10, 16), 1, 6 << 14),
            (CUDA, memory(16, 16), 2, 2 << 14),
            (CUDA, memory(3, 16), 1, 0),
        ] {
            let device = DeviceInfo {
                backend,
                ordinal: 0,
                name: String::new(),
                detail: String::new(),
                software: false,
                memory,
            };
            let share = MemoryShare {
                gpu_memory_utilization: 0.75,
                models_sharing,
            };
            let found = share.tokens(&PLAN, &device);
            assert_eq!(found, tokens, "{backend} {memory:?} {models_sharing}");
        }
    }

    #[test]
    fn a_plan_that_does_not_fit_says_its_figures() {
        let text = planned(&PLAN, memory(6, 8), 81920);
        let (words, hint) = text.split_once('\n').unwrap();
        assert_eq!(
            words,
            "the model takes 3.00 GiB for weights, 5.00 GiB for a KV cache of 81920 tokens and 1.00 GiB for \
             activations, and before it 6.00 GiB of 8.00 GiB were free"
        );
        assert!(hint.starts_with("hint: lower --context"), "{hint}");
    }
}
