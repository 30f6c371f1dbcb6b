//! One vector for a text: the same whatever runs beside it, and the one that the model's logits come of.

use crate::invariance::{ROOMY, session, start};
use crate::{Answered, collect, demo, encode, greedy};
use ferrum_engine::engine::Pooling;
use ferrum_engine::{Engine, EngineConfig, EngineError, FinishReason, Request, StepRunner};
use ferrum_formats::{ModelSource, Safetensors, TensorSource};
use ferrum_models::{
    AttentionSpec, LogitRows, RunnerConfig, SeqStep, StepBatch, StepOutput, read_model,
};
use ferrum_types::{BlockId, TokenId};
use std::path::Path;

fn wanted(prompt: &[TokenId], pooling: Pooling) -> Request {
    Request {
        pooling: Some(pooling),
        ..greedy(prompt, 5)
    }
}

fn texts() -> Vec<Vec<TokenId>> {
    let text = "Once upon a time there was a little fox who lived in the forest. ".repeat(3);
    let tokens = encode(&text);
    [1, 7, 8, 9, 33, tokens.len()]
        .into_iter()
        .map(|n| tokens[..n].to_vec())
        .collect()
}

/// The state of each token of a text, computed in one step by itself.
fn states(runner: &mut dyn StepRunner, tokens: &[TokenId]) -> Vec<Vec<f32>> {
    let blocks: Vec<_> = (0..runner.pool().blocks as u32).map(BlockId).collect();
    let mut batch = StepBatch::default();
    let seq = SeqStep {
        tokens,
        start: 0,
        prompt_len: tokens.len(),
        blocks: &blocks,
        logits: LogitRows::All,
        hidden: true,
        adapter: None,
    };
    batch.push(seq).unwrap();
    let mut output = StepOutput::default();
    runner.run(&batch, &[], &mut output).unwrap();
    assert!(output.logits().is_empty());
    let rows = output.hidden().chunks_exact(runner.spec().hidden_size);
    rows.map(<[f32]>::to_vec).collect()
}

fn pooled(states: &[Vec<f32>], pooling: Pooling) -> Vec<f32> {
    match pooling {
        Pooling::Last => states.last().unwrap().clone(),
        Pooling::Cls => states[0].clone(),
        Pooling::Mean => {
            let mean = |i: usize| {
                let sum: f64 = states.iter().map(|state| f64::from(state[i])).sum();
                (sum / states.len() as f64) as f32
            };
            (0..states[0].len()).map(mean).collect()
        }
    }
}

fn vector(answered: Answered) -> Vec<f32> {
    assert!(answered.failed.is_none(), "{:?}", answered.failed);
    assert_eq!(answered.reason(), FinishReason::Stop);
    assert!(answered.tokens().is_empty() && answered.choices[0].text.is_empty());
    answered.embedding.unwrap()
}

#[test]
fn it_is_the_same_whatever_runs_beside_it() {
    let model = demo();
    let whole = RunnerConfig {
        context: 256,
        max_tokens: 256,
        kv_tokens: 1024,
        ..ROOMY
    };
    let mut alone = session(&model, whole).into_runner();
    let expected: Vec<_> = texts()
        .iter()
        .flat_map(|tokens| {
            let states = states(&mut *alone, tokens);
            [Pooling::Last, Pooling::Mean, Pooling::Cls].map(|pooling| pooled(&states, pooling))
        })
        .collect();
    let small = RunnerConfig {
        context: 160,
        max_tokens: 16,
        max_logit_rows: 8,
        max_seqs: 8,
        ..ROOMY
    };
    let tight = RunnerConfig {
        kv_tokens: 176,
        ..small
    };
    for config in [ROOMY, small, tight] {
        let engine = start(&model, config, EngineConfig::default());
        // The second time, the cache has what may be had from it.
        for _ in 0..2 {
            let mut streams = Vec::new();
            for tokens in texts() {
                let submit = |request| engine.handle().submit(request).unwrap();
                let others = submit(greedy(&tokens[..1], 12));
                let found = [Pooling::Last, Pooling::Mean, Pooling::Cls]
                    .map(|pooling| submit(wanted(&tokens, pooling)));
                streams.push((others, found));
            }
            let mut all = expected.iter();
            for (others, found) in streams {
                for stream in found {
                    assert_eq!(vector(collect(stream)), *all.next().unwrap(), "{config:?}");
                }
                assert_eq!(collect(others).tokens().len(), 12);
            }
        }
        assert!(engine.handle().stats().cached_tokens > 0);
    }
}

#[test]
fn logits_come_of_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/llama3-untied");
    let floats = |file: &Safetensors, name: &str| -> Vec<f32> {
        let bytes = file.require(name).unwrap().bytes.chunks_exact(4);
        bytes
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    // What `transformers` gave for the tokens.
    let expected = Safetensors::open(folder.join("expected.safetensors")).unwrap();
    let tokens = expected.require("tokens").unwrap().bytes.chunks_exact(8);
    let tokens: Vec<_> = tokens
        .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as TokenId)
        .collect();
    let logits = floats(&expected, "logits");
    let weights = Safetensors::open(folder.join("model.safetensors")).unwrap();
    let head = floats(&weights, "lm_head.weight");

    let model = read_model(ModelSource::open(&folder).unwrap()).unwrap();
    let (vocab, dim) = (model.spec.vocab_size, model.spec.hidden_size);
    let config = RunnerConfig {
        context: 64,
        max_tokens: 7,
        max_logit_rows: 7,
        ..ROOMY
    };
    let engine = Engine::start(
        session(&model, config).into_runner(),
        None,
        EngineConfig::default(),
    )
    .unwrap();
    for n in [1, 8, tokens.len()] {
        let request = wanted(&tokens[..n], Pooling::Last);
        let state = vector(collect(engine.handle().submit(request).unwrap()));
        for (row, expected) in head
            .chunks_exact(dim)
            .zip(&logits[(n - 1) * vocab..][..vocab])
        {
            let logit: f32 = row.iter().zip(&state).map(|(w, x)| w * x).sum();
            assert!(
                (logit - expected).abs() < 1e-4,
                "{n}: {logit}, expected {expected}"
            );
        }
    }
}

#[test]
fn nothing_else_may_be_wanted_with_it() {
    let engine = start(&demo(), ROOMY, EngineConfig::default());
    let changes: [fn(&mut Request); 4] = [
        |r| r.n = 2,
        |r| r.logprobs = Some(1),
        |r| r.prompt_logprobs = Some(1),
        |r| r.draft_tokens = 2,
    ];
    for change in changes {
        let mut request = wanted(&[1, 2], Pooling::Mean);
        change(&mut request);
        let refused = engine.handle().submit(request).unwrap_err();
        assert!(
            matches!(
                refused,
                EngineError::Invalid {
                    field: "pooling",
                    ..
                }
            ),
            "{refused}"
        );
    }
}

/// Each text is computed in one step, whatever else waits, and nothing is generated.
#[test]
fn texts_whose_tokens_see_those_behind_them_are_computed_whole() {
    let mut model = demo();
    for layer in &mut model.spec.layers {
        if let AttentionSpec::Gqa(gqa) = &mut layer.attention {
            gqa.causal = false;
        }
    }
    let longest = texts().iter().map(Vec::len).max().unwrap();
    let roomy = RunnerConfig {
        max_tokens: longest,
        ..ROOMY
    };
    let tight = RunnerConfig {
        kv_tokens: longest.next_multiple_of(16) + 16,
        ..roomy
    };
    let mut alone = session(&model, roomy).into_runner();
    let expected: Vec<_> = texts()
        .iter()
        .map(|tokens| pooled(&states(&mut *alone, tokens), Pooling::Mean))
        .collect();
    for config in [roomy, tight] {
        let engine = start(&model, config, EngineConfig::default());
        for _ in 0..2 {
            let submit = |tokens: Vec<_>| engine.handle().submit(wanted(&tokens, Pooling::Mean));
            let streams: Vec<_> = texts().into_iter().map(submit).collect();
            for (stream, expected) in streams.into_iter().zip(&expected) {
                let answered = collect(stream.unwrap());
                assert_eq!(answered.usage.as_ref().unwrap().cached_tokens, 0);
                assert_eq!(vector(answered), *expected);
            }
        }
        let refused = engine.handle().submit(greedy(&[1, 2], 3)).unwrap_err();
        assert!(
            refused.to_string().contains("embeddings alone"),
            "{refused}"
        );
        let long = wanted(&vec![1; longest + 1], Pooling::Mean);
        let refused = engine.handle().submit(long).unwrap_err();
        let EngineError::ContextOverflow { capacity, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!(capacity, longest);
    }
}
