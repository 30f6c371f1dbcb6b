//! The tensor types of GGUF files (ggml type ids), with their block sizes.
//!
//! Source: the GGUF specification and ggml's type table.

use std::fmt;

/// A ggml tensor type: how a row of numbers is stored in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)]
pub enum GgufQuantType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// 4 bit, one f16 scale.
    Q4_0,
    /// 4 bit, f16 scale and minimum.
    Q4_1,
    /// 5 bit, one f16 scale.
    Q5_0,
    /// 5 bit, f16 scale and minimum.
    Q5_1,
    /// 8 bit, one f16 scale.
    Q8_0,
    /// 8 bit, f16 scale and scaled sum.
    Q8_1,
    /// 2 bit super-block.
    Q2_K,
    /// 3 bit super-block.
    Q3_K,
    /// 4 bit super-block.
    Q4_K,
    /// 5 bit super-block.
    Q5_K,
    /// 6 bit super-block.
    Q6_K,
    /// 8 bit super-block, f32 scale.
    Q8_K,
    /// 2.06 bit codebook.
    IQ2_XXS,
    /// 2.31 bit codebook.
    IQ2_XS,
    /// 3.06 bit codebook.
    IQ3_XXS,
    /// 1.56 bit codebook.
    IQ1_S,
    /// 4 bit non-linear.
    IQ4_NL,
    /// 3.44 bit codebook.
    IQ3_S,
    /// 2.5 bit codebook.
    IQ2_S,
    /// 4.25 bit non-linear super-block.
    IQ4_XS,
    /// signed 8-bit integer.
    I8,
    /// signed 16-bit integer.
    I16,
    /// signed 32-bit integer.
    I32,
    /// signed 64-bit integer.
    I64,
    /// IEEE 754 binary64.
    F64,
    /// 1.75 bit codebook.
    IQ1_M,
    /// bfloat16.
    BF16,
    /// ternary, 1.69 bit.
    TQ1_0,
    /// ternary, 2.06 bit.
    TQ2_0,
    /// OCP microscaling FP4 (E2M1, E8M0 scale).
    MXFP4,
    /// FP4 (E2M1) with FP8 scales per 16.
    NVFP4,
    /// 1 bit, one f16 scale.
    Q1_0,
    /// 2 bit, one f16 scale per 64.
    Q2_0,
}

/// `(type, ggml id, elements per block, bytes per block, name)` for every type.
const TABLE: &[(GgufQuantType, u32, usize, usize, &str)] = &[
    (GgufQuantType::F32, 0, 1, 4, "F32"),
    (GgufQuantType::F16, 1, 1, 2, "F16"),
    (GgufQuantType::Q4_0, 2, 32, 18, "Q4_0"),
    (GgufQuantType::Q4_1, 3, 32, 20, "Q4_1"),
    (GgufQuantType::Q5_0, 6, 32, 22, "Q5_0"),
    (GgufQuantType::Q5_1, 7, 32, 24, "Q5_1"),
    (GgufQuantType::Q8_0, 8, 32, 34, "Q8_0"),
    (GgufQuantType::Q8_1, 9, 32, 36, "Q8_1"),
    (GgufQuantType::Q2_K, 10, 256, 84, "Q2_K"),
    (GgufQuantType::Q3_K, 11, 256, 110, "Q3_K"),
    (GgufQuantType::Q4_K, 12, 256, 144, "Q4_K"),
    (GgufQuantType::Q5_K, 13, 256, 176, "Q5_K"),
    (GgufQuantType::Q6_K, 14, 256, 210, "Q6_K"),
    (GgufQuantType::Q8_K, 15, 256, 292, "Q8_K"),
    (GgufQuantType::IQ2_XXS, 16, 256, 66, "IQ2_XXS"),
    (GgufQuantType::IQ2_XS, 17, 256, 74, "IQ2_XS"),
    (GgufQuantType::IQ3_XXS, 18, 256, 98, "IQ3_XXS"),
    (GgufQuantType::IQ1_S, 19, 256, 50, "IQ1_S"),
    (GgufQuantType::IQ4_NL, 20, 32, 18, "IQ4_NL"),
    (GgufQuantType::IQ3_S, 21, 256, 110, "IQ3_S"),
    (GgufQuantType::IQ2_S, 22, 256, 82, "IQ2_S"),
    (GgufQuantType::IQ4_XS, 23, 256, 136, "IQ4_XS"),
    (GgufQuantType::I8, 24, 1, 1, "I8"),
    (GgufQuantType::I16, 25, 1, 2, "I16"),
    (GgufQuantType::I32, 26, 1, 4, "I32"),
    (GgufQuantType::I64, 27, 1, 8, "I64"),
    (GgufQuantType::F64, 28, 1, 8, "F64"),
    (GgufQuantType::IQ1_M, 29, 256, 56, "IQ1_M"),
    (GgufQuantType::BF16, 30, 1, 2, "BF16"),
    (GgufQuantType::TQ1_0, 34, 256, 54, "TQ1_0"),
    (GgufQuantType::TQ2_0, 35, 256, 66, "TQ2_0"),
    (GgufQuantType::MXFP4, 39, 32, 17, "MXFP4"),
    (GgufQuantType::NVFP4, 40, 64, 36, "NVFP4"),
    (GgufQuantType::Q1_0, 41, 128, 18, "Q1_0"),
    (GgufQuantType::Q2_0, 42, 64, 18, "Q2_0"),
];

impl GgufQuantType {
    /// Every type, in the order of ggml ids.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (GgufQuantType, u32, usize, usize, &'static str) {
        &TABLE[self as usize]
    }

    /// The type with this ggml id; `None` for ids that are removed or unknown.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// The ggml id.
    pub fn id(self) -> u32 {
        self.row().1
    }

    /// Elements in one block; row lengths are multiples of it.
    pub fn block_len(self) -> usize {
        self.row().2
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// The name as ggml writes it (`Q4_K`, `F16`).
    pub fn name(self) -> &'static str {
        self.row().4
    }

    /// Whether elements are packed in blocks with shared scales.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of `elements` numbers stored in this type.
    ///
    /// `None` when `elements` is not a whole number of blocks or the size overflows.
    pub fn bytes_for(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for GgufQuantType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_enum_order() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i, "{}", row.4);
            assert_eq!(GgufQuantType::from_id(row.1), Some(row.0));
        }
    }

    #[test]
    fn bytes_for_checks_blocks_and_overflow() {
        assert_eq!(GgufQuantType::Q8_0.bytes_for(64), Some(68));
        assert_eq!(GgufQuantType::Q8_0.bytes_for(33), None);
        assert_eq!(GgufQuantType::F64.bytes_for(usize::MAX / 4), None);
    }
}
