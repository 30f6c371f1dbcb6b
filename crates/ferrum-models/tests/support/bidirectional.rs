//! Decoders with bidirectional attention, with what `transformers` makes of texts by them.

use super::{blocks, fixtures, max_difference, open, runner_in};
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::{
    DenseLayers, Dequantized, KvLayout, LogitRows, Model, SeqStep, StepBatch, StepOutput,
};
use ferrum_types::TokenId;
use serde_json::Value;
use std::path::PathBuf;

pub(crate) const LAYOUT: KvLayout = KvLayout::Grouped { block_size: 5 };

pub(crate) const GEMMA: &str = "gemma-embedding";

/// A Qwen 3 with `is_causal: false`, which `transformers` takes of any decoder.
pub(crate) const QWEN: &str = "qwen3-bidirectional";

pub(crate) fn folder(name: &str) -> PathBuf {
    fixtures().join("../encoders").join(name)
}

/// Tokens of each text, and the mean, the first of its states, and its embedding.
pub(crate) fn texts(name: &str) -> Vec<(Vec<TokenId>, [Vec<f32>; 3])> {
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
pub(crate) fn difference<B: LlmBackend + BackendKvDtype<KvF32>>(device: &B, name: &str) -> f32 {
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
