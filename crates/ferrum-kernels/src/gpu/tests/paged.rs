//! The paged cache against the reference, and the exact bits of its 16-bit kinds.

use super::{compare, noise};
use crate::backend::*;
use ferrum_types::{BlockId, Result};

const TIGHT: f64 = 1e-12;

/// A sequence of a batch: tokens in this step, keys after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seq(pub(super) usize, pub(super) usize);

/// A batch over blocks that are handed out in a scrambled order.
pub(super) fn batch<B: Backend>(
    device: &B,
    seqs: &[Seq],
    block_size: usize,
    blocks: usize,
) -> Result<DeviceBatch<B>> {
    let table_stride = seqs
        .iter()
        .map(|s| s.1.div_ceil(block_size))
        .max()
        .unwrap_or(0)
        .max(1);
    let mut rope_rows = Vec::new();
    let mut query_starts = vec![0i32];
    let mut tables = vec![-1i32; seqs.len() * table_stride];
    let mut next = 0;
    for (s, &Seq(new, keys)) in seqs.iter().enumerate() {
        rope_rows.extend((keys - new..keys).map(|i| i as i32));
        query_starts.push(rope_rows.len() as i32);
        for entry in 0..keys.div_ceil(block_size) {
            // 7 and the number of blocks have no common factor, so that no block is given twice.
            tables[s * table_stride + entry] = ((next * 7 + 3) % blocks) as i32;
            next += 1;
        }
    }
    assert!(next <= blocks && !blocks.is_multiple_of(7));
    let kv_lens: Vec<i32> = seqs.iter().map(|s| s.1 as i32).collect();
    Ok(DeviceBatch {
        shape: BatchShape {
            tokens: rope_rows.len(),
            seqs: seqs.len(),
            table_stride,
            max_query_len: seqs.iter().map(|s| s.0).max().unwrap_or(0),
            max_kv_len: seqs.iter().map(|s| s.1).max().unwrap_or(0),
        },
        tokens: device.from_slice(&vec![0; rope_rows.len()])?,
        rope_rows: device.from_slice(&rope_rows)?,
        query_starts: device.from_slice(&query_starts)?,
        kv_lens: device.from_slice(&kv_lens)?,
        state_slots: device.alloc(0)?,
        block_tables: vec![device.from_slice(&tables)?],
    })
}

/// Two steps over a pool: prompts through the fused append, then more tokens through the plain one,
/// with attention after each.
fn two_steps<B, K>(
    device: &B,
    ctx: &mut B::Context,
    pool: PagedKvShape,
    config: &AttnConfig,
) -> Result<Vec<f32>>
where
    K: KvDtypeKind,
    B: BackendKvDtype<K, Act = f32>,
{
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *config;
    let mut kv = KvLayer::<B, K> {
        ..device.alloc_kv_layer(pool)?
    };
    let sinks = device.from_slice(&noise(50, heads))?;
    let mut all = Vec::new();

    let first = batch(
        device,
        &[Seq(3, 3), Seq(0, 0), Seq(70, 70), Seq(1, 1)],
        pool.block_size,
        pool.blocks,
    )?;
    let shape = QkvShape {
        tokens: first.shape.tokens,
        heads,
        kv_heads,
        head_dim,
        value_dim: head_dim,
    };
    let rot_dim = head_dim / 2 / 2 * 2;
    let cos = device.from_slice(&noise(51, 80 * rot_dim / 2))?;
    let sin = device.from_slice(&noise(52, 80 * rot_dim / 2))?;
    let weight = device.from_slice(&noise(53, head_dim))?;
    let rows = &first.rope_rows;
    let rope = Rope {
        cos: &cos,
        sin: &sin,
        rows,
        rot_dim,
        style: RopeStyle::HalfSplit,
    };
    let norm = QkNorm {
        weight: &weight,
        eps: 1e-6,
    };
    let transform = QkvTransform {
        q_norm: Some(norm),
        k_norm: Some(norm),
        rope: Some(rope),
    };
    let qkv = device.from_slice(&noise(54, shape.tokens * shape.row_dim()))?;
    let mut q = device.alloc(shape.q().len())?;
    let mut out = device.from_slice(&vec![f32::NAN; shape.q().len()])?;
    let input = PagedQkv {
        qkv: &qkv,
        transform,
        shape,
    };
    B::split_qkv_norm_rope_into_paged_cache(ctx, input, &mut q, &mut kv, &first)?;
    B::paged_attention(ctx, &q, &kv, Some(&sinks), &first, &mut out, config)?;
    all.extend(B::to_vec(ctx, &q)?);
    all.extend(B::to_vec(ctx, &out)?);

    // The same blocks, as they are handed out in the same order; the third sequence is done.
    let second = batch(
        device,
        &[Seq(1, 4), Seq(2, 2), Seq(0, 70), Seq(2, 3)],
        pool.block_size,
        pool.blocks,
    )?;
    let tokens = second.shape.tokens;
    let k = device.from_slice(&noise(55, tokens * kv_heads * head_dim))?;
    let v = device.from_slice(&noise(56, tokens * kv_heads * head_dim))?;
    let q = device.from_slice(&noise(57, tokens * heads * head_dim))?;
    B::kv_append(ctx, &mut kv, &k, &v, &second)?;
    let mut out = device.from_slice(&vec![f32::NAN; tokens * heads * head_dim])?;
    B::kv_attention(ctx, &q, &kv, None, &second, &mut out, config)?;
    all.extend(B::to_vec(ctx, &out)?);
    Ok(all)
}

#[test]
fn ragged_batches_in_every_kind() {
    for (block_size, head_dim, sliding_window) in [
        (16, 16, None),
        (5, 7, Some(9)),
        (64, 130, None),
        (1, 2, None),
    ] {
        let config = AttnConfig {
            heads: 4,
            kv_heads: 2,
            head_dim,
            value_dim: head_dim,
            scale: 0.3,
            causal: true,
            sliding_window,
            chunked: false,
            softcap: None,
        };
        // The tables of the two steps differ when a sequence grows into a new block, so that a few
        // keys are read that were never written: zeros in both backends.
        let pool = PagedKvShape {
            blocks: 80,
            block_size,
            kv_heads: 2,
            head_dim,
            value_dim: head_dim,
            values_in_keys: false,
        };
        let what = format!("{pool:?}");
        compare!(format!("f32 {what}"), TIGHT, |dev, ctx| {
            two_steps::<B, KvF32>(&dev, ctx, pool, &config)
        });
        // A key that rounds the other way after rotation is an error of half a unit.
        compare!(format!("f16 {what}"), 1e-7, |dev, ctx| {
            two_steps::<B, KvFp16>(&dev, ctx, pool, &config)
        });
        compare!(format!("bf16 {what}"), 1e-5, |dev, ctx| {
            two_steps::<B, KvBf16>(&dev, ctx, pool, &config)
        });
    }
}

/// What the pool makes of values: with one key, attention gives back the value itself.
fn through_the_pool<B, K>(device: &B, ctx: &mut B::Context, values: &[f32]) -> Result<Vec<f32>>
where
    K: KvDtypeKind,
    B: BackendKvDtype<K, Act = f32>,
{
    let n = values.len();
    let seqs = vec![Seq(1, 1); n];
    let batch = batch(device, &seqs, 1, n)?;
    let pool = PagedKvShape {
        blocks: n,
        block_size: 1,
        kv_heads: 1,
        head_dim: 1,
        value_dim: 1,
        values_in_keys: false,
    };
    let mut kv = KvLayer::<B, K> {
        ..device.alloc_kv_layer(pool)?
    };
    let v = device.from_slice(values)?;
    let zero = device.alloc(n)?;
    B::kv_append(ctx, &mut kv, &zero, &v, &batch)?;
    let config = AttnConfig {
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        value_dim: 1,
        scale: 1.0,
        causal: true,
        sliding_window: None,
        chunked: false,
        softcap: None,
    };
    let mut out = device.alloc(n)?;
    B::kv_attention(ctx, &zero, &kv, None, &batch, &mut out, &config)?;
    B::to_vec(ctx, &out)
}

#[test]
fn sixteen_bit_kinds_round_like_the_host() {
    // Around every exponent of f16: exact values, halves between neighbours, and beside them.
    let mut values = vec![
        0.0, -0.0, 1.0, 65504.0, 65519.9, -3.0e-8, 2.9e-8, 5.0e-8, 6.1e-5,
    ];
    for exponent in -26..15 {
        let unit = 2f32.powi(exponent);
        for steps in [0.0, 0.5, 1.0, 1.5, 2.5, 1023.5, 1024.5] {
            let x = unit * (1.0 + steps / 1024.0);
            values.extend([x, -x * (1.0 + f32::EPSILON), x * (1.0 - f32::EPSILON)]);
        }
    }
    if values.len().is_multiple_of(7) {
        values.push(0.1);
    }
    compare!("f16", 0.0, |dev, ctx| {
        through_the_pool::<B, KvFp16>(&dev, ctx, &values)
    });
    compare!("bf16", 0.0, |dev, ctx| {
        through_the_pool::<B, KvBf16>(&dev, ctx, &values)
    });
}

#[test]
fn blocks_are_copied_in_order() {
    let pool = PagedKvShape {
        blocks: 10,
        block_size: 3,
        kv_heads: 2,
        head_dim: 5,
        value_dim: 5,
        values_in_keys: false,
    };
    let config = AttnConfig {
        heads: 2,
        kv_heads: 2,
        head_dim: 5,
        value_dim: 5,
        scale: 1.0,
        causal: true,
        sliding_window: None,
        chunked: false,
        softcap: None,
    };
    compare!("copied blocks", TIGHT, |dev, ctx| {
        let mut kv = KvLayer::<B, KvF32> {
            ..dev.alloc_kv_layer(pool)?
        };
        let batch = batch(&dev, &[Seq(30, 30)], 3, 10)?;
        let k = dev.from_slice(&noise(60, 300))?;
        let v = dev.from_slice(&noise(61, 300))?;
        let mut out = dev.alloc(300)?;
        B::kv_append(ctx, &mut kv, &k, &v, &batch)?;
        let pairs = [(1, 2), (2, 5), (5, 5), (5, 1), (9, 0)].map(|(a, b)| (BlockId(a), BlockId(b)));
        B::kv_copy_blocks(ctx, &mut kv, &pairs)?;
        B::kv_attention(ctx, &k, &kv, None, &batch, &mut out, &config)?;
        let error = B::kv_copy_blocks(ctx, &mut kv, &[(BlockId(0), BlockId(10))]);
        assert!(error.is_err(), "block 10 of 10");
        B::to_vec(ctx, &out)
    });
}
