//! Which calls exclude each other while a stream is captured.
//!
//! The driver refuses to wait for a context while one of its streams is captured, and may end the capture for it (CUDA C++
//! Programming Guide, *Prohibited and Unhandled Operations*). A device has one primary context for the whole process, so the
//! model that captures and the one that frees memory may know nothing of each other.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Read while a stream is captured, written by calls that wait for a context.
static CAPTURES: RwLock<()> = RwLock::new(());

thread_local! {
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
    /// What this thread dropped while it captured.
    static DROPPED: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// The time of a capture by this thread: nobody waits for a context.
pub(super) struct Capture {
    captures: Option<RwLockReadGuard<'static, ()>>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Capture {
    pub(super) fn begin() -> Self {
        let captures = CAPTURES.read().unwrap_or_else(PoisonError::into_inner);
        CAPTURING.set(true);
        Self {
            captures: Some(captures),
            _of_this_thread: PhantomData,
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        CAPTURING.set(false);
        self.captures = None;
        drop(DROPPED.take());
    }
}

/// Makes a call that waits for a context, once nobody captures. While this thread does it itself, the call is not made and the
/// result is none.
pub(super) fn outside<T>(call: impl FnOnce() -> T) -> Option<T> {
    if CAPTURING.get() {
        return None;
    }
    let _nobody_captures = CAPTURES.write().unwrap_or_else(PoisonError::into_inner);
    Some(call())
}

/// Drops a value at the end of this thread's capture.
pub(super) fn drop_behind(value: impl Any) {
    DROPPED.with_borrow_mut(|dropped| dropped.push(Box::new(value)));
}
