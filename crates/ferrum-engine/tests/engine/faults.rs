//! What happens when a step fails, panics or does not end.

use crate::overlapped::Overlapped;
use crate::scripted::{CONFIG, Fault, Scripted};
use crate::{collect, greedy};
use ferrum_engine::engine::{Clock, DEGRADED_AFTER, Pooling};
use ferrum_engine::{EngineConfig, EngineError, Health, Request};
use std::time::Duration;

#[test]
fn a_fault_in_a_step_fails_every_request_and_turns_health_red() {
    let cases = [
        (Fault::Error, "scripted failed in step: the device is lost"),
        (Fault::Panic, "a step panicked: a scripted panic"),
    ];
    let cases = cases.map(|case| [(case, false), (case, true)]);
    for ((fault, words), overlaps) in cases.into_iter().flatten() {
        let config = EngineConfig {
            clock: Clock::manual(),
            ..EngineConfig::default()
        };
        let (runner, gate) = Scripted::new(CONFIG).failing(5, fault).gated();
        let engine = match overlaps {
            true => Overlapped::new(runner).start(config),
            false => runner.start(config),
        };
        let handle = engine.handle();
        let streams: Vec<_> = (1..20)
            .map(|i| handle.submit(greedy(&[i, 2, 3], 100)).unwrap())
            .collect();
        assert!(handle.health().is_alive());
        drop(gate);
        for stream in streams {
            // Also those that never had a step.
            let answered = collect(stream);
            let Some(EngineError::Failed(reason)) = answered.failed else {
                panic!("{answered:?}");
            };
            assert!(reason.contains(words), "{reason}");
        }
        // Not a moment of the clock has passed.
        assert!(matches!(handle.health(), Health::Failed(_)));
        let refused = handle.submit(greedy(&[1], 1)).unwrap_err();
        assert!(matches!(refused, EngineError::Failed(_)), "{refused}");
        pollster::block_on(handle.stopped());
        engine.shutdown();
        assert!(
            matches!(handle.health(), Health::Failed(_)),
            "and stays red"
        );
    }
}

#[test]
fn nan_fails_its_request_and_nobody_else() {
    let clock = Clock::manual();
    let config = EngineConfig {
        probe_after: Duration::from_secs(5),
        stall_after: Duration::from_secs(1 << 20),
        clock: clock.clone(),
        ..EngineConfig::default()
    };
    type Change = fn(&mut Request);
    let changes: [Change; 6] = [
        |_| (),
        |r| r.generation.sampling.temperature = 1.0,
        |r| r.logprobs = Some(2),
        |r| r.prompt_logprobs = Some(2),
        |r| r.n = 3,
        |r| r.pooling = Some(Pooling::Mean),
    ];
    let (runner, gate) = Scripted::new(CONFIG).nan_for(9).gated();
    let engine = runner.start(config);
    let handle = engine.handle();
    let ask = |first, change: Change| {
        let mut request = greedy(&[first, 2, 3], 5);
        change(&mut request);
        handle.submit(request).unwrap()
    };
    let streams: Vec<_> = changes
        .iter()
        .flat_map(|&change| [(true, ask(9, change)), (false, ask(1, change))])
        .collect();
    drop(gate);
    for (bad, stream) in streams {
        let failed = collect(stream).failed;
        assert_eq!(failed, bad.then_some(EngineError::NotANumber));
    }
    assert_eq!(handle.stats().nan_failures, changes.len() as u64);
    // Others went well between; three in a row are not theirs alone.
    for failures in 1..5 {
        collect(ask(9, |_| ()));
        let health = handle.health();
        match failures >= DEGRADED_AFTER {
            true => assert_eq!(health, Health::Degraded { failures }),
            false => assert!(matches!(health, Health::Alive { .. }), "{health:?}"),
        }
        assert!(health.is_alive());
    }
    // An answer ends it, and so does the step that a look asks for.
    assert!(collect(ask(1, |_| ())).failed.is_none());
    assert!(matches!(handle.health(), Health::Alive { .. }));
    for _ in 0..3 {
        collect(ask(9, |_| ()));
    }
    assert!(matches!(handle.health(), Health::Degraded { .. }));
    // An answer comes before its step has ended, which may be after the clock went on: so it goes on again.
    let looks = (0..10_000).find(|_| {
        clock.advance(Duration::from_secs(6));
        std::thread::sleep(Duration::from_millis(1));
        matches!(handle.health(), Health::Alive { .. })
    });
    assert!(looks.is_some(), "{:?}", handle.health());
}

#[test]
fn a_step_that_does_not_end_is_a_stall() {
    let clock = Clock::manual();
    let config = EngineConfig {
        stall_after: Duration::from_secs(2),
        clock: clock.clone(),
        ..EngineConfig::default()
    };
    let (runner, gate) = Scripted::new(CONFIG).gated();
    let engine = runner.start(config);
    let handle = engine.handle();
    let stream = handle.submit(greedy(&[1, 2, 3], 4)).unwrap();
    assert!(handle.health().is_alive());
    clock.advance(Duration::from_millis(2001));
    let health = handle.health();
    assert!(matches!(health, Health::Stalled { .. }), "{health:?}");
    drop(gate);
    assert!(collect(stream).failed.is_none());
    // Steps end again, and nothing waits.
    while !handle.health().is_alive() {
        std::thread::yield_now();
    }
}

#[test]
fn a_slow_model_is_given_the_time_that_it_takes() {
    let clock = Clock::manual();
    let config = EngineConfig {
        stall_after: Duration::from_secs(2),
        stall_factor: 10,
        clock: clock.clone(),
        ..EngineConfig::default()
    };
    let second = Duration::from_secs(1);
    let (runner, gate) = Scripted::new(CONFIG)
        .costing(&clock, second, Duration::ZERO)
        .gated();
    let engine = runner.start(config);
    let handle = engine.handle();
    let stream = handle.submit(greedy(&[1, 2, 3], 5)).unwrap();
    // A prompt and three tokens; then one more step is under way.
    for steps in 1..=4 {
        gate.send(()).unwrap();
        while handle.stats().steps < steps {
            std::thread::yield_now();
        }
    }
    while !handle.health().is_alive() {
        std::thread::yield_now();
    }
    clock.advance(9 * second);
    assert!(handle.health().is_alive(), "steps take a second");
    clock.advance(2 * second);
    let health = handle.health();
    assert!(matches!(health, Health::Stalled { .. }), "{health:?}");
    drop(gate);
    assert!(collect(stream).failed.is_none());
}

#[test]
fn an_idle_engine_proves_with_a_step_that_it_is_alive() {
    let clock = Clock::manual();
    let config = EngineConfig {
        stall_after: Duration::from_secs(2),
        probe_after: Duration::from_secs(5),
        clock: clock.clone(),
        ..EngineConfig::default()
    };
    let (runner, gate) = Scripted::new(CONFIG).gated();
    let seen = runner.seen();
    let engine = runner.start(config);
    let handle = engine.handle();
    clock.advance(Duration::from_secs(4));
    assert!(handle.health().is_alive());
    // The look after a long time asks for a step, which does not end.
    clock.advance(Duration::from_secs(4));
    assert!(handle.health().is_alive());
    clock.advance(Duration::from_secs(3));
    let health = handle.health();
    assert!(matches!(health, Health::Stalled { .. }), "{health:?}");
    drop(gate);
    let fresh = Health::Alive {
        since_step: Duration::ZERO,
    };
    while handle.health() != fresh {
        std::thread::yield_now();
    }
    assert_eq!(seen.lock().unwrap().len(), 1);
    // The books are still in order, or this would fail.
    assert!(
        collect(handle.submit(greedy(&[1], 2)).unwrap())
            .failed
            .is_none()
    );
}

#[test]
fn a_probe_that_fails_is_a_failure() {
    let clock = Clock::manual();
    let config = EngineConfig {
        clock: clock.clone(),
        ..EngineConfig::default()
    };
    let engine = Scripted::new(CONFIG).failing(0, Fault::Panic).start(config);
    let handle = engine.handle();
    clock.advance(Duration::from_secs(60));
    assert!(handle.health().is_alive(), "nobody knows yet");
    pollster::block_on(handle.stopped());
    assert!(matches!(handle.health(), Health::Failed(_)));
}
