//! What the engine's threads and its handles meet on.
//!
//! With the feature `shuttle` these are the types of `shuttle`, and `tests/shuttle.rs` tries many orders in which threads
//! may run. Channels and watches of `tokio` stay: between two uses of the types here nobody else runs.

#[cfg(feature = "shuttle")]
pub(crate) mod mpsc;

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::{
    sync::{Mutex, MutexGuard, atomic},
    thread,
};
#[cfg(not(feature = "shuttle"))]
pub(crate) use std::{
    sync::{Mutex, MutexGuard, atomic, mpsc},
    thread,
};
