//! The process of a rank: its host, its identity, and whether it is still running.

use std::hash::{DefaultHasher, Hash, Hasher};

/// Bytes of a serialised [`Peer`].
pub(crate) const RECORD: usize = 96;

/// Longest name of a host in a record.
const NAME: usize = RECORD - 32;

/// A process of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pid: u64,
    /// Start time of the process, in ticks since boot. It tells the process from a later one with the same id.
    started: u64,
    /// Identifies the boot and the PID namespace: processes with the same value see each other in `/proc`.
    system: u64,
    host: String,
}

impl Peer {
    /// This process.
    pub(crate) fn own() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let pid = std::process::id().into();
        let host = read("/proc/sys/kernel/hostname");
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let mut system = DefaultHasher::new();
        read("/proc/sys/kernel/random/boot_id").hash(&mut system);
        namespace.hash(&mut system);
        Self {
            pid,
            started: started(pid).unwrap_or(0),
            system: system.finish(),
            host: host.trim().chars().take(NAME / 4).collect(),
        }
    }

    pub(crate) fn to_record(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        let numbers = [self.pid, self.started, self.system, self.host.len() as u64];
        for (place, number) in record.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        record[32..][..self.host.len()].copy_from_slice(self.host.as_bytes());
        record
    }

    pub(crate) fn from_record(record: &[u8; RECORD]) -> Self {
        let (numbers, host) = record.split_at(32);
        let number = |i: usize| {
            let bytes = numbers.as_chunks().0[i];
            u64::from_le_bytes(bytes)
        };
        let len = usize::try_from(number(3)).unwrap_or(NAME).min(NAME);
        Self {
            pid: number(0),
            started: number(1),
            system: number(2),
            host: String::from_utf8_lossy(&host[..len]).into_owned(),
        }
    }

    /// Whether both processes see each other in `/proc`.
    pub(crate) fn shares_system(&self, other: &Self) -> bool {
        self.system == other.system
    }

    /// Whether the process has ended. `false` if this process cannot see it.
    pub(crate) fn is_gone(&self, own: &Self) -> bool {
        self.started > 0 && self.shares_system(own) && started(self.pid) != Some(self.started)
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} on {}", self.pid, self.host)
    }
}

/// The start time of a process; `None` if it has ended, or on systems without `/proc`.
fn started(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in parentheses and may hold anything.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_ascii_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X" | "x");
    // The state is field 3, the start field 22.
    let started = fields.nth(18)?.parse().ok();
    started.filter(|_| !ended)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use ferrum_test_support::skip;
    use std::process::Command;

    #[test]
    fn a_record_gives_the_peer_it_was_made_of() {
        let own = Peer::own();
        assert_eq!(Peer::from_record(&own.to_record()), own);
        assert!(own.shares_system(&own) && !own.is_gone(&own));
        let far = Peer {
            system: own.system ^ 1,
            pid: u64::MAX,
            ..own.clone()
        };
        assert!(!far.is_gone(&own), "it cannot be seen");
    }

    #[test]
    fn a_zombie_is_gone() {
        if started(std::process::id().into()).is_none() {
            return skip("there is no /proc");
        }
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().into();
        let peer = Peer {
            pid,
            started: started(pid).unwrap(),
            ..Peer::own()
        };
        assert!(!peer.is_gone(&Peer::own()));
        child.kill().unwrap();
        // It is a zombie until `wait`.
        while !peer.is_gone(&Peer::own()) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(peer.is_gone(&Peer::own()));
    }
}
