//! Every CUDA kernel compiles for the architectures that there are, spills nothing, and takes the registers and shared
//! memory that `cuda_resources.txt` says. A change there is to be explained in its commit.
//!
//! The table also has a hash of each file with what it includes. A file that is as it was recorded is compiled for one type of
//! activations, another one for all: most of a commit's kernels are those of the commit before. One type takes 4 minutes of a core,
//! all of them 9. A process for all architectures of a file (`-fatbin`) takes as long as one for each, on one core.
//!
//! Needs `nvcc`, from the CUDA toolkit or the Python packages `nvidia-cuda-nvcc`, `nvidia-nvvm`, `nvidia-cuda-crt`,
//! `nvidia-cuda-runtime` and `nvidia-cuda-cccl` of version 13.0; no GPU.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_test_support::skip;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use twox_hash::XxHash3_64;

/// Those that the backend names to NVRTC for compute capabilities 8.0, 8.9, 9.0 and 12.0.
const ARCHITECTURES: [&str; 4] = ["80", "89", "90a", "120a"];
/// The activations that a file is compiled for which has not changed: those that most models run with.
const UNCHANGED: &str = "bf16";
/// Elements of activations, and what a file is compiled with for them.
const ACTS: [(&str, &[&str]); 3] = [
    ("f32", &[]),
    ("bf16", &["-DACT_BF16"]),
    ("f16", &["-DACT_F16"]),
];
/// Files whose kernels are for activations of 16 bits only begin with this.
const HALF_ALONE: &str = "flash";
/// What all are compiled with.
const FLAGS: [&str; 4] = ["-std=c++17", "-cubin", "-Xptxas", "-v"];
/// Registers and numbers of bytes depend on the compiler.
const VERSION: &str = "release 13.0";

/// `nvcc` of the version that the table is for.
fn compiler() -> Result<PathBuf, String> {
    let of_python = Command::new("python3")
        .args([
            "-c",
            "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])",
        ])
        .output();
    let of_python = of_python.ok().filter(|output| output.status.success());
    let folder = of_python.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let found = [PathBuf::from("nvcc")]
        .into_iter()
        .chain(folder.map(|folder| Path::new(&folder).join("bin/nvcc")));
    for nvcc in found {
        let Ok(output) = Command::new(&nvcc).arg("--version").output() else {
            continue;
        };
        if String::from_utf8_lossy(&output.stdout).contains(VERSION) {
            return Ok(nvcc);
        }
    }
    Err(format!("no nvcc of {VERSION}"))
}

/// What `ptxas -v` says of each kernel of a file: a line for each.
fn resources(
    nvcc: &Path,
    file: &Path,
    architecture: &str,
    (act, defines): (&str, &[&str]),
) -> Result<Vec<String>, String> {
    let target = format!("arch=compute_{architecture},code=sm_{architecture}");
    let output = Command::new(nvcc)
        .args(FLAGS)
        .args(["-gencode", &target, "-o", "/dev/null"])
        .args(defines)
        .arg(file)
        .output()
        .map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    let name = stem(file);
    if !output.status.success() {
        return Err(format!("{name} for sm_{architecture}: {said}"));
    }
    let mut lines = Vec::new();
    let (mut kernel, mut spills) = (String::new(), String::new());
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if line.contains("spill stores") {
            spills = line.trim().to_owned();
        } else if let Some((_, used)) = line.split_once("Used ") {
            let registers = used.split(' ').next().unwrap_or_default();
            let shared = used
                .split(", ")
                .find_map(|part| part.strip_suffix(" bytes smem"));
            if !spills.contains(" 0 bytes spill stores, 0 bytes spill loads") {
                return Err(format!("{name}: {kernel} for sm_{architecture}: {spills}"));
            }
            let shared = shared.unwrap_or("0");
            lines.push(format!(
                "{name} {kernel} {act} sm_{architecture} registers {registers} shared {shared}"
            ));
        }
    }
    Ok(lines)
}

fn stem(file: &Path) -> String {
    file.file_stem().unwrap().to_string_lossy().into_owned()
}

/// Adds the text of a file and of those it includes.
fn gather(file: &Path, texts: &mut BTreeMap<PathBuf, String>) {
    if texts.contains_key(file) {
        return;
    }
    let text = std::fs::read_to_string(file).unwrap();
    texts.insert(file.to_owned(), text.clone());
    for line in text.lines() {
        let included = line.trim().strip_prefix("#include \"");
        if let Some(name) = included.and_then(|rest| rest.strip_suffix('"')) {
            gather(&file.with_file_name(name), texts);
        }
    }
}

/// The table's line for the source of a file: another one after a change of what its machine code is made from.
fn source(file: &Path) -> String {
    let mut texts = BTreeMap::new();
    gather(file, &mut texts);
    let made_from = format!("{VERSION} {ARCHITECTURES:?} {ACTS:?} {FLAGS:?}");
    let all = texts.into_values().fold(made_from, |all, text| all + &text);
    let hash = XxHash3_64::oneshot(all.as_bytes());
    format!("{} source {hash:016x}", stem(file))
}

/// What a file of kernels is compiled for.
fn targets(
    file: &Path,
    unchanged: bool,
) -> Vec<(&'static str, (&'static str, &'static [&'static str]))> {
    let alone = usize::from(stem(file).starts_with(HALF_ALONE));
    let of_all = ARCHITECTURES
        .into_iter()
        .flat_map(|architecture| ACTS[alone..].iter().map(move |&act| (architecture, act)));
    of_all
        .filter(|&(_, (act, _))| !unchanged || act == UNCHANGED)
        .collect()
}

#[test]
fn kernels_compile_and_take_what_the_table_says() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::fs::read_dir(here.join("src/cuda/kernels")).unwrap();
    let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "cu"));
    let recorded: BTreeSet<_> = include_str!("cuda_resources.txt").lines().collect();
    let sources: Vec<_> = files.iter().map(|file| source(file)).collect();
    let changed: Vec<_> = sources
        .iter()
        .filter(|line| !recorded.contains(line.as_str()))
        .collect();
    let nvcc = match compiler() {
        Ok(nvcc) => nvcc,
        Err(reason) => {
            assert!(
                changed.is_empty(),
                "{changed:?} are not in the table: {reason}"
            );
            skip(reason);
            return;
        }
    };
    let (mut jobs, mut expected) = (Vec::new(), BTreeSet::new());
    // Lines of files that there are no longer.
    let stems: BTreeSet<_> = files.iter().map(|file| stem(file)).collect();
    let file_of = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    expected.extend(
        recorded
            .iter()
            .filter(|line| !stems.contains(&file_of(line))),
    );
    for (file, source) in files.iter().zip(&sources) {
        let unchanged = recorded.contains(source.as_str());
        let targets = targets(file, unchanged);
        let name = stem(file);
        let compiled = |line: &&&str| {
            let targets = targets.iter();
            let mut ends =
                targets.map(|(architecture, (act, _))| format!(" {act} sm_{architecture} "));
            !unchanged || line.contains(" source ") || ends.any(|end| line.contains(&end))
        };
        let own = recorded.iter().filter(|line| file_of(line) == name);
        expected.extend(own.filter(compiled));
        jobs.extend(targets.into_iter().map(|target| (file, target)));
    }
    let (found, next) = (
        Mutex::new(BTreeSet::from_iter(sources)),
        AtomicUsize::new(0),
    );
    // The compiler takes a core.
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(file, (arch, act))) = jobs.get(next.fetch_add(1, Relaxed)) {
                    let lines = resources(&nvcc, file, arch, act).unwrap_or_else(|e| panic!("{e}"));
                    found.lock().unwrap().extend(lines);
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    let expected: BTreeSet<_> = expected
        .into_iter()
        .map(|line: &&str| (*line).to_owned())
        .collect();
    let changed: Vec<_> = found.symmetric_difference(&expected).collect();
    if !changed.is_empty() {
        let kept = recorded.iter().map(|&line| line.to_owned());
        let kept = kept.filter(|line| !expected.contains(line));
        let table: BTreeSet<_> = kept.chain(found.iter().cloned()).collect();
        let table: String = table.into_iter().map(|line| line + "\n").collect();
        let written = here.join("../../target/cuda_resources.txt");
        std::fs::write(&written, table).unwrap();
        panic!(
            "the table differs, what is there now is in {}:\n{changed:#?}",
            written.display()
        );
    }
}
