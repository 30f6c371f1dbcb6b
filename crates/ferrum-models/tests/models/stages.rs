//! Stages on several devices give what one device gives: the same bits on the CPU, and within the tolerance of an order
//! of sums where backends differ, from every fixture with more than one layer.

use crate::gpu::gpu;
use crate::support::{
    blocks, compare, config, exact_cpu, expected, fixture_dirs, fixtures, greedy, logits_in_chunks,
    max_difference, open, read_expected, runner_in, same_bits, staged_in,
};
use ferrum_formats::LoraFolder;
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32, KvFp16, KvInt8, LlmBackend, RowSampling};
use ferrum_models::{
    AuxHiddenPoint, AuxHiddenState, Dequantized, EarlierStage, FeedForwardSpec, KvLayout,
    LogitRows, Model, ModelRunner, Moe, Native, Readback, RunnerConfig, SeqStep, Stage, StepBatch,
    StepOutput, WeightForm, WeightPolicy, load_stage_weights, load_weights, memory_plan,
    stage_memory_plan,
};
use ferrum_types::{AdapterId, BlockId, Error, TokenId};
use safetensors::tensor::{SafeTensors, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

const LAYOUT: KvLayout = KvLayout::Paged { block_size: 8 };

/// What another order of sums may change in f32 logits.
const TOLERANCE: f32 = 1e-4;

/// Every file of every fixture that can be cut, with the tokens that it is tried with.
fn cases() -> Vec<(PathBuf, Vec<TokenId>)> {
    let mut cases = Vec::new();
    for dir in fixture_dirs() {
        let spec = open(&dir).spec;
        if spec.layers.len() < 2 || spec.per_layer.is_some() {
            continue;
        }
        let tokens = expected(&dir.join("expected.safetensors")).tokens;
        let files = ["model.gguf", "model-q8_0.gguf", "model-q4_0.gguf"];
        let files = files.iter().map(|file| dir.join(file));
        for path in files.filter(|path| path.exists()).chain([dir.clone()]) {
            cases.push((path, tokens.clone()));
        }
    }
    assert!(cases.len() > 40, "{}", cases.len());
    cases
}

/// A CPU with a number of threads, at the fastest level that rounds nothing.
fn cpu(threads: usize) -> CpuBackend {
    let config = CpuConfig {
        isa: Some(Isa::best_exact()),
        threads: Some(threads),
    };
    CpuBackend::with_config(config).unwrap()
}

fn has_experts(model: &Model) -> bool {
    let mut layers = model.spec.layers.iter();
    layers.any(|layer| matches!(layer.feed_forward, FeedForwardSpec::Moe(_)))
}

/// Layers of as many stages as there are layers.
fn one_each(model: &Model) -> Vec<Range<usize>> {
    let layers = 0..model.spec.layers.len();
    layers.map(|layer| layer..layer + 1).collect()
}

/// Holds stages on two CPUs against one, bit for bit.
fn check_cpu_stages<W: WeightForm<CpuBackend>>(path: &Path, tokens: &[TokenId]) {
    let (first, last) = (cpu(2), cpu(1));
    let model = open(path);
    let half = model.spec.layers.len() / 2;
    let halves = [0..half, half..model.spec.layers.len()];
    let run = |runner: &mut ModelRunner<CpuBackend, KvF32>| {
        let whole = logits_in_chunks(runner, tokens, &[usize::MAX]);
        (whole, greedy(runner, &tokens[..8], 12))
    };
    let (whole, text) = run(&mut runner_in::<_, KvF32, W>(&first, &model, LAYOUT));
    for layers in [halves.to_vec(), one_each(&model)] {
        let devices = (&first, &last);
        let mut staged = staged_in::<_, _, KvF32, W, W>(devices, &model, &layers, config(LAYOUT));
        let name = path.display();
        let (found, continued) = run(&mut staged);
        assert!(same_bits(&found, &whole), "{name}: {layers:?}");
        assert_eq!(continued, text, "{name}: {layers:?}");
        let chunked = logits_in_chunks(&mut staged, tokens, &[5, 1, 3]);
        assert!(same_bits(&chunked, &whole), "{name}: {layers:?}, in chunks");
    }
}

#[test]
fn cpu_stages_have_the_bits_of_one() {
    for (path, tokens) in cases() {
        check_cpu_stages::<Moe<Dequantized>>(&path, &tokens);
        if path.to_string_lossy().contains("-q") {
            check_cpu_stages::<Moe<Native>>(&path, &tokens);
        }
    }
}

/// Fixtures of quantised checkpoints have one layer: each with that layer twice, in a folder of its own.
fn doubled(to: &Path) -> Vec<(PathBuf, Vec<TokenId>)> {
    let mut cases = Vec::new();
    for from in fixture_dirs() {
        let file = from.join("model.safetensors");
        if open(&from).spec.layers.len() > 1 || !file.exists() {
            continue;
        }
        let dir = to.join(from.file_name().unwrap());
        std::fs::create_dir(&dir).unwrap();
        let config = std::fs::read_to_string(from.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["num_hidden_layers"] = json!(2);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let bytes = std::fs::read(file).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let again = |name: &str| name.replace(".layers.0.", ".layers.1.");
        let mut tensors: BTreeMap<String, TensorView<'_>> = file
            .iter()
            .map(|(name, view)| (again(name), view))
            .collect();
        tensors.extend(file.iter().map(|(name, view)| (name.to_owned(), view)));
        serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
        let tokens = expected(&from.join("expected.safetensors")).tokens;
        cases.push((dir, tokens));
    }
    assert!(cases.len() > 15, "{}", cases.len());
    cases
}

#[test]
fn stages_of_quantised_checkpoints_give_the_logits_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let all = doubled(dir.path());
    for (path, tokens) in &all {
        check_cpu_stages::<Moe<Native>>(path, tokens);
    }
    type Form = Moe<Dequantized>;
    let (cpu, reference) = (exact_cpu(), ReferenceBackend::open(0).unwrap());
    check_pair::<_, _, Form, Form>((&cpu, &reference), &all);
    let Some(gpu) = gpu() else { return };
    check_pair::<_, _, Form, Dequantized>((&cpu, &gpu), &all);
}

/// Holds two stages on two backends against one CPU.
fn check_pair<A: LlmBackend, B: LlmBackend, WA: WeightForm<A>, WB: WeightForm<B>>(
    devices: (&A, &B),
    paths: &[(PathBuf, Vec<TokenId>)],
) {
    let one = exact_cpu();
    let mut failures = Vec::new();
    for (path, tokens) in paths {
        let model = open(path);
        if has_experts(&model) && !(WA::EXPERTS && WB::EXPERTS) {
            continue;
        }
        let mut alone = runner_in::<_, KvF32, Moe<Dequantized>>(&one, &model, LAYOUT);
        let whole = logits_in_chunks(&mut alone, tokens, &[usize::MAX]);
        let text = greedy(&mut alone, &tokens[..8], 12);
        let layers = [0..1, 1..model.spec.layers.len()];
        let mut staged = staged_in::<A, B, KvF32, WA, WB>(devices, &model, &layers, config(LAYOUT));
        let found = logits_in_chunks(&mut staged, tokens, &[9]);
        let difference = max_difference(&found, &whole);
        if difference.is_nan() || difference > TOLERANCE {
            failures.push(format!("{}: {difference}", path.display()));
        }
        if greedy(&mut staged, &tokens[..8], 12) != text {
            failures.push(format!("{}: another text", path.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn cpu_and_reference_stages_give_the_logits_of_one() {
    let (cpu, reference) = (exact_cpu(), ReferenceBackend::open(0).unwrap());
    type Form = Moe<Dequantized>;
    check_pair::<_, _, Form, Form>((&cpu, &reference), &cases());
    check_pair::<_, _, Form, Form>((&reference, &cpu), &cases());
}

#[test]
fn cpu_and_gpu_stages_give_the_logits_of_one() {
    let Some(gpu) = gpu() else { return };
    let cpu = exact_cpu();
    // Each fixture, and of files with the same weights those that are quantised.
    let mut all = cases();
    all.retain(|(path, _)| path.is_dir() || path.to_string_lossy().contains("-q"));
    check_pair::<_, _, Moe<Dequantized>, Dequantized>((&cpu, &gpu), &all);
    // The other way round: the GPU's stage is not the one that chooses.
    let some: Vec<_> = cases().into_iter().step_by(5).collect();
    check_pair::<_, _, Dequantized, Moe<Dequantized>>((&gpu, &cpu), &some);
    check_pair::<_, _, Dequantized, Dequantized>((&gpu, &gpu), &some[..2]);
}

/// Embeddings of their own are computed from tokens, which later stages do not get.
#[test]
fn layers_with_embeddings_of_their_own_are_one_stage() {
    let spec = open(&fixtures().join("gemma4-shared")).spec;
    let layers = spec.layers.len();
    assert!(Stage::new(&spec, 0..layers).is_ok());
    let refused = Stage::new(&spec, 0..2).unwrap_err();
    assert!(refused.contains("embeddings of their own"), "{refused}");
}

/// A stage of a backend without kernels for experts is refused for the layers that it would have.
#[test]
fn experts_may_live_on_the_stage_that_has_kernels() {
    let device = ReferenceBackend::open(0).unwrap();
    let model = open(&fixtures().join("qwen3-moe-sparse"));
    let is_dense = |layer: &usize| {
        let spec = &model.spec.layers[*layer];
        matches!(spec.feed_forward, FeedForwardSpec::GatedMlp(_))
    };
    let layers = model.spec.layers.len();
    let load = |layer: usize| {
        let stage = Stage::new(&model.spec, layer..layer + 1).unwrap();
        load_stage_weights::<_, Dequantized>(&device, &model, &stage, &mut |_, _| ()).map(|_| ())
    };
    let (dense, sparse): (Vec<_>, Vec<_>) = (0..layers).partition(is_dense);
    assert!(!dense.is_empty() && !sparse.is_empty());
    assert!(dense.into_iter().all(|layer| load(layer).is_ok()));
    let refused = |layer| matches!(load(layer), Err(Error::Unsupported { .. }));
    assert!(sparse.into_iter().all(refused));
}

/// Weights that stay quantised on one device and are dequantised on the other.
#[test]
fn forms_of_weights_may_differ() {
    let (cpu, reference) = (exact_cpu(), ReferenceBackend::open(0).unwrap());
    for name in ["llama-quantized", "qwen3-moe-quantized"] {
        for ty in ["q8_0", "q4_0"] {
            let dir = fixtures().join(name);
            let model = open(&dir.join(format!("model-{ty}.gguf")));
            let whole = expected(&dir.join(format!("expected-{ty}.safetensors")));
            let mut staged: ModelRunner<_, KvF32> =
                staged_in::<_, _, _, Moe<Native>, Moe<Dequantized>>(
                    (&cpu, &reference),
                    &model,
                    &[0..1, 1..2],
                    config(LAYOUT),
                );
            let found = logits_in_chunks(&mut staged, &whole.tokens, &[7]);
            let (kl, same) = compare(&whole.logits, &found, model.spec.vocab_size);
            println!("{name} {ty}: KL {kl:.1e}, {:.0} %", 100.0 * same);
            assert!(kl < 1e-2 && same >= 0.8, "{name} {ty}: KL {kl}, {same}");
        }
    }
}

/// A batch of two sequences: a chunk of a prompt that wants all logits, and a decode step.
fn mixed(pool: usize) -> StepBatch {
    let mut batch = StepBatch::default();
    for (slot, (tokens, logits)) in [
        (&[5, 9, 2, 77, 31][..], LogitRows::All),
        (&[8], LogitRows::Last),
    ]
    .into_iter()
    .enumerate()
    {
        let blocks = blocks(pool, slot);
        batch
            .push(SeqStep {
                tokens,
                start: 0,
                prompt_len: tokens.len(),
                blocks: &blocks,
                hidden: false,
                logits,
                adapter: None,
            })
            .unwrap();
    }
    batch
}

/// What a stage ends with is what a run of its layers alone ends with, and asking for it changes no other bit.
#[test]
fn hidden_states_are_tapped_beside_logits() {
    fn check<A: LlmBackend, B: LlmBackend>(devices: (&A, &B), name: &str)
    where
        Moe<Dequantized>: WeightForm<A> + WeightForm<B>,
    {
        type Form = Moe<Dequantized>;
        let model = open(&fixtures().join(name));
        let (dim, last) = (model.spec.hidden_size, model.spec.layers.len() - 1);
        let layers = [0..1, 1..last + 1];
        let mut staged: ModelRunner<B, KvF32> =
            staged_in::<A, B, _, Form, Form>(devices, &model, &layers, config(LAYOUT));
        let mut alone: ModelRunner<A, KvF32> = runner_in::<A, _, Form>(devices.0, &model, LAYOUT);
        let pool = staged.pool().blocks;
        let plain = mixed(pool);
        let wanted = vec![Readback::Logits; 6];
        let run = |runner: &mut ModelRunner<B, KvF32>, batch: &StepBatch| {
            let mut output = StepOutput::default();
            runner.run(batch, &wanted, &mut output).unwrap();
            output
        };
        let untapped = run(&mut staged, &plain);
        assert!(untapped.aux_hidden().is_empty());
        let mut batch = mixed(pool);
        // Of the second sequence its only row, at both ends, and of the first one a row that is not its last.
        batch.add_aux_hidden_last(0, LogitRows::Last);
        batch.add_aux_hidden_last(last, LogitRows::All);
        batch.aux_hidden.push(tap(AuxHiddenPoint::Layer(0), 2));
        let tapped = run(&mut staged, &batch);
        assert!(same_bits(tapped.logits(), untapped.logits()), "{name}");
        assert_eq!(tapped.aux_hidden().len(), 3 * dim);
        let rows: Vec<_> = tapped.aux_hidden().chunks_exact(dim).collect();

        // The end of the last layer, on one device.
        let mut at_the_end = mixed(pool);
        at_the_end.add_aux_hidden_last(last, LogitRows::All);
        let mut output = StepOutput::default();
        alone.run(&at_the_end, &wanted, &mut output).unwrap();
        let difference = max_difference(output.aux_hidden(), rows[1]);
        assert!(difference <= TOLERANCE, "{name}: {difference}");
        // Without logits nothing has added up the stream yet.
        let mut chunk = StepBatch::default();
        let table = blocks(pool, 1);
        let step = SeqStep {
            tokens: &[8],
            start: 0,
            prompt_len: 1,
            blocks: &table,
            hidden: false,
            logits: LogitRows::None,
            adapter: None,
        };
        chunk.push(step).unwrap();
        chunk.add_aux_hidden_last(last, LogitRows::Last);
        let without = output.aux_hidden().to_vec();
        alone.run(&chunk, &[], &mut output).unwrap();
        assert!(
            max_difference(output.aux_hidden(), &without) <= 1e-6,
            "{name}"
        );

        // Of the first layer: a model that ends with it, on one device.
        let mut cut = open(&fixtures().join(name));
        cut.spec.layers.truncate(1);
        let mut first: ModelRunner<A, KvF32> = runner_in::<A, _, Form>(devices.0, &cut, LAYOUT);
        let mut batch = mixed(pool);
        batch.add_aux_hidden_last(0, LogitRows::Last);
        batch.aux_hidden.push(tap(AuxHiddenPoint::Layer(0), 2));
        first.run(&batch, &wanted, &mut output).unwrap();
        let found = [rows[0], rows[2]].concat();
        assert!(same_bits(output.aux_hidden(), &found), "{name}");
    }
    let (cpu, reference) = (exact_cpu(), ReferenceBackend::open(0).unwrap());
    for name in ["llama3-tied", "qwen3", "mixtral"] {
        check((&cpu, &cpu), name);
        check((&reference, &cpu), name);
    }
}

fn tap(point: AuxHiddenPoint, row: u32) -> AuxHiddenState {
    AuxHiddenState { point, row }
}

/// Between layers of a stage there is what there would be at its end, and behind the final norm what logits are made of.
#[test]
fn hidden_states_are_tapped_anywhere() {
    let device = exact_cpu();
    for name in ["llama3-tied", "gemma2", "olmo2", "glm4-moe", "command-r"] {
        let model = open(&fixtures().join(name));
        type Form = Moe<Dequantized>;
        let layers = model.spec.layers.len();
        let each: Vec<_> = (0..layers).map(|layer| layer..layer + 1).collect();
        let on = (&device, &device);
        let mut staged: ModelRunner<_, KvF32> =
            staged_in::<_, _, _, Form, Form>(on, &model, &each, config(LAYOUT));
        let mut parted: ModelRunner<_, KvF32> =
            staged_in::<_, _, _, Form, Form>(on, &model, &[0..2, 2..layers], config(LAYOUT));
        let mut whole: ModelRunner<_, KvF32> = runner_in::<_, _, Form>(&device, &model, LAYOUT);
        let plain = mixed(whole.pool().blocks);
        let wanted = vec![Readback::Logits; 6];
        let mut output = StepOutput::default();
        whole.run(&plain, &wanted, &mut output).unwrap();
        let logits = output.logits().to_vec();
        let mut batch = mixed(whole.pool().blocks);
        let points: Vec<_> = (0..layers as u32)
            .rev()
            .map(AuxHiddenPoint::Layer)
            .collect();
        batch.add_aux_hidden(0, &points);
        // More often than there are rows.
        let again = batch.aux_hidden.iter().copied().cycle().take(120);
        batch.aux_hidden = again.collect();
        staged.run(&batch, &wanted, &mut output).unwrap();
        let expected = output.aux_hidden().to_vec();
        for runner in [&mut whole, &mut parted] {
            runner.run(&batch, &wanted, &mut output).unwrap();
            assert!(same_bits(output.aux_hidden(), &expected), "{name}");
            assert!(same_bits(output.logits(), &logits), "{name}");
            runner.run(&plain, &wanted, &mut output).unwrap();
            assert!(output.aux_hidden().is_empty());
            assert!(same_bits(output.logits(), &logits), "{name}");
        }
        let mut batch = mixed(whole.pool().blocks);
        batch.hidden_rows = std::mem::take(&mut batch.logit_rows);
        let rows = batch.hidden_rows.clone();
        let normed = rows.iter().map(|&row| tap(AuxHiddenPoint::FinalNorm, row));
        batch.aux_hidden.extend(normed);
        for runner in [&mut whole, &mut parted] {
            runner.run(&batch, &[], &mut output).unwrap();
            assert!(same_bits(output.aux_hidden(), output.hidden()), "{name}");
        }
    }
}

#[test]
fn a_tap_needs_its_layer_and_its_row() {
    let device = cpu(1);
    let model = open(&fixtures().join("llama2"));
    let mut runner = runner_in::<_, KvF32, Dequantized>(&device, &model, LAYOUT);
    let taps = [
        (
            vec![tap(AuxHiddenPoint::Layer(3), 0)],
            "behind layer 3 of a model with 3 layers",
        ),
        (
            vec![tap(AuxHiddenPoint::Layer(1), 6)],
            "hidden states of row 6 are wanted",
        ),
    ];
    for (taps, expected) in taps {
        let mut batch = mixed(runner.pool().blocks);
        batch.aux_hidden = taps;
        let wanted = vec![Readback::Nothing; 6];
        let refused = runner.submit(&batch, &wanted).map(|_| ()).unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    let mut batch = mixed(runner.pool().blocks);
    batch.features = vec![0.0; 3];
    let wanted = vec![Readback::Nothing; 6];
    let refused = runner.submit(&batch, &wanted).map(|_| ()).unwrap_err();
    assert!(
        refused.to_string().contains("3 numbers of hidden states"),
        "{refused}"
    );
}

/// A row may want logits and what they are made of.
#[test]
fn hidden_states_come_beside_logits() {
    let device = cpu(1);
    let model = open(&fixtures().join("qwen2"));
    let mut runner = runner_in::<_, KvF32, Dequantized>(&device, &model, LAYOUT);
    let mut batch = mixed(runner.pool().blocks);
    let mut output = StepOutput::default();
    let wanted = vec![Readback::Logits; 6];
    runner.run(&batch, &wanted, &mut output).unwrap();
    let logits = output.logits().to_vec();
    batch.hidden_rows = std::mem::take(&mut batch.logit_rows);
    runner.run(&batch, &[], &mut output).unwrap();
    let hidden = output.hidden().to_vec();
    assert_eq!(hidden.len(), 6 * model.spec.hidden_size);
    batch.logit_rows.clone_from(&batch.hidden_rows);
    runner.run(&batch, &wanted, &mut output).unwrap();
    assert!(same_bits(output.logits(), &logits) && same_bits(output.hidden(), &hidden));
    // Together they may not be more rows than a step has room for.
    batch.hidden_rows = vec![0; config(LAYOUT).max_tokens];
    let refused = runner.submit(&batch, &wanted).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("rows to be read"), "{refused}");
}

#[test]
fn adapters_are_loaded_for_every_stage() {
    let devices = [cpu(2), cpu(1)];
    let reference = ReferenceBackend::open(0).unwrap();
    for (name, base) in [
        ("llama-all", "llama3-tied"),
        ("llama-up", "llama3-tied/model.gguf"),
        ("qwen3-patterns", "qwen3"),
    ] {
        let dir = fixtures().join("../lora").join(name);
        let (tokens, expected) = read_expected(&dir.join("expected.safetensors"));
        let folder = LoraFolder::open(dir).unwrap();
        let model = open(&fixtures().join(base));
        let layers = one_each(&model);
        let mut staged: ModelRunner<_, KvF32> = staged_in::<_, _, _, Dequantized, Dequantized>(
            (&devices[0], &devices[1]),
            &model,
            &layers,
            config(LAYOUT),
        );
        let id = AdapterId(7);
        let adapted = |runner: &mut ModelRunner<CpuBackend, KvF32>, adapter| {
            let mut batch = StepBatch::default();
            let table = blocks(runner.pool().blocks, 1);
            let step = SeqStep {
                tokens: &tokens,
                start: 0,
                prompt_len: tokens.len(),
                blocks: &table,
                hidden: false,
                logits: LogitRows::All,
                adapter,
            };
            batch.push(step).unwrap();
            crate::support::logits_of(runner, &batch)
        };
        let plain = adapted(&mut staged, None);
        staged.load_adapter(id, &folder).unwrap();
        let found = adapted(&mut staged, Some(id));
        let difference = max_difference(&found, &expected);
        assert!(difference <= TOLERANCE, "{name} on {base}: {difference}");
        assert!(same_bits(&adapted(&mut staged, None), &plain), "{name}");
        let mut alone = runner_in::<_, KvF32, Dequantized>(&devices[0], &model, LAYOUT);
        alone.load_adapter(id, &folder).unwrap();
        assert!(same_bits(&adapted(&mut alone, Some(id)), &found), "{name}");
        assert!(staged.unload_adapter(id) && !staged.unload_adapter(id));

        // One that was loaded for other stages has no place here.
        let other = alone.adapter_loader().load(&folder).unwrap();
        assert!(staged.add_adapter(id, other).is_err());
        let mut mixed: ModelRunner<_, KvF32> = staged_in::<_, _, _, Dequantized, Dequantized>(
            (&reference, &devices[1]),
            &model,
            &layers,
            config(LAYOUT),
        );
        let other = staged.adapter_loader().load(&folder).unwrap();
        assert!(mixed.add_adapter(id, other).is_err());
        assert!(!mixed.unload_adapter(id));
    }
}

/// Blocks of all stages are those of one device, so each can go on where the other ended.
#[test]
fn kv_blocks_are_those_of_one_device() {
    let device = cpu(1);
    let model = open(&fixtures().join("qwen3"));
    let tokens: Vec<TokenId> = (3..27).collect();
    let mut alone = runner_in::<_, KvInt8, Dequantized>(&device, &model, LAYOUT);
    let mut staged: ModelRunner<_, KvInt8> = staged_in::<_, _, _, Dequantized, Dequantized>(
        (&device, &device),
        &model,
        &[0..2, 2..3],
        config(LAYOUT),
    );
    assert_eq!(
        alone.kv_block_layout(0).unwrap(),
        staged.kv_block_layout(0).unwrap()
    );
    logits_in_chunks(&mut alone, &tokens, &[7]);
    logits_in_chunks(&mut staged, &tokens, &[7]);
    let table = blocks(alone.pool().blocks, 1);
    let bytes_of = |runner: &mut ModelRunner<CpuBackend, KvInt8>, blocks: &[BlockId]| {
        let layout = runner.kv_block_layout(0).unwrap();
        let mut bytes = vec![0; layout.bytes * blocks.len()];
        runner.read_kv_blocks(0, blocks, &mut bytes).unwrap();
        bytes
    };
    let used = &table[..3];
    let bytes = bytes_of(&mut alone, used);
    assert_eq!(bytes, bytes_of(&mut staged, used));
    let elsewhere = [BlockId(0), BlockId(5), BlockId(2)];
    staged.write_kv_blocks(0, &elsewhere, &bytes).unwrap();
    assert_eq!(bytes_of(&mut staged, &elsewhere), bytes);
    assert!(staged.write_kv_blocks(0, &elsewhere, &bytes[1..]).is_err());
    assert!(
        staged
            .write_kv_blocks(0, &[BlockId(9999)], &bytes[..bytes.len() / 3])
            .is_err()
    );
}

/// What a device chooses, with its log-probabilities, is chosen by the last stage.
#[test]
fn tokens_are_sampled_on_the_last_stage() {
    let device = cpu(2);
    let model = open(&fixtures().join("llama3-tied"));
    let mut alone = runner_in::<_, KvFp16, Dequantized>(&device, &model, LAYOUT);
    let mut staged: ModelRunner<_, KvFp16> = staged_in::<_, _, _, Dequantized, Dequantized>(
        (&device, &device),
        &model,
        &[0..3, 3..5],
        config(LAYOUT),
    );
    assert_eq!((staged.in_flight(), staged.samples()), (1, true));
    let run = |runner: &mut ModelRunner<CpuBackend, KvFp16>| {
        let mut batch = mixed(runner.pool().blocks);
        for unit in [0.1, 0.9] {
            let row = RowSampling {
                temperature: 0.8,
                uniform: unit,
                logprobs: Some(3),
                ..RowSampling::default()
            };
            batch.sampling.push(row, [], None);
        }
        let mut wanted = vec![Readback::GREEDY; 6];
        (wanted[1], wanted[5]) = (Readback::SAMPLED, Readback::SAMPLED);
        wanted[2] = Readback::Nothing;
        let mut output = StepOutput::default();
        runner.run(&batch, &wanted, &mut output).unwrap();
        (0..6)
            .map(|row| format!("{:?}", output.row(row)))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(&mut staged), run(&mut alone));
}

/// Only what a stage needs is loaded for it, and planned.
#[test]
fn a_stage_holds_its_tensors_alone() {
    let device = cpu(1);
    let policy = WeightPolicy::of::<CpuBackend, Moe<Dequantized>>();
    let sizes = RunnerConfig::single(64);
    for name in ["llama2", "llama3-tied", "mixtral", "qwen3-moe"] {
        let model = open(&fixtures().join(name));
        let loaded = |stage: &Stage| {
            let mut bytes = 0;
            let mut last = |done, _| bytes = done;
            let weights =
                load_stage_weights::<_, Moe<Dequantized>>(&device, &model, stage, &mut last);
            weights.unwrap();
            bytes
        };
        let plan = |stage: &Stage| stage_memory_plan::<KvF32>(&model, policy, &sizes, stage);
        let whole = memory_plan::<KvF32>(&model, policy, &sizes);
        assert_eq!(plan(&Stage::whole(&model.spec)), whole);
        let stages = one_each(&model);
        let stages: Vec<_> = stages
            .into_iter()
            .map(|layers| Stage::new(&model.spec, layers).unwrap())
            .collect();
        let plans: Vec<_> = stages.iter().map(plan).collect();
        for (stage, plan) in stages.iter().zip(&plans).rev().skip(1) {
            // Fixtures are of floats, of which only norms are widened.
            let share = loaded(stage) as f64 / plan.weights as f64;
            assert!((0.95..=1.0).contains(&share), "{name}: {stage}: {share}");
            assert!(plan.weights < whole.weights && plan.kv < whole.kv, "{name}");
        }
        let kv: u64 = plans.iter().map(|plan| plan.kv).sum();
        assert_eq!(kv, whole.kv, "{name}");
        // A table that is the output projection, too, is held twice, as its file has it: in 16 bits or in 32.
        let table = (model.spec.vocab_size * model.spec.hidden_size) as u64;
        let twice = match model.spec.tie_embeddings {
            true => vec![2 * table, 4 * table],
            false => vec![0],
        };
        let weights: u64 = plans.iter().map(|plan| plan.weights).sum();
        let more = weights - whole.weights;
        assert!(twice.contains(&more), "{name}: {more}, {twice:?}");
        let read = |stage: &Stage| model.decode_bytes(policy, stage);
        let all: u64 = stages.iter().map(read).sum();
        assert_eq!(all, read(&Stage::whole(&model.spec)), "{name}");
    }
}

#[test]
fn stages_that_do_not_follow_each_other_are_refused() {
    let device = cpu(1);
    let model = open(&fixtures().join("llama2"));
    let spec = &model.spec;
    let sizes = config(LAYOUT);
    let weights = |layers: Range<usize>| {
        let stage = Stage::new(spec, layers).unwrap();
        load_stage_weights::<_, Dequantized>(&device, &model, &stage, &mut |_, _| ()).unwrap()
    };
    let earlier =
        |layers: Range<usize>| EarlierStage::<KvF32>::new(&device, spec, weights(layers), sizes);
    let text = |stages: Vec<EarlierStage<KvF32>>, layers: Range<usize>, sizes| {
        let runner =
            ModelRunner::with_stages(stages, &device, spec.clone(), weights(layers), sizes);
        runner.map(|_| ()).unwrap_err().to_string()
    };
    /// First layers and ends of the stages before the last one, the last one, and what is said of them.
    type Case<'a> = (&'a [(usize, usize)], Range<usize>, &'a str);
    let cases: [Case<'_>; 5] = [
        (&[], 1..3, "found layers 1-2, expected those from 0 on"),
        (&[], 0..2, "found layers 0-1 at the end"),
        (&[(0, 1)], 2..3, "found layers 2, expected those from 1 on"),
        (
            &[(0, 2)],
            1..3,
            "found layers 1-2, expected those from 2 on",
        ),
        (
            &[(0, 1), (0, 1)],
            1..3,
            "found layers 0, expected those from 1 on",
        ),
    ];
    for (stages, last, expected) in cases {
        let stages = stages
            .iter()
            .map(|&(start, end)| earlier(start..end).unwrap());
        let found = text(stages.collect(), last, sizes);
        assert!(found.contains(expected), "{found}");
    }
    let other = RunnerConfig {
        max_seqs: 2,
        ..sizes
    };
    let found = text(vec![earlier(0..1).unwrap()], 1..3, other);
    assert!(found.contains("other sizes"), "{found}");
    // The last stage is no earlier one, and a rank has no stages.
    assert!(earlier(2..3).is_err());
    assert!(Stage::new(spec, 2..4).is_err() && Stage::new(spec, 1..1).is_err());
    let cut = model.shard(WeightPolicy::floats(), (0, 2)).unwrap();
    let rank =
        ferrum_models::load_rank_weights::<_, Dequantized>(&device, &model, &cut, &mut |_, _| ());
    let spec_of_rank = cut.rank_spec();
    let stages = vec![earlier(0..1).unwrap()];
    let refused =
        ModelRunner::<_, KvF32>::with_stages(stages, &device, spec_of_rank, rank.unwrap(), sizes);
    let found = refused.map(|_| ()).unwrap_err().to_string();
    assert!(found.contains("has no stages"), "{found}");
    let whole = load_weights::<_, Dequantized>(&device, &model, &mut |_, _| ()).unwrap();
    assert!(ModelRunner::<_, KvF32>::new(&device, spec.clone(), whole, sizes).is_ok());
}
