//! Decoders in which a token sees those behind it: their states are those of `transformers`, whole sequences only.

use crate::support::{blocks, exact_cpu, fixtures, max_difference, open, runner_in};
use ferrum_conformance::minimal::Minimal;
use ferrum_kernels::gpu::GpuBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::{
    DenseLayers, Dequantized, KvLayout, LogitRows, Model, Pooling, SeqStep, StatedPooling,
    StepBatch, StepOutput,
};
use ferrum_types::TokenId;
use serde_json::Value;
use std::path::PathBuf;

const LAYOUT: KvLayout = KvLayout::Grouped { block_size: 5 };

const GEMMA: &str = "gemma-embedding";

/// A Qwen 3 with `is_causal: false`, which `transformers` takes of any decoder.
const QWEN: &str = "qwen3-bidirectional";

fn folder(name: &str) -> PathBuf {
    fixtures().join("../encoders").join(name)
}

/// Tokens of each text, and the mean, the first of its states, and its embedding.
fn texts(name: &str) -> Vec<(Vec<TokenId>, [Vec<f32>; 3])> {
    let text = std::fs::read(folder(name).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let floats = |value: &Value| -> Vec<f32> { serde_json::from_value(value.clone()).unwrap() };
    let of = |text: &Value| {
        let ids = serde_json::from_value(text["ids"].clone()).unwrap();
        (
            ids,
            ["mean", "cls", "embedding"].map(|key| floats(&text[key])),
        )
    };
    expected["texts"]
        .as_array()
        .unwrap()
        .iter()
        .map(of)
        .collect()
}

/// States of all tokens of `texts`, two texts at a time.
fn states<B: LlmBackend + BackendKvDtype<KvF32>>(
    device: &B,
    model: &Model,
    texts: &[Vec<TokenId>],
) -> Vec<Vec<f32>> {
    let mut runner = runner_in::<_, KvF32, Dequantized>(device, model, LAYOUT);
    assert_eq!(runner.cache_groups().len(), 1, "windows need all keys");
    let pool = runner.pool().blocks;
    let dim = model.spec.hidden_size;
    let (mut out, mut output) = (Vec::new(), StepOutput::default());
    for pair in texts.chunks(2) {
        let mut batch = StepBatch::default();
        for (slot, tokens) in pair.iter().enumerate() {
            let step = SeqStep {
                tokens,
                start: 0,
                prompt_len: tokens.len(),
                blocks: &blocks(pool, slot),
                logits: LogitRows::All,
                hidden: true,
                adapter: None,
            };
            batch.push(step).unwrap();
        }
        runner.run(&batch, &[], &mut output).unwrap();
        let mut rest = output.hidden();
        for tokens in pair {
            let (own, behind) = rest.split_at(tokens.len() * dim);
            out.push(own.to_vec());
            rest = behind;
        }
    }
    out
}

fn mean(rows: &[f32], dim: usize) -> Vec<f32> {
    let count = rows.len() / dim;
    let sum = |i: usize| rows.iter().skip(i).step_by(dim).sum::<f32>();
    (0..dim).map(|i| sum(i) / count as f32).collect()
}

/// Largest difference of the model's vectors from those of `transformers`, where the largest number of these is 1.
fn difference<B: LlmBackend + BackendKvDtype<KvF32>>(device: &B, name: &str) -> f32 {
    let model = &open(&folder(name));
    let dim = model.spec.hidden_size;
    let dense = DenseLayers::of(&model.source, dim).unwrap();
    let (tokens, expected): (Vec<_>, Vec<_>) = texts(name).into_iter().unzip();
    let mut most = 0f32;
    for (found, expected) in states(device, model, &tokens).iter().zip(&expected) {
        let pooled = mean(found, dim);
        let embedding = dense.apply(pooled.clone());
        let first = found[..dim].to_vec();
        for (found, expected) in [pooled, first, embedding].iter().zip(expected) {
            let largest = expected.iter().map(|x| x.abs()).fold(0.0, f32::max);
            most = most.max(max_difference(found, expected) / largest);
        }
    }
    most
}

#[test]
fn states_and_embeddings_are_those_of_transformers() {
    for name in [GEMMA, QWEN] {
        let model = open(&folder(name));
        assert!(!model.spec.is_causal() && !model.generates());
        let pooling = StatedPooling::of(&model.source).unwrap();
        assert_eq!(pooling, StatedPooling::Known(Pooling::Mean));
        let found = difference(&ReferenceBackend::new(), name);
        assert!(found <= 1e-5, "{name} on reference: {found}");
        let found = difference(&exact_cpu(), name);
        assert!(found <= 1e-5, "{name} on cpu: {found}");
        match GpuBackend::open(0) {
            Ok(device) => {
                let found = difference(&device, name);
                assert!(found <= 1e-5, "{name} on a GPU: {found}");
            }
            Err(e) => println!("skipped: {e}"),
        }
        // Activations of eight bits of precision.
        let found = difference(&Minimal::default(), name);
        assert!(found <= 0.1 && found > 1e-4, "{name} in bf16: {found}");
    }
}

#[test]
fn a_part_of_a_sequence_is_refused() {
    let model = open(&folder(GEMMA));
    let mut runner = runner_in::<_, KvF32, Dequantized>(&exact_cpu(), &model, LAYOUT);
    let (tokens, _) = texts(GEMMA).swap_remove(0);
    let blocks = blocks(runner.pool().blocks, 0);
    let mut run = |part: std::ops::Range<usize>| {
        let step = SeqStep {
            tokens: &tokens[part.clone()],
            start: part.start,
            prompt_len: tokens.len(),
            blocks: &blocks,
            logits: LogitRows::All,
            hidden: true,
            adapter: None,
        };
        let mut batch = StepBatch::default();
        batch.push(step).unwrap();
        runner.run(&batch, &[], &mut StepOutput::default())
    };
    for part in [0..3, 2..tokens.len(), 1..2] {
        let error = run(part.clone()).unwrap_err().to_string();
        assert!(error.contains("expected all"), "{part:?}: {error}");
    }
    run(0..tokens.len()).unwrap();
}
