//! Blocks of the KV pools and recurrent states over all layers, as bytes: what leaves a device, to host memory, to a file
//! or to another device, and comes back.
//!
//! A block is that of one cache group: its layers, one after the other. The layout is the same on every backend (that of
//! [`KvBlockBytes`](ferrum_kernels::KvBlockBytes); states are f32, little-endian), so blocks need the same cache elements
//! and sizes, and nothing else, to be understood.

pub use crate::kv_layer::KvBlockPart;
use crate::layer::LayerStates;
use crate::runner::{DecoderRunner, StageRunner};
use ferrum_kernels::{KvDtypeKind, LlmBackend, PagedKvShape};
use ferrum_types::{BlockId, Error, Result, StateSlot};
use std::ops::Range;

/// What the bytes of a block of a cache group are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBlockLayout {
    /// Element of the cache, as in `--kv-dtype`.
    pub dtype: &'static str,
    /// Tokens of a block.
    pub block_size: usize,
    /// Keys that a query of these layers sees; `None`: all before it.
    pub window: Option<usize>,
    /// Layers of the group, which lie one after the other.
    pub layers: Vec<KvBlockPart>,
    /// Bytes of a block over all of them.
    pub bytes: usize,
}

/// What the bytes of the recurrent states of a sequence are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Numbers of each layer that has a state, which lie one after the other.
    pub layers: Vec<usize>,
    /// Bytes over all of them.
    pub bytes: usize,
}

impl StateLayout {
    fn of(layers: Vec<usize>) -> Result<Self> {
        let numbers = layers.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        let bytes = numbers.and_then(|numbers| numbers.checked_mul(size_of::<f32>()));
        let bytes = bytes.ok_or_else(too_large)?;
        Ok(Self { layers, bytes })
    }
}

impl KvBlockLayout {
    /// The layout of the pools of some layers; `None` when a block is larger than the address space.
    pub fn of<'a, K: KvDtypeKind>(
        (block_size, window): (usize, Option<usize>),
        pools: impl IntoIterator<Item = &'a PagedKvShape>,
    ) -> Option<Self> {
        let parts = pools.into_iter().map(KvBlockPart::of::<K>);
        Self::of_parts(K::NAME, (block_size, window), parts.collect::<Option<_>>()?)
    }

    fn of_parts(
        dtype: &'static str,
        (block_size, window): (usize, Option<usize>),
        layers: Vec<KvBlockPart>,
    ) -> Option<Self> {
        let mut sizes = layers.iter().map(|part| part.bytes);
        Some(Self {
            dtype,
            block_size,
            window,
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

impl<B: LlmBackend> StageRunner<B> {
    /// The layout of what the layers of this stage have of a block of a cache group.
    pub(crate) fn kv_block_layout(&self, group: usize) -> Result<KvBlockLayout> {
        let group_of = self.cache_groups().get(group);
        let group_of = group_of.ok_or_else(|| no_group(group, self.cache_groups().len()))?;
        let layers = self.kv.layers.iter().filter(|layer| layer.group() == group);
        let parts = layers
            .map(|layer| layer.block_part())
            .collect::<Option<_>>();
        let sizes = (group_of.block_size, group_of.window);
        let layout = parts.and_then(|parts| KvBlockLayout::of_parts(self.kv.dtype, sizes, parts));
        layout.ok_or_else(too_large)
    }

    /// Copies what the layers of this stage have of blocks of a group to the host, a part for each block.
    pub(crate) fn read_kv_blocks(
        &mut self,
        group: usize,
        blocks: &[BlockId],
        parts: &mut [&mut [u8]],
    ) -> Result<()> {
        let layout = self.kv_block_layout(group)?;
        let layers = self.kv.layers.iter().filter(|layer| layer.group() == group);
        for (layer, place) in layers.zip(layout.parts()) {
            let parts = parts.iter_mut().map(|block| &mut block[place.clone()]);
            let mut wanted: Vec<_> = blocks.iter().copied().zip(parts).collect();
            layer.read_blocks(&mut self.ctx, &mut wanted)?;
        }
        Ok(())
    }

    /// Writes the parts that [`read_kv_blocks`](Self::read_kv_blocks) gave.
    pub(crate) fn write_kv_blocks(
        &mut self,
        group: usize,
        blocks: &[BlockId],
        parts: &[&[u8]],
    ) -> Result<()> {
        let layout = self.kv_block_layout(group)?;
        let layers = self.kv.layers.iter_mut();
        let layers = layers.filter(|layer| layer.group() == group);
        for (layer, place) in layers.zip(layout.parts()) {
            let parts = parts.iter().map(|block| &block[place.clone()]);
            let blocks: Vec<_> = blocks.iter().copied().zip(parts).collect();
            layer.write_blocks(&mut self.ctx, &blocks)?;
        }
        Ok(())
    }

    /// Numbers of each state of this stage.
    pub(crate) fn state_elements(&self) -> Vec<usize> {
        let states = self.states.iter();
        states.map(|layer| layer.shape.elements).collect()
    }

    /// Copies the states in a slot to the host, layer after layer.
    pub(crate) fn read_state(&mut self, slot: StateSlot, mut out: &mut [u8]) -> Result<()> {
        for LayerStates { states, shape } in &self.states {
            let mut numbers = vec![0f32; shape.elements];
            let first = slot.0 as usize * shape.elements;
            B::read(&mut self.ctx, states, first, &mut numbers)?;
            let (own, behind) = out.split_at_mut(shape.elements * size_of::<f32>());
            for (to, number) in own.as_chunks_mut().0.iter_mut().zip(numbers) {
                *to = number.to_le_bytes();
            }
            out = behind;
        }
        Ok(())
    }

    /// Writes what [`read_state`](Self::read_state) gave.
    pub(crate) fn write_state(&mut self, slot: StateSlot, mut bytes: &[u8]) -> Result<()> {
        for LayerStates { states, shape } in &mut self.states {
            let (own, behind) = bytes.split_at(shape.elements * size_of::<f32>());
            let numbers = own.as_chunks().0.iter();
            let numbers: Vec<f32> = numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let first = slot.0 as usize * shape.elements;
            B::write(&mut self.ctx, states, first, &numbers)?;
            bytes = behind;
        }
        Ok(())
    }
}

impl<B: LlmBackend> DecoderRunner<B> {
    /// What [`read_kv_blocks`](Self::read_kv_blocks) gives of a cache group: its layers of all stages. Which stages there
    /// are changes nothing of it.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such group, or a block is larger than the address space.
    pub fn kv_block_layout(&self, group: usize) -> Result<KvBlockLayout> {
        let own = self.stage.kv_block_layout(group)?;
        let (mut layers, mut bytes) = (Vec::new(), own.bytes);
        for stage in &self.earlier {
            let layout = stage.kv_block_layout(group)?;
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

    /// Waits for the steps that were submitted and copies blocks of a cache group to the host, `[blocks, block bytes]`.
    ///
    /// # Errors
    /// `InvalidArgument` for a group or a block that is not there; `Shape` when `out` is not of that length; what the
    /// device says.
    pub fn read_kv_blocks(
        &mut self,
        group: usize,
        blocks: &[BlockId],
        out: &mut [u8],
    ) -> Result<()> {
        let layout = self.check_block_copy("read_kv_blocks", (group, blocks), out.len())?;
        let mut rest: Vec<_> = out.chunks_exact_mut(layout.bytes.max(1)).collect();
        for stage in &mut self.earlier {
            let len = stage.kv_block_layout(group)?.bytes;
            let parts = rest.iter_mut().map(|block| {
                let (part, behind) = std::mem::take(block).split_at_mut(len);
                *block = behind;
                part
            });
            stage.read_kv_blocks(group, blocks, &mut parts.collect::<Vec<_>>())?;
        }
        self.stage.read_kv_blocks(group, blocks, &mut rest)
    }

    /// Writes blocks of a cache group, as [`read_kv_blocks`](Self::read_kv_blocks) gave them, behind the steps that were
    /// submitted and before those that will be.
    ///
    /// # Errors
    /// Those of [`read_kv_blocks`](Self::read_kv_blocks).
    pub fn write_kv_blocks(
        &mut self,
        group: usize,
        blocks: &[BlockId],
        bytes: &[u8],
    ) -> Result<()> {
        let layout = self.check_block_copy("write_kv_blocks", (group, blocks), bytes.len())?;
        let mut rest: Vec<_> = bytes.chunks_exact(layout.bytes.max(1)).collect();
        for stage in &mut self.earlier {
            let len = stage.kv_block_layout(group)?.bytes;
            let parts = rest.iter_mut().map(|block| {
                let (part, behind) = block.split_at(len);
                *block = behind;
                part
            });
            stage.write_kv_blocks(group, blocks, &parts.collect::<Vec<_>>())?;
        }
        self.stage.write_kv_blocks(group, blocks, &rest)
    }

    /// What [`read_state`](Self::read_state) gives, the layers of all stages; `None` for a model without recurrent
    /// states.
    ///
    /// # Errors
    /// `InvalidArgument` when a state is larger than the address space.
    pub fn state_layout(&self) -> Result<Option<StateLayout>> {
        let earlier = self.earlier.iter().flat_map(|stage| stage.state_elements());
        let layers: Vec<_> = earlier.chain(self.stage.state_elements()).collect();
        match layers.is_empty() {
            true => Ok(None),
            false => StateLayout::of(layers).map(Some),
        }
    }

    /// Waits for the steps that were submitted and copies the recurrent states of a slot to the host.
    ///
    /// # Errors
    /// `InvalidArgument` for a slot that is not there; `Shape` when `out` is not of the length that
    /// [`state_layout`](Self::state_layout) says; what the device says.
    pub fn read_state(&mut self, slot: StateSlot, mut out: &mut [u8]) -> Result<()> {
        self.check_state_copy("read_state", slot, out.len())?;
        for stage in &mut self.earlier {
            let len = stage.state_elements().iter().sum::<usize>() * size_of::<f32>();
            let (own, behind) = out.split_at_mut(len);
            stage.read_state(slot, own)?;
            out = behind;
        }
        self.stage.read_state(slot, out)
    }

    /// Writes what [`read_state`](Self::read_state) gave to a slot, behind the steps that were submitted and before those
    /// that will be.
    ///
    /// # Errors
    /// Those of [`read_state`](Self::read_state).
    pub fn write_state(&mut self, slot: StateSlot, mut bytes: &[u8]) -> Result<()> {
        self.check_state_copy("write_state", slot, bytes.len())?;
        for stage in &mut self.earlier {
            let len = stage.state_elements().iter().sum::<usize>() * size_of::<f32>();
            let (own, behind) = bytes.split_at(len);
            stage.write_state(slot, own)?;
            bytes = behind;
        }
        self.stage.write_state(slot, bytes)
    }

    /// Holds blocks and the length of their bytes against the pool, before any layer is touched.
    fn check_block_copy(
        &self,
        op: &'static str,
        (group, blocks): (usize, &[BlockId]),
        found: usize,
    ) -> Result<KvBlockLayout> {
        let layout = self.kv_block_layout(group)?;
        check_bytes(op, found, layout.bytes.saturating_mul(blocks.len()))?;
        let pool = self.stage.cache_groups().get(group);
        let pool = pool.map_or(0, |group| group.blocks);
        match blocks.iter().find(|block| block.0 as usize >= pool) {
            None => Ok(layout),
            Some(block) => {
                let reason = format!("block {}, the pool has {pool} blocks", block.0);
                Err(Error::invalid(op, reason))
            }
        }
    }

    /// The same for the states of a slot.
    fn check_state_copy(&self, op: &'static str, slot: StateSlot, found: usize) -> Result<()> {
        let layout = self.state_layout()?;
        check_bytes(op, found, layout.map_or(0, |layout| layout.bytes))?;
        let slots = self.state_slots().map_or(0, |slots| slots.count());
        match (slot.0 as usize) < slots {
            true => Ok(()),
            false => {
                let reason = format!("state slot {}, there are {slots}", slot.0);
                Err(Error::invalid(op, reason))
            }
        }
    }
}

fn check_bytes(op: &'static str, found: usize, expected: usize) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::Shape {
            op,
            what: "bytes of the cache",
            found,
            expected,
        }),
    }
}

fn no_group(group: usize, groups: usize) -> Error {
    let reason = format!("cache group {group}, there are {groups}");
    Error::invalid("kv_blocks", reason)
}

fn too_large() -> Error {
    Error::invalid("kv_blocks", "a block is too large for a file")
}
