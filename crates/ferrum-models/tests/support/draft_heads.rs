//! Draft heads with their targets, and what independent computations (`tools/fixtures/make_drafts.py`) make of them.

use super::{best, blocks, config, fixtures, max_difference, open, same_bits};
use ferrum_formats::ModelSource;
use ferrum_kernels::{KvF32, LlmBackend};
use ferrum_models::{
    DraftHead, FeatureSource, KvLayout, LogitRows, Model, ModelKind, ModelRunner, Readback,
    SeqStep, StepBatch, StepOutput, WeightForm, load_draft_head, load_weights, read_eagle3,
    read_mtp,
};
use ferrum_types::{StateSlot, TokenId};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

const LAYOUT: KvLayout = KvLayout::Paged { block_size: 8 };

pub(crate) fn drafts() -> PathBuf {
    fixtures().join("../drafts")
}

/// Each head with its target, and the folder with what is expected of it.
pub(crate) fn heads() -> Vec<(DraftHead, Model, PathBuf)> {
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

pub(crate) fn source(path: &Path) -> ModelSource {
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

/// What of a head differs from what is expected: features, guesses, chained guesses.
pub(crate) fn differences<B: LlmBackend, W: WeightForm<B>>(
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

/// Two sequences with features in one step have the bits that one has alone, and a step that lacks some is refused.
pub(crate) fn check_shared_step<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    (head, model, folder): &(DraftHead, Model, PathBuf),
) {
    let expected = expected(folder);
    let weights = load_weights::<_, W>(device, model, &mut |_, _| ()).unwrap();
    let shared = weights.shared_tables();
    let weights = load_draft_head::<_, W>(device, head, model, shared).unwrap();
    let mut runner: ModelRunner<_, KvF32> =
        ModelRunner::new(device, head.spec().clone(), weights, config(LAYOUT)).unwrap();
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
