//! How many threads are worth having: one for each physical core that this process may use.

use std::collections::BTreeSet;
use std::path::Path;

/// Physical cores in the process's affinity mask, at most what its CPU quota allows; at least 1.
pub(crate) fn cores() -> usize {
    // Counts logical CPUs in the mask and respects container quotas.
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    physical(Path::new("/")).map_or(logical, |physical| physical.min(logical))
}

/// Cores by what Linux says below `root`; `None` where it says nothing.
fn physical(root: &Path) -> Option<usize> {
    let status = std::fs::read_to_string(root.join("proc/self/status")).ok()?;
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for cpu in parse_list(allowed)? {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = std::fs::read_to_string(root.join(path)).ok()?;
        cores.insert(parse_list(&siblings)?.into_iter().next()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// A list such as `0-3,8`.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    const MOST_CPUS: u32 = 1 << 16;
    let mut out = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MOST_CPUS {
            return None;
        }
        out.extend(first..=last);
    }
    Some(out)
}

/// The processor's own name and its memory, where the system tells.
pub(crate) fn describe() -> (String, Option<u64>) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let name = field(&read("/proc/cpuinfo"), "model name");
    let memory = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|text| text.strip_suffix("kB")?.trim().parse::<u64>().ok())
        .and_then(|kilobytes| kilobytes.checked_mul(1024));
    (
        name.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        memory,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        let cases: [(&str, Option<&[u32]>); 7] = [
            ("0", Some(&[0])),
            (" 0-2\n", Some(&[0, 1, 2])),
            ("1,4-5", Some(&[1, 4, 5])),
            ("", None),
            ("a-b", None),
            ("0-4000000000", None),
            ("3-1", Some(&[])),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_list(text).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn siblings_are_one_core_and_the_mask_counts() {
        let root = std::env::temp_dir().join(format!("ferrum-topology-{}", std::process::id()));
        std::fs::create_dir_all(root.join("proc/self")).unwrap();
        let status = "Name:\tx\nCpus_allowed_list:\t0-1,3-4\n";
        std::fs::write(root.join("proc/self/status"), status).unwrap();
        for (cpu, siblings) in [(0, "0,4"), (1, "1,5"), (3, "3,7"), (4, "0,4")] {
            let dir = root.join(format!("sys/devices/system/cpu/cpu{cpu}/topology"));
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("thread_siblings_list"), siblings).unwrap();
        }
        let found = physical(&root);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, Some(3));
        assert_eq!(physical(&root), None);
    }

    #[test]
    fn there_is_at_least_one_core() {
        assert!(cores() >= 1);
    }
}
