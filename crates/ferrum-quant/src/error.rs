//! What can be wrong with packed bytes: always a length, a shape or an index, never a value of a
//! weight.

use ferrum_types::GgufQuantType;

/// Result with [`QuantError`].
pub type Result<T, E = QuantError> = std::result::Result<T, E>;

/// Why packed data cannot be read or made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The bytes are not a whole number of blocks.
    #[error("{ty}: found {found} bytes, expected a multiple of {block_bytes}")]
    PartialBlock {
        /// Type of the data.
        ty: GgufQuantType,
        /// Bytes found.
        found: usize,
        /// Bytes of one block.
        block_bytes: usize,
    },
    /// A row of floats is not a whole number of blocks.
    #[error("{ty}: found a row of {found} elements, expected a multiple of {block_len}")]
    RowLength {
        /// Type of the data.
        ty: GgufQuantType,
        /// Elements found.
        found: usize,
        /// Elements of one block.
        block_len: usize,
    },
    /// The two sides of a conversion do not have the same number of elements.
    #[error("{ty}: the {what} holds {found}, expected {expected}")]
    Length {
        /// Type of the data.
        ty: GgufQuantType,
        /// Which argument (`output`, `vector`, …).
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits the other argument.
        expected: usize,
    },
    /// A row number past the last row.
    #[error("{ty}: row {row} does not exist, the tensor has {rows} rows")]
    NoSuchRow {
        /// Type of the data.
        ty: GgufQuantType,
        /// Row asked for.
        row: usize,
        /// Rows there are.
        rows: usize,
    },
    /// There is no encoder for this type.
    #[error(
        "{ty}: no encoder for this type\nhint: floats, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 can be written"
    )]
    NoEncoder {
        /// Type asked for.
        ty: GgufQuantType,
    },
    /// A tensor of a quantised layer has not the size its layer's shape asks for.
    #[error("{format}: {tensor} has {found} bytes, expected {expected}")]
    TensorBytes {
        /// `gptq`, `awq`, `pack-quantized` or `fp8`.
        format: &'static str,
        /// Name of the tensor in the checkpoint (`qweight`, …).
        tensor: &'static str,
        /// Bytes found.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// A slice handed in beside a quantised layer has not the layer's size.
    #[error("{format}: {argument} has {found} elements, expected {expected}")]
    LayerLength {
        /// `gptq`, `awq`, `pack-quantized` or `fp8`.
        format: &'static str,
        /// Which argument (`output`, `codes`, …).
        argument: &'static str,
        /// Elements found.
        found: usize,
        /// Elements expected.
        expected: usize,
    },
    /// A parameter of a quantised layer is outside what the format allows.
    #[error("{format}: {what} is {found}, expected {expected}")]
    Parameter {
        /// `gptq`, `awq`, `pack-quantized` or `fp8`.
        format: &'static str,
        /// Name of the parameter (`bits`, `group_size`, …).
        what: &'static str,
        /// Value found.
        found: i64,
        /// What would be right, in words.
        expected: &'static str,
    },
    /// A size computed from a layer's shape does not fit in memory.
    #[error("{format}: {in_features} × {out_features} elements overflow the address space")]
    TooLarge {
        /// `gptq`, `awq`, `pack-quantized` or `fp8`.
        format: &'static str,
        /// Input features of the layer.
        in_features: usize,
        /// Output features of the layer.
        out_features: usize,
    },
    /// `g_idx` points at a group that does not exist.
    #[error("{format}: g_idx[{position}] is {found}, expected a group below {groups}")]
    GroupIndex {
        /// `gptq` or `pack-quantized`.
        format: &'static str,
        /// Which input feature.
        position: usize,
        /// Group number found.
        found: i32,
        /// Groups there are.
        groups: usize,
    },
}
