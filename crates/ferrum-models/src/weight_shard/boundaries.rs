//! Where stored weights can be cut, by rows and by columns.

use ferrum_kernels::{PackQuantizedWeights, PackedZeros, QuantWeights};

/// Inputs of quantised weights whose activations devices round together.
const INPUTS_AT_ONCE: usize = 32;

/// Where a weight can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitPoints {
    /// Between packing units: elsewhere a slice has to be dequantised.
    pub(crate) units: usize,
    /// Between groups too: elsewhere groups become smaller, which kernels may not take.
    pub(crate) groups: usize,
}

impl Default for SplitPoints {
    /// Everywhere.
    fn default() -> Self {
        Self {
            units: 1,
            groups: 1,
        }
    }
}

impl SplitPoints {
    fn new(units: usize, group: usize, size: usize) -> Self {
        // A group as long as the row, or longer, is cut anyway, but not inside what devices take at once.
        let group = if group < size { group } else { INPUTS_AT_ONCE };
        Self {
            units,
            groups: lcm(units, group.max(1)),
        }
    }

    /// Where groups can be cut, but for an odd place: devices may take inputs by twos.
    pub(crate) fn even_groups(self) -> usize {
        lcm(self.groups, 2)
    }

    /// Where both can be cut.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            units: lcm(self.units, other.units),
            groups: lcm(self.groups, other.groups),
        }
    }
}

/// Where rows and columns of a weight with rows of `cols` numbers can be cut.
pub(crate) fn borders(weights: &QuantWeights<'_>, cols: usize) -> (SplitPoints, SplitPoints) {
    let unit = |units| SplitPoints {
        units,
        groups: units,
    };
    match weights {
        QuantWeights::Gguf(part) => (unit(1), unit(part.ty.block_len())),
        QuantWeights::Gptq(layer) => {
            let (codes, _) = gptq_unit(layer.bits);
            let group = run_length(layer.g_idx, layer.group_size);
            // Codes of fewer bits become codes of four, of which eight are packed together.
            let rows = SplitPoints {
                units: codes.min(8),
                groups: codes,
            };
            (rows, SplitPoints::new(codes, group, cols))
        }
        QuantWeights::Awq(layer) => (unit(8), SplitPoints::new(1, layer.group_size, cols)),
        QuantWeights::PackQuantized(layer) => {
            let codes = per_word(layer);
            let group = run_length(layer.g_idx, layer.group_size);
            let rows = match layer.zeros {
                PackedZeros::Words(_) => codes,
                PackedZeros::None | PackedZeros::Bytes(_) => 1,
            };
            (unit(rows), SplitPoints::new(codes, group, cols))
        }
        QuantWeights::Fp8(layer) => {
            let [rows, width] = layer.block;
            (
                SplitPoints::new(1, rows, layer.out_features),
                SplitPoints::new(1, width, cols),
            )
        }
    }
}

/// Of what borders between the inputs of a weight with rows of `cols` numbers are multiples if devices make of the parts what they
/// make of the whole; `None` where that is nowhere.
pub(crate) fn input_unit(weights: &QuantWeights<'_>, cols: usize) -> Option<usize> {
    // Devices may take inputs by twos.
    let is_even = cols.is_multiple_of(2);
    // Groups may be cut, but not between inputs that are rounded together.
    let in_groups = |units| lcm(units, INPUTS_AT_ONCE);
    let (_, columns) = borders(weights, cols);
    match weights {
        QuantWeights::Gptq(layer) => {
            let in_order = named_groups(layer.g_idx, layer.group_size).is_none();
            in_order.then_some(in_groups(columns.units))
        }
        QuantWeights::PackQuantized(layer) => {
            let in_order = named_groups(layer.g_idx, layer.group_size).is_none();
            in_order.then_some(in_groups(columns.units))
        }
        // No group of a slice may be shorter than the others.
        QuantWeights::Awq(_) if cols.is_multiple_of(INPUTS_AT_ONCE) => {
            Some(in_groups(columns.units))
        }
        QuantWeights::Gguf(_) | QuantWeights::Awq(_) | QuantWeights::Fp8(_) => {
            is_even.then_some(columns.even_groups())
        }
    }
}

/// i32 numbers of a file, none of which is negative.
pub(crate) fn numbers(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let number = |b: &[u8]| b.iter().rev().fold(0usize, |n, &b| n << 8 | usize::from(b));
    bytes.chunks_exact(4).map(number)
}

/// The groups that a layer names, where they are not just runs of `size` features: many writers always name them.
pub(crate) fn named_groups(g_idx: Option<&[u8]>, size: usize) -> Option<&[u8]> {
    let is_run = |(feature, group): (usize, usize)| feature / size.max(1) == group;
    g_idx.filter(|bytes| !numbers(bytes).enumerate().all(is_run))
}

/// Features that share a group as they lie; 1 where a layer names groups in another order.
pub(crate) fn run_length(g_idx: Option<&[u8]>, size: usize) -> usize {
    named_groups(g_idx, size).map_or(size, |_| 1)
}

/// Codes that are packed together, and the words that they take.
pub(crate) fn gptq_unit(bits: u32) -> (usize, usize) {
    match bits {
        3 => (32, 3),
        bits => (32 / bits.clamp(1, 32) as usize, 1),
    }
}

/// Codes in a word.
pub(crate) fn per_word(layer: &PackQuantizedWeights<'_>) -> usize {
    32 / layer.bits.clamp(1, 32) as usize
}

pub(crate) fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a.max(1),
        _ => gcd(b, a % b),
    }
}

/// The least common multiple; sizes of weights keep it small.
pub(crate) fn lcm(a: usize, b: usize) -> usize {
    (a / gcd(a, b)).saturating_mul(b).max(1)
}
