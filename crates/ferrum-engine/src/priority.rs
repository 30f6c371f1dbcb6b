//! Priorities of threads: a step is as slow as its slowest thread, so work beside it runs at a lower one.

/// Sets the nice value of this thread: the higher it is (up to 19), the smaller its share of a core that others want too. Does nothing where a priority does not belong to a thread, as anywhere but on Linux.
pub fn set_nice(nice: i32) {
    #[cfg(target_os = "linux")]
    {
        // What is not allowed to wait goes on as it was.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), nice);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = nice;
}
