//! The instruction-set level: found once at start, applied in one place.

#[cfg(target_arch = "aarch64")]
use super::simd::neon::Neon;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use super::simd::scalar::Scalar as Base;
#[cfg(target_arch = "x86_64")]
use super::simd::sse2::Sse2 as Base;
use super::simd::{ByteProducts, Simd};
#[cfg(target_arch = "x86_64")]
use super::simd::{amx, avx2::Avx2, avx512::Avx512};
use ferrum_types::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// An instruction-set level that the kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, where there is no other.
    Scalar,
    /// Any x86-64.
    Sse2,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI, which processors without AVX-512 may have.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// The same with dot products of bf16.
    Avx512Bf16,
    /// The same with AMX: products of tiles of bf16.
    Amx,
    /// The same, with numbers of f32 split in two of bf16, so that their products are of tiles, too.
    AmxF32,
    /// aarch64.
    Neon,
    /// aarch64 with dot products of bytes.
    NeonDot,
}

impl Isa {
    /// All levels, slowest first.
    pub const ALL: [Isa; 10] = [
        Isa::Scalar,
        Isa::Sse2,
        Isa::Neon,
        Isa::NeonDot,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Avx512Bf16,
        Isa::Amx,
        Isa::AmxF32,
    ];

    /// The level that every CPU of this architecture has.
    pub const BASE: Isa = match () {
        () if cfg!(target_arch = "x86_64") => Isa::Sse2,
        () if cfg!(target_arch = "aarch64") => Isa::Neon,
        () => Isa::Scalar,
    };

    /// Name as shown in `ferrum devices`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Sse2 => "sse2",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx",
            Isa::AmxF32 => "amx-f32",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dotprod",
        }
    }

    /// Whether this CPU has it, and the system lets this process use it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar | Isa::Sse2 | Isa::Neon if self == Isa::BASE => true,
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
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::AmxF32 => Isa::Avx512Bf16.is_available() && amx::is_available(),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Whether products with weights of bf16 round activations to bf16; in tiles of AMX, they are summed in another order. All
    /// else but what a level [splits](Self::splits_f32) is the same at every level, to the bit.
    pub const fn rounds_bf16(self) -> bool {
        matches!(self, Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32)
    }

    /// The level for encoders on a processor of this one: that which splits numbers of f32, where there are tiles.
    pub const fn for_encoders(self) -> Self {
        match self {
            Isa::Amx => Isa::AmxF32,
            other => other,
        }
    }

    /// Whether products are made in tiles of AMX.
    const fn has_tiles(self) -> bool {
        matches!(self, Isa::Amx | Isa::AmxF32)
    }

    /// Whether products with weights of f32 split their numbers into two of bf16, so that they differ from those of other
    /// levels by about 2^-17.
    pub const fn splits_f32(self) -> bool {
        matches!(self, Isa::AmxF32)
    }

    /// The fastest level of this CPU, but for one that [splits](Self::splits_f32) numbers, which is less exact.
    pub fn best() -> Isa {
        Self::fastest(|isa| isa.is_available() && !isa.splits_f32())
    }

    /// The fastest level of this CPU that neither [rounds](Self::rounds_bf16) nor [splits](Self::splits_f32) anything.
    pub fn best_exact() -> Isa {
        Self::fastest(|isa| isa.is_available() && !isa.rounds_bf16() && !isa.splits_f32())
    }

    fn fastest(wanted: impl Fn(Isa) -> bool) -> Isa {
        let mut levels = Isa::ALL.into_iter().rev();
        levels.find(|isa| wanted(*isa)).unwrap_or(Isa::BASE)
    }
}

/// Functions of a trait of kernels, each named `$name`: the kernel in code for a level.
///
/// They are the trait's, not this module's, to shorten the build: the compiler cuts a crate into units by module, and a
/// trait's function is in the module of the type that has the trait. As functions of this module, nearly all code of the
/// crate was one unit, which one thread compiled. None may be inlined into [`Level::run`], which is of this module.
macro_rules! levels {
    ($($name:ident: $level:tt;)*) => {
        $(levels!(@ $name, $level);)*
    };
    (@ $name:ident, base) => {
        /// In code for any CPU of this architecture.
        #[doc(hidden)]
        #[inline(never)]
        fn $name(self) -> Self::Output {
            #[cfg(target_arch = "aarch64")]
            // SAFETY: every aarch64 processor that the standard library runs on has NEON.
            return self.run(unsafe { Neon::<false>::new() });
            #[cfg(not(target_arch = "aarch64"))]
            self.run(Base)
        }
    };
    (@ $name:ident, avx2) => {
        levels!(@ $name, "x86_64", "avx2,fma,f16c", Avx2<false>);
    };
    (@ $name:ident, avx_vnni) => {
        levels!(@ $name, "x86_64", "avxvnni,avx2,fma,f16c", Avx2<true>);
    };
    (@ $name:ident, avx512) => {
        levels!(@ $name, "x86_64", "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c", Avx512<false>);
    };
    (@ $name:ident, avx512_bf16) => {
        levels!(@ $name, "x86_64", "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c", Avx512<true>);
    };
    (@ $name:ident, neon_dot) => {
        levels!(@ $name, "aarch64", "neon,dotprod", Neon<true>);
    };
    (@ $name:ident, $arch:literal, $features:literal, $token:ty) => {
        /// In code for a level.
        ///
        /// # Safety
        /// The CPU has the level's features.
        #[doc(hidden)]
        #[cfg(target_arch = $arch)]
        #[target_feature(enable = $features)]
        unsafe fn $name(self) -> Self::Output {
            // SAFETY: the caller's contract: the token stands for features that the CPU has.
            self.run(unsafe { <$token>::new() })
        }
    };
}

/// Work that is written once for every level.
pub trait Kernel: Sized {
    /// What [`run`](Self::run) returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`, as is all that they call with `s`, so
    /// that the code lands inside the function that enables the level's instructions.
    fn run<S: Simd>(self, s: S) -> Self::Output;

    levels! {
        run_base: base;
        run_avx2: avx2;
        run_avx512: avx512;
        run_avx512_bf16: avx512_bf16;
    }
}

/// A [`Kernel`] that multiplies bytes. Some levels differ for these alone.
pub trait ByteKernel: Sized {
    /// What [`run`](Self::run) returns.
    type Output;

    /// As [`Kernel::run`].
    fn run<S: ByteProducts>(self, s: S) -> Self::Output;

    levels! {
        bytes_base: base;
        bytes_avx2: avx2;
        bytes_avx_vnni: avx_vnni;
        bytes_avx512: avx512;
        bytes_neon_dot: neon_dot;
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    /// The level of a [`name`](Self::name).
    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let found = Isa::ALL.into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| format!("expected one of {}", Isa::ALL.map(Isa::name).join(", ")))
    }
}

/// An [`Isa`] that this CPU is known to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    isa: Isa,
    /// Whether products with weights of bf16 are [dot products](Level::run_bf16).
    bf16: bool,
}

impl Level {
    /// Checks that the CPU has `isa`.
    ///
    /// # Errors
    /// [`NoDevice`](Error::NoDevice) when it has not.
    pub fn new(isa: Isa) -> Result<Self> {
        if isa.is_available() {
            return Ok(Self::of(isa));
        }
        Err(Error::NoDevice {
            backend: "cpu",
            reason: format!("this CPU has no {}", isa.name()),
            hint: format!("its best level is {}", Isa::best().name()),
        })
    }

    /// The fastest level of this CPU.
    pub fn best() -> Self {
        Self::of(Isa::best())
    }

    fn of(isa: Isa) -> Self {
        Self {
            isa,
            bf16: isa.rounds_bf16(),
        }
    }

    /// The least level, with dot products of bf16 in plain Rust: the reference of other levels with such.
    pub fn base_bf16() -> Self {
        Self {
            isa: Isa::BASE,
            bf16: true,
        }
    }

    /// The level.
    #[inline]
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Level::new` has checked that the CPU has the features that the function
            // enables, which are those the token stands for.
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32 => unsafe {
                kernel.run_avx512()
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; the level has all features of AVX2.
            Isa::Avx2 | Isa::AvxVnni => unsafe { kernel.run_avx2() },
            _ => kernel.run_base(),
        }
    }

    /// Whether products with weights of bf16 are [`run_bf16`](Self::run_bf16).
    #[inline]
    pub fn has_bf16(self) -> bool {
        self.bf16
    }

    /// Whether products with weights of bf16 are made in tiles of AMX.
    #[inline]
    pub fn has_tiles(self) -> bool {
        self.isa.has_tiles()
    }

    /// Whether products of f32 are, too, of [split](Isa::splits_f32) numbers.
    #[inline]
    pub fn splits_f32(self) -> bool {
        self.isa.splits_f32()
    }

    /// Runs `kernel`, which makes dot products of bf16: at other levels than those that
    /// [have them](Self::has_bf16) in plain Rust.
    #[inline]
    pub fn run_bf16<K: Kernel>(self, kernel: K) -> K::Output {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32 => unsafe { kernel.run_avx512_bf16() },
            _ => kernel.run_base(),
        }
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub fn run_bytes<K: ByteKernel>(self, kernel: K) -> K::Output {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32 => unsafe {
                kernel.bytes_avx512()
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::AvxVnni => unsafe { kernel.bytes_avx_vnni() },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx2 => unsafe { kernel.bytes_avx2() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::NeonDot => unsafe { kernel.bytes_neon_dot() },
            _ => kernel.bytes_base(),
        }
    }
}
