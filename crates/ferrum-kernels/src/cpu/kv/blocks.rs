//! Blocks of a pool as bytes that every backend understands: keys, which lie transposed here, are put in the
//! order of their tokens, and back.

use crate::backend::{KvBlockBytes, KvLayer, PagedKvShape};
use crate::cpu::CpuBackend;
use ferrum_simd::kv::{CpuKvElement, chunk};
use ferrum_types::{BlockId, Element, Result};

pub(super) fn read<K: CpuKvElement>(
    kv: &KvLayer<CpuBackend, K>,
    blocks: &mut [(BlockId, &mut [u8])],
) -> Result<()> {
    let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
    let parts = kv.shape.check_block_bytes::<K>("kv_read_blocks", lengths)?;
    for (block, bytes) in blocks {
        let block = Block::new(*block, &kv.shape);
        let KvBlockBytes {
            keys,
            values,
            key_scales,
            value_scales,
        } = parts.clone();
        let size = size_of::<K::Stored>();
        let stored = block.of(kv.k.as_slice());
        transpose(&kv.shape, |from, to| {
            bytes[keys.start + to * size..][..size]
                .copy_from_slice(bytemuck::bytes_of(&stored[from]));
        });
        bytes[values].copy_from_slice(bytemuck::cast_slice(block.of(kv.v.as_slice())));
        bytes[key_scales].copy_from_slice(bytemuck::cast_slice(block.of(&kv.scales.k)));
        bytes[value_scales].copy_from_slice(bytemuck::cast_slice(block.of(&kv.scales.v)));
    }
    Ok(())
}

pub(super) fn write<K: CpuKvElement>(
    kv: &mut KvLayer<CpuBackend, K>,
    blocks: &[(BlockId, &[u8])],
) -> Result<()> {
    let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
    let parts = kv
        .shape
        .check_block_bytes::<K>("kv_write_blocks", lengths)?;
    for (block, bytes) in blocks {
        let block = Block::new(*block, &kv.shape);
        let size = size_of::<K::Stored>();
        let keys = &bytes[parts.keys.clone()];
        let stored = block.of_mut(kv.k.as_mut_slice());
        transpose(&kv.shape, |to, from| {
            bytemuck::bytes_of_mut(&mut stored[to]).copy_from_slice(&keys[from * size..][..size]);
        });
        let copy_values = bytemuck::cast_slice_mut(block.of_mut(kv.v.as_mut_slice()));
        copy_values.copy_from_slice(&bytes[parts.values.clone()]);
        let key_scales: &mut [u8] = bytemuck::cast_slice_mut(block.of_mut(&mut kv.scales.k));
        key_scales.copy_from_slice(&bytes[parts.key_scales.clone()]);
        let value_scales: &mut [u8] = bytemuck::cast_slice_mut(block.of_mut(&mut kv.scales.v));
        value_scales.copy_from_slice(&bytes[parts.value_scales.clone()]);
    }
    Ok(())
}

/// Which of a pool's equal parts is a block's.
#[derive(Clone, Copy)]
struct Block {
    index: usize,
    blocks: usize,
}

impl Block {
    fn new(BlockId(index): BlockId, shape: &PagedKvShape) -> Self {
        Self {
            index: index as usize,
            blocks: shape.blocks,
        }
    }

    fn of<T: Element>(self, pool: &[T]) -> &[T] {
        let len = pool.len() / self.blocks;
        &pool[self.index * len..][..len]
    }

    fn of_mut<T: Element>(self, pool: &mut [T]) -> &mut [T] {
        let len = pool.len() / self.blocks;
        &mut pool[self.index * len..][..len]
    }
}

/// Calls `pair` with the index of each element of a block's keys as they are stored, and its index among
/// `[kv_heads, block_size, head_dim]`.
#[inline(always)]
fn transpose(shape: &PagedKvShape, mut pair: impl FnMut(usize, usize)) {
    let PagedKvShape {
        block_size,
        kv_heads,
        head_dim,
        ..
    } = *shape;
    for head in 0..kv_heads {
        let start = head * block_size * head_dim;
        for slot in 0..block_size {
            let (first, width, column) = chunk(shape, slot);
            for i in 0..head_dim {
                pair(
                    start + first + i * width + column,
                    start + slot * head_dim + i,
                );
            }
        }
    }
}
