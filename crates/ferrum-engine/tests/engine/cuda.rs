//! The engine on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`. The device is asked for the same bits
//! in any batch, so what is held to the bit on the CPU is held to the bit here.

use crate::adapters::check_adapters;
use crate::captured::fixture;
use crate::invariance::{assert_same, session_on};
use crate::states::{answers, check_states, requests, take_logprobs};
use crate::{Answered, collect, greedy, sampled};
use ferrum_cuda_emulator::graph_replays;
use ferrum_engine::sampler::SamplingParams;
use ferrum_engine::{BackendDispatch, BackendKind, BackendOptions, Engine, EngineConfig, Request};
use ferrum_models::{KvLayout, RunnerConfig};
use ferrum_types::TokenId;

const CONFIG: RunnerConfig = RunnerConfig {
    context: 96,
    max_seqs: 6,
    max_tokens: 48,
    max_logit_rows: 32,
    kv_tokens: 6 * 96,
    kept_states: 0,
    layout: KvLayout::Grouped { block_size: 4 },
    profile: false,
};

/// `None`, said aloud, where the emulator cannot be built.
fn device() -> Option<BackendDispatch> {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        println!("skipped: {reason}");
        return None;
    }
    let options = BackendOptions {
        batch_invariant: true,
        ..BackendOptions::default()
    };
    Some(BackendDispatch::from_kind(BackendKind::Cuda, options).unwrap())
}

/// Of all lengths, most with a common beginning: greedy, sampled, and with all that devices do to a distribution.
fn mixed(count: usize) -> Vec<Request> {
    let request = |i: usize| {
        let len = 26 + 5 * i;
        let prompt: Vec<_> = (0..len)
            .map(|at| match i % 4 == 3 && at < 24 {
                true => at * (i + 3) % 11,
                false => at * 7 % 29 + at / 24 * i,
            } as TokenId)
            .collect();
        let mut request = match i % 3 {
            0 => greedy(&prompt, 8 + i),
            _ => sampled(&prompt, 14, i as u64),
        };
        if i % 3 == 2 {
            request.generation.sampling = SamplingParams {
                top_k: 12,
                repeat_penalty: 1.1,
                frequency_penalty: 0.1,
                // Likely enough that texts repeat themselves, which drafts are made of.
                logit_bias: vec![(7, 12.0), (8, 12.0), (9, f32::NEG_INFINITY)],
                ..request.generation.sampling
            };
        }
        request.logprobs = i.is_multiple_of(2).then_some(2);
        request.prompt_logprobs = i.is_multiple_of(4).then_some(1);
        request
    };
    (0..count).map(request).collect()
}

/// Answers to requests one after the other, with nothing kept of one for the next.
fn apart(engine: &Engine, requests: &[Request]) -> Vec<Answered> {
    let ask = |request: &Request| collect(engine.handle().submit(request.clone()).unwrap());
    requests.iter().map(ask).collect()
}

/// Tokens of drafts, and preemptions, that changed nothing.
fn check_batches(device: &BackendDispatch, name: &str) -> [u64; 2] {
    let model = fixture(name);
    let start = |config, engine| {
        let runner = session_on(device, &model, config).into_runner();
        Engine::start(runner, None, engine).unwrap()
    };
    let uncached = EngineConfig {
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let requests = mixed(5);
    let replays = graph_replays();
    let expected = apart(&start(CONFIG, uncached.clone()), &requests);
    let assert_same = |found: &[Answered], how: &str| {
        assert_same(found, &expected, &format!("of {name} {how}"));
    };

    assert!(graph_replays() > replays, "{name}: no step was replayed");

    // Steps that are measured are not captured.
    let measured = RunnerConfig {
        profile: true,
        ..CONFIG
    };
    let found = apart(&start(measured, uncached), &requests);
    assert_same(&found, "without captured steps");

    let engine = start(CONFIG, EngineConfig::default());
    assert_same(&answers(&engine, &requests, 0), "beside each other");
    assert_same(&answers(&engine, &requests, 0), "with a warm cache");
    let mut drafted = answers(&engine, &requests, 4);
    take_logprobs(&mut drafted, &expected);
    assert_same(&drafted, "with drafts");
    let stats = engine.handle().stats();
    assert!(stats.cached_tokens > 100, "{name}: {stats:?}");
    let drafted = stats.draft_tokens;

    let tight = RunnerConfig {
        kv_tokens: 100,
        max_tokens: 20,
        ..CONFIG
    };
    let engine = start(tight, EngineConfig::default());
    assert_same(&answers(&engine, &requests, 0), "preempted");
    [drafted, engine.handle().stats().preemptions]
}

/// A row has the same bits whatever is computed beside it. A test for each model, so that they run beside each other.
/// Gives how many sequences lost their blocks on the way; `None` where there is no device.
fn check_rows(name: &str) -> Option<u64> {
    let device = device()?;
    let [drafted, preemptions] = check_batches(&device, name);
    assert!(drafted > 2, "{name}: {drafted} tokens of drafts");
    Some(preemptions)
}

#[test]
fn rows_have_the_same_bits_with_full_attention() {
    assert_ne!(check_rows("llama3-tied"), Some(0));
}

#[test]
fn rows_have_the_same_bits_with_windows() {
    // What is behind a window is free again, so that all may have room.
    check_rows("mistral-window");
}

#[test]
fn rows_have_the_same_bits_with_quantised_experts() {
    assert_ne!(check_rows("qwen3-moe-quantized/model-q4_0.gguf"), Some(0));
}

#[test]
fn rows_have_the_same_bits_with_latent_attention() {
    assert_ne!(check_rows("deepseek2"), Some(0));
}

#[test]
fn recurrent_states_are_kept_and_change_no_bit() {
    let Some(device) = device() else { return };
    for name in ["qwen35", "granite-hybrid"] {
        println!("{name}");
        check_states(&device, &fixture(name), &requests()[..4]);
    }
}

#[test]
fn requests_choose_adapters() {
    let Some(device) = device() else { return };
    check_adapters(&device);
}
