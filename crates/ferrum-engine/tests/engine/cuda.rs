//! The engine on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`. The device is asked for the same bits
//! in any batch, so what is held to the bit on the CPU is held to the bit here.

use crate::adapters::check_adapters;
use crate::captured::fixture;
use crate::invariance::{assert_same, session_on};
use crate::states::{answers, check_states, requests, take_logprobs};
use crate::{Answered, collect, greedy, sampled};
use ferrum_cuda_emulator::graph_replays;
use ferrum_engine::grammar::{Grammar, GrammarCompiler};
use ferrum_engine::sampler::SamplingParams;
use ferrum_engine::{
    Activations, BackendDispatch, BackendKind, BackendOptions, Engine, EngineConfig, FinishReason,
    Request,
};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::{KvLayout, RunnerConfig};
use ferrum_test_support::skip;
use ferrum_types::TokenId;
use std::path::Path;
use std::sync::{Arc, LazyLock};

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

/// A device of this process and its options; `None`, said aloud, where the emulator cannot be built.
fn device_with(options: BackendOptions) -> Option<BackendDispatch> {
    // One that all tests share, and one whose memory is a single test's.
    if let Err(reason) = ferrum_cuda_emulator::load_devices(2) {
        skip(reason);
        return None;
    }
    let options = BackendOptions {
        batch_invariant: true,
        ..options
    };
    Some(BackendDispatch::from_kind(BackendKind::Cuda, options).unwrap())
}

fn device() -> Option<BackendDispatch> {
    device_with(BackendOptions::default())
}

/// The tokenizer of all models here: a token is a byte.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Arc::new(Tokenizer::from_hf_dir(models.join("llama3-tied")).unwrap())
});

/// Constraints for requests whose index leaves 1, or 3, when it is divided by 4.
static GRAMMARS: LazyLock<[Grammar; 2]> = LazyLock::new(|| {
    let schema = serde_json::json!({
        "type": "object",
        "properties": {"a": {"enum": ["one fox", "two bears"]}},
        "required": ["a"],
        "additionalProperties": false,
    });
    let lenient = false;
    [
        Grammar::Regex("[a-d]{9,12}-[0-9]{4}".into()),
        Grammar::JsonSchema { schema, lenient },
    ]
});

/// Whether a text is what the second of [`GRAMMARS`], or the first, allows.
fn is_allowed(text: &str, is_json: bool) -> bool {
    if is_json {
        let value: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        return value["a"] == "one fox" || value["a"] == "two bears";
    }
    let parts = text
        .split_once('-')
        .map(|(a, b)| (a.as_bytes(), b.as_bytes()));
    parts.is_some_and(|(letters, digits)| {
        (9..=12).contains(&letters.len())
            && letters.iter().all(|byte| (b'a'..=b'd').contains(byte))
            && digits.len() == 4
            && digits.iter().all(u8::is_ascii_digit)
    })
}

/// Of all lengths, most with a common beginning: greedy, sampled, with all that devices do to a distribution, and with
/// constraints.
fn mixed(count: usize) -> Vec<Request> {
    let compiler = GrammarCompiler::new(Arc::clone(&TOKENIZER), TOKENIZER.vocab_size());
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
        if i % 2 == 1 {
            let grammar = compiler.compile(&GRAMMARS[i / 2 % 2]);
            request.grammar = Some(grammar.unwrap());
            request.generation.max_tokens = 24;
            // White space, of which JSON may have much.
            let banned = [9, 10, 13].map(|token| (token, f32::NEG_INFINITY));
            request.generation.sampling.logit_bias.extend(banned);
        }
        request.logprobs = (i % 4 != 1).then_some(2);
        request.prompt_logprobs = i.is_multiple_of(4).then_some(1);
        request
    };
    (0..count).map(request).collect()
}

/// Holds the answers to [`mixed`] requests against their constraints.
fn check_constraints(answers: &[Answered]) {
    for (i, answer) in answers.iter().enumerate().filter(|(i, _)| i % 2 == 1) {
        let text = TOKENIZER.decode(answer.tokens(), false);
        assert!(is_allowed(&text, i / 2 % 2 == 1), "request {i}: {text:?}");
        assert_eq!(answer.reason(), FinishReason::Stop, "request {i}: {text:?}");
    }
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
    check_constraints(&expected);
    let assert_same = |found: &[Answered], how: &str| {
        assert_same(found, &expected, &format!("of {name} {how}"));
    };

    assert!(graph_replays() > replays, "{name}: no step was replayed");

    // Steps that are measured are not captured, and do not overlap: then the host chooses under constraints.
    let measured = RunnerConfig {
        profile: true,
        ..CONFIG
    };
    let mut found = apart(&start(measured, uncached), &requests);
    for i in (0..found.len()).filter(|&i| requests[i].grammar.is_some()) {
        take_logprobs(&mut found[i..=i], &expected[i..=i]);
    }
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

/// Keys are shared among blocks in parts of 512, and steps are captured for caches of up to 1024 tokens and of up to 4096. A
/// sequence beside a longer one is computed in steps for the cache of that one, and its prompt in chunks.
#[test]
fn rows_have_the_same_bits_beside_longer_ones() {
    let options = BackendOptions {
        activations: Some(Activations::F16),
        ..BackendOptions::default()
    };
    let Some(device) = device_with(options) else {
        return;
    };
    let model = fixture("llama-gptq4");
    let request = |(len, max_tokens): (usize, usize)| {
        let prompt: Vec<_> = (0..len).map(|at| (at * 7 % 251) as TokenId).collect();
        let mut request = greedy(&prompt, max_tokens);
        request.logprobs = Some(2);
        request
    };
    // The first passes 1024 tokens while the last is still there, the second passes 512.
    let requests = [(1021, 8), (508, 12), (30, 24)].map(request);
    let whole = RunnerConfig {
        context: 1040,
        max_seqs: 3,
        max_tokens: 1040,
        max_logit_rows: 3,
        kv_tokens: 3 * 1040,
        layout: KvLayout::Grouped { block_size: 16 },
        ..CONFIG
    };
    let start = |config| {
        let runner = session_on(&device, &model, config).into_runner();
        let uncached = EngineConfig {
            prefix_cache: false,
            ..EngineConfig::default()
        };
        Engine::start(runner, None, uncached).unwrap()
    };
    let expected = apart(&start(whole), &requests);
    let chunks = RunnerConfig {
        max_tokens: 300,
        ..whole
    };
    let found = answers(&start(chunks), &requests, 0);
    assert_same(&found, &expected, "in chunks, beside each other");
}

/// Bytes that are free on a device.
fn free(device: &BackendDispatch) -> u64 {
    device.info().memory.unwrap().free
}

/// What requests take on the device is there again when they have ended or their clients have gone, and all else when the engine
/// has.
#[test]
fn device_memory_is_given_back() {
    let options = BackendOptions {
        // The other tests leave it alone.
        ordinal: 1,
        ..BackendOptions::default()
    };
    let Some(device) = device_with(options) else {
        return;
    };
    let model = fixture("qwen3-moe-quantized/model-q4_0.gguf");
    let before = free(&device);
    let runner = session_on(&device, &model, CONFIG).into_runner();
    let engine = Engine::start(runner, None, EngineConfig::default()).unwrap();
    // Buffers between kernels are as large as the largest step needed until then, and which requests share a step depends on
    // when they come.
    let mut left: Vec<u64> = Vec::new();
    let settled = (0..8).any(|_| {
        for request in mixed(3) {
            drop(engine.handle().submit(request).unwrap());
        }
        answers(&engine, &mixed(4), 0);
        left.push(free(&device));
        matches!(left[..], [.., a, b, c] if a == b && b == c)
    });
    assert!(settled && left[0] < before, "{left:?} of {before} bytes");
    drop(engine);
    assert_eq!(free(&device), before);
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
