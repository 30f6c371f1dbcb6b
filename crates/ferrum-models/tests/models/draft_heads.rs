//! Draft heads against independent computations (`tools/fixtures/make_drafts.py`): logits for a text beside the target's
//! hidden states, and for guesses beside the head's own; and what files may have wrong.

use crate::stages::same_bits;
use crate::support::{blocks, config, exact_cpu, fixtures, max_difference, open};
use ferrum_formats::{ModelSource, TensorSource};
use ferrum_kernels::gpu::GpuBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32, LlmBackend};
use ferrum_models::quantize::{Plan, QuantizeOptions, Search};
use ferrum_models::{
    AuxHiddenPoint, Dequantized, DraftHead, FeatureSource, FeedForwardSpec, KvLayout, LogitRows,
    Model, ModelKind, ModelRunner, Moe, Readback, SeqStep, StepBatch, StepOutput, WeightForm,
    load_draft_head, load_weights, read_eagle3, read_mtp,
};
use ferrum_types::{StateSlot, TokenId};
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize_to_file};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const LAYOUT: KvLayout = KvLayout::Paged { block_size: 8 };
const TOLERANCE: f32 = 1e-4;

fn drafts() -> PathBuf {
    fixtures().join("../drafts")
}

/// Each head with its target, and the folder with what is expected of it.
fn heads() -> Vec<(DraftHead, Model, PathBuf)> {
    let mtp = |path: &str, folder: &str| {
        let model = open(&drafts().join(path));
        (read_mtp(&model).unwrap(), model, drafts().join(folder))
    };
    let eagle = |path: &str, target: &str| {
        let folder = drafts().join(path);
        let (source, model) = (source(&folder), open(&fixtures().join(target)));
        let kinds = [&source, &model.source].map(ModelKind::of);
        assert_eq!(
            kinds,
            [Some(ModelKind::DraftHead), Some(ModelKind::Decoder)]
        );
        (read_eagle3(source, &model).unwrap(), model, folder)
    };
    vec![
        mtp("deepseek3-mtp", "deepseek3-mtp"),
        mtp("glm4-moe-mtp", "glm4-moe-mtp"),
        mtp("glm4-moe-mtp/model.gguf", "glm4-moe-mtp"),
        mtp("qwen35-mtp", "qwen35-mtp"),
        mtp("qwen35-mtp/model.gguf", "qwen35-mtp"),
        mtp("qwen35-moe-mtp", "qwen35-moe-mtp"),
        mtp("qwen35-moe-mtp/model.gguf", "qwen35-moe-mtp"),
        mtp("qwen3-next-mtp", "qwen3-next-mtp"),
        mtp("qwen3-next-mtp/model.gguf", "qwen3-next-mtp"),
        eagle("qwen3-eagle3", "qwen3"),
        eagle("llama3-eagle3", "llama3-untied"),
    ]
}

fn source(path: &Path) -> ModelSource {
    ModelSource::open(path).unwrap()
}

struct Expected {
    tokens: Vec<TokenId>,
    features: Vec<f32>,
    guesses: Vec<f32>,
    chained: Vec<f32>,
}

fn expected(folder: &Path) -> Expected {
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let (numbers, _) = tensor.data().as_chunks::<4>();
        numbers.iter().map(|c| f32::from_le_bytes(*c)).collect()
    };
    let tokens = file.tensor("tokens").unwrap();
    let (tokens, _) = tokens.data().as_chunks::<8>();
    Expected {
        tokens: tokens
            .iter()
            .map(|c| i64::from_le_bytes(*c) as u32)
            .collect(),
        features: floats("features"),
        guesses: floats("guesses"),
        chained: floats("chained"),
    }
}

/// A step of one sequence, with logits of all rows.
fn step(runner_blocks: usize, tokens: &[TokenId], start: usize) -> StepBatch {
    let mut batch = StepBatch::default();
    let table = blocks(runner_blocks, 2);
    let step = SeqStep {
        tokens,
        start,
        prompt_len: tokens.len(),
        blocks: &table,
        hidden: false,
        logits: LogitRows::All,
        adapter: None,
    };
    batch.push(step).unwrap();
    batch
}

fn best(row: &[f32]) -> usize {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0
}

/// What of a head differs from what is expected: features, guesses, chained guesses.
fn differences<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    (head, model, folder): &(DraftHead, Model, PathBuf),
    chunk: usize,
) -> [f32; 3] {
    let expected = expected(folder);
    let weights = load_weights::<B, W>(device, model, &mut |_, _| ()).unwrap();
    let shared = weights.shared_tables();
    let mut target: ModelRunner<B, KvF32> =
        ModelRunner::new(device, model.spec.clone(), weights, config(LAYOUT)).unwrap();
    let weights = load_draft_head::<B, W>(device, head, model, shared).unwrap();
    let mut runner: ModelRunner<B, KvF32> =
        ModelRunner::new(device, head.spec().clone(), weights, config(LAYOUT)).unwrap();
    let mut output = StepOutput::default();
    let run = |runner: &mut ModelRunner<B, KvF32>, batch: &StepBatch, output: &mut StepOutput| {
        let wanted = vec![Readback::Logits; batch.logit_rows.len()];
        runner.run(batch, &wanted, output).unwrap();
    };

    // The target's states of all positions but the last.
    let read = &expected.tokens[..expected.tokens.len() - 1];
    let mut batch = step(target.pool().blocks, read, 0);
    batch.add_aux_hidden(0, &head.features().target);
    if target.state_slots().is_some() {
        batch.add_state(StateSlot(0));
    }
    run(&mut target, &batch, &mut output);
    let features = output.aux_hidden().to_vec();
    let width = features.len() / read.len();

    let (mut guesses, mut own) = (Vec::new(), Vec::new());
    let after = &expected.tokens[1..];
    for (index, part) in after.chunks(chunk).enumerate() {
        let start = index * chunk;
        let mut batch = step(runner.pool().blocks, part, start);
        batch.features = features[start * width..][..part.len() * width].to_vec();
        batch.add_aux_hidden(0, &[head.features().own]);
        run(&mut runner, &batch, &mut output);
        guesses.extend_from_slice(output.logits());
        let dim = head.spec().hidden_size;
        own = output.aux_hidden()[(part.len() - 1) * dim..].to_vec();
    }

    let (vocab, mut chained) = (head.spec().vocab_size, Vec::new());
    let mut last = guesses[guesses.len() - vocab..].to_vec();
    for step_number in 0..expected.chained.len() / vocab {
        let token = best(&last);
        let tokens = head.features().tokens.as_ref();
        let token = tokens.map_or(token as u32, |tokens| tokens[token]);
        let start = after.len() + step_number;
        let mut batch = step(runner.pool().blocks, &[token], start);
        batch.features.clone_from(&own);
        batch.feature_source = FeatureSource::Head;
        batch.add_aux_hidden(0, &[head.features().own]);
        run(&mut runner, &batch, &mut output);
        last = output.logits().to_vec();
        chained.extend_from_slice(&last);
        own = output.aux_hidden().to_vec();
    }
    [
        max_difference(&features, &expected.features),
        max_difference(&guesses, &expected.guesses),
        max_difference(&chained, &expected.chained),
    ]
}

fn check<B: LlmBackend, W: WeightForm<B>>(device: &B) {
    for case in heads() {
        let (head, model, folder) = &case;
        let experts = |layer: &ferrum_models::LayerSpec| {
            matches!(layer.feed_forward, FeedForwardSpec::Moe(_))
        };
        if !W::EXPERTS && model.spec.layers.iter().any(experts) {
            continue;
        }
        for chunk in [usize::MAX, 5] {
            let found = differences::<B, W>(device, &case, chunk);
            println!("{} {} {found:.1?}", folder.display(), head.kind());
            let near = found.iter().all(|d| *d <= TOLERANCE);
            assert!(near, "{}, chunks of {chunk}: {found:?}", folder.display());
        }
    }
}

#[test]
fn heads_guess_as_they_were_meant_on_the_reference() {
    check::<_, Moe<Dequantized>>(&ReferenceBackend::open(0).unwrap());
}

#[test]
fn heads_guess_as_they_were_meant_on_the_cpu() {
    check::<_, Moe<Dequantized>>(&exact_cpu());
}

#[test]
fn heads_guess_as_they_were_meant_on_a_gpu() {
    match GpuBackend::open(0) {
        Ok(device) => check::<_, Dequantized>(&device),
        Err(e) => ferrum_test_support::skip(e),
    }
}

/// Where the head's guesses go on does not depend on what else is in a step.
#[test]
fn features_of_several_sequences_share_a_step() {
    let device = exact_cpu();
    for (head, model, folder) in heads() {
        type Form = Moe<Dequantized>;
        let expected = expected(&folder);
        let weights = load_weights::<_, Form>(&device, &model, &mut |_, _| ()).unwrap();
        let shared = weights.shared_tables();
        let weights = load_draft_head::<_, Form>(&device, &head, &model, shared).unwrap();
        let mut runner: ModelRunner<_, KvF32> =
            ModelRunner::new(&device, head.spec().clone(), weights, config(LAYOUT)).unwrap();
        let mut output = StepOutput::default();
        let (tokens, pool) = (&expected.tokens[1..], runner.pool().blocks);
        let wanted = vec![Readback::Logits; tokens.len()];
        let mut alone = step(pool, tokens, 0);
        alone.features.clone_from(&expected.features);
        runner.run(&alone, &wanted, &mut output).unwrap();
        let single = output.logits().to_vec();
        let mut both = alone.clone();
        let table = blocks(pool, 0);
        both.push(SeqStep {
            tokens,
            start: 0,
            prompt_len: tokens.len(),
            blocks: &table,
            hidden: false,
            logits: LogitRows::All,
            adapter: None,
        })
        .unwrap();
        both.features.extend_from_slice(&expected.features);
        let wanted = vec![Readback::Logits; 2 * tokens.len()];
        runner.run(&both, &wanted, &mut output).unwrap();
        let pair = [&single[..], &single[..]].concat();
        assert!(same_bits(output.logits(), &pair), "{}", folder.display());
        // Numbers are missing.
        both.features.pop();
        let refused = runner.submit(&both, &wanted).map(|_| ()).unwrap_err();
        assert!(refused.to_string().contains("numbers of hidden states"));
    }
}

#[test]
fn heads_read_where_their_files_say() {
    let points = |layers: &[u32]| {
        layers
            .iter()
            .map(|&l| AuxHiddenPoint::Layer(l))
            .collect::<Vec<_>>()
    };
    for (head, model, folder) in heads() {
        let expected = match folder.file_name().and_then(|name| name.to_str()) {
            Some("qwen3-eagle3") => points(&[0, 1, 1]),
            Some("llama3-eagle3") => points(&[0, 1]),
            _ => vec![AuxHiddenPoint::FinalNorm],
        };
        let found = head.features().target.clone();
        assert_eq!(found, expected, "{}", model.family.name);
    }
    let target = open(&drafts().join("llama-cycle-eagle3-target"));
    let head = read_eagle3(source(&drafts().join("llama-cycle-eagle3")), &target).unwrap();
    assert_eq!(head.features().target, points(&[1, 1, 0]));
    assert!(head.features().tokens.is_none());
}

/// A GGUF file in f32 of a folder.
fn converted(folder: &str) -> (tempfile::TempDir, Vec<String>) {
    let source = source(&drafts().join(folder));
    let options = QuantizeOptions {
        recipe: "f32".parse().unwrap(),
        imatrix: None,
        search: Search::default(),
        threads: 2,
        requantize: false,
    };
    let plan = Plan::new(&source, options).unwrap();
    let names = plan.tensors.iter().map(|tensor| tensor.name.clone());
    let (dir, names) = (tempfile::tempdir().unwrap(), names.collect());
    let path = dir.path().join("model.gguf");
    let file = std::fs::File::create(&path).unwrap();
    plan.write(&path, file, &mut |_, _| ()).unwrap();
    (dir, names)
}

#[test]
fn conversions_keep_the_layer_where_files_have_it() {
    for name in [
        "glm4-moe-mtp",
        "qwen35-mtp",
        "qwen35-moe-mtp",
        "qwen3-next-mtp",
    ] {
        let (dir, mut names) = converted(name);
        let path = dir.path().join("model.gguf");
        // The same tensors as in a file of another writer.
        let ModelSource::Gguf(other) = source(&drafts().join(name).join("model.gguf")) else {
            panic!("no GGUF file");
        };
        let mut expected: Vec<_> = other.infos().map(|info| info.name.clone()).collect();
        names.sort();
        expected.sort();
        assert_eq!(names, expected, "{name}");
        let model = open(&path);
        let head = (read_mtp(&model).unwrap(), model, drafts().join(name));
        let found = differences::<_, Moe<Dequantized>>(&exact_cpu(), &head, 7);
        assert!(found.iter().all(|d| *d <= TOLERANCE), "{name}: {found:?}");
    }
    // Files of this architecture are without it.
    let (dir, names) = converted("deepseek3-mtp");
    assert!(
        names.iter().all(|name| !name.contains("nextn")),
        "{names:?}"
    );
    let found = refusal(read_mtp(&open(&dir.path().join("model.gguf"))));
    assert!(found.contains("nextn_predict_layers\": found 0"), "{found}");
}

fn refusal(read: Result<DraftHead, ferrum_types::Error>) -> String {
    read.err().unwrap().to_string()
}

#[test]
fn models_without_such_layers_say_so() {
    for (name, expected) in [
        ("llama2", "\"num_nextn_predict_layers\": found 0 layers"),
        (
            "llama2/model.gguf",
            "\"llama.nextn_predict_layers\": found 0 layers",
        ),
        // The config speaks of a layer that the file has not.
        (
            "deepseek3",
            "tensor \"model.layers.3.eh_proj.weight\" is missing",
        ),
        ("qwen3-next", "found 0 layers for multi-token prediction"),
        ("qwen35", "found 0 layers for multi-token prediction"),
    ] {
        let found = refusal(read_mtp(&open(&fixtures().join(name))));
        assert!(found.contains(expected), "{name}: {found}");
    }
}

/// A copy of an EAGLE-3 folder with fields of its config changed, and a tensor if there is one.
fn changed(fields: &[(&str, serde_json::Value)], offsets: Option<Vec<i64>>) -> tempfile::TempDir {
    let (from, to) = (drafts().join("qwen3-eagle3"), tempfile::tempdir().unwrap());
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: HashMap<_, _> = file.tensors().into_iter().collect();
    let offsets = offsets.unwrap_or_default();
    let raw: Vec<u8> = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
    if !raw.is_empty() {
        let shape = vec![offsets.len()];
        let view = TensorView::new(safetensors::Dtype::I64, shape, &raw).unwrap();
        tensors.insert("d2t".into(), view);
    }
    serialize_to_file(tensors, None, &to.path().join("model.safetensors")).unwrap();
    to
}

#[test]
fn eagle_heads_of_another_target_are_refused_by_field() {
    let target = open(&fixtures().join("qwen3"));
    let read = |dir: &tempfile::TempDir| refusal(read_eagle3(source(dir.path()), &target));
    let ids = |ids: serde_json::Value| serde_json::json!({"eagle_aux_hidden_state_layer_ids": ids});
    for (field, value, expected) in [
        (
            "vocab_size",
            300.into(),
            "expected 259, the vocabulary of the target",
        ),
        ("num_hidden_layers", 2.into(), "expected 1"),
        ("target_hidden_size", 64.into(), "as the target has"),
        (
            "draft_vocab_size",
            260.into(),
            "1 to 259, the vocabulary of the target",
        ),
        (
            "draft_vocab_size",
            100.into(),
            "tensor \"d2t\" has shape [101]",
        ),
        (
            "eagle_config",
            ids([0, 9].as_slice().into()),
            "layers of the target, 0 to",
        ),
        (
            "eagle_config",
            serde_json::json!({"use_aux_hidden_state": false}),
            "heads that read one layer are EAGLE and EAGLE-2",
        ),
    ] {
        let found = read(&changed(&[(field, value)], None));
        assert!(
            found.contains(expected) && found.contains(field) || found.contains("d2t"),
            "{found}"
        );
        assert!(found.contains(expected), "{found}");
    }
    let mut offsets = vec![0; 101];
    offsets[7] = -8;
    let found = read(&changed(&[], Some(offsets.clone())));
    assert!(
        found.contains("maps token 7 by -8 outside of the vocabulary of 259"),
        "{found}"
    );
    offsets[7] = i64::MAX;
    let found = read(&changed(&[], Some(offsets)));
    assert!(found.contains("maps token 7"), "{found}");
}
