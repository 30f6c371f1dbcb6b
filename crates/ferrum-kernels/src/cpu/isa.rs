//! The instruction-set level: found once at start, applied in one place.

#[cfg(target_arch = "aarch64")]
use super::simd::neon::Neon;
use super::simd::{ByteProducts, Simd, scalar::Scalar};
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2::Avx2, avx512::Avx512};
use ferrum_types::{Error, Result};

/// An instruction-set level that the kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI, which processors without AVX-512 may have.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// aarch64.
    Neon,
    /// aarch64 with dot products of bytes.
    NeonDot,
}

impl Isa {
    /// All levels, slowest first.
    pub const ALL: [Isa; 6] = [
        Isa::Scalar,
        Isa::Neon,
        Isa::NeonDot,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
    ];

    /// Name as shown in `ferrum devices`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dotprod",
        }
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => {
                Isa::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The fastest level of this CPU.
    pub fn best() -> Isa {
        let available = |isa: &&Isa| isa.is_available();
        *Isa::ALL
            .iter()
            .rev()
            .find(available)
            .unwrap_or(&Isa::Scalar)
    }
}

/// Work that is written once for every level.
pub(crate) trait Kernel {
    /// What [`run`](Self::run) returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`, as is all that they call with `s`, so
    /// that the code lands inside the function that enables the level's instructions.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// A [`Kernel`] that multiplies bytes. Some levels differ for these alone.
pub(crate) trait ByteKernel {
    /// What [`run`](Self::run) returns.
    type Output;

    /// As [`Kernel::run`].
    fn run<S: ByteProducts>(self, s: S) -> Self::Output;
}

/// An [`Isa`] that this CPU is known to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Isa);

impl Level {
    /// Checks that the CPU has `isa`.
    pub(crate) fn new(isa: Isa) -> Result<Self> {
        if isa.is_available() {
            return Ok(Self(isa));
        }
        Err(Error::NoDevice {
            backend: "cpu",
            reason: format!("this CPU has no {}", isa.name()),
            hint: format!("its best level is {}", Isa::best().name()),
        })
    }

    /// The fastest level of this CPU.
    pub(crate) fn best() -> Self {
        Self(Isa::best())
    }

    /// The level.
    pub(crate) fn isa(self) -> Isa {
        self.0
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Level::new` has checked that the CPU has the features that the function
            // enables, which are those the token stands for.
            Isa::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; the level has all features of AVX2.
            Isa::Avx2 | Isa::AvxVnni => unsafe { run_avx2(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above; the level has all features of NEON.
            Isa::Neon | Isa::NeonDot => unsafe { run_neon(kernel) },
            _ => kernel.run(Scalar),
        }
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub(crate) fn run_bytes<K: ByteKernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512 => unsafe { bytes_avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::AvxVnni => unsafe { bytes_avx_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx2 => unsafe { bytes_avx2(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::NeonDot => unsafe { bytes_neon_dot(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::Neon => unsafe { bytes_neon(kernel) },
            _ => kernel.run(Scalar),
        }
    }
}

/// Defines functions that run a kernel with the token `$token` in code that has `$features`.
macro_rules! levels {
    ($($arch:literal, $features:literal, $token:ty { $($kernel:ident: $name:ident,)* })*) => {
        $($(
            #[cfg(target_arch = $arch)]
            #[target_feature(enable = $features)]
            fn $name<K: $kernel>(kernel: K) -> K::Output {
                // SAFETY: this function is only entered on a CPU that has the features it enables.
                kernel.run(unsafe { <$token>::new() })
            }
        )*)*
    };
}
levels! {
    "x86_64", "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c", Avx512 {
        Kernel: run_avx512,
        ByteKernel: bytes_avx512,
    }
    "x86_64", "avxvnni,avx2,fma,f16c", Avx2<true> {
        ByteKernel: bytes_avx_vnni,
    }
    "x86_64", "avx2,fma,f16c", Avx2<false> {
        Kernel: run_avx2,
        ByteKernel: bytes_avx2,
    }
    "aarch64", "neon,dotprod", Neon<true> {
        ByteKernel: bytes_neon_dot,
    }
    "aarch64", "neon", Neon<false> {
        Kernel: run_neon,
        ByteKernel: bytes_neon,
    }
}
