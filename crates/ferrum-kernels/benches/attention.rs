//! Attention over a paged cache on the CPU, apart from everything else of a model.
//!
//! `cargo bench -p ferrum-kernels --bench attention` prints for each element of the cache what one query
//! reads in GB/s beside the bandwidth of this machine, and what a chunk of a prompt computes in GFLOP/s
//! beside its peak. Medians of repeated runs.

#![allow(clippy::unwrap_used)]

use ferrum_kernels::cpu::{CpuBackend, CpuKvElement, peak};
use ferrum_kernels::*;
use std::time::Duration;

/// The heads of Qwen3-0.6B.
const CONFIG: AttnConfig = AttnConfig {
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    value_dim: 128,
    scale: 0.088,
    softcap: None,
    causal: true,
    sliding_window: None,
    chunked: false,
};
const KEYS: usize = 8192;
/// Layers: larger together than the caches.
const LAYERS: usize = 8;
/// Queries of a chunk.
const CHUNK: usize = 256;
const TIME: Duration = Duration::from_millis(800);

/// The last `queries` of `KEYS` tokens of one sequence.
fn batch(device: &CpuBackend, queries: usize, block_size: usize) -> DeviceBatch<CpuBackend> {
    let ints = |x: Vec<i32>| device.from_slice(&x).unwrap();
    let stride = KEYS / block_size;
    DeviceBatch {
        shape: BatchShape {
            tokens: queries,
            seqs: 1,
            table_stride: stride,
            max_query_len: queries,
            max_kv_len: KEYS,
        },
        tokens: ints(vec![0; queries]),
        rope_rows: ints(vec![0; queries]),
        query_starts: ints(vec![0, queries as i32]),
        kv_lens: ints(vec![KEYS as i32]),
        state_slots: ints(vec![0]),
        block_tables: vec![ints((0..stride as i32).collect())],
    }
}

fn measure<K: CpuKvElement>(device: &CpuBackend, block_size: usize) {
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = CONFIG;
    let mut ctx = device.new_context().unwrap();
    let pool = PagedKvShape {
        blocks: KEYS / block_size,
        block_size,
        kv_heads,
        head_dim,
        value_dim: head_dim,
        values_in_keys: false,
    };
    let kv: Vec<f32> = (0..KEYS * kv_heads * head_dim)
        .map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0)
        .collect();
    let kv = device.from_slice(&kv).unwrap();
    let all = batch(device, KEYS, block_size);
    let layers: Vec<KvLayer<CpuBackend, K>> = (0..LAYERS)
        .map(|_| {
            let mut layer = device.alloc_kv_layer(pool).unwrap();
            CpuBackend::kv_append(&mut ctx, &mut layer, &kv, &kv, &all).unwrap();
            layer
        })
        .collect();
    let q = vec![0.5f32; CHUNK * heads * head_dim];
    let q = device.from_slice(&q).unwrap();
    let mut out = device.alloc::<f32>(CHUNK * heads * head_dim).unwrap();
    let mut layers = layers.iter().cycle();
    let mut attention = |queries: usize| {
        let batch = batch(device, queries, block_size);
        peak::median_seconds(TIME, || {
            let kv = layers.next().unwrap();
            CpuBackend::kv_attention(&mut ctx, &q, kv, None, &batch, &mut out, &CONFIG).unwrap();
        })
    };
    let bytes = 2 * KEYS * kv_heads * head_dim * size_of::<K::Stored>();
    let bandwidth = peak::read_bandwidth(device).unwrap();
    let read = bytes as f64 / attention(1);
    let flops = (4 * CHUNK * (KEYS - CHUNK / 2) * heads * head_dim) as f64;
    let computed = flops / attention(CHUNK);
    let best = peak::fma_peak(device);
    println!(
        "{:5} blocks of {block_size:4}  1: {:5.1} GB/s {:3.0} %  {CHUNK}: {:4.0} GFLOP/s {:2.0} %",
        K::NAME,
        read / 1e9,
        100.0 * read / bandwidth,
        computed / 1e9,
        100.0 * computed / best
    );
}

fn main() {
    let device = CpuBackend::open(0).unwrap();
    println!("{}", CpuBackend::info(&device).detail);
    for block_size in [16, 32, KEYS] {
        measure::<KvF32>(&device, block_size);
        measure::<KvFp16>(&device, block_size);
        measure::<KvInt8>(&device, block_size);
    }
}
