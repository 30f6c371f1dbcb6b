//! Cache groups: which layers share block tables, and how many blocks they need.
//!
//! A layer's keys live in a pool of its own, so layers may differ in KV heads and widths and still use the same
//! table: block `b` of a sequence is block `b` in each of their pools. What they cannot share is *when* a block is
//! given back. So layers are grouped by their window: those that see everything keep all blocks of a sequence,
//! those with a window of `w` tokens only the blocks of the last `w`.

use crate::runner::{KvLayout, RunnerConfig};
use crate::spec::{CacheSpec, DecoderSpec};
use ferrum_kernels::PagedKvShape;
use ferrum_types::{Error, Result};

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
    /// The cache groups of a decoder: one of all layers, or with [`KvLayout::Grouped`] one for each window, the
    /// layers without one first.
    ///
    /// A group with a window has blocks for as many sequences as a step takes and the tokens of two steps, or as many
    /// as the others where that is less: it never runs out before they do.
    pub fn cache_groups(&self, spec: &DecoderSpec) -> Vec<CacheGroup> {
        let (blocks, block_size) = self.blocks();
        let mut groups: Vec<CacheGroup> = Vec::new();
        for layer in 0..spec.layers.len() {
            let window = match (self.layout, spec.own_cache(layer)) {
                // A window as long as the longest sequence is none.
                (KvLayout::Grouped { .. }, CacheSpec::Heads { window, .. }) => {
                    window.filter(|&window| window < self.context)
                }
                _ => None,
            };
            match groups.iter_mut().find(|group| group.window == window) {
                Some(group) => group.layers.push(layer),
                None => groups.push(CacheGroup {
                    layers: vec![layer],
                    window,
                    blocks: window.map_or(blocks, |w| self.window_blocks(w).min(blocks)),
                    block_size,
                }),
            }
        }
        groups.sort_by_key(|group| group.window);
        groups
    }

    /// Tokens of all sequences that the cache holds. Groups with a window hold what is needed of as many.
    pub fn cache_tokens(&self) -> usize {
        let (blocks, block_size) = self.blocks();
        blocks.saturating_mul(block_size)
    }

    /// For each layer its cache group, and its pool.
    ///
    /// # Errors
    /// `InvalidArgument` for a layer whose cache no runner has yet.
    pub fn layer_pools(&self, spec: &DecoderSpec) -> Result<Vec<(usize, PagedKvShape)>> {
        let groups = self.cache_groups(spec);
        let pool = |layer| match spec.own_cache(layer) {
            CacheSpec::Heads { .. } => Ok(self.layer_pool(spec, &groups, layer)),
            other => {
                let reason = format!("layer {layer} wants {other:?}, which no runner has yet");
                Err(Error::invalid("cache", reason))
            }
        };
        (0..spec.layers.len()).map(pool).collect()
    }

    /// The cache group of a layer and its pool, without elements where the layer keeps no keys.
    pub(crate) fn layer_pool(
        &self,
        spec: &DecoderSpec,
        groups: &[CacheGroup],
        layer: usize,
    ) -> (usize, PagedKvShape) {
        let group = groups.iter().position(|g| g.layers.contains(&layer));
        let group = group.unwrap_or(0);
        let (all, block_size) = self.blocks();
        let (kv_heads, head_dim, value_dim) = match spec.own_cache(layer) {
            CacheSpec::Heads {
                kv_heads,
                key_dim,
                value_dim,
                ..
            } => (kv_heads, key_dim, value_dim),
            _ => (0, 0, 0),
        };
        let shape = PagedKvShape {
            blocks: groups.get(group).map_or(all, |group| group.blocks),
            block_size,
            kv_heads,
            head_dim,
            value_dim,
            values_in_keys: false,
        };
        (group, shape)
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
