//! Kernels: CUDA C++ texts of this program, compiled by NVRTC for the architecture that is there.
//!
//! What was compiled is kept in a folder of the user's cache, by the hash of all texts and options, the architecture and
//! NVRTC's version. Files appear there whole (written beside, then renamed); one that is damaged is compiled anew.

use super::driver::{Driver, Function, Module};
use super::error::{failure, no_device};
use super::sync::lock;
use cudarc::nvrtc::sys as nvrtc;
use ferrum_types::{Error, Result};
use std::ffi::{CStr, CString};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

const OP: &str = "load_kernels";

/// A file of kernels.
pub(super) struct Source {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
    needed: Needed,
}

/// Who needs a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needed {
    /// Every model.
    Always,
    /// Nearly every model with activations of 16 bits: attention with the cache that is the default.
    Half,
    /// Who asks for a kernel of it.
    Asked,
}

/// A file that others include.
pub(super) struct Header {
    name: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($module:ident => $file:literal, $needed:ident;)*) => {
        /// Which file a kernel is in.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum KernelFile {
            $(#[doc = $file] $module,)*
        }
        /// All there are.
        static FILES: &[KernelFile] = &[$(KernelFile::$module,)*];

        /// All files, in the order of [`KernelFile`].
        pub(super) static SOURCES: &[Source] = &[
            $(Source {
                name: $file,
                text: include_str!(concat!("kernels/", $file)),
                needed: Needed::$needed,
            },)*
        ];
    };
}
sources! {
    Elementwise => "elementwise.cu", Always;
    Norm => "norm.cu", Always;
    Rows => "rows.cu", Always;
    Gemm => "gemm.cu", Always;
    Heads => "heads.cu", Always;
    Conv => "conv.cu", Asked;
    Linear => "linear.cu", Asked;
    Attention => "attention.cu", Always;
    FlashF32 => "flash_f32.cu", Asked;
    FlashWideF32 => "flash_wide_f32.cu", Asked;
    Flash512F32 => "flash_512_f32.cu", Asked;
    FlashF16 => "flash_f16.cu", Half;
    FlashWideF16 => "flash_wide_f16.cu", Asked;
    Flash512F16 => "flash_512_f16.cu", Asked;
    FlashBf16 => "flash_bf16.cu", Asked;
    FlashWideBf16 => "flash_wide_bf16.cu", Asked;
    Flash512Bf16 => "flash_512_bf16.cu", Asked;
    FlashFp8 => "flash_fp8.cu", Asked;
    FlashWideFp8 => "flash_wide_fp8.cu", Asked;
    Flash512Fp8 => "flash_512_fp8.cu", Asked;
    FlashInt8 => "flash_int8.cu", Asked;
    FlashWideInt8 => "flash_wide_int8.cu", Asked;
    Flash512Int8 => "flash_512_int8.cu", Asked;
    FlashGroupF16 => "flash_group_f16.cu", Asked;
    FlashGroupBf16 => "flash_group_bf16.cu", Asked;
    FlashDecodeF16 => "flash_decode_f16.cu", Half;
    FlashDecodeBf16 => "flash_decode_bf16.cu", Asked;
    FlashCombine => "flash_combine.cu", Half;
    Kv => "kv.cu", Always;
    Gemv => "gemv.cu", Always;
    TileHalf => "tile_half.cu", Always;
    TilePacked => "tile_packed.cu", Asked;
    TileFloat8 => "tile_float8.cu", Asked;
    TileE4m3 => "tile_e4m3.cu", Asked;
    Float8 => "float8.cu", Asked;
    Quant => "quant.cu", Asked;
    QuantGemv => "quant_gemv.cu", Asked;
    QuantGemvGated => "quant_gemv_gated.cu", Asked;
    QuantPairs => "quant_pairs.cu", Asked;
    QuantGroups => "quant_groups.cu", Asked;
    QuantDown => "quant_down.cu", Asked;
    Moe => "moe.cu", Asked;
    Sample => "sample.cu", Always;
    Collective => "collective.cu", Asked;
}

macro_rules! headers {
    ($($file:literal,)*) => {
        /// What sources include.
        pub(super) static HEADERS: &[Header] = &[
            $(Header { name: $file, text: include_str!(concat!("kernels/", $file)) },)*
        ];
    };
}
headers! {
    "common.cuh",
    "intrinsics.cuh",
    "flash.cuh",
    "flash_decode.cuh",
    "flash_group.cuh",
    "flash_rows.cuh",
    "float8.cuh",
    "packed.cuh",
    "quant_gemv.cuh",
    "quant_pairs.cuh",
    "tile.cuh",
}

/// The options of a compilation.
fn options(architecture: &str, defines: &[&str]) -> Vec<String> {
    let own = [
        format!("--gpu-architecture=sm_{architecture}"),
        "--std=c++17".to_owned(),
    ];
    let defines = defines.iter().map(|&define| define.to_owned());
    own.into_iter().chain(defines).collect()
}

/// The name of what a device of this compute capability runs: features of one architecture alone have an `a`.
pub(super) fn architecture((major, minor): (i32, i32)) -> String {
    let own = if major >= 9 { "a" } else { "" };
    format!("{major}{minor}{own}")
}

/// NVRTC's version, which also shows that it is there.
fn version() -> Result<(i32, i32)> {
    // SAFETY: opens libraries by their names, whose initialisers are NVRTC's.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(no_device(
            "NVRTC (libnvrtc), which compiles the kernels, was not found",
            "install the CUDA toolkit, or the Python package nvidia-cuda-nvrtc with its folder on the loader's path",
        ));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there; both outlive the call.
    unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    Ok((major, minor))
}

/// The kernels of a device, in machine code. A file is loaded when a kernel of it is first asked for, or before that, beside others,
/// where it is known that one will be: compiling takes seconds, and one file after the other those of all.
pub(super) struct Modules {
    files: Arc<Files>,
    /// Threads that load files.
    loading: Mutex<Vec<JoinHandle<()>>>,
}

/// All files for a device.
struct Files {
    driver: Arc<Driver>,
    target: Target,
    /// In the order of [`SOURCES`].
    loaded: Vec<Loaded>,
}

/// A file, once it is needed.
#[derive(Default)]
struct Loaded {
    /// Whether a thread was begun for it.
    is_prepared: AtomicBool,
    /// A caller that needs what another one is loading waits for it.
    module: Mutex<Option<Module>>,
}

/// What machine code is made for.
struct Target {
    architecture: String,
    defines: &'static [&'static str],
    nvrtc: (i32, i32),
    cache: Option<PathBuf>,
}

impl Modules {
    /// Begins to load the files that nearly every model needs.
    ///
    /// # Errors
    /// Where NVRTC is not there, or does not compile for this device. Only the shortest file is waited for; where it fails, all that were
    /// begun.
    pub(super) fn open(
        driver: &Arc<Driver>,
        capability: (i32, i32),
        defines: &'static [&'static str],
    ) -> Result<Self> {
        let target = Target {
            architecture: architecture(capability),
            defines,
            nvrtc: version()?,
            cache: cache_folder(),
        };
        let modules = Self {
            files: Arc::new(Files {
                driver: Arc::clone(driver),
                target,
                loaded: SOURCES.iter().map(|_| Loaded::default()).collect(),
            }),
            loading: Mutex::default(),
        };
        let half = !defines.is_empty();
        let is_needed = |file: &KernelFile| match SOURCES[*file as usize].needed {
            Needed::Always => true,
            Needed::Half => half,
            Needed::Asked => false,
        };
        let needed: Vec<_> = FILES.iter().copied().filter(is_needed).collect();
        modules.prepare(&needed);
        modules.files.with(KernelFile::Heads, |_| Ok(()))?;
        Ok(modules)
    }

    /// The compiler's version.
    pub(super) fn nvrtc(&self) -> (i32, i32) {
        self.files.target.nvrtc
    }

    /// Begins to load files of which kernels will be asked for, each on a thread of its own. What fails is said to whoever asks.
    pub(super) fn prepare(&self, files: &[KernelFile]) {
        let mut loading = lock(&self.loading);
        for &file in files {
            let of = &self.files.loaded[file as usize];
            if of.is_prepared.swap(true, Ordering::Relaxed) {
                continue;
            }
            let files = Arc::clone(&self.files);
            let load = move || drop(files.with(file, |_| Ok(())));
            // Without a thread, the file is loaded when it is asked for.
            loading.extend(thread::Builder::new().spawn(load));
        }
    }

    /// A kernel by its name; the first one of a file loads it.
    pub(super) fn function(&self, file: KernelFile, name: &str) -> Result<Function> {
        self.files.with(file, |module| module.function(name))
    }
}

/// A compiler that still runs when the process ends would find its library's memory gone.
impl Drop for Modules {
    fn drop(&mut self) {
        for thread in lock(&self.loading).drain(..) {
            // What a panic was about, the next that needs the file meets as well.
            let _ = thread.join();
        }
    }
}

impl Files {
    /// Calls `with` on a file, which is loaded if it is not yet.
    fn with<T>(&self, file: KernelFile, with: impl FnOnce(&Module) -> Result<T>) -> Result<T> {
        let mut module = lock(&self.loaded[file as usize].module);
        let module = match &mut *module {
            Some(module) => module,
            none => none.insert(self.target.load(&self.driver, &SOURCES[file as usize])?),
        };
        with(module)
    }
}

impl Target {
    /// A file from the cache, or compiled and kept there.
    fn load(&self, driver: &Arc<Driver>, source: &Source) -> Result<Module> {
        let name = || file_name(source, &self.architecture, self.defines, self.nvrtc);
        let path = self.cache.as_ref().map(|folder| folder.join(name()));
        let kept = path.as_ref().and_then(|path| read_kept(path));
        if let Some(module) = kept.and_then(|cubin| Module::load(driver, &cubin).ok()) {
            return Ok(module);
        }
        let cubin = compile(source, &self.architecture, self.defines)?;
        let module = Module::load(driver, &cubin).map_err(|e| self.refused(e))?;
        if let Some(path) = path {
            keep(&path, &cubin);
        }
        Ok(module)
    }

    /// Why the driver does not take what was compiled.
    fn refused(&self, error: Error) -> Error {
        let (compiler, driver) = (self.nvrtc, Driver::version());
        match compiler.0 > driver.0 {
            true => no_device(
                format!(
                    "NVRTC {}.{} is newer than the driver, which is for CUDA {}.{} and does not take its kernels ({error})",
                    compiler.0, compiler.1, driver.0, driver.1
                ),
                "install NVRTC of the driver's version, or a newer driver",
            ),
            false => error,
        }
    }
}

/// The user's folder for what can be made again.
fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let home = match set("XDG_CACHE_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(set("HOME").or_else(|| set("LOCALAPPDATA"))?).join(".cache"),
    };
    Some(home.join("ferrum").join("cuda-kernels"))
}

/// A name that another text, option, architecture or compiler does not have.
fn file_name(
    source: &Source,
    architecture: &str,
    defines: &[&str],
    (major, minor): (i32, i32),
) -> String {
    let mut hasher = DefaultHasher::new();
    let headers = HEADERS.iter().map(|header| header.text);
    headers
        .chain([source.text])
        .for_each(|text| text.hash(&mut hasher));
    options(architecture, defines).hash(&mut hasher);
    let hash = hasher.finish();
    let name = source.name.trim_end_matches(".cu");
    format!("{name}-sm_{architecture}-nvrtc{major}.{minor}-{hash:016x}")
}

/// A kept file without the hash at its end; none where that is another.
fn read_kept(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let end = bytes.len().checked_sub(8)?;
    let hash = hash_of(path, &bytes[..end]).to_le_bytes();
    (bytes[end..] == hash).then(|| {
        bytes.truncate(end);
        bytes
    })
}

/// Of what a file is called and has: the name says what it was compiled from.
fn hash_of(path: &Path, bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.file_name().hash(&mut hasher);
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Keeps a file for the next start. Where that is not possible, it is compiled again then.
fn keep(path: &Path, cubin: &[u8]) {
    // Two devices of a process may compile the same file.
    static KEPT: AtomicUsize = AtomicUsize::new(0);
    let whole = [cubin, &hash_of(path, cubin).to_le_bytes()].concat();
    let number = KEPT.fetch_add(1, Ordering::Relaxed);
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}-{number}.tmp", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = path
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&beside, whole))
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
}

/// A program of NVRTC's, destroyed with this.
struct Program(nvrtc::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `nvrtcCreateProgram`, destroyed once.
        unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|e| failure(OP, e.to_string()))
}

/// Machine code of a source for an architecture such as `90a`.
fn compile(source: &Source, architecture: &str, defines: &[&str]) -> Result<Vec<u8>> {
    let check = |code: nvrtc::nvrtcResult| match code {
        nvrtc::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        code => Err(nvrtc_failure(source, code)),
    };
    let (body, name) = (text(source.text)?, text(source.name)?);
    let headers = HEADERS.iter().map(|header| text(header.text));
    let names = HEADERS.iter().map(|header| text(header.name));
    let (headers, names) = (
        headers.collect::<Result<Vec<_>>>()?,
        names.collect::<Result<Vec<_>>>()?,
    );
    let pointers = |texts: &[CString]| texts.iter().map(|t| t.as_ptr()).collect::<Vec<_>>();
    let (header_texts, header_names) = (pointers(&headers), pointers(&names));
    let options = options(architecture, defines);
    let options = options
        .iter()
        .map(|o| text(o))
        .collect::<Result<Vec<_>>>()?;
    let option_texts = pointers(&options);
    let mut program = null_mut();
    // SAFETY: all texts end with zero and outlive the calls; sizes are those that NVRTC says.
    unsafe {
        check(nvrtc::nvrtcCreateProgram(
            &mut program,
            body.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            header_texts.as_ptr(),
            header_names.as_ptr(),
        ))?;
        let program = Program(program);
        let count = option_texts.len() as i32;
        let done = nvrtc::nvrtcCompileProgram(program.0, count, option_texts.as_ptr());
        match done {
            nvrtc::nvrtcResult::NVRTC_SUCCESS => {}
            nvrtc::nvrtcResult::NVRTC_ERROR_INVALID_OPTION => {
                return Err(no_device(
                    format!("NVRTC does not compile for sm_{architecture}, which is newer than it"),
                    "install a newer NVRTC (the CUDA toolkit, or the Python package nvidia-cuda-nvrtc)",
                ));
            }
            _ => return Err(log_of(source, &program)),
        }
        let mut size = 0;
        check(nvrtc::nvrtcGetCUBINSize(program.0, &mut size))?;
        let mut cubin = vec![0u8; size];
        check(nvrtc::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()))?;
        Ok(cubin)
    }
}

fn nvrtc_failure(source: &Source, code: nvrtc::nvrtcResult) -> Error {
    // SAFETY: NVRTC gives a text of its own that ends with zero.
    let words = unsafe { CStr::from_ptr(nvrtc::nvrtcGetErrorString(code)) };
    failure(OP, format!("{}: {}", source.name, words.to_string_lossy()))
}

/// What the compiler said.
fn log_of(source: &Source, program: &Program) -> Error {
    let mut size = 0;
    // SAFETY: the program is held; the log has as many bytes as NVRTC says.
    let log = unsafe {
        nvrtc::nvrtcGetProgramLogSize(program.0, &mut size);
        let mut log = vec![0u8; size];
        nvrtc::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast());
        log
    };
    let log = String::from_utf8_lossy(&log);
    let log = log.trim_end_matches('\0').trim();
    failure(OP, format!("{} does not compile: {log}", source.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_their_names() {
        let all = [
            ((8, 0), "80"),
            ((8, 9), "89"),
            ((9, 0), "90a"),
            ((12, 0), "120a"),
        ];
        for (capability, name) in all {
            assert_eq!(architecture(capability), name);
        }
    }

    #[test]
    fn a_damaged_file_is_not_taken() {
        let folder = std::env::temp_dir().join(format!("ferrum-kernels-{}", std::process::id()));
        let path = folder.join("kernel");
        keep(&path, b"machine code");
        assert_eq!(read_kept(&path).as_deref(), Some(&b"machine code"[..]));
        fs::write(&path, b"machine bode12345678").unwrap();
        assert_eq!(read_kept(&path), None);
        fs::write(&path, b"short").unwrap();
        assert_eq!(read_kept(&path), None);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn names_tell_compilers_architectures_and_elements_apart() {
        let name = |arch, defines: &[&str], version| file_name(&SOURCES[0], arch, defines, version);
        let names = [
            name("80", &[], (13, 0)),
            name("90a", &[], (13, 0)),
            name("80", &[], (12, 8)),
            name("80", &["-DACT_BF16"], (13, 0)),
        ];
        let others = &names[1..];
        assert!(others.iter().all(|other| *other != names[0]), "{names:?}");
    }
}
