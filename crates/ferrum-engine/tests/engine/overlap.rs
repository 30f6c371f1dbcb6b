//! Steps that overlap: the answers are those of steps that do not, and the pool is whole afterwards.

use crate::adapters::adapter;
use crate::grammar::compile;
use crate::invariance::assert_same;
use crate::overlapped::{Happened, Overlapped};
use crate::scripted::{CONFIG, Scripted};
use crate::{Answered, collect, demo_tokenizer, greedy, sampled, take};
use ferrum_engine::grammar::Grammar;
use ferrum_engine::{Engine, EngineConfig, EventStream, Health, Request};
use ferrum_models::{KvLayout, RunnerConfig};
use ferrum_types::TokenId;
use pollster::block_on;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// The first of the tokens that answers are made of, and how many there are.
const WORDS: (TokenId, TokenId) = (300, 24);

fn scripted(config: RunnerConfig) -> Scripted {
    Scripted::new(config).choosing_of(WORDS.0, WORDS.1)
}

/// A request, and after how many tokens its receiver leaves.
#[derive(Clone, Debug)]
struct Asked {
    request: Request,
    leaves_after: Option<usize>,
}

/// Any request, of those that differ in how steps go.
fn asked() -> impl Strategy<Value = Asked> {
    let prompt = (0..4usize, prop::collection::vec(1..4u32, 1..12));
    let ends = (0..40usize, any::<bool>(), any::<bool>(), 0..6usize);
    let kind = (0..12u32, any::<u64>(), 1..4usize, -1..2i8);
    let leaves = prop::option::weighted(0.2, 0..12usize);
    (prompt, ends, kind, leaves).prop_map(|(prompt, ends, kind, leaves_after)| {
        let (max_tokens, stop_token, stop_text, min_tokens) = ends;
        let (kind, seed, n, priority) = kind;
        // Most begin alike, so that they share blocks.
        let tokens: Vec<_> = (0..prompt.0 as u32 * 8).chain(prompt.1).collect();
        let mut request = greedy(&tokens, max_tokens);
        match kind {
            0 => request = sampled(&tokens, max_tokens, seed),
            1 => request.logprobs = Some(1),
            2 => request.prompt_logprobs = Some(1),
            3 => request.draft_tokens = 3,
            5 => request.grammar = Some(compile(&Grammar::Regex("[a-z ]+".into()))),
            6 => request.generation.sampling.repeat_penalty = 1.3,
            7 => {
                request = sampled(&tokens, max_tokens, seed);
                let sampling = &mut request.generation.sampling;
                sampling.frequency_penalty = 0.4;
                sampling.repeat_penalty = 1.2;
                sampling.repeat_last_n = 3;
                sampling.logit_bias = vec![(WORDS.0, 1.5)];
                sampling.top_p = 0.9;
            }
            _ => {}
        }
        let text = demo_tokenizer().decode(&[WORDS.0 + 5], false);
        if stop_text && !text.is_empty() {
            request.generation.stop = vec![text];
        }
        if stop_token {
            request.generation.stop_tokens = vec![WORDS.0 + 2];
            request.generation.min_tokens = min_tokens.min(max_tokens);
        }
        // Choices of one request have the same prompt, and with sampling different answers.
        (request.n, request.priority) = (n, priority);
        Asked {
            request,
            leaves_after,
        }
    })
}

fn whole_answers(asked: &[Asked]) -> Vec<Answered> {
    let alone = EngineConfig {
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let engine = scripted(CONFIG).start(alone);
    let answer = |asked: &Asked| collect(engine.handle().submit(asked.request.clone()).unwrap());
    asked.iter().map(answer).collect()
}

/// The answers of an engine to all at once, as far as anybody was there to read them.
fn answers(engine: &Engine, asked: &[Asked]) -> Vec<Answered> {
    let submit = |asked: &Asked| engine.handle().submit(asked.request.clone()).unwrap();
    let streams: Vec<_> = asked.iter().map(submit).collect();
    let leaves = |asked: &Asked| asked.leaves_after;
    let mut streams: Vec<_> = streams
        .into_iter()
        .zip(asked.iter().map(leaves))
        .enumerate()
        .collect();
    // Streams that are dropped are read first.
    streams.sort_by_key(|(_, (_, leaves))| leaves.unwrap_or(usize::MAX));
    let read = |(index, (stream, leaves)): (usize, (EventStream, Option<usize>))| match leaves {
        Some(events) => (index, read_some(stream, events)),
        None => (index, collect(stream)),
    };
    let mut found: Vec<_> = streams.into_iter().map(read).collect();
    found.sort_by_key(|(index, _)| *index);
    found.into_iter().map(|(_, answered)| answered).collect()
}

fn read_some(mut stream: EventStream, events: usize) -> Answered {
    let mut answered = Answered::default();
    for _ in 0..events {
        match stream.blocking_next() {
            Some(event) => take(&mut answered, event),
            None => break,
        }
    }
    answered
}

/// Waits until the engine has checked its books with nothing left in them.
fn assert_clean(engine: &Engine) {
    let handle = engine.handle();
    let began = Instant::now();
    loop {
        assert!(!matches!(handle.health(), Health::Failed(_)), "{handle:?}");
        let stats = handle.stats();
        if stats.kv_blocks_used == 0 && stats.running + stats.waiting == 0 {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    engine.drain();
    block_on(handle.stopped());
    assert_eq!(handle.health(), Health::Stopped);
}

/// Checks its books whenever it rests.
fn careful() -> EngineConfig {
    EngineConfig {
        pool_check_interval: Duration::ZERO,
        ..EngineConfig::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn answers_do_not_depend_on_whether_steps_overlap(
        asked in prop::collection::vec(asked(), 1..14),
        blocks in 12..60usize,
        max_tokens in 8..32usize,
        samples in any::<bool>(),
    ) {
        let expected = whole_answers(&asked);
        let config = RunnerConfig {
            max_tokens,
            context: 96,
            kv_tokens: blocks * 8,
            ..CONFIG
        };
        let runner = match samples {
            true => scripted(config).sampling(),
            false => scripted(config),
        };
        let engine = Overlapped::new(runner).start(careful());
        // The second time all prompts are in the cache, or were.
        for round in ["cold", "warm"] {
            let found = answers(&engine, &asked);
            for ((found, expected), asked) in found.iter().zip(&expected).zip(&asked) {
                if asked.leaves_after.is_none() {
                    let (found, expected) = ([found.clone()], [expected.clone()]);
                    assert_same(&found, &expected, round);
                }
                for (found, expected) in found.choices.iter().zip(&expected.choices) {
                    prop_assert!(expected.tokens.starts_with(&found.tokens), "{round}");
                }
            }
        }
        assert_clean(&engine);
    }
}

/// Steps that were submitted before the step before them was collected, and all steps.
fn overlapped(log: &[Happened]) -> (usize, usize) {
    let place = |happened| log.iter().position(|&h| h == happened);
    let steps = log.iter().filter_map(|happened| match happened {
        Happened::Submitted(step) => Some(*step),
        Happened::Collected(_) => None,
    });
    let steps: Vec<_> = steps.collect();
    let early = |step: &&u64| {
        let before = place(Happened::Collected(**step - 1));
        **step > 1 && place(Happened::Submitted(**step)) < before
    };
    (steps.iter().filter(early).count(), steps.len())
}

#[test]
fn the_next_step_is_there_before_the_last_one_is_collected() {
    type Change = fn(&mut Request);
    // What is asked for beside greedy tokens, and whether steps overlap: on a device that samples, and on one that does
    // not.
    let cases: [(&str, Change, [bool; 2]); 6] = [
        ("greedy", |_| (), [true, true]),
        (
            "sampled",
            |r| r.generation.sampling.temperature = 1.0,
            [true, false],
        ),
        (
            "with penalties",
            |r| r.generation.sampling.repeat_penalty = 1.1,
            [true, false],
        ),
        ("with logprobs", |r| r.logprobs = Some(2), [true, false]),
        (
            "typical",
            |r| {
                r.generation.sampling.temperature = 1.0;
                r.generation.sampling.typical_p = 0.9;
            },
            [false, false],
        ),
        ("with drafts", |r| r.draft_tokens = 4, [false, false]),
    ];
    let on_both = |(name, change, overlaps): (_, Change, [bool; 2])| {
        [true, false].map(|samples| (name, change, samples, overlaps[usize::from(!samples)]))
    };
    for (name, change, samples, overlaps) in cases.into_iter().flat_map(on_both) {
        let runner = scripted(CONFIG);
        let runner = Overlapped::new(if samples { runner.sampling() } else { runner });
        let log = runner.log();
        let engine = runner.start(careful());
        let request = |seq: TokenId| {
            let mut request = greedy(&[seq, 2, 3], 40);
            change(&mut request);
            engine.handle().submit(request).unwrap()
        };
        let streams: Vec<_> = (1..5).map(request).collect();
        for stream in streams {
            assert_eq!(collect(stream).tokens().len(), 40, "{name}");
        }
        assert_clean(&engine);
        let stats = engine.handle().stats();
        let (early, steps) = overlapped(&log.lock().unwrap());
        // Sequences that arrive one by one may have steps of their own, so shares count and not numbers.
        let (few, most) = (steps / 4, steps - steps / 4);
        let as_expected = if overlaps {
            early >= most
        } else {
            early <= few
        };
        assert!(as_expected, "{name}: {early} of {steps}");
        assert_eq!(stats.generated_tokens, 160, "{name}");
    }
}

#[test]
fn one_sequence_whose_tokens_the_host_chooses_makes_all_wait_while_it_is_there() {
    let runner = Overlapped::new(scripted(CONFIG));
    let log = runner.log();
    let engine = runner.start(careful());
    let handle = engine.handle();
    let long = handle.submit(greedy(&[1, 2, 3], 90)).unwrap();
    let short = handle.submit(sampled(&[1, 2, 4], 30, 7)).unwrap();
    assert_eq!(collect(short).tokens().len(), 30);
    assert_eq!(collect(long).tokens().len(), 90);
    assert_clean(&engine);
    let (early, steps) = overlapped(&log.lock().unwrap());
    assert!((20..=70).contains(&early), "{early} of {steps}");
}

#[test]
fn the_time_of_overlapping_steps_counts_once() {
    let began = Instant::now();
    let time = Duration::from_millis(2);
    let engine = Overlapped::taking(scripted(CONFIG), time).start(careful());
    let stream = engine.handle().submit(greedy(&[1, 2, 3], 50)).unwrap();
    assert_eq!(collect(stream).tokens().len(), 50);
    let (stats, past) = (engine.handle().stats(), began.elapsed());
    // All of them together are a part of what has passed.
    assert!(stats.model_time <= past, "{stats:?}");
    assert!(stats.step_time <= past, "{stats:?}");
}

#[test]
fn an_adapter_goes_after_the_last_step_that_uses_it() {
    let engine = Overlapped::new(scripted(CONFIG)).start(careful());
    let handle = engine.handle();
    for leaves in [false, true] {
        let id = block_on(handle.load_adapter(adapter("llama-up"))).unwrap();
        let others = handle.submit(greedy(&[9, 9], 200)).unwrap();
        let mut request = greedy(&[1, 2, 3], 50);
        request.adapter = Some(id);
        let stream = handle.submit(request).unwrap();
        assert!(handle.unload_adapter(id));
        match leaves {
            true => drop(read_some(stream, 20)),
            false => assert_eq!(collect(stream).tokens().len(), 50),
        }
        assert_eq!(collect(others).tokens().len(), 200);
    }
    assert_clean(&engine);
}

#[test]
fn nan_ends_its_request_alone() {
    let runner = scripted(CONFIG).nan_for(7);
    let engine = Overlapped::new(runner).start(careful());
    let handle = engine.handle();
    let prompts = [[1, 2], [7, 2], [3, 2]];
    let streams = prompts.map(|prompt| handle.submit(greedy(&prompt, 30)).unwrap());
    for (stream, prompt) in streams.into_iter().zip(prompts) {
        let answered = collect(stream);
        assert_eq!(answered.failed.is_some(), prompt[0] == 7, "{answered:?}");
    }
    assert_clean(&engine);
}

#[test]
fn a_pool_that_is_too_small_for_all_is_no_obstacle() {
    let tight = RunnerConfig {
        context: 64,
        kv_tokens: 12 * 8,
        layout: KvLayout::Paged { block_size: 8 },
        ..CONFIG
    };
    let ask = |seq: TokenId| Asked {
        request: greedy(&[seq, 1, 2, 3, 4], 50),
        leaves_after: None,
    };
    let asked: Vec<_> = (1..7).map(ask).collect();
    let expected = whole_answers(&asked);
    let runner = Overlapped::new(scripted(tight));
    let log = runner.log();
    let engine = runner.start(careful());
    assert_same(&answers(&engine, &asked), &expected, "in a small pool");
    assert!(engine.handle().stats().preemptions > 0);
    assert_clean(&engine);
    let (early, steps) = overlapped(&log.lock().unwrap());
    assert!(early > 20, "{early} of {steps}");
}
