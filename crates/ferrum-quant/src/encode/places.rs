//! Where in a block's byte arrays the bits of code `i` lie.
//!
//! The inverse stands in `integers.rs`, in loops over runs of 32 that vectorise; a test in `pack.rs`
//! holds the two together.

/// A byte of an array and the lowest bit within it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) byte: usize,
    pub(super) shift: usize,
}

impl Place {
    /// Sets bits that are still zero.
    pub(super) fn put(self, bytes: &mut [u8], bits: u8) {
        bytes[self.byte] |= bits << self.shift;
    }
}

/// Four bits, sixteen bytes for each 32 codes: first the low halves, then the high ones.
pub(super) fn nibble_of_16(i: usize) -> Place {
    Place {
        byte: i / 32 * 16 + i % 16,
        shift: 4 * (i / 16 % 2),
    }
}

/// One bit in a word of 32, for each 32 codes.
pub(super) fn bit_of_word(i: usize) -> Place {
    Place {
        byte: i / 8,
        shift: i % 8,
    }
}

/// Four bits, 32 bytes for each 64 codes (Q4_K, Q5_K).
pub(super) fn nibble_of_32(i: usize) -> Place {
    Place {
        byte: i / 64 * 32 + i % 32,
        shift: 4 * (i / 32 % 2),
    }
}

/// Four bits, 64 bytes for each 128 codes (Q6_K).
pub(super) fn nibble_of_64(i: usize) -> Place {
    Place {
        byte: i / 128 * 64 + i % 64,
        shift: 4 * (i / 64 % 2),
    }
}

/// Two bits, 32 bytes for each 128 codes (Q2_K, Q3_K, the high bits of Q6_K).
pub(super) fn pair_of_32(i: usize) -> Place {
    Place {
        byte: i / 128 * 32 + i % 32,
        shift: 2 * (i / 32 % 4),
    }
}

/// One bit, 32 bytes for all 256 codes (the high bits of Q3_K and Q5_K).
pub(super) fn bit_of_32(i: usize) -> Place {
    Place {
        byte: i % 32,
        shift: i / 32,
    }
}
