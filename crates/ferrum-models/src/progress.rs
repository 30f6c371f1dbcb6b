//! Progress of loading.

/// Called as weights arrive, with bytes of the file done and in all.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64);
