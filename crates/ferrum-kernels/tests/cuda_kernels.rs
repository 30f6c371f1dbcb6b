//! Every CUDA kernel compiles for the architectures that there are, spills nothing, and takes the registers and shared
//! memory that `cuda_resources.txt` says. A change there is to be explained in its commit.
//!
//! Needs `nvcc`, from the CUDA toolkit or the Python packages `nvidia-cuda-nvcc`, `nvidia-nvvm`, `nvidia-cuda-crt`,
//! `nvidia-cuda-runtime` and `nvidia-cuda-cccl` of version 13.0; no GPU.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const ARCHITECTURES: [&str; 4] = ["80", "89", "90a", "120"];
/// Elements of activations, and what a file is compiled with for them.
const ACTS: [(&str, &[&str]); 3] = [
    ("f32", &[]),
    ("bf16", &["-DACT_BF16"]),
    ("f16", &["-DACT_F16"]),
];
/// Files whose kernels are for activations of 16 bits only begin with this.
const HALF_ALONE: &str = "flash";
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
        .args([
            "-std=c++17",
            "-gencode",
            &target,
            "-cubin",
            "-Xptxas",
            "-v",
            "-o",
            "/dev/null",
        ])
        .args(defines)
        .arg(file)
        .output()
        .map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    let name = file.file_stem().unwrap().to_string_lossy();
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
                "{kernel} {act} sm_{architecture} registers {registers} shared {shared}"
            ));
        }
    }
    Ok(lines)
}

#[test]
fn kernels_compile_and_take_what_the_table_says() {
    let nvcc = match compiler() {
        Ok(nvcc) => nvcc,
        Err(reason) => {
            println!("skipped: {reason}");
            return;
        }
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::fs::read_dir(here.join("src/cuda/kernels")).unwrap();
    let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "cu"));
    files.sort();
    let jobs: Vec<_> = files
        .iter()
        .flat_map(|file| ARCHITECTURES.map(|architecture| (file, architecture)))
        .flat_map(|(file, architecture)| {
            let name = file.file_name().unwrap().to_string_lossy();
            let alone = usize::from(name.starts_with(HALF_ALONE));
            ACTS[alone..]
                .iter()
                .map(move |&act| (file, architecture, act))
        })
        .collect();
    let (found, next) = (Mutex::new(BTreeSet::new()), AtomicUsize::new(0));
    // The compiler takes a core.
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(file, arch, act)) = jobs.get(next.fetch_add(1, Relaxed)) {
                    let lines = resources(&nvcc, file, arch, act).unwrap_or_else(|e| panic!("{e}"));
                    found.lock().unwrap().extend(lines);
                }
            });
        }
    });
    let found = found.into_inner().unwrap().into_iter();
    let found: String = found.map(|line| line + "\n").collect();
    let expected = include_str!("cuda_resources.txt");
    let written = here.join("../../target/cuda_resources.txt");
    std::fs::write(&written, &found).unwrap();
    let of = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (found, expected) = (of(&found), of(expected));
    let changed: Vec<_> = found
        .iter()
        .filter(|line| !expected.contains(line))
        .collect();
    assert!(
        found == expected,
        "the table differs, what is there now is in {}:\n{changed:#?}",
        written.display()
    );
}
