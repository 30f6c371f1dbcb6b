//! The formats of group schemes: bits of a code, length of a group, zero points.

use super::format::{BitPlanes, ByteCodes, F16Scales, FormatVisitor, GroupScales};
use ferrum_quant::affine::{GroupParams, PackedCodes};
use ferrum_quant::unpack::CodeValues;

/// Units that share a scale in the formats of long groups: a group has at least as many.
pub(super) const LONG_GROUP_UNITS: usize = 4;

/// Format of a packed layer of a group scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupFormat {
    /// Bits of a code: 2, 3, 4 or 8.
    pub(crate) bits: u32,
    /// Whether [`LONG_GROUP_UNITS`] units share a scale, or each has its own.
    pub(crate) long: bool,
    /// Whether zero points are stored; otherwise all are [`symmetric_zero`](Self::symmetric_zero).
    pub(crate) zeros: bool,
}

impl GroupFormat {
    /// The zero point of symmetric schemes: the middle of the codes.
    pub(super) fn symmetric_zero(self) -> u8 {
        1 << (self.bits - 1)
    }

    /// The numbers that codes stand for, less the zero point of symmetric schemes.
    pub(crate) fn values(self) -> CodeValues {
        match self.bits {
            8 => CodeValues::Signed,
            bits => CodeValues::Unsigned {
                bits,
                zero: self.symmetric_zero().into(),
            },
        }
    }

    /// Runs `work` with these formats; `None` for bits that are not packed.
    pub(crate) fn with<W: FormatVisitor>(self, work: W) -> Option<W::Output> {
        Some(match (self.bits, self.long, self.zeros) {
            // Rare enough not to have kernels without zero points.
            (2, false, _) => work.run(BitPlanes::<2, 2>, GroupScales::<1, true>),
            (2, true, _) => work.run(BitPlanes::<2, 2>, GroupScales::<LONG_GROUP_UNITS, true>),
            (3, false, _) => work.run(BitPlanes::<3, 4>, GroupScales::<1, true>),
            (3, true, _) => work.run(BitPlanes::<3, 4>, GroupScales::<LONG_GROUP_UNITS, true>),
            (4, false, false) => work.run(BitPlanes::<4, 8>, F16Scales::<false>),
            (4, false, true) => work.run(BitPlanes::<4, 8>, GroupScales::<1, true>),
            (4, true, false) => work.run(BitPlanes::<4, 8>, GroupScales::<LONG_GROUP_UNITS, false>),
            (4, true, true) => work.run(BitPlanes::<4, 8>, GroupScales::<LONG_GROUP_UNITS, true>),
            (8, false, false) => work.run(ByteCodes, F16Scales::<false>),
            (8, false, true) => work.run(ByteCodes, GroupScales::<1, true>),
            (8, true, false) => work.run(ByteCodes, GroupScales::<LONG_GROUP_UNITS, false>),
            (8, true, true) => work.run(ByteCodes, GroupScales::<LONG_GROUP_UNITS, true>),
            _ => return None,
        })
    }
}

/// The weight of a layer of a group scheme (GPTQ, AWQ, compressed-tensors) that can be packed.
pub struct GroupQuantWeight<'a> {
    pub(crate) affine: GroupParams,
    pub(crate) codes: PackedCodes<'a>,
    pub(super) form: GroupFormat,
    /// Input features in the order in which they are multiplied, where that is another than their own.
    pub(crate) order: Option<Vec<u32>>,
}

impl<'a> GroupQuantWeight<'a> {
    /// Its scales, zero points and groups.
    pub fn affine(&self) -> &GroupParams {
        &self.affine
    }

    /// Its codes.
    pub fn codes(&self) -> &PackedCodes<'a> {
        &self.codes
    }

    /// Input features in the order in which they are multiplied, where that is another than their own.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }
}
