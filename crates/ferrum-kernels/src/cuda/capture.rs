//! Which calls exclude each other while a stream is captured.
//!
//! The driver refuses to wait for a context while one of its streams is captured, and may end the capture for it (CUDA C++
//! Programming Guide, *Prohibited and Unhandled Operations*). A device has one primary context for the whole process, so the
//! model that captures and the one that frees memory may know nothing of each other.

use super::driver::Driver;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// For each device: read while a stream is captured, written by calls that wait for the context. One lock for all would let a
/// rank that waits for its collective keep another from the capture that leads to the same collective. Beyond these many
/// devices, some share one.
static CAPTURES: [RwLock<()>; 64] = [const { RwLock::new(()) }; 64];

fn captures(driver: &Driver) -> &'static RwLock<()> {
    &CAPTURES[driver.ordinal() % CAPTURES.len()]
}

thread_local! {
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
    /// What this thread dropped while it captured.
    static DROPPED: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// The time of a capture by this thread, which it does not leave: nobody waits for the device's context.
pub(super) struct Capture {
    captures: Option<RwLockReadGuard<'static, ()>>,
}

impl Capture {
    pub(super) fn begin(driver: &Driver) -> Self {
        let captures = captures(driver)
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        CAPTURING.set(true);
        Self {
            captures: Some(captures),
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

/// Makes a call that waits for the device's context, once nobody captures there. While this thread captures itself, the call is
/// not made and the result is none.
pub(super) fn outside<T>(driver: &Driver, call: impl FnOnce() -> T) -> Option<T> {
    if CAPTURING.get() {
        return None;
    }
    let _nobody_captures = captures(driver)
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    Some(call())
}

/// Drops a value at the end of this thread's capture.
pub(super) fn drop_behind(value: impl Any) {
    DROPPED.with_borrow_mut(|dropped| dropped.push(Box::new(value)));
}
