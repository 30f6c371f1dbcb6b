//! How many threads are worth having: one for each physical core that this process may use; and on which
//! memory nodes those cores are. It also says how much memory is free.

use ferrum_types::DeviceMemory;
use std::collections::BTreeSet;
use std::path::Path;

/// Physical cores in the process's affinity mask, at most what its CPU quota allows; at least 1.
pub fn cores() -> usize {
    // Counts logical CPUs in the mask and respects container quotas.
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    physical(Path::new("/")).map_or(logical, |physical| physical.min(logical))
}

/// What the process may use of what `field` of its status lists, such as `Cpus_allowed_list:`.
fn allowed(root: &Path, field: &str) -> Option<Vec<u32>> {
    let status = std::fs::read_to_string(root.join("proc/self/status")).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix(field))?;
    parse_list(list)
}

/// The memory nodes that have cores which this process may use; none where the system does not tell.
pub fn nodes() -> Vec<u32> {
    nodes_below(Path::new("/")).unwrap_or_default()
}

/// [`nodes`] of the system whose files lie below `root`.
pub fn nodes_below(root: &Path) -> Option<Vec<u32>> {
    let list = |path: String| parse_list(&std::fs::read_to_string(root.join(path)).ok()?);
    let cpus: BTreeSet<_> = allowed(root, "Cpus_allowed_list:")?.into_iter().collect();
    let memory = allowed(root, "Mems_allowed_list:")?;
    let mut nodes = list("sys/devices/system/node/has_memory".into())?;
    nodes.retain(|node| {
        // A node without cores has an empty list.
        let near = list(format!("sys/devices/system/node/node{node}/cpulist"));
        let near = near.is_some_and(|near| near.iter().any(|cpu| cpus.contains(cpu)));
        near && memory.contains(node)
    });
    Some(nodes)
}

/// Cores by what Linux says below `root`; `None` where it says nothing.
pub fn physical(root: &Path) -> Option<usize> {
    let mut cores = BTreeSet::new();
    for cpu in allowed(root, "Cpus_allowed_list:")? {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = std::fs::read_to_string(root.join(path)).ok()?;
        cores.insert(parse_list(&siblings)?.into_iter().next()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// A list such as `0-3,8`.
pub fn parse_list(text: &str) -> Option<Vec<u32>> {
    const MAX_CPUS: u32 = 1 << 16;
    let mut out = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MAX_CPUS {
            return None;
        }
        out.extend(first..=last);
    }
    Some(out)
}

/// The processor's own name, where the system tells, else its architecture.
pub fn name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = field(&text, "model name");
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), str::to_owned)
}

/// What stands behind a name and a colon.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim())
}

/// The machine's memory, or what the process's control group allows of it, where the system tells.
pub fn memory() -> Option<DeviceMemory> {
    memory_below(Path::new("/"))
}

/// Where a version of Linux's control groups tells of memory.
struct GroupVersion {
    /// What `/proc/self/cgroup` calls it.
    controller: &'static str,
    /// Where groups are mounted.
    root: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The fields of `memory.stat` for cached pages of files.
    cached: [&'static str; 2],
}

const GROUP_VERSIONS: [GroupVersion; 2] = [
    GroupVersion {
        controller: "",
        root: "sys/fs/cgroup",
        limit: "memory.max",
        used: "memory.current",
        cached: ["inactive_file", "active_file"],
    },
    GroupVersion {
        controller: "memory",
        root: "sys/fs/cgroup/memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        cached: ["total_inactive_file", "total_active_file"],
    },
];

/// [`memory`] of the system whose files lie below `root`.
pub fn memory_below(root: &Path) -> Option<DeviceMemory> {
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).ok();
    let text = read(Path::new("proc/meminfo"))?;
    let bytes = |name| {
        let kilobytes = field(&text, name)?.strip_suffix("kB")?.trim();
        kilobytes.parse::<u64>().ok()?.checked_mul(1024)
    };
    let total = bytes("MemTotal")?;
    let mut memory = DeviceMemory {
        free: bytes("MemAvailable").unwrap_or(total).min(total),
        total,
    };
    // Each group above the process's own has a limit, too; in a container the path may begin above what is mounted.
    let groups = read(Path::new("proc/self/cgroup")).unwrap_or_default();
    for version in &GROUP_VERSIONS {
        let group = |line: &str| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let own = controllers
                .split(',')
                .any(|name| name == version.controller);
            own.then(|| path.trim_start_matches('/').to_owned())
        };
        let own = groups.lines().find_map(group).unwrap_or_default();
        for group in Path::new(&own).ancestors() {
            let folder = Path::new(version.root).join(group);
            let number = |file: &str| read(&folder.join(file))?.trim().parse::<u64>().ok();
            let (Some(limit), Some(used)) = (number(version.limit), number(version.used)) else {
                continue;
            };
            // Cached pages of files are reclaimable.
            let stat = read(&folder.join("memory.stat")).unwrap_or_default();
            let of_files = |line: &str| {
                let (name, bytes) = line.split_once(' ')?;
                let cached = version.cached.contains(&name);
                cached.then(|| bytes.trim().parse::<u64>().ok())?
            };
            let cached = stat.lines().filter_map(of_files).sum();
            memory.total = memory.total.min(limit);
            let left = limit.saturating_sub(used.saturating_sub(cached));
            memory.free = memory.free.min(left);
        }
    }
    Some(memory)
}
