// A float's bits as an unsigned key of the same order, and NaN as the key 0: a device may assume of floats that there
// is no NaN.

fn key_of(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return 0u;
    }
    // The two zeros are equal.
    if bits > 0x80000000u {
        return 0x80000000u - magnitude;
    }
    return 0x80000000u + magnitude;
}
