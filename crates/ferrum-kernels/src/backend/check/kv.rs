//! Paged caches and ragged batches.

use super::{attn_config, elements, heads, len, require};
use crate::backend::{
    Act, AttnConfig, Backend, BatchShape, DeviceBatch, HeadsShape, KvDtypeKind, PagedKvShape,
    PagedQkv, QkvShape,
};
use ferrum_types::{BlockId, Error, Result};

/// Elements of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLen {
    /// Keys.
    pub keys: usize,
    /// Values; none where keys hold them.
    pub values: usize,
    /// Vectors of keys: as many scales where the element has them.
    pub key_heads: usize,
    /// Vectors of values that are stored.
    pub value_heads: usize,
}

fn pool_len(op: &'static str, shape: &PagedKvShape) -> Result<PoolLen> {
    let heads = elements(op, &[shape.blocks, shape.kv_heads, shape.block_size])?;
    Ok(PoolLen {
        keys: elements(op, &[heads, shape.head_dim])?,
        values: elements(op, &[heads, shape.stored_value_dim()])?,
        key_heads: heads,
        value_heads: if shape.values_in_keys { 0 } else { heads },
    })
}

/// A pool to be allocated.
pub fn kv_shape(op: &'static str, shape: &PagedKvShape) -> Result<PoolLen> {
    let dims = [
        shape.blocks,
        shape.block_size,
        shape.kv_heads,
        shape.head_dim,
        shape.value_dim,
    ];
    require(op, !dims.contains(&0), || {
        format!("[blocks, block_size, kv_heads, head_dim, value_dim] is {dims:?}, expected no zero")
    })?;
    let PagedKvShape {
        head_dim,
        value_dim,
        values_in_keys,
        ..
    } = *shape;
    require(op, !values_in_keys || value_dim <= head_dim, || {
        format!("values of {value_dim} elements do not fit in keys of {head_dim}")
    })?;
    pool_len(op, shape)
}

/// A pool of latent rows.
pub fn latent_pool(op: &'static str, shape: &PagedKvShape) -> Result<()> {
    require(op, shape.values_in_keys && shape.kv_heads == 1, || {
        format!("{shape:?} is no pool of latent rows")
    })
}

/// A pool is what its shape says. `found` are the elements of keys and values, `scales` those of
/// their scales.
pub fn kv_pool<K: KvDtypeKind>(
    op: &'static str,
    shape: &PagedKvShape,
    found: [usize; 2],
    scales: [usize; 2],
) -> Result<()> {
    require(op, shape.block_size > 0, || {
        "block_size is 0, expected at least 1".into()
    })?;
    let lens = pool_len(op, shape)?;
    Error::check_len(op, "k pool", found[0], lens.keys)?;
    Error::check_len(op, "v pool", found[1], lens.values)?;
    let scaled = |heads| if K::SCALED { heads } else { 0 };
    Error::check_len(op, "k scales", scales[0], scaled(lens.key_heads))?;
    Error::check_len(op, "v scales", scales[1], scaled(lens.value_heads))
}

/// Every token of a batch belongs to a sequence, and there is a start of each.
pub(super) fn sequences<B: Backend>(op: &'static str, batch: &DeviceBatch<B>) -> Result<()> {
    let BatchShape { tokens, seqs, .. } = batch.shape;
    require(op, tokens == 0 || seqs > 0, || {
        format!("{tokens} tokens belong to no sequence")
    })?;
    let starts = seqs.saturating_add(1);
    len(op, "query_starts", &batch.query_starts, starts)
}

/// The buffers of a batch are as long as its sizes say.
fn batch<B: Backend>(op: &'static str, batch: &DeviceBatch<B>, group: usize) -> Result<()> {
    let BatchShape {
        seqs, table_stride, ..
    } = batch.shape;
    sequences(op, batch)?;
    len(op, "kv_lens", &batch.kv_lens, seqs)?;
    let tables = elements(op, &[seqs, table_stride])?;
    let found = batch.block_tables.get(group).ok_or_else(|| {
        let groups = batch.block_tables.len();
        let reason =
            format!("the pool is of cache group {group}, the batch has tables of {groups}");
        Error::invalid(op, reason)
    })?;
    len(op, "block_tables", found, tables)
}

/// [`kv_append`](crate::BackendKvDtype::kv_append) to a pool of a group and shape: elements of `k`, and of `v`.
pub fn kv_append<B: Backend>(
    (group, shape): (usize, &PagedKvShape),
    k: &Act<B>,
    v: &Act<B>,
    batch: &DeviceBatch<B>,
) -> Result<[usize; 2]> {
    let op = "kv_append";
    let vectors = |head_dim| HeadsShape {
        tokens: batch.shape.tokens,
        heads: shape.kv_heads,
        head_dim,
    };
    let keys = heads::heads(op, vectors(shape.head_dim))?;
    let values = heads::heads(op, vectors(shape.stored_value_dim()))?;
    len(op, "k", k, keys)?;
    len(op, "v", v, values)?;
    self::batch(op, batch, group)?;
    Ok([keys, values])
}

/// [`kv_append_qkv`](crate::BackendKvDtype::kv_append_qkv) to a pool of a group and shape.
pub fn kv_append_qkv<B: Backend>(
    (group, shape): (usize, &PagedKvShape),
    input: &PagedQkv<'_, B>,
    q: &Act<B>,
    batch: &DeviceBatch<B>,
) -> Result<heads::QkvLen> {
    let op = "kv_append_qkv";
    let sizes = |tokens, kv_heads, dims: [usize; 2]| [tokens, kv_heads, dims[0], dims[1]];
    let QkvShape {
        tokens,
        kv_heads,
        head_dim,
        value_dim,
        ..
    } = input.shape;
    let found = sizes(tokens, kv_heads, [head_dim, value_dim]);
    let dims = [shape.head_dim, shape.stored_value_dim()];
    let expected = sizes(batch.shape.tokens, shape.kv_heads, dims);
    require(op, found == expected, || {
        format!(
            "[tokens, kv_heads, head_dim, value_dim] is {found:?}, batch and pool have {expected:?}"
        )
    })?;
    let lens = heads::projection(op, input.qkv, input.transform, input.shape)?;
    len(op, "q", q, lens.q)?;
    self::batch(op, batch, group)?;
    Ok(lens)
}

/// [`kv_attention`](crate::BackendKvDtype::kv_attention) over a pool of a group and shape: elements of `q`, and of
/// `out`.
pub fn kv_attention<B: Backend>(
    (group, shape): (usize, &PagedKvShape),
    q: &Act<B>,
    sinks: Option<&B::Buffer<f32>>,
    batch: &DeviceBatch<B>,
    out: &Act<B>,
    config: &AttnConfig,
) -> Result<[usize; 2]> {
    let op = "kv_attention";
    attn_config(op, config)?;
    let found = [config.kv_heads, config.head_dim, config.value_dim];
    let expected = [shape.kv_heads, shape.head_dim, shape.value_dim];
    require(op, found == expected, || {
        format!("[kv_heads, head_dim, value_dim] is {found:?}, the pool has {expected:?}")
    })?;
    let queries = |head_dim| HeadsShape {
        tokens: batch.shape.tokens,
        heads: config.heads,
        head_dim,
    };
    let q_len = heads::heads(op, queries(config.head_dim))?;
    let out_len = heads::heads(op, queries(config.value_dim))?;
    len(op, "q", q, q_len)?;
    len(op, "out", out, out_len)?;
    if let Some(sinks) = sinks {
        len(op, "sinks", sinks, config.heads)?;
    }
    self::batch(op, batch, group)?;
    Ok([q_len, out_len])
}

/// [`kv_copy_blocks`](crate::BackendKvDtype::kv_copy_blocks) in a pool of `blocks`.
pub fn kv_copy_blocks(blocks: usize, pairs: &[(BlockId, BlockId)]) -> Result<()> {
    let outside = |(from, to): &&(BlockId, BlockId)| from.0.max(to.0) as usize >= blocks;
    match pairs.iter().find(outside) {
        None => Ok(()),
        Some((from, to)) => {
            let reason = format!("block {} to {}, the pool has {blocks} blocks", from.0, to.0);
            Err(Error::invalid("kv_copy_blocks", reason))
        }
    }
}
