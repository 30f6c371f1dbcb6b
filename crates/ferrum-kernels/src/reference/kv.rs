//! The paged cache: writes through block tables and attention over a ragged batch.
//!
//! A pool is laid out as its meaning says: `[blocks, kv_heads, block_size, head_dim]`, with `value_dim` elements
//! for values. The five element types differ only in how one head is stored and read back ([`KvCodec`]).

use super::attention::attend;
use super::buffer::RefBuffer;
use super::core::RefContext;
use super::{Precision, Reference};
use crate::backend::*;
use ferrum_quant::{fp8_codec, kv_int8};
use ferrum_types::{BlockId, Element, FloatElement, Result};
use half::{bf16, f16};

/// How a head is stored in a cache of this element type.
pub trait KvCodec: KvDtypeKind {
    /// What the pool holds.
    type Stored: Element;

    /// Stores `head` and gives its scale (1 where the type has none).
    fn encode(head: &[f32], stored: &mut [Self::Stored]) -> f32;

    /// One element; its value is this times the scale.
    fn decode(stored: Self::Stored) -> f32;
}

macro_rules! float_codec {
    ($($kind:ty => $stored:ty),*) => {$(
        impl KvCodec for $kind {
            type Stored = $stored;

            fn encode(head: &[f32], stored: &mut [$stored]) -> f32 {
                for (stored, &x) in stored.iter_mut().zip(head) {
                    *stored = <$stored as FloatElement>::from_f32(x);
                }
                1.0
            }

            fn decode(stored: $stored) -> f32 {
                FloatElement::to_f32(stored)
            }
        }
    )*};
}
float_codec!(KvF32 => f32, KvFp16 => f16, KvBf16 => bf16);

impl KvCodec for KvFp8 {
    type Stored = u8;

    fn encode(head: &[f32], stored: &mut [u8]) -> f32 {
        for (stored, &x) in stored.iter_mut().zip(head) {
            *stored = fp8_codec::e4m3_from_f32(x);
        }
        1.0
    }

    fn decode(stored: u8) -> f32 {
        fp8_codec::e4m3_to_f32(stored)
    }
}

impl KvCodec for KvInt8 {
    type Stored = i8;

    fn encode(head: &[f32], stored: &mut [i8]) -> f32 {
        kv_int8::quantize_row(head, stored)
    }

    fn decode(stored: i8) -> f32 {
        f32::from(stored)
    }
}

/// Scales of one layer, each `[blocks, kv_heads, block_size]`; empty where the type has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RefKvScales {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

/// The batch as the host sees it, with the tables of a cache group; its lengths have been checked.
fn on_host<'a, P: Precision>(
    op: &'static str,
    batch: &'a DeviceBatch<Reference<P>>,
    group: usize,
) -> Result<check::Batch<'a>> {
    let buffers = [
        &batch.query_starts,
        &batch.kv_lens,
        &batch.block_tables[group],
    ];
    check::Batch::new(op, batch.shape, buffers.map(|buffer| buffer.0.as_slice()))
}

/// Index of a head among all heads of a pool.
fn head_at(shape: PagedKvShape, (block, slot): (usize, usize), kv_head: usize) -> usize {
    (block * shape.kv_heads + kv_head) * shape.block_size + slot
}

/// Checks that a pool is what its shape says.
fn check_pool<P: Precision, K: KvCodec>(
    op: &'static str,
    kv: &KvLayer<Reference<P>, K>,
) -> Result<()> {
    let scales = [kv.scales.k.len(), kv.scales.v.len()];
    check::kv_pool::<K>(op, &kv.shape, [kv.k.len(), kv.v.len()], scales)
}

/// What is read of a pool: its elements, their scales, and the elements of a head.
type Pool<'a, K> = (&'a [<K as KvCodec>::Stored], &'a [f32], usize);

/// Writes one head to a pool.
fn store<A: FloatElement, K: KvCodec>(
    pool: &mut [K::Stored],
    scales: &mut [f32],
    head: usize,
    values: &[A],
) {
    let floats: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    let scale = K::encode(&floats, &mut pool[head * values.len()..][..values.len()]);
    if K::SCALED {
        scales[head] = scale;
    }
}

/// Writes token-major `k` and `v` of the batch's tokens.
fn append<P: Precision, K: KvCodec>(
    op: &'static str,
    kv: &mut KvLayer<Reference<P>, K>,
    k: &[P::Act],
    v: &[P::Act],
    batch: &DeviceBatch<Reference<P>>,
) -> Result<()> {
    let PagedKvShape {
        kv_heads, head_dim, ..
    } = kv.shape;
    let value_dim = kv.shape.stored_value_dim();
    let on_host = on_host(op, batch, kv.group)?;
    // All slots are found before the first write, so that an error leaves the pool as it was.
    let mut writes = Vec::with_capacity(batch.shape.tokens);
    for s in 0..batch.shape.seqs {
        let sequence = on_host.sequence(op, s)?;
        for (i, token) in sequence.tokens.enumerate() {
            let at = sequence.first_index + i;
            writes.push((
                token,
                check::block_and_slot(op, on_host.table(s), &kv.shape, at)?,
            ));
        }
    }
    for (token, slot) in writes {
        for kv_head in 0..kv_heads {
            let from = token * kv_heads + kv_head;
            let to = head_at(kv.shape, slot, kv_head);
            let key = &k[from * head_dim..][..head_dim];
            store::<_, K>(&mut kv.k.0, &mut kv.scales.k, to, key);
            if !kv.shape.values_in_keys {
                let value = &v[from * value_dim..][..value_dim];
                store::<_, K>(&mut kv.v.0, &mut kv.scales.v, to, value);
            }
        }
    }
    Ok(())
}

/// The names of paged attention come with the contract.
impl<P: Precision> BackendPagedKv for Reference<P> {}

/// Compositions go through host memory, where the reference is anyway: their sums are in f64 and rounded once.
impl<P: Precision> BackendState for Reference<P> {}

/// The names of the INT8 cache come with the contract.
impl<P: Precision> BackendInt8KvOps for Reference<P> {}

impl<P: Precision, K: KvCodec> BackendKvDtype<K> for Reference<P> {
    type KvBuffer = RefBuffer<K::Stored>;
    type KvScales = RefKvScales;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        let op = "alloc_kv_layer";
        let lens = check::kv_shape(op, &shape)?;
        let scales = |heads| if K::SCALED { heads } else { 0 };
        Ok(KvLayer {
            k: self.alloc(lens.keys)?,
            v: self.alloc(lens.values)?,
            scales: RefKvScales {
                k: self.alloc(scales(lens.key_heads))?.0,
                v: self.alloc(scales(lens.value_heads))?.0,
            },
            shape,
            group: 0,
        })
    }

    fn kv_append(
        _: &mut RefContext<P>,
        kv: &mut KvLayer<Self, K>,
        k: &RefBuffer<P::Act>,
        v: &RefBuffer<P::Act>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append";
        check_pool(op, kv)?;
        check::kv_append::<Self>((kv.group, &kv.shape), k, v, batch)?;
        append(op, kv, &k.0, &v.0, batch)
    }

    fn kv_attention(
        _: &mut RefContext<P>,
        q: &RefBuffer<P::Act>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&RefBuffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut RefBuffer<P::Act>,
        config: &AttnConfig,
    ) -> Result<()> {
        let op = "kv_attention";
        check_pool(op, kv)?;
        check::kv_attention::<Self>((kv.group, &kv.shape), q, sinks, batch, out, config)?;
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            value_dim,
            ..
        } = *config;
        let on_host = on_host(op, batch, kv.group)?;

        for s in 0..batch.shape.seqs {
            let sequence = on_host.sequence(op, s)?;
            let visible = |i| config.visible(sequence.first_index + i, sequence.kv_len);
            // Only keys that some token sees need a block: those behind a sliding window may be gone.
            let seen = (0..sequence.tokens.len())
                .map(visible)
                .filter(|visible| !visible.is_empty())
                .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
                .unwrap_or(0..0);
            let slots = seen
                .clone()
                .map(|j| check::block_and_slot(op, on_host.table(s), &kv.shape, j))
                .collect::<Result<Vec<_>>>()?;
            // [kv_heads, slots, dim]: each element is read by many queries.
            let decoded = |(pool, scales, dim): Pool<'_, K>| {
                let places = (0..kv_heads)
                    .flat_map(|head| slots.iter().map(move |&slot| head_at(kv.shape, slot, head)));
                let mut all = Vec::with_capacity(kv_heads * slots.len() * dim);
                for at in places {
                    let scale = if K::SCALED { scales[at] } else { 1.0 };
                    let vector = &pool[at * dim..][..dim];
                    all.extend(vector.iter().map(|&x| K::decode(x) * scale));
                }
                all
            };
            let keys = decoded((&kv.k.0, &kv.scales.k, head_dim));
            let own_values = match kv.shape.values_in_keys {
                true => None,
                false => Some(decoded((&kv.v.0, &kv.scales.v, value_dim))),
            };
            let (values, value_row) = match &own_values {
                Some(values) => (values, value_dim),
                None => (&keys, head_dim),
            };
            for (i, token) in sequence.tokens.clone().enumerate() {
                for head in 0..heads {
                    let kv_head = head / (heads / kv_heads);
                    let vector = token * heads + head;
                    let row = |j: usize| kv_head * slots.len() + j - seen.start;
                    attend(
                        &q.0[vector * head_dim..][..head_dim],
                        visible(i),
                        |j, d| keys[row(j) * head_dim + d],
                        |j, d| values[row(j) * value_row + d],
                        sinks.map(|sinks| sinks.0[head]),
                        config,
                        &mut out.0[vector * value_dim..][..value_dim],
                    );
                }
            }
        }
        Ok(())
    }

    fn kv_copy_blocks(
        _: &mut RefContext<P>,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        let op = "kv_copy_blocks";
        check_pool(op, kv)?;
        let blocks = kv.shape.blocks;
        check::kv_copy_blocks(blocks, pairs)?;
        for pair in pairs {
            copy_block(&mut kv.k.0, blocks, pair);
            copy_block(&mut kv.v.0, blocks, pair);
            copy_block(&mut kv.scales.k, blocks, pair);
            copy_block(&mut kv.scales.v, blocks, pair);
        }
        Ok(())
    }

    fn kv_read_blocks(
        _: &mut RefContext<P>,
        kv: &KvLayer<Self, K>,
        blocks: &mut [(BlockId, &mut [u8])],
    ) -> Result<()> {
        let op = "kv_read_blocks";
        check_pool(op, kv)?;
        let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
        let parts = kv.shape.check_block_bytes::<K>(op, lengths)?;
        for (block, bytes) in blocks {
            copy_out(&kv.k.0, *block, &mut bytes[parts.keys.clone()]);
            copy_out(&kv.v.0, *block, &mut bytes[parts.values.clone()]);
            copy_out(&kv.scales.k, *block, &mut bytes[parts.key_scales.clone()]);
            copy_out(&kv.scales.v, *block, &mut bytes[parts.value_scales.clone()]);
        }
        Ok(())
    }

    fn kv_write_blocks(
        _: &mut RefContext<P>,
        kv: &mut KvLayer<Self, K>,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        let op = "kv_write_blocks";
        check_pool(op, kv)?;
        let lengths = blocks.iter().map(|(block, bytes)| (*block, bytes.len()));
        let parts = kv.shape.check_block_bytes::<K>(op, lengths)?;
        for (block, bytes) in blocks {
            copy_in(&bytes[parts.keys.clone()], &mut kv.k.0, *block);
            copy_in(&bytes[parts.values.clone()], &mut kv.v.0, *block);
            copy_in(&bytes[parts.key_scales.clone()], &mut kv.scales.k, *block);
            copy_in(&bytes[parts.value_scales.clone()], &mut kv.scales.v, *block);
        }
        Ok(())
    }
}

/// Copies a block of a pool of `blocks`, which lie one after the other.
fn copy_block<T: Copy>(pool: &mut [T], blocks: usize, (from, to): &(BlockId, BlockId)) {
    let len = pool.len() / blocks;
    let first = from.0 as usize * len;
    pool.copy_within(first..first + len, to.0 as usize * len);
}

/// Copies the bytes of a block of a pool, whose blocks lie one after the other.
fn copy_out<T: Element>(pool: &[T], BlockId(block): BlockId, to: &mut [u8]) {
    let pool: &[u8] = bytemuck::cast_slice(pool);
    to.copy_from_slice(&pool[block as usize * to.len()..][..to.len()]);
}

/// The way back.
fn copy_in<T: Element>(from: &[u8], pool: &mut [T], BlockId(block): BlockId) {
    let pool: &mut [u8] = bytemuck::cast_slice_mut(pool);
    pool[block as usize * from.len()..][..from.len()].copy_from_slice(from);
}
