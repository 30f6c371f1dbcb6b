//! Products with weights in ggml blocks on the CPU, apart from everything else of a model.
//!
//! `cargo bench -p ferrum-kernels --bench quant [-- TYPE...]` prints for each type what one row reads in
//! GB/s, from memory and from the cache (which tells whether memory or the cores hold it back), and what
//! several rows compute in GOP/s (a multiply-add counts two), each with its share of what this machine can
//! do at best. Medians of repeated runs.

#![allow(clippy::unwrap_used)]

use ferrum_kernels::cpu::{CpuBackend, peak};
use ferrum_kernels::{Backend, BackendQuantGguf, GemmShape, MatShape};
use ferrum_types::GgufQuantType;
use std::time::Duration;

/// Features, and numbers in each: larger together than the caches.
const N: usize = 98_304;
const K: usize = 1024;
/// Features of a matrix that stays in the second-level caches: three panels for each of 8 tasks.
const CACHED_N: usize = 768;
/// A matrix that several rows share; as a projection of a small model.
const SMALL_N: usize = 6144;
const ROWS: [usize; 5] = [2, 4, 8, 16, 512];
const TIME: Duration = Duration::from_millis(400);

/// Blocks whose scales are small and whose codes are whatever comes.
fn blocks(ty: GgufQuantType, count: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Bytes below 64: as half of an f16 they make a number below 2.
        (state >> 24) as u8 & 0x3f
    };
    (0..count * ty.block_bytes()).map(|_| byte()).collect()
}

fn main() {
    let wanted: Vec<_> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let device = CpuBackend::open(0).unwrap();
    let mut ctx = device.new_context().unwrap();
    let x = vec![0.5f32; 512 * K];
    let x = device.from_slice(&x).unwrap();
    let mut out = device.alloc::<f32>(N.max(512 * SMALL_N)).unwrap();
    println!("{}", CpuBackend::info(&device).detail);
    for ty in GgufQuantType::all() {
        let named = wanted.is_empty() || wanted.iter().any(|w| w.eq_ignore_ascii_case(ty.name()));
        if !CpuBackend::is_native(ty) || !named {
            continue;
        }
        let bytes = blocks(ty, N * K / ty.block_len());
        let bandwidth = peak::read_bandwidth(&device).unwrap();
        let mut product = |bytes: &[u8], rows: usize, n: usize| {
            let weight = device
                .load_quant(bytes, ty, MatShape { rows: n, cols: K })
                .unwrap();
            let shape = GemmShape { rows, n, k: K };
            peak::median_seconds(TIME, || {
                CpuBackend::gemm_quant(&mut ctx, &x, &weight, &mut out, shape).unwrap()
            })
        };
        let read = bytes.len() as f64 / product(&bytes, 1, N);
        let cached = &bytes[..bytes.len() / N * CACHED_N];
        let from_cache = cached.len() as f64 / product(cached, 1, CACHED_N);
        print!(
            "{:8} 1: {:5.1} GB/s {:3.0} % (cache {:5.1})",
            ty.name(),
            read / 1e9,
            100.0 * read / bandwidth,
            from_cache / 1e9,
        );
        let small = &bytes[..bytes.len() / N * SMALL_N];
        let best = peak::byte_peak(&device);
        for rows in ROWS {
            let computed = (2 * rows * SMALL_N * K) as f64 / product(small, rows, SMALL_N);
            print!(
                "  {rows}: {:4.0} {:2.0} %",
                computed / 1e9,
                100.0 * computed / best
            );
        }
        println!("  of {:.0} GOP/s", best / 1e9);
    }
}
