//! Weights that stay in their blocks: close to the same blocks in f32, and the same bits however the
//! prompt is cut.

use crate::support::{compare, expected, fixtures, logits_in_chunks, open, runner_in};
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use ferrum_kernels::cuda::CudaBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32};
use ferrum_models::{
    Dequantized, KvLayout, Model, Moe, Native, RunnerConfig, WeightForm, WeightPolicy, memory_plan,
};
use ferrum_test_support::available;
use half::bf16;
use std::path::Path;

/// Fixtures with files of blocks, most with experts.
const NAMES: [&str; 4] = [
    "llama-quantized",
    "qwen3-moe-quantized",
    "qwen2-moe-quantized",
    "deepseek2-quantized",
];
const LAYOUT: KvLayout = KvLayout::Paged { block_size: 8 };

#[test]
fn blocks_are_close_to_themselves_in_f32() {
    let device = CpuBackend::open(0).unwrap();
    let types = |name| ["q8_0", "q4_0"].map(|ty| (name, ty));
    let cases = NAMES.map(types);
    for (name, ty) in cases.into_iter().flatten() {
        let dir = fixtures().join(name);
        let model = open(&dir.join(format!("model-{ty}.gguf")));
        let whole = expected(&dir.join(format!("expected-{ty}.safetensors")));
        let mut runner = runner_in::<_, KvF32, Moe<Native>>(&device, &model, LAYOUT);
        let found = logits_in_chunks(&mut runner, &whole.tokens, &[usize::MAX]);
        let (kl, same) = compare(&whole.logits, &found, model.spec.vocab_size);
        println!(
            "{name} {ty}: KL {kl:.2e}, same best token in {:.0} %",
            100.0 * same
        );
        assert!(kl < 1e-2, "{name} {ty}: KL {kl}");
        assert!(same >= 0.8, "{name} {ty}: {same}");
    }
}

/// Checkpoints whose layers stay integers on the CPU; of `-odd` and the others, groups do not fit.
const LAYERS: [&str; 14] = [
    "llama-gptq4",
    "llama-gptq4-order",
    "llama-gptq4-v2",
    "llama-gptq4-odd",
    "llama-gptq4-dynamic",
    "llama-gptq8",
    "llama-gptq3",
    "llama-gptq2",
    "llama-awq",
    "llama-packed4",
    "llama-packed4-order",
    "llama-packed8",
    "qwen3-moe-gptq4",
    "qwen3-moe-gptq4-order",
];

#[test]
fn layers_are_close_to_themselves_in_f32() {
    let device = CpuBackend::open(0).unwrap();
    for name in LAYERS {
        let dir = fixtures().join(name);
        let model = open(&dir);
        let whole = expected(&dir.join("expected.safetensors"));
        let mut runner = runner_in::<_, KvF32, Moe<Native>>(&device, &model, LAYOUT);
        let found = logits_in_chunks(&mut runner, &whole.tokens, &[usize::MAX]);
        let (kl, same) = compare(&whole.logits, &found, model.spec.vocab_size);
        println!(
            "{name}: KL {kl:.2e}, same best token in {:.0} %",
            100.0 * same
        );
        // Close, and not the same: then nothing was computed on integers.
        assert!(kl > 1e-9 || name.ends_with("odd"), "{name}: KL {kl}");
        assert!(kl < 1e-2, "{name}: KL {kl}");
        assert!(same >= 0.8, "{name}: {same}");
    }
}

/// FP8 is decoded exactly, so its products have the bits of the dequantised weights.
#[test]
fn fp8_gives_the_bits_of_its_numbers_in_f32() {
    let device = CpuBackend::open(0).unwrap();
    for name in [
        "llama-fp8-tensor",
        "llama-fp8-channel",
        "llama-fp8-block",
        "qwen3-moe-fp8",
        "deepseek3-fp8",
        "llama-fp8-odd",
    ] {
        let dir = fixtures().join(name);
        let (model, tokens) = (
            open(&dir),
            expected(&dir.join("expected.safetensors")).tokens,
        );
        let mut dequantized = runner_in::<_, KvF32, Moe<Dequantized>>(&device, &model, LAYOUT);
        let mut native = runner_in::<_, KvF32, Moe<Native>>(&device, &model, LAYOUT);
        for chunks in [&[usize::MAX][..], &[1], &[5]] {
            let whole = logits_in_chunks(&mut dequantized, &tokens, chunks);
            let found = logits_in_chunks(&mut native, &tokens, chunks);
            let same = whole.iter().zip(&found);
            let same = same.fold(true, |same, (a, b)| same && a.to_bits() == b.to_bits());
            assert!(same, "{name}: {chunks:?}");
        }
        same_bits(&dir, &dir.join("expected.safetensors"));
    }
}

/// Checkpoints with the weights that the CPU, and a device of CUDA, dequantise.
#[test]
fn what_is_dequantised_is_named() {
    let cases = [
        ("llama-gptq4-order", vec![], vec![]),
        ("llama-gptq4-odd", vec!["4-bit GPTQ"], vec!["4-bit GPTQ"]),
        ("llama-gptq2", vec![], vec![]),
        ("llama-packed8", vec![], vec![]),
        ("qwen3-moe-gptq4", vec![], vec![]),
        ("qwen3-moe-gptq4-order", vec![], vec![]),
        ("llama-fp8-channel", vec![], vec![]),
        ("qwen3-moe-fp8", vec![], vec![]),
        ("deepseek3-fp8", vec!["FP8"], vec!["FP8"]),
        ("llama-fp8-odd", vec!["FP8"], vec!["FP8"]),
    ];
    for (name, on_cpu, on_cuda) in cases {
        let model = open(&fixtures().join(name));
        for (policy, expected) in [
            (WeightPolicy::of::<CpuBackend, Moe<Native>>(), on_cpu),
            (
                WeightPolicy::of::<CudaBackend<bf16>, Moe<Native>>(),
                on_cuda,
            ),
        ] {
            assert_eq!(model.dequantized_types(policy), expected, "{name}");
        }
        let all = model.dequantized_types(WeightPolicy::floats());
        assert_eq!(all.len(), 1, "{name}: {all:?}");
    }
}

/// Bytes of weights by the plan of a form.
fn planned<B: Backend, W: WeightForm<B>>(model: &Model) -> u64 {
    let policy = WeightPolicy::of::<B, W>();
    memory_plan::<KvF32>(model, policy, &RunnerConfig::single(64)).weights
}

#[test]
fn the_plan_counts_weights_in_the_form_of_the_device() {
    let quantised = LAYERS.iter().map(|name| (*name).to_owned());
    let blocks = NAMES.iter().map(|name| format!("{name}/model-q4_0.gguf"));
    for name in quantised.chain(blocks) {
        let model = open(&fixtures().join(&name));
        let native = planned::<CpuBackend, Moe<Native>>(&model);
        let dequantized = planned::<CpuBackend, Moe<Dequantized>>(&model);
        // Of quantised weights, the CPU keeps those that are not said to be dequantised.
        let kept = model.dequantized_types(WeightPolicy::of::<CpuBackend, Moe<Native>>());
        assert_eq!(native < dequantized, kept.is_empty(), "{name}: {kept:?}");
        // The reference backend has no quantised products, whatever form is asked of it.
        let reference = planned::<ReferenceBackend, Moe<Native>>(&model);
        assert_eq!(reference, dequantized, "{name}");
    }
    // Fixtures of f32 stay as they are.
    for name in ["qwen2", "qwen3-moe"] {
        let model = open(&fixtures().join(name));
        let stored = model.tensors().total_bytes();
        assert_eq!(planned::<CpuBackend, Moe<Native>>(&model), stored, "{name}");
        assert_eq!(
            planned::<CpuBackend, Moe<Dequantized>>(&model),
            stored,
            "{name}"
        );
    }
}

#[test]
fn layers_give_the_same_bits_in_chunks_and_at_every_level() {
    for name in LAYERS {
        let path = fixtures().join(name);
        same_bits(&path, &path.join("expected.safetensors"));
    }
}

#[test]
fn blocks_give_the_same_bits_in_chunks_and_at_every_level() {
    for name in NAMES {
        let path = fixtures().join(name);
        let expected = path.join("expected-q4_0.safetensors");
        same_bits(&path.join("model-q4_0.gguf"), &expected);
    }
}

fn same_bits(path: &Path, expectation: &Path) {
    let tokens = expected(expectation).tokens;
    let model = open(path);
    // Levels that split numbers of f32, such as those of routers, have bits of their own.
    let mut bases: [Option<Vec<f32>>; 2] = [None, None];
    for isa in available(Isa::ALL, Isa::is_available) {
        let config = CpuConfig {
            isa: Some(isa),
            threads: Some(2),
        };
        let device = CpuBackend::with_config(config).unwrap();
        let mut runner = runner_in::<_, KvF32, Moe<Native>>(&device, &model, LAYOUT);
        for chunks in [&[usize::MAX][..], &[1], &[5], &[17, 1, 3]] {
            let found = logits_in_chunks(&mut runner, &tokens, chunks);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let base = &mut bases[usize::from(isa.splits_f32())];
            let base = base.get_or_insert_with(|| found.clone());
            let same = bits(base) == bits(&found);
            assert!(same, "{}: {}: {chunks:?}", path.display(), isa.name());
        }
    }
}
