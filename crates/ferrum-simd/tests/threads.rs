//! The pool in many orders of its threads.
//!
//! Its source is compiled here a second time, with the types of `shuttle` for those of `std`: at each use of one, `shuttle`
//! decides which thread goes on. All operations on atomics are sequentially consistent there, as the pool has them. A
//! thread that nobody wakes is a deadlock, which fails the test with the order that led to it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

/// In the place of `threads/sync.rs`.
mod sync {
    pub(super) use shuttle::hint;
    pub(super) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

    use atomic::{AtomicUsize, Ordering::SeqCst};
    use std::cell::{Cell, UnsafeCell};

    // So few that threads fall asleep in many orders.
    pub(super) const SPINS: u32 = 1;
    pub(super) const YIELDS: u32 = 1;

    /// Notices a write while anybody else is there.
    pub(super) struct SharedCell<T> {
        value: UnsafeCell<T>,
        users: AtomicUsize,
    }

    impl<T: Copy> SharedCell<T> {
        pub(super) fn new(value: T) -> Self {
            let users = AtomicUsize::new(0);
            let value = UnsafeCell::new(value);
            Self { value, users }
        }

        pub(super) unsafe fn read(&self) -> T {
            assert!(self.users.fetch_add(1, SeqCst) < WRITER, "it is written");
            // SAFETY: threads of `shuttle` take turns, at uses of its types only.
            let value = unsafe { *self.value.get() };
            assert!(self.users.fetch_sub(1, SeqCst) < WRITER, "it was written");
            value
        }

        pub(super) unsafe fn write(&self, value: T) {
            assert_eq!(self.users.fetch_add(WRITER, SeqCst), 0, "it is used");
            // SAFETY: as above.
            unsafe { *self.value.get() = value };
            assert_eq!(self.users.fetch_sub(WRITER, SeqCst), WRITER, "it was used");
        }
    }

    const WRITER: usize = 1 << 32;

    thread_local! {
        /// Threads that have begun and not ended; all of a test are on one thread of the system.
        static ALIVE: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn alive() -> usize {
        ALIVE.get()
    }

    /// Threads that are counted.
    pub(super) mod thread {
        pub(crate) use shuttle::thread::{JoinHandle, park, yield_now};

        use super::ALIVE;

        pub(crate) struct Builder(shuttle::thread::Builder);

        impl Builder {
            pub(crate) fn new() -> Self {
                Self(shuttle::thread::Builder::new())
            }

            pub(crate) fn name(self, name: String) -> Self {
                Self(self.0.name(name))
            }

            pub(crate) fn spawn(
                self,
                body: impl FnOnce() + Send + 'static,
            ) -> std::io::Result<JoinHandle<()>> {
                ALIVE.set(ALIVE.get() + 1);
                self.0.spawn(move || {
                    body();
                    ALIVE.set(ALIVE.get() - 1);
                })
            }
        }
    }
}

#[path = "../src/threads/pool.rs"]
#[allow(unreachable_pub, reason = "it is public in its crate")]
mod pool;

use pool::Pool;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use shuttle::{Config, Runner, thread};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Orders of each kind that a test tries.
const ORDERS: usize = 2000;

/// Tries orders that are drawn at each step, and orders with few changes at the worst places.
fn explore(test: impl Fn() + Copy + Send + Sync + 'static) {
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let mut config = Config::new();
        // A backtrace wants more than the default.
        config.stack_size = 256 << 10;
        config.silence_warnings = true;
        let orders = Runner::new(scheduler, config).run(test);
        assert_eq!(orders, ORDERS);
    };
    run(Box::new(RandomScheduler::new(ORDERS)));
    run(Box::new(PctScheduler::new(3, ORDERS)));
}

/// Runs a region, each of whose tasks has to run once.
fn run_counted(pool: &Pool, tasks: usize) {
    let hits: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, &|i, _| {
        hits[i].fetch_add(1, SeqCst);
    });
    assert!(hits.iter().all(|n| n.load(SeqCst) == 1));
}

#[test]
fn every_task_of_successive_regions_runs_once() {
    explore(|| {
        let pool = Pool::new(3).unwrap();
        assert_eq!(pool.threads(), 3);
        for tasks in [3, 2, 5] {
            run_counted(&pool, tasks);
        }
    });
}

/// A caller that finds the pool taken does all tasks itself, which is right and slow.
#[test]
fn workers_come_to_a_region_after_another() {
    // Of all orders together.
    static HELPED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    explore(|| {
        let pool = Pool::new(2).unwrap();
        run_counted(&pool, 2);
        pool.run(2, &|_, thread| {
            HELPED.fetch_add(thread, SeqCst);
        });
    });
    assert!(HELPED.load(SeqCst) > ORDERS / 10);
}

#[test]
fn no_two_running_tasks_share_a_thread_number() {
    explore(|| {
        let pool = Pool::new(3).unwrap();
        let used: Vec<_> = (0..3).map(|_| AtomicBool::new(false)).collect();
        pool.run(5, &|_, thread| {
            assert!(!used[thread].swap(true, SeqCst));
            used[thread].store(false, SeqCst);
        });
    });
}

#[test]
fn a_region_inside_a_task_runs_inline() {
    explore(|| {
        let pool = Pool::new(2).unwrap();
        let total = AtomicUsize::new(0);
        pool.run(2, &|_, _| {
            pool.run(2, &|_, thread| {
                assert_eq!(thread, 0);
                total.fetch_add(1, SeqCst);
            });
        });
        assert_eq!(total.load(SeqCst), 4);
    });
}

#[test]
fn callers_do_not_disturb_each_other() {
    explore(|| {
        let pool = Arc::new(Pool::new(2).unwrap());
        let other = Arc::clone(&pool);
        let caller = thread::spawn(move || {
            run_counted(&other, 3);
            run_counted(&other, 2);
        });
        run_counted(&pool, 2);
        run_counted(&pool, 3);
        caller.join().unwrap();
    });
}

/// The panic goes round the hook, in which `shuttle` reports that a test failed.
#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    explore(|| {
        let pool = Pool::new(3).unwrap();
        for bad in [0, 2] {
            let begun: Vec<_> = (0..4).map(|_| AtomicUsize::new(0)).collect();
            let region = || {
                pool.run(4, &|i, _| {
                    begun[i].fetch_add(1, SeqCst);
                    if i == bad {
                        resume_unwind(Box::new(i));
                    }
                });
            };
            let panic = catch_unwind(AssertUnwindSafe(region)).unwrap_err();
            assert_eq!(*panic.downcast::<usize>().unwrap(), bad);
            assert!(begun.iter().all(|n| n.load(SeqCst) <= 1));
            run_counted(&pool, 3);
        }
    });
}

#[test]
fn a_pool_that_is_dropped_ends_its_threads() {
    explore(|| {
        let pool = Pool::new(3).unwrap();
        run_counted(&pool, 2);
        drop(pool);
        assert_eq!(sync::alive(), 0);
        // Also those that have seen no region.
        drop(Pool::new(3));
        assert_eq!(sync::alive(), 0);
    });
}
