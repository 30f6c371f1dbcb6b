//! Metadata values: the thirteen types, borrowed views of them, and how they are encoded.
//!
//! Views decode on demand from the mapped file, so a vocabulary of 150 000 strings costs nothing
//! until it is read.

use std::fmt;

/// Deepest nesting of arrays that is read. Real files do not nest at all.
pub(super) const MAX_ARRAY_DEPTH: usize = 4;

/// The type of a metadata value, with the ids of the GGUF specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// Unsigned 8-bit integer (0).
    U8,
    /// Signed 8-bit integer (1).
    I8,
    /// Unsigned 16-bit integer (2).
    U16,
    /// Signed 16-bit integer (3).
    I16,
    /// Unsigned 32-bit integer (4).
    U32,
    /// Signed 32-bit integer (5).
    I32,
    /// IEEE 754 binary32 (6).
    F32,
    /// One byte, 0 or 1 (7).
    Bool,
    /// UTF-8 with a 64-bit length before it (8).
    String,
    /// Elements of one type, with their type and number before them (9).
    Array,
    /// Unsigned 64-bit integer (10).
    U64,
    /// Signed 64-bit integer (11).
    I64,
    /// IEEE 754 binary64 (12).
    F64,
}

const TYPES: [ValueType; 13] = [
    ValueType::U8,
    ValueType::I8,
    ValueType::U16,
    ValueType::I16,
    ValueType::U32,
    ValueType::I32,
    ValueType::F32,
    ValueType::Bool,
    ValueType::String,
    ValueType::Array,
    ValueType::U64,
    ValueType::I64,
    ValueType::F64,
];

impl ValueType {
    /// The type with this id.
    pub fn from_id(id: u32) -> Option<Self> {
        TYPES.get(usize::try_from(id).ok()?).copied()
    }

    /// The id of the GGUF specification.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Name as messages write it.
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }

    /// Encoded size where every value has the same.
    pub(super) const fn fixed_size(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }

    /// Smallest encoded size, against which a count is checked before memory is allocated for it.
    pub(super) const fn min_size(self) -> usize {
        match self {
            ValueType::String => 8,
            ValueType::Array => 12,
            _ => match self.fixed_size() {
                Some(size) => size,
                None => 1,
            },
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value, borrowed from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Unsigned 8-bit integer.
    U8(u8),
    /// Signed 8-bit integer.
    I8(i8),
    /// Unsigned 16-bit integer.
    U16(u16),
    /// Signed 16-bit integer.
    I16(i16),
    /// Unsigned 32-bit integer.
    U32(u32),
    /// Signed 32-bit integer.
    I32(i32),
    /// IEEE 754 binary32.
    F32(f32),
    /// Truth value.
    Bool(bool),
    /// Text.
    Str(&'a str),
    /// Elements of one type.
    Array(Array<'a>),
    /// Unsigned 64-bit integer.
    U64(u64),
    /// Signed 64-bit integer.
    I64(i64),
    /// IEEE 754 binary64.
    F64(f64),
}

impl<'a> Value<'a> {
    /// The type of this value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// Any integer type, widened.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(x) => x.into(),
            Value::I8(x) => x.into(),
            Value::U16(x) => x.into(),
            Value::I16(x) => x.into(),
            Value::U32(x) => x.into(),
            Value::I32(x) => x.into(),
            Value::U64(x) => x.into(),
            Value::I64(x) => x.into(),
            _ => return None,
        })
    }

    /// Appends the encoding of this value, without its type.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Value::U8(x) => out.push(x),
            Value::I8(x) => out.extend(x.to_le_bytes()),
            Value::U16(x) => out.extend(x.to_le_bytes()),
            Value::I16(x) => out.extend(x.to_le_bytes()),
            Value::U32(x) => out.extend(x.to_le_bytes()),
            Value::I32(x) => out.extend(x.to_le_bytes()),
            Value::F32(x) => out.extend(x.to_le_bytes()),
            Value::Bool(x) => out.push(u8::from(x)),
            Value::Str(x) => encode_str(x, out),
            Value::Array(x) => x.encode(out),
            Value::U64(x) => out.extend(x.to_le_bytes()),
            Value::I64(x) => out.extend(x.to_le_bytes()),
            Value::F64(x) => out.extend(x.to_le_bytes()),
        }
    }

    /// Splits one value of type `ty` off the front of `bytes`; `None` when it is not whole.
    pub(super) fn split(ty: ValueType, bytes: &'a [u8], depth: usize) -> Option<(Self, &'a [u8])> {
        fn le<const N: usize>(bytes: &[u8]) -> Option<([u8; N], &[u8])> {
            bytes
                .split_first_chunk::<N>()
                .map(|(head, rest)| (*head, rest))
        }
        macro_rules! number {
            ($variant:ident, $t:ty) => {{
                let (head, rest) = le(bytes)?;
                (Value::$variant(<$t>::from_le_bytes(head)), rest)
            }};
        }
        Some(match ty {
            ValueType::U8 => number!(U8, u8),
            ValueType::I8 => number!(I8, i8),
            ValueType::U16 => number!(U16, u16),
            ValueType::I16 => number!(I16, i16),
            ValueType::U32 => number!(U32, u32),
            ValueType::I32 => number!(I32, i32),
            ValueType::F32 => number!(F32, f32),
            ValueType::U64 => number!(U64, u64),
            ValueType::I64 => number!(I64, i64),
            ValueType::F64 => number!(F64, f64),
            ValueType::Bool => {
                let ([byte], rest) = le(bytes)?;
                (Value::Bool(byte != 0), rest)
            }
            ValueType::String => {
                let (len, rest) = le(bytes)?;
                let len = usize::try_from(u64::from_le_bytes(len)).ok()?;
                let (text, rest) = rest.split_at_checked(len)?;
                (Value::Str(std::str::from_utf8(text).ok()?), rest)
            }
            ValueType::Array => {
                let (elem, rest) = le(bytes)?;
                let (len, rest) = le(rest)?;
                let elem = ValueType::from_id(u32::from_le_bytes(elem))?;
                let len = usize::try_from(u64::from_le_bytes(len)).ok()?;
                let encoded = array_len(elem, len, rest, depth)?;
                let (bytes, rest) = rest.split_at_checked(encoded)?;
                (Value::Array(Array { elem, len, bytes }), rest)
            }
        })
    }
}

/// Encoded length of `len` elements of type `elem` at the front of `bytes`.
fn array_len(elem: ValueType, len: usize, bytes: &[u8], depth: usize) -> Option<usize> {
    if let Some(size) = elem.fixed_size() {
        return len.checked_mul(size);
    }
    let mut rest = bytes;
    for _ in 0..len {
        rest = match elem {
            ValueType::String => {
                let (head, tail) = rest.split_first_chunk::<8>()?;
                tail.get(usize::try_from(u64::from_le_bytes(*head)).ok()?..)?
            }
            _ => Value::split(elem, rest, depth.checked_sub(1)?)?.1,
        };
    }
    Some(bytes.len() - rest.len())
}

fn encode_str(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// How messages show what was found: the type, and the value where it is short.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Str(x) => write!(f, "string \"{}\"", crate::error::Shown(x)),
            Value::Array(x) => write!(f, "array of {} {}", x.len, x.elem),
            Value::Bool(x) => write!(f, "bool {x}"),
            Value::F32(x) => write!(f, "f32 {x}"),
            Value::F64(x) => write!(f, "f64 {x}"),
            other => match other.as_integer() {
                Some(x) => write!(f, "{} {x}", other.value_type()),
                None => write!(f, "{}", other.value_type()),
            },
        }
    }
}

/// An array of metadata values, still encoded.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(super) elem: ValueType,
    pub(super) len: usize,
    pub(super) bytes: &'a [u8],
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({} × {})", self.len, self.elem)
    }
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Type of every element.
    pub fn elem_type(&self) -> ValueType {
        self.elem
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let elem = self.elem;
        let mut rest = self.bytes;
        (0..self.len).map_while(move |_| {
            let (value, tail) = Value::split(elem, rest, MAX_ARRAY_DEPTH)?;
            rest = tail;
            Some(value)
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.elem.id().to_le_bytes());
        out.extend((self.len as u64).to_le_bytes());
        out.extend(self.bytes);
    }
}

/// An array being built for [`Writer::set`](super::Writer::set).
#[derive(Clone, Debug, PartialEq)]
pub struct ArrayBuf {
    elem: ValueType,
    len: usize,
    bytes: Vec<u8>,
}

impl ArrayBuf {
    /// An array of these strings.
    pub fn from_strs<'s>(texts: impl IntoIterator<Item = &'s str>) -> Self {
        Self::collect(ValueType::String, texts.into_iter().map(Value::Str))
    }

    /// An array of these numbers (any Rust type that is a GGUF number).
    pub fn from_numbers<T: Number>(numbers: impl IntoIterator<Item = T>) -> Self {
        Self::collect(T::TYPE, numbers.into_iter().map(Number::value))
    }

    /// An array of arrays.
    pub fn from_arrays<'s>(arrays: impl IntoIterator<Item = &'s ArrayBuf>) -> Self {
        Self::collect(ValueType::Array, arrays.into_iter().map(Value::from))
    }

    fn collect<'s>(elem: ValueType, values: impl Iterator<Item = Value<'s>>) -> Self {
        let mut buf = ArrayBuf {
            elem,
            len: 0,
            bytes: Vec::new(),
        };
        for value in values {
            value.encode(&mut buf.bytes);
            buf.len += 1;
        }
        buf
    }
}

impl<'a> From<&'a ArrayBuf> for Value<'a> {
    fn from(buf: &'a ArrayBuf) -> Self {
        Value::Array(Array {
            elem: buf.elem,
            len: buf.len,
            bytes: &buf.bytes,
        })
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(text: &'a str) -> Self {
        Value::Str(text)
    }
}

/// A Rust type with a number type (or bool) of GGUF.
pub trait Number: Sized + sealed::Sealed {
    /// The GGUF type.
    const TYPE: ValueType;
    /// As a metadata value.
    fn value(self) -> Value<'static>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! numbers {
    ($($t:ty => $v:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Number for $t {
            const TYPE: ValueType = ValueType::$v;
            fn value(self) -> Value<'static> {
                Value::$v(self)
            }
        }
        impl From<$t> for Value<'_> {
            fn from(x: $t) -> Self {
                Value::$v(x)
            }
        }
    )*};
}
numbers!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32,
    bool => Bool, u64 => U64, i64 => I64, f64 => F64);

/// A Rust type that a metadata value can be read as.
pub(super) trait FromValue<'a>: Sized {
    /// What messages say was expected.
    const EXPECTED: &'static str;
    /// The value, if its type and range fit.
    fn from_value(value: Value<'a>) -> Option<Self>;
}

macro_rules! integers {
    ($($t:ty => $expected:literal),* $(,)?) => {$(
        impl FromValue<'_> for $t {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: Value<'_>) -> Option<Self> {
                value.as_integer()?.try_into().ok()
            }
        }
    )*};
}
integers!(u32 => "an integer from 0 to 4294967295", u64 => "a non-negative integer",
    usize => "a non-negative integer", i32 => "a 32-bit signed integer");

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(x) => Some(x),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Str(x) => Some(x),
            _ => None,
        }
    }
}
