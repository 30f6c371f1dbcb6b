//! Cache groups: which layers share block tables, and how many blocks they need.
//!
//! A layer's keys live in a pool of its own, so layers may differ in KV heads and widths and still use the same
//! table: block `b` of a sequence is block `b` in each of their pools. What they cannot share is *when* a block is
//! given back. So layers are grouped by their window: those that see everything keep all blocks of a sequence,
//! those with a window of `w` tokens only the blocks of the last `w`.

use crate::runner::config::{KvLayout, RunnerConfig};
use crate::spec::{CacheSpec, DecoderSpec, LayerSpec};
use ferrum_kernels::PagedKvShape;

/// Layers that share block tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// The layers, ascending.
    pub layers: Vec<usize>,
    /// Keys that a query sees, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Blocks in the pool of each layer.
    pub blocks: usize,
    /// Tokens of a block; the same in all groups of a model.
    pub block_size: usize,
}

/// Slots for recurrent states, in each layer that has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSlots {
    /// For sequences that run.
    pub working: usize,
    /// For states that are kept, for sequences which begin with the same tokens.
    pub kept: usize,
}

impl StateSlots {
    /// All.
    pub fn count(self) -> usize {
        self.working.saturating_add(self.kept)
    }
}

/// Where a layer keeps what it has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCache {
    /// In a paged pool of its own.
    Pool {
        /// Its cache group.
        group: usize,
        /// The pool.
        shape: PagedKvShape,
    },
    /// In the pool of an earlier layer.
    Shared(usize),
    /// In a state of so many numbers for each sequence.
    State(usize),
    /// Nowhere.
    None,
}

/// The most blocks that `tokens` tokens in a row are spread over.
pub fn spanned_blocks(tokens: usize, block_size: usize) -> usize {
    match tokens {
        0 => 0,
        n => (n - 1).div_ceil(block_size.max(1)) + 1,
    }
}

impl CacheGroup {
    /// The first of a sequence's keys that the token at `position`, or one after it, sees.
    pub fn first_seen(&self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

impl RunnerConfig {
    /// The pool of the first layer of the first cache group that has one; without elements where there are none.
    pub fn pool_shape(&self, spec: &DecoderSpec) -> PagedKvShape {
        let caches = self.layer_caches(spec);
        let pools = caches.into_iter().filter_map(|cache| match cache {
            LayerCache::Pool { group, shape } => Some((group, shape)),
            LayerCache::Shared(_) | LayerCache::State(_) | LayerCache::None => None,
        });
        let (blocks, block_size) = self.blocks();
        let none = PagedKvShape {
            blocks,
            block_size,
            kv_heads: 0,
            head_dim: 0,
            value_dim: 0,
            values_in_keys: false,
        };
        pools
            .min_by_key(|&(group, _)| group)
            .map_or(none, |(_, shape)| shape)
    }

    /// The cache groups of a decoder: one of all layers, or with [`KvLayout::Grouped`] one for each window, the
    /// layers without one first. Layers whose cache is not paged are in none.
    ///
    /// A group with a window has blocks for as many sequences as a step takes and the tokens of two steps, or as many
    /// as the others where that is less: it never runs out before they do.
    pub fn cache_groups(&self, spec: &DecoderSpec) -> Vec<CacheGroup> {
        let (blocks, block_size) = self.blocks();
        let group = |window: Option<usize>| CacheGroup {
            layers: Vec::new(),
            window,
            blocks: window.map_or(blocks, |w| self.window_blocks(w).min(blocks)),
            block_size,
        };
        let mut groups: Vec<CacheGroup> = Vec::new();
        let mut has_states = false;
        for layer in 0..spec.layers.len() {
            let window = match (self.layout, spec.own_cache(layer)) {
                // A window as long as the longest sequence is none.
                (KvLayout::Grouped { .. }, CacheSpec::Heads { window, .. }) => {
                    window.filter(|&window| window < self.context)
                }
                (_, CacheSpec::Heads { .. } | CacheSpec::Latent { .. }) => None,
                (_, CacheSpec::Recurrent { .. }) => {
                    has_states = true;
                    continue;
                }
                (_, CacheSpec::SharedWith(_) | CacheSpec::None) => continue,
            };
            let known = groups.iter().position(|group| group.window == window);
            let known = known.unwrap_or_else(|| {
                groups.push(group(window));
                groups.len() - 1
            });
            groups[known].layers.push(layer);
        }
        // States are found by the blocks of all tokens before them, whether a layer has keys there or not.
        let whole = groups.iter().any(|group| group.window.is_none());
        if groups.is_empty() || has_states && !whole {
            groups.push(group(None));
        }
        groups.sort_by_key(|group| group.window);
        groups
    }

    /// The slots for recurrent states, if some layer has one: one for each sequence of a step, and those for states
    /// that are kept.
    pub fn state_slots(&self, spec: &DecoderSpec) -> Option<StateSlots> {
        let recurrent = |layer: &LayerSpec| matches!(layer.cache(), CacheSpec::Recurrent { .. });
        let slots = StateSlots {
            working: self.max_seqs,
            kept: self.kept_states,
        };
        spec.layers.iter().any(recurrent).then_some(slots)
    }

    /// Rows of a layer's states: one for each slot, and one of zeros, with which states begin.
    pub(crate) fn state_rows(&self, spec: &DecoderSpec) -> usize {
        let slots = self.state_slots(spec);
        slots.map_or(0, |slots| slots.count().saturating_add(1))
    }

    /// Tokens of all sequences that the cache holds. Groups with a window hold what is needed of as many.
    pub fn cache_tokens(&self) -> usize {
        let (blocks, block_size) = self.blocks();
        blocks.saturating_mul(block_size)
    }

    /// Where each layer keeps what it has seen.
    pub fn layer_caches(&self, spec: &DecoderSpec) -> Vec<LayerCache> {
        let groups = self.cache_groups(spec);
        let cache = |layer: &LayerSpec, index: usize| {
            let group = groups.iter().position(|g| g.layers.contains(&index));
            let group = group.unwrap_or(0);
            let shape = PagedKvShape {
                blocks: groups[group].blocks,
                block_size: groups[group].block_size,
                kv_heads: 1,
                head_dim: 0,
                value_dim: 0,
                values_in_keys: false,
            };
            let shape = match layer.cache() {
                CacheSpec::Heads {
                    kv_heads,
                    key_dim: head_dim,
                    value_dim,
                    ..
                } => PagedKvShape {
                    kv_heads,
                    head_dim,
                    value_dim,
                    ..shape
                },
                CacheSpec::Latent { rank, rope_dim } => {
                    PagedKvShape::latent(shape.blocks, shape.block_size, (rank, rope_dim))
                }
                CacheSpec::SharedWith(owner) => return LayerCache::Shared(owner),
                CacheSpec::Recurrent { conv, state } => {
                    return LayerCache::State(conv + state);
                }
                CacheSpec::None => return LayerCache::None,
            };
            LayerCache::Pool { group, shape }
        };
        let layers = spec.layers.iter().zip(0..);
        layers.map(|(layer, index)| cache(layer, index)).collect()
    }

    /// Blocks of a group without a window, and tokens of a block.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        match self.layout {
            KvLayout::Paged { block_size } | KvLayout::Grouped { block_size } => {
                (self.kv_tokens.div_ceil(block_size.max(1)), block_size)
            }
            KvLayout::Contiguous => (self.max_seqs, self.context),
        }
    }

    /// What the sequences of a step have in a group with a window at most: the window of each, the block that each
    /// will want next, and the tokens of two steps, of which one is in flight.
    fn window_blocks(&self, window: usize) -> usize {
        let (_, block_size) = self.blocks();
        let of_each = spanned_blocks(window, block_size) + 2;
        let steps = 2 * self.max_tokens.div_ceil(block_size.max(1));
        self.max_seqs.saturating_mul(of_each).saturating_add(steps)
    }
}

#[cfg(test)]
mod tests;
