//! How many KV tokens fit into the memory of all devices of a placement, and errors for loads that run out of memory.

use super::Placement;
use crate::device::kind::KvDtype;
use crate::device::memory::{MemoryShare, is_gpu, planned};
use ferrum_kernels::{DeviceInfo, DeviceMemory};
use ferrum_models::{MemoryPlan, Model, RunnerConfig};
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
        let plans = self.device_plans(model, config, kv).into_iter();
        let of_backend = plans.filter(|(info, _)| info.backend == backend);
        let with_memory = of_backend.map(|(info, plan)| {
            let found = before
                .iter()
                .find(|other| other.backend == backend && other.ordinal == info.ordinal);
            (plan, found.and_then(|info| info.memory))
        });
        // The error does not say which of several devices it was: of those of this backend, that with the least room.
        let room = |(plan, memory): &(MemoryPlan, Option<DeviceMemory>)| {
            memory.map_or(i128::MAX, |memory| {
                i128::from(memory.free) - i128::from(plan.peak())
            })
        };
        let reason = match with_memory.min_by_key(room) {
            Some((plan, memory)) => {
                format!(
                    "{reason}; {}",
                    planned(&plan, memory, config.cache_tokens())
                )
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
