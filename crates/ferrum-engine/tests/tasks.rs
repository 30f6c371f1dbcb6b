//! A [`TaskEngine`] over a model that only counts: order, company, refusals and ends.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_engine::engine::Clock;
use ferrum_engine::{EngineError, Health, TaskConfig, TaskEngine, TaskHandle, TaskModel};
use ferrum_types::{Error, Result};
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, Sender};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Doubles numbers; says in which company each was computed.
struct Doubler {
    gate: Receiver<()>,
}

impl TaskModel for Doubler {
    type Task = u32;
    type Output = (u32, usize);

    fn backend(&self) -> &'static str {
        "test"
    }

    fn tokens(task: &u32) -> usize {
        *task as usize
    }

    fn joins(&self, first: &u32, next: &u32, tokens: usize) -> bool {
        first % 2 == next % 2 && tokens + *next as usize <= 10
    }

    fn run(
        &mut self,
        tasks: &[u32],
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<(u32, usize)>> {
        self.gate.recv().unwrap();
        let _ = step();
        match tasks {
            [1] => Err(Error::invalid("test", "one is too few")),
            [3] => panic!("three"),
            [5] => Err(Error::Device {
                backend: "test",
                op: "five",
                reason: "gone".into(),
            }),
            _ => Ok(tasks.iter().map(|&n| (2 * n, tasks.len())).collect()),
        }
    }
}

fn engine() -> (TaskEngine<Doubler>, Sender<()>) {
    let (open, gate) = mpsc::channel();
    let config = TaskConfig {
        max_waiting: 4,
        stall_after: Duration::from_secs(60),
        clock: Clock::system(),
    };
    (TaskEngine::start(Doubler { gate }, config).unwrap(), open)
}

type Asked<'a> =
    std::pin::Pin<Box<dyn Future<Output = std::result::Result<(u32, usize), EngineError>> + 'a>>;

/// A task that has been handed in.
fn ask(handle: &TaskHandle<Doubler>, task: u32, priority: i8) -> Asked<'_> {
    let mut asked: Asked<'_> =
        Box::pin(async move { Ok(handle.submit(task, priority).await?.output) });
    let mut cx = Context::from_waker(Waker::noop());
    assert!(asked.as_mut().poll(&mut cx).is_pending());
    asked
}

fn wait(mut asked: Asked<'_>) -> std::result::Result<(u32, usize), EngineError> {
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(answer) = asked.as_mut().poll(&mut cx) {
            return answer;
        }
        std::thread::yield_now();
    }
}

/// Waits until the thread is in the model.
fn until_running(handle: &TaskHandle<Doubler>) {
    while handle.monitor().stats().running == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn tasks_that_wait_are_computed_together_by_priority() {
    let (engine, open) = engine();
    let handle = engine.handle();
    let first = ask(&handle, 8, 0);
    until_running(&handle);
    let (low, high, other) = (ask(&handle, 2, 0), ask(&handle, 6, 1), ask(&handle, 7, 0));
    // Taken back before it is computed.
    drop(ask(&handle, 4, 0));
    let busy = handle.monitor().health();
    assert!(busy.is_alive(), "{busy:?}");
    (0..3).for_each(|_| open.send(()).unwrap());
    assert_eq!(wait(first), Ok((16, 1)));
    assert_eq!(wait(high), Ok((12, 2)));
    assert_eq!(wait(low), Ok((4, 2)));
    assert_eq!(wait(other), Ok((14, 1)));
    let stats = handle.monitor().stats();
    assert_eq!((stats.finished_requests, stats.waiting), (4, 0));
    assert_eq!((stats.prompt_tokens, stats.computed_tokens), (23, 23));
}

#[test]
fn a_full_queue_and_a_bad_task_are_told_and_cost_nobody_else() {
    let (engine, open) = engine();
    let handle = engine.handle();
    let bad = ask(&handle, 1, 0);
    until_running(&handle);
    let waiting: Vec<_> = [2, 4, 6, 8].map(|n| ask(&handle, n, 0)).into();
    let refused = wait(Box::pin(async { Ok(handle.submit(2, 0).await?.output) }));
    let (waiting_now, limit) = (4, 4);
    assert_eq!(
        refused,
        Err(EngineError::Overloaded {
            waiting: waiting_now,
            limit
        })
    );
    (0..5).for_each(|_| open.send(()).unwrap());
    assert!(matches!(wait(bad), Err(EngineError::Invalid { .. })));
    for asked in waiting {
        assert!(wait(asked).is_ok());
    }
}

#[test]
fn what_breaks_the_model_ends_the_engine_and_is_told() {
    for (task, words) in [(3, "a task panicked: three"), (5, "gone")] {
        let (engine, open) = engine();
        let handle = engine.handle();
        let broken = ask(&handle, task, 0);
        until_running(&handle);
        let behind = ask(&handle, 8, 0);
        open.send(()).unwrap();
        for asked in [broken, behind] {
            let Err(EngineError::Failed(reason)) = wait(asked) else {
                panic!("it went well");
            };
            assert!(reason.contains(words), "{reason}");
        }
        assert!(handle.monitor().failure().is_some());
        assert!(matches!(handle.monitor().health(), Health::Failed(_)));
    }
}

#[test]
fn a_drained_engine_ends_its_tasks_and_takes_no_more() {
    let (engine, open) = engine();
    let handle = engine.handle();
    let asked = ask(&handle, 8, 0);
    handle.drain();
    let refused = wait(Box::pin(async { Ok(handle.submit(2, 0).await?.output) }));
    assert_eq!(refused, Err(EngineError::ShuttingDown));
    open.send(()).unwrap();
    assert_eq!(wait(asked), Ok((16, 1)));
    while handle.monitor().health() != Health::Stopped {
        std::thread::yield_now();
    }
}
