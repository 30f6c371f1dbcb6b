//! Same prompt, same tokens: on the demo model, on the CPU, to the bit.

use crate::grammar::compile;
use crate::{Answered, collect, demo, demo_tokenizer, encode, greedy, sampled};
use ferrum_engine::grammar::Grammar;
use ferrum_engine::sampler::{Logprobs, logprobs};
use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, DraftRunner, Engine, EngineConfig,
    GenerationParams, KvDtype, Request, Runners, Session, generate,
};
use ferrum_formats::ModelSource;
use ferrum_models::{KvLayout, Model, Readback, RunnerConfig, read_model};
use std::path::Path;

pub(crate) const ROOMY: RunnerConfig = RunnerConfig {
    context: 160,
    max_seqs: 16,
    max_tokens: 64,
    max_logit_rows: 24,
    kv_tokens: 16 * 160,
    kept_states: 0,
    layout: KvLayout::Paged { block_size: 8 },
    profile: false,
};

pub(crate) fn cpu() -> BackendDispatch {
    let options = BackendOptions {
        threads: Some(2),
        ..BackendOptions::default()
    };
    BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap()
}

pub(crate) fn session_on(device: &BackendDispatch, model: &Model, config: RunnerConfig) -> Session {
    let kv = KvDtype::for_model(model);
    device.load(model, config, kv, &mut |_, _| ()).unwrap()
}

pub(crate) fn session(model: &Model, config: RunnerConfig) -> Session {
    session_on(&cpu(), model, config)
}

pub(crate) fn start(model: &Model, config: RunnerConfig, engine: EngineConfig) -> Engine {
    let runner = session(model, config).into_runner();
    Engine::start(runner, Some(demo_tokenizer()), engine).unwrap()
}

/// Different in length and in how they choose, most of them with a common beginning.
fn requests() -> Vec<Request> {
    let beginning = "Once upon a time there was a little fox who lived in the forest. ";
    let ends = [
        "The fox",
        "One day",
        "It was",
        "A bird",
        "Tom",
        "Lily saw",
        "He",
        "They went to",
    ];
    let prompt = |i: usize| {
        let begins = if i % 4 == 3 { "" } else { beginning };
        encode(&format!(
            "{begins}{}",
            ends[i % ends.len()].repeat(1 + i / ends.len())
        ))
    };
    let request = |i: usize| {
        let mut request = match i % 3 {
            0 => greedy(&prompt(i), 24),
            _ => sampled(&prompt(i), 24, i as u64),
        };
        request.logprobs = Some(3);
        request.prompt_logprobs = i.is_multiple_of(4).then_some(2);
        if i % 3 == 2 {
            request.generation.sampling.frequency_penalty = 0.5;
            request.generation.sampling.repeat_penalty = 1.1;
            request.generation.sampling.dry.multiplier = 0.8;
        }
        if i % 5 == 1 {
            request.generation.stop_tokens = demo_tokenizer().eos_ids().to_vec();
            request.grammar = Some(compile(&Grammar::json_object()));
        }
        request
    };
    (0..16).map(request).collect()
}

fn one_by_one(engine: &Engine) -> Vec<Answered> {
    let ask = |request| collect(engine.handle().submit(request).unwrap());
    requests().into_iter().map(ask).collect()
}

pub(crate) fn all_at_once(engine: &Engine) -> Vec<Answered> {
    submit_all(engine, |_| ())
}

pub(crate) fn submit_all(engine: &Engine, change: impl Fn(&mut Request)) -> Vec<Answered> {
    let submit = |mut request| {
        change(&mut request);
        engine.handle().submit(request).unwrap()
    };
    let streams: Vec<_> = requests().into_iter().map(submit).collect();
    streams.into_iter().map(collect).collect()
}

/// Holds answers against those that were expected, to the bit; only what was found in the cache may
/// differ.
pub(crate) fn assert_same(found: &[Answered], expected: &[Answered], how: &str) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            found.failed.is_none(),
            "request {index} {how}: {:?}",
            found.failed
        );
        assert_eq!(found.choices.len(), expected.choices.len());
        for (found, expected) in found.choices.iter().zip(&expected.choices) {
            assert_eq!(found.tokens, expected.tokens, "request {index} {how}");
            assert_eq!(found.text, expected.text, "request {index} {how}");
            assert_eq!(found.ended, expected.ended, "request {index} {how}");
            assert_bits(&found.logprobs, &expected.logprobs, index, how);
        }
        let (found, expected) = (&found.prompt_logprobs, &expected.prompt_logprobs);
        assert_bits(found, expected, index, how);
    }
}

fn assert_bits(found: &[Logprobs], expected: &[Logprobs], index: usize, how: &str) {
    assert_eq!(found.len(), expected.len(), "request {index} {how}");
    let bits = |l: &Logprobs| {
        let all = std::iter::once(&l.chosen).chain(&l.top);
        all.map(|t| (t.token, t.logprob.to_bits()))
            .collect::<Vec<_>>()
    };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = bits(found) == bits(expected) && found.rank == expected.rank;
        assert!(
            same,
            "request {index} {how}, token {at}: {found:?}, expected {expected:?}"
        );
    }
}

#[test]
fn alone_or_with_fifteen_others_cached_or_not_preempted_or_not() {
    let model = demo();
    let uncached = EngineConfig {
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let reference = start(&model, ROOMY, uncached.clone());
    let expected = one_by_one(&reference);
    let stats = reference.handle().stats();
    assert_eq!((stats.preemptions, stats.cached_tokens), (0, 0));

    let together = start(&model, ROOMY, uncached);
    assert_same(&all_at_once(&together), &expected, "with others");

    let cached = start(&model, ROOMY, EngineConfig::default());
    assert_same(&all_at_once(&cached), &expected, "with a cache");
    assert_same(&all_at_once(&cached), &expected, "with a warm cache");
    assert!(cached.handle().stats().cached_tokens > 100);

    let drafting = start(&model, ROOMY, EngineConfig::default());
    let drafted = submit_all(&drafting, |request| request.draft_tokens = 6);
    assert_same(&drafted, &expected, "with drafts");
    let stats = drafting.handle().stats();
    assert!(stats.accepted_tokens > 0, "{stats:?}");

    let tight = RunnerConfig {
        kv_tokens: 176,
        max_tokens: 20,
        ..ROOMY
    };
    let preempted = start(&model, tight, EngineConfig::default());
    assert_same(&all_at_once(&preempted), &expected, "preempted");
    let both = submit_all(&preempted, |request| request.draft_tokens = 6);
    assert_same(&both, &expected, "preempted, with drafts");
    assert!(preempted.handle().stats().preemptions > 0);
}

#[test]
fn an_engine_says_what_a_session_says() {
    let model = demo();
    let tokenizer = demo_tokenizer();
    let engine = start(&model, ROOMY, EngineConfig::default());
    let mut session = session(&model, ROOMY);
    for seed in 0..4 {
        let mut request = match seed {
            0 => greedy(&encode("The little fox"), 30),
            _ => sampled(&encode("Once upon a time"), 30, seed),
        };
        request.generation.stop = vec![". ".into()];
        let wanted: GenerationParams = request.generation.clone();
        let mut text = String::new();
        let stats = generate(
            &mut session,
            &tokenizer,
            &request.prompt,
            &wanted,
            &mut |t| {
                text.push_str(t);
                true
            },
        );
        let stats = stats.unwrap();
        let answered = collect(engine.handle().submit(request).unwrap());
        assert_eq!(answered.tokens(), stats.tokens);
        assert_eq!(answered.choices[0].text, text);
        assert_eq!(answered.reason(), stats.finish);
    }
}

#[test]
fn choices_are_those_of_their_seed() {
    let model = demo();
    let engine = start(&model, ROOMY, EngineConfig::default());
    let prompt = encode("Once upon a time there was a girl named Lily. She");
    let alone = collect(engine.handle().submit(sampled(&prompt, 20, 5)).unwrap());
    let mut several = sampled(&prompt, 20, 5);
    several.n = 4;
    let found = collect(engine.handle().submit(several.clone()).unwrap());
    assert_eq!(found.choices[0], alone.choices[0]);
    let differ = |i: usize| found.choices[i].tokens != found.choices[0].tokens;
    assert!((1..4).all(differ), "{found:?}");
    let again = collect(engine.handle().submit(several).unwrap());
    assert_eq!(again.choices, found.choices);
}

#[test]
fn prompt_logprobs_are_those_of_scoring() {
    let model = demo();
    let prompt = encode("Once upon a time there was a little fox who lived in the forest.");
    let mut expected = Vec::new();
    let vocab = model.spec.vocab_size;
    let mut session = session(&model, ROOMY);
    let each = &mut |start: usize, rows: &[f32]| {
        for (i, row) in rows.chunks_exact(vocab).enumerate() {
            if let Some(&next) = prompt.get(start + i + 1) {
                expected.push(logprobs(row, next, 5));
            }
        }
        Ok(())
    };
    session.score(&prompt, each).unwrap();
    let engine = start(&model, ROOMY, EngineConfig::default());
    for max_tokens in [0, 3] {
        let mut request = greedy(&prompt, max_tokens);
        request.prompt_logprobs = Some(5);
        let found = collect(engine.handle().submit(request).unwrap());
        assert_eq!(found.prompt_logprobs, expected);
    }
}

#[test]
fn rope_that_depends_on_length_shares_only_between_equal_lengths() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/llama-dynamic");
    let model = read_model(ModelSource::open(path).unwrap()).unwrap();
    let config = RunnerConfig {
        context: 64,
        ..ROOMY
    };
    let runner = session(&model, config).into_runner();
    let engine = Engine::start(runner, None, EngineConfig::default()).unwrap();
    let ask = |prompt: &[u32]| {
        let mut request = greedy(prompt, 8);
        request.logprobs = Some(1);
        collect(engine.handle().submit(request).unwrap())
    };
    let prompt: Vec<u32> = (1..30).collect();
    let mut session = session(&model, config);
    for (len, cached) in [(29, 0), (29, 24), (28, 0), (20, 0), (28, 24)] {
        let found = ask(&prompt[..len]);
        assert_eq!(found.usage.unwrap().cached_tokens, cached, "{len}");
        session.prefill(&prompt[..len], Readback::Logits).unwrap();
        for (&token, told) in found.tokens().iter().zip(&found.choices[0].logprobs) {
            assert_eq!(*told, logprobs(session.logits(), token, 1));
            session.decode(token, Readback::Logits).unwrap();
        }
    }
}

#[test]
fn a_draft_model_changes_how_many_steps_there_are_and_nothing_else() {
    let model = demo();
    let plain = start(&model, ROOMY, EngineConfig::default());
    let expected = all_at_once(&plain);
    let drafting = |draft: RunnerConfig| {
        let config = RunnerConfig {
            max_logit_rows: 64,
            ..ROOMY
        };
        let runners = Runners {
            model: session(&model, config).into_runner(),
            draft: Some(DraftRunner {
                runner: session(&model, draft).into_runner(),
                tokens: 4,
                features: None,
            }),
        };
        Engine::start(runners, Some(demo_tokenizer()), EngineConfig::default()).unwrap()
    };
    // Room for all; room for some sequences, some of their tokens, and a few tokens of a step.
    let small = RunnerConfig {
        context: 60,
        max_seqs: 5,
        max_tokens: 7,
        max_logit_rows: 3,
        kv_tokens: 128,
        ..ROOMY
    };
    for draft in [ROOMY, small] {
        let engine = drafting(draft);
        for round in 0..3 {
            let found = all_at_once(&engine);
            assert_same(&found, &expected, &format!("with {draft:?}, round {round}"));
        }
        let stats = engine.handle().stats();
        assert!(stats.accepted_tokens > 0, "{stats:?}");
        // Sampled tokens are not always the likeliest, so some drafts are rejected.
        assert!(stats.accepted_tokens < stats.draft_tokens, "{stats:?}");
    }
}

#[test]
fn a_draft_model_of_another_vocabulary_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3");
    let other = read_model(ModelSource::open(path).unwrap()).unwrap();
    let runners = Runners {
        model: session(&demo(), ROOMY).into_runner(),
        draft: Some(DraftRunner {
            runner: session(&other, ROOMY).into_runner(),
            tokens: 4,
            features: None,
        }),
    };
    let refused = Engine::start(runners, None, EngineConfig::default());
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("the draft model has a vocabulary of"),
        "{error}"
    );
}
