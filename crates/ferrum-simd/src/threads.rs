//! The threads that compute: a pool of them, and how many the machine is worth.

mod pool;
mod sync;
pub mod topology;

pub use pool::Pool;
