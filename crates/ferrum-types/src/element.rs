//! What a typed buffer may hold.

use crate::Dtype;
use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// A plain-old-data element of a device buffer.
///
/// Sealed: a backend may rely on the full list (`f32`, `f16`, `bf16`, `i32`, `u32`, `i8`, `u8`).
pub trait Element:
    bytemuck::Pod + PartialEq + Send + Sync + std::fmt::Debug + sealed::Sealed
{
    /// The run-time tag of this element.
    const DTYPE: Dtype;
}

/// An element that stands for a real number.
pub trait FloatElement: Element {
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
    /// Exact.
    fn to_f32(self) -> f32;
}

macro_rules! element {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: Dtype = Dtype::$d;
        }
    )*};
}
element!(f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, u32 => U32, i8 => I8, u8 => U8);

impl FloatElement for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl FloatElement for f16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

impl FloatElement for bf16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}
