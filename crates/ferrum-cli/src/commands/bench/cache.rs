//! The size of the processor's last-level cache: below it, decoding hardly reads memory.

use std::collections::BTreeSet;
use std::path::Path;

/// CPUs that are looked at.
const MAX_CPUS: usize = 4096;

/// Caches of one CPU: one or two of each level.
const MAX_CACHES: usize = 16;

/// Bytes of all last-level caches of the machine; `None` where the system does not tell.
pub(super) fn last_level() -> Option<u64> {
    last_level_below(Path::new("/sys/devices/system/cpu"))
}

fn last_level_below(root: &Path) -> Option<u64> {
    // (CPUs that share it, bytes) of each: groups of cores may have one for each group.
    let mut caches = BTreeSet::new();
    for cpu in 0..MAX_CPUS {
        let dir = root.join(format!("cpu{cpu}/cache"));
        if !dir.exists() {
            break;
        }
        let levels = (0..MAX_CACHES).filter_map(|index| {
            let read = |name: &str| {
                let path = dir.join(format!("index{index}/{name}"));
                Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
            };
            let level: u32 = read("level")?.parse().ok()?;
            Some((level, read("shared_cpu_list")?, bytes(&read("size")?)?))
        });
        let (_, shared, bytes) = levels.max_by_key(|(level, ..)| *level)?;
        caches.insert((shared, bytes));
    }
    let bytes = caches.iter().map(|(_, bytes)| *bytes);
    bytes.reduce(u64::saturating_add)
}

/// A size such as `32768K`.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::{bytes, last_level_below};

    #[test]
    fn the_last_cache_of_each_group_of_cores_counts() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(last_level_below(root.path()), None);
        for (cpu, group) in [(0, "0-1\n"), (1, "0-1\n"), (2, "2-3\n"), (3, "2-3\n")] {
            for (index, level, size, shared) in [
                (0, "1\n", "48K\n", "0\n"),
                (2, "2\n", "2048K\n", "0\n"),
                (3, "3\n", "32M\n", group),
            ] {
                let dir = root.path().join(format!("cpu{cpu}/cache/index{index}"));
                std::fs::create_dir_all(&dir).unwrap();
                for (name, text) in [
                    ("level", level),
                    ("size", size),
                    ("shared_cpu_list", shared),
                ] {
                    std::fs::write(dir.join(name), text).unwrap();
                }
            }
        }
        assert_eq!(last_level_below(root.path()), Some(64 << 20));
        for (text, expected) in [("", None), ("K", None), ("1G", None), ("7", Some(7))] {
            assert_eq!(bytes(text), expected, "{text}");
        }
    }
}
