//! The INT8 form of a KV cache: each row (one token, one KV head) has one symmetric scale.
//!
//! `scale = max |x| / 127`, `q = round(x / scale)`, `x ≈ scale · q`. The code −128 is never made,
//! so negation stays exact.

/// Encodes one row and returns its scale; an all-zero row has scale 0.
///
/// `codes` and `row` have the same length; with different lengths the shorter one counts. Ties
/// round to even. A row with a NaN keeps its other numbers and gets 0 for the NaN.
#[must_use = "the codes mean nothing without their scale"]
pub fn quantize_row(row: &[f32], codes: &mut [i8]) -> f32 {
    let scale = scale_of(row);
    for (code, &x) in codes.iter_mut().zip(row) {
        *code = encode(x, scale);
    }
    scale
}

/// The scale of a row; 0 for one of zeros.
pub fn scale_of(row: &[f32]) -> f32 {
    // f32::max ignores NaN.
    row.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0
}

/// The code of one number of a row.
#[inline(always)]
pub fn encode(x: f32, scale: f32) -> i8 {
    // Dividing, not multiplying by 1 / scale: that is infinite for a subnormal scale.
    let quotient = if scale > 0.0 { x / scale } else { 0.0 };
    quotient.round_ties_even().clamp(-127.0, 127.0) as i8
}

/// Decodes one row: `out[i] = scale · codes[i]`.
pub fn dequantize_row(codes: &[i8], scale: f32, out: &mut [f32]) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = scale * f32::from(code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn edge_rows() {
        let mut codes = [9; 4];
        assert_eq!(quantize_row(&[0.0, -0.0, 0.0, 0.0], &mut codes), 0.0);
        assert_eq!(codes, [0; 4]);
        assert_eq!(quantize_row(&[127.0, -127.0, 0.5, 1.5], &mut codes), 1.0);
        assert_eq!(codes, [127, -127, 0, 2]);
        assert_eq!(quantize_row(&[f32::NAN, 254.0, 2.0, -4.0], &mut codes), 2.0);
        assert_eq!(codes, [0, 127, 1, -2]);
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(row in prop::collection::vec(-1e4f32..1e4, 0..200)) {
            let mut codes = vec![0; row.len()];
            let scale = quantize_row(&row, &mut codes);
            let mut back = vec![0.0; row.len()];
            dequantize_row(&codes, scale, &mut back);
            for (x, y) in row.iter().zip(&back) {
                prop_assert!((x - y).abs() <= scale * 0.5001, "{x} became {y}, scale {scale}");
            }
        }

        #[test]
        fn any_bits_are_accepted(bits in prop::collection::vec(any::<u32>(), 0..40)) {
            let row: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let mut codes = vec![0; row.len()];
            let scale = quantize_row(&row, &mut codes);
            prop_assert!(scale >= 0.0 && codes.iter().all(|&q| q >= -127));
        }
    }
}
