//! Models as a whole on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: every family against
//! `transformers`, and the same bits whole and in chunks.
//!
//! A program of its own, so that only this backend is compiled for it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/mod.rs"]
mod support;

use ferrum_formats::ModelSource;
use ferrum_kernels::cuda::{CudaAct, CudaBackend, CudaF32, CudaOptions};
use ferrum_kernels::reference::{KvCodec, Mixed, Reference};
use ferrum_kernels::{
    Backend, BackendKvDtype, BatchInvariance, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8,
    LlmBackend,
};
use ferrum_models::families::FAMILIES;
use ferrum_models::{Dequantized, FeedForwardSpec, KvLayout, Moe, Native, WeightForm, family_for};
use half::{bf16, f16};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use support::{
    compare, expected, fixtures, greedy, logits_in_chunks, max_difference, open, runner_in,
};

/// `None`, said aloud, where the emulator cannot be built.
fn device<A: CudaAct>() -> Option<CudaBackend<A>> {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        ferrum_test_support::skip(reason);
        return None;
    }
    Some(CudaBackend::open(0).unwrap())
}

/// One that promises equal bits with activations of 16 bits as well.
fn batch_invariant<A: CudaAct>() -> Option<CudaBackend<A>> {
    device::<A>()?;
    let options = CudaOptions {
        batch_invariant: true,
    };
    let device = CudaBackend::open_with(0, options).unwrap();
    assert_eq!(device.batch_invariance(), BatchInvariance::BitExact);
    Some(device)
}

/// Logits of all positions, and as many greedy tokens as `steps`.
fn check(device: &CudaF32, path: &Path, expectation: &Path, steps: usize) -> Result<(), String> {
    let model = open(path);
    let expected = expected(expectation);
    let layout = KvLayout::Paged { block_size: 8 };
    let mut runner = runner_in::<_, KvF32, Moe<Dequantized>>(device, &model, layout);
    let found = logits_in_chunks(&mut runner, &expected.tokens, &[usize::MAX]);
    let difference = max_difference(&found, &expected.logits);
    println!("{}: {difference:.1e}", path.display());
    if difference.is_nan() || difference > 1e-4 {
        return Err(format!("{}: logits differ by {difference}", path.display()));
    }
    let found = greedy(&mut runner, &expected.tokens[..8], steps);
    match found == expected.greedy[..steps] {
        true => Ok(()),
        false => Err(format!("{}: greedy tokens {found:?}", path.display())),
    }
}

/// The ending of fixtures that are there for conversions, whose rows divide into blocks: each family has another one.
const WIDE: &str = "-wide";

/// The fixtures that run here, and those that are left out.
fn divided_dirs() -> (Vec<PathBuf>, Vec<PathBuf>) {
    let is_run = |dir: &PathBuf| !dir.to_string_lossy().ends_with(WIDE);
    support::fixture_dirs().into_iter().partition(is_run)
}

fn fixture_dirs() -> Vec<PathBuf> {
    divided_dirs().0
}

/// Families whose fixtures are in other folders, and the tests here that run them.
const ELSEWHERE: [(&str, fn()); 2] = [
    ("gemma3-vision", images_are_seen_as_transformers_sees_them),
    (
        "gemma-embedding",
        texts_seen_both_ways_have_the_vectors_of_transformers,
    ),
];

/// A test of this file runs each family, and what is left out has a fixture of the same family that is not.
#[test]
fn no_family_is_left_out() {
    let family = |dir: &PathBuf| family_for(&ModelSource::open(dir).unwrap()).unwrap().name;
    let (run, left_out) = divided_dirs();
    let of_dirs: BTreeSet<_> = run.iter().map(family).collect();
    let elsewhere: BTreeSet<_> = ELSEWHERE.iter().map(|(name, _)| *name).collect();
    assert!(of_dirs.is_disjoint(&elsewhere), "{elsewhere:?} is too long");
    let all: BTreeSet<_> = FAMILIES.iter().map(|family| family.name).collect();
    let tested: BTreeSet<_> = of_dirs.union(&elsewhere).copied().collect();
    assert_eq!(tested, all);
    for wide in left_out {
        let name = wide.to_str().unwrap().strip_suffix(WIDE).unwrap();
        let other = PathBuf::from(name);
        assert!(run.contains(&other), "{name} is no fixture");
        assert_eq!(family(&wide), family(&other), "{name}");
    }
}

/// All families; one of them with all 64 tokens, the others with fewer, as the emulator is no card.
#[test]
fn cuda_backend_equals_transformers() {
    let Some(device) = device::<f32>() else {
        return;
    };
    let cases = fixture_dirs();
    let checked = cases.iter().map(|dir| {
        let steps = if dir.ends_with("qwen3") { 64 } else { 6 };
        check(&device, dir, &dir.join("expected.safetensors"), steps)
    });
    let failures: Vec<_> = checked.filter_map(Result::err).collect();
    let (failed, all) = (failures.len(), cases.len());
    assert!(
        failures.is_empty(),
        "{failed} of {all}:\n{}",
        failures.join("\n")
    );
}

/// Models, each with the logits it is expected to be near: how far they may be, and how many tokens are to be the most likely of
/// both, for those without experts.
fn stay_near<A: CudaAct>(cases: &[(PathBuf, PathBuf)], (most, least): (f64, f64)) {
    let Some(device) = device::<A>() else {
        return;
    };
    let mut failures = Vec::new();
    for (path, expectation) in cases {
        let (model, expected) = (open(path), expected(expectation));
        let layout = KvLayout::Paged { block_size: 8 };
        let mut runner = runner_in::<_, KvFp16, Moe<Native>>(&device, &model, layout);
        let found = logits_in_chunks(&mut runner, &expected.tokens, &[usize::MAX]);
        let (kl, same) = compare(&expected.logits, &found, model.spec.vocab_size);
        println!("{}: KL {kl:.1e}, {same:.2} the same", path.display());
        // Experts of random weights are nearly tied, so a rounded token may go to others.
        let layers = model.spec.layers.iter();
        let mut experts = layers.map(|layer| matches!(layer.feed_forward, FeedForwardSpec::Moe(_)));
        let (most, least) = if experts.any(|has| has) {
            (0.1, 0.7)
        } else {
            (most, least)
        };
        if kl.is_nan() || kl > most || same < least {
            failures.push(format!("{}: KL {kl:.1e}, {same:.2}", path.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// All families with activations of bf16, as models run. What they keep of f32 is what 8 bits of precision keep.
#[test]
fn bf16_activations_stay_near_transformers() {
    let case = |dir: PathBuf| (dir.clone(), dir.join("expected.safetensors"));
    let cases: Vec<_> = fixture_dirs().into_iter().map(case).collect();
    stay_near::<bf16>(&cases, (2e-3, 0.9));
}

/// A family for each kind of weight with activations of f16: dense ones of f32, f16 and bf16, FP8, blocks, and experts of two
/// kinds.
#[test]
fn f16_activations_stay_near_transformers() {
    let cases = [
        ("qwen3", "", ""),
        ("mistral", "", ""),
        ("llama3-tied", "", ""),
        ("gemma3-bases", "", ""),
        ("llama-fp8-block", "", ""),
        ("llama-quantized", "model-q8_0.gguf", "-q8_0"),
        ("qwen3-moe-sparse", "", ""),
        ("qwen3-moe-quantized", "model-q4_0.gguf", "-q4_0"),
        ("qwen3-next", "", ""),
    ]
    .map(|(name, file, expected)| {
        let dir = fixtures().join(name);
        let expected = dir.join(format!("expected{expected}.safetensors"));
        match file {
            "" => (dir, expected),
            file => (dir.join(file), expected),
        }
    });
    stay_near::<f16>(&cases, (1e-4, 0.9));
}

#[test]
fn images_and_texts_have_the_vectors_of_transformers() {
    let Some(device) = device::<f32>() else {
        return;
    };
    for name in support::clip::NAMES {
        let (cosine, logit) = support::clip::compare(&device, name);
        assert!(
            cosine > 0.999_99 && logit < 1e-3,
            "{name}: {cosine} {logit}"
        );
    }
}

/// Decoders with bidirectional attention, with windows and without.
#[test]
fn texts_seen_both_ways_have_the_vectors_of_transformers() {
    use support::bidirectional::{GEMMA, QWEN, difference};
    let Some(device) = device::<f32>() else {
        return;
    };
    for name in [GEMMA, QWEN] {
        let found = difference(&device, name);
        assert!(found <= 5e-5, "{name}: {found}");
        // Activations of 16 bits.
        let half = CudaBackend::<bf16>::open(0).unwrap();
        let found = difference(&half, name);
        assert!(found <= 0.2 && found > 1e-4, "{name} in bf16: {found}");
    }
}

/// Vectors of texts, and logits of classifiers and rerankers.
#[test]
fn encoders_have_the_vectors_and_scores_of_transformers() {
    use support::encoders::{NAMES, difference};
    let (Some(device), Some(half)) = (device::<f32>(), device::<bf16>()) else {
        return;
    };
    for name in NAMES {
        let found = difference(&device, name);
        println!("{name}: {found:.1e}");
        assert!(found <= 2e-5, "{name}: {found}");
    }
    // Positions from a table and by rotation, windows, and classifiers. Logits of up to 3 lose the most.
    for name in ["bert-labels", "xlm-roberta-reranker", "modernbert"] {
        let found = difference(&half, name);
        println!("{name} in bf16: {found:.1e}");
        assert!(found <= 0.25 && found > 1e-3, "{name} in bf16: {found}");
    }
}

#[test]
fn texts_of_an_encoder_have_the_same_bits_in_every_batch() {
    let (Some(device), Some(half)) = (device::<f32>(), batch_invariant::<bf16>()) else {
        return;
    };
    support::encoders::check_alone(&device, "bert", &[(4, 64)]);
    support::encoders::check_alone(&half, "modernbert", &[(4, 64)]);
}

/// The encoder's states of a window, and the first tokens that the decoder writes of it.
#[test]
fn speech_has_the_states_and_tokens_of_transformers() {
    use support::whisper::{difference, expected, greedy, runner, text};
    const TOKENS: usize = 6;
    let (Some(device), Some(half)) = (device::<f32>(), device::<bf16>()) else {
        return;
    };
    let expected = expected();
    let text = text(&expected, TOKENS);
    let mut model = runner(&device);
    let found = difference(&mut model, &expected);
    println!("{found:.1e}");
    assert!(found <= 2e-5, "{found}");
    assert_eq!(greedy(&mut model, TOKENS), text);
    let mut model = runner(&half);
    let found = difference(&mut model, &expected);
    println!("bf16: {found:.1e}");
    assert!(found <= 0.05 && found > 1e-3, "bf16: {found}");
    assert_eq!(greedy(&mut model, TOKENS), text, "bf16");
}

/// With activations of f32 an adapter of `llama3-tied` among others in a batch, and those of other models; with bf16 those of
/// `llama3-tied`.
#[test]
fn adapters_give_the_logits_of_peft() {
    use support::lora::{ADAPTERS, check_together, folder, with_and_without};
    let (Some(device), Some(half)) = (device::<f32>(), device::<bf16>()) else {
        return;
    };
    let expected = |name| support::read_expected(&folder(name).join("expected.safetensors")).1;
    let check = |name, found: &[f32]| {
        let difference = max_difference(found, &expected(name));
        println!("{name}: {difference:.1e}");
        assert!(difference <= 1e-4, "{name}: {difference}");
    };
    let together = check_together(&device, &[[1, 0, 3, 2]], &[5]);
    check("llama-all", &together);
    let is_llama = |(_, base): &(_, &str)| *base == "llama3-tied";
    let (llamas, others): (Vec<_>, Vec<_>) = ADAPTERS.into_iter().partition(is_llama);
    for (name, base) in others {
        check(name, &with_and_without(&device, name, base).adapted);
    }
    for (name, base) in llamas {
        let (found, expected) = (with_and_without(&half, name, base), expected(name));
        let (kl, same) = compare(&expected, &found.adapted, found.vocab);
        let (without, _) = compare(&expected, &found.plain, found.vocab);
        let what =
            format!("{name} in bf16: KL {kl:.1e}, {same:.2} the same, {without:.1e} without");
        println!("{what}");
        assert!(
            kl < 2e-3 && kl > 1e-5 && same >= 0.9 && without > 0.1,
            "{what}"
        );
    }
    let half = batch_invariant::<bf16>().unwrap();
    check_together(&half, &[[3, 2, 1, 0]], &[5]);
}

/// What heads make of the target's hidden states, and of their own tokens and states after that.
#[test]
fn draft_heads_give_what_is_expected() {
    use support::draft_heads::{check_shared_step, differences, heads};
    type Form = Moe<Dequantized>;
    let (Some(device), Some(half)) = (device::<f32>(), device::<bf16>()) else {
        return;
    };
    let mut in_bf16 = 0;
    for case in heads() {
        let (_, model, folder) = &case;
        // The heads of these files are those of folders.
        if matches!(model.source, ModelSource::Gguf(_)) {
            continue;
        }
        let name = folder.file_name().unwrap().to_str().unwrap();
        let found = differences::<_, Form>(&device, &case, 5);
        println!("{name}: {found:?}");
        assert!(found.iter().all(|d| *d <= 1e-4), "{name}: {found:?}");
        if !["deepseek3-mtp", "qwen3-eagle3"].contains(&name) {
            continue;
        }
        check_shared_step::<_, Form>(&device, &case);
        let found = differences::<_, Moe<Native>>(&half, &case, 5);
        println!("{name} in bf16: {found:?}");
        assert!(
            found.iter().all(|d| *d <= 0.3 && *d > 1e-3),
            "{name} in bf16: {found:?}"
        );
        in_bf16 += 1;
    }
    assert_eq!(in_bf16, 2);
}

/// Weights as they are in their files, with activations of 8 bits: near the logits of the dequantised ones.
#[test]
fn quantised_models_stay_near_dequantised_ones() {
    let Some(device) = device::<f32>() else {
        return;
    };
    let mut checked = 0;
    for dir in fixture_dirs() {
        for (file, expectation) in [
            ("model-q8_0.gguf", "expected-q8_0.safetensors"),
            ("model-q4_0.gguf", "expected-q4_0.safetensors"),
        ] {
            let path = dir.join(file);
            if !path.exists() {
                continue;
            }
            let (model, expected) = (open(&path), expected(&dir.join(expectation)));
            let layout = KvLayout::Paged { block_size: 8 };
            let mut runner = runner_in::<_, KvF32, Moe<Native>>(&device, &model, layout);
            let found = logits_in_chunks(&mut runner, &expected.tokens, &[usize::MAX]);
            let (kl, same) = compare(&expected.logits, &found, model.spec.vocab_size);
            println!("{}: KL {kl:.1e}, {same:.2} the same", path.display());
            assert!(kl < 1e-2 && same > 0.8, "{}: {kl}, {same}", path.display());
            checked += 1;
        }
    }
    assert!(checked > 0);
}

/// Logits of a prompt, and of its last tokens one at a time, which are captured steps.
fn logits_with_cache<B, K, W>(device: &B, dir: &Path) -> Vec<f32>
where
    B: LlmBackend + BackendKvDtype<K>,
    K: KvDtypeKind,
    W: WeightForm<B>,
{
    const DECODED: usize = 6;
    let (model, layout) = (open(dir), KvLayout::Paged { block_size: 8 });
    let tokens = expected(&dir.join("expected.safetensors")).tokens;
    let mut runner = runner_in::<_, K, W>(device, &model, layout);
    let logits = logits_in_chunks(&mut runner, &tokens, &[tokens.len() - DECODED, 1]);
    if device.captures() {
        let counts = runner.graph_counts();
        assert!(counts.replayed > 0, "{}: {counts:?}", dir.display());
    }
    logits
}

/// Activations and cache, and the logits with them on a device and on the reference.
struct Cached {
    elements: String,
    found: Vec<f32>,
    reference: Vec<f32>,
}

fn cached<A, K>(device: &CudaBackend<A>, dir: &Path) -> Cached
where
    A: CudaAct,
    K: KvCodec,
    CudaBackend<A>: BackendKvDtype<K>,
{
    let reference = Reference::<Mixed<A>>::new();
    Cached {
        elements: format!("{} with {}", A::DTYPE.name(), K::DTYPE.name()),
        found: logits_with_cache::<_, K, Moe<Native>>(device, dir),
        reference: logits_with_cache::<_, K, Moe<Dequantized>>(&reference, dir),
    }
}

/// The median of the rows' KL divergences: experts of random weights are nearly tied, so a few rows may be of other experts.
fn median_kl(p: &[f32], q: &[f32], vocab: usize) -> f64 {
    let rows = p.chunks(vocab).zip(q.chunks(vocab));
    let mut all: Vec<_> = rows.map(|(p, q)| compare(p, q, vocab).0).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Caches of each element that takes fewer bits than f32, of keys and values and of latent rows. Logits are near those of the reference with
/// the same elements: three times as near as to those with any other, so that an element that loses other bits is noticed.
#[test]
fn caches_lose_the_bits_that_the_reference_loses() {
    let (Some(device), Some(halves)) = (device::<bf16>(), device::<f16>()) else {
        return;
    };
    for name in ["qwen3", "deepseek2"] {
        let dir = fixtures().join(name);
        let vocab = open(&dir).spec.vocab_size;
        let all = [
            cached::<bf16, KvBf16>(&device, &dir),
            cached::<bf16, KvFp8>(&device, &dir),
            cached::<bf16, KvInt8>(&device, &dir),
            cached::<f16, KvBf16>(&halves, &dir),
        ];
        for (own, of) in all.iter().enumerate() {
            let (mean, same) = compare(&of.reference, &of.found, vocab);
            let kl = all.each_ref();
            let kl = kl.map(|other| median_kl(&other.reference, &of.found, vocab));
            let what = format!("{name}, {}: {kl:?}, mean {mean}, {same}", of.elements);
            println!("{what}");
            assert!(kl[own] < 5e-4 && mean < 1e-2 && same >= 0.9, "{what}");
            let mut others = (0..all.len()).filter(|other| *other != own);
            assert!(others.all(|other| 3.0 * kl[own] < kl[other]), "{what}");
        }
    }
}

fn same_bits<A: CudaAct, K: KvDtypeKind>(device: &CudaBackend<A>, name: &str)
where
    CudaBackend<A>: BackendKvDtype<K>,
{
    let model = open(&fixtures().join(name));
    let tokens = expected(&fixtures().join(name).join("expected.safetensors")).tokens;
    let of = |layout, chunks: &[usize]| {
        let mut runner = runner_in::<_, K, Moe<Native>>(device, &model, layout);
        let logits = logits_in_chunks(&mut runner, &tokens, chunks);
        logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let whole = of(KvLayout::Contiguous, &[96]);
    for (layout, chunks) in [
        (KvLayout::Paged { block_size: 7 }, &[96usize][..]),
        (KvLayout::Paged { block_size: 8 }, &[17, 1, 3]),
    ] {
        assert!(
            of(layout, chunks) == whole,
            "{name}: {layout:?} in {chunks:?}"
        );
    }
}

#[test]
fn a_row_has_the_same_bits_in_chunks_and_blocks() {
    let Some(device) = device::<f32>() else {
        return;
    };
    same_bits::<_, KvF32>(&device, "qwen3");
    same_bits::<_, KvFp16>(&device, "gemma2");
    same_bits::<_, KvInt8>(&device, "mistral-window");
    same_bits::<_, KvF32>(&device, "qwen35");
    same_bits::<_, KvF32>(&device, "granite-hybrid");
}

/// Features of images, and logits of a prompt that has some, in one step and in several.
#[test]
fn images_are_seen_as_transformers_sees_them() {
    let Some(device) = device::<f32>() else {
        return;
    };
    let difference = support::vision::compare(&device, &support::vision::folder());
    assert!(difference < 5e-5, "{difference}");
    support::vision::check_logits::<_, KvF32>(&device, 1e-4);
}

/// The device that promises equal bits keeps them with activations of 16 bits as well.
#[test]
fn a_batch_invariant_device_has_the_same_bits_in_chunks_and_blocks() {
    let (Some(device), Some(half)) = (batch_invariant::<bf16>(), batch_invariant::<f16>()) else {
        return;
    };
    same_bits::<_, KvFp16>(&device, "qwen3");
    same_bits::<_, KvFp16>(&half, "mistral");
    same_bits::<_, KvFp16>(&half, "llama3-tied");
}
