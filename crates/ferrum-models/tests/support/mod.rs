//! What the model tests share: fixtures and small drivers of a runner.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod bidirectional;
pub(crate) mod clip;
pub(crate) mod draft_heads;
pub(crate) mod encoders;
pub(crate) mod group;
pub(crate) mod lora;
pub(crate) mod naive;
pub(crate) mod vision;
pub(crate) mod whisper;

use ferrum_formats::ModelSource;
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, LlmBackend};
use ferrum_models::{
    CacheGroup, EarlierStage, KvLayout, LoadProgress, LogitRows, Model, ModelRunner, Readback,
    RunnerConfig, SeqStep, Stage, StepBatch, StepOutput, WeightForm, load_stage_weights,
    load_weights, read_model, spanned_blocks,
};
use ferrum_types::{BlockId, StateSlot, TokenId};
use safetensors::SafeTensors;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The outputs that `transformers` gave for a fixture.
pub(crate) struct Expected {
    pub(crate) tokens: Vec<TokenId>,
    /// `[tokens, vocab]`.
    pub(crate) logits: Vec<f32>,
    pub(crate) greedy: Vec<TokenId>,
}

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models")
}

/// The CPU at its fastest level that rounds nothing.
pub(crate) fn exact_cpu() -> CpuBackend {
    let config = CpuConfig {
        isa: Some(Isa::best_exact()),
        threads: None,
    };
    CpuBackend::with_config(config).unwrap()
}

/// All fixture folders, in order.
pub(crate) fn fixture_dirs() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixtures()).expect("fixtures/models is part of the repository");
    let mut dirs: Vec<_> = entries
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    dirs.sort();
    assert!(dirs.len() >= 20, "only {} fixtures", dirs.len());
    dirs
}

pub(crate) fn expected(path: &Path) -> Expected {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    Expected {
        tokens: ids(&file, "tokens"),
        logits: logits(&file),
        greedy: ids(&file, "greedy"),
    }
}

/// Tokens and logits `[tokens, vocab]` of a fixture that has no more.
pub(crate) fn read_expected(path: &Path) -> (Vec<TokenId>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    (ids(&file, "tokens"), logits(&file))
}

fn ids(file: &SafeTensors<'_>, name: &str) -> Vec<TokenId> {
    let data = file.tensor(name).unwrap();
    data.data()
        .chunks_exact(8)
        .map(|c| i64::from_le_bytes(c.try_into().unwrap()) as u32)
        .collect()
}

fn logits(file: &SafeTensors<'_>) -> Vec<f32> {
    let data = file.tensor("logits").unwrap();
    let numbers = data.data().chunks_exact(4);
    numbers
        .map(|c| f32::from_le_bytes(c.try_into().unwrap()))
        .collect()
}

pub(crate) fn open(path: &Path) -> Model {
    let source = ModelSource::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    read_model(source).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Sizes for a small test: two sequences of up to 128 tokens.
pub(crate) fn config(layout: KvLayout) -> RunnerConfig {
    RunnerConfig {
        context: 128,
        max_seqs: 4,
        max_tokens: 96,
        max_logit_rows: 96,
        kv_tokens: 4 * 128,
        kept_states: 0,
        layout,
        profile: false,
    }
}

/// A runner with weights in the form `W`.
pub(crate) fn runner_in<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    layout: KvLayout,
) -> ModelRunner<B, K> {
    let weights = load_weights::<B, W>(device, model, &mut |_, _| ()).unwrap();
    ModelRunner::new(device, model.spec.clone(), weights, config(layout)).unwrap()
}

/// A runner of stages with these layers, in the sizes `config`: the last one on the second device with weights in the
/// form `WB`, the others on the first one with weights in the form `WA`.
pub(crate) fn staged_in<A, B, K, WA, WB>(
    (first, last): (&A, &B),
    model: &Model,
    layers: &[Range<usize>],
    config: RunnerConfig,
) -> ModelRunner<B, K>
where
    A: LlmBackend + BackendKvDtype<K>,
    B: LlmBackend + BackendKvDtype<K>,
    K: KvDtypeKind,
    WA: WeightForm<A>,
    WB: WeightForm<B>,
{
    let (end, before) = layers.split_last().unwrap();
    let stage = |layers: &Range<usize>| Stage::new(&model.spec, layers.clone()).unwrap();
    let none: LoadProgress<'_> = &mut |_, _| ();
    let mut earlier = Vec::new();
    for layers in before {
        let weights = load_stage_weights::<A, WA>(first, model, &stage(layers), none).unwrap();
        earlier.push(EarlierStage::new(first, &model.spec, weights, config).unwrap());
    }
    let weights = load_stage_weights::<B, WB>(last, model, &stage(end), none).unwrap();
    ModelRunner::with_stages(earlier, last, model.spec.clone(), weights, config).unwrap()
}

/// The blocks of sequence `slot` when four sequences share the pool.
pub(crate) fn blocks(pool_blocks: usize, slot: usize) -> Vec<BlockId> {
    let each = pool_blocks / 4;
    // Backwards, so that a kernel that ignores the table is found out.
    (slot * each..(slot + 1) * each)
        .rev()
        .map(|b| BlockId(b as u32))
        .collect()
}

/// The logits of all rows that `batch` names.
pub(crate) fn logits_of<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &mut ModelRunner<B, K>,
    batch: &StepBatch,
) -> Vec<f32> {
    let mut output = StepOutput::default();
    let wanted = vec![Readback::Logits; batch.logit_rows.len()];
    runner.run(batch, &wanted, &mut output).unwrap();
    output.logits().to_vec()
}

/// The state slot of the only sequence of a batch, if it needs one.
fn add_state<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &ModelRunner<B, K>,
    batch: &mut StepBatch,
) {
    if runner.state_slots().is_some() {
        batch.add_state(StateSlot(1));
    }
}

/// Logits of all positions of `tokens`, fed in `chunks` of the given sizes (the last one repeats).
pub(crate) fn logits_in_chunks<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &mut ModelRunner<B, K>,
    tokens: &[TokenId],
    chunks: &[usize],
) -> Vec<f32> {
    let table = blocks(runner.pool().blocks, 1);
    let (mut out, mut start) = (Vec::new(), 0);
    for i in 0.. {
        if start == tokens.len() {
            break;
        }
        let size = chunks[i.min(chunks.len() - 1)].min(tokens.len() - start);
        let mut batch = StepBatch::default();
        let part = &tokens[start..start + size];
        let (prompt_len, logits) = (tokens.len(), LogitRows::All);
        batch
            .push(SeqStep {
                tokens: part,
                start,
                prompt_len,
                blocks: &table,
                hidden: false,
                logits,
                adapter: None,
            })
            .unwrap();
        add_state(runner, &mut batch);
        out.extend(logits_of(runner, &batch));
        start += size;
    }
    out
}

/// The table of a sequence of `tokens` tokens, of which those from `start` on are new: as few blocks as that needs,
/// in turns, and none behind the window.
pub(crate) fn grouped_table(
    group: &CacheGroup,
    start: usize,
    tokens: usize,
    chunk: usize,
) -> Vec<BlockId> {
    let entries = tokens.div_ceil(group.block_size);
    let needed = group.window.map_or(entries, |window| {
        spanned_blocks(window + chunk, group.block_size)
    });
    assert!(needed <= group.blocks);
    let first = group.first_seen(start) / group.block_size;
    let block = |entry: usize| match entry < first {
        true => BlockId::RELEASED,
        false => BlockId((entry % needed) as u32),
    };
    (0..entries).map(block).collect()
}

/// Logits of all positions, in chunks, with a table for each cache group.
pub(crate) fn logits_in_groups<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &mut ModelRunner<B, K>,
    tokens: &[TokenId],
    chunk: usize,
) -> Vec<f32> {
    let groups = runner.cache_groups().to_vec();
    let (mut found, mut output) = (Vec::new(), StepOutput::default());
    let mut batch = StepBatch::default();
    for (index, part) in tokens.chunks(chunk).enumerate() {
        let start = index * chunk;
        let end = start + part.len();
        batch.clear();
        let blocks = grouped_table(&groups[0], start, end, chunk);
        let step = SeqStep {
            tokens: part,
            start,
            prompt_len: tokens.len(),
            blocks: &blocks,
            hidden: false,
            logits: LogitRows::All,
            adapter: None,
        };
        batch.push(step).unwrap();
        add_state(runner, &mut batch);
        for (index, group) in groups.iter().enumerate().skip(1) {
            let blocks = grouped_table(group, start, end, chunk);
            batch.add_table(index, &blocks).unwrap();
        }
        let wanted = vec![Readback::Logits; part.len()];
        runner.run(&batch, &wanted, &mut output).unwrap();
        found.extend_from_slice(output.logits());
    }
    found
}

/// Greedy continuation with a cache, picked on the device.
pub(crate) fn greedy<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &mut ModelRunner<B, K>,
    prompt: &[TokenId],
    steps: usize,
) -> Vec<TokenId> {
    let table = blocks(runner.pool().blocks, 2);
    let (mut out, mut start, mut next) = (Vec::new(), 0, prompt.to_vec());
    let mut batch = StepBatch::default();
    while out.len() < steps {
        batch.clear();
        let (prompt_len, logits) = (prompt.len(), LogitRows::Last);
        batch
            .push(SeqStep {
                tokens: &next,
                start,
                prompt_len,
                blocks: &table,
                hidden: false,
                logits,
                adapter: None,
            })
            .unwrap();
        add_state(runner, &mut batch);
        let mut output = StepOutput::default();
        let wanted = [Readback::GREEDY];
        runner.run(&batch, &wanted, &mut output).unwrap();
        let (_, best) = output.tokens().next().unwrap();
        start += next.len();
        out.extend(best);
        next = best.into_iter().collect();
    }
    out
}

pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m, d| if d.is_nan() { d } else { m.max(d) })
}

pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Where the largest number of a row is.
pub(crate) fn best(row: &[f32]) -> usize {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0
}

/// `[rows, vocab]` logits as log probabilities.
fn log_probabilities(logits: &[f32], vocab: usize) -> Vec<Vec<f64>> {
    let row = |row: &[f32]| {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - top).exp()).sum();
        row.iter().map(|x| f64::from(x - top) - sum.ln()).collect()
    };
    logits.chunks_exact(vocab).map(row).collect()
}

/// Mean KL divergence of `q` from `p`, and the share of rows with the same most likely token.
pub(crate) fn compare(p: &[f32], q: &[f32], vocab: usize) -> (f64, f64) {
    let (p, q) = (log_probabilities(p, vocab), log_probabilities(q, vocab));
    let best = |row: &[f64]| (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    let (mut kl, mut same) = (0.0, 0.0);
    for (p, q) in p.iter().zip(&q) {
        kl += p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        same += f64::from(u8::from(best(p) == best(q)));
    }
    let rows = p.len() as f64;
    (kl / rows, same / rows)
}
