//! Packing of weights on the CPU, beside a copy of as many bytes.
//!
//! `cargo bench -p ferrum-kernels --bench pack [-- LEVEL|TYPE...]` prints for each type what packing reads and
//! writes together in GB/s and its share of what the same threads copy in the same run: into memory that was
//! written before, and into fresh memory, as a load does. Medians of repeated runs.

#![allow(clippy::unwrap_used)]

use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa, peak};
use ferrum_kernels::{
    AwqWeights, BackendQuantMarlin, Fp8Weights, GgufRows, GptqWeights, GptqZeroPoints,
    PackQuantizedWeights, PackedZeros, QuantWeights,
};
use ferrum_types::{GgufQuantType, SrcDtype};
/// Features, and numbers in each: larger together than the caches.
const N: usize = 24_576;
const K: usize = 4096;
const GROUP: usize = 128;

/// Bytes below 64: as half of an f16 they make a number below 2.
fn bytes(count: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 & 0x3f
    };
    (0..count).map(|_| byte()).collect()
}

fn main() {
    let wanted: Vec<_> = std::env::args().skip(1).collect();
    let levels: Vec<Isa> = wanted.iter().filter_map(|w| w.parse().ok()).collect();
    let isa = levels.first().copied();
    let config = CpuConfig { threads: None, isa };
    let device = CpuBackend::with_config(config).unwrap();
    println!("{}, {N} x {K}", device.isa());
    let names: Vec<_> = wanted
        .iter()
        .filter(|w| *w != "--bench" && w.parse::<Isa>().is_err())
        .collect();
    let run = |name: &str, weights: &QuantWeights<'_>| {
        if !names.is_empty() && !names.iter().any(|n| n.eq_ignore_ascii_case(name)) {
            return;
        }
        let peak::PackingTimes { bytes, warm, cold } = peak::packing(&device, weights, K).unwrap();
        let both = (weights.stored_bytes() + bytes) as f64 / 1e9;
        let speeds = [warm, cold].map(|[packed, copied]| {
            let (speed, of) = (both / packed, both / copied);
            format!("{speed:5.1} GB/s {:3.0} % of {of:4.1}", 100.0 * speed / of)
        });
        println!("{name:18} {}   cold {}", speeds[0], speeds[1]);
    };
    for ty in GgufQuantType::all() {
        let floats = matches!(
            ty,
            GgufQuantType::F32 | GgufQuantType::F16 | GgufQuantType::BF16
        );
        if floats || CpuBackend::is_native_layer(&gguf(&[], ty, 0)) {
            let blocks = bytes(ty.bytes_for(N * K).unwrap());
            run(ty.name(), &gguf(&blocks, ty, N));
        }
    }
    layers(run);
}

fn gguf(bytes: &[u8], ty: GgufQuantType, rows: usize) -> QuantWeights<'_> {
    QuantWeights::Gguf(GgufRows::new(bytes, ty, rows))
}

/// Layers of Hugging Face folders.
fn layers(run: impl Fn(&str, &QuantWeights<'_>)) {
    let (codes, groups) = (bytes(N * K), K / GROUP);
    let half_codes = &codes[..N * K / 2];
    let scales = bytes(2 * N * groups);
    let zeros = bytes(N * groups / 2);
    let layer = Fp8Weights {
        in_features: K,
        out_features: N,
        block: [1, K],
        codes: &codes,
        scales: &scales[..2 * N],
        scale_dtype: SrcDtype::BF16,
    };
    run("FP8", &QuantWeights::Fp8(layer));
    // Every input in a group far from its neighbours'.
    let order = (0..K).map(|i| (i * 7 % groups) as i32);
    let order: Vec<u8> = order.flat_map(i32::to_le_bytes).collect();
    let gptq = |g_idx| {
        QuantWeights::Gptq(GptqWeights {
            bits: 4,
            group_size: GROUP,
            zero_points: GptqZeroPoints::MinusOne,
            in_features: K,
            out_features: N,
            qweight: half_codes,
            qzeros: &zeros,
            scales: &scales,
            g_idx,
        })
    };
    run("GPTQ", &gptq(None));
    run("GPTQ-order", &gptq(Some(&order)));
    let layer = AwqWeights {
        group_size: GROUP,
        in_features: K,
        out_features: N,
        qweight: half_codes,
        qzeros: &zeros,
        scales: &scales,
    };
    run("AWQ", &QuantWeights::Awq(layer));
    let layer = PackQuantizedWeights {
        bits: 4,
        group_size: GROUP,
        in_features: K,
        out_features: N,
        codes: half_codes,
        scales: &scales,
        scale_dtype: SrcDtype::BF16,
        zeros: PackedZeros::None,
        g_idx: None,
    };
    run("pack-quantized", &QuantWeights::PackQuantized(layer));
}
