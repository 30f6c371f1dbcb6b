//! The instruction-set level: found once at start, applied in one place.

use super::simd::{Simd, scalar::Scalar};
use ferrum_types::{Error, Result};

/// An instruction-set level that the kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// aarch64.
    Neon,
}

impl Isa {
    /// All levels, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];

    /// Name as shown in `ferrum devices`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
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
            // SAFETY: as above.
            Isa::Avx2 => unsafe { run_avx2(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Isa::Neon => unsafe { run_neon(kernel) },
            _ => kernel.run(Scalar),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function is only entered on a CPU that has the features it enables.
    kernel.run(unsafe { super::simd::avx512::Avx512::new() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function is only entered on a CPU that has the features it enables.
    kernel.run(unsafe { super::simd::avx2::Avx2::new() })
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function is only entered on a CPU that has the features it enables.
    kernel.run(unsafe { super::simd::neon::Neon::new() })
}
