//! Blocks of the KV pool over all layers, as bytes: what leaves a device, to host memory, to a file or to another
//! device, and comes back.
//!
//! The layout is the same on every backend (that of [`KvBlockBytes`](ferrum_kernels::KvBlockBytes), layer after
//! layer), so blocks need the same cache elements and sizes, and nothing else, to be understood.

use crate::runner::{ModelRunner, StageRunner};
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, LlmBackend, PagedKvShape};
use ferrum_types::{BlockId, Error, Result};
use std::ops::Range;

/// What the bytes of a block are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBlockLayout {
    /// Element of the cache, as in `--kv-dtype`.
    pub dtype: &'static str,
    /// Tokens of a block.
    pub block_size: usize,
    /// Layers, which lie one after the other.
    pub layers: Vec<KvBlockPart>,
    /// Bytes of a block over all layers.
    pub bytes: usize,
}

/// What a layer has of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlockPart {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head; 0 where keys hold the values.
    pub value_dim: usize,
    /// Its bytes.
    pub bytes: usize,
}

impl KvBlockLayout {
    /// The layout of the pools of some layers; `None` when a block is larger than the address space.
    pub fn of<'a, K: KvDtypeKind>(
        block_size: usize,
        pools: impl IntoIterator<Item = &'a PagedKvShape>,
    ) -> Option<Self> {
        let part = |pool: &PagedKvShape| {
            Some(KvBlockPart {
                kv_heads: pool.kv_heads,
                key_dim: pool.head_dim,
                value_dim: pool.stored_value_dim(),
                bytes: pool.block_bytes::<K>()?.len(),
            })
        };
        let layers: Vec<_> = pools.into_iter().map(part).collect::<Option<_>>()?;
        let mut sizes = layers.iter().map(|part| part.bytes);
        Some(Self {
            dtype: K::NAME,
            block_size,
            bytes: sizes.try_fold(0, usize::checked_add)?,
            layers,
        })
    }

    /// Where the bytes of each layer lie in those of a block.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        self.layers.iter().scan(0, |start, part| {
            let first = *start;
            *start += part.bytes;
            Some(first..*start)
        })
    }
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> StageRunner<B, K> {
    /// The layout of what the layers of this stage have of a block.
    pub(crate) fn kv_block_layout(&self) -> Result<KvBlockLayout> {
        if self.has_states() {
            let reason = "the blocks of a model with recurrent states cannot be moved without them";
            return Err(Error::invalid("kv_blocks", reason));
        }
        if self.cache_groups().iter().any(|g| g.window.is_some()) {
            let reason = "the blocks of a model whose layers differ in window cannot be moved";
            return Err(Error::invalid("kv_blocks", reason));
        }
        let pools = self.kv.layers.iter().map(|layer| &layer.shape);
        let layout = KvBlockLayout::of::<K>(self.pool().block_size, pools);
        layout.ok_or_else(too_large)
    }

    /// Copies what the layers of this stage have of blocks to the host, a part for each block.
    pub(crate) fn read_kv_blocks(
        &mut self,
        blocks: &[BlockId],
        parts: &mut [&mut [u8]],
    ) -> Result<()> {
        let layout = self.kv_block_layout()?;
        for (layer, place) in self.kv.layers.iter().zip(layout.parts()) {
            let parts = parts.iter_mut().map(|block| &mut block[place.clone()]);
            let mut wanted: Vec<_> = blocks.iter().copied().zip(parts).collect();
            B::kv_read_blocks(&mut self.ctx, layer, &mut wanted)?;
        }
        Ok(())
    }

    /// Writes the parts that [`read_kv_blocks`](Self::read_kv_blocks) gave.
    pub(crate) fn write_kv_blocks(&mut self, blocks: &[BlockId], parts: &[&[u8]]) -> Result<()> {
        let layout = self.kv_block_layout()?;
        for (layer, place) in self.kv.layers.iter_mut().zip(layout.parts()) {
            let parts = parts.iter().map(|block| &block[place.clone()]);
            let blocks: Vec<_> = blocks.iter().copied().zip(parts).collect();
            B::kv_write_blocks(&mut self.ctx, layer, &blocks)?;
        }
        Ok(())
    }
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> ModelRunner<B, K> {
    /// What [`read_kv_blocks`](Self::read_kv_blocks) gives: the layers of all stages. Which stages there are changes
    /// nothing of it.
    ///
    /// # Errors
    /// `InvalidArgument` when a block is larger than the address space, layers differ in their windows
    /// (`KvLayout::Grouped`), or some have recurrent states.
    pub fn kv_block_layout(&self) -> Result<KvBlockLayout> {
        let own = self.stage.kv_block_layout()?;
        let (mut layers, mut bytes) = (Vec::new(), own.bytes);
        for stage in &self.earlier {
            let layout = stage.kv_block_layout()?;
            bytes = bytes.checked_add(layout.bytes).ok_or_else(too_large)?;
            layers.extend(layout.layers);
        }
        layers.extend(&own.layers);
        Ok(KvBlockLayout {
            layers,
            bytes,
            ..own
        })
    }

    /// Waits for the steps that were submitted and copies blocks of all layers to the host, `[blocks, block bytes]`.
    ///
    /// # Errors
    /// `InvalidArgument` for a block that is not in the pool; `Shape` when `out` is not of that length; what the
    /// device says.
    pub fn read_kv_blocks(&mut self, blocks: &[BlockId], out: &mut [u8]) -> Result<()> {
        let layout = self.check_block_copy("read_kv_blocks", blocks, out.len())?;
        let mut rest: Vec<_> = out.chunks_exact_mut(layout.bytes.max(1)).collect();
        for stage in &mut self.earlier {
            let len = stage.kv_block_layout()?.bytes;
            let parts = rest.iter_mut().map(|block| {
                let (part, behind) = std::mem::take(block).split_at_mut(len);
                *block = behind;
                part
            });
            stage.read_kv_blocks(blocks, &mut parts.collect::<Vec<_>>())?;
        }
        self.stage.read_kv_blocks(blocks, &mut rest)
    }

    /// Writes blocks of all layers, as [`read_kv_blocks`](Self::read_kv_blocks) gave them, behind the steps that were
    /// submitted and before those that will be.
    ///
    /// # Errors
    /// Those of [`read_kv_blocks`](Self::read_kv_blocks).
    pub fn write_kv_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        let layout = self.check_block_copy("write_kv_blocks", blocks, bytes.len())?;
        let mut rest: Vec<_> = bytes.chunks_exact(layout.bytes.max(1)).collect();
        for stage in &mut self.earlier {
            let len = stage.kv_block_layout()?.bytes;
            let parts = rest.iter_mut().map(|block| {
                let (part, behind) = block.split_at(len);
                *block = behind;
                part
            });
            stage.write_kv_blocks(blocks, &parts.collect::<Vec<_>>())?;
        }
        self.stage.write_kv_blocks(blocks, &rest)
    }

    /// Holds blocks and the length of their bytes against the pool, before any layer is touched.
    fn check_block_copy(
        &self,
        op: &'static str,
        blocks: &[BlockId],
        found: usize,
    ) -> Result<KvBlockLayout> {
        let layout = self.kv_block_layout()?;
        let expected = layout.bytes.saturating_mul(blocks.len());
        if found != expected {
            return Err(Error::Shape {
                op,
                what: "bytes of blocks",
                found,
                expected,
            });
        }
        let pool = self.pool().blocks;
        match blocks.iter().find(|block| block.0 as usize >= pool) {
            None => Ok(layout),
            Some(block) => {
                let reason = format!("block {}, the pool has {pool} blocks", block.0);
                Err(Error::invalid(op, reason))
            }
        }
    }
}

fn too_large() -> Error {
    Error::invalid("kv_blocks", "a block is too large for a file")
}
