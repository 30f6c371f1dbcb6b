//! What the system says of cores, memory nodes and memory.

use ferrum_simd::threads::topology::{cores, memory_below, nodes_below, parse_list, physical};
use ferrum_types::DeviceMemory;

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
fn nodes_are_those_of_the_cores_in_the_mask() {
    let root = std::env::temp_dir().join(format!("ferrum-nodes-{}", std::process::id()));
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    assert_eq!(nodes_below(&root), None);
    for (i, cpus) in ["0-3", "4-7", "8-11", "\n", "12-15"].iter().enumerate() {
        write(&format!("sys/devices/system/node/node{i}/cpulist"), cpus);
    }
    let mut cases = Vec::new();
    for (cpus, mems) in [
        ("0-15", "0-4"),
        ("2,5-6", "0-4"),
        ("0-15", "1,3"),
        ("8", "0-4"),
    ] {
        let status = format!("Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n");
        write("proc/self/status", &status);
        // Node 4 has no memory, node 3 no cores.
        write("sys/devices/system/node/has_memory", "0-3\n");
        cases.push(nodes_below(&root).unwrap());
    }
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!(cases, [vec![0, 1, 2], vec![0, 1], vec![1], vec![2]]);
}

#[test]
fn memory_is_what_the_machine_and_its_groups_leave() {
    let root = std::env::temp_dir().join(format!("ferrum-memory-{}", std::process::id()));
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let memory = |free, total| Some(DeviceMemory { free, total });
    assert_eq!(memory_below(&root), None);
    write("proc/meminfo", "MemTotal:  100 kB\nMemFree: 1 kB\n");
    assert_eq!(memory_below(&root), memory(102_400, 102_400));
    write("proc/meminfo", "MemTotal:  100 kB\nMemAvailable:   60 kB\n");
    assert_eq!(memory_below(&root), memory(61_440, 102_400));
    write("proc/self/cgroup", "0::/a/b\n");
    write("sys/fs/cgroup/a/b/memory.max", "max\n");
    write("sys/fs/cgroup/a/b/memory.current", "5000\n");
    assert_eq!(memory_below(&root), memory(61_440, 102_400));
    // The group above has a limit; pages of files do not count as used.
    write("sys/fs/cgroup/a/memory.max", "50000\n");
    write("sys/fs/cgroup/a/memory.current", "30000\n");
    write(
        "sys/fs/cgroup/a/memory.stat",
        "anon 1\ninactive_file 5000\nactive_file 3000\n",
    );
    assert_eq!(memory_below(&root), memory(28_000, 50_000));
    write("sys/fs/cgroup/a/memory.current", "90000\n");
    assert_eq!(memory_below(&root), memory(0, 50_000));
    // The first version of groups, whose root has a number for no limit.
    write("proc/self/cgroup", "8:pids:/d\n4:cpuset,memory:/c\n0::/\n");
    for (path, limit, used, cached) in [
        ("", "9223372036854771712", "60000", 10_000),
        ("/c", "40000", "9000", 4000),
    ] {
        let file = |name| format!("sys/fs/cgroup/memory{path}/memory.{name}");
        write(&file("limit_in_bytes"), limit);
        write(&file("usage_in_bytes"), used);
        let stat = format!("active_file 1\ntotal_inactive_file {cached}\ntotal_active_file 10\n");
        write(&file("stat"), &stat);
    }
    assert_eq!(memory_below(&root), memory(35_010, 40_000));
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn there_is_at_least_one_core() {
    assert!(cores() >= 1);
}
