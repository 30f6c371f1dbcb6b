//! What the threads of the pool meet on, and how long they wait awake.
//!
//! `tests/threads.rs` compiles the pool with another module of this name, whose types are those of `shuttle`: every use of
//! one may be followed by any other thread, and the test tries many such orders.

pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub(super) use std::{hint, thread};

use std::cell::UnsafeCell;

/// Rounds of a waiting loop that only pause; some 50 µs, the length of the parts of a step that one
/// thread does alone.
pub(super) const SPINS: u32 = 1000;
/// Rounds after that which give the core away; then the thread sleeps.
pub(super) const YIELDS: u32 = 100;

/// A value that threads share without a lock.
#[derive(Debug)]
pub(super) struct SharedCell<T>(UnsafeCell<T>);

impl<T: Copy> SharedCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// Nobody writes meanwhile.
    #[inline]
    pub(super) unsafe fn read(&self) -> T {
        // SAFETY: the caller's promise.
        unsafe { *self.0.get() }
    }

    /// # Safety
    /// Nobody reads or writes meanwhile.
    #[inline]
    pub(super) unsafe fn write(&self, value: T) {
        // SAFETY: the caller's promise.
        unsafe { *self.0.get() = value };
    }
}
