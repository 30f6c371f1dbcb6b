//! The pool: every task runs once, whoever calls and whatever happens in it.

use crate::Run;
use ferrum_simd::isa::Level;
use ferrum_simd::threads::Pool;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Miri, which takes a thousand times as long, tries fewer.
fn rounds(native: usize) -> usize {
    if cfg!(miri) { native / 50 } else { native }
}

fn counts(pool: &Pool, tasks: usize) -> Vec<usize> {
    let hits: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, &|i, _| {
        hits[i].fetch_add(1, SeqCst);
    });
    hits.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn every_task_runs_once() {
    for threads in [1, 2, 3, 8] {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        for tasks in [0, 1, 2, 7, 100] {
            assert!(counts(&pool, tasks).iter().all(|n| *n == 1));
        }
    }
}

#[test]
fn ranges_cover_all_units_and_are_as_many_as_their_cost_is_worth() {
    let run = Run::new(Level::best(), 3);
    for (units, cost, expected) in [
        (0, 1, 0),
        (1000, 1, 1),
        (1000, 1 << 10, 12),
        (1000, 1 << 15, 48),
        (30, 1 << 19, 30),
        (20, 1 << 19, 20),
        (1000, usize::MAX, 48),
    ] {
        let hits: Vec<_> = (0..units).map(|_| AtomicUsize::new(0)).collect();
        let ranges = AtomicUsize::new(0);
        run.exec.parallel_for(units, cost, |range, _| {
            ranges.fetch_add(1, SeqCst);
            hits[range].iter().for_each(|hit| {
                hit.fetch_add(1, SeqCst);
            });
        });
        assert_eq!(ranges.into_inner(), expected, "{units} units of {cost}");
        assert!(hits.into_iter().all(|hit| hit.into_inner() == 1));
    }
}

#[test]
fn many_small_regions_on_more_threads_than_cores() {
    let pool = Pool::new(16).unwrap();
    for round in 0..rounds(3000) {
        assert!(counts(&pool, 1 + round % 20).iter().all(|n| *n == 1));
        if round % rounds(500) == 0 {
            // Long enough for the workers to fall asleep.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn no_two_running_tasks_share_a_thread_number() {
    let pool = Pool::new(4).unwrap();
    let used: Vec<_> = (0..4).map(|_| AtomicBool::new(false)).collect();
    for _ in 0..rounds(200) {
        pool.run(32, &|_, thread| {
            assert!(!used[thread].swap(true, SeqCst));
            std::hint::spin_loop();
            used[thread].store(false, SeqCst);
        });
    }
}

#[test]
fn a_region_inside_a_task_runs_inline() {
    let pool = Pool::new(4).unwrap();
    let total = AtomicUsize::new(0);
    pool.run(8, &|_, _| {
        pool.run(8, &|_, thread| {
            assert_eq!(thread, 0);
            total.fetch_add(1, SeqCst);
        });
    });
    assert_eq!(total.into_inner(), 64);
}

#[test]
fn callers_on_several_threads_do_not_disturb_each_other() {
    let pool = Pool::new(3).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..rounds(500) {
                    assert!(counts(&pool, 9).iter().all(|n| *n == 1));
                }
            });
        }
    });
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let pool = Pool::new(4).unwrap();
    for bad in [0, 5, 31] {
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(32, &|i, _| assert!(i != bad, "task {i} failed"));
        }));
        let text = *result.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(text, format!("task {bad} failed"));
        assert!(counts(&pool, 20).iter().all(|n| *n == 1));
    }
}
