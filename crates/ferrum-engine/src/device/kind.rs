//! Kinds of backends, and elements of KV caches and activations, by name.

use ferrum_models::Model;
use std::fmt;
use std::str::FromStr;

/// A value of `--backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// The fastest device that computes the model as it is, with room for it.
    #[default]
    Auto,
    /// Threads and SIMD.
    Cpu,
    /// Any GPU, by whichever interface this system has.
    Gpu,
    /// NVIDIA.
    Cuda,
    /// Apple.
    Metal,
    /// Any GPU with a Vulkan driver, also a software one.
    Vulkan,
    /// Plain loops; slow, and the meaning of every op.
    Reference,
}

impl BackendKind {
    /// Every kind with its name.
    pub const NAMES: &'static [(&'static str, BackendKind)] = &[
        ("auto", BackendKind::Auto),
        ("cpu", BackendKind::Cpu),
        ("gpu", BackendKind::Gpu),
        ("cuda", BackendKind::Cuda),
        ("metal", BackendKind::Metal),
        ("vulkan", BackendKind::Vulkan),
        ("reference", BackendKind::Reference),
    ];

    /// Names of the backends that this program was compiled with.
    pub fn compiled() -> Vec<&'static str> {
        // wgpu has Metal on Apple's systems and Vulkan on all others.
        let gpu = match cfg!(target_vendor = "apple") {
            true => Self::Metal,
            false => Self::Vulkan,
        };
        let all = [
            (Self::Cpu, true),
            (Self::Cuda, cfg!(feature = "cuda")),
            (gpu, cfg!(feature = "gpu")),
            (Self::Reference, true),
        ];
        let compiled = all.into_iter().filter(|(_, compiled)| *compiled);
        compiled.map(|(kind, _)| kind.name()).collect()
    }

    /// Its name, which is also that of its backend, if it is the kind of one.
    pub(crate) fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }
}

impl FromStr for BackendKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        find_name("backend", Self::NAMES, s)
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A value of `--kv-dtype`: the element of KV caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    /// binary32.
    F32,
    /// binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3.
    Fp8,
    /// INT8 with scales.
    Int8,
}

impl KvDtype {
    /// Every element with its name.
    pub const NAMES: &'static [(&'static str, KvDtype)] = &[
        ("f32", KvDtype::F32),
        ("f16", KvDtype::F16),
        ("bf16", KvDtype::Bf16),
        ("fp8", KvDtype::Fp8),
        ("int8", KvDtype::Int8),
    ];

    /// The default for a model: f32 for an f32 model, so that nothing is rounded; else f16.
    pub fn for_model(model: &Model) -> Self {
        if model.is_f32() {
            KvDtype::F32
        } else {
            KvDtype::F16
        }
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        find_name("KV dtype", Self::NAMES, s)
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(name_of(Self::NAMES, *self))
    }
}

/// A value of `--activations`: the element of activations on CUDA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// bfloat16: the range of f32.
    #[default]
    Bf16,
    /// binary16: three bits more, and infinite from 65520 on.
    F16,
}

impl Activations {
    /// Every element with its name.
    pub const NAMES: &'static [(&'static str, Activations)] =
        &[("bf16", Activations::Bf16), ("f16", Activations::F16)];
}

impl FromStr for Activations {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        find_name("activations", Self::NAMES, s)
    }
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(name_of(Self::NAMES, *self))
    }
}

fn find_name<T: Copy>(what: &str, names: &[(&str, T)], s: &str) -> Result<T, String> {
    match names.iter().find(|(name, _)| name.eq_ignore_ascii_case(s)) {
        Some((_, value)) => Ok(*value),
        None => {
            let known: Vec<_> = names.iter().map(|(name, _)| *name).collect();
            Err(format!(
                "unknown {what} \"{s}\", expected one of: {}",
                known.join(", ")
            ))
        }
    }
}

fn name_of<T: Copy + PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    names
        .iter()
        .find(|(_, v)| *v == value)
        .map_or("?", |(name, _)| *name)
}
