//! A load in two steps: what it will do about memory and the cache of packed weights is known, and can be said, before it takes
//! its time.

use super::{DraftHeadLoad, Placement};
use crate::device::dispatch::BackendDispatch;
use crate::device::kind::KvDtype;
use crate::device::weight_cache::{CacheWriter, LoadStore};
use crate::{Session, StepRunner};
use ferrum_formats::weight_cache::WeightCache;
use ferrum_kernels::cpu::PackedStore;
use ferrum_models::{LoadProgress, Model, RunnerConfig};
use ferrum_types::Result;
use std::sync::Arc;

/// A loaded model with its draft head and the outcome of the weight cache.
pub struct LoadedParts {
    /// The model.
    pub session: Session,
    /// The runner of its draft head, where there is one.
    pub draft_head: Option<Box<dyn StepRunner>>,
    /// What the cache of packed weights did, where there is one.
    pub kept: Option<CacheWriter>,
}

/// A model that takes more than seven eighths of the CPU's free memory without its KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryShortage {
    /// Bytes that it takes.
    pub needed: u64,
    /// Bytes that are free.
    pub free: u64,
    /// Why all weights will be in memory nevertheless; `None` where they are read from the cache when they are used.
    pub why_in_memory: Option<String>,
}

/// A load that can begin.
pub struct PreparedLoad<'m> {
    model: &'m Model,
    sizes: (RunnerConfig, KvDtype),
    placement: Placement,
    store: Option<Arc<LoadStore>>,
    skipped: Option<CacheWriter>,
    shortage: Option<MemoryShortage>,
}

impl Placement {
    /// Prepares [`load`](Self::load) with weights as `cache` has them packed, if there is one; what it lacks is packed and kept
    /// there. Only the CPU packs weights, and only those of a model that it has alone are kept. What is wrong with the cache
    /// is no error, and said in the outcome. Waits for a process that writes the same weights where memory has no room for
    /// them.
    pub fn prepare<'m>(
        &self,
        model: &'m Model,
        sizes: (RunnerConfig, KvDtype),
        cache: Option<&WeightCache>,
    ) -> PreparedLoad<'m> {
        let lacking = self.lacking_memory(model, sizes);
        let streamed = lacking.map(|(weights, ..)| weights);
        let store = cache.map(|cache| self.store(model, cache, streamed));
        let (placement, store, skipped) = match store {
            Some(Ok((placement, store))) => (placement, Some(store), None),
            Some(Err(reason)) => (self.clone(), None, Some(CacheWriter::skipped(reason))),
            None => (self.clone(), None, None),
        };
        let shortage = lacking.map(|(_, needed, free)| MemoryShortage {
            needed,
            free,
            why_in_memory: match (&store, &skipped) {
                (Some(store), _) => store.why_not_streamed(),
                (None, Some(skipped)) => skipped.why_skipped().map(str::to_owned),
                (None, None) => Some("there is no cache of packed weights".into()),
            },
        });
        PreparedLoad {
            model,
            sizes,
            placement,
            store,
            skipped,
            shortage,
        }
    }

    /// The bytes of a model's weights, those of all that it takes but its KV cache, and the free ones, where it is on the CPU and
    /// that is too few. Memory of the KV cache is taken when it is used, and an eighth is left for that.
    fn lacking_memory(
        &self,
        model: &Model,
        (config, kv): (RunnerConfig, KvDtype),
    ) -> Option<(u64, u64, u64)> {
        let on_cpu = |device: &BackendDispatch| matches!(device, BackendDispatch::Cpu(_));
        self.stages()
            .all(|placed| on_cpu(&placed.device))
            .then_some(())?;
        let free = self.last.device.info().memory?.free;
        let plan = self.memory_plan(model, &config, kv);
        let needed = plan.peak().saturating_sub(plan.kv);
        (needed > free - free / 8).then_some((plan.weights, needed, free))
    }

    /// The same placement with a store of packed weights, or why there is none.
    fn store(
        &self,
        model: &Model,
        cache: &WeightCache,
        streamed: Option<u64>,
    ) -> Result<(Self, Arc<LoadStore>), String> {
        let device = match &self.last.device {
            BackendDispatch::Cpu(device) if self.is_whole() => device,
            _ if self.ranks.is_some() => return Err("the weights are cut for ranks".into()),
            _ if self.is_whole() => return Err("only the CPU packs weights".into()),
            _ => return Err("the layers are on several stages".into()),
        };
        let layout = (device.packed_layout(), device.threads());
        let store = Arc::new(LoadStore::open(cache, model, layout, streamed)?);
        let loading = device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
        Ok((Self::on(BackendDispatch::Cpu(loading), model), store))
    }
}

impl PreparedLoad<'_> {
    /// What the model lacks of the free memory, if it does.
    pub fn memory_shortage(&self) -> Option<&MemoryShortage> {
        self.shortage.as_ref()
    }

    /// Loads the model, and a draft head beside the last stage, if there is one. The cache keeps none of the head's weights.
    ///
    /// # Errors
    /// Those of [`Placement::load`] and [`load_draft_head`](ferrum_models::load_draft_head).
    pub fn load(
        self,
        head: Option<DraftHeadLoad<'_>>,
        progress: LoadProgress<'_>,
    ) -> Result<LoadedParts> {
        let (session, head) = self
            .placement
            .load_runners(self.model, self.sizes, head, progress)?;
        let kept = self.store.map(|store| store.finish()).transpose()?;
        Ok(LoadedParts {
            session,
            draft_head: head,
            kept: kept.or(self.skipped),
        })
    }
}
