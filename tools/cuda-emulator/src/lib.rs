//! Builds the stand-in CUDA driver of this folder and makes it this process's `libcuda`, `libnvrtc`, `libcublasLt` and
//! `libnccl`.
//!
//! The README says what it checks. A test calls [`load`] before the first call of CUDA; where there is no C++ compiler it
//! says so, and the test prints that it was skipped. An emulator that does not build is a panic: no test is skipped for that.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const SOURCES: [&str; 17] = [
    include_str!("../build.sh"),
    include_str!("../cpp/emulator.hpp"),
    include_str!("../cpp/memory.cpp"),
    include_str!("../cpp/fiber.hpp"),
    include_str!("../cpp/fiber.cpp"),
    include_str!("../cpp/workers.cpp"),
    include_str!("../cpp/seed.cpp"),
    include_str!("../cpp/execute.cpp"),
    include_str!("../cpp/driver.hpp"),
    include_str!("../cpp/driver.cpp"),
    include_str!("../cpp/streams.cpp"),
    include_str!("../cpp/allocations.cpp"),
    include_str!("../cpp/blas.cpp"),
    include_str!("../cpp/nccl.cpp"),
    include_str!("../cpp/nvrtc.cpp"),
    include_str!("../device/emulator.h"),
    include_str!("../device/intrinsics.cuh"),
];

/// The directory with `libcuda.so`, `libnvrtc.so`, `libcublasLt.so` and `libnccl.so.2`, built if need be: for the loader's
/// path of another process.
///
/// # Errors
/// A sentence on what this machine lacks: a system that the emulator is for, or a C++ compiler.
///
/// # Panics
/// Where there is a compiler and the build fails, with what the compiler said.
pub fn library_dir() -> Result<PathBuf, String> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    FOLDER.get_or_init(build).clone()
}

fn build() -> Result<PathBuf, String> {
    if !cfg!(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64")
    )) {
        return Err("the CUDA emulator is for Linux on x86-64 and AArch64".into());
    }
    // Kernels are compiled by it later, so it is needed where the libraries have been built before, too.
    find_compiler("c++")?;
    let mut hasher = DefaultHasher::new();
    SOURCES.hash(&mut hasher);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let all = here.join("../../target/cuda-emulator");
    let folder = all.join(format!("{:016x}", hasher.finish()));
    if folder.join("libnvrtc.so").exists() {
        return Ok(folder);
    }
    let beside = all.join(format!("build-{}", std::process::id()));
    run_script(&here.join("build.sh"), &beside);
    // Another process may have been faster; then its folder is the same.
    if fs::rename(&beside, &folder).is_err() {
        let _ = fs::remove_dir_all(&beside);
    }
    Ok(folder)
}

fn find_compiler(name: &str) -> Result<(), String> {
    match Command::new(name).arg("--version").output() {
        Ok(output) if output.status.success() => Ok(()),
        _ => Err(format!(
            "there is no C++ compiler ({name}), which builds the CUDA emulator"
        )),
    }
}

/// Runs `build.sh`, which makes the folder `into`. Panics where it fails.
fn run_script(script: &Path, into: &Path) {
    let output = Command::new("sh").arg(script).arg(into).output();
    let output = output.unwrap_or_else(|e| panic!("{}: {e}", script.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "the CUDA emulator does not build: {said}"
    );
}

/// The driver, NVRTC, cuBLASLt and NCCL of this process.
static LOADED: OnceLock<Result<[libloading::Library; 4], String>> = OnceLock::new();

/// Makes the emulator the CUDA driver of this process: whoever opens `libcuda.so` from here on gets it.
///
/// What is drawn begins anew from the seed, which is printed: a test that fails shows it, and with `CUDA_EMULATOR_SEED` set to it
/// and the test alone in its process, the orders are the same.
///
/// # Errors
/// Those of [`library_dir`].
///
/// # Panics
/// Where [`library_dir`] does, or what was built cannot be loaded.
pub fn load() -> Result<(), String> {
    let loaded = LOADED.get_or_init(|| {
        let folder = library_dir()?;
        let open = |name: &str| {
            // SAFETY: the library was built from this folder; its initialisers only register its own state.
            let library = unsafe { libloading::Library::new(folder.join(name)) };
            library.unwrap_or_else(|e| panic!("{name} of the CUDA emulator cannot be loaded: {e}"))
        };
        Ok([
            "libcuda.so",
            "libnvrtc.so",
            "libcublasLt.so",
            "libnccl.so.2",
        ]
        .map(open))
    });
    loaded.as_ref().map_err(Clone::clone)?;
    println!(
        "CUDA_EMULATOR_SEED={}",
        count(0, b"emulator_restart_draws\0")
    );
    Ok(())
}

/// [`load`], and as many devices from here on.
///
/// # Errors
/// Those of [`load`].
pub fn load_devices(count: i32) -> Result<(), String> {
    load()?;
    set(0, b"emulator_set_devices\0", count);
    Ok(())
}

/// Whether the communicators of this process say from here on that a rank was lost.
pub fn lose_rank(lost: bool) {
    set(3, b"emulator_lose_rank\0", i32::from(lost));
}

/// Gives a number to one of the libraries, where they are loaded.
fn set(library: usize, name: &[u8], value: i32) {
    if let Some(Ok(libraries)) = LOADED.get() {
        // SAFETY: in `cpp/`, the functions with these names take an `int` and return nothing.
        unsafe { symbol::<unsafe extern "C" fn(i32)>(&libraries[library], name)(value) };
    }
}

/// A function of one of the libraries.
///
/// # Safety
/// It has the type `F` in `cpp/`.
unsafe fn symbol<'a, F>(
    library: &'a libloading::Library,
    name: &[u8],
) -> libloading::Symbol<'a, F> {
    // SAFETY: the caller's.
    unsafe { library.get(name) }.expect("the emulator has the functions that this file names")
}

/// Clears an error of a kernel, which every later call would return. The work that was queued is gone.
pub fn clear_error() {
    if let Some(Ok(libraries)) = LOADED.get() {
        // SAFETY: in `cpp/driver.cpp`, it takes and returns nothing.
        unsafe { symbol::<unsafe extern "C" fn()>(&libraries[0], b"emulator_reset\0")() };
    }
}

/// Makes the device one of this compute capability, for those that open it from here on; it begins as 9.0.
pub fn set_capability((major, minor): (i32, i32)) {
    set(0, b"emulator_set_capability\0", 10 * major + minor);
}

/// Bytes of shared memory that a block may ask for, before devices are opened; it begins as 227 KiB.
pub fn set_block_shared(bytes: i32) {
    set(0, b"emulator_set_block_shared\0", bytes);
}

/// Whether blocks of a kernel run beside each other from here on, or one after the other: then what one does before another is the
/// seed's choice, and not the clock's.
pub fn run_blocks_together(together: bool) {
    set(
        0,
        b"emulator_set_workers\0",
        if together { i32::MAX } else { 1 },
    );
}

/// How many matrix products (GEMM) cuBLASLt has computed in this process.
pub fn gemm_calls() -> u64 {
    count(2, b"emulator_products\0")
}

/// How often captured work was replayed in this process.
pub fn graph_replays() -> u64 {
    count(0, b"emulator_replays\0")
}

/// How many calls of this process have blocked the host until work of the device had ended, or may do so on a card by CUDA's
/// documentation: waits for a context, a stream or an event, copies from and to pageable memory, allocations and frees
/// outside of pools (of pinned memory, too), and modules that are loaded or unloaded. Queries of events, and what is allocated
/// from pools, are none of them.
pub fn host_syncs() -> u64 {
    count(0, b"emulator_host_syncs\0")
}

/// Bytes of pinned memory of the host that this process has.
pub fn pinned_bytes() -> u64 {
    count(0, b"emulator_pinned\0")
}

/// How many reductions and gathers of NCCL ranks of this process have taken part in.
pub fn nccl_collectives() -> (u64, u64) {
    let (reductions, gathers) = (b"emulator_reductions\0", b"emulator_gathers\0");
    (count(3, reductions), count(3, gathers))
}

/// What one of the loaded libraries has counted; 0 before it is loaded.
fn count(library: usize, name: &[u8]) -> u64 {
    let Some(Ok(libraries)) = LOADED.get() else {
        return 0;
    };
    // SAFETY: in `cpp/`, the functions with these names take nothing and return `uint64_t`.
    unsafe { symbol::<unsafe extern "C" fn() -> u64>(&libraries[library], name)() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that were missing in the hash could change, and the libraries of before would be taken.
    #[test]
    fn all_sources_are_hashed() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let files = |folder: &str| fs::read_dir(here.join(folder)).unwrap().count();
        assert_eq!(SOURCES.len(), 1 + files("cpp") + files("device"));
    }

    #[test]
    fn a_machine_without_a_compiler_says_so() {
        let reason = find_compiler("no-such-compiler").unwrap_err();
        assert!(reason.contains("no C++ compiler"), "{reason}");
    }

    #[test]
    #[should_panic(expected = "does not build: no such type")]
    fn a_build_that_fails_is_no_reason_to_skip_a_test() {
        let script = std::env::temp_dir().join(format!("broken-build-{}.sh", std::process::id()));
        fs::write(&script, "echo no such type >&2; rm \"$0\"; exit 1").unwrap();
        run_script(&script, Path::new("nowhere"));
    }
}
