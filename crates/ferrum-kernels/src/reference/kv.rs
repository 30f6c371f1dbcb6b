//! The paged cache: writes through block tables and attention over a ragged batch.
//!
//! A pool is laid out as its meaning says: `[blocks, kv_heads, block_size, head_dim]`. The five
//! element types differ only in how one head is stored and read back ([`KvCodec`]).

use super::ReferenceBackend;
use super::attention::{attend, check_config};
use super::buffer::{RefBuffer, elements, index, require};
use super::core::RefContext;
use super::heads::{heads_len, split};
use crate::backend::*;
use ferrum_quant::{float8, int8};
use ferrum_types::{BlockId, Element, Error, FloatElement, Result};
use half::{bf16, f16};
use std::ops::Range;

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
            *stored = float8::e4m3_from_f32(x);
        }
        1.0
    }

    fn decode(stored: u8) -> f32 {
        float8::e4m3_to_f32(stored)
    }
}

impl KvCodec for KvInt8 {
    type Stored = i8;

    fn encode(head: &[f32], stored: &mut [i8]) -> f32 {
        int8::quantize_row(head, stored)
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

/// One sequence of a checked batch.
struct Sequence<'a> {
    /// Its tokens in the flat batch.
    tokens: Range<usize>,
    /// Key index of its first token in this step.
    first_index: usize,
    kv_len: usize,
    table: &'a [i32],
}

/// Reads a batch back into sequences and checks that it is consistent.
fn sequences<'a>(
    op: &'static str,
    batch: &'a DeviceBatch<ReferenceBackend>,
) -> Result<Vec<Sequence<'a>>> {
    let BatchShape {
        tokens,
        seqs,
        table_stride,
        ..
    } = batch.shape;
    let starts = batch
        .query_starts
        .first(op, "query_starts", seqs.saturating_add(1))?;
    let kv_lens = batch.kv_lens.first(op, "kv_lens", seqs)?;
    let token_seqs = batch.token_seqs.first(op, "token_seqs", tokens)?;
    let tables =
        batch
            .block_tables
            .first(op, "block_tables", elements(op, &[seqs, table_stride])?)?;
    require(
        op,
        starts[0] == 0 && starts[seqs] as usize == tokens,
        || {
            let (first, last) = (starts[0], starts[seqs]);
            format!("query_starts go from {first} to {last}, expected 0 to {tokens}")
        },
    )?;

    let mut sequences = Vec::with_capacity(seqs);
    for s in 0..seqs {
        let start = index(op, "query_starts", starts[s], tokens + 1)?;
        let end = index(op, "query_starts", starts[s + 1], tokens + 1)?;
        require(op, start <= end, || {
            format!("query_starts decrease from {start} to {end} at sequence {s}")
        })?;
        let kv_len = index(op, "kv_lens", kv_lens[s], i32::MAX as usize)?;
        let query_len = end - start;
        require(op, query_len <= kv_len || query_len == 0, || {
            format!(
                "sequence {s} has {query_len} tokens and {kv_len} keys, expected at least as many"
            )
        })?;
        let BatchShape {
            max_query_len,
            max_kv_len,
            ..
        } = batch.shape;
        require(
            op,
            query_len <= max_query_len && (kv_len <= max_kv_len || query_len == 0),
            || {
                format!(
                    "sequence {s} has {query_len} tokens and {kv_len} keys, \
                 the batch announces at most {max_query_len} and {max_kv_len}"
                )
            },
        )?;
        if let Some(t) = (start..end).find(|&t| token_seqs[t] as usize != s) {
            let found = token_seqs[t];
            let reason = format!("token_seqs[{t}] is {found}, expected {s}");
            return Err(Error::invalid(op, reason));
        }
        sequences.push(Sequence {
            tokens: start..end,
            first_index: kv_len.saturating_sub(query_len),
            kv_len,
            table: &tables[s * table_stride..][..table_stride],
        });
    }
    Ok(sequences)
}

impl Sequence<'_> {
    /// Where the token with key index `at` lies: its block and its slot there.
    fn slot(&self, op: &'static str, shape: PagedKvShape, at: usize) -> Result<(usize, usize)> {
        let entry = at / shape.block_size;
        let Some(&id) = self.table.get(entry) else {
            let len = self.table.len();
            let reason = format!("key {at} needs block table entry {entry}, the table has {len}");
            return Err(Error::invalid(op, reason));
        };
        Ok((
            index(op, "a block id", id, shape.blocks)?,
            at % shape.block_size,
        ))
    }
}

/// Index of a head among all heads of a pool.
fn head_at(shape: PagedKvShape, (block, slot): (usize, usize), kv_head: usize) -> usize {
    (block * shape.kv_heads + kv_head) * shape.block_size + slot
}

/// Checks that a pool is what its shape says, and returns its number of heads (of all tokens).
fn check_pool<K: KvCodec>(op: &'static str, kv: &KvLayer<ReferenceBackend, K>) -> Result<usize> {
    let PagedKvShape {
        blocks,
        block_size,
        kv_heads,
        head_dim,
    } = kv.shape;
    require(op, block_size > 0, || {
        "block_size is 0, expected at least 1".into()
    })?;
    let heads = elements(op, &[blocks, kv_heads, block_size])?;
    let size = elements(op, &[heads, head_dim])?;
    Error::check_len(op, "k pool", kv.k.len(), size)?;
    Error::check_len(op, "v pool", kv.v.len(), size)?;
    if K::SCALED {
        Error::check_len(op, "k scales", kv.scales.k.len(), heads)?;
        Error::check_len(op, "v scales", kv.scales.v.len(), heads)?;
    }
    Ok(heads)
}

/// Writes one head to a pool.
fn store<K: KvCodec>(pool: &mut [K::Stored], scales: &mut [f32], head: usize, values: &[f32]) {
    let scale = K::encode(values, &mut pool[head * values.len()..][..values.len()]);
    if K::SCALED {
        scales[head] = scale;
    }
}

/// Writes token-major `k` and `v` of the batch's tokens.
fn append<K: KvCodec>(
    op: &'static str,
    kv: &mut KvLayer<ReferenceBackend, K>,
    k: &[f32],
    v: &[f32],
    batch: &DeviceBatch<ReferenceBackend>,
) -> Result<()> {
    check_pool(op, kv)?;
    let PagedKvShape {
        kv_heads, head_dim, ..
    } = kv.shape;
    // All slots are found before the first write, so that an error leaves the pool as it was.
    let mut writes = Vec::with_capacity(batch.shape.tokens);
    for sequence in sequences(op, batch)? {
        for (i, token) in sequence.tokens.clone().enumerate() {
            writes.push((
                token,
                sequence.slot(op, kv.shape, sequence.first_index + i)?,
            ));
        }
    }
    for (token, slot) in writes {
        for kv_head in 0..kv_heads {
            let from = (token * kv_heads + kv_head) * head_dim;
            let to = head_at(kv.shape, slot, kv_head);
            store::<K>(&mut kv.k.0, &mut kv.scales.k, to, &k[from..][..head_dim]);
            store::<K>(&mut kv.v.0, &mut kv.scales.v, to, &v[from..][..head_dim]);
        }
    }
    Ok(())
}

/// The names of paged attention come with the contract.
impl BackendPagedKv for ReferenceBackend {}

/// The names of the INT8 cache come with the contract.
impl BackendInt8KvOps for ReferenceBackend {}

impl<K: KvCodec> BackendKvDtype<K> for ReferenceBackend {
    type KvBuffer = RefBuffer<K::Stored>;
    type KvScales = RefKvScales;

    fn alloc_kv_layer(&self, shape: PagedKvShape) -> Result<KvLayer<Self, K>> {
        let op = "alloc_kv_layer";
        let PagedKvShape {
            blocks,
            block_size,
            kv_heads,
            head_dim,
        } = shape;
        let dims = [blocks, block_size, kv_heads, head_dim];
        require(op, !dims.contains(&0), || {
            format!("[blocks, block_size, kv_heads, head_dim] is {dims:?}, expected no zero")
        })?;
        let size = elements(op, &dims)?;
        let heads = if K::SCALED { size / head_dim } else { 0 };
        Ok(KvLayer {
            k: self.alloc(size)?,
            v: self.alloc(size)?,
            scales: RefKvScales {
                k: self.alloc(heads)?.0,
                v: self.alloc(heads)?.0,
            },
            shape,
        })
    }

    fn kv_append(
        _: &mut RefContext,
        kv: &mut KvLayer<Self, K>,
        k: &RefBuffer<f32>,
        v: &RefBuffer<f32>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append";
        let PagedKvShape {
            kv_heads, head_dim, ..
        } = kv.shape;
        let tokens = batch.shape.tokens;
        let size = heads_len(
            op,
            HeadsShape {
                tokens,
                heads: kv_heads,
                head_dim,
            },
        )?;
        append(
            op,
            kv,
            k.first(op, "k", size)?,
            v.first(op, "v", size)?,
            batch,
        )
    }

    fn kv_append_qkv(
        _: &mut RefContext,
        input: PagedQkv<'_, Self>,
        q: &mut RefBuffer<f32>,
        kv: &mut KvLayer<Self, K>,
        batch: &DeviceBatch<Self>,
    ) -> Result<()> {
        let op = "kv_append_qkv";
        let QkvShape {
            tokens,
            kv_heads,
            head_dim,
            ..
        } = input.shape;
        let found = (tokens, kv_heads, head_dim);
        let expected = (batch.shape.tokens, kv.shape.kv_heads, kv.shape.head_dim);
        require(op, found == expected, || {
            format!("(tokens, kv_heads, head_dim) is {found:?}, batch and pool have {expected:?}")
        })?;
        let parts = split(op, input.qkv, input.transform, input.shape)?;
        let q = q.first_mut(op, "q", parts.q.len())?;
        append(op, kv, &parts.k, &parts.v, batch)?;
        q.copy_from_slice(&parts.q);
        Ok(())
    }

    fn kv_attention(
        _: &mut RefContext,
        q: &RefBuffer<f32>,
        kv: &KvLayer<Self, K>,
        sinks: Option<&RefBuffer<f32>>,
        batch: &DeviceBatch<Self>,
        out: &mut RefBuffer<f32>,
        config: &AttnConfig,
    ) -> Result<()> {
        let op = "kv_attention";
        check_pool(op, kv)?;
        let rule = check_config(op, config)?;
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *config;
        let (found, expected) = ((kv_heads, head_dim), (kv.shape.kv_heads, kv.shape.head_dim));
        require(op, found == expected, || {
            format!("(kv_heads, head_dim) is {found:?}, the pool has {expected:?}")
        })?;
        let size = heads_len(
            op,
            HeadsShape {
                tokens: batch.shape.tokens,
                heads,
                head_dim,
            },
        )?;
        let q = q.first(op, "q", size)?;
        let sinks = sinks
            .map(|sinks| sinks.first(op, "sinks", heads))
            .transpose()?;
        let out = out.first_mut(op, "out", size)?;

        for sequence in sequences(op, batch)? {
            for (i, token) in sequence.tokens.clone().enumerate() {
                let visible = rule.visible(sequence.first_index + i, sequence.kv_len);
                // Only visible keys need a block: those behind a sliding window may be gone.
                let slots = visible
                    .clone()
                    .map(|j| sequence.slot(op, kv.shape, j))
                    .collect::<Result<Vec<_>>>()?;
                let read = |pool: &[K::Stored], scales: &[f32], kv_head, j: usize, d| {
                    let at = head_at(kv.shape, slots[j - visible.start], kv_head);
                    let scale = if K::SCALED { scales[at] } else { 1.0 };
                    K::decode(pool[at * head_dim + d]) * scale
                };
                for head in 0..heads {
                    let kv_head = head / (heads / kv_heads);
                    let vector = (token * heads + head) * head_dim;
                    attend(
                        &q[vector..][..head_dim],
                        visible.clone(),
                        |j, d| read(&kv.k.0, &kv.scales.k, kv_head, j, d),
                        |j, d| read(&kv.v.0, &kv.scales.v, kv_head, j, d),
                        sinks.map(|sinks| sinks[head]),
                        rule,
                        &mut out[vector..][..head_dim],
                    );
                }
            }
        }
        Ok(())
    }

    fn kv_copy_blocks(
        _: &mut RefContext,
        kv: &mut KvLayer<Self, K>,
        pairs: &[(BlockId, BlockId)],
    ) -> Result<()> {
        let op = "kv_copy_blocks";
        check_pool(op, kv)?;
        let PagedKvShape {
            blocks,
            block_size,
            kv_heads,
            head_dim,
        } = kv.shape;
        if let Some(&(from, to)) = pairs
            .iter()
            .find(|(from, to)| from.0.max(to.0) as usize >= blocks)
        {
            let reason = format!("block {} to {}, the pool has {blocks} blocks", from.0, to.0);
            return Err(Error::invalid(op, reason));
        }
        let heads = kv_heads * block_size;
        for &(BlockId(from), BlockId(to)) in pairs {
            let copy = |len: usize| {
                (
                    from as usize * len..(from as usize + 1) * len,
                    to as usize * len,
                )
            };
            let (src, dst) = copy(heads * head_dim);
            kv.k.0.copy_within(src.clone(), dst);
            kv.v.0.copy_within(src, dst);
            if K::SCALED {
                let (src, dst) = copy(heads);
                kv.scales.k.copy_within(src.clone(), dst);
                kv.scales.v.copy_within(src, dst);
            }
        }
        Ok(())
    }
}
