//! Models with recurrent layers: chunks, batches, cached prefixes and preemption change no bit.

use crate::invariance::{ROOMY, assert_same, cpu, session, session_on};
use crate::naive::{Attention, Naive, PLAIN, short_conv, tokens};
use crate::{Answered, collect, greedy, sampled};
use ferrum_engine::engine::EngineStats;
use ferrum_engine::sampler::{Logprobs, TokenLogprob};
use ferrum_engine::{BackendDispatch, DraftRunner, Engine, EngineConfig, Request, Runners};
use ferrum_formats::ModelSource;
use ferrum_models::{KvLayout, Model, Readback, RunnerConfig, read_model};
use ferrum_types::TokenId;
use std::path::Path;

pub(crate) const CONFIG: RunnerConfig = RunnerConfig {
    context: 120,
    kept_states: 6,
    layout: KvLayout::Grouped { block_size: 8 },
    ..ROOMY
};

pub(crate) fn hybrid(dir: &tempfile::TempDir) -> Model {
    let windowed = Attention {
        window: Some(9),
        ..PLAIN
    };
    Naive::new(&[short_conv(3), PLAIN, short_conv(4), windowed]).open(dir.path())
}

/// Prompts with a common beginning, of which some are alike, and turns of a conversation.
pub(crate) fn requests() -> Vec<Request> {
    let beginning = tokens(40);
    let prompt = |i: usize| -> Vec<TokenId> {
        let end = (0..5 + 3 * i).map(|n| ((n * (1 + i / 2)) % 31) as TokenId);
        match i % 4 {
            3 => end.collect(),
            _ => beginning.iter().copied().chain(end).collect(),
        }
    };
    let request = |i: usize| {
        let mut request = match i % 2 {
            0 => greedy(&prompt(i), 20),
            _ => sampled(&prompt(i), 20, i as u64),
        };
        request.logprobs = Some(2);
        request.prompt_logprobs = (i % 5 == 4).then_some(1);
        request.n = 1 + i % 3;
        request
    };
    (0..12).map(request).collect()
}

/// Answers to all requests at once.
pub(crate) fn answers(engine: &Engine, requests: &[Request], drafts: usize) -> Vec<Answered> {
    let submit = |request: &Request| {
        let mut request = request.clone();
        request.draft_tokens = drafts;
        engine.handle().submit(request).unwrap()
    };
    let streams: Vec<_> = requests.iter().map(submit).collect();
    streams.into_iter().map(collect).collect()
}

/// Log-probabilities of rows that the host chooses from, as of drafts, are computed by the host, whose order of sums is another than that of a
/// device which samples. Where all of a choice are near those that are expected, and of the same tokens, they become those.
pub(crate) fn take_logprobs(found: &mut [Answered], expected: &[Answered]) {
    let near = |a: &TokenLogprob, b: &TokenLogprob| {
        a.token == b.token && (a.logprob - b.logprob).abs() < 1e-5
    };
    let alike = |(a, b): (&Logprobs, &Logprobs)| {
        let tops = a.top.iter().zip(&b.top);
        a.rank == b.rank
            && a.top.len() == b.top.len()
            && near(&a.chosen, &b.chosen)
            && tops.into_iter().all(|(a, b)| near(a, b))
    };
    for (found, expected) in found.iter_mut().zip(expected) {
        for (found, expected) in found.choices.iter_mut().zip(&expected.choices) {
            let same_length = found.logprobs.len() == expected.logprobs.len();
            if same_length && found.logprobs.iter().zip(&expected.logprobs).all(alike) {
                found.logprobs.clone_from(&expected.logprobs);
            }
        }
    }
}

#[test]
fn states_change_no_bit_cached_or_not_preempted_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let stats = check_states(&cpu(), &hybrid(&dir), &requests());
    assert!(stats.accepted_tokens > 0, "{stats:?}");
    assert!(stats.draft_tokens > stats.accepted_tokens, "{stats:?}");
}

/// The same of layers of linear attention: the gated delta rule, with experts too, and the state space of Mamba-2.
#[test]
fn states_of_linear_attention_change_no_bit() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    for name in ["qwen35", "qwen3-next", "granite-hybrid-moe"] {
        println!("{name}");
        let source = ModelSource::open(fixtures.join(name)).unwrap();
        check_states(&cpu(), &read_model(source).unwrap(), &requests());
    }
}

/// Returns the figures of an engine with little room, which had drafts of repetitions in the text.
pub(crate) fn check_states(
    device: &BackendDispatch,
    model: &Model,
    requests: &[Request],
) -> EngineStats {
    let start = |config, engine| {
        let runner = session_on(device, model, config).into_runner();
        Engine::start(runner, None, engine).unwrap()
    };
    let alone = EngineConfig {
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let one = start(CONFIG, alone);
    let ask = |request: &Request| collect(one.handle().submit(request.clone()).unwrap());
    let expected: Vec<_> = requests.iter().map(ask).collect();
    let samples = session_on(device, model, CONFIG).into_runner().samples();
    let assert_drafted = |engine: &Engine, how: &str| {
        let mut found = answers(engine, requests, 5);
        if samples {
            take_logprobs(&mut found, &expected);
        }
        assert_same(&found, &expected, how);
    };

    let often = EngineConfig {
        state_checkpoint_interval: 16,
        ..EngineConfig::default()
    };
    let engine = start(CONFIG, often);
    assert_same(&answers(&engine, requests, 0), &expected, "cold");
    assert_same(&answers(&engine, requests, 0), &expected, "warm");
    assert_drafted(&engine, "with drafts");
    assert!(engine.handle().stats().cached_tokens > 20 * requests.len() as u64);

    let none = RunnerConfig {
        kept_states: 0,
        ..CONFIG
    };
    let engine = start(none, EngineConfig::default());
    for _ in 0..2 {
        assert_same(
            &answers(&engine, requests, 0),
            &expected,
            "without state checkpoints",
        );
    }
    assert_eq!(engine.handle().stats().cached_tokens, 0);
    // Where all slots are those of running sequences, there is none to go back to.
    assert_drafted(&engine, "with drafts and few slots");

    let tight = RunnerConfig {
        kv_tokens: 104 + 8 * requests.len(),
        max_tokens: 20,
        kept_states: 2,
        ..CONFIG
    };
    let engine = start(tight, EngineConfig::default());
    assert_same(&answers(&engine, requests, 0), &expected, "preempted");
    assert!(engine.handle().stats().preemptions > 0);
    assert_drafted(&engine, "preempted with drafts");
    engine.handle().stats()
}

#[test]
fn a_session_goes_on_and_begins_anew_when_its_past_changes() {
    let dir = tempfile::tempdir().unwrap();
    let model = hybrid(&dir);
    let text = tokens(60);
    let logits = |session: &mut ferrum_engine::Session, prompt: &[TokenId]| {
        let computed = session.prefill(prompt, Readback::Logits).unwrap();
        let bits: Vec<_> = session.logits().iter().map(|x| x.to_bits()).collect();
        (computed, bits)
    };
    let fresh = |prompt: &[TokenId]| logits(&mut session(&model, CONFIG), prompt).1;
    let mut one = session(&model, CONFIG);
    assert_eq!(logits(&mut one, &text[..20]), (20, fresh(&text[..20])));
    assert_eq!(logits(&mut one, &text[..50]), (30, fresh(&text[..50])));
    // Its keys would do, its state would not.
    let other: Vec<_> = text[..45].iter().chain(&[3, 1, 4]).copied().collect();
    assert_eq!(logits(&mut one, &other), (48, fresh(&other)));
    // Another goes on from the bytes of what it kept, the state among them.
    let bytes = one.read_kv().unwrap();
    assert_eq!(one.kv_bytes(48), Some(bytes.len()));
    let mut next = session(&model, CONFIG);
    assert_eq!(next.kv_key("model"), one.kv_key("model"));
    next.write_kv(&other, &bytes).unwrap();
    let longer = [&other[..], &[2, 7, 1]].concat();
    assert_eq!(logits(&mut next, &longer), (3, fresh(&longer)));
    assert!(next.write_kv(&other, &bytes[1..]).is_err());
    assert!(next.is_empty());
}

/// Drafts of a model without states, most of which are wrong.
#[test]
fn drafts_of_a_model_change_no_bit() {
    let [dir, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (model, requests) = (hybrid(&dir), requests());
    let small = Naive::new(&[PLAIN]).open(other.path());
    let config = RunnerConfig {
        max_tokens: 40,
        ..CONFIG
    };
    let runners = Runners {
        model: session(&model, config).into_runner(),
        draft: Some(DraftRunner {
            runner: session(&small, config).into_runner(),
            tokens: 3,
            features: None,
        }),
    };
    let often = EngineConfig {
        state_checkpoint_interval: 16,
        ..EngineConfig::default()
    };
    let plain = Engine::start(session(&model, config).into_runner(), None, often.clone()).unwrap();
    let engine = Engine::start(runners, None, often).unwrap();
    // It is tried out after some steps.
    for _ in 0..4 {
        let expected = answers(&plain, &requests, 0);
        assert_same(&answers(&engine, &requests, 0), &expected, "drafts");
    }
    let stats = engine.handle().stats();
    assert!(stats.accepted_tokens > 0, "{stats:?}");
    assert!(stats.draft_tokens > stats.accepted_tokens, "{stats:?}");
    assert!(stats.cached_tokens > 0, "{stats:?}");
}

#[test]
fn draft_models_with_states_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = hybrid(&dir);
    let runner = || session(&model, CONFIG).into_runner();
    let runners = Runners {
        model: runner(),
        draft: Some(DraftRunner {
            runner: runner(),
            tokens: 3,
            features: None,
        }),
    };
    let refused = Engine::start(runners, None, EngineConfig::default());
    let words = refused.err().map(|error| error.to_string());
    assert!(words.unwrap().contains("recurrent states"));
}
