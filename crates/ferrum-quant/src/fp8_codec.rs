//! Eight-bit floats: E4M3 ("FN": no infinities) and E5M2.
//!
//! Source: the OCP 8-bit Floating Point Specification (OFP8) 1.0. Encoding saturates: a finite or
//! infinite number beyond the range becomes the largest finite one, which is what a KV cache wants
//! and what GPU conversion instructions do in their `satfinite` mode.

/// Largest E4M3 number.
pub const E4M3_MAX: f32 = 448.0;
/// Largest finite E5M2 number.
pub const E5M2_MAX: f32 = 57344.0;

/// Exact value of an E4M3 code; 0x7f and 0xff are NaN.
#[inline]
pub fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let value = if magnitude == 0x7f {
        f32::NAN
    } else if magnitude < 0x08 {
        // Subnormals: multiples of 2^-9.
        magnitude as f32 * (1.0 / 512.0)
    } else {
        f32::from_bits((magnitude << 20) + ((127 - 7) << 23))
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// Nearest E4M3 code, ties to even, saturating at ±448; NaN stays NaN.
#[inline]
pub fn e4m3_from_f32(x: f32) -> u8 {
    encode::<3, 7>(x, E4M3_MAX, 0x7f)
}

/// Exact value of an E5M2 code; 0x7c and 0xfc are infinities, beyond them NaN.
#[inline]
pub fn e5m2_to_f32(code: u8) -> f32 {
    // E5M2 is the upper byte of a binary16.
    crate::block::f16_bits_to_f32(u16::from(code) << 8)
}

/// Nearest E5M2 code, ties to even, saturating at ±57344; NaN stays NaN.
#[inline]
pub fn e5m2_from_f32(x: f32) -> u8 {
    encode::<2, 15>(x, E5M2_MAX, 0x7f)
}

/// Rounds to `MANTISSA` bits with exponent bias `BIAS`.
#[inline(always)]
fn encode<const MANTISSA: u32, const BIAS: u32>(x: f32, max: f32, nan: u8) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return sign | nan;
    }
    let bits = magnitude.min(max).to_bits();
    let smallest_normal = (128 - BIAS) << 23;
    let code = if bits < smallest_normal {
        // Multiples of 2^(1 - BIAS - MANTISSA). A sum with 2^23 times that step rounds to it, ties
        // to even; one that rounds up to the smallest normal gives that code by itself.
        let step = f32::from_bits((128 - BIAS - MANTISSA + 23) << 23);
        (f32::from_bits(bits) + step).to_bits() - step.to_bits()
    } else {
        // Round away the lower mantissa bits; a carry moves into the exponent, as it should.
        let drop = 23 - MANTISSA;
        let rounded = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1);
        (rounded >> drop) - ((127 - BIAS) << MANTISSA)
    };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_code_survives_the_way_back() {
        for code in 0..=u8::MAX {
            let (e4m3, e5m2) = (e4m3_to_f32(code), e5m2_to_f32(code));
            if !e4m3.is_nan() {
                assert_eq!(e4m3_from_f32(e4m3), code, "e4m3 {code:#04x}");
            }
            if e5m2.is_finite() {
                assert_eq!(e5m2_from_f32(e5m2), code, "e5m2 {code:#04x}");
            }
        }
    }

    #[test]
    fn saturates_and_keeps_nan() {
        for (x, e4m3, e5m2) in [
            (f32::INFINITY, 0x7e, 0x7b),
            (f32::NEG_INFINITY, 0xfe, 0xfb),
            (1e9, 0x7e, 0x7b),
            (-1e9, 0xfe, 0xfb),
            (449.0, 0x7e, 0x5f),
            (0.0, 0x00, 0x00),
            (-0.0, 0x80, 0x80),
            (f32::MIN_POSITIVE / 2.0, 0x00, 0x00),
        ] {
            assert_eq!(e4m3_from_f32(x), e4m3, "{x}");
            assert_eq!(e5m2_from_f32(x), e5m2, "{x}");
        }
        assert!(e4m3_to_f32(e4m3_from_f32(f32::NAN)).is_nan());
        assert!(e5m2_to_f32(e5m2_from_f32(f32::NAN)).is_nan());
    }

    /// Between two neighbouring codes the midpoint goes to the even one, its neighbours to theirs.
    #[test]
    fn rounds_to_nearest_even() {
        type Pair = (fn(u8) -> f32, fn(f32) -> u8, u8);
        let formats: [Pair; 2] = [
            (e4m3_to_f32, e4m3_from_f32, 0x7e),
            (e5m2_to_f32, e5m2_from_f32, 0x7b),
        ];
        for (decode, encode, max) in formats {
            for low in 0..max {
                let middle = (decode(low) + decode(low + 1)) / 2.0;
                assert_eq!(encode(middle), low + (low & 1), "{low:#04x}");
                assert_eq!(encode(middle.next_down()), low, "{low:#04x}");
                assert_eq!(encode(middle.next_up()), low + 1, "{low:#04x}");
            }
        }
    }
}
