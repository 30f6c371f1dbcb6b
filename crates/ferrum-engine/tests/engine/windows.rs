//! Layers with a window keep no more blocks than it needs, and that changes no bit.

use crate::invariance::{ROOMY, all_at_once, assert_same, session, start, submit_all};
use crate::{collect, demo, demo_tokenizer, encode, greedy};
use ferrum_engine::{DraftRunner, Engine, EngineConfig, Runners};
use ferrum_formats::ModelSource;
use ferrum_models::{
    AttentionSpec, KvLayout, Model, Readback, RunnerConfig, read_model, spanned_blocks,
};
use std::path::Path;

const BLOCK: usize = 8;
const WHOLE: RunnerConfig = ROOMY;
pub(crate) const GROUPED: RunnerConfig = RunnerConfig {
    layout: KvLayout::Grouped { block_size: BLOCK },
    ..ROOMY
};

/// The demo model with such windows in its layers, in turns.
pub(crate) fn windowed(windows: &[Option<usize>]) -> Model {
    let mut model = demo();
    let windows = windows.iter().cycle();
    for (layer, window) in model.spec.layers.iter_mut().zip(windows) {
        if let AttentionSpec::Gqa(gqa) = &mut layer.attention {
            gqa.sliding_window = *window;
        }
    }
    model
}

#[test]
fn windows_change_no_bit_cached_or_not_preempted_or_not() {
    let mixed: &[&[Option<usize>]] = &[&[None, Some(20), Some(9)], &[Some(13)]];
    for windows in mixed {
        let model = windowed(windows);
        let whole = start(&model, WHOLE, EngineConfig::default());
        let expected = all_at_once(&whole);
        let how = |what: &str| format!("with windows {windows:?}, {what}");

        let grouped = start(&model, GROUPED, EngineConfig::default());
        assert_eq!(grouped.handle().kv_tokens(), whole.handle().kv_tokens());
        assert_same(&all_at_once(&grouped), &expected, &how("cold"));
        assert_same(&all_at_once(&grouped), &expected, &how("warm"));
        let stats = grouped.handle().stats();
        assert!(stats.cached_tokens > 100, "{stats:?}");
        let drafted = submit_all(&grouped, |request| request.draft_tokens = 6);
        assert_same(&drafted, &expected, &how("with drafts"));

        let tight = RunnerConfig {
            kv_tokens: 176,
            max_tokens: 20,
            ..GROUPED
        };
        let preempted = start(&model, tight, EngineConfig::default());
        assert_same(&all_at_once(&preempted), &expected, &how("preempted"));
        let stats = preempted.handle().stats();
        let needs_all = windows.contains(&None);
        assert!(stats.preemptions > 0 || !needs_all, "{stats:?}");
    }
}

#[test]
fn without_windows_there_is_one_group_and_the_same_pool() {
    let model = demo();
    let (whole, grouped) = (session(&model, WHOLE), session(&model, GROUPED));
    let [whole, grouped] = [whole, grouped].map(ferrum_engine::Session::into_runner);
    assert_eq!(whole.cache_groups(), grouped.cache_groups());
    assert_eq!(whole.pool(), grouped.pool());
    // A window as long as the context is none.
    let long = session(&windowed(&[Some(GROUPED.context)]), GROUPED).into_runner();
    assert_eq!(long.cache_groups(), whole.cache_groups());
}

/// Turns of a conversation, some of which change what was said: by groups, and with everything kept.
#[test]
fn a_session_keeps_what_its_windows_reach() {
    let model = windowed(&[None, Some(20), Some(9)]);
    let tight = RunnerConfig {
        max_seqs: 1,
        max_tokens: 16,
        context: 400,
        kv_tokens: 400,
        ..GROUPED
    };
    let whole = RunnerConfig {
        layout: WHOLE.layout,
        ..tight
    };
    let (mut one, mut other) = (session(&model, tight), session(&model, whole));
    let text: Vec<u32> = (0..300).map(|n| 3 + n * 7 % 50).collect();
    let changed = |at: usize, len: usize| {
        let rest = text[at..len].iter().map(|t| t + 1);
        text[..at].iter().copied().chain(rest).collect::<Vec<_>>()
    };
    // The cache is kept if the prompt goes back a little, and computed again if it goes back past the window's blocks.
    for (prompt, computed) in [
        (text[..40].to_vec(), 40),
        (text[..150].to_vec(), 110),
        (changed(145, 160), 15),
        (changed(30, 170), 170),
        (changed(165, 175), 175),
        (text[..290].to_vec(), 125),
        (text[..280].to_vec(), 1),
        (changed(40, 60), 60),
    ] {
        let found = one.prefill(&prompt, Readback::Logits).unwrap();
        let _ = other.prefill(&prompt, Readback::Logits).unwrap();
        let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(one.logits()), bits(other.logits()), "{}", prompt.len());
        assert_eq!(found, computed, "{}", prompt.len());
        for token in [5, 9, 4] {
            one.decode(token, Readback::Logits).unwrap();
            other.decode(token, Readback::Logits).unwrap();
            assert_eq!(bits(one.logits()), bits(other.logits()));
        }
    }
}

#[test]
fn a_session_goes_on_from_bytes_of_what_its_windows_reach() {
    let config = RunnerConfig {
        max_seqs: 1,
        max_tokens: 16,
        context: 400,
        kv_tokens: 400,
        ..GROUPED
    };
    let text: Vec<u32> = (0..300).map(|n| 3 + n * 7 % 50).collect();
    for windows in [&[None, Some(20), Some(9)][..], &[Some(13)]] {
        let model = windowed(windows);
        let mut one = session(&model, config);
        one.prefill(&text[..201], Readback::Logits).unwrap();
        let bytes = one.read_kv().unwrap();
        // Of a window, the blocks of the last keys alone.
        let all = session(&windowed(&[None]), config).kv_bytes(201).unwrap();
        assert!(bytes.len() < all, "{} of {all}", bytes.len());
        let mut other = session(&model, config);
        assert_eq!(one.kv_key("model"), other.kv_key("model"));
        let logits = |session: &mut ferrum_engine::Session, prompt: &[u32]| {
            let computed = session.prefill(prompt, Readback::Logits).unwrap();
            let bits: Vec<_> = session.logits().iter().map(|x| x.to_bits()).collect();
            (computed, bits)
        };
        for (len, computed) in [(204, 3), (290, 89)] {
            other.write_kv(&text[..201], &bytes).unwrap();
            let whole = logits(&mut session(&model, config), &text[..len]).1;
            let found = logits(&mut other, &text[..len]);
            assert_eq!(found, (computed, whole), "{windows:?}");
        }
        // Before its windows there is nothing to go on from.
        other.write_kv(&text[..201], &bytes).unwrap();
        let mut changed = text[..190].to_vec();
        changed.push(text[190] + 1);
        let whole = logits(&mut session(&model, config), &changed);
        assert_eq!(logits(&mut other, &changed), whole, "{windows:?}");
    }
}

#[test]
fn a_draft_model_with_windows_drafts_as_with_all_keys() {
    let model = windowed(&[None, Some(20), Some(9)]);
    let requests: Vec<_> = ["The fox", "One day there was", "It was"]
        .map(|text| greedy(&encode(&format!("{text} {}", "and then ".repeat(9))), 40))
        .to_vec();
    let plain = start(&model, WHOLE, EngineConfig::default());
    let ask = |engine: &Engine| {
        let submit = |request: &ferrum_engine::Request| engine.handle().submit(request.clone());
        let streams: Vec<_> = requests.iter().map(submit).collect();
        let streams = streams.into_iter().map(Result::unwrap);
        streams.map(collect).collect::<Vec<_>>()
    };
    let expected = ask(&plain);
    let small = RunnerConfig {
        max_seqs: 3,
        max_tokens: 9,
        ..GROUPED
    };
    for draft in [GROUPED, small] {
        let runners = Runners {
            model: session(&model, GROUPED).into_runner(),
            draft: Some(DraftRunner {
                runner: session(&model, draft).into_runner(),
                tokens: 4,
                features: None,
            }),
        };
        let engine = Engine::start(runners, Some(demo_tokenizer()), EngineConfig::default());
        let engine = engine.unwrap();
        assert_same(&ask(&engine), &expected, "with the model as its own draft");
        // It is the same model, so every draft token is accepted, except those after the end.
        let stats = engine.handle().stats();
        let wrong = stats.draft_tokens - stats.accepted_tokens;
        assert!(
            stats.accepted_tokens > 10 && wrong <= 12,
            "{} of {}",
            stats.accepted_tokens,
            stats.draft_tokens
        );
    }
}

#[test]
fn a_long_answer_uses_the_blocks_of_its_window() {
    let window = 9;
    let model = windowed(&[Some(window)]);
    let engine = start(&model, GROUPED, EngineConfig::default());
    let prompt = encode("Once upon a time there was a little fox who lived in the forest.");
    let mut stream = engine.handle().submit(greedy(&prompt, 120)).unwrap();
    // The blocks that the window reaches over, and those of a prompt in one chunk.
    let most = spanned_blocks(window + prompt.len(), BLOCK);
    let (mut tokens, mut used) = (0, Vec::new());
    while stream.blocking_next().is_some() {
        tokens += 1;
        used.push(engine.handle().stats().kv_blocks_used);
    }
    assert!(tokens > 100, "{tokens}");
    assert!(used.iter().all(|&n| n <= most), "{used:?}");
    let late = &used[BLOCK..];
    let of_window = spanned_blocks(window, BLOCK) + 1;
    assert!(late.iter().all(|&n| n <= of_window), "{used:?}");
    assert!(prompt.len() + tokens > 2 * BLOCK * of_window);
}

#[test]
fn forks_and_prefixes_in_mixed_windows_are_those_of_a_fixture() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen2-window");
    let model = read_model(ModelSource::open(path).unwrap()).unwrap();
    let ask = |config: RunnerConfig| {
        let runner = session(&model, config).into_runner();
        let groups = runner.cache_groups().len();
        let engine = Engine::start(runner, None, EngineConfig::default()).unwrap();
        let answers = (0..3).map(|round| {
            let prompt: Vec<u32> = (1..60 + 7 * round).collect();
            let mut request = greedy(&prompt, 40);
            (request.n, request.logprobs) = (3, Some(2));
            collect(engine.handle().submit(request).unwrap())
        });
        let answers: Vec<_> = answers.collect();
        (groups, answers)
    };
    let (one, expected) = ask(WHOLE);
    let (two, found) = ask(GROUPED);
    assert_eq!((one, two), (1, 2));
    assert_same(&found, &expected, "by groups");
    let cached = |a: &crate::Answered| a.usage.unwrap().cached_tokens;
    assert!(cached(&found[1]) >= 48 && cached(&found[2]) >= 56);
}
