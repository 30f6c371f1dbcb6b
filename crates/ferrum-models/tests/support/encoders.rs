//! Text encoders, with what `transformers` makes of texts and pairs by them.

use super::max_difference;
use ferrum_formats::ModelSource;
use ferrum_kernels::LlmBackend;
use ferrum_models::encoder::{
    EncoderLimits, EncoderModel, EncoderRunner, TextEncoder, TextInput, is_encoder, load_encoder,
    read_encoder,
};
use ferrum_models::{Dequantized, Pooling};
use ferrum_types::TokenId;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) const NAMES: [&str; 11] = [
    "bert",
    "bert-labels",
    "xlm-roberta-reranker",
    "roberta",
    "distilbert",
    "nomic-bert",
    "nomic-bert-published",
    "gte",
    "gte-published",
    "modernbert",
    "modernbert-published",
];

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/encoders")
        .join(name)
}

pub(crate) fn open(name: &str) -> EncoderModel {
    let source = ModelSource::open(folder(name)).unwrap();
    assert!(is_encoder(&source));
    read_encoder(source).unwrap()
}

pub(crate) fn runner<B: LlmBackend>(
    device: &B,
    model: &EncoderModel,
    limits: EncoderLimits,
) -> EncoderRunner<B> {
    let weights = load_encoder::<B, Dequantized>(device, model, &mut |_, _| ()).unwrap();
    EncoderRunner::new(device, model.spec.clone(), weights, limits).unwrap()
}

pub(crate) fn expected(name: &str) -> Value {
    let text = std::fs::read(folder(name).join("expected.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

pub(crate) fn list<'v>(value: &'v Value, key: &str) -> Vec<&'v Value> {
    let all = value[key].as_array();
    all.map(|all| all.iter().collect()).unwrap_or_default()
}

pub(crate) fn ids(value: &Value) -> Vec<TokenId> {
    let ids = list(value, "ids").into_iter();
    ids.map(|id| id.as_u64().unwrap() as TokenId).collect()
}

pub(crate) fn floats(value: &Value, key: &str) -> Vec<f32> {
    let all = list(value, key).into_iter();
    all.map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Where the second text of a pair begins, for a model that tells them apart: behind the first separator.
fn second(model: &EncoderModel, ids: &[TokenId]) -> usize {
    let separator = *ids.last().unwrap();
    match model.spec.segments {
        1 => ids.len(),
        _ => ids.iter().position(|id| *id == separator).unwrap() + 1,
    }
}

/// Largest difference of all vectors and logits of a model from those of `transformers`.
pub(crate) fn difference<B: LlmBackend>(device: &B, name: &str) -> f32 {
    difference_of(device, &open(name), name)
}

/// That of an opened model.
pub(crate) fn difference_of<B: LlmBackend>(device: &B, model: &EncoderModel, name: &str) -> f32 {
    let expected = expected(name);
    let mut runner = runner(device, model, EncoderLimits::of(&model.spec));
    let texts = list(&expected, "texts");
    let tokens: Vec<_> = texts.iter().map(|text| ids(text)).collect();
    let inputs: Vec<_> = tokens.iter().map(|tokens| TextInput::of(tokens)).collect();
    let mut most = 0f32;
    for (pooling, key) in [(Pooling::Mean, "mean"), (Pooling::Cls, "cls")] {
        let found = runner.embed(&inputs, pooling).unwrap();
        assert_eq!(found.len(), texts.len());
        for (found, text) in found.iter().zip(&texts) {
            most = most.max(max_difference(found, &floats(text, key)));
        }
    }
    let pairs = list(&expected, "pairs");
    assert_eq!(pairs.is_empty(), model.spec.labels == 0);
    if model.spec.labels > 0 {
        let tokens: Vec<_> = pairs.iter().map(|pair| ids(pair)).collect();
        let inputs = tokens.iter().map(|tokens| TextInput {
            tokens,
            second: second(model, tokens),
        });
        let found = runner.classify(&inputs.collect::<Vec<_>>()).unwrap();
        for (found, pair) in found.iter().zip(&pairs) {
            most = most.max(max_difference(found, &floats(pair, "logits")));
        }
    }
    most
}

/// Vectors of texts one at a time, and in batches of up to so many times the longest text and so many texts: the same
/// bits.
pub(crate) fn check_alone<B: LlmBackend>(device: &B, name: &str, batches: &[(usize, usize)]) {
    let (model, expected) = (open(name), expected(name));
    let tokens: Vec<_> = list(&expected, "texts")
        .iter()
        .map(|text| ids(text))
        .collect();
    let inputs: Vec<_> = tokens.iter().map(|tokens| TextInput::of(tokens)).collect();
    let vectors = |longest, max_texts| {
        let limits = EncoderLimits {
            max_tokens: longest * model.spec.max_tokens(),
            max_texts,
        };
        let vectors = runner(device, &model, limits)
            .embed(&inputs, Pooling::Mean)
            .unwrap();
        let bits = vectors.iter().flatten().map(|x| x.to_bits());
        bits.collect::<Vec<_>>()
    };
    let alone = vectors(1, 1);
    for &(longest, max_texts) in batches {
        assert!(
            vectors(longest, max_texts) == alone,
            "{name}: {max_texts} texts in a batch"
        );
    }
}
