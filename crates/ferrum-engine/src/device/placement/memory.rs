//! How many KV tokens fit into the memory of all devices of a placement, and errors for loads that run out of memory.

use super::Placement;
use crate::device::kind::KvDtype;
use crate::device::memory::{MemoryShare, is_gpu, planned};
use ferrum_kernels::DeviceInfo;
use ferrum_models::{Model, RunnerConfig};
use ferrum_types::Error;

impl Placement {
    /// Number of tokens of a KV cache of `kv` that every device has room for, with all else that a run with these sizes
    /// takes.
    pub fn kv_tokens(
        &self,
        model: &Model,
        (config, kv): (&RunnerConfig, KvDtype),
        share: MemoryShare,
    ) -> usize {
        let plans = self.device_plans(model, config, kv).into_iter();
        let fits = plans.map(|(info, plan)| share.tokens(&plan, &info));
        fits.min().unwrap_or(usize::MAX)
    }

    /// [`kv_tokens`](Self::kv_tokens) of the GPUs that report their memory; `None` if there is none.
    pub fn gpu_kv_tokens(
        &self,
        model: &Model,
        (config, kv): (&RunnerConfig, KvDtype),
        gpu_memory_utilization: f64,
    ) -> Option<usize> {
        let share = MemoryShare::alone(gpu_memory_utilization);
        let plans = self.device_plans(model, config, kv).into_iter();
        let gpus = plans.filter(|(info, _)| is_gpu(info) && info.memory.is_some());
        gpus.map(|(info, plan)| share.tokens(&plan, &info)).min()
    }

    /// Adds the memory plan to the error of a load that ran out of memory. `before` are the devices of the stages before
    /// the load.
    pub(super) fn explained(
        &self,
        error: Error,
        model: &Model,
        (config, kv): (&RunnerConfig, KvDtype),
        before: &[DeviceInfo],
    ) -> Error {
        let Error::OutOfMemory {
            backend,
            requested,
            reason,
        } = error
        else {
            return error;
        };
        let plans = self.device_plans(model, config, kv);
        let of_backend = plans.iter().find(|(info, _)| info.backend == backend);
        let memory = before.iter().find(|info| info.backend == backend);
        let reason = match of_backend {
            Some((_, plan)) => {
                let memory = memory.and_then(|info| info.memory);
                format!("{reason}; {}", planned(plan, memory, config.cache_tokens()))
            }
            None => reason,
        };
        Error::OutOfMemory {
            backend,
            requested,
            reason,
        }
    }
}
