//! Work for several threads whose results are wanted in order.

use ferrum_types::{Error, Result};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

/// The result of `make` for an item.
type Answer<T> = Receiver<Result<T>>;

/// Calls `make` for each of `items` on `threads` threads, and `take` on this one with each result in turn.
///
/// Results wait for their turn, and no more than two for each thread, so that memory does not grow where
/// `take` is the slower. Of several errors the first item's counts, whichever thread was faster.
///
/// # Errors
/// The first of `make` and `take`; nothing is taken after it. [`Error::Model`] where `make` panics.
pub(super) fn in_order<I: Sync, T: Send>(
    items: &[I],
    threads: usize,
    make: impl Fn(&I) -> Result<T> + Sync,
    mut take: impl FnMut(&I, T) -> Result<()>,
) -> Result<()> {
    let (jobs, queue) = channel::<(&I, Sender<Result<T>>)>();
    let queue = Mutex::new(queue);
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
    let work = || {
        while let Ok((item, answer)) = next() {
            // After an error there is no receiver.
            drop(answer.send(make(item)));
        }
    };
    let threads = threads.clamp(1, items.len().max(1));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut take_first = |waiting: &mut VecDeque<(&I, Answer<T>)>| match waiting.pop_front() {
            Some((item, answer)) => {
                let lost = |_| Error::Model("a thread has failed while encoding".into());
                take(item, answer.recv().map_err(lost)??)
            }
            None => Ok(()),
        };
        let mut waiting = VecDeque::new();
        let mut feed = || {
            for item in items {
                let (send, answer) = channel();
                // The queue outlives the threads.
                drop(jobs.send((item, send)));
                waiting.push_back((item, answer));
                if waiting.len() > 2 * threads {
                    take_first(&mut waiting)?;
                }
            }
            while !waiting.is_empty() {
                take_first(&mut waiting)?;
            }
            Ok(())
        };
        let result = feed();
        // With nothing more to come the threads end. One that has panicked has said so in `result`.
        drop(jobs);
        for worker in workers {
            drop(worker.join());
        }
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn results_come_in_order_and_few_wait() {
        let items: Vec<usize> = (0..200).collect();
        for threads in [0, 1, 3, 500] {
            let (made, mut taken) = (AtomicUsize::new(0), Vec::new());
            let make = |&i: &usize| {
                made.fetch_add(1, Ordering::SeqCst);
                // Neighbours take turns at being late.
                std::thread::sleep(Duration::from_micros(50 * (i as u64 % 3)));
                Ok(2 * i)
            };
            let all = in_order(&items, threads, make, |&i, double| {
                assert_eq!(double, 2 * i);
                let ahead = made.load(Ordering::SeqCst) - taken.len();
                assert!(ahead <= 2 * threads.max(1) + 1, "{ahead}");
                taken.push(i);
                Ok(())
            });
            assert!(all.is_ok());
            assert_eq!(taken, items);
        }
    }

    #[test]
    fn the_first_error_counts_and_ends_it() {
        let items: Vec<usize> = (0..100).collect();
        let mut taken = 0;
        let make = |&i: &usize| match i {
            7 | 8 | 50 => Err(Error::Model(format!("item {i}"))),
            _ => Ok(()),
        };
        let found = in_order(&items, 4, make, |_, ()| {
            taken += 1;
            Ok(())
        });
        assert!(matches!(found, Err(Error::Model(text)) if text == "item 7"));
        assert_eq!(taken, 7);
        let found = in_order(
            &items,
            2,
            |_| Ok(()),
            |_, ()| Err(Error::Model("full".into())),
        );
        assert!(matches!(found, Err(Error::Model(text)) if text == "full"));
    }

    #[test]
    fn a_panic_is_an_error() {
        let items: Vec<usize> = (0..20).collect();
        let make = |&i: &usize| {
            assert!(i != 3, "item 3, as this test wants it");
            Ok(())
        };
        for threads in [1, 4] {
            let found = in_order(&items, threads, make, |_, ()| Ok(()));
            assert!(matches!(found, Err(Error::Model(text)) if text.contains("thread has failed")));
        }
    }
}
