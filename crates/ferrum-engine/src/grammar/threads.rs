//! Threads for grammar compilation with large stacks and a timeout. A timed-out compilation continues in the background;
//! their number is limited.
//!
//! The parser's limits bound most of the work of a grammar, but not all work of its compiler, which cannot be
//! interrupted. The timeout frees the thread that waits for it.

use super::GrammarError;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Compilation recurses as deep as the grammar nests.
const STACK_BYTES: usize = 16 << 20;

/// Most timed-out compilations that may run.
const MAX_ABANDONED: usize = 2;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct CompileThreads {
    /// A reference to each timed-out thread, alive until the thread ends.
    abandoned: Mutex<Vec<Weak<()>>>,
}

impl CompileThreads {
    /// Runs `work` on a new thread, which inherits the priority of this one.
    ///
    /// # Errors
    /// The error of `work`; `Invalid` if it panics, `TooSlow` if it takes longer than `timeout`, and `Busy` if too many
    /// timed-out compilations are running.
    pub(super) fn run<T: Send + 'static>(
        &self,
        timeout: Duration,
        work: impl FnOnce() -> Result<T, GrammarError> + Send + 'static,
    ) -> Result<T, GrammarError> {
        let failed =
            |what: &str| GrammarError::Invalid(format!("it could not be compiled: {what}"));
        if self.abandoned() >= MAX_ABANDONED {
            return Err(GrammarError::Busy);
        }
        let life = Arc::new(());
        let alive = Arc::downgrade(&life);
        let (done, result) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("ferrum-grammar".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let _life = life;
                // Fails after the timeout.
                let _ = done.send(work());
            });
        thread.map_err(|e| failed(&e.to_string()))?;
        match result.recv_timeout(timeout) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(failed("a fault in the compiler")),
            Err(RecvTimeoutError::Timeout) => {
                let abandoned = self.abandoned.lock();
                abandoned
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(alive);
                Err(GrammarError::TooSlow)
            }
        }
    }

    /// Number of timed-out compilations that are running.
    fn abandoned(&self) -> usize {
        let abandoned = self.abandoned.lock();
        let mut abandoned = abandoned.unwrap_or_else(PoisonError::into_inner);
        abandoned.retain(|thread| thread.strong_count() > 0);
        abandoned.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilation_times_out_and_few_threads_continue() {
        let threads = CompileThreads::default();
        let long = Duration::from_secs(60);
        assert_eq!(threads.run(long, || Ok(7)), Ok(7));
        let fault = threads.run(long, || -> Result<(), _> { panic!("a fault") });
        assert!(matches!(fault, Err(GrammarError::Invalid(_))), "{fault:?}");
        let mut held = Vec::new();
        for _ in 0..MAX_ABANDONED {
            let (go, wait) = mpsc::channel::<()>();
            let work = move || Ok(wait.recv().is_ok());
            let found = threads.run(Duration::from_millis(1), work);
            assert_eq!(found, Err(GrammarError::TooSlow));
            held.push(go);
        }
        assert_eq!(threads.run(long, || Ok(7)), Err(GrammarError::Busy));
        // Their threads end, and others are compiled again.
        drop(held);
        while threads.abandoned() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(threads.run(long, || Ok(7)), Ok(7));
    }
}
