//! Where the layers of a stage keep what they have seen: which pools and states the stage allocates, and which of them is
//! a layer's.

use crate::cache::LayerCache;
use crate::inventory::Stage;
use ferrum_kernels::PagedKvShape;
use ferrum_types::{Error, Result};
use std::ops::Range;

/// Where a layer keeps what it has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheIndex {
    /// In a pool of the stage, its own or that of the layer which it shares one with.
    Pool(usize),
    /// In a state of the stage.
    State(usize),
    None,
}

/// The caches of a stage.
#[derive(Debug)]
pub(super) struct StageCaches {
    /// Cache group and shape of each pool.
    pub(super) pools: Vec<(usize, PagedKvShape)>,
    /// Elements of each recurrent state.
    pub(super) states: Vec<usize>,
    /// Of each layer.
    pub(super) cache_of: Vec<CacheIndex>,
}

impl StageCaches {
    /// Those of a stage of a decoder whose layers have these caches.
    pub(super) fn of(stage: &Stage, caches: &[LayerCache]) -> Result<Self> {
        let Range { start, end } = stage.layers();
        let of_stage = caches.get(start..end).ok_or_else(|| {
            let reason = format!("found layers {stage} of a decoder with {}", caches.len());
            Error::invalid("stage", reason)
        })?;
        let (mut pools, mut states) = (Vec::new(), Vec::new());
        let mut cache_of: Vec<CacheIndex> = Vec::new();
        for (layer, cache) in (start..).zip(of_stage) {
            let index = match *cache {
                LayerCache::Pool { group, shape } => {
                    pools.push((group, shape));
                    CacheIndex::Pool(pools.len() - 1)
                }
                LayerCache::Shared(owner) => {
                    let owner = owner.checked_sub(start);
                    let owner = owner.and_then(|owner| cache_of.get(owner).copied());
                    owner.ok_or_else(|| {
                        let reason = format!(
                            "layer {layer} shares the cache of a layer that stage {stage} has not"
                        );
                        Error::invalid("stage", reason)
                    })?
                }
                LayerCache::State(elements) => {
                    states.push(elements);
                    CacheIndex::State(states.len() - 1)
                }
                LayerCache::None => CacheIndex::None,
            };
            cache_of.push(index);
        }
        Ok(Self {
            pools,
            states,
            cache_of,
        })
    }
}
