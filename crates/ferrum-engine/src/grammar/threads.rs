//! Threads that compile grammars: each has room for deep recursion, and nobody waits for one for ever.
//!
//! The parser's limits bound most of what a grammar can ask for, but not everything that its compiler does before,
//! which nothing can interrupt. So whoever waits gives up after a while and has its own thread for others again; what
//! goes on meanwhile is bounded by number, and ends when it ends.

use super::GrammarError;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Compiling follows the nesting of what it compiles.
const STACK_BYTES: usize = 16 << 20;

/// Most threads that go on though nobody waits for them any more.
const MOST_ABANDONED: usize = 2;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct CompileThreads {
    /// What each thread that nobody waits for holds to its end.
    abandoned: Mutex<Vec<Weak<()>>>,
}

impl CompileThreads {
    /// Does `work` on a thread of its own, which has the priority of this one.
    ///
    /// # Errors
    /// Those of `work`; that it panics, or takes longer than `patience`; that too many do so at the moment.
    pub(super) fn run<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce() -> Result<T, GrammarError> + Send + 'static,
    ) -> Result<T, GrammarError> {
        let failed =
            |what: &str| GrammarError::Invalid(format!("it could not be compiled: {what}"));
        if self.abandoned() >= MOST_ABANDONED {
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
                // Fails where nobody waits any more.
                let _ = done.send(work());
            });
        thread.map_err(|e| failed(&e.to_string()))?;
        match result.recv_timeout(patience) {
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

    /// How many threads go on though nobody waits for them.
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
    fn nobody_waits_for_ever_and_few_threads_go_on() {
        let threads = CompileThreads::default();
        let long = Duration::from_secs(60);
        assert_eq!(threads.run(long, || Ok(7)), Ok(7));
        let fault = threads.run(long, || -> Result<(), _> { panic!("a fault") });
        assert!(matches!(fault, Err(GrammarError::Invalid(_))), "{fault:?}");
        let mut held = Vec::new();
        for _ in 0..MOST_ABANDONED {
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
