//! GEMV and GEMM of the CPU backend beside what the machine can do, measured in the same run.
//!
//! ```text
//! cargo run --release -p ferrum-kernels --example cpu_gemm [-- threads [isa]]
//! ```
//! Rounds of each kind alternate with rounds of the yardsticks, and the best of each is shown: a
//! neighbour on the machine then spoils neither.

use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa, peak};
use ferrum_kernels::{AttnConfig, GemmShape, KvLayer, MatShape};
use ferrum_kernels::{Backend, BackendKvDtype, BatchShape, DeviceBatch, KvFp16, PagedKvShape};
use ferrum_types::{Result, SrcDtype};
use std::time::Instant;

fn largest(x: &[f64]) -> f64 {
    x.iter().copied().fold(0.0, f64::max)
}

fn seconds(run: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

fn config() -> CpuConfig {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|x| x.parse().ok());
    let isa = args.next();
    let isa = Isa::ALL
        .into_iter()
        .find(|level| Some(level.name()) == isa.as_deref());
    CpuConfig { threads, isa }
}

/// Many copies of a weight, so that no cache holds them.
fn weights(
    device: &CpuBackend,
    dtype: SrcDtype,
    shape: MatShape,
) -> Result<Vec<<CpuBackend as Backend>::Weight>> {
    let size = shape.rows * shape.cols * dtype.size();
    // Small numbers in every type: 0x2c2c… is 0.06 as f16 and 2e-12 as f32 or bf16.
    let bytes = vec![0x2c; size];
    let copies = (256usize << 20).div_ceil(size);
    (0..copies)
        .map(|_| device.from_weight_bytes(&bytes, dtype, shape))
        .collect()
}

fn products(device: &CpuBackend, dtype: SrcDtype) -> Result<()> {
    let (n, k) = (3072, 2048);
    let shape = MatShape { rows: n, cols: k };
    let start = Instant::now();
    let weights = weights(device, dtype, shape)?;
    let packed = (weights.len() * n * k * dtype.size()) as f64 / start.elapsed().as_secs_f64();
    println!("{dtype} [{n}, {k}]: packed at {:.1} GB/s", packed / 1e9);
    let mut ctx = device.new_context()?;
    for rows in [1, 2, 4, 8, 16, 32, 128, 512] {
        let x = device.from_slice(&vec![0.5f32; rows * k])?;
        let mut out = device.alloc::<f32>(rows * n)?;
        let shape = GemmShape { rows, n, k };
        let passes = if rows <= 16 { weights.len() } else { 2 };
        let (mut speeds, mut limits) = (Vec::new(), Vec::new());
        for _ in 0..8 {
            let time = seconds(|| {
                for weight in weights.iter().cycle().take(passes) {
                    CpuBackend::gemm(&mut ctx, &x, weight, &mut out, shape)?;
                }
                Ok(())
            })? / passes as f64;
            if rows <= 16 {
                speeds.push((n * k * dtype.size()) as f64 / time);
                limits.push(peak::read_bandwidth(device)?);
            } else {
                speeds.push((2 * rows * n * k) as f64 / time);
                limits.push(peak::fma_peak(device));
            }
        }
        let (speed, limit) = (largest(&speeds), largest(&limits));
        let unit = if rows <= 16 { "GB/s" } else { "GFLOP/s" };
        println!(
            "  {rows:4} rows {:8.1} of {:8.1} {unit:7} = {:3.0} %",
            speed / 1e9,
            limit / 1e9,
            100.0 * speed / limit
        );
    }
    Ok(())
}

/// Paged f16 attention: `q_len` tokens that see `kv_len` keys.
fn attention(device: &CpuBackend, q_len: usize, kv_len: usize) -> Result<()> {
    let config = AttnConfig {
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
        scale: 0.1,
        causal: true,
        sliding_window: None,
        chunked: false,
        softcap: None,
    };
    let blocks = kv_len.div_ceil(16);
    let pool = PagedKvShape {
        blocks,
        block_size: 16,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        value_dim: config.head_dim,
        values_in_keys: false,
    };
    let layers: Vec<KvLayer<CpuBackend, KvFp16>> = (0..8)
        .map(|_| device.alloc_kv_layer(pool))
        .collect::<Result<_>>()?;
    let ids = |x: Vec<usize>| device.from_slice(&x.iter().map(|x| *x as i32).collect::<Vec<_>>());
    let batch = DeviceBatch::<CpuBackend> {
        shape: BatchShape {
            tokens: q_len,
            seqs: 1,
            table_stride: blocks,
            max_query_len: q_len,
            max_kv_len: kv_len,
        },
        tokens: ids(vec![0; q_len])?,
        rope_rows: ids(vec![0; q_len])?,
        query_starts: ids(vec![0, q_len])?,
        kv_lens: ids(vec![kv_len])?,
        state_slots: ids(vec![0])?,
        block_tables: vec![ids((0..blocks).collect())?],
    };
    let mut ctx = device.new_context()?;
    let q = device.from_slice(&vec![0.1f32; q_len * config.heads * config.head_dim])?;
    let mut out = device.alloc(q_len * config.heads * config.head_dim)?;
    let mut times = Vec::new();
    for _ in 0..7 {
        times.push(
            seconds(|| {
                for kv in &layers {
                    CpuBackend::kv_attention(&mut ctx, &q, kv, None, &batch, &mut out, &config)?;
                }
                Ok(())
            })? / layers.len() as f64,
        );
    }
    let time = times.into_iter().fold(f64::INFINITY, f64::min);
    let bytes = (2 * kv_len * config.kv_heads * config.head_dim * 2) as f64;
    // A causal query of a whole prompt sees half of the keys.
    let keys = (q_len * (2 * kv_len - q_len + 1) / 2) as f64;
    let flops = 4.0 * keys * (config.heads * config.head_dim) as f64;
    println!(
        "attention {q_len:4} × {kv_len:5}: {:8.3} ms {:6.1} GB/s {:7.1} GFLOP/s",
        time * 1e3,
        bytes / time / 1e9,
        flops / time / 1e9
    );
    Ok(())
}

fn main() -> Result<()> {
    let device = CpuBackend::with_config(config())?;
    println!("{}", device.info().detail);
    println!(
        "read {:.1} GB/s, fma {:.1} GFLOP/s",
        peak::read_bandwidth(&device)? / 1e9,
        peak::fma_peak(&device) / 1e9
    );
    for dtype in [SrcDtype::BF16, SrcDtype::F16, SrcDtype::F32] {
        products(&device, dtype)?;
    }
    for (q_len, kv_len) in [(1, 512), (1, 8192), (512, 512), (512, 4096)] {
        attention(&device, q_len, kv_len)?;
    }
    Ok(())
}
