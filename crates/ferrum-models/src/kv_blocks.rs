//! Blocks of the KV pool over all layers, as bytes: what leaves a device, to host memory, to a file or to another
//! device, and comes back.
//!
//! The layout is the same on every backend (that of [`KvBlockBytes`](ferrum_kernels::KvBlockBytes), layer after
//! layer), so blocks need the same cache elements and sizes, and nothing else, to be understood.

use crate::runner::{ModelRunner, StageRunner};
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, KvLayer, LlmBackend, PagedKvShape};
use ferrum_types::{BlockId, Error, Result};

/// What the bytes of a block are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBlockLayout {
    /// Element of the cache, as in `--kv-dtype`.
    pub dtype: &'static str,
    /// Layers, which lie one after the other.
    pub layers: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Key and value heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Bytes of a block over all layers.
    pub bytes: usize,
}

impl KvBlockLayout {
    /// The layout of a pool of `layers` layers of one shape; `None` when a block is larger than the address space.
    pub fn of<K: KvDtypeKind>(layers: usize, pool: &PagedKvShape) -> Option<Self> {
        Some(Self {
            dtype: K::NAME,
            layers,
            block_size: pool.block_size,
            kv_heads: pool.kv_heads,
            head_dim: pool.head_dim,
            bytes: pool.block_bytes::<K>()?.len().checked_mul(layers)?,
        })
    }
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> StageRunner<B, K> {
    /// The layout of what the layers of this stage have of a block.
    pub(crate) fn kv_block_layout(&self) -> Result<KvBlockLayout> {
        let pool = self.pool();
        let alike = |layer: &KvLayer<B, K>| layer.group == 0 && layer.shape == pool;
        let windows = self.cache_groups().iter().any(|g| g.window.is_some());
        if windows || !self.kv.layers.iter().all(alike) {
            let reason =
                "the blocks of a model whose layers differ in window or heads cannot be moved";
            return Err(Error::invalid("kv_blocks", reason));
        }
        let layout = KvBlockLayout::of::<K>(self.kv.layers.len(), &pool);
        layout.ok_or_else(too_large)
    }

    /// Copies what the layers of this stage have of blocks to the host, a part for each block.
    pub(crate) fn read_kv_blocks(
        &mut self,
        blocks: &[BlockId],
        parts: &mut [&mut [u8]],
    ) -> Result<()> {
        let layout = self.kv_block_layout()?;
        let layer_bytes = layout.bytes / layout.layers;
        for (index, layer) in self.kv.layers.iter().enumerate() {
            let parts = parts.iter_mut();
            let parts = parts.map(|block| &mut block[index * layer_bytes..][..layer_bytes]);
            let mut wanted: Vec<_> = blocks.iter().copied().zip(parts).collect();
            B::kv_read_blocks(&mut self.ctx, layer, &mut wanted)?;
        }
        Ok(())
    }

    /// Writes the parts that [`read_kv_blocks`](Self::read_kv_blocks) gave.
    pub(crate) fn write_kv_blocks(&mut self, blocks: &[BlockId], parts: &[&[u8]]) -> Result<()> {
        let layout = self.kv_block_layout()?;
        let layer_bytes = layout.bytes / layout.layers;
        for (index, layer) in self.kv.layers.iter_mut().enumerate() {
            let parts = parts.iter();
            let parts = parts.map(|block| &block[index * layer_bytes..][..layer_bytes]);
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
    /// `InvalidArgument` when a block is larger than the address space, or layers differ in their blocks: with
    /// several cache groups (`KvLayout::Grouped`), or several sizes of heads.
    pub fn kv_block_layout(&self) -> Result<KvBlockLayout> {
        let mut all = self.stage.kv_block_layout()?;
        for stage in &self.earlier {
            let layout = stage.kv_block_layout()?;
            all.layers += layout.layers;
            all.bytes = all.bytes.checked_add(layout.bytes).ok_or_else(too_large)?;
        }
        Ok(all)
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
