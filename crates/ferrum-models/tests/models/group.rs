//! Ranks that compute a model together give the logits of one device, from every fixture and every format of weights.

use crate::gpu::gpu;
use crate::support::group::{LAYOUT, greedy, group, logits, step};
use crate::support::{
    compare, config, expected, fixture_dirs, fixtures, logits_in_chunks, max_difference, open,
    read_expected, runner_in,
};
use ferrum_formats::LoraFolder;
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32, LlmBackend};
use ferrum_models::{
    Dequantized, ModelRunner, Moe, Native, RankShard, Readback, RunnerConfig, ShardBoundaries,
    StepOutput, WeightForm, WeightPolicy, load_rank_weights, rank_memory_plan,
};
use ferrum_test_support::available;
use ferrum_types::{AdapterId, Error, TokenId};
use safetensors::tensor::{TensorView, serialize_to_file};
use std::path::PathBuf;
use std::sync::Arc;

/// What another order of sums may change in f32 logits.
const TOLERANCE: f32 = 1e-4;

/// One thread for each rank.
fn cpus(ranks: usize, isa: Isa) -> Vec<CpuBackend> {
    let config = CpuConfig {
        isa: Some(isa),
        threads: Some(1),
    };
    (0..ranks)
        .map(|_| CpuBackend::with_config(config).unwrap())
        .collect()
}

fn references(ranks: usize) -> Vec<ReferenceBackend> {
    vec![ReferenceBackend::open(0).unwrap(); ranks]
}

/// Every file of every fixture, with the tokens that it is tried with.
fn cases() -> Vec<(PathBuf, Vec<TokenId>)> {
    let mut cases = Vec::new();
    for dir in fixture_dirs() {
        let tokens = expected(&dir.join("expected.safetensors")).tokens;
        let files = ["model.gguf", "model-q8_0.gguf", "model-q4_0.gguf"];
        let files = files.iter().map(|file| dir.join(file));
        for path in files.filter(|path| path.exists()).chain([dir.clone()]) {
            cases.push((path, tokens.clone()));
        }
    }
    cases
}

/// Holds groups of two and three ranks against one device.
fn check_all<B: LlmBackend>(devices: &[B])
where
    Moe<Dequantized>: WeightForm<B>,
{
    let mut failures = Vec::new();
    for (path, tokens) in cases() {
        let model = open(&path);
        let mut alone = runner_in::<B, KvF32, Moe<Dequantized>>(&devices[0], &model, LAYOUT);
        let whole = logits_in_chunks(&mut alone, &tokens, &[usize::MAX]);
        for ranks in [2, 3] {
            let mut group = group::<B, Moe<Dequantized>>(&devices[..ranks], &model);
            let found = logits(&mut group, (&tokens, None), tokens.len());
            let difference = max_difference(&found, &whole);
            if difference.is_nan() || difference > TOLERANCE {
                failures.push(format!("{}: {ranks} ranks: {difference}", path.display()));
            }
            // Sums over ranks are made element by element, so chunks change no bit, as on one device.
            let chunked = logits(&mut group, (&tokens, None), 5);
            let same = chunked
                .iter()
                .zip(&found)
                .all(|(a, b)| a.to_bits() == b.to_bits());
            if !same {
                failures.push(format!("{}: {ranks} ranks: chunks differ", path.display()));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn reference_ranks_give_the_logits_of_one() {
    check_all(&references(3));
}

#[test]
fn cpu_ranks_give_the_logits_of_one() {
    check_all(&cpus(3, Isa::best_exact()));
}

/// Two contexts of one GPU, each with half of the model.
#[test]
fn gpu_ranks_give_the_logits_of_one() {
    let Some(device) = gpu() else {
        return;
    };
    for name in ["llama3-tied", "qwen3-bias", "olmo2", "lfm2"] {
        let dir = fixtures().join(name);
        let (model, tokens) = (
            open(&dir),
            expected(&dir.join("expected.safetensors")).tokens,
        );
        let mut alone = runner_in::<_, KvF32, Dequantized>(&device, &model, LAYOUT);
        let whole = logits_in_chunks(&mut alone, &tokens, &[usize::MAX]);
        let mut group = group::<_, Dequantized>(&[device.clone(), device.clone()], &model);
        let found = logits(&mut group, (&tokens, None), 9);
        let difference = max_difference(&found, &whole);
        assert!(difference <= TOLERANCE, "{name}: {difference}");
    }
}

/// Weights that stay quantised: the activations of a rank are rounded as those of one device are, but a sum in another
/// order may round to another byte.
#[test]
fn quantised_ranks_stay_near_one() {
    let devices = cpus(3, Isa::best_exact());
    let quantised = |path: &PathBuf| {
        let name = path.to_string_lossy().into_owned();
        ["gptq", "awq", "fp8", "packed", "q8_0", "q4_0"]
            .iter()
            .any(|part| name.contains(part))
    };
    let mut tried = 0;
    for (path, tokens) in cases().into_iter().filter(|(path, _)| quantised(path)) {
        let model = open(&path);
        let mut alone = runner_in::<_, KvF32, Moe<Native>>(&devices[0], &model, LAYOUT);
        let whole = logits_in_chunks(&mut alone, &tokens, &[usize::MAX]);
        for ranks in [2, 3] {
            let mut group = group::<_, Moe<Native>>(&devices[..ranks], &model);
            let found = logits(&mut group, (&tokens, None), 7);
            let (kl, same) = compare(&whole, &found, model.spec.vocab_size);
            let name = path.display();
            println!("{name}: {ranks} ranks: KL {kl:.1e}, {:.0} %", 100.0 * same);
            assert!(
                kl < 1e-2 && same >= 0.8,
                "{name}: {ranks} ranks: KL {kl}, {same}"
            );
            if name.to_string().contains("fp8") {
                // Decoded to exactly its numbers, so only the order of sums differs.
                let difference = max_difference(&found, &whole);
                assert!(
                    difference <= TOLERANCE,
                    "{name}: {ranks} ranks: {difference}"
                );
            }
            tried += 1;
        }
    }
    assert!(tried >= 2 * 20, "{tried}");
}

/// Holds groups of two and four ranks against one device: they have the same bits, unless a rank dequantises what one device
/// computes on as it is. Gives how many had to be equal, and which need not.
fn check_bits<W: WeightForm<CpuBackend>>(devices: &[CpuBackend]) -> (usize, Vec<String>) {
    let policy = WeightPolicy::of::<CpuBackend, W>();
    let (mut same_bits, mut others) = (0, Vec::new());
    let mut failures = Vec::new();
    for (path, tokens) in cases() {
        let splits = devices[0].isa().splits_f32();
        if splits
            && ["llama-fp8-odd", "deepseek3-fp8"]
                .iter()
                .any(|name| path.ends_with(name))
        {
            // Dequantised where whole, and decoded in ranks: numbers that are split in one of the two.
            continue;
        }
        let model = open(&path);
        let mut alone = runner_in::<_, KvF32, W>(&devices[0], &model, LAYOUT);
        let whole = logits_in_chunks(&mut alone, &tokens, &[usize::MAX]);
        for ranks in [2, 4] {
            let cuts = (0..ranks).map(|rank| model.shard(policy, (rank, ranks)));
            let Ok(cuts) = cuts.collect::<Result<Vec<_>, _>>() else {
                continue;
            };
            let is_kept = |cut| model.dequantized_slices(policy, cut).is_empty();
            let kept = cuts.iter().all(is_kept);
            let mut group = group::<_, W>(&devices[..ranks], &model);
            let found = logits(&mut group, (&tokens, None), 7);
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
            if kept && !found.iter().zip(&whole).all(same) {
                let difference = max_difference(&found, &whole);
                failures.push(format!("{}: {ranks} ranks: {difference}", path.display()));
            }
            match kept {
                true => same_bits += 1,
                false => others.push(format!("{}: {ranks} ranks", path.display())),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    (same_bits, others)
}

#[test]
fn ranks_have_the_bits_of_one() {
    // Parts of sums are to be those of ranks at each of these, whichever is the default.
    let rounding = [Isa::Avx512Bf16, Isa::Amx, Isa::AmxF32];
    let rounding = available(rounding, Isa::is_available);
    for isa in [Isa::best_exact()].into_iter().chain(rounding) {
        let (same, others) = check_bits::<Moe<Dequantized>>(&cpus(4, isa));
        assert!(
            same > 350 && others.is_empty(),
            "{isa:?}: {same}, {others:?}"
        );
    }
}

/// Where activations are rounded to bytes, a sum that differs in its last bit may become another byte.
#[test]
fn quantised_ranks_have_the_bits_of_one() {
    for isa in available(Isa::ALL, Isa::is_available) {
        let (same, others) = check_bits::<Moe<Native>>(&cpus(4, isa));
        assert!(same > 350, "{isa:?}: {same}");
        assert!(others.is_empty(), "{isa:?}: {others:?}");
    }
}

/// The first token of each row, greedy, is chosen from the logits of all ranks.
#[test]
fn greedy_tokens_are_those_of_one() {
    let devices = cpus(3, Isa::best_exact());
    for name in ["llama3-tied", "qwen2", "mixtral", "olmo2", "lfm2"] {
        let dir = fixtures().join(name);
        let expected = expected(&dir.join("expected.safetensors"));
        let model = open(&dir);
        let mut group = group::<_, Moe<Dequantized>>(&devices, &model);
        let found = greedy(&mut group, &expected.tokens[..8], 16);
        assert_eq!(found, expected.greedy[..16], "{name}");
    }
}

#[test]
fn adapters_are_cut_with_the_model() {
    for (name, base) in [
        ("llama-all", "llama3-tied"),
        ("llama-all", "llama3-tied/model.gguf"),
        ("llama-up", "llama3-tied"),
        ("qwen3-patterns", "qwen3"),
        ("lfm2-convolutions", "lfm2"),
        ("lfm2-convolutions", "lfm2/model.gguf"),
        ("qwen35-hybrid", "qwen35/model.gguf"),
    ] {
        let dir = fixtures().join("../lora").join(name);
        let (tokens, expected) = read_expected(&dir.join("expected.safetensors"));
        let adapter = Arc::new(LoraFolder::open(dir).unwrap());
        let model = open(&fixtures().join(base));
        for ranks in [2, 3] {
            let mut group = group::<_, Dequantized>(&cpus(ranks, Isa::best_exact()), &model);
            let plain = logits(&mut group, (&tokens, None), 96);
            let id = AdapterId(7);
            group.load_adapter(id, &adapter).unwrap();
            let found = logits(&mut group, (&tokens, Some(id)), 9);
            let difference = max_difference(&found, &expected);
            assert!(
                difference <= TOLERANCE,
                "{name} on {base}, {ranks} ranks: {difference}"
            );
            assert_eq!(
                logits(&mut group, (&tokens, None), 96),
                plain,
                "{name} on {base}"
            );
            assert!(group.unload_adapter(id) && !group.unload_adapter(id));
        }
    }
}

/// An adapter of maps whose inputs ranks gather is cut as if they did not.
#[test]
fn adapters_of_gathered_maps_have_the_bits_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4}"#;
    std::fs::write(file("adapter_config.json"), config).unwrap();
    let maps = [("self_attn.o_proj", 128), ("mlp.down_proj", 96)];
    let matrices: Vec<(String, [usize; 2])> = maps
        .iter()
        .flat_map(|(map, inputs)| {
            let name = format!("base_model.model.model.layers.0.{map}");
            let name = |side| format!("{name}.lora_{side}.weight");
            [(name("A"), [2, *inputs]), (name("B"), [64, 2])]
        })
        .collect();
    let values: Vec<f32> = (0..256)
        .map(|i| (i * 37 % 101) as f32 / 80.0 - 0.6)
        .collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensors = matrices.iter().map(|(name, shape)| {
        let bytes = &bytes[..4 * shape[0] * shape[1]];
        let view = TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes);
        (name, view.unwrap())
    });
    serialize_to_file(tensors, None, &file("adapter_model.safetensors")).unwrap();
    let adapter = Arc::new(LoraFolder::open(dir.path()).unwrap());
    let path = fixtures().join("llama-gptq4-order");
    let (model, tokens) = (
        open(&path),
        expected(&path.join("expected.safetensors")).tokens,
    );
    let devices = cpus(4, Isa::best());
    let adapted = |ranks| {
        let mut group = group::<_, Native>(&devices[..ranks], &model);
        let plain = logits(&mut group, (&tokens, None), 7);
        group.load_adapter(AdapterId(7), &adapter).unwrap();
        (plain, logits(&mut group, (&tokens, Some(AdapterId(7))), 7))
    };
    let alone = adapted(1);
    assert_ne!(alone.0, alone.1);
    for ranks in [2, 4] {
        assert_eq!(adapted(ranks), alone, "{ranks} ranks");
    }
}

/// A rank's share of the weights, by the plan.
#[test]
fn a_rank_holds_its_share_of_the_weights() {
    let policy = WeightPolicy::of::<CpuBackend, Moe<Native>>();
    let sizes = RunnerConfig::single(64);
    for name in [
        "llama2",
        "qwen3",
        "mixtral",
        "qwen3-moe",
        "llama-gptq4",
        "llama-gptq4-order",
        "llama-awq",
        "llama-fp8-block",
        "gpt-oss-mxfp4",
    ] {
        let model = open(&fixtures().join(name));
        let bytes = |ranks: usize| -> Vec<f64> {
            let plan = |rank| {
                let cut = model.shard(policy, (rank, ranks)).unwrap();
                rank_memory_plan::<KvF32>(&model, policy, &sizes, &cut)
            };
            (0..ranks).map(|rank| plan(rank).weights as f64).collect()
        };
        let whole = bytes(1)[0];
        let both = bytes(2);
        // Norms and routers are held by both, and groups of 32 of a width of 96 are dealt out 1 to 2.
        let most = both.iter().copied().fold(0.0, f64::max) / whole;
        println!("{name}: at most {most:.3} of {whole} bytes on a rank");
        assert!(most < 0.6, "{name}: {most}");
        let sum = both.iter().sum::<f64>() / whole;
        assert!((1.0..1.1).contains(&sum), "{name}: {sum}");
    }
}

#[test]
fn a_batch_that_does_not_fit_leaves_the_group_alone() {
    let model = open(&fixtures().join("qwen2"));
    let mut group = group::<_, Dequantized>(&references(2), &model);
    let (pool, mut output) = (group.pool().blocks, StepOutput::default());
    let vocab = model.spec.vocab_size as TokenId;
    let outside = step(&[vocab], 0, 1, pool);
    let refused = group.run(&outside, &[Readback::Logits], &mut output);
    assert!(
        matches!(refused, Err(Error::InvalidArgument { .. })),
        "{refused:?}"
    );
    let fits = step(&[1], 0, 1, pool);
    group.run(&fits, &[Readback::Logits], &mut output).unwrap();
    assert_eq!(output.logits().len(), model.spec.vocab_size);
}

/// A rank's weights are worth nothing alone.
#[test]
fn a_rank_outside_its_group_is_refused() {
    let model = open(&fixtures().join("qwen2"));
    let device = ReferenceBackend::open(0).unwrap();
    let policy = WeightPolicy::of::<ReferenceBackend, Dequantized>();
    let cut = model.shard(policy, (1, 2)).unwrap();
    let weights =
        load_rank_weights::<_, Dequantized>(&device, &model, &cut, &mut |_, _| ()).unwrap();
    let mut runner: ModelRunner<_, KvF32> =
        ModelRunner::new(&device, cut.rank_spec(), weights, config(LAYOUT)).unwrap();
    let batch = step(&[1], 0, 1, runner.pool().blocks);
    let found = runner.submit(&batch, &[Readback::Logits]).map(|_| ());
    let text = found.unwrap_err().to_string();
    assert!(
        text.contains("rank 1 of 2, the context is rank 0 of 1"),
        "{text}"
    );
    // Nor are they those of another model.
    let other = open(&fixtures().join("qwen3"));
    let refused = load_rank_weights::<_, Dequantized>(&device, &other, &cut, &mut |_, _| ());
    assert!(matches!(
        refused.map(|_| ()),
        Err(Error::InvalidArgument { .. })
    ));
}

/// What is dequantised because it is cut is told.
#[test]
fn slices_that_are_dequantised_are_named() {
    let policy = WeightPolicy::of::<CpuBackend, Moe<Native>>();
    let dequantized = |name: &str, ranks| {
        let model = open(&fixtures().join(name));
        let cut = model.shard(policy, (0, ranks)).unwrap();
        let ids = model.dequantized_slices(policy, &cut);
        ids.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    // Heads of 32 elements, and widths in units of 32; in activation order, inputs are gathered.
    for name in [
        "llama-gptq4-order",
        "llama-awq",
        "llama-gptq4",
        "llama-quantized/model-q8_0.gguf",
        "llama-fp8-block",
        "qwen2",
    ] {
        assert_eq!(dequantized(name, 2), Vec::<String>::new(), "{name}");
        assert_eq!(dequantized(name, 1), Vec::<String>::new(), "{name}");
    }
    // A cut that knows nothing of formats.
    let model = open(&fixtures().join("llama-quantized/model-q8_0.gguf"));
    let cut = RankShard::new(&model.spec, &ShardBoundaries::default(), (0, 4)).unwrap();
    let ids = model.dequantized_slices(policy, &cut);
    let found: Vec<_> = ids.iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        [0, 1].map(|layer| format!("layer {layer}, down projection"))
    );
}
