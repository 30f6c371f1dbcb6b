//! What the system says of this process.

/// Memory of a process in bytes.
pub(crate) struct Memory {
    /// Held now.
    pub(crate) resident: u64,
    /// Most that was held at any time.
    pub(crate) peak: u64,
}

/// Memory of this process, where the system tells (Linux).
pub(crate) fn memory() -> Option<Memory> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    Some(Memory {
        resident: field("VmRSS:")?,
        peak: field("VmHWM:")?,
    })
}
