//! Every family against `transformers`: logits of all positions and 64 greedy tokens, from a Hugging
//! Face folder and from the GGUF file of the same weights.

use crate::gpu::gpu;
use crate::support::{
    compare, exact_cpu, expected, fixture_dirs, greedy, logits_in_chunks, max_difference, open,
    runner_in,
};
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32, LlmBackend};
use ferrum_models::{Dequantized, FeedForwardSpec, KvLayout, Model, Moe, WeightForm, load_weights};
use ferrum_types::Error;
use std::path::{Path, PathBuf};

/// (model path, expectation path) of every file in every fixture.
fn cases() -> Vec<(PathBuf, PathBuf)> {
    let mut cases = Vec::new();
    for dir in fixture_dirs() {
        cases.push((dir.clone(), dir.join("expected.safetensors")));
        for (file, expectation) in [
            ("model.gguf", "expected.safetensors"),
            ("model-q8_0.gguf", "expected-q8_0.safetensors"),
            ("model-q4_0.gguf", "expected-q4_0.safetensors"),
        ] {
            if dir.join(file).exists() {
                cases.push((dir.join(file), dir.join(expectation)));
            }
        }
    }
    cases
}

fn has_experts(model: &Model) -> bool {
    let mut layers = model.spec.layers.iter();
    layers.any(|layer| matches!(layer.feed_forward, FeedForwardSpec::Moe(_)))
}

fn check<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    path: &Path,
    expectation: &Path,
) -> Result<(), String> {
    let expected = expected(expectation);
    let model = open(path);
    if has_experts(&model) && !W::EXPERTS {
        // Refused before anything is loaded.
        let mut never = |_, _| panic!("{}: something was loaded", path.display());
        return match load_weights::<B, W>(device, &model, &mut never) {
            Err(Error::Unsupported { .. }) => Ok(()),
            Err(other) => Err(format!("{}: {other}", path.display())),
            Ok(_) => Err(format!("{}: loaded without experts", path.display())),
        };
    }
    let layout = KvLayout::Paged { block_size: 8 };
    let mut runner = runner_in::<B, KvF32, W>(device, &model, layout);
    let found = logits_in_chunks(&mut runner, &expected.tokens, &[usize::MAX]);
    let difference = max_difference(&found, &expected.logits);
    println!("{}: {difference:.1e}", path.display());
    if difference.is_nan() || difference > 1e-4 {
        return Err(format!("{}: logits differ by {difference}", path.display()));
    }
    let steps = expected.greedy.len();
    assert!(steps >= 64);
    let found = greedy(&mut runner, &expected.tokens[..8], steps);
    if found != expected.greedy {
        return Err(format!("{}: greedy tokens {found:?}", path.display()));
    }
    Ok(())
}

fn check_all<B: LlmBackend, W: WeightForm<B>>(device: &B) {
    let cases = cases();
    let failures: Vec<_> = cases
        .iter()
        .filter_map(|(path, e)| check::<B, W>(device, path, e).err())
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {}:\n{}",
        failures.len(),
        cases.len(),
        failures.join("\n")
    );
}

#[test]
fn reference_backend_equals_transformers() {
    check_all::<_, Moe<Dequantized>>(&ReferenceBackend::open(0).unwrap());
}

#[test]
fn cpu_backend_equals_transformers() {
    check_all::<_, Moe<Dequantized>>(&exact_cpu());
}

/// The fastest level, which may round activations where weights are bf16.
#[test]
fn every_level_of_the_cpu_stays_near_transformers() {
    let device = CpuBackend::open(0).unwrap();
    let rounds = device.isa().rounds_bf16();
    println!("{}: rounds {rounds}", device.isa());
    for (path, expectation) in cases() {
        let expected = expected(&expectation);
        let model = open(&path);
        let layout = KvLayout::Paged { block_size: 8 };
        let mut runner = runner_in::<_, KvF32, Moe<Dequantized>>(&device, &model, layout);
        let found = logits_in_chunks(&mut runner, &expected.tokens, &[usize::MAX]);
        let (kl, same) = compare(&expected.logits, &found, model.spec.vocab_size);
        let near = kl <= if rounds { 2e-3 } else { 1e-8 } && same >= 0.9;
        assert!(near, "{}: KL {kl:.1e}, {same}", path.display());
    }
}

#[test]
fn gpu_backend_equals_transformers() {
    if let Some(device) = gpu() {
        check_all::<_, Dequantized>(&device);
    }
}
