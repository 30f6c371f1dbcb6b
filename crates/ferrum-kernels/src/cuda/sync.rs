//! Locks of state that threads share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A poisoned lock only means that another thread panicked; what is behind these locks is valid at each point.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
