//! Element types: of buffers ([`Dtype`]) and of dense weights in a file ([`SrcDtype`]).

use std::fmt;

/// The element type of a buffer or of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// 8-bit float, 4 exponent bits, no infinities (OCP FP8 "FN").
    F8E4M3,
    /// 8-bit float, 5 exponent bits.
    F8E5M2,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F16 | Dtype::BF16 | Dtype::I16 | Dtype::U16 => 2,
            Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::I8 | Dtype::U8 | Dtype::Bool => 1,
        }
    }

    /// The lower-case name used in messages and JSON (`f32`, `bf16`, …).
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::BF16 => "bf16",
            Dtype::F8E4M3 => "f8_e4m3",
            Dtype::F8E5M2 => "f8_e5m2",
            Dtype::I64 => "i64",
            Dtype::U64 => "u64",
            Dtype::I32 => "i32",
            Dtype::U32 => "u32",
            Dtype::I16 => "i16",
            Dtype::U16 => "u16",
            Dtype::I8 => "i8",
            Dtype::U8 => "u8",
            Dtype::Bool => "bool",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The dtypes a dense weight may have in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SrcDtype {
    /// IEEE 754 binary32, little-endian.
    F32,
    /// IEEE 754 binary16, little-endian.
    F16,
    /// bfloat16, little-endian.
    BF16,
}

impl SrcDtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        self.dtype().size()
    }

    /// The same type as a [`Dtype`].
    pub const fn dtype(self) -> Dtype {
        match self {
            SrcDtype::F32 => Dtype::F32,
            SrcDtype::F16 => Dtype::F16,
            SrcDtype::BF16 => Dtype::BF16,
        }
    }

    /// The dense weight dtype equal to `dtype`, if there is one.
    pub const fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(SrcDtype::F32),
            Dtype::F16 => Some(SrcDtype::F16),
            Dtype::BF16 => Some(SrcDtype::BF16),
            _ => None,
        }
    }
}

impl fmt::Display for SrcDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dtype().fmt(f)
    }
}
