//! The one view of tensors that every container gives: name, shape, type and bytes.
//!
//! Loaders above this crate must not care whether a weight lies in a GGUF file or in one of forty
//! safetensors shards. Shapes are outermost first, so a weight matrix is `[rows, cols]` with each
//! row contiguous; GGUF writes the innermost dimension first, and its reader turns that round.

use crate::{FormatError, Result};
use ferrum_types::{Dtype, GgufQuantType};
use std::fmt;
use std::path::Path;

/// How a tensor's numbers are stored in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorDtype {
    /// One element after the other, little-endian.
    Plain(Dtype),
    /// Blocks of packed elements; rows are whole blocks.
    Quant(GgufQuantType),
    /// A type that safetensors can name but no buffer of Ferrum can hold (FP4, FP6, E8M0, …).
    /// It can be listed and copied, not computed with.
    Opaque {
        /// Name as the file format writes it.
        name: &'static str,
        /// Bits of one element.
        bits: u8,
    },
}

impl TensorDtype {
    /// The name used in messages and JSON (`bf16`, `Q4_K`).
    pub fn name(self) -> &'static str {
        match self {
            TensorDtype::Plain(d) => d.name(),
            TensorDtype::Quant(q) => q.name(),
            TensorDtype::Opaque { name, .. } => name,
        }
    }

    /// The plain element type, if it is one.
    pub const fn plain(self) -> Option<Dtype> {
        match self {
            TensorDtype::Plain(d) => Some(d),
            _ => None,
        }
    }

    /// The block type, if it is one.
    pub const fn quant(self) -> Option<GgufQuantType> {
        match self {
            TensorDtype::Quant(q) => Some(q),
            _ => None,
        }
    }

    /// Bytes of `elements` numbers, `None` when they are no whole number of blocks or bytes, or
    /// when the size overflows.
    pub fn bytes_for(self, elements: usize) -> Option<usize> {
        match self {
            TensorDtype::Plain(d) => elements.checked_mul(d.size()),
            TensorDtype::Quant(q) => q.bytes_for(elements),
            TensorDtype::Opaque { bits, .. } => {
                let total = elements.checked_mul(usize::from(bits))?;
                total.is_multiple_of(8).then_some(total / 8)
            }
        }
    }
}

impl From<GgufQuantType> for TensorDtype {
    /// ggml's unpacked types become [`TensorDtype::Plain`], all others [`TensorDtype::Quant`].
    fn from(q: GgufQuantType) -> Self {
        TensorDtype::Plain(match q {
            GgufQuantType::F64 => Dtype::F64,
            GgufQuantType::F32 => Dtype::F32,
            GgufQuantType::F16 => Dtype::F16,
            GgufQuantType::BF16 => Dtype::BF16,
            GgufQuantType::I64 => Dtype::I64,
            GgufQuantType::I32 => Dtype::I32,
            GgufQuantType::I16 => Dtype::I16,
            GgufQuantType::I8 => Dtype::I8,
            _ => return TensorDtype::Quant(q),
        })
    }
}

impl fmt::Display for TensorDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a file says about a tensor, without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Outermost dimension first (`[rows, cols]`); empty for a scalar.
    pub shape: Vec<usize>,
    /// Storage type.
    pub dtype: TensorDtype,
    /// Length in the file.
    pub byte_len: usize,
}

impl TensorInfo {
    /// Product of the shape (checked to fit when the file was opened).
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor's bytes, borrowed from the mapped file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Outermost dimension first (`[rows, cols]`); empty for a scalar.
    pub shape: &'a [usize],
    /// Storage type.
    pub dtype: TensorDtype,
    /// Exactly the bytes of `shape` elements of `dtype`. They need not be aligned for `dtype`.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// Product of the shape.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Anything that holds named tensors: a GGUF file or a set of safetensors files.
pub trait TensorSource {
    /// The tensor with this name.
    fn get(&self, name: &str) -> Option<TensorView<'_>>;

    /// Every tensor, in the order of the files.
    fn infos(&self) -> Box<dyn Iterator<Item = &TensorInfo> + '_>;

    /// The file or folder, for messages.
    fn path_hint(&self) -> &Path;

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`FormatError::MissingTensor`].
    fn require(&self, name: &str) -> Result<TensorView<'_>> {
        self.get(name).ok_or_else(|| FormatError::MissingTensor {
            path: self.path_hint().into(),
            tensor: name.to_owned(),
            hint: "".into(),
        })
    }

    /// Says that what was read so far has been copied, so that a mapped file's pages need not stay in
    /// memory beside the copy. Bytes that are read again come from the file again.
    fn release(&self);

    /// Bytes of all tensors together.
    fn total_bytes(&self) -> u64 {
        self.infos().map(|info| info.byte_len as u64).sum()
    }
}
