//! The device's threads: made for thousands of small parallel regions in a second.
//!
//! A region is a function of a task number. The caller publishes it in one slot, wakes whom it needs
//! and takes tasks itself; workers join while tasks are left. Nothing is allocated. A caller waits
//! only for workers that have joined, never for one that is still asleep, so a region is not slower
//! than the caller alone when the machine is busy. When another region occupies the pool (a second
//! context, or a task that starts a region), the caller simply does all tasks itself.

// Nothing of `std` that threads meet on: a test puts other types in the place of these.
use super::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use super::sync::hint::spin_loop;
use super::sync::thread::{self, JoinHandle};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, SPINS, SharedCell, YIELDS};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;

/// A region's function: task number, then the number of the thread that runs it.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// What the workers need to know of a region.
#[derive(Clone, Copy)]
struct Region {
    task: *const Task<'static>,
    tasks: usize,
}

// `state`: who may look at the region. Bit 0: open to workers. Bit 1: the caller sleeps until the
// count is zero. Bit 2: the pool is shutting down. Bits 3–31: workers inside. Bits 32–63: number of
// the region, so that a worker joins the region it saw and not a later one.
const OPEN: u64 = 1;
const CALLER_SLEEPS: u64 = 2;
const SHUT_DOWN: u64 = 4;
const ONE_WORKER: u64 = 8;
const WORKERS: u64 = (1 << 32) - ONE_WORKER;
const ONE_REGION: u64 = 1 << 32;

struct Shared {
    state: AtomicU64,
    /// Written by the caller that holds `busy`, while no worker is inside and the region is closed;
    /// read by workers that are inside.
    region: SharedCell<Option<Region>>,
    /// Next task to take.
    next: AtomicUsize,
    /// A caller owns the slot.
    busy: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Callers wait here for `state` to count no worker.
    done: (Mutex<()>, Condvar),
    sleeping: Vec<AtomicBool>,
}

// SAFETY: `region` is the only part that is not `Sync` by itself; the protocol of `state` (see its
// comment) keeps the one writer and the readers apart, and the pointer in it is only used while the
// caller that borrowed the function waits. `tests/threads.rs` tries that in many orders.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to one thread.
unsafe impl Send for Shared {}

/// Threads that run regions together with the caller.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, so a poisoned one is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool in which regions run on `threads` threads, the caller's being one.
    ///
    /// # Errors
    /// When the system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let helpers = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            region: SharedCell::new(None),
            next: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
            done: (Mutex::new(()), Condvar::new()),
            sleeping: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self {
            shared,
            workers: Vec::with_capacity(helpers),
        };
        for i in 0..helpers {
            let shared = pool.shared.clone();
            let body = move || work(&shared, i);
            let name = format!("ferrum-cpu-{}", i + 1);
            // On failure the drop of `pool` ends those that exist.
            pool.workers
                .push(thread::Builder::new().name(name).spawn(body)?);
        }
        Ok(pool)
    }

    /// Threads of a region.
    #[inline]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(i, thread)` once for each `i < tasks`; `thread < self.threads()` is the same for no
    /// two tasks that run at the same time in this region. Returns when all are done.
    ///
    /// # Panics
    /// With the panic of a task, after all running tasks have ended; tasks not yet begun are left out.
    pub fn run(&self, tasks: usize, task: &Task<'_>) {
        let shared = &*self.shared;
        let alone = tasks <= 1 || self.workers.is_empty();
        if alone || shared.busy.swap(true, SeqCst) {
            (0..tasks).for_each(|i| task(i, 0));
            return;
        }
        // SAFETY: only the lifetime changes. The function is called by this thread and by workers
        // counted in `state`, and this call does not return before their count is zero.
        let task: *const Task<'static> = unsafe { std::mem::transmute(task as *const Task<'_>) };
        // SAFETY: `busy` makes this the only caller; the region is closed and no worker is inside
        // (the last caller waited for that), so nobody reads.
        unsafe { shared.region.write(Some(Region { task, tasks })) };
        shared.next.store(0, SeqCst);
        let number = (shared.state.load(SeqCst) & !(ONE_REGION - 1)).wrapping_add(ONE_REGION);
        shared.state.store(number | OPEN, SeqCst);
        self.wake(tasks - 1);

        shared.take_tasks(Region { task, tasks }, 0);
        shared.state.fetch_and(!OPEN, SeqCst);
        shared.wait_for_workers();

        let panic = if shared.panicked.swap(false, SeqCst) {
            lock(&shared.panic).take()
        } else {
            None
        };
        shared.busy.store(false, SeqCst);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Wakes up to `most` sleeping workers. Those awake see the region by themselves.
    fn wake(&self, most: usize) {
        for (sleeping, worker) in self.shared.sleeping.iter().zip(&self.workers).take(most) {
            if sleeping.load(SeqCst) && sleeping.swap(false, SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(SHUT_DOWN, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of tasks, so there is none to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Runs tasks until none is left.
    fn take_tasks(&self, region: Region, thread: usize) {
        let all = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let i = self.next.fetch_add(1, SeqCst);
                if i >= region.tasks {
                    return;
                }
                // SAFETY: the caller of the region waits until this thread has left it (or is this
                // thread), so the function is alive.
                unsafe { (*region.task)(i, thread) };
            }
        }));
        if let Err(panic) = all {
            self.next.store(region.tasks, SeqCst);
            lock(&self.panic).get_or_insert(panic);
            self.panicked.store(true, SeqCst);
        }
    }

    fn wait_for_workers(&self) {
        let busy = || self.state.load(SeqCst) & WORKERS != 0;
        for round in 0..SPINS + YIELDS {
            if !busy() {
                return;
            }
            pause(round);
        }
        let mut guard = lock(&self.done.0);
        self.state.fetch_or(CALLER_SLEEPS, SeqCst);
        while busy() {
            guard = self
                .done
                .1
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.state.fetch_and(!CALLER_SLEEPS, SeqCst);
    }

    /// Joins the region in `state`, if it is still that one and open.
    fn join(&self, state: u64) -> Option<Region> {
        let mut seen = state;
        loop {
            let same = (seen ^ state) & !(ONE_REGION - 1) == 0;
            if !same || seen & OPEN == 0 {
                return None;
            }
            match self
                .state
                .compare_exchange_weak(seen, seen + ONE_WORKER, SeqCst, SeqCst)
            {
                // SAFETY: this thread is counted, so the caller neither returns nor writes another
                // region until it leaves; the write came before the region was opened.
                Ok(_) => return unsafe { self.region.read() },
                Err(now) => seen = now,
            }
        }
    }

    fn leave(&self) {
        let before = self.state.fetch_sub(ONE_WORKER, SeqCst);
        if before & WORKERS == ONE_WORKER && before & CALLER_SLEEPS != 0 {
            // Taking the lock makes sure that the caller is in `wait`, not on its way there.
            drop(lock(&self.done.0));
            self.done.1.notify_all();
        }
    }
}

fn pause(round: u32) {
    if round < SPINS {
        spin_loop();
    } else {
        thread::yield_now();
    }
}

/// Body of worker `i`.
fn work(shared: &Shared, i: usize) {
    let mut last = 0;
    loop {
        let state = next_region(shared, i, last);
        if state & SHUT_DOWN != 0 {
            return;
        }
        last = state >> 32;
        if let Some(region) = shared.join(state) {
            shared.take_tasks(region, i + 1);
            shared.leave();
        }
    }
}

/// Waits until there is a region other than `last`, first awake and then asleep.
fn next_region(shared: &Shared, i: usize, last: u64) -> u64 {
    let news = || {
        let state = shared.state.load(SeqCst);
        (state >> 32 != last || state & SHUT_DOWN != 0).then_some(state)
    };
    loop {
        for round in 0..SPINS + YIELDS {
            if let Some(state) = news() {
                return state;
            }
            pause(round);
        }
        // Either the caller sees this flag and wakes us, or we see its region: both accesses on both
        // sides are sequentially consistent.
        shared.sleeping[i].store(true, SeqCst);
        while shared.sleeping[i].load(SeqCst) {
            if let Some(state) = news() {
                shared.sleeping[i].store(false, SeqCst);
                return state;
            }
            thread::park();
        }
    }
}
