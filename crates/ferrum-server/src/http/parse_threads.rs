//! Low-priority threads that parse requests: tokenising long text and compiling schemas.
//!
//! There are few such threads, and both the engine and other requests need the cores. So these threads have a lower
//! priority than threads that compute, and long bodies are parsed one at a time: short requests do not wait behind long
//! ones.

use crate::error::ApiError;
use ferrum_engine::priority;
use std::cell::Cell;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The nice value of these threads: each gets about a tenth of what a computing thread gets where both want a core.
const NICE: i32 = 10;

/// Bytes from which a body is long: to read so much takes some hundredths of a second.
const LONG: usize = 256 << 10;

/// How many long bodies are read at a time, which is fewer than there are threads.
const LONG_AT_A_TIME: usize = 1;

thread_local! {
    /// Whether this thread has its lower priority.
    static IS_LOWERED: Cell<bool> = const { Cell::new(false) };
}

/// The threads.
#[derive(Debug)]
pub(crate) struct ParseThreads {
    long: Arc<Semaphore>,
}

impl ParseThreads {
    pub(crate) fn new() -> Self {
        Self {
            long: Arc::new(Semaphore::new(LONG_AT_A_TIME)),
        }
    }

    /// Reads something of a body of so many bytes.
    ///
    /// # Errors
    /// Those of `work`; a 500 if it panics.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        // The semaphore is never closed.
        let place = match bytes >= LONG {
            true => Arc::clone(&self.long).acquire_owned().await.ok(),
            false => None,
        };
        let work = move || {
            // Released with the work, which continues even if the caller no longer waits.
            let _place = place;
            if !IS_LOWERED.replace(true) {
                priority::set_nice(NICE);
            }
            work()
        };
        let failed = |_| ApiError::internal("the request could not be read");
        tokio::task::spawn_blocking(work).await.map_err(failed)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn long_bodies_leave_threads_to_short_ones() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(LONG_AT_A_TIME + 1)
            .build()
            .unwrap();
        let threads = ParseThreads::new();
        let (go, wait) = mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        runtime.block_on(async {
            let long = || {
                let wait = Arc::clone(&wait);
                threads.run(LONG, move || {
                    wait.lock().unwrap().recv().unwrap();
                    Ok(())
                })
            };
            let mut all = Box::pin(async {
                let (a, b, c, d) = tokio::join!(long(), long(), long(), long());
                [a, b, c, d].iter().all(Result::is_ok)
            });
            // More long ones than threads wait, and a short one is read.
            tokio::select! {
                biased;
                _ = &mut all => panic!("nothing lets them end"),
                short = threads.run(10, || Ok(7)) => assert_eq!(short.unwrap(), 7),
            }
            for _ in 0..4 {
                go.send(()).unwrap();
            }
            assert!(all.await);
        });
        let broken = threads.run(1, || -> Result<(), _> { panic!("a fault in a parser") });
        assert!(runtime.block_on(broken).is_err());
    }
}
