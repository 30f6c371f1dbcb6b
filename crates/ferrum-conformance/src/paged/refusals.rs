//! What paged caches refuse: blocks that are not there, pools of nothing, and pools, batches and settings that do not
//! belong together.

use super::step::{FEW, Layout, make, step};
use crate::data::Rng;
use crate::io::{Check, Fault, Io, Refusals, wrong};
use ferrum_kernels::{
    AttnConfig, BackendKvDtype, BatchShape, KvDtypeKind, KvLayer, PagedKvShape, PagedQkv, QkvShape,
    QkvTransform,
};
use ferrum_types::BlockId;

/// A pool that is as it should be.
pub(super) const SMALL: PagedKvShape = PagedKvShape {
    blocks: 3,
    block_size: 4,
    kv_heads: 1,
    head_dim: 8,
    value_dim: 8,
    values_in_keys: false,
};

/// Blocks that are not in the pool.
pub(super) fn copies_out_of_range<B: BackendKvDtype<K>, K: KvDtypeKind>(
    device: &B,
    refused: &mut Refusals,
) -> Check {
    let mut ctx = device.new_context()?;
    let shape = SMALL;
    let mut kv: KvLayer<B, K> = device.alloc_kv_layer(shape)?;
    for pair in [(0, 3), (3, 0), (u32::MAX, 0)] {
        let pair = (BlockId(pair.0), BlockId(pair.1));
        let result = B::kv_copy_blocks(&mut ctx, &mut kv, &[pair]);
        refused.expect(&format!("copying {pair:?} in a pool of 3 blocks"), result)?;
    }
    Ok(B::kv_copy_blocks(&mut ctx, &mut kv, &[])?)
}

pub(super) fn pools_of_nothing<B: BackendKvDtype<K>, K: KvDtypeKind>(
    device: &B,
    refused: &mut Refusals,
) -> Check {
    let shape = SMALL;
    let none = [
        PagedKvShape { blocks: 0, ..shape },
        PagedKvShape {
            block_size: 0,
            ..shape
        },
        PagedKvShape {
            kv_heads: 0,
            ..shape
        },
        PagedKvShape {
            head_dim: 0,
            ..shape
        },
        PagedKvShape {
            value_dim: 0,
            ..shape
        },
        PagedKvShape {
            value_dim: 9,
            values_in_keys: true,
            ..shape
        },
    ];
    for shape in none {
        refused.expect(
            &format!("a pool of {shape:?}"),
            device.alloc_kv_layer(shape),
        )?;
    }
    let endless = PagedKvShape {
        blocks: usize::MAX / 2,
        ..shape
    };
    match device.alloc_kv_layer(endless) {
        Err(_) => Ok(()),
        Ok(_) => wrong("a pool larger than the address space was allocated"),
    }
}

/// Pools, batches and configurations that do not belong together.
pub(super) fn mismatches<B: BackendKvDtype<K>, K: KvDtypeKind>(
    device: &B,
    refused: &mut Refusals,
) -> Check {
    let mut io = Io::new(device, Fault::None)?;
    let data = make(&mut Rng::new("mismatches", |x| x), FEW);
    let layout = Layout::new(&data);
    let mut kv = layout.pool::<B, K>(device, &data)?;
    let batch = layout.batch::<B, K>(&mut io, &step(&data), 0)?;
    let x = io.input("x", &vec![0.0; 5000])?;
    let mut out = io.output("out", 5000)?;
    for config in [
        AttnConfig {
            heads: 3,
            ..data.config
        },
        AttnConfig {
            kv_heads: 0,
            ..data.config
        },
        AttnConfig {
            kv_heads: 4,
            ..data.config
        },
        AttnConfig {
            kv_heads: 1,
            ..data.config
        },
        AttnConfig {
            head_dim: 10,
            ..data.config
        },
        AttnConfig {
            value_dim: 10,
            ..data.config
        },
        AttnConfig {
            head_dim: usize::MAX / 2,
            ..data.config
        },
    ] {
        let result = B::kv_attention(&mut io.ctx, &x, &kv, None, &batch, &mut out, &config);
        refused.expect(&format!("{config:?} over {:?}", kv.shape), result)?;
    }
    let shape = data.qkv_shape();
    for shape in [
        QkvShape {
            tokens: shape.tokens - 1,
            ..shape
        },
        QkvShape {
            tokens: shape.tokens + 1,
            ..shape
        },
        QkvShape {
            kv_heads: 1,
            ..shape
        },
        QkvShape {
            head_dim: 10,
            ..shape
        },
        QkvShape {
            value_dim: 10,
            ..shape
        },
        QkvShape {
            heads: usize::MAX / 2,
            ..shape
        },
    ] {
        let transform = QkvTransform {
            q_norm: None,
            k_norm: None,
            rope: None,
        };
        let input = PagedQkv {
            qkv: &x,
            transform,
            shape,
        };
        let result = B::kv_append_qkv(&mut io.ctx, input, &mut out, &mut kv, &batch);
        refused.expect(
            &format!("{shape:?} of a batch of {:?}", batch.shape),
            result,
        )?;
    }
    let mut batch = batch;
    for shape in wrong_batches(batch.shape) {
        batch.shape = shape;
        let result = B::kv_append(&mut io.ctx, &mut kv, &x, &x, &batch);
        refused.expect(&format!("append of a batch of {shape:?}"), result)?;
        let config = &data.config;
        let result = B::kv_attention(&mut io.ctx, &x, &kv, None, &batch, &mut out, config);
        refused.expect(&format!("attention of a batch of {shape:?}"), result)?;
    }
    Ok(())
}

/// Sizes that the buffers of a batch of `shape` do not have.
fn wrong_batches(shape: BatchShape) -> [BatchShape; 6] {
    [
        BatchShape { seqs: 0, ..shape },
        BatchShape {
            seqs: 1000,
            ..shape
        },
        BatchShape {
            seqs: usize::MAX,
            ..shape
        },
        BatchShape {
            tokens: 1000,
            ..shape
        },
        BatchShape {
            tokens: usize::MAX,
            ..shape
        },
        BatchShape {
            table_stride: usize::MAX / 2 + 1,
            ..shape
        },
    ]
}
