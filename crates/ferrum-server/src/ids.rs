//! Ids and creation times of the objects that the API returns.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// A random id that begins with `prefix`.
pub(crate) fn fresh_id(prefix: &str) -> String {
    let part = || RandomState::new().hash_one(prefix);
    format!("{prefix}{:016x}{:016x}", part(), part())
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}
