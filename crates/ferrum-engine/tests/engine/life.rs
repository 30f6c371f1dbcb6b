//! Lifecycle of requests: which steps they are in, when they end, and their usage.

use crate::scripted::{CONFIG, Scripted};
use crate::{collect, greedy, sampled};
use ferrum_engine::engine::{Clock, Usage};
use ferrum_engine::{Engine, EngineConfig, EngineError, Event, FinishReason, Health};
use ferrum_models::{KvLayout, RunnerConfig};
use std::time::Duration;

fn checking() -> EngineConfig {
    EngineConfig {
        pool_check_interval: Duration::ZERO,
        ..EngineConfig::default()
    }
}

/// Waits until nothing is running, and checks that the statistics agree.
fn assert_idle(engine: &Engine) {
    let handle = engine.handle();
    loop {
        let stats = handle.stats();
        if stats.running == 0 && stats.waiting == 0 && stats.kv_blocks_used == 0 {
            return;
        }
        assert!(handle.health().is_alive());
        std::thread::yield_now();
    }
}

#[test]
fn a_request_is_answered_and_accounted_for() {
    let engine = Scripted::new(CONFIG).start(checking());
    let prompt: Vec<_> = (1..30).collect();
    let first = collect(engine.handle().submit(greedy(&prompt, 10)).unwrap());
    assert_eq!(first.tokens().len(), 10);
    assert_eq!(first.reason(), FinishReason::Length);
    let usage = Usage {
        prompt_tokens: 29,
        cached_tokens: 0,
        completion_tokens: 10,
    };
    assert_eq!(first.usage, Some(usage));
    // The same again finds whole blocks of the prompt in the cache.
    let again = collect(engine.handle().submit(greedy(&prompt, 10)).unwrap());
    assert_eq!(again.choices, first.choices);
    let cached_tokens = 24;
    assert_eq!(
        again.usage,
        Some(Usage {
            cached_tokens,
            ..usage
        })
    );
    assert_idle(&engine);
    let stats = engine.handle().stats();
    assert_eq!((stats.generated_tokens, stats.finished_requests), (20, 2));
    assert_eq!((stats.prompt_tokens, stats.cached_tokens), (58, 24));
    assert_eq!(stats.computed_tokens, 29 + 9 + 5 + 9);
    assert_eq!(stats.kv_blocks, 128);
    assert!(stats.steps > 0 && stats.kv_blocks_cached > 0);
}

#[test]
fn tenants_share_nothing() {
    let engine = Scripted::new(CONFIG).start(checking());
    let prompt: Vec<_> = (1..30).collect();
    let ask = |tenant: Option<&str>| {
        let mut request = greedy(&prompt, 3);
        request.tenant = tenant.map(str::to_owned);
        collect(engine.handle().submit(request).unwrap())
    };
    let cached = |tenant| ask(tenant).usage.unwrap().cached_tokens;
    let found = [None, Some("a"), Some("b"), None, Some("a"), Some("b")].map(cached);
    assert_eq!(found, [0, 0, 0, 24, 24, 24]);
}

#[test]
fn without_a_prefix_cache_requests_share_nothing_but_choices_do() {
    let config = EngineConfig {
        prefix_cache: false,
        ..checking()
    };
    let engine = Scripted::new(CONFIG).start(config);
    let prompt: Vec<_> = (1..30).collect();
    let mut request = sampled(&prompt, 3, 1);
    request.n = 3;
    for _ in 0..2 {
        let answered = collect(engine.handle().submit(request.clone()).unwrap());
        assert_eq!(answered.usage.unwrap().cached_tokens, 0);
    }
    let stats = engine.handle().stats();
    // Two of three choices had 24 of 29 tokens each time.
    assert_eq!(stats.cached_tokens, 2 * 2 * 24);
}

#[test]
fn a_long_prompt_leaves_everybody_a_token_in_every_step() {
    let config = RunnerConfig {
        max_tokens: 16,
        ..CONFIG
    };
    let (runner, gate) = Scripted::new(config).gated();
    let seen = runner.seen();
    let engine = runner.start(checking());
    let handle = engine.handle();
    let first = handle.submit(greedy(&[1, 1, 1], 60)).unwrap();
    // Its first step is under way, or the next: the long one comes while it decodes.
    gate.send(()).unwrap();
    gate.send(()).unwrap();
    while handle.stats().steps < 2 {
        std::thread::yield_now();
    }
    let long: Vec<_> = (2..302).collect();
    let second = handle.submit(greedy(&long, 5)).unwrap();
    drop(gate);
    assert_eq!(collect(first).tokens().len(), 60);
    assert_eq!(collect(second).tokens().len(), 5);
    let seen = seen.lock().unwrap();
    let prefill = seen
        .iter()
        .filter(|step| step.iter().any(|s| s.0 == 2))
        .count();
    assert!(prefill > 18, "{prefill}");
    // From its prompt to its last token, the first request was in every single step.
    let there = seen
        .iter()
        .take(60)
        .filter(|step| step.iter().any(|s| s.0 == 1));
    assert_eq!(there.count(), 60);
    assert!(
        seen.iter()
            .all(|step| step.iter().map(|s| s.2).sum::<usize>() <= 16)
    );
}

#[test]
fn prompts_get_the_share_of_a_step_that_its_time_allows() {
    let config = RunnerConfig {
        max_tokens: 256,
        ..CONFIG
    };
    let long: Vec<_> = (2..502).collect();
    let longest_chunk = |step_time| {
        let clock = Clock::manual();
        let (step, token) = (Duration::from_millis(10), Duration::from_millis(1));
        let runner = Scripted::new(config).costing(&clock, step, token);
        let (runner, gate) = runner.gated();
        let seen = runner.seen();
        let engine = runner.start(EngineConfig {
            step_time,
            clock,
            ..checking()
        });
        let handle = engine.handle();
        let decoding = handle.submit(greedy(&[1; 40], 60)).unwrap();
        gate.send(()).unwrap();
        gate.send(()).unwrap();
        while handle.stats().steps < 2 {
            std::thread::yield_now();
        }
        let prompt = handle.submit(greedy(&long, 3)).unwrap();
        drop(gate);
        let answers = [collect(decoding), collect(prompt)];
        let seen = seen.lock().unwrap();
        let beside = seen.iter().filter(|step| step.len() == 2);
        let chunks = beside.flat_map(|step| step.iter().filter(|s| s.0 == 2));
        let longest = chunks.map(|s| s.2).max().unwrap();
        (longest, answers.map(|a| a.choices[0].tokens.clone()))
    };
    let ms = |ms| Some(Duration::from_millis(ms));
    let (all, expected) = longest_chunk(ms(10_000));
    assert_eq!(all, 255, "all that the step has room for");
    // A decode takes 11 ms, and a token of a prompt 1 ms or a little more.
    for (step_time, shares) in [(ms(111), 80..=101), (ms(1), 32..=32), (None, 60..=90)] {
        let (share, answers) = longest_chunk(step_time);
        assert!(shares.contains(&share), "{step_time:?}: {share}");
        assert_eq!(answers, expected, "{step_time:?}");
    }
}

#[test]
fn choosing_for_many_gives_each_what_it_gets_alone() {
    // Rows so long that several are read by several threads.
    let start = || Scripted::new(CONFIG).with_vocab(1 << 17);
    let mut requests = [1, 2, 3, 4, 5, 6].map(|i| sampled(&[i, i + 1, i + 2], 6, i.into()));
    requests[1].generation.sampling.top_p = 1.0;
    requests[2].generation.sampling.top_k = 1000;
    requests[3].generation.sampling.presence_penalty = 1.5;
    requests[3].logprobs = Some(3);
    requests[4].n = 2;
    requests[5] = greedy(&[6, 7, 8], 6);
    let alone = start().start(checking());
    let expected = requests.clone().map(|mut request| {
        let choices = std::mem::replace(&mut request.n, 1);
        let mut answered = collect(alone.handle().submit(request.clone()).unwrap()).choices;
        if choices > 1 {
            // The second choice has company in any case.
            request.n = choices;
            let both = collect(alone.handle().submit(request).unwrap()).choices;
            assert_eq!(both[0], answered[0]);
            answered = both;
        }
        answered
    });
    let (runner, gate) = start().gated();
    let seen = runner.seen();
    let engine = runner.start(checking());
    let streams = requests.map(|request| engine.handle().submit(request).unwrap());
    drop(gate);
    let found = streams.map(|stream| collect(stream).choices);
    assert_eq!(found, expected);
    let widest = seen.lock().unwrap().iter().map(Vec::len).max();
    assert_eq!(widest, Some(7));
    assert_idle(&engine);
}

#[test]
fn a_cancelled_request_is_not_in_the_next_step_and_holds_no_block() {
    for by_drop in [false, true] {
        let (runner, gate) = Scripted::new(CONFIG).gated();
        let seen = runner.seen();
        let engine = runner.start(checking());
        let handle = engine.handle();
        let other = handle.submit(greedy(&[1; 9], 30)).unwrap();
        let mut stream = handle.submit(greedy(&[2; 9], 400)).unwrap();
        for _ in 0..4 {
            gate.send(()).unwrap();
        }
        // Two tokens are there, so it is in the middle of things.
        for _ in 0..2 {
            assert!(matches!(stream.blocking_next(), Some(Event::Token { .. })));
        }
        while handle.stats().steps < 4 {
            std::thread::yield_now();
        }
        // One step waits at the gate; the next one must be without it.
        let mut ended = None;
        if by_drop {
            drop(stream);
        } else {
            handle.cancel(stream.id());
            ended = Some(stream);
        }
        drop(gate);
        if let Some(stream) = ended {
            let answered = collect(stream);
            assert_eq!(answered.reason(), FinishReason::Cancelled);
        }
        assert_eq!(collect(other).tokens().len(), 30);
        let seen = seen.lock().unwrap();
        let last = seen
            .iter()
            .rposition(|step| step.iter().any(|s| s.0 == 2))
            .unwrap();
        assert!(last <= 4, "{last}");
        drop(seen);
        assert_idle(&engine);
    }
}

#[test]
fn a_deadline_ends_whoever_runs_or_waits() {
    let clock = Clock::manual();
    let config = EngineConfig {
        clock: clock.clone(),
        ..checking()
    };
    let one = RunnerConfig {
        max_seqs: 1,
        ..CONFIG
    };
    let (runner, gate) = Scripted::new(one).gated();
    let engine = runner.start(config);
    let handle = engine.handle();
    let timed = |i| {
        let mut request = greedy(&[i; 5], 300);
        request.timeout = Some(Duration::from_secs(3));
        handle.submit(request).unwrap()
    };
    let (mut running, waiting) = (timed(1), timed(2));
    let patient = handle.submit(greedy(&[3; 5], 4)).unwrap();
    gate.send(()).unwrap();
    assert!(matches!(running.blocking_next(), Some(Event::Token { .. })));
    clock.advance(Duration::from_secs(4));
    drop(gate);
    for stream in [running, waiting] {
        assert_eq!(collect(stream).reason(), FinishReason::Deadline);
    }
    assert_eq!(collect(patient).reason(), FinishReason::Length);
    assert_idle(&engine);
}

#[test]
fn the_queue_has_an_end() {
    let config = EngineConfig {
        max_waiting: 5,
        ..checking()
    };
    let (runner, gate) = Scripted::new(CONFIG).gated();
    let engine = runner.start(config);
    let handle = engine.handle();
    let mut several = greedy(&[1, 2], 3);
    several.n = 3;
    let first = handle.submit(several.clone()).unwrap();
    let refused = handle.submit(several.clone()).unwrap_err();
    let expected = EngineError::Overloaded {
        waiting: 3,
        limit: 5,
    };
    assert_eq!(refused, expected);
    several.n = 2;
    let second = handle.submit(several.clone()).unwrap();
    assert!(handle.submit(greedy(&[1], 1)).is_err());
    drop(gate);
    for stream in [first, second] {
        assert!(collect(stream).usage.is_some());
    }
    // The places are free again, all of them.
    assert_idle(&engine);
    several.n = 5;
    assert!(collect(handle.submit(several).unwrap()).usage.is_some());
}

#[test]
fn preempted_requests_end_with_the_same_tokens() {
    let small = RunnerConfig {
        context: 64,
        kv_tokens: 96,
        ..CONFIG
    };
    let ask = |config: RunnerConfig, together: bool| {
        let engine = Scripted::new(config).start(checking());
        let handle = engine.handle();
        let request = |i: u32| {
            let prompt: Vec<_> = (i..i + 20).collect();
            handle.submit(sampled(&prompt, 40, u64::from(i))).unwrap()
        };
        let answers: Vec<_> = match together {
            true => {
                let streams: Vec<_> = (1..7).map(request).collect();
                streams.into_iter().map(|s| collect(s).choices).collect()
            }
            false => (1..7).map(|i| collect(request(i)).choices).collect(),
        };
        assert_idle(&engine);
        (answers, handle.stats().preemptions)
    };
    let (alone, none) = ask(CONFIG, false);
    let (together, some) = ask(small, true);
    assert_eq!(none, 0);
    assert!(some > 0);
    assert_eq!(alone, together);
}

#[test]
fn draining_ends_what_is_there_and_takes_nothing_new() {
    let (runner, gate) = Scripted::new(CONFIG).gated();
    let engine = runner.start(checking());
    let handle = engine.handle();
    let stream = handle.submit(greedy(&[1, 2, 3], 20)).unwrap();
    engine.drain();
    let refused = handle.submit(greedy(&[1], 1)).unwrap_err();
    assert_eq!(refused, EngineError::ShuttingDown);
    assert!(handle.health().is_alive());
    drop(gate);
    assert_eq!(collect(stream).tokens().len(), 20);
    pollster::block_on(handle.stopped());
    assert_eq!(handle.health(), Health::Stopped);
    // An idle engine ends at once.
    let idle = Scripted::new(CONFIG).start(checking());
    idle.drain();
    pollster::block_on(idle.handle().stopped());
}

#[test]
fn shutting_down_tells_everybody() {
    let engine = Scripted::new(CONFIG).start(checking());
    let handle = engine.handle();
    let streams: Vec<_> = (1..12)
        .map(|i| handle.submit(greedy(&[i; 4], 400)).unwrap())
        .collect();
    engine.shutdown();
    for stream in streams {
        let answered = collect(stream);
        let cut = answered.failed == Some(EngineError::ShuttingDown);
        assert!(cut || answered.usage.is_some(), "{answered:?}");
    }
    let refused = handle.submit(greedy(&[1], 1)).unwrap_err();
    assert_eq!(refused, EngineError::ShuttingDown);
}

#[test]
fn events_can_be_awaited() {
    let engine = Scripted::new(CONFIG).start(checking());
    let mut stream = engine.handle().submit(greedy(&[1, 2, 3], 5)).unwrap();
    let events = pollster::block_on(async {
        let mut events = Vec::new();
        while let Some(event) = stream.next().await {
            events.push(event);
        }
        events
    });
    assert_eq!(events.len(), 5 + 2);
    assert!(matches!(events[5], Event::Finished { .. }));
    assert!(matches!(events[6], Event::Done(_)));
}

#[test]
fn the_context_and_the_pool_end_an_answer() {
    let small = RunnerConfig {
        context: 20,
        kv_tokens: 16,
        layout: KvLayout::Paged { block_size: 4 },
        ..CONFIG
    };
    let engine = Scripted::new(small).start(checking());
    // 16 tokens fit, those of the answer among them.
    for (prompt, tokens) in [(15, 1), (10, 6), (1, 15)] {
        let prompt = vec![5; prompt];
        let answered = collect(engine.handle().submit(greedy(&prompt, usize::MAX)).unwrap());
        assert_eq!(answered.tokens().len(), tokens);
        assert_eq!(answered.reason(), FinishReason::Length);
    }
    let full = engine.handle().submit(greedy(&[5; 16], 1)).unwrap_err();
    let (requested, capacity) = (16, 16);
    assert_eq!(
        full,
        EngineError::ContextOverflow {
            requested,
            capacity
        }
    );
    let nothing = collect(engine.handle().submit(greedy(&[1; 16], 0)).unwrap());
    assert!(nothing.choices[0].tokens.is_empty());
    assert_eq!(nothing.reason(), FinishReason::Length);
}

#[test]
fn accepted_drafts_save_steps_and_change_nothing() {
    // An answer that repeats itself every seven tokens.
    let said: Vec<_> = (10..17).collect();
    let roomy = RunnerConfig {
        max_logit_rows: 24,
        ..CONFIG
    };
    let ask = |draft_tokens: usize| {
        let engine = Scripted::new(roomy)
            .saying(3, said.clone())
            .start(checking());
        let mut request = sampled(&[1, 2, 3], 100, 4);
        request.generation.sampling.temperature = 0.01;
        request.draft_tokens = draft_tokens;
        let answered = collect(engine.handle().submit(request).unwrap());
        assert_idle(&engine);
        (answered, engine.handle().stats())
    };
    let (plain, all) = ask(0);
    let (drafted, few) = ask(16);
    assert_eq!(plain, drafted);
    assert_eq!((all.steps, all.draft_tokens), (100, 0));
    assert!(few.steps < 40, "{few:?}");
    assert_eq!(few.generated_tokens, 100);
    assert_eq!(few.accepted_tokens, 100 - few.steps);
}
