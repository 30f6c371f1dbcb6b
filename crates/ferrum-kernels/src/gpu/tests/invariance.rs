//! A row's result does not depend on its neighbours, on chunks or on blocks: bit for bit.

use super::paged::{Seq, batch};
use super::{gpu, noise};
use crate::backend::*;
use crate::gpu::{GpuBackend, GpuContext};
use ferrum_types::SrcDtype;

type B = GpuBackend;

fn device() -> Option<(GpuBackend, GpuContext)> {
    let device = gpu()?.clone();
    let ctx = device.new_context().expect("context");
    Some((device, ctx))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn gemm_rows_do_not_see_each_other() {
    let Some((dev, mut ctx)) = device() else {
        return;
    };
    let (n, k, rows) = (37, 515, 21);
    let w: Vec<u8> = noise(1, n * k)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let shape = MatShape { rows: n, cols: k };
    let w = dev
        .from_weight_bytes(&w, SrcDtype::F32, shape)
        .expect("weight");
    let x = noise(2, rows * k);
    let mut run = |x: &[f32]| {
        let rows = x.len() / k;
        let x = dev.from_slice(x).expect("x");
        let mut out = dev.alloc(rows * n).expect("out");
        B::gemm(&mut ctx, &x, &w, &mut out, GemmShape { rows, n, k }).expect("gemm");
        bits(&B::to_vec(&mut ctx, &out).expect("read"))
    };
    let all = run(&x);
    for (first, count) in [
        (0, 1),
        (20, 1),
        (3, 2),
        (5, 3),
        (7, 4),
        (2, 7),
        (1, 8),
        (4, 13),
    ] {
        let part = run(&x[first * k..(first + count) * k]);
        assert!(
            part == all[first * n..(first + count) * n],
            "rows {first}, {count}"
        );
    }
}

const CONFIG: AttnConfig = AttnConfig {
    heads: 4,
    kv_heads: 2,
    head_dim: 20,
    value_dim: 20,
    scale: 0.7,
    causal: true,
    sliding_window: Some(90),
    chunked: false,
    softcap: None,
};

/// Attention outputs `[token][heads · head_dim]` of a sequence of `len` tokens in chunks, with a
/// second sequence beside it when `company` is more than none.
fn chunked(
    dev: &GpuBackend,
    ctx: &mut GpuContext,
    block_size: usize,
    chunks: &[usize],
    company: usize,
) -> Vec<u32> {
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = CONFIG;
    let len: usize = chunks.iter().sum();
    let (q_dim, kv_dim) = (heads * head_dim, kv_heads * head_dim);
    let (q, k, v) = (
        noise(3, len * q_dim),
        noise(4, len * kv_dim),
        noise(5, len * kv_dim),
    );
    let blocks = 2 * len.div_ceil(block_size) + 20;
    let blocks = blocks + usize::from(blocks.is_multiple_of(7));
    let pool = PagedKvShape {
        blocks,
        block_size,
        kv_heads,
        head_dim,
        value_dim: head_dim,
        values_in_keys: false,
    };
    let mut kv = KvLayer::<B, KvF32> {
        ..dev.alloc_kv_layer(pool).expect("pool")
    };
    let mut all = Vec::new();
    let mut done = 0;
    for &chunk in chunks {
        // The company's tokens come behind; its keys are those of its own, always new, sequence.
        let seqs = [Seq(chunk, done + chunk), Seq(company, company)];
        let mut step = batch(dev, &seqs, block_size, blocks).expect("batch");
        // Blocks of the first sequence must stay what they were: give it a table of its own.
        let stride = step.shape.table_stride;
        let own = (0..2 * stride).map(|e| match e / stride {
            0 => e as i32,
            _ => (blocks - 1 - e % stride) as i32,
        });
        step.block_tables = vec![dev.from_slice(&own.collect::<Vec<_>>()).expect("tables")];
        let rows = |of: &[f32], dim: usize, seed| {
            let mut rows = of[done * dim..(done + chunk) * dim].to_vec();
            rows.extend(noise(seed, company * dim));
            dev.from_slice(&rows).expect("rows")
        };
        let (q, k, v) = (rows(&q, q_dim, 6), rows(&k, kv_dim, 7), rows(&v, kv_dim, 8));
        let mut out = dev.alloc((chunk + company) * q_dim).expect("out");
        B::kv_append(ctx, &mut kv, &k, &v, &step).expect("append");
        B::kv_attention(ctx, &q, &kv, None, &step, &mut out, &CONFIG).expect("attention");
        let out = B::to_vec(ctx, &out).expect("read");
        all.extend(bits(&out[..chunk * q_dim]));
        done += chunk;
    }
    all
}

#[test]
fn attention_does_not_see_chunks_blocks_or_company() {
    let Some((dev, mut ctx)) = device() else {
        return;
    };
    let whole = chunked(&dev, &mut ctx, 16, &[150], 0);
    let decode: Vec<usize> = std::iter::once(139).chain([1; 11]).collect();
    let chunks: [&[usize]; 3] = [&[150], &[64, 1, 63, 22], &decode];
    for block_size in [1, 5, 16, 64, 200] {
        for chunks in chunks {
            for company in [0, 3] {
                let found = chunked(&dev, &mut ctx, block_size, chunks, company);
                assert!(
                    found == whole,
                    "block {block_size}, chunks {chunks:?}, company {company}"
                );
            }
        }
    }
}

#[test]
fn a_contiguous_cache_is_a_paged_one() {
    let Some((dev, mut ctx)) = device() else {
        return;
    };
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = CONFIG;
    let len = 150;
    let shape = |heads| HeadsShape {
        tokens: len,
        heads,
        head_dim,
    };
    let mut head_major = |seed, heads: usize| {
        let src = dev
            .from_slice(&noise(seed, len * heads * head_dim))
            .expect("src");
        let mut dst = dev.alloc(len * heads * head_dim).expect("dst");
        B::transpose_token_to_head(&mut ctx, &src, &mut dst, shape(heads)).expect("transpose");
        dst
    };
    let (q, k, v) = (
        head_major(3, heads),
        head_major(4, kv_heads),
        head_major(5, kv_heads),
    );
    let mut out = dev.alloc(len * heads * head_dim).expect("out");
    let mut token_major = dev.alloc(len * heads * head_dim).expect("out");
    let flash = FlashShape {
        q_len: len,
        kv_len: len,
        kv_seq_stride: len,
        pos_offset: 0,
    };
    B::flash_attention(&mut ctx, &q, (&k, &v), None, &mut out, flash, &CONFIG).expect("attention");
    B::transpose_head_to_token(&mut ctx, &out, &mut token_major, shape(heads)).expect("transpose");
    let contiguous = bits(&B::to_vec(&mut ctx, &token_major).expect("read"));
    assert!(contiguous == chunked(&dev, &mut ctx, 16, &[len], 0));
}

#[test]
fn fused_ops_are_their_parts() {
    let Some((dev, mut ctx)) = device() else {
        return;
    };
    let (rows, dim) = (3, 333);
    let shape = NormShape {
        rows,
        dim,
        eps: 1e-6,
    };
    let mut residual = dev.from_slice(&noise(9, rows * dim)).expect("residual");
    let mut sum = dev.from_slice(&noise(9, rows * dim)).expect("sum");
    let x = dev.from_slice(&noise(10, rows * dim)).expect("x");
    let weight = dev.from_slice(&noise(11, dim)).expect("weight");
    let (mut fused, mut parts) = (
        dev.alloc(rows * dim).expect("a"),
        dev.alloc(rows * dim).expect("b"),
    );
    B::fused_add_rms_norm(&mut ctx, &mut residual, &x, &weight, &mut fused, shape).expect("fused");
    B::add_inplace(&mut ctx, &mut sum, &x, rows * dim).expect("add");
    B::rms_norm(&mut ctx, &sum, &weight, &mut parts, shape).expect("norm");
    let mut read = |buffer| bits(&B::to_vec(&mut ctx, buffer).expect("read"));
    assert!(read(&fused) == read(&parts) && read(&residual) == read(&sum));
}
