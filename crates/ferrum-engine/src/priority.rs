//! Threads that make way for those that compute: a step is as slow as its slowest thread.

/// Lets this thread run after others where there is more to do than cores: the higher `nice`, the less it gets, up to 19,
/// which is next to nothing. Does nothing where a priority does not belong to a thread, as anywhere but on Linux.
pub fn make_way(nice: i32) {
    #[cfg(target_os = "linux")]
    {
        // What is not allowed to wait goes on as it was.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), nice);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = nice;
}
