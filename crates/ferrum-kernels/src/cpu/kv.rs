//! The paged cache: writes through block tables and attention over a ragged batch. How a pool lies is
//! [`ferrum_simd::kv`]'s.

mod blocks;

use super::heads::projection;
use super::{CpuBackend, CpuContext};
use crate::backend::*;
use ferrum_simd::kv::{CpuKvElement, CpuKvScales, Pools, PoolsMut};
use ferrum_simd::memory::CpuBuffer;
use ferrum_types::{BlockId, Result};

/// The host's view of a batch, with the block tables of a cache group. The op's own check has seen the lengths.
fn on_host<'a>(
    op: &'static str,
    batch: &'a DeviceBatch<CpuBackend>,
    group: usize,
) -> Result<check::Batch<'a>> {
    let buffers = [
        &batch.query_starts,
        &batch.kv_lens,
        &batch.block_tables[group],
    ];
    check::Batch::new(op, batch.shape, buffers.map(CpuBuffer::as_slice))
}

/// Checks that a pool is what its shape says.
fn check_pool<K: CpuKvElement>(op: &'static str, kv: &KvLayer<CpuBackend, K>) -> Result<()> {
    let scales = [kv.scales.k.len(), kv.scales.v.len()];
    check::kv_pool::<K>(op, &kv.shape, [kv.k.len(), kv.v.len()], scales)
}

fn pools_mut<K: CpuKvElement>(kv: &mut KvLayer<CpuBackend, K>) -> PoolsMut<'_, K> {
    PoolsMut {
        k: kv.k.as_mut_slice(),
        v: kv.v.as_mut_slice(),
        scales: &mut kv.scales,
        shape: kv.shape,
    }
}

/// The names of paged attention come with the contract.
impl BackendPagedKv for CpuBackend {}
impl BackendInt8KvOps for CpuBackend {}

impl<K: CpuKvElement> BackendKvDtype<K> for CpuBackend {
    type KvBuffer = CpuBuffer<K::Stored>;
    type KvScales = CpuKvScales;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        let lens = check::kv_shape("alloc_kv_layer", &shape)?;
        let scales = |heads: usize| vec![0.0; if K::SCALED { heads } else { 0 }];
        Ok(KvLayer {
            k: CpuBuffer::zeroed(lens.keys)?,
            v: CpuBuffer::zeroed(lens.values)?,
            scales: CpuKvScales {
                k: scales(lens.key_heads),
                v: scales(lens.value_heads),
            },
            shape,
            group: 0,
        })
    }

    fn kv_append(
        ctx: &mut CpuContext,
        kv: &mut KvLayer<Self, K>,
        k: &CpuBuffer<f32>,
        v: &CpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append";
        check_pool(op, kv)?;
        let [keys, values] = check::kv_append((kv.group, &kv.shape), k, v, batch)?;
        let on_host = on_host(op, batch, kv.group)?;
        let from = (&k.as_slice()[..keys], &v.as_slice()[..values]);
        K::append(ctx.parts(), pools_mut(kv), from, &on_host)
    }

    fn kv_append_qkv(
        ctx: &mut CpuContext,
        input: PagedQkv<'_, Self>,
        q: &mut CpuBuffer<f32>,
        kv: &mut KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append_qkv";
        check_pool(op, kv)?;
        let shape = input.shape;
        let lens = check::kv_append_qkv((kv.group, &kv.shape), &input, q, batch)?;
        let projection = projection(op, input.qkv, input.transform, shape)?;
        let on_host = on_host(op, batch, kv.group)?;
        let q = &mut q.as_mut_slice()[..lens.q];
        K::append_projection(ctx.parts(), pools_mut(kv), projection, q, &on_host)
    }

    fn kv_attention(
        ctx: &mut CpuContext,
        q: &CpuBuffer<f32>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&CpuBuffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut CpuBuffer<f32>,
        config: &AttnConfig,
    ) -> Result<()> {
        let op = "kv_attention";
        check_pool(op, kv)?;
        let [q_len, out_len] =
            check::kv_attention((kv.group, &kv.shape), q, sinks, batch, out, config)?;
        let pools = Pools::<K> {
            k: kv.k.as_slice(),
            v: kv.v.as_slice(),
            scales: &kv.scales,
            shape: kv.shape,
        };
        let q = (&q.as_slice()[..q_len], sinks.map(CpuBuffer::as_slice));
        let on_host = on_host(op, batch, kv.group)?;
        let out = &mut out.as_mut_slice()[..out_len];
        K::attention(ctx.parts(), pools, q, on_host, out, config)
    }

    fn kv_copy_blocks(
        _: &mut CpuContext,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        let op = "kv_copy_blocks";
        check_pool(op, kv)?;
        let blocks = kv.shape.blocks;
        check::kv_copy_blocks(blocks, pairs)?;
        for pair in pairs {
            copy_block(kv.k.as_mut_slice(), blocks, pair);
            copy_block(kv.v.as_mut_slice(), blocks, pair);
            copy_block(&mut kv.scales.k, blocks, pair);
            copy_block(&mut kv.scales.v, blocks, pair);
        }
        Ok(())
    }

    fn kv_read_blocks(
        _: &mut CpuContext,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        check_pool("kv_read_blocks", kv)?;
        blocks::read(kv, blocks)
    }

    fn kv_write_blocks(
        _: &mut CpuContext,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        check_pool("kv_write_blocks", kv)?;
        blocks::write(kv, blocks)
    }
}

/// Copies a block of a pool of `blocks`, which lie one after the other.
fn copy_block<T: Copy>(pool: &mut [T], blocks: usize, (from, to): &(BlockId, BlockId)) {
    let len = pool.len() / blocks;
    let first = from.0 as usize * len;
    pool.copy_within(first..first + len, to.0 as usize * len);
}
